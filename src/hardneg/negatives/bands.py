"""Bands: a candidate is a negative if its score, its rank or its margin to the positive lies in a range.

Threshold: H-SCL(tau) (Jiang et al. 2024, sec. IV-A), eta(x) = 1[e^x >= tau]. Ring: Wu et al. 2021, sec. 4.
Rank and BelowPositive: what miners of text retrieval do, with the rules of sentence-transformers.

A NaN score is never dropped by a band, so that it stays visible in the loss: all comparisons ask who is outside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hardneg.negatives.base import Negatives, keep
from hardneg.notices import argument_error, check_range
from hardneg.schedules import Number
from hardneg.types import NEVER, LogWeights, Scores


@dataclass(frozen=True, repr=False)
class Threshold(Negatives):
    """Candidates at least this similar; stated in plain similarity (the cosine, for unit vectors).

    H-SCL writes tau = e^(l / temperature) for a cosine threshold l. Where no candidate passes, the anchor has no
    negative and costs nothing.
    """

    similarity: Number
    masks: ClassVar = True
    examples: ClassVar = ("Threshold(-1.0)", "Threshold(0.2)")

    def __post_init__(self) -> None:
        check_range("Threshold", "similarity", self.similarity, -math.inf, math.inf)

    def log_weights(self, scores: Scores) -> LogWeights:
        return keep(scores, ~(scores.candidates < scores.tempered(self.similarity)))


@dataclass(frozen=True, repr=False)
class Ring(Negatives):
    """Candidates between two fractions of the valid ones, counted from the closest.

    Edges are int(fraction * number of valid candidates); ``dynamic_inner`` takes inner as a fraction of the outer
    set. In the paper's percentiles, counted from the farthest: w_l = 100 (1 - outer) and w_u = 100 (1 - inner), or
    100 (1 - inner * outer) when dynamic; its appendix E calls w_u what the main text calls w_l.
    """

    inner: Number = 0.0
    outer: Number = 1.0
    dynamic_inner: bool = False
    masks: ClassVar = True
    ranks: ClassVar = True
    examples: ClassVar = ("Ring(0.0, 1.0)", "Ring(0.1, 0.5)", "Ring(0.25, outer=0.6, dynamic_inner=True)")

    def __post_init__(self) -> None:
        check_range("Ring", "inner", self.inner, 0.0, 1.0)
        check_range("Ring", "outer", self.outer, 0.0, 1.0)

    def log_weights(self, scores: Scores) -> LogWeights:
        n = scores.valid.shape[1]
        count = scores.num_valid().double()
        stop = (self.outer * count).long()
        start = (self.inner * (stop if self.dynamic_inner else count)).long()
        most_inner = int(self.inner * (int(self.outer * n) if self.dynamic_inner else n))
        return _rank_window(scores, start, stop, most_inner, int(self.outer * n))


@dataclass(frozen=True, repr=False)
class Rank(Negatives):
    """Candidates of rank start to stop - 1 among the valid ones, the closest being 0; ``stop=None`` has no end."""

    start: int = 0
    stop: int | None = None
    masks: ClassVar = True
    ranks: ClassVar = True
    examples: ClassVar = ("Rank(0, 5)", "Rank(2, 4)", "Rank(3)")

    def __post_init__(self) -> None:
        if self.start < 0:
            raise argument_error("Rank", "a start of 0 or more", "start", self.start)
        if self.stop is not None and self.stop <= self.start:
            raise argument_error("Rank", f"a stop above start={self.start}", "stop", self.stop)

    def log_weights(self, scores: Scores) -> LogWeights:
        n = scores.valid.shape[1]
        count = scores.num_valid()
        stop = count if self.stop is None else count.clamp(max=self.stop)
        return _rank_window(
            scores, count.clamp(max=self.start), stop, min(self.start, n), n if self.stop is None else min(self.stop, n)
        )


@dataclass(frozen=True, repr=False)
class BelowPositive(Negatives):
    """Candidates clearly less similar than the anchor's lowest-scored positive, in plain similarity.

    ``relative`` keeps s <= s_pos - relative * |s_pos|, ``absolute`` keeps s <= s_pos - absolute, both keep both: the
    rules and names of sentence-transformers. Negative margins are legal.
    """

    relative: Number | None = None
    absolute: Number | None = None
    masks: ClassVar = True
    examples: ClassVar = ("BelowPositive(0.05)", "BelowPositive(absolute=0.1)", "BelowPositive(0.5, absolute=-0.1)")

    def __post_init__(self) -> None:
        if self.relative is None and self.absolute is None:
            raise argument_error("BelowPositive", "relative or absolute", "relative", None)
        for name in ("relative", "absolute"):
            if getattr(self, name) is not None:
                check_range("BelowPositive", name, getattr(self, name), -math.inf, math.inf)

    def log_weights(self, scores: Scores) -> LogWeights:
        lowest = scores.positives.masked_fill(~scores.positive_valid, math.inf).amin(dim=1, keepdim=True).detach()
        outside = torch.zeros_like(scores.valid)
        if self.relative is not None:
            limit = torch.where(lowest == math.inf, lowest, lowest - self.relative * lowest.abs())
            outside = outside | (scores.candidates > limit)
        if self.absolute is not None:
            outside = outside | (scores.candidates > lowest - scores.tempered(self.absolute))
        return keep(scores, ~outside)


def _rank_window(scores: Scores, start: Tensor, stop: Tensor, most_start: int, most_stop: int) -> LogWeights:
    """Ranks start_i <= rank < stop_i of each row, by selection from whichever end is nearer; never a whole sort.

    ``most_*`` bound the row's values, because a selection needs its size before the rows are seen. Equal scores are
    told apart by position, so the number kept is exact also where embeddings collapse.
    """
    n = scores.valid.shape[1]
    rest = scores.valid & ~_extreme(scores, scores.valid, start, most_start, largest=True)
    if most_stop <= n // 2:
        return keep(scores, rest & _extreme(scores, rest, stop - start, most_stop, largest=True))
    if most_stop == n:
        return keep(scores, rest & (start < stop)[:, None])
    too_far = _extreme(scores, rest, scores.num_valid() - stop, min(n - most_stop + 1, n), largest=False)
    return keep(scores, rest & ~too_far & (start < stop)[:, None])


def _extreme(scores: Scores, among: Tensor, count: Tensor, most: int, largest: bool) -> Tensor:
    """True for the ``count[i]`` closest (or farthest) candidates of row i among those given."""
    if most <= 0:
        return torch.zeros_like(among)
    last = NEVER if largest else math.inf
    chosen = scores.candidates.detach().masked_fill(~among, last).topk(most, dim=1, largest=largest).indices
    counted = torch.arange(most, device=count.device) < count[:, None]
    return torch.zeros_like(among).scatter(1, chosen, counted) & among
