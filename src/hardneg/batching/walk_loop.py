"""The inner loop of the walks: numba compiles it, plain Python runs it as it is, on arrays or memoryviews."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any


def walk_on(
    neighbours: Any,
    degrees: Any,
    cumulative: Any,
    seen: Any,
    taken: Any,
    found: Any,
    counts: Any,
    lengths: Any,
    draws: Any,
    work: Any,
) -> None:
    """Makes excursions of these lengths, one draw per move, and adds their new and free nodes to ``found``, in order.

    ``work`` begins with the start, the place of the first excursion, the number of the walk and the width of the table
    of neighbours. Behind that comes the path of all excursions, one after the other; then for each its node, its place
    in the path and its end there. ``degrees`` is empty where every row is full, which saves a look into memory.
    """
    start, number, width = work[0], work[2], work[3]
    lanes = len(lengths)
    nodes, places, ends = len(draws) + 4, len(draws) + 4 + lanes, len(draws) + 4 + 2 * lanes
    place = 4
    for i in range(lanes):
        work[nodes + i] = start
        work[places + i] = place
        place += lengths[i]
        work[ends + i] = place
    work[nodes] = work[1]
    alive = lanes
    while alive > 0:  # every excursion that has not ended moves once, in turns
        i = 0
        while i < alive:
            node, place = work[nodes + i], work[places + i]
            degree = width
            if len(degrees) > 0:
                degree = degrees[node]
            if degree == 0:  # nowhere to go: the excursion ends early, and stands at its start
                for rest in range(place, work[ends + i]):
                    work[rest] = start
                place = work[ends + i]
            else:
                first, u = node * width, draws[place - 4]
                if len(cumulative) > 0:
                    step, high = 0, degree - 1
                    target = u * cumulative[first + degree - 1]
                    while step < high:
                        middle = (step + high) // 2
                        if cumulative[first + middle] > target:
                            high = middle
                        else:
                            step = middle + 1
                else:
                    step = int(u * degree)
                node = neighbours[first + step]
                work[place] = node
                place += 1
            if place < work[ends + i]:
                work[nodes + i] = node
                work[places + i] = place
                i += 1
            else:  # the last excursion takes this one's turn
                alive -= 1
                work[nodes + i] = work[nodes + alive]
                work[places + i] = work[places + alive]
                work[ends + i] = work[ends + alive]
    count, stale = counts[0], counts[1]
    for place in range(4, len(draws) + 4):
        node = work[place]
        stale += 1
        if seen[node] != number:
            seen[node] = number
            if taken[node] == 0:
                found[count] = node
                count += 1
                stale = 0
                if count == len(found):
                    break
    counts[0] = count
    counts[1] = stale


@cache
def compiled_loop() -> Callable[..., None] | None:
    """The inner loop compiled by numba, or None where numba is not installed."""
    try:
        numba: Any = importlib.import_module("numba")
    except ImportError:
        return None
    compiled: Callable[..., None] = numba.njit(cache=True, nogil=True)(walk_on)
    return compiled
