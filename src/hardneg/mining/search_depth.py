"""How deep into a query's ranking an expression looks, so that no whole row of scores is held where none is needed.

A factor that judges each candidate by itself, and a rank window counted from the top, decide about the nearest m
candidates without seeing the rest. Then the m nearest are enough, for an m that follows from the expression. A ring
counts all valid candidates, and a draw from all of them needs them all: those see whole rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hardneg.core.types import NEVER, Scores
from hardneg.negatives import ClippedTilt, Hardening, Negatives, Rank, Threshold, Tilt, Uniform


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
    factors = negatives.factors
    num_leading = next((i for i, factor in enumerate(factors) if factor.ranks), len(factors))
    size = k if draw == "top" else None
    for factor in reversed(factors[num_leading:]):
        size = _shown(factor, size)
    return Reach(size, num_leading)


def _shown(factor: Negatives, wanted: int | None) -> int | None:
    """How many of the nearest this factor must see to pass on the first ``wanted`` (None: all) of what it keeps."""
    if isinstance(factor, Rank):
        if factor.stop is None:
            return None if wanted is None else factor.start + wanted
        return factor.stop if wanted is None else min(factor.stop, factor.start + wanted)
    return None if may_remove(factor) else wanted


def may_remove(factor: Negatives) -> bool:
    """Whether a factor can take out candidates; any that is not known to keep them all."""
    return not isinstance(factor, (Uniform, Tilt, ClippedTilt))


def ends_here(factor: Negatives, scores: Scores, before: Tensor, after: Tensor) -> Tensor:
    """True for rows where nothing beyond the candidates at hand could pass this factor: [b].

    A rank window that is full, or a lower bound on the score that the lowest candidate already misses.
    """
    if isinstance(factor, Rank) and factor.stop is not None:
        return before.sum(1) >= factor.stop
    if isinstance(factor, (Threshold, Hardening)):
        lowest = scores.candidates.masked_fill(~before, float("inf")).argmin(dim=1, keepdim=True)
        fails = before.any(1, keepdim=True) & ~after.gather(1, lowest)
        return fails[:, 0]
    return before.new_zeros(before.shape[0])


def batch_dependent(negatives: Negatives) -> Negatives | None:
    """The factor, if any, whose weights depend on which other anchors are in the batch: mining has no batch."""
    return next((factor for factor in negatives.factors if isinstance(factor, ClippedTilt)), None)


def support(log_w: Tensor) -> Tensor:
    return log_w != NEVER
