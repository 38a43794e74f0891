"""How deep into a query's ranking an expression looks, so that no more scores are held than needed.

A factor that judges each candidate by itself, and a window of ranks counted from the top, decide
about the nearest m candidates without seeing the others. The m nearest are then enough, with an m
that follows from the expression. A ring counts all valid candidates, and a draw from all of them
needs them all: those see whole rows.

``reach_of`` is used by the finder, ``check_depth`` and ``check_lists`` by the checks before a job.
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
    """How many candidates an expression needs.

    Attributes:
        size: Number of nearest candidates that decide, after the leading factors; None for whole rows.
        num_leading: Number of factors at the beginning that judge each candidate by itself, before
            any rank. They may be applied during the search.
    """

    size: int | None
    num_leading: int


def reach_of(negatives: Negatives, k: int, draw: str) -> Reach:
    """Return the number of candidates that an expression needs, computed from k through its factors, last to first.

    Args:
        negatives: The expression.
        k: Number of negatives.
        draw: How they are drawn.

    Example:
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
    """Return how many nearest candidates each factor must see, and how many are wanted at the end; None means all.

    Args:
        negatives: The expression.
        k: Number of negatives.
        draw: How they are drawn.

    Example:
        >>> from hardneg.negatives import parse
        >>> depths_of(parse("OtherLabel() * Rank(0, 40) * Ring(0.5, 1.0)"), 3, "top")
        [None, 40, None, 3]
    """
    depths = [k if draw == "top" else None]
    for factor in reversed(negatives.factors):
        depths.append(factor.shown(depths[-1]))
    return depths[::-1]


def can_sweep(negatives: Negatives, draw: str) -> bool:
    """Return whether passes over all blocks can apply the expression if no fixed number of candidates is enough."""
    return draw != "categorical" and negatives.pointwise


def check_depth(negatives: Negatives, k: int, draw: str, kind: str, shards: int, *, listed: bool) -> None:
    """Raise if a corpus in shards, or FAISS, cannot evaluate the expression.

    Args:
        negatives: The expression.
        k: Number of negatives.
        draw: How they are drawn.
        kind: Kind of search.
        shards: Number of shards.
        listed: Whether candidates are lists of retrievers only.
    """
    is_whole = reach_of(negatives, k, draw).size is None and not listed
    if kind in ("flat", "ivf", "hnsw") and is_whole:
        raise ArgumentError(
            f"Search({kind!r})",
            "an expression that depends only on the nearest candidates",
            f"{negatives!r} with {written('mine', 'draw', draw)}",
            f"begin with Rank(0, stop) or use {written('mine', 'search', 'exact')}",
        )
    if shards <= 1 or (kind == "exact" and (not is_whole or can_sweep(negatives, draw))):
        return
    for factor in negatives.factors:
        if not factor.pointwise:
            raise not_pointwise(factor, "a corpus in shards")
    got = f"Search({kind!r}, shards={shards}) with draw={draw!r}"
    raise ArgumentError("mine", "an exact search with draw 'top' or 'gumbel' to use shards", got, "use shards=1")


def check_lists(who: str, negatives: Negatives, k: int, draw: str, candidates: int, retrievers: int, rows: int) -> None:
    """Raise if a window of ranks ends beyond the lists of all retrievers, but not beyond the corpus.

    A window without an end only has to begin inside the lists.

    Args:
        who: Owner of the option ``candidates`` in the error: "mine" or "Search".
        negatives: The expression.
        k: Number of negatives.
        draw: How they are drawn.
        candidates: Candidates of each retriever.
        retrievers: Number of retrievers.
        rows: Size of the corpus.
    """
    reach = reach_of(negatives, k, draw)
    needed = reach.size or reach_of(negatives, 1, "top").size
    if needed is None or reach.num_leading == len(negatives.factors) or min(needed, rows) <= retrievers * candidates:
        return
    enough = written(who, "candidates", -(-min(needed, rows) // retrievers))
    fix = f"use {f'search=Search({enough})' if who == 'Search' else enough}, or a window that ends earlier"
    what = f"the closest {needed:,} candidates of a query for {negatives!r}"
    raise argument_error(who, what, "candidates", candidates, fix)


def may_remove(factor: Negatives) -> bool:
    """Return whether a factor can remove candidates; True for one that is not known to keep them all."""
    return factor.removes or not factor.pointwise


def ends_here(factor: Negatives, scores: Scores, before: Tensor, after: Tensor) -> Tensor:
    """Mark queries for which no candidate beyond those at hand could pass this factor [b].

    That is so if a window of ranks is full, or if the lowest candidate already fails a lower bound
    on the score.

    Args:
        factor: The factor.
        scores: Scores of the candidates at hand.
        before: Candidates before the factor [b, m].
        after: Candidates after it [b, m].
    """
    most = factor.shown(None)
    if most is not None:
        return before.sum(1) >= most
    if factor.monotone:
        lowest = scores.candidates.masked_fill(~before, float("inf")).argmin(dim=1, keepdim=True)
        fails = before.any(1, keepdim=True) & ~after.gather(1, lowest)
        return fails[:, 0]
    return before.new_zeros(before.shape[0])
