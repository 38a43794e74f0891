"""Logistic regression on frozen features, with the regularisation chosen on held-out rows: the linear probe.

The objective is scikit-learn's: C * sum of the cross-entropies + |W|^2 / 2, the bias being free. It is convex, so torch
on any device and scikit-learn come to the same optimum.
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
"""Values of C, the inverse of the L2 penalty, that are tried; the strongest penalty first."""

FOLDS, FEW, MOST = 5, 5_000, 10_000
"""The strength is chosen on at most ``MOST`` rows, a fifth of them held out; each fifth in turn up to ``FEW`` rows."""

UNTRIED = 1.0
"""C where there are too few rows of two classes to hold any out: scikit-learn's default."""

LogProbabilities = Annotated[Tensor, "n c"]
Fit = Callable[[EmbeddingRows, Labels, float], Callable[[EmbeddingRows], LogProbabilities]]
"""(features, labels, C) -> the log-probabilities of the classes of other rows."""


def linear_predict(
    train_x: EmbeddingRows,
    train_y: Labels,
    test_x: EmbeddingRows,
    *,
    strengths: tuple[float, ...] = STRENGTHS,
    seed: int = 0,
) -> Labels:
    """The label that a logistic regression on standardised features gives to each test row; by L-BFGS in torch.

    The best of ``strengths`` on held-out train rows, drawn by ``seed``, is fitted to all of them.
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
    """The same by scikit-learn."""
    LogisticRegression = optional("sklearn.linear_model", "sklearn_predict", extra="eval").LogisticRegression  # noqa: N806

    def fit(x: EmbeddingRows, y: Labels, strength: float) -> Callable[[EmbeddingRows], LogProbabilities]:
        model = LogisticRegression(C=strength, max_iter=5000).fit(x.cpu().numpy(), y.cpu().numpy())
        return lambda rows: torch.from_numpy(model.predict_proba(rows.cpu().numpy())).to(x).clamp_min(1e-30).log()

    return _predicted(fit, train_x, train_y, test_x, strengths, seed)


def standardised(train: EmbeddingRows, test: EmbeddingRows) -> tuple[Tensor, Tensor]:
    """Both splits with the mean and deviation of the train split; a constant feature becomes 0."""
    train, test = train.float(), test.float()
    std, mean = torch.std_mean(train, dim=0, correction=0)
    scale = torch.where(std > 1e-6 * (1.0 + mean.abs()), std, torch.inf)
    return (train - mean) / scale, (test - mean) / scale


def _predicted(
    fit: Fit, train_x: EmbeddingRows, train_y: Labels, test_x: EmbeddingRows, strengths: tuple[float, ...], seed: int
) -> Labels:
    train, test = standardised(train_x, test_x)
    classes, targets = torch.unique(train_y.to(train.device), return_inverse=True)
    strength = _chosen(fit, train, targets, strengths, seed)
    predicted: Tensor = classes[fit(train, targets, strength)(test).argmax(1)]
    return predicted


def _chosen(fit: Fit, x: EmbeddingRows, y: Labels, strengths: tuple[float, ...], seed: int) -> float:
    """The strength with the lowest cross-entropy on held-out rows.

    Not with the most right answers: those of two strengths differ by a handful of rows, and the last digits of a solver
    would decide. Of few rows every fifth is held out in turn. Classes with fewer rows than there are folds take no
    part: a held-out row could be of a class that the others lack.
    """
    if len(strengths) == 1:
        return strengths[0]
    drawn = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))[:MOST].to(y.device)
    x, y = x[drawn], y[drawn]
    common = torch.bincount(y)[y] >= FOLDS
    x, (classes, y) = x[common], torch.unique(y[common], return_inverse=True)
    if len(classes) < 2:
        return UNTRIED
    fold = folds_of(y, FOLDS, seed)
    held_out = [fold == one for one in range(FOLDS if len(y) <= FEW else 1)]
    return min(strengths, key=lambda strength: sum(_loss(fit, x, y, rows, strength) for rows in held_out))


def _loss(fit: Fit, x: EmbeddingRows, y: Labels, held_out: Annotated[Tensor, "n"], strength: float) -> float:
    found = fit(x[~held_out], y[~held_out], strength)(x[held_out])
    return float(nll_loss(found.double(), y[held_out]))


def folds_of(y: Labels, number: int, seed: int) -> Annotated[Tensor, "n"]:
    """Each row's fold, drawn by the seed, every fold with its share of every class; ``y`` counts the classes from 0."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed)).to(y.device)
    grouped = order[y[order].argsort(stable=True)]  # a class after the other, each as drawn
    fold = torch.empty_like(y)
    fold[grouped] = torch.arange(len(y), device=y.device) % number
    return fold


def _fit_torch(x: EmbeddingRows, y: Labels, strength: float) -> Callable[[EmbeddingRows], LogProbabilities]:
    """L-BFGS from zeros: weights of an earlier fit would bring in rows that this one holds out.

    The gradient is written out: most fits are of few rows, and autograd would take longer than their products.
    """
    x = with_ones(x)
    weights = x.new_zeros(x.shape[1], int(y.max()) + 1)
    targets = torch.eye(weights.shape[1], dtype=x.dtype, device=x.device)[y]
    # scikit-learn has one vector of weights for two classes: the difference of our two columns.
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
    """For the bias."""
    return torch.cat([x, x.new_ones(len(x), 1)], 1)
