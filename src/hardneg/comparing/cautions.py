"""Cautions about the accuracy of an arm: collapsed runs, missing negatives, warnings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hardneg.training.runs import Warned

MOST = 0.5
"""The share of anchors without a negative, or of clamped pairs, above which there is a caution; train warns alike."""


def cautions(
    arm: str,
    options: Mapping[str, Any],
    lasts: Sequence[Mapping[str, Any]],
    warned: Iterable[Warned] = (),
    collapsed: int = 0,
) -> list[str]:
    """Sentences on the arm by the means over its last records, one for each seed, and by what its runs warned of."""
    found: dict[str, str] = {}
    if collapsed:
        found["collapsed"] = (
            f"{arm}: {collapsed} of {len(lasts)} runs collapsed: all images have nearly the same features. Lower the "
            "learning rate or the temperature, or weaken the negatives."
        )
    empty, clamped = (_mean(last.get(name) for last in lasts) for name in ("empty", "clamped"))
    if empty > MOST and options.get("positives_in_denominator") != "all":  # there positives stand against each other
        found["empty"] = (
            f"{arm}: {empty:.0%} of the anchors had no negative in the last records, and taught nothing. Its accuracy "
            "shows little about its negatives: widen them, or use larger batches."
        )
    if clamped > MOST:
        found["clamped"] = (
            f"{arm}: {clamped:.0%} of its pairs were clamped in the last records, and their negatives pushed no more. "
            "Lower tau_plus or raise the temperature."
        )
    return [*found.values(), *(f"{arm}: {one.text}" for one in _once(warned) if one.kind not in found)]


def of_all(warned: Sequence[Sequence[Warned]]) -> tuple[list[str], list[list[Warned]]]:
    """What the runs of all arms warned of, such as of their data, once; and what is left for each arm."""
    shared = set.intersection(*(set(map(_kind, one)) for one in warned))
    left = [[one for one in of_arm if _kind(one) not in shared] for of_arm in warned]
    return [one.text for one in _once(one for one in warned[0] if _kind(one) in shared)], left


def _once(warned: Iterable[Warned]) -> list[Warned]:
    """The first of each kind: those of several seeds differ in their numbers only."""
    return list({_kind(one): one for one in reversed(list(warned))}.values())[::-1]


def _kind(one: Warned) -> str:
    return one.kind or one.text


def _mean(values: Iterable[Any]) -> float:
    there = [float(value) for value in values if value is not None]
    return sum(there) / len(there) if there else 0.0
