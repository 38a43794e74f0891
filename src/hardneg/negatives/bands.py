"""Bands: a candidate is a negative if its score or its margin to the positive lies in a range.

Threshold: H-SCL(tau) (Jiang et al. 2024, sec. IV-A), eta(x) = 1[e^x >= tau]. BelowPositive and AtMost: what
miners of text retrieval do, with the rules of sentence-transformers.

A NaN score is never dropped by a band, so that it stays visible in the loss: all comparisons ask who is outside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from hardneg.core.bounds import Bound, Largest
from hardneg.core.errors import argument_error, check_range
from hardneg.core.schedules import Number
from hardneg.core.tiles import Tile
from hardneg.negatives.base import Negatives, check_by
from hardneg.negatives.closed import ClosedForm


@dataclass(frozen=True, repr=False)
class Threshold(Negatives):
    """Candidates at least this similar; stated in plain similarity (the cosine, for unit vectors).

    H-SCL writes tau = e^(l / temperature) for a cosine threshold l. Where no candidate passes, the anchor has no
    negative and costs nothing.
    """

    similarity: Number
    by: str = field(default="score", kw_only=True)
    masks: ClassVar = True
    examples: ClassVar = ("Threshold(-1.0)", "Threshold(0.2)")

    def __post_init__(self) -> None:
        check_range("Threshold", "similarity", self.similarity, -math.inf, math.inf)
        check_by("Threshold", self.by)

    def log_weight(self, tile: Tile) -> Tensor:
        rounding = 4.0 * torch.finfo(tile.s.dtype).eps  # the cosine of opposite vectors may be below -1
        return tile.keep(~(tile.score(self.by, "Threshold") < tile.tempered(self.similarity) - tile.tempered(rounding)))

    def describe(self) -> str:
        return f"Keeps candidates of similarity {self.similarity:g} or more."

    @property
    def monotone(self) -> bool:
        return self.by == "score"

    def closed_form(self) -> ClosedForm | None:
        if self.by != "score" or not isinstance(self.similarity, (int, float)):
            return None
        return ClosedForm(floor=self.similarity - 4.0 * torch.finfo(torch.float32).eps)


@dataclass(frozen=True, repr=False)
class AtMost(Negatives):
    """Candidates at most this similar, in plain similarity: ``max_score`` of sentence-transformers' miner."""

    similarity: Number
    by: str = field(default="score", kw_only=True)
    masks: ClassVar = True
    examples: ClassVar = ("AtMost(1.0)", "AtMost(0.8)")

    def __post_init__(self) -> None:
        check_range("AtMost", "similarity", self.similarity, -math.inf, math.inf)
        check_by("AtMost", self.by)

    def log_weight(self, tile: Tile) -> Tensor:
        rounding = 4.0 * torch.finfo(tile.s.dtype).eps  # the cosine of equal vectors may be above 1
        return tile.keep(~(tile.score(self.by, "AtMost") > tile.tempered(self.similarity) + tile.tempered(rounding)))

    def describe(self) -> str:
        return f"Keeps candidates of similarity {self.similarity:g} or less."


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
    needs: ClassVar = ("positives",)
    examples: ClassVar = ("BelowPositive(0.05)", "BelowPositive(absolute=0.1)", "BelowPositive(0.5, absolute=-0.1)")

    def __post_init__(self) -> None:
        if self.relative is None and self.absolute is None:
            raise argument_error("BelowPositive", "relative or absolute", "relative", None)
        check_by("BelowPositive", self.by)
        for name, most in (("relative", 1.0), ("absolute", math.inf)):  # above 1: on the other side of 0
            margin = getattr(self, name)
            if margin is not None:
                check_range("BelowPositive", name, margin, -math.inf, most)
                if isinstance(margin, float) and math.isinf(margin):
                    raise argument_error("BelowPositive", "a finite margin", name, margin)

    def bounds(self) -> dict[str, Bound]:
        return {"minus_lowest": Largest(lambda tile: -tile.read(self.by, "BelowPositive")[0], over="positives")}

    def log_weight(self, tile: Tile) -> Tensor:
        value, one = (each.detach() for each in tile.read(self.by, "BelowPositive"))
        return tile.keep(~(value > self._ceiling(-tile.bound["minus_lowest"], one)))

    def _ceiling(self, lowest: Tensor, one: Tensor | float = 1.0) -> Tensor:
        """The highest score of a negative, ``one`` being that of a similarity of 1; infinite without a positive."""
        ends = []
        if self.relative is not None:
            ends.append(torch.where(lowest == math.inf, lowest, lowest - self.relative * lowest.abs()))
        if self.absolute is not None:
            ends.append(lowest - self.absolute * one)
        return ends[0] if len(ends) == 1 else torch.minimum(*ends)

    def describe(self) -> str:
        relative = [] if self.relative is None else [_side(100 * self.relative, " %")]
        absolute = [] if self.absolute is None else [_side(self.absolute, "")]
        highest = self._ceiling(torch.tensor(0.8, dtype=torch.float64)).item()
        return (
            f"Keeps candidates {' and '.join(relative + absolute)} the similarity of the anchor's lowest-scored "
            f"positive: up to {highest:.3g} where the positive has 0.8."
        )

    def closed_form(self) -> ClosedForm | None:
        margins = (self.relative, self.absolute)
        if self.by != "score" or not all(margin is None or isinstance(margin, (int, float)) for margin in margins):
            return None
        return ClosedForm(ceilings=(self._ceiling,))


def _side(margin: Number, unit: str) -> str:
    """On which side of the positive the limit of a margin lies."""
    if margin == 0:
        return "not above"
    return f"at least {margin:g}{unit} below" if margin > 0 else f"up to {-margin:g}{unit} above"
