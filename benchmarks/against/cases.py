"""What a case is, and how one is measured; the cases register themselves here."""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

Work = Callable[[], Any]
"""One call of one side. Both sides of a case return comparable numbers (tensors, arrays or floats), or None."""
Both = Callable[[int], tuple[Work, Work | None]]
MIN_SECONDS = 0.1
"""Processor seconds for which a side is repeated in each round."""
LONG = 8.0
"""Seconds of a first round that count, although it is not warmed up."""


class Case(NamedTuple):
    """One comparison.

    Attributes:
        both: Function of the size that returns our work and the peer's (None without a peer).
        peer: What we are compared with.
        goal: Largest ratio ours / theirs that is wanted, at the sizes of ``at``; None for no goal.
        sizes: The sizes, in ``unit``.
        unit: What a size counts.
        needs: Modules of the peer; without them, the case is skipped.
        growth: Largest exponent of our time in the size that the work needs; None for no limit.
        seconds: Most seconds that our side may take at the sizes of ``at``; None for no limit.
        at: Sizes that the goal is about; by default all.
        more: Larger sizes, which are measured only if they are asked for.
    """

    both: Both
    peer: str = ""
    goal: float | None = None
    sizes: tuple[int, ...] = ()
    unit: str = "rows"
    needs: tuple[str, ...] = ()
    growth: float | None = None
    seconds: float | None = None
    at: tuple[int, ...] = ()
    more: tuple[int, ...] = ()


CASES: dict[str, Case] = {}


def case(name: str, peer: str = "", **fields: Any) -> Callable[[Both], Both]:
    """Register a case; the arguments are the fields of ``Case``."""

    def register(both: Both) -> Both:
        CASES[name] = Case(both, peer, **fields)
        return both

    return register


def measure(name: str, size: int, rounds: int, budget: float) -> dict[str, Any]:
    """Measure one size of a case: both sides in turn, in the other order in every second round.

    Args:
        name: Name of the case.
        size: The size.
        rounds: Largest number of rounds. One before them is not counted, unless it alone takes ``LONG`` seconds.
        budget: Clock seconds after which no further round begins.
    """
    begun, (ours, theirs) = time.perf_counter(), CASES[name].both(size)
    results: dict[str, Any] = {}
    found: dict[str, list[float]] = {"ours": [], "theirs": []}
    sides = [("ours", ours)] if theirs is None else [("ours", ours), ("theirs", theirs)]
    while len(found["ours"]) <= rounds:
        spent = time.perf_counter() - begun
        if found["ours"] and spent > (budget if len(found["ours"]) > 1 else LONG):
            break
        for side, work in sides[:: -1 if len(found["ours"]) % 2 else 1]:
            seconds, results[side] = _timed(work)
            found[side].append(seconds)
    counted = {side: each[1:] or each for side, each in found.items()}
    figure: dict[str, Any] = {"ours_s": statistics.median(counted["ours"]), "rounds": len(counted["ours"])}
    if theirs is not None:
        ratios = [one / other for one, other in zip(counted["ours"], counted["theirs"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        figure |= {"theirs_s": statistics.median(counted["theirs"]), "ratio": middle, "quartiles": [low, high]}
        if all(each is not None for each in results.values()):
            figure["difference"] = _difference(results["ours"], results["theirs"])
    return {name: _rounded(value) for name, value in figure.items()}


def summary(name: str, figures: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return what the figures of all sizes say: whether the goal is met, and how our time grows."""
    chosen, found = CASES[name], dict[str, Any]()
    aims = [each for size, each in figures.items() if not chosen.at or size in chosen.at]
    if aims and chosen.goal is not None:
        found["met"] = all(each["ratio"] <= chosen.goal for each in aims)
    if aims and chosen.seconds is not None:
        found["met"] = all(each["ours_s"] <= chosen.seconds for each in aims)
    if len(figures) > 2:
        x, y = (list(map(math.log, each)) for each in (figures, [one["ours_s"] for one in figures.values()]))
        upper = len(x) // 2  # where fixed costs matter less
        found["exponent"] = _rounded(statistics.linear_regression(x, y).slope)
        found["exponent_of_larger"] = _rounded(statistics.linear_regression(x[upper:], y[upper:]).slope)
        found["needed_exponent"] = chosen.growth
    return found


def _timed(work: Work) -> tuple[float, Any]:
    """Return the processor seconds of a call with its child processes, from calls of at least ``MIN_SECONDS``."""
    begun, calls, result = _processor_seconds(), 0, None
    while calls == 0 or _processor_seconds() - begun < MIN_SECONDS:
        result, calls = work(), calls + 1
    return (_processor_seconds() - begun) / calls, result


def _processor_seconds() -> float:
    used = [resource.getrusage(each) for each in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _difference(ours: Any, theirs: Any) -> float:
    """Return the largest difference of two results, relative to the largest number in each of their parts."""
    import torch

    if isinstance(ours, tuple):
        return max(_difference(*parts) for parts in zip(ours, theirs, strict=True))
    one, other = (torch.as_tensor(each).double() for each in (ours, theirs))
    return float((one - other).abs().max() / other.abs().max())


def _rounded(value: Any) -> Any:
    """Round floats to four digits."""
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
