"""How sure an accuracy, or the difference of two, is: intervals that count the seeds and the test items.

Whether item i is right in the run with seed s, or its part of a score that is a mean over items, is a two-way table
without replication: an effect of the run, one of the item, and a rest. The mean over the table estimates what other
seeds and other test items of the same kind would give; with S seeds and N items its variance is

    training / S  +  items / N,

training the variance between the means of runs (on these items), items the variance between the means of items less
what the rest adds to it. A difference of two arms has the table of the differences, item by item. The variance between
its runs is that of the differences of runs with the same seed; with few seeds it is mixed with that of runs which are
not paired, with weight (2 / (S - 1))^2. So three seeds have four degrees of freedom and not two, with which even a
difference of three standard errors would be missed more often than found; where a good seed is good for both arms, the
mixture errs on the side of no verdict. Both sources are added with Satterthwaite's degrees of freedom. What the
intervals hold is simulated in experiments/verdict_simulation.py, with its table in docs/explanation/verdict.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hardneg.io.embeddings import unpack_bits, unpack_numbers

MARGIN = 1.05
"""By which intervals are wider than Student's: for arms of unequal variance, and variables that are not normal."""
LEAST_SEEDS = 3
"""Fewer say too little about the variance between runs for any verdict."""


@dataclass(frozen=True, eq=False)
class Outcomes:
    """What the runs of one arm reached: the accuracy of each seed, and which test items each had right, if known.

    Of a score that is no accuracy, the parts of the items, whose mean it is.
    """

    accuracies: NDArray[np.float64]  # [seeds]
    correct: NDArray[np.float64] | None = None  # [seeds, items]
    num_test: int | None = None


@dataclass(frozen=True)
class MeanEstimate:
    """A mean, its standard error and the degrees of freedom of that."""

    value: float
    error: float
    freedom: float

    @property
    def half_width(self) -> float:
        """Half the 95 % interval."""
        return _quantile(self.freedom) * self.error

    @property
    def detectable(self) -> float:
        """The true difference that is found four times in five."""
        return detectable_errors(self.freedom) * self.error


def outcomes_of(results: Sequence[Mapping[str, Any]], metric: str) -> Outcomes:
    """Those of the results of an arm, one for each seed."""
    accuracies = np.array([float(result[metric]) for result in results])
    number = (results[0].get("num_items") or {}).get(metric, results[0].get("num_test"))
    if not number:
        return Outcomes(accuracies)
    found = [_per_item(result, metric, number) for result in results]
    table = [one for one in found if one is not None]
    return Outcomes(accuracies, np.array(table, float) if len(table) == len(results) else None, number)


def _per_item(result: Mapping[str, Any], metric: str, number: int) -> NDArray[Any] | None:
    right = unpack_bits((result.get("correct") or {}).get(metric), number)
    return unpack_numbers((result.get("scores") or {}).get(metric), number) if right is None else right


def mean_of(arm: Outcomes) -> MeanEstimate | None:
    """The accuracy of an arm; None with too few seeds."""
    if len(arm.accuracies) < LEAST_SEEDS:
        return None
    training = float(arm.accuracies.var(ddof=1))
    items, rest = _items([arm], arm.correct)
    return _estimate(arm, float(arm.accuracies.mean()), training, len(arm.accuracies) - 1.0, items, rest)


def difference_of(arm: Outcomes, against: Outcomes) -> MeanEstimate | None:
    """The accuracy of an arm less that of another with the same seeds and test items; None with too few seeds."""
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


def _items(arms: Sequence[Outcomes], table: NDArray[np.float64] | None) -> tuple[float, float]:
    """The variance between items, and that of the rest: what is left of a cell without its run and its item.

    If it is unknown which items were right, the arms count as if each had test items of its own, which is the most it
    can be; and the variance between runs is at least that of rounding to a whole number of items.
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
    seeds, number = len(arm.accuracies), arm.num_test
    if not number:
        return None
    of_items = items / number
    variance = max(training, rest / number) / seeds + of_items  # runs differ at least by the rest
    uncertain = (training / seeds) ** 2 / freedom + of_items**2 / max(1, number - 1)
    return MeanEstimate(value, sqrt(variance), variance**2 / uncertain if uncertain > 0.0 else inf)


@cache
def _quantile(freedom: float) -> float:
    from scipy.stats import t

    return MARGIN * float(t.ppf(0.975, freedom))


@cache
def detectable_errors(freedom: float, power: float = 0.8) -> float:
    """The true difference, in standard errors, that is beyond the interval with this power.

    With d the difference and s the estimated standard error over the true one, it is where
    |d + z| > q s, z standard normal: the normal probabilities are integrated over the chi distribution of s.
    """
    from scipy.integrate import quad
    from scipy.optimize import brentq
    from scipy.special import ndtr  # norm.cdf, much faster
    from scipy.stats import chi, norm

    if freedom > 1000.0:
        return _quantile(inf) + float(norm.ppf(power))
    least = _quantile(freedom) / freedom**0.5  # times a chi variable

    def seen(difference: float) -> float:
        def at(s: float) -> float:
            return float(chi.pdf(s, freedom) * (ndtr(difference - least * s) + ndtr(-difference - least * s)))

        low, high = float(chi.ppf(1e-12, freedom)), float(chi.isf(1e-12, freedom))
        return float(quad(at, low, high, limit=200)[0])

    return float(brentq(lambda difference: seen(difference) - power, 0.0, 100.0))
