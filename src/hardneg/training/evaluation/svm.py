"""Graph classification by a support vector machine with cross-validation, as graph papers report it.

    svm_accuracy(features, labels)        {"mean": 0.87, "deviation": 0.01, "repeats": [...], ...}

The 10 folds are stratified and redrawn in each repeat. For each fold, C is chosen from five values by 5-fold
cross-validation of the other nine, so that no test row influences it. The kernel is e^(-gamma |a - b|^2) of
standardised features with scikit-learn's gamma="scale"; it is computed once, which makes the hundreds of fits fast.
Some papers choose C by the test folds themselves, which gives higher figures. Folds and machines are scikit-learn's;
C is chosen by a loop, since ``GridSearchCV`` takes 1.1 (PROTEINS) to 1.7 times (MUTAG) the time for accuracies that
differ by at most 0.002.

Called by ``GraphData.evaluate`` (data/graphs.py) and the monitor ``svm``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, check_count, optional
from hardneg.io.arrays import Array
from hardneg.io.embeddings import EmbeddingRows, Labels

STRENGTHS, FOLDS = (0.01, 0.1, 1.0, 10.0, 100.0), 5
"""Values of C to choose from, and the number of folds by which one is chosen."""


def svm_accuracy(features: EmbeddingRows, labels: Labels, *, folds: int = 10, repeats: int = 1) -> dict[str, Any]:
    """Compute the mean accuracy over the folds, and its mean and standard deviation over repeated divisions into folds.

    Args:
        features: Features [n, d].
        labels: Labels [n].
        folds: Number of folds; at most the size of the smallest class is used.
        repeats: Number of divisions into folds, with seeds 0, 1, ...

    Returns:
        ``mean``, ``deviation`` (None for one repeat), ``repeats`` (each accuracy) and ``folds``.
    """
    repeats = check_count("svm_accuracy", "repeats", repeats)
    right = [svm_correct(features, labels, folds=folds, seed=i) for i in range(repeats)]
    accuracies = [float(one.double().mean()) for one in right]
    deviation = float(np.std(accuracies, ddof=1)) if repeats > 1 else None
    return {"mean": float(np.mean(accuracies)), "deviation": deviation, "repeats": accuracies, "folds": folds}


def svm_correct(features: EmbeddingRows, labels: Labels, *, folds: int = 10, seed: int = 0) -> Annotated[Tensor, "n"]:
    """Return whether each row is classified correctly by a model that was fitted to the other folds, [n].

    Args:
        features: Features [n, d].
        labels: Labels [n].
        folds: Number of folds.
        seed: Seed of the folds.
    """
    kernel, y = _kernel(features, features), labels.cpu().numpy()
    right = np.zeros(len(y), dtype=bool)
    for train, test in _divided(y, folds, seed):
        machine = _fitted(kernel[np.ix_(train, train)], y[train], seed)
        right[test] = machine.predict(kernel[np.ix_(test, train)]) == y[test]
    return torch.from_numpy(right)


def svm_predict(train_x: EmbeddingRows, train_y: Labels, test_x: EmbeddingRows, *, seed: int = 0) -> Labels:
    """Predict the label of each test row; C is chosen by cross-validation on the train rows.

    Args:
        train_x: Features [n, d] to fit.
        train_y: Their labels [n].
        test_x: Features [m, d] to classify.
        seed: Seed of the folds.

    Returns:
        Labels [m].
    """
    y = train_y.cpu().numpy()
    machine = _fitted(_kernel(train_x, train_x), y, seed)
    return torch.from_numpy(machine.predict(_kernel(test_x, train_x)))


def _fitted(kernel: Array, y: Array, seed: int) -> Any:
    """Fit with the C that is most accurate in cross-validation; ties go to the smallest."""
    SVC = optional("sklearn.svm", "svm", extra="eval").SVC  # noqa: N806

    def fitted(strength: float, rows: Array) -> Any:
        return SVC(C=strength, kernel="precomputed").fit(kernel[np.ix_(rows, rows)], y[rows])

    def num_right(strength: float) -> int:
        parts = _divided(y, FOLDS, seed)
        return sum(
            int((fitted(strength, train).predict(kernel[np.ix_(test, train)]) == y[test]).sum())
            for train, test in parts
        )

    few = np.unique(y, return_counts=True)[1].min() < 2  # no row of a one-row class can be held out
    return fitted(1.0 if few else max(STRENGTHS, key=num_right), np.arange(len(y)))


def _divided(y: Array, folds: int, seed: int) -> Iterable[tuple[Array, Array]]:
    """Return train and test rows of stratified folds, at most as many folds as the smallest class has rows."""
    StratifiedKFold = optional("sklearn.model_selection", "svm", extra="eval").StratifiedKFold  # noqa: N806
    classes, counts = np.unique(y, return_counts=True)
    if len(classes) < 2 or counts.min() < 2:
        got = dict(zip(classes.tolist(), counts.tolist(), strict=True))
        raise ArgumentError("svm", "at least two classes with at least two rows each", f"rows by class {got}")
    parts: Iterable[tuple[Array, Array]] = StratifiedKFold(
        min(folds, int(counts.min())), shuffle=True, random_state=seed
    ).split(y, y)
    return parts


def _kernel(rows: EmbeddingRows, train: EmbeddingRows) -> Array:
    """Compute the kernel of standardised rows; 1 / (number of varying features) is then scikit-learn's gamma."""
    rows, train = rows.double().cpu(), train.double().cpu()
    std, mean = torch.std_mean(train, dim=0, correction=0)
    varies = std > 1e-9 * (1.0 + mean.abs())
    a, b = ((part[:, varies] - mean[varies]) / std[varies] for part in (rows, train))
    return torch.exp(-torch.cdist(a, b).square() / max(1, int(varies.sum()))).numpy()
