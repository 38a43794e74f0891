"""Confidence intervals of an accuracy, and of the difference of two, over seeds and test items.

Read ``outcomes_of`` (from the results of runs), then ``mean_of`` and ``difference_of`` (the estimates), then ``holm``
(several differences at once); verdict.py calls them.

Whether item i is right in the run with seed s (or its part of a score that is a mean over items) is a two-way table
without replication: an effect of the run, an effect of the item, and a residual. The mean over the table estimates what
other seeds and other test items of the same kind would give; with S seeds and N items its variance is

    training / S  +  items / N,

where training is the variance between the means of runs (on these items), and items the variance between the means of
items without the part that the residual contributes. The difference of two arms uses the table of their differences,
item by item. The variance between its runs is that of the differences of runs with the same seed; with few seeds it is
mixed with that of unpaired runs, with weight (2 / (S - 1))^2. So three seeds have four degrees of freedom instead of
two, with which even a difference of three standard errors would be missed more often than found. Where a good seed is
good for both arms, the mixture errs on the side of no verdict. Both sources are added with Satterthwaite's degrees of
freedom. The coverage of the intervals is simulated in experiments/verdict_simulation.py, with its table in
docs/explanation/verdict.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hardneg.io.embeddings import outcomes_in

MARGIN = 1.05
"""Factor by which intervals are wider than Student's, for unequal variances and variables that are not normal."""
SIGNIFICANCE = 0.05
"""Highest probability of a false verdict, in a whole family of differences."""
LEAST_SEEDS = 3
"""Minimum number of seeds for a verdict: fewer estimate the variance between runs too poorly."""


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Results of one arm, by seed and by test item.

    Attributes:
        accuracies: Score of each seed, shape [seeds].
        correct: Whether each seed had each item right, shape [seeds, items], or the item's part of a score that is a
            mean over items; None if that was not recorded.
        num_test: Number of test items, if known.
    """

    accuracies: NDArray[np.float64]
    correct: NDArray[np.float64] | None = None
    num_test: int | None = None


@dataclass(frozen=True)
class MeanEstimate:
    """An estimated mean with its uncertainty.

    Attributes:
        value: Estimated mean.
        error: Standard error of the mean.
        freedom: Degrees of freedom of the standard error.
    """

    value: float
    error: float
    freedom: float

    @property
    def half_width(self) -> float:
        """Half the width of the 95 % confidence interval."""
        return self.half_width_at(SIGNIFICANCE)

    def half_width_at(self, level: float) -> float:
        """Return half the width of the confidence interval that excludes 0 where the p-value is below ``level``."""
        return _quantile(self.freedom, level) * self.error

    @property
    def p_value(self) -> float:
        """Probability of a value at least this far from 0 if the true value is 0; 0.05 at the end of the interval."""
        from scipy.stats import t

        if self.error == 0.0:
            return float(self.value == 0.0)
        return 2.0 * float(t.sf(abs(self.value) / (MARGIN * self.error), self.freedom))

    @property
    def detectable(self) -> float:
        """True difference that a comparison like this one detects with a probability of 80 %."""
        return detectable_errors(self.freedom) * self.error


def outcomes_of(results: Sequence[Mapping[str, Any]], metric: str) -> Outcomes:
    """Collect the outcomes of an arm from the results of its runs.

    Args:
        results: Contents of result.json for each seed.
        metric: Name of the score that decides.
    """
    accuracies = np.array([float(result[metric]) for result in results])
    number = (results[0].get("num_items") or {}).get(metric, results[0].get("num_test"))
    if not number:
        return Outcomes(accuracies)
    found = [outcomes_in(result, metric, number) for result in results]
    table = [one for one in found if one is not None]
    return Outcomes(accuracies, np.array(table, float) if len(table) == len(results) else None, number)


def mean_of(arm: Outcomes) -> MeanEstimate | None:
    """Estimate the mean accuracy of an arm over further seeds and test items; None with too few seeds.

    Example:
        >>> mean_of(Outcomes(np.array([0.80, 0.82, 0.84]), num_test=1000)).value.__round__(2)
        0.82
    """
    if len(arm.accuracies) < LEAST_SEEDS:
        return None
    training = float(arm.accuracies.var(ddof=1))
    items, rest = _items([arm], arm.correct)
    return _estimate(arm, float(arm.accuracies.mean()), training, len(arm.accuracies) - 1.0, items, rest)


def difference_of(arm: Outcomes, against: Outcomes) -> MeanEstimate | None:
    """Estimate the difference in accuracy between two arms with the same seeds and test items.

    Args:
        arm: Outcomes of the arm.
        against: Outcomes of the arm to subtract.

    Returns:
        Estimate of arm - against; None with too few seeds, or if the number of test items is unknown.

    Example:
        >>> arm, against = Outcomes(np.array([0.9, 0.91, 0.92]), num_test=9000), Outcomes(np.array([0.8, 0.81, 0.82]))
        >>> found = difference_of(arm, against)
        >>> abs(found.value - 0.1) < 1e-9, found.value > found.half_width
        (True, True)
    """
    seeds = len(arm.accuracies)
    if seeds < LEAST_SEEDS:
        return None
    unpaired = (2.0 / (seeds - 1)) ** 2
    differences = arm.accuracies - against.accuracies
    alone = float(arm.accuracies.var(ddof=1) + against.accuracies.var(ddof=1))
    training = (1.0 - unpaired) * float(differences.var(ddof=1)) + unpaired * alone
    # Assumes equal variances, estimated independently from the paired and from the summed runs.
    freedom = (seeds - 1) / ((1.0 - unpaired / 2.0) ** 2 + (unpaired / 2.0) ** 2)
    known = arm.correct is not None and against.correct is not None and arm.correct.shape == against.correct.shape
    table = arm.correct - against.correct if known else None  # type: ignore[operator]
    items, rest = _items([arm, against], table)
    return _estimate(arm, float(differences.mean()), training, freedom, items, rest)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for multiple comparisons (Holm, 1979), so that at most 5 % of families have a false positive.

    The smallest of m p-values is multiplied by m, the next one by m - 1, and so on; none becomes smaller than the one
    before it. This holds under any dependence between the differences, which all share one arm.

    Args:
        p_values: P-values of the differences, each on its own, uncorrected.

    Example:
        >>> [round(p, 3) for p in holm([0.04, 0.01, 0.02])]
        [0.04, 0.03, 0.04]
    """
    corrected, largest = [1.0] * len(p_values), 0.0
    for rank, at in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, (len(p_values) - rank) * p_values[at])
        corrected[at] = min(1.0, largest)
    return corrected


def holm_levels(p_values: Sequence[float]) -> list[float]:
    """Return the level at which Holm's method tests each difference: it is significant if its p-value is below that.

    The differences that are not significant are all tested at the level of the first of them.

    Example:
        >>> [round(level, 4) for level in holm_levels([0.04, 0.001, 0.03])]
        [0.025, 0.0167, 0.025]
    """
    significant = sorted(p for p, corrected in zip(p_values, holm(p_values), strict=True) if corrected <= SIGNIFICANCE)
    ranks = [significant.index(p) if p in significant else len(significant) for p in p_values]
    return [SIGNIFICANCE / (len(p_values) - rank) for rank in ranks]


def _items(arms: Sequence[Outcomes], table: NDArray[np.float64] | None) -> tuple[float, float]:
    """Return the variance between items, and the residual variance after the effects of run and item.

    If it is unknown which items were right, each arm counts as if it had its own test items, which is an upper
    bound; and the variance between runs is at least that of rounding to a whole number of items.
    """
    number = arms[0].num_test or 0
    if table is None or number < 2:
        most = sum(float((arm.accuracies * (1.0 - arm.accuracies)).mean()) for arm in arms)
        return most, len(arms) / (12.0 * number) if number else 0.0
    by_item, by_run = table.mean(axis=0), table.mean(axis=1)
    left = table - by_item - by_run[:, None] + by_run.mean()
    rest = float((left**2).sum()) / ((len(by_run) - 1) * (number - 1))
    return max(0.0, float(by_item.var(ddof=1)) - rest / len(by_run)), rest


def _estimate(
    arm: Outcomes, value: float, training: float, freedom: float, items: float, rest: float
) -> MeanEstimate | None:
    """Add both sources of variance, with Satterthwaite's degrees of freedom; None without a number of items."""
    seeds, number = len(arm.accuracies), arm.num_test
    if not number:
        return None
    of_items = items / number
    variance = max(training, rest / number) / seeds + of_items  # runs differ at least by the residual
    uncertain = (training / seeds) ** 2 / freedom + of_items**2 / max(1, number - 1)
    return MeanEstimate(value, sqrt(variance), variance**2 / uncertain if uncertain > 0.0 else inf)


@cache
def _quantile(freedom: float, level: float = SIGNIFICANCE) -> float:
    """Return the widened quantile of Student's t that is exceeded with probability ``level`` on both sides."""
    from scipy.stats import t

    return MARGIN * float(t.isf(level / 2.0, freedom))


@cache
def detectable_errors(freedom: float, power: float = 0.8) -> float:
    """Return the true difference, in standard errors, that is significant with probability ``power``.

    With d the difference and s the estimated standard error over the true one, a difference is significant where
    |d + z| > q s, z standard normal. The normal probabilities are integrated over the chi distribution of s.

    Args:
        freedom: Degrees of freedom of the standard error.
        power: Probability of a significant result.

    Example:
        >>> round(detectable_errors(1e6), 2)  # 1.05 x 1.96 + 0.84
        2.9
    """
    from scipy.optimize import brentq
    from scipy.special import ndtr  # norm.cdf, much faster
    from scipy.stats import chi, norm

    if freedom > 1000.0:
        return _quantile(inf) + float(norm.ppf(power))
    limits = _quantile(freedom) / freedom**0.5  # times a chi variable
    nodes, weights = np.polynomial.legendre.leggauss(200)
    low, high = float(chi.ppf(1e-12, freedom)), float(chi.isf(1e-12, freedom))
    x = (nodes + 1.0) / 2.0  # squared, since the density of few degrees of freedom is steep at 0
    s = low + (high - low) * x**2
    weights, limits = weights * chi.pdf(s, freedom) * (high - low) * x, limits * s

    def seen(difference: float) -> float:
        return float(weights @ (ndtr(difference - limits) + ndtr(-difference - limits)))

    return float(brentq(lambda difference: seen(difference) - power, 0.0, 100.0))
