"""Bands of similarity: keep candidates whose similarity, or whose margin to the positive, lies in a range.

``Threshold`` is H-SCL(tau) (Jiang et al. 2024, sec. IV-A), eta(x) = 1[e^x >= tau]. ``BelowPositive`` and ``AtMost`` are
the filters of text-retrieval miners, with the rules of sentence-transformers.

A band never removes a NaN score, so that it stays visible in the loss: all comparisons test which candidates lie
outside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hardneg.core.bounds import Bound, Largest, LogMeanExp
from hardneg.core.errors import argument_error, check_range
from hardneg.core.schedules import Number
from hardneg.core.tiles import Tile
from hardneg.negatives.base import By, Negatives, check_by
from hardneg.negatives.closed import ClosedForm


@dataclass(frozen=True, repr=False)
class Threshold(Negatives):
    """Keeps candidates that are at least this similar to the anchor.

    H-SCL writes tau = e^(l / temperature) for a cosine threshold l. An anchor for which no candidate passes has no
    negative, and its loss is 0. With ``Threshold("mean")`` each anchor has its own threshold, tau(x, f) = E[e^s]
    over the candidates that the factors before it kept. The paper takes that mean over candidates of any label, so
    write ``Threshold("mean") * OtherLabel()`` for its H-SCL(tau(x, f)).

    Args:
        similarity: Lowest similarity to keep, the cosine for unit vectors; or "mean", to keep candidates whose e^s is
            at least the mean of e^s, where s = similarity / temperature.
        by: "score", or "guide" to use the similarities of another model.
    """

    similarity: Number | Literal["mean"]
    by: By = field(default="score", kw_only=True)
    masks: ClassVar = True
    examples: ClassVar = ("Threshold(-1.0)", "Threshold(0.2)", "Threshold('mean')")

    def __post_init__(self) -> None:
        if isinstance(self.similarity, str):
            if self.similarity != "mean":
                raise argument_error("Threshold", "a number or 'mean'", "similarity", self.similarity)
        else:
            check_range("Threshold", "similarity", self.similarity, -math.inf, math.inf)
        check_by("Threshold", self.by)

    def bounds(self) -> dict[str, Bound]:
        """Declare log E[e^s] of the anchor for "mean"; nothing for a number."""
        if not isinstance(self.similarity, str):
            return {}
        return {"log_mean": LogMeanExp(lambda tile: tile.score(self.by, "Threshold"))}

    def log_weight(self, tile: Tile) -> Tensor:
        """Return log-weight 0 at or above the threshold and ``NEVER`` below it."""
        rounding = 4.0 * torch.finfo(tile.s.dtype).eps  # the cosine of opposite vectors may be below -1
        mean = isinstance(self.similarity, str)
        lowest = tile.bound["log_mean"].to(tile.s.dtype) if mean else tile.tempered(self.similarity)
        return tile.keep(~(tile.score(self.by, "Threshold") < lowest - tile.tempered(rounding)))

    def describe(self) -> str:
        """Return the description with the threshold filled in."""
        if isinstance(self.similarity, str):
            return (
                "Keeps candidates whose e^(similarity / temperature) is at least the mean of the anchor's candidates."
            )
        return f"Keeps candidates of similarity {self.similarity:g} or more."

    @property
    def monotone(self) -> bool:
        """True if it uses the model's own scores."""
        return self.by == "score"

    def closed_form(self) -> ClosedForm | None:
        """Return a band with a floor; None for "mean", a schedule, a tensor or a guide."""
        if self.by != "score" or not isinstance(self.similarity, (int, float)):
            return None
        return ClosedForm(floor=float(self.similarity))


@dataclass(frozen=True, repr=False)
class AtMost(Negatives):
    """Keeps candidates that are at most this similar to the anchor: ``max_score`` of sentence-transformers' miner.

    Args:
        similarity: Highest similarity to keep; the cosine, for unit vectors.
        by: "score", or "guide" to use the similarities of another model.
    """

    similarity: Number
    by: By = field(default="score", kw_only=True)
    masks: ClassVar = True
    examples: ClassVar = ("AtMost(1.0)", "AtMost(0.8)")

    def __post_init__(self) -> None:
        check_range("AtMost", "similarity", self.similarity, -math.inf, math.inf)
        check_by("AtMost", self.by)

    def log_weight(self, tile: Tile) -> Tensor:
        """Return log-weight 0 at or below the limit and ``NEVER`` above it."""
        rounding = 4.0 * torch.finfo(tile.s.dtype).eps  # the cosine of equal vectors may be above 1
        return tile.keep(~(tile.score(self.by, "AtMost") > tile.tempered(self.similarity) + tile.tempered(rounding)))

    def describe(self) -> str:
        """Return the description with the limit filled in."""
        return f"Keeps candidates of similarity {self.similarity:g} or less."


@dataclass(frozen=True, repr=False)
class BelowPositive(Negatives):
    """Keeps candidates that are less similar to the anchor than its positive, by a margin.

    The limit is that of the anchor's lowest-scored positive: ``relative`` keeps s <= s_pos - relative * |s_pos|,
    ``absolute`` keeps s <= s_pos - absolute, and with both a candidate must pass both. These are the rules and names of
    sentence-transformers. ``BelowPositive(absolute=0.0, by="guide")`` is GISTEmbed's filter.

    Args:
        relative: Margin as a fraction of the positive's similarity, at most 1. Negative margins are allowed.
        absolute: Margin in units of similarity. Negative margins are allowed.
        by: "score", or "guide" to use the similarities of another model (``scores.guided``).
    """

    relative: Number | None = None
    absolute: Number | None = None
    by: By = "score"
    masks: ClassVar = True
    needs: ClassVar = ("positives",)
    examples: ClassVar = ("BelowPositive(0.05)", "BelowPositive(absolute=0.1)", "BelowPositive(0.5, absolute=-0.1)")

    def __post_init__(self) -> None:
        if self.relative is None and self.absolute is None:
            raise argument_error("BelowPositive", "relative or absolute", "relative", None)
        check_by("BelowPositive", self.by)
        for name, most in (("relative", 1.0), ("absolute", math.inf)):  # above 1 the limit would change its sign
            margin = getattr(self, name)
            if margin is not None:
                check_range("BelowPositive", name, margin, -math.inf, most)
                if isinstance(margin, float) and math.isinf(margin):
                    raise argument_error("BelowPositive", "a finite margin", name, margin)

    def bounds(self) -> dict[str, Bound]:
        """Declare the lowest similarity of the anchor's positives."""
        return {"minus_lowest": Largest(lambda tile: -tile.read(self.by, "BelowPositive")[0], over="positives")}

    def log_weight(self, tile: Tile) -> Tensor:
        """Return log-weight 0 up to the limit of the anchor and ``NEVER`` above it."""
        value, one = (each.detach() for each in tile.read(self.by, "BelowPositive"))
        return tile.keep(~(value > self._ceiling(-tile.bound["minus_lowest"], one)))

    def _ceiling(self, lowest: Tensor, one: Tensor | float = 1.0) -> Tensor:
        """Return the highest score of a negative, infinite without a positive; ``one`` is the score of similarity 1."""
        ends = []
        if self.relative is not None:
            ends.append(torch.where(lowest == math.inf, lowest, lowest - self.relative * lowest.abs()))
        if self.absolute is not None:
            ends.append(lowest - self.absolute * one)
        return ends[0] if len(ends) == 1 else torch.minimum(*ends)

    def describe(self) -> str:
        """Return the margins in words, with an example."""
        relative = [] if self.relative is None else [_side(100 * self.relative, " %")]
        absolute = [] if self.absolute is None else [_side(self.absolute, "")]
        highest = self._ceiling(torch.tensor(0.8, dtype=torch.float64)).item()
        return (
            f"Keeps candidates {' and '.join(relative + absolute)} the similarity of the anchor's lowest-scored "
            f"positive: up to {highest:.3g} where the positive has 0.8."
        )

    def closed_form(self) -> ClosedForm | None:
        """Return a band with a ceiling; None for schedules, tensors or a guide."""
        margins = (self.relative, self.absolute)
        if self.by != "score" or not all(margin is None or isinstance(margin, (int, float)) for margin in margins):
            return None
        return ClosedForm(ceilings=(self._ceiling,))


def _side(margin: Number, unit: str) -> str:
    """Say on which side of the positive the limit of a margin lies."""
    if margin == 0:
        return "not above"
    return f"at least {margin:g}{unit} below" if margin > 0 else f"up to {-margin:g}{unit} above"
