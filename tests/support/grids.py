"""Grids of test parameters of which `make test` runs a covering part, and `make test-all` everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest
import torch

Point = tuple[int, ...]


def grid(names: str, *values: Sequence[Any], strength: int = 2, indirect: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Parametrize a test with all combinations; those that the covering does not need are marked ``long``.

    Args:
        names: Names of the arguments, such as "name, dtype".
        values: The values of each argument.
        strength: 2 keeps every pair of values of two arguments, 1 every value.
        indirect: Arguments that are parameters of fixtures.
    """
    kept = covering([len(each) for each in values], strength)
    cases = [
        pytest.param(
            *(each[i] for each, i in zip(values, point, strict=True)),
            marks=() if point in kept else pytest.mark.long,
        )
        for point in product(*map(range, map(len, values)))
    ]
    return pytest.mark.parametrize(names.replace(" ", "").split(","), cases, ids=_id_of, indirect=indirect)


def covering(sizes: Sequence[int], strength: int) -> set[Point]:
    """Return points of a grid in which every choice of ``strength`` coordinates has every combination of values.

    They are chosen one by one: each adds as many new combinations as possible. Of those that add as many it is the
    first, or one with values that were seldom used, whichever way leads to fewer points.
    """
    return min((_chosen(sizes, strength, balanced) for balanced in (True, False)), key=len)


def _chosen(sizes: Sequence[int], strength: int, balanced: bool) -> set[Point]:
    points = product(*map(range, sizes))
    parts = {point: set(combinations(enumerate(point), strength)) for point in points}
    missing = set().union(*parts.values())
    used: Counter[tuple[int, int]] = Counter()
    chosen: set[Point] = set()
    while missing:
        best = min(parts, key=lambda p: (-len(missing & parts[p]), balanced and sum(used[at] for at in enumerate(p))))
        chosen.add(best)
        used.update(enumerate(best))
        missing -= parts[best]
    return chosen


def _id_of(value: Any) -> str | None:
    return str(value) if isinstance(value, torch.dtype) else None
