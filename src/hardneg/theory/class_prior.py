"""Estimates of tau_plus, the probability that a random negative is of the anchor's class (DCL, HCL).

From a sample of labels, from judged pairs, or from the number of balanced classes. HCL takes tau_plus as known and
refers to class-prior estimation; with any labels or judgements it is a U-statistic or a proportion, with an interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, UnknownName, check_range
from hardneg.core.types import Given

BALANCED = {"cifar10": 10, "cifar100": 100, "stl10": 10, "tinyimagenet": 200, "imagenet100": 100}
"""Data sets whose classes have the same number of training items, with their number of classes."""


class ClassPrior(NamedTuple):
    """An estimate of tau_plus with its interval."""

    tau_plus: float
    low: float
    high: float


def tau_plus_of_labels(labels: Given, *, confidence: float = 0.95) -> ClassPrior:
    """Estimate tau_plus from a random sample of labels: the probability that two items have the same one.

    The estimate, sum n_c (n_c - 1) / (n (n - 1)), is unbiased. The interval is normal, with the variance of this
    U-statistic; its upper end is at least 1 / number of classes, the smallest possible value.

    Args:
        labels: Labels of n items drawn at random from the data, [n]. With weighted sampling pass the weighted sample.
        confidence: Coverage of the interval.

    Raises:
        ArgumentError: If there are fewer than two labels, or all are the same.

    Example:
        >>> tau_plus_of_labels(torch.arange(1000) % 10).tau_plus
        0.0990990990990991
    """
    check_confidence("tau_plus_of_labels", confidence)
    tags = torch.as_tensor(labels).flatten()
    n = len(tags)
    if n < 2:
        raise ArgumentError("tau_plus_of_labels", "at least two labels", str(n))
    counts = torch.unique(tags, return_counts=True)[1].double()  # type: ignore[no-untyped-call]
    if len(counts) == 1:
        fix = "label items of several classes, or pass tau_plus as a number"
        raise ArgumentError("tau_plus_of_labels", "labels of at least two classes", "one class", fix)
    estimate = float((counts * (counts - 1)).sum() / (n * (n - 1)))
    share = counts / n
    second, third = float(share.square().sum()), float((share**3).sum())
    variance = (4 * (n - 2) * max(0.0, third - second**2) + 2 * (second - second**2)) / (n * (n - 1))
    half = _quantile(confidence) * math.sqrt(variance)
    high = max(estimate + half, 1.0 / len(counts))  # no law of these classes has less
    return ClassPrior(estimate, max(0.0, estimate - half), min(1.0, high))


def tau_plus_of_pairs(
    pairs: Mapping[Any, Any] | Iterable[Any], *, weights: Given = None, confidence: float = 0.95
) -> ClassPrior:
    """Estimate tau_plus from judged pairs of an anchor and a random candidate: the share that is positive.

    The interval is Wilson's. Pairs of one anchor are not independent, so the number of pairs is reduced by the design
    effect of anchors that occur repeatedly.

    Args:
        pairs: A mapping from (anchor, candidate) to the answer, or an iterable of (anchor, candidate, answer) or
            ((anchor, candidate), answer). An answer is True, or a grade above 0, for a positive.
        weights: 1 / probability of each pair being judged, if pairs were not drawn uniformly.
        confidence: Coverage of the interval.

    Raises:
        ArgumentError: If there are no pairs, a row has another form, or weights do not match.

    Example:
        >>> found = tau_plus_of_pairs([(0, 5, True), (1, 8, False), (2, 3, False), (3, 9, False)])
        >>> found.tau_plus, round(found.low, 2), round(found.high, 2)
        (0.25, 0.05, 0.7)
    """
    who = "tau_plus_of_pairs"
    check_confidence(who, confidence)
    rows = [_judged(who, row) for row in (pairs.items() if isinstance(pairs, Mapping) else pairs)]
    if not rows:
        raise ArgumentError(who, "judged pairs", "none", "judge some random pairs first")
    weight = torch.ones(len(rows)).double() if weights is None else torch.as_tensor(weights).double()
    if weight.shape != (len(rows),) or bool((weight <= 0).any()):
        raise ArgumentError(who, f"{len(rows)} weights above 0", f"weights={tuple(weight.shape)}")
    answers = torch.tensor([float(answer) for _, answer in rows], dtype=torch.float64)
    estimate = float((weight * answers).sum() / weight.sum())
    number = _effective_number(rows, weight, answers, estimate)
    return ClassPrior(estimate, *_wilson(estimate, number, _quantile(confidence)))


def tau_plus_of_classes(classes: str | int) -> float:
    """Return tau_plus of balanced classes, 1 / number of classes.

    Args:
        classes: The number of classes, or the name of a data set whose classes are balanced.

    Raises:
        UnknownName: If the data set is not among those with balanced classes.

    Example:
        >>> tau_plus_of_classes("cifar10")
        0.1
    """
    if isinstance(classes, str):
        if classes not in BALANCED:
            raise UnknownName(classes, BALANCED, "Data sets with balanced classes: ")
        return 1.0 / BALANCED[classes]
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 2:
        raise ArgumentError("tau_plus_of_classes", "a number of classes of 2 or more", repr(classes))
    return 1.0 / classes


def check_confidence(who: str, confidence: float) -> None:
    """Raise ArgumentError unless 0 < confidence < 1."""
    check_range(who, "confidence", confidence, 1e-9, 1.0, open_high=True)


def _judged(who: str, row: Any) -> tuple[Any, bool]:
    """Return the anchor of a judged pair and whether it is positive."""
    try:
        first, *rest = row
        if len(rest) == 1:
            (anchor, _), (answer,) = first, rest
        else:
            anchor, (_, answer) = first, rest
        return anchor, bool(float(answer) > 0)
    except (TypeError, ValueError) as error:
        what = "rows (anchor, candidate, answer) or ((anchor, candidate), answer)"
        raise ArgumentError(who, what, repr(row)) from error


def _effective_number(rows: list[tuple[Any, bool]], weight: Tensor, answers: Tensor, estimate: float) -> float:
    """Return the number of independent pairs with the same information: Kish's for weights, by anchor for clusters."""
    number = float(weight.sum() ** 2 / weight.square().sum())
    residuals: dict[Any, float] = {}
    for (anchor, _), share, answer in zip(rows, weight.tolist(), answers.tolist(), strict=True):
        residuals[anchor] = residuals.get(anchor, 0.0) + share * (answer - estimate)
    clusters = len(residuals)
    if clusters == len(rows) or clusters < 2 or not 0.0 < estimate < 1.0:
        return min(number, clusters) if clusters < 2 else number
    spread = sum(each**2 for each in residuals.values()) * clusters / (clusters - 1)
    variance = spread / float(weight.sum()) ** 2
    return min(number, estimate * (1.0 - estimate) / variance) if variance > 0 else number


def _wilson(share: float, number: float, z: float) -> tuple[float, float]:
    centre = (share + z * z / (2 * number)) / (1 + z * z / number)
    half = z / (1 + z * z / number) * math.sqrt(share * (1 - share) / number + z * z / (4 * number * number))
    return max(0.0, centre - half), min(1.0, centre + half)


def _quantile(confidence: float) -> float:
    return NormalDist().inv_cdf(0.5 + confidence / 2.0)
