"""The tests and bounds against exact enumeration: by dynamic programming over all orders of a population."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardneg.judging.statistics import (
    agreement,
    answers_needed,
    certified_after,
    exact_lower,
    exact_upper,
    log_binomial,
    log_ratio,
    lower_bound,
    most_allowed,
    upper_bound,
)


def ever(size: int, false: int, stops: np.ndarray) -> float:
    """The probability that a random order of ``false`` among ``size`` reaches a stop (n, s), by dynamic programming."""
    alive, stopped = np.zeros(false + 1), 0.0
    alive[0] = 1.0
    for judged in range(size):
        left = np.maximum(false - np.arange(false + 1), 0) / (size - judged)
        after = alive * (1 - left)
        after[1:] += (alive * left)[:-1]
        stopped += float(after[stops[judged + 1, : false + 1]].sum())
        alive = np.where(stops[judged + 1, : false + 1], 0.0, after)
    return stopped


def stops_of(size: int, allowed: int, error: float) -> np.ndarray:
    """Where certification stops the judging: [answers, false negatives]."""
    stops = np.zeros((size + 1, size + 2), dtype=bool)
    for false, judged in enumerate(certified_after(size, allowed, error)):
        stops[judged, : false + 1] = True
    return stops


@pytest.mark.parametrize(
    ("size", "level", "error"), [(60, 0.05, 0.05), (200, 0.1, 0.05), (2000, 0.05, 0.05), (500, 0.02, 0.01)]
)
def test_certifying_is_wrong_with_at_most_the_error(size: int, level: float, error: float) -> None:
    allowed = most_allowed(size, level)
    stops = stops_of(size, allowed, error)
    wrong = ever(size, allowed + 1, stops)
    assert 0.3 * error < wrong <= error
    assert ever(size, min(2 * allowed + 2, size), stops) < wrong  # worse populations are certified less often
    assert ever(size, allowed // 3, stops) > 0.9


def test_every_answer_sequence_of_a_small_population() -> None:
    """All orders of every population of 9: both bounds miss with at most their errors, at any look."""
    size, error = 9, 0.2
    for false in range(size + 1):
        above = below = 0
        places = list(itertools.combinations(range(size), false))
        for chosen in places:
            answers = [int(i in chosen) for i in range(size)]
            looks = range(size + 1)
            above += any(upper_bound(size, answers[:n], error) < false for n in looks)
            below += any(lower_bound(size, answers[:n], error) > false for n in looks)
        assert above <= error * len(places)
        assert below <= error * len(places)


@settings(deadline=None)
@given(st.integers(5, 400), st.floats(0.0, 0.6), st.integers(0, 2**31), st.floats(0.02, 0.9))
def test_a_bound_at_most_the_level_is_certified(size: int, rate: float, seed: int, level: float) -> None:
    answers = (np.random.default_rng(seed).random(size) < rate).astype(int)
    allowed, error = most_allowed(size, level), 0.05
    after = certified_after(size, allowed, error)
    assert bool((np.diff(after) >= 0).all())
    for judged in {0, 1, size // 3, size // 2, size - 1, size}:
        false = answers[:judged].cumsum()
        certified = allowed >= size or any(judged >= n and (n == 0 or false[n - 1] <= s) for s, n in enumerate(after))
        bound = upper_bound(size, answers[:judged], error)
        # The other way round it holds except in tiny populations, where two tests may cross: the design asks for both.
        assert certified or bound > allowed
        assert bound <= allowed or not certified or size < 100
        assert lower_bound(size, answers[:judged], error) <= bound
    assert upper_bound(size, answers, error) == lower_bound(size, answers, error) == answers.sum()


def test_bounds_look_at_all_prefixes() -> None:
    """The bound after n answers is the smallest of the bounds that each single look gives."""
    answers = (np.random.default_rng(3).random(300) < 0.06).astype(int)
    size, error = 900, 0.05
    singly = []
    for n in range(1, len(answers) + 1):
        every = np.arange(size + 1)
        kept = every[log_ratio(size, every, n, answers[:n].sum()) < -math.log(error)]
        singly.append(min(kept.max(), size - (n - answers[:n].sum())))
    for n in (1, 10, 77, 300):
        assert upper_bound(size, answers[:n], error) == min(singly[:n])


def test_log_ratio_is_that_of_plain_probabilities() -> None:
    size, tested, judged, false = 50, 10, 12, 1

    def sequence(number: float) -> float:
        if number != int(number):
            return (sequence(math.floor(number)) + sequence(math.ceil(number))) / 2
        number = int(number)
        return math.comb(size - judged, number - false) / math.comb(size, number) if number >= false else 0.0

    others = [0, 1, 2, 3, 4, 5, 6, 7.5]  # the last is half 7 and half 8
    expected = np.mean([sequence(number) for number in others]) / sequence(tested)
    assert float(log_ratio(size, tested, judged, false)) == pytest.approx(math.log(expected), abs=1e-12)
    assert float(log_ratio(size, tested, 45, 0)) == math.inf  # ten no longer fit
    assert float(log_ratio(size, tested, 20, 11)) == -math.inf


def test_large_populations_do_not_overflow() -> None:
    found = log_ratio(3_000_000, 150_001, np.array([60, 100_000]), np.array([0, 1000]))
    assert bool(np.isfinite(found).all())
    assert found[1] > 1000
    assert float(log_binomial(3_000_000, 1_500_000)) == pytest.approx(3_000_000 * math.log(2), rel=1e-5)


def test_exact_bounds_against_their_definition() -> None:
    """At the bound, the tail of the binomial distribution is the error."""
    for found, sample in ((1, 20), (7, 50), (49, 50)):
        for error in (0.05, 0.0125):
            low, high = exact_lower(found, sample, error), exact_upper(found, sample, error)
            tails = [
                sum(math.comb(sample, i) * p**i * (1 - p) ** (sample - i) for i in kept)
                for p, kept in ((low, range(found, sample + 1)), (high, range(found + 1)))
            ]
            assert tails == pytest.approx([error, error], rel=1e-6)
    assert exact_lower(0, 10, 0.05) == 0.0
    assert exact_upper(10, 10, 0.05) == 1.0


def test_answers_needed_is_when_the_test_certifies() -> None:
    size, allowed = 2000, 100
    after = certified_after(size, allowed, 0.05)
    assert answers_needed(size, allowed, 0.05, 0, 0) == after[0]
    assert answers_needed(size, allowed, 0.05, 50, 2) == after[2] - 50
    assert answers_needed(size, allowed, 0.05, 300, 101) is None
    assert answers_needed(size, allowed, 0.05, 100, 3, rate=0.06) is None or 0.06 * size < allowed


def test_agreement() -> None:
    """The worked example of Fleiss (1971) with ten subjects and fourteen raters, and simple cases."""
    table = [
        (0, 0, 0, 0, 14), (0, 2, 6, 4, 2), (0, 0, 3, 5, 6), (0, 3, 9, 2, 0), (2, 2, 8, 1, 1),
        (7, 7, 0, 0, 0), (3, 2, 6, 3, 0), (2, 5, 3, 2, 2), (6, 5, 2, 1, 0), (0, 2, 2, 3, 7),
    ]  # fmt: skip
    votes = [[kind for kind, count in enumerate(row) for _ in range(count)] for row in table]
    assert agreement(votes) == pytest.approx(0.210, abs=5e-4)
    assert agreement([[1, 1], [0, 0]]) == 1.0
    assert agreement([[1, 0], [0, 1]]) == -1.0
    assert math.isnan(agreement([[1], [0]]))
    assert math.isnan(agreement([[1, 1], [1, 1]]))
