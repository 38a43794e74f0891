"""Logistic regression on frozen features, with the regularisation chosen on held-out rows: the linear probe.

The objective is scikit-learn's: C * sum of the cross-entropies + |W|^2 / 2, with an unpenalised bias. It is convex, so
torch on any device and scikit-learn reach the same optimum. The solver in torch is kept because scikit-learn 1.4 runs
on the CPU only, and newer versions run on a GPU only with an experimental switch that is set before they are imported.

``linear_predict`` and ``sklearn_predict`` are called by embeddings.py and classification.py; ``folds_of`` also divides
rows for monitors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, nll_loss

from hardneg.core.errors import optional
from hardneg.io.embeddings import EmbeddingRows, Labels

STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Values of C, the inverse of the L2 penalty, to choose from; the strongest penalty first."""

FOLDS, MAX_CROSS_VALIDATED, MAX_ROWS = 5, 5_000, 10_000
"""C is chosen on at most ``MAX_ROWS`` rows with a fifth held out; up to ``MAX_CROSS_VALIDATED``, each fifth in turn."""

DEFAULT_STRENGTH = 1.0
"""C where there are too few rows of two classes to hold any out: scikit-learn's default."""

LogProbabilities = Annotated[Tensor, "n c"]
Fit = Callable[[EmbeddingRows, Labels, float], Callable[[EmbeddingRows], LogProbabilities]]
"""(features, labels, C) -> a function of other rows that returns the log-probabilities of their classes."""


def linear_predict(
    train_x: EmbeddingRows,
    train_y: Labels,
    test_x: EmbeddingRows,
    *,
    strengths: tuple[float, ...] = STRENGTHS,
    seed: int = 0,
) -> Labels:
    """Predict labels by logistic regression on standardised features, fitted by L-BFGS in torch.

    The best of ``strengths`` on held-out train rows is refitted to all train rows.

    Args:
        train_x: Features [n, d] to fit.
        train_y: Their labels [n].
        test_x: Features [m, d] to classify.
        strengths: Values of C to choose from.
        seed: Seed of the held-out rows.

    Returns:
        Labels [m].
    """
    return _predicted(_fit_torch, train_x, train_y, test_x, strengths, seed)


def sklearn_predict(
    train_x: EmbeddingRows,
    train_y: Labels,
    test_x: EmbeddingRows,
    *,
    strengths: tuple[float, ...] = STRENGTHS,
    seed: int = 0,
) -> Labels:
    """Predict labels like ``linear_predict``, fitted by scikit-learn.

    Args:
        train_x: Features [n, d] to fit.
        train_y: Their labels [n].
        test_x: Features [m, d] to classify.
        strengths: Values of C to choose from.
        seed: Seed of the held-out rows.

    Returns:
        Labels [m].
    """
    LogisticRegression = optional("sklearn.linear_model", "sklearn_predict", extra="eval").LogisticRegression  # noqa: N806

    def fit(x: EmbeddingRows, y: Labels, strength: float) -> Callable[[EmbeddingRows], LogProbabilities]:
        model = LogisticRegression(C=strength, max_iter=5000).fit(x.cpu().numpy(), y.cpu().numpy())
        return lambda rows: torch.from_numpy(model.predict_proba(rows.cpu().numpy())).to(x).clamp_min(1e-30).log()

    return _predicted(fit, train_x, train_y, test_x, strengths, seed)


def standardised(train: EmbeddingRows, test: EmbeddingRows) -> tuple[Tensor, Tensor]:
    """Standardise both splits with the mean and standard deviation of the train split; constant features become 0.

    >>> standardised(torch.tensor([[0.0, 7.0], [2.0, 7.0]]), torch.tensor([[3.0, 7.0]]))[1].tolist()
    [[2.0, 0.0]]
    """
    mean, scale = feature_scale(train)
    return (train.float() - mean) / scale, (test.float() - mean) / scale


def feature_scale(train: EmbeddingRows) -> tuple[Annotated[Tensor, "d"], Annotated[Tensor, "d"]]:
    """Return mean and standard deviation of each feature over rows [n, d]; infinity for constant features."""
    std, mean = torch.std_mean(train.float(), dim=0, correction=0)
    return mean, torch.where(std > 1e-6 * (1.0 + mean.abs()), std, torch.inf)


def _predicted(
    fit: Fit, train_x: EmbeddingRows, train_y: Labels, test_x: EmbeddingRows, strengths: tuple[float, ...], seed: int
) -> Labels:
    train, test = standardised(train_x, test_x)
    classes, targets = torch.unique(train_y.to(train.device), return_inverse=True)
    strength = _chosen(fit, train, targets, strengths, seed)
    predicted: Tensor = classes[fit(train, targets, strength)(test).argmax(1)]
    return predicted


def _chosen(fit: Fit, x: EmbeddingRows, y: Labels, strengths: tuple[float, ...], seed: int) -> float:
    """Return the strength with the lowest cross-entropy on held-out rows.

    Cross-entropy instead of accuracy: the accuracies of two strengths differ by a handful of rows, so rounding errors
    of a solver would decide. With few rows, each fifth is held out in turn. Classes with fewer rows than folds are left
    out, because a held-out row could belong to a class that the other rows lack.
    """
    if len(strengths) == 1:
        return strengths[0]
    drawn = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))[:MAX_ROWS].to(y.device)
    x, y = x[drawn], y[drawn]
    common = torch.bincount(y)[y] >= FOLDS
    x, (classes, y) = x[common], torch.unique(y[common], return_inverse=True)
    if len(classes) < 2:
        return DEFAULT_STRENGTH
    fold = folds_of(y, FOLDS, seed)
    held_out = [fold == one for one in range(FOLDS if len(y) <= MAX_CROSS_VALIDATED else 1)]
    return min(strengths, key=lambda strength: sum(_loss(fit, x, y, rows, strength) for rows in held_out))


def _loss(fit: Fit, x: EmbeddingRows, y: Labels, held_out: Annotated[Tensor, "n"], strength: float) -> float:
    found = fit(x[~held_out], y[~held_out], strength)(x[held_out])
    return float(nll_loss(found.double(), y[held_out]))


def folds_of(y: Labels, number: int, seed: int) -> Annotated[Tensor, "n"]:
    """Assign each row to a fold, stratified by class.

    Args:
        y: Classes [n], counted from 0.
        number: Number of folds.
        seed: Seed of the assignment.

    Returns:
        The fold of each row, [n].

    Example:
        >>> folds_of(torch.tensor([0, 0, 1, 1]), 2, seed=0).tolist()  # each class in both folds
        [0, 1, 1, 0]
    """
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed)).to(y.device)
    grouped = order[y[order].argsort(stable=True)]  # by class, in random order within each
    fold = torch.empty_like(y)
    fold[grouped] = torch.arange(len(y), device=y.device) % number
    return fold


def _fit_torch(x: EmbeddingRows, y: Labels, strength: float) -> Callable[[EmbeddingRows], LogProbabilities]:
    """Fit by L-BFGS from zeros: starting from the weights of an earlier fit would leak rows that this one holds out.

    The gradient is written by hand: most fits have few rows, and autograd would take longer than the matrix products.
    """
    x = with_ones(x)
    weights = x.new_zeros(x.shape[1], int(y.max()) + 1)
    targets = torch.eye(weights.shape[1], dtype=x.dtype, device=x.device)[y]
    # scikit-learn has one weight vector for two classes: the difference of our two columns.
    penalty = (1.0 if weights.shape[1] == 2 else 0.5) / (strength * len(x))
    # The tolerance is scikit-learn's.
    optimizer = torch.optim.LBFGS([weights], max_iter=200, tolerance_grad=1e-4, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        log_probabilities = log_softmax(x @ weights, 1)
        weights.grad = x.T @ ((log_probabilities.exp() - targets) / len(x))
        weights.grad[:-1] += 2.0 * penalty * weights[:-1]
        return nll_loss(log_probabilities, y) + penalty * weights[:-1].square().sum()

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return lambda rows: log_softmax(with_ones(rows) @ weights, 1)


def with_ones(x: EmbeddingRows) -> Annotated[Tensor, "n d+1"]:
    """Append a column of ones, for the bias: [n, d] -> [n, d + 1]."""
    return torch.cat([x, x.new_ones(len(x), 1)], 1)
