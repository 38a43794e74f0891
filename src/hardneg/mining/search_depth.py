"""How deep into a query's ranking an expression looks, so that no whole row of scores is held where none is needed.

A factor that judges each candidate by itself, and a rank window counted from the top, decide about the nearest m
candidates without seeing the rest. Then the m nearest are enough, for an m that follows from the expression. A ring
counts all valid candidates, and a draw from all of them needs them all: those see whole rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hardneg.core.errors import ArgumentError, argument_error, written
from hardneg.core.types import Scores
from hardneg.negatives import Negatives
from hardneg.negatives.base import not_pointwise


@dataclass(frozen=True)
class Reach:
    """``size``: how many of the nearest candidates decide, after the leading filters; None is the whole row.

    The first ``num_leading`` factors judge each candidate by itself and come before any rank: they may be applied
    while searching.
    """

    size: int | None
    num_leading: int


def reach_of(negatives: Negatives, k: int, draw: str) -> Reach:
    """Walks back from the k wanted: what must each factor be shown, so that it passes on enough?

    >>> from hardneg.negatives import parse
    >>> reach_of(parse("BelowPositive(0.05) * Rank(10, 200)"), 5, "top").size
    15
    >>> reach_of(parse("BelowPositive(0.05) * Rank(10, 200)"), 5, "gumbel").size
    200
    """
    alone = [factor.pointwise and not factor.looks_around for factor in negatives.factors]
    num_leading = alone.index(False) if False in alone else len(alone)
    return Reach(depths_of(negatives, k, draw)[num_leading], num_leading)


def depths_of(negatives: Negatives, k: int, draw: str) -> list[int | None]:
    """How many of the nearest candidates each factor must see, and at the end how many are wanted; None is all.

    >>> from hardneg.negatives import parse
    >>> depths_of(parse("OtherLabel() * Rank(0, 40) * Ring(0.5, 1.0)"), 3, "top")
    [None, 40, None, 3]
    """
    depths = [k if draw == "top" else None]
    for factor in reversed(negatives.factors):
        depths.append(factor.shown(depths[-1]))
    return depths[::-1]


def can_sweep(negatives: Negatives, draw: str) -> bool:
    """Whether sweeps over blocks answer what no nearest candidates decide."""
    return draw != "categorical" and negatives.pointwise


def check_depth(negatives: Negatives, k: int, draw: str, kind: str, shards: int, *, listed: bool) -> None:
    """Raises for what a corpus in shards, or FAISS, cannot answer. ``listed``: lists of retrievers are all there is."""
    is_whole = reach_of(negatives, k, draw).size is None and not listed
    if kind in ("flat", "ivf", "hnsw") and is_whole:
        raise ArgumentError(
            f"Search({kind!r})",
            "an expression that the nearest candidates decide",
            f"{negatives!r} with {written('mine', 'draw', draw)}",
            f"begin with Rank(0, stop) or use {written('mine', 'search', 'exact')}",
        )
    if shards <= 1 or (kind == "exact" and (not is_whole or can_sweep(negatives, draw))):
        return
    for factor in negatives.factors:
        if not factor.pointwise:
            raise not_pointwise(factor, "a corpus in shards")
    got = f"Search({kind!r}, shards={shards}) with draw={draw!r}"
    raise ArgumentError("mine", "an exact search and draw 'top' or 'gumbel' for shards", got, "use shards=1")


def check_lists(who: str, negatives: Negatives, k: int, draw: str, candidates: int, retrievers: int, rows: int) -> None:
    """Raises where a window of ranks ends beyond the lists of all retrievers, but not beyond the corpus.

    A window without an end needs to begin inside the lists. ``who`` takes the candidates: "mine" or "Search".
    """
    reach = reach_of(negatives, k, draw)
    needed = reach.size or reach_of(negatives, 1, "top").size
    if needed is None or reach.num_leading == len(negatives.factors) or min(needed, rows) <= retrievers * candidates:
        return
    enough = written(who, "candidates", -(-min(needed, rows) // retrievers))
    fix = f"use {f'search=Search({enough})' if who == 'Search' else enough}, or a window that ends before"
    what = f"the closest {needed:,} candidates of a query for {negatives!r}"
    raise argument_error(who, what, "candidates", candidates, fix)


def may_remove(factor: Negatives) -> bool:
    """Whether a factor can take out candidates; any that is not known to keep them all."""
    return factor.removes or not factor.pointwise


def ends_here(factor: Negatives, scores: Scores, before: Tensor, after: Tensor) -> Tensor:
    """True for rows where nothing beyond the candidates at hand could pass this factor: [b].

    A rank window that is full, or a lower bound on the score that the lowest candidate already misses.
    """
    most = factor.shown(None)
    if most is not None:
        return before.sum(1) >= most
    if factor.monotone:
        lowest = scores.candidates.masked_fill(~before, float("inf")).argmin(dim=1, keepdim=True)
        fails = before.any(1, keepdim=True) & ~after.gather(1, lowest)
        return fails[:, 0]
    return before.new_zeros(before.shape[0])
