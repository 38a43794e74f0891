"""Sequential tests and bounds for the number of false negatives in a finite population, valid at every look.

A population of ``size`` pairs is judged in a uniformly random order; after n answers, s of them are false negatives.
The probability of one particular sequence of answers, if the population contains M false negatives, is

    f_M(n, s) = C(size - n, M - s) / C(size, M).

For each M a mixture of such sequences with fewer false negatives, divided by f_M, is a martingale with mean 1 if M is
true. By Ville's inequality it ever reaches 1 / error with probability at most ``error``, however often one looks and
whenever one stops. ``certified_after`` says when a level is certified, ``upper_bound`` and ``lower_bound`` invert the
tests, ``exact_upper`` and ``exact_lower`` are the binomial bounds of Clopper and Pearson for samples of a fixed size.
Everything is computed in log-space.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

ALTERNATIVES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75)
"""Alternatives of each test, as shares of the number that is tested; equally weighted. Small shares decide quickly if
there are hardly any false negatives, large ones find rates close below the level."""

Numbers = NDArray[np.float64]


@lru_cache(maxsize=4)
def _log_factorials(size: int) -> Numbers:
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, size + 1)))])


def log_binomial(n: ArrayLike, k: ArrayLike) -> Numbers:
    """Return log C(n, k), and -inf where there is no such choice.

    >>> np.exp(log_binomial([5, 5, 5], [2, 6, -1])).round(6).tolist()
    [10.0, 0.0, 0.0]
    """
    n, k = np.broadcast_arrays(np.asarray(n, dtype=np.int64), np.asarray(k, dtype=np.int64))
    # One table for all sizes up to a power of two, so that populations of similar size share it.
    table = _log_factorials(1 << max(int(n.max(initial=1)), 1).bit_length())
    possible = (k >= 0) & (k <= n) & (n >= 0)
    top, part = np.where(possible, n, 0), np.where(possible, k, 0)
    found = table[top] - table[part] - table[top - part]
    return np.where(possible, found, -np.inf)


def log_ratio(size: int, tested: ArrayLike, judged: ArrayLike, false: ArrayLike) -> Numbers:
    """Return the log of the likelihood ratio against ``tested`` false negatives in the population.

    Args:
        size: Number of pairs in the population.
        tested: Number of false negatives that is tested; any shape.
        judged: Number of answers n, which broadcasts with ``tested``.
        false: Number of false negatives s among them.

    Returns:
        The log-ratio; +inf where ``tested`` has become impossible because too few pairs are left, and -inf where
        more than ``tested`` were found.
    """
    tested, judged, false = (np.asarray(each, dtype=np.int64) for each in (tested, judged, false))
    tested, judged, false = np.broadcast_arrays(tested, judged, false)
    # An alternative between two whole numbers is a mixture of both, so that the ratio changes smoothly with ``tested``.
    others = np.minimum(tested[..., None] * np.array(ALTERNATIVES), np.maximum(tested[..., None] - 1, 0))
    whole = np.floor(others)
    share = np.stack([1 - (others - whole), others - whole])
    each = np.stack([whole, whole + 1]).astype(np.int64)
    left, more = (size - judged)[..., None], each - false[..., None]
    with np.errstate(divide="ignore"):
        terms = np.log(share) + log_binomial(left, more) - log_binomial(size, each)
        top = terms.max((0, -1))
        safe = np.where(np.isfinite(top), top, 0.0)
        mixture = safe + np.log(np.exp(terms - safe[..., None]).sum(0).mean(-1))
    null = log_binomial(size - judged, tested - false) - log_binomial(size, tested)
    ratio = np.where(np.isneginf(null), np.inf, mixture - np.where(np.isneginf(null), 0.0, null))
    return np.where(false > tested, -np.inf, np.where(tested == 0, np.where(false > 0, -np.inf, 0.0), ratio))


def most_allowed(size: int, level: float) -> int:
    """Return the largest number of false negatives that is a rate of at most ``level``.

    >>> most_allowed(2000, 0.05), most_allowed(10, 0.3)
    (100, 3)
    """
    return min(size, math.floor(level * size + 1e-9))


def certified_after(
    size: int, allowed: int, error: float, most: int = 5000
) -> Annotated[NDArray[np.int64], "allowed+1"]:
    """Return the number of answers that certify "at most ``allowed``", for 0, 1, 2, ... false negatives among them.

    A population is certified as soon as, for some s, its first ``certified_after(...)[s]`` answers contain at most s
    false negatives. The numbers increase with s and are at most ``size``.

    Args:
        size: Number of pairs in the population.
        allowed: Largest number of false negatives that is certified.
        error: Probability with which a population with more false negatives may be certified at any time.
        most: Largest number of false negatives for which the number of answers is returned.

    Example:
        >>> certified_after(2000, 100, 0.05)[:3].tolist()
        [76, 125, 161]
    """
    if allowed >= size:
        return np.zeros(1, dtype=np.int64)
    tested, threshold = allowed + 1, -math.log(error)
    false = np.arange(min(allowed, most) + 1)
    low, high = false.copy(), np.full(len(false), size)  # the ratio grows with n while s stays: bisect
    while bool((low < high).any()):
        middle = (low + high) // 2
        enough = log_ratio(size, tested, middle, false) >= threshold
        low, high = np.where(enough, low, middle + 1), np.where(enough, middle, high)
    return np.asarray(np.minimum(high, size), dtype=np.int64)


def upper_bound(size: int, answers: Sequence[int] | NDArray[Any], error: float) -> int:
    """Return the largest number of false negatives that no look at the answers has rejected.

    Args:
        size: Number of pairs in the population.
        answers: 1 for a false negative and 0 for a true one, in the order of the judging.
        error: Probability with which the population may contain more than the bound.

    Example:
        >>> upper_bound(1000, [0] * 100, 0.05), upper_bound(1000, [], 0.05), upper_bound(3, [0, 1, 0], 0.05)
        (37, 1000, 1)
    """
    found = np.asarray(answers, dtype=np.int64)
    judged, false = len(found), int(found.sum())
    if judged == size:
        return false
    # While no false negative appears the ratio grows, so it is largest just before each of them, and at the end.
    looks = [*(int(place) for place in np.flatnonzero(found)), judged]
    bound = size - (judged - false)
    for already, look in enumerate(looks):
        if look:
            bound = upper_bound_at(size, look, already, error, bound)
    return max(bound, false)


def upper_bound_at(size: int, judged: int, false: int, error: float, most: int) -> int:
    """Return the largest number of false negatives, of at most ``most``, that one look does not reject.

    Args:
        size: Number of pairs in the population.
        judged: Number of answers.
        false: Number of false negatives among them.
        error: Error of the test.
        most: Bound of earlier looks.
    """
    return _last(lambda m: log_ratio(size, m, judged, false) < -math.log(error), false, most)


def lower_bound(size: int, answers: Sequence[int] | NDArray[Any], error: float) -> int:
    """Return the smallest number of false negatives that no look at the answers has rejected.

    The ratio is that of a uniform prior over 0 ... size to its posterior, largest just after each false negative.

    Args:
        size: Number of pairs in the population.
        answers: 1 for a false negative and 0 for a true one, in the order of the judging.
        error: Probability with which the population may contain fewer than the bound.

    Example:
        >>> lower_bound(1000, [1] * 10, 0.05), lower_bound(1000, [0] * 10, 0.05)
        (586, 0)
    """
    found = np.asarray(answers, dtype=np.int64)
    bound = int(found.sum())
    if len(found) == size:
        return bound
    for already, place in enumerate(np.flatnonzero(found), 1):
        judged = int(place) + 1
        # The posterior has one peak, near the observed share, where the ratio is below 1.
        peak = min(max(bound, already * (size + 1) // judged), size - (judged - already))
        bound = -_last(lambda m: _log_prior_ratio(size, -m, judged, already) < -math.log(error), -peak, -bound)  # noqa: B023
    return bound


def _log_prior_ratio(size: int, number: NDArray[np.int64], judged: int, false: int) -> Numbers:
    """Return log(prior / posterior) of numbers of false negatives, for a uniform prior."""
    posterior = log_binomial(number, false) + log_binomial(size - number, judged - false)
    return np.asarray(log_binomial(size + 1, judged + 1) - math.log(size + 1) - posterior)


def _last(holds: Callable[[NDArray[np.int64]], NDArray[np.bool_]], low: int, high: int) -> int:
    """Return the largest number in [low, high] for which ``holds``, by a search that looks at 64 numbers at a time.

    It holds for ``low``, and at most for those up to the result.
    """
    while low < high:
        several = np.unique(np.linspace(low, high, num=min(64, high - low + 1)).astype(np.int64))
        place = int(np.flatnonzero(holds(several[1:])).max(initial=-1)) + 1
        low, high = (
            int(several[place]),
            int(several[place + 1]) - 1 if place + 1 < len(several) else int(several[place]),
        )
    return low


def exact_upper(found: int, sample: int, error: float) -> float:
    """Return Clopper and Pearson's upper bound of a share, for a sample whose size was fixed before.

    >>> round(exact_upper(0, 100, 0.05), 4), exact_upper(5, 5, 0.05)
    (0.0295, 1.0)
    """
    return 1.0 if found >= sample else 1.0 - exact_lower(sample - found, sample, error)


def exact_lower(found: int, sample: int, error: float) -> float:
    """Return Clopper and Pearson's lower bound of a share.

    >>> round(exact_lower(50, 50, 0.0125), 4), exact_lower(0, 50, 0.05)
    (0.9161, 0.0)
    """
    if found <= 0:
        return 0.0
    counts = np.arange(found, sample + 1)
    choices = log_binomial(sample, counts)
    low, high = 0.0, 1.0
    for _ in range(60):
        share = (low + high) / 2
        tail = np.exp(choices + counts * math.log(share) + _times(sample - counts, math.log1p(-share))).sum()
        low, high = (share, high) if tail < error else (low, share)
    return low


def _times(counts: NDArray[np.int64], logarithm: float) -> Numbers:
    """Return counts times a logarithm, with 0 times -inf = 0."""
    return np.where(counts == 0, 0.0, counts * logarithm)


def answers_needed(
    size: int, allowed: int, error: float, judged: int, false: int, rate: float = 0.0, looks: int = 4096
) -> int | None:
    """Return how many more answers certify a population if false negatives keep appearing at ``rate``.

    Args:
        size: Number of pairs in the population.
        allowed: Largest number of false negatives that is certified.
        error: Error of the test.
        judged: Number of answers so far.
        false: Number of false negatives among them.
        rate: Expected share of false negatives among the further answers.
        looks: Largest number of places that are tried; the result is rounded up to one of them.

    Returns:
        The number, or None if even the whole population would not be certified.
    """
    more = np.unique(np.linspace(0, size - judged, num=min(looks, size - judged + 1)).astype(np.int64))
    expected = false + np.ceil(rate * more - 1e-9).astype(np.int64)
    enough = (log_ratio(size, allowed + 1, judged + more, expected) >= -math.log(error)) & (expected <= allowed)
    return int(more[int(enough.argmax())]) if bool(enough.any()) else None


def agreement(votes: Sequence[Sequence[int]]) -> float:
    """Return Fleiss' kappa: how much more often people agree than by chance; Cohen's kappa uses their own margins.

    Args:
        votes: For each pair, the answers of the people who judged it. Pairs with fewer than two answers are left out,
            and pairs may have different numbers of answers.

    Returns:
        1 for perfect agreement, 0 for chance, NaN if no pair has two answers or all answers are the same.

    Example:
        >>> agreement([[1, 1], [0, 0], [1, 0], [0, 0]])
        0.466...
    """
    several = [each for each in votes if len(each) > 1]
    total = sum(map(len, several))
    if not total:
        return math.nan
    kinds = sorted({vote for each in several for vote in each})
    shares = [sum(each.count(kind) for each in map(list, several)) / total for kind in kinds]
    chance = sum(share**2 for share in shares)
    agreed = [
        sum(n * (n - 1) for n in (list(each).count(kind) for kind in kinds)) / (len(each) * (len(each) - 1))
        for each in several
    ]
    return (sum(agreed) / len(agreed) - chance) / (1 - chance) if chance < 1 else math.nan
