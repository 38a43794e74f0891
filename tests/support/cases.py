"""Chosen cases instead of all combinations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def all_pairs(*lists: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases of one value from each list, so that any two values of two lists meet in one of them.

    Most faults show where one or two values meet; the product of all lists has many times as many cases.
    """

    def pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(combinations(enumerate(case), 2))

    whole = {case: pairs(case) for case in product(*(range(len(values)) for values in lists))}
    missing, chosen = set().union(*whole.values()), []
    while missing:
        best = max(whole, key=lambda case: len(whole[case] & missing))
        missing -= whole.pop(best)
        chosen.append(tuple(values[i] for values, i in zip(lists, best, strict=True)))
    return chosen
