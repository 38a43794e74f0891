"""Excursions of random walks: all of them move at once, as numpy operations."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Whole = NDArray[np.int64]


class Tables(NamedTuple):
    """A graph as the walks read it: flat neighbours, their number in each row, and the running sums of their weights.

    ``degrees`` is empty where every row is full, ``cumulative`` where all neighbours are alike.
    """

    neighbours: Whole
    degrees: Whole
    cumulative: NDArray[np.float64]
    width: int


def paths(tables: Tables, begins: Whole, homes: Whole, lengths: Whole, draws: NDArray[np.float64]) -> Whole:
    """The nodes of excursions of these lengths, one draw per move, one excursion behind the other.

    Each begins at its own node; one that has nowhere to go stands at its home from then on.
    """
    order = np.argsort(-lengths, kind="stable")  # the longest first: those still on their way are the first ones
    first = (np.cumsum(lengths) - lengths)[order]
    alive = len(lengths) - np.cumsum(np.bincount(lengths))[: int(lengths.max())]  # how many make move 0, 1, ...
    ends = np.cumsum(alive)
    turn = np.repeat(np.arange(len(alive)), alive)
    places = first[np.arange(len(draws)) - np.repeat(ends - alive, alive)] + turn  # move by move
    path = np.empty(len(draws), dtype=np.int64)
    path[places] = _moves(tables, begins[order], homes[order], draws[places], ends.tolist())
    return path


def _moves(tables: Tables, at: Whole, home: Whole, draws: NDArray[np.float64], ends: list[int]) -> Whole:
    """All excursions that have not ended move once, again and again."""
    made, begin = np.empty(len(draws), dtype=np.int64), 0
    if not len(tables.degrees) and not len(tables.cumulative):
        step = (draws * tables.width).astype(np.int64)
        for end in ends:
            at = tables.neighbours.take(at[: end - begin] * tables.width + step[begin:end])
            made[begin:end], begin = at, end
        return made
    lost = np.zeros(len(at), dtype=bool)
    for end in ends:
        at, home, lost = at[: end - begin], home[: end - begin], lost[: end - begin]
        degree = tables.degrees[at] if len(tables.degrees) else np.full(len(at), tables.width)
        lost = lost | (degree == 0)
        step = _chosen(tables, at, degree, draws[begin:end])
        at = np.where(lost, home, tables.neighbours.take(at * tables.width + np.where(lost, 0, step)))
        made[begin:end], begin = at, end
    return made


def _chosen(tables: Tables, at: Whole, degree: Whole, draws: NDArray[np.float64]) -> Whole:
    """Which neighbour is next: uniform, or proportional to its weight."""
    if not len(tables.cumulative):
        return (draws * degree).astype(np.int64)
    sums = tables.cumulative.reshape(-1, tables.width)[at]
    last = np.maximum(degree - 1, 0)
    target = draws * np.take_along_axis(sums, last[:, None], 1)[:, 0]
    passed: Whole = ((sums <= target[:, None]) & (np.arange(tables.width) < last[:, None])).sum(1)
    return passed
