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

from hardneg.core.errors import argument_error, check_kind, check_range
from hardneg.core.schedules import Number, Schedule
from hardneg.core.types import NEVER, LogWeights, Scores
from hardneg.negatives.base import Negatives, keep

ROUNDING = 1e-9
"""Slack of an edge, so that 0.29 of 100 candidates are 29 and not 28."""


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
        rounding = 4.0 * torch.finfo(scores.candidates.dtype).eps  # the cosine of opposite vectors may be below -1
        return keep(scores, ~(scores.candidates < scores.tempered(self.similarity) - scores.tempered(rounding)))


@dataclass(frozen=True, repr=False)
class Ring(Negatives):
    """Candidates between two fractions of the valid ones, counted from the closest.

    Edges are int(fraction * number of valid candidates + 1e-9); ``dynamic_inner`` takes inner as a fraction of the
    outer set. ``at_least`` candidates are kept where there are as many: the ring grows outwards, then inwards. In the
    paper's percentiles, counted from the farthest: w_l = 100 (1 - outer) and w_u = 100 (1 - inner), or
    100 (1 - inner * outer) when dynamic; its appendix E calls w_u what the main text calls w_l.
    """

    inner: Number = 0.0
    outer: Number = 1.0
    dynamic_inner: bool = False
    at_least: int = 0
    masks: ClassVar = True
    ranks: ClassVar = True
    examples: ClassVar = (
        "Ring(0.0, 1.0)",
        "Ring(0.1, 0.5)",
        "Ring(0.25, outer=0.6, dynamic_inner=True)",
        "Ring(0.1, outer=0.15, at_least=3)",
    )

    def __post_init__(self) -> None:
        check_range("Ring", "inner", self.inner, 0.0, 1.0)
        check_range("Ring", "outer", self.outer, 0.0, 1.0)
        check_kind("Ring", "dynamic_inner", self.dynamic_inner, bool, "True or False")
        check_kind("Ring", "at_least", self.at_least, int, "a whole number")
        check_range("Ring", "at_least", self.at_least, 0, math.inf)
        if not isinstance(self.inner, Schedule) and not isinstance(self.outer, Schedule):
            # Made here, outside any compiled graph, so that an annealed ring does not recompile it at each step: the
            # edges are tensors, and the sizes of the selections come from a few steps (_reach).
            largest_inner = self.inner * self.outer if self.dynamic_inner else self.inner
            reach = (_reach(largest_inner), _reach(self.outer), _reach(1.0 - self.outer))
            object.__setattr__(self, "_reach", reach)
            object.__setattr__(self, "_edges", torch.tensor([self.inner, self.outer], dtype=torch.float64).unbind())

    def log_weights(self, scores: Scores) -> LogWeights:
        if self._reach is None:
            float(self.inner), float(self.outer)  # the one that is a schedule says so
        assert self._reach is not None
        inner, outer = self._edges
        n = scores.valid.shape[1]
        count = scores.num_valid().double()
        stop = (outer * count + ROUNDING).long()
        start = (inner * (stop if self.dynamic_inner else count) + ROUNDING).long()
        if self.at_least:
            stop = torch.minimum(torch.maximum(stop, start + self.at_least), scores.num_valid())
            start = torch.minimum(start, (stop - self.at_least).clamp(min=0))
        skipped, closest, farthest = (min(int(reach * n) + 1, n) if reach else 0 for reach in self._reach)
        return _rank_window(scores, start, stop, skipped, n if self.at_least else closest, farthest)

    _reach: ClassVar[tuple[float, float, float] | None] = None
    _edges: ClassVar[tuple[Tensor, Tensor]]


@dataclass(frozen=True, repr=False)
class Rank(Negatives):
    """Candidates of rank start to stop - 1 among the valid ones, the closest being 0; ``stop=None`` has no end."""

    start: int = 0
    stop: int | None = None
    masks: ClassVar = True
    ranks: ClassVar = True
    examples: ClassVar = ("Rank(0, 5)", "Rank(2, 4)", "Rank(3)")

    def __post_init__(self) -> None:
        check_kind("Rank", "start", self.start, int, "a whole number")
        if self.stop is not None:
            check_kind("Rank", "stop", self.stop, int, "a whole number")
        if self.start < 0:
            raise argument_error("Rank", "a start of 0 or more", "start", self.start)
        if self.stop is not None and self.stop <= self.start:
            raise argument_error("Rank", f"a stop above start={self.start}", "stop", self.stop)

    def log_weights(self, scores: Scores) -> LogWeights:
        n = scores.valid.shape[1]
        count = scores.num_valid()
        start = count.clamp(max=self.start)
        if self.stop is None:
            return _rank_window(scores, start, count, min(self.start, n), n, 0)
        return _rank_window(scores, start, count.clamp(max=self.stop), min(self.start, n), min(self.stop, n), n)


@dataclass(frozen=True, repr=False)
class BelowPositive(Negatives):
    """Candidates clearly less similar than the anchor's lowest-scored positive, in plain similarity.

    ``relative`` keeps s <= s_pos - relative * |s_pos|, ``absolute`` keeps s <= s_pos - absolute, both keep both: the
    rules and names of sentence-transformers. Negative margins are legal. ``by="guide"`` asks another model
    (``scores.guided``): ``BelowPositive(absolute=0.0, by="guide")`` is GISTEmbed's filter.
    """

    relative: Number | None = None
    absolute: Number | None = None
    by: str = "score"
    masks: ClassVar = True
    examples: ClassVar = ("BelowPositive(0.05)", "BelowPositive(absolute=0.1)", "BelowPositive(0.5, absolute=-0.1)")

    def __post_init__(self) -> None:
        if self.relative is None and self.absolute is None:
            raise argument_error("BelowPositive", "relative or absolute", "relative", None)
        if self.by not in ("score", "guide"):
            raise argument_error("BelowPositive", "by 'score' or 'guide'", "by", self.by)
        for name, most in (("relative", 1.0), ("absolute", math.inf)):  # above 1: on the other side of 0
            margin = getattr(self, name)
            if margin is not None:
                check_range("BelowPositive", name, margin, -math.inf, most)
                if isinstance(margin, float) and math.isinf(margin):
                    raise argument_error("BelowPositive", "a finite margin", name, margin)

    def log_weights(self, scores: Scores) -> LogWeights:
        positives, candidates, unit = self._channel(scores)
        lowest = positives.masked_fill(~scores.positive_valid, math.inf).amin(dim=1, keepdim=True)
        outside = torch.zeros_like(scores.valid)
        if self.relative is not None:
            limit = torch.where(lowest == math.inf, lowest, lowest - self.relative * lowest.abs())
            outside = outside | (candidates > limit)
        if self.absolute is not None:
            outside = outside | (candidates > lowest - self.absolute * unit)
        return keep(scores, ~outside)

    def _channel(self, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        """The scores to judge by, and what a similarity of 1 is on their scale."""
        if self.by == "score":
            return scores.positives.detach(), scores.candidates.detach(), scores.tempered(1.0).detach()
        if scores.guide is None:
            raise ValueError(
                "BelowPositive needs a second model's similarities, got by='guide' and none; "
                "use scores.guided(two_views(guide_z1, guide_z2, temperature=1.0))."
            )
        return scores.guide.positives, scores.guide.candidates, scores.guide.candidates.new_ones(())


def _rank_window(scores: Scores, start: Tensor, stop: Tensor, skipped: int, closest: int, farthest: int) -> LogWeights:
    """Ranks start_i <= rank < stop_i of each row, by selection from whichever end is nearer; never a whole sort.

    A selection needs its size before the rows are seen: at most ``skipped`` candidates come before the window, at
    most ``closest`` before its end, at most ``farthest`` after it. Equal scores are told apart by position, so the
    number kept is exact also where embeddings collapse.
    """
    rest = scores.valid & ~_extreme(scores, scores.valid, start, skipped, largest=True)
    if closest <= farthest:
        return keep(scores, _extreme(scores, rest, stop - start, closest, largest=True))
    too_far = _extreme(scores, rest, scores.num_valid() - stop, farthest, largest=False)
    return keep(scores, rest & ~too_far & (start < stop)[:, None])


def _reach(fraction: float) -> float:
    """The fraction rounded up to one of a few, so that a schedule meets few of them."""
    return next(reach for reach in (0.0, 0.125, 0.5, 1.0) if fraction <= reach)


def _extreme(scores: Scores, among: Tensor, count: Tensor, most: int, largest: bool) -> Tensor:
    """True for the ``count[i]`` closest (or farthest) candidates of row i among those given."""
    if most <= 0:
        return torch.zeros_like(among)
    last = NEVER if largest else math.inf
    chosen = scores.candidates.detach().masked_fill(~among, last).topk(most, dim=1, largest=largest).indices
    counted = torch.arange(most, device=count.device) < count[:, None]
    return torch.zeros_like(among).scatter(1, chosen, counted) & among
