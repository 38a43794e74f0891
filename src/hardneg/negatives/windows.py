"""Windows of ranks: keep candidates whose rank among the anchor's candidates lies in a range.

``Ring`` takes fractions of the candidates (Wu et al. 2021, sec. 4), ``Rank`` takes counts, as text-retrieval miners do.
Rank 0 is the most similar candidate. Ties are broken by column, so the number of kept candidates is exact even where
embeddings collapse. A NaN score is never removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor

from hardneg.core.bounds import Bound, Count, Window, beyond, within
from hardneg.core.errors import argument_error, check_counts, check_kind, check_range
from hardneg.core.schedules import Number, Schedule, value_of
from hardneg.core.tiles import Tile
from hardneg.negatives.base import By, Negatives, check_by
from hardneg.negatives.closed import ClosedForm

ROUNDING = 1e-9
"""Tolerance at an edge, so that 0.29 of 100 candidates are 29 and not 28."""
SLACK = 0.001
"""Share of the candidates by which the edges of an approximate ring may be off."""


@dataclass(frozen=True, repr=False)
class Ring(Negatives):
    """Keeps candidates between two fractions of all valid ones, counted from the closest.

    Edges are int(fraction * number of valid candidates + 1e-9). In the percentiles of the paper, which count from the
    farthest: w_l = 100 (1 - outer) and w_u = 100 (1 - inner), or 100 (1 - inner * outer) with ``dynamic_inner``; its
    appendix E calls w_u what the main text calls w_l.

    Args:
        inner: Fraction of the closest candidates to skip.
        outer: Fraction of the closest candidates at which the ring ends.
        dynamic_inner: Whether ``inner`` is a fraction of the outer set instead of all candidates.
        at_least: Smallest number of candidates to keep where that many exist: the ring grows outwards, then inwards.
        by: "score", or "guide" to rank by another model.
        approximate: Whether the edges of a streamed loss on a GPU may be off by 0.1 % of the ranks, which needs fewer
            passes.

    Raises:
        ArgumentError: If the ring is empty by its numbers alone.
    """

    inner: Number = 0.0
    outer: Number = 1.0
    dynamic_inner: bool = False
    at_least: int = 0
    by: By = field(default="score", kw_only=True)
    approximate: bool = field(default=False, kw_only=True)
    masks: ClassVar = True
    if_empty: ClassVar = "Lower inner, raise outer, or keep some candidates with at_least=1."
    examples: ClassVar = (
        "Ring(0.0, 1.0)",
        "Ring(0.1, 0.5)",
        "Ring(0.25, outer=0.6, dynamic_inner=True)",
        "Ring(0.1, outer=0.15, at_least=3)",
    )

    def __post_init__(self) -> None:
        self._prepare()
        known = isinstance(self.inner, Real) and isinstance(self.outer, Real)
        if known and not self.at_least and (self.outer == 0 or self.inner >= (1 if self.dynamic_inner else self.outer)):
            what = "an outer above 0 and an inner below 1" if self.dynamic_inner else "an inner below its outer"
            raise argument_error("Ring", what, "(inner, outer)", (self.inner, self.outer))

    def at(self, step: int, total: int | None = None) -> Negatives:
        """Return the ring with its schedules evaluated, without the check for an empty ring.

        An annealed ring may pass through empty ones; the loss then counts the anchors without a negative.
        """
        ring = copy(self)
        for name in ("inner", "outer"):
            object.__setattr__(ring, name, value_of(getattr(self, name), step, total))
        ring._prepare()
        return ring

    def _prepare(self) -> None:
        check_range("Ring", "inner", self.inner, 0.0, 1.0)
        check_range("Ring", "outer", self.outer, 0.0, 1.0)
        check_kind("Ring", "dynamic_inner", self.dynamic_inner, bool, "True or False")
        check_counts("Ring", self, "at_least", least=0)
        check_by("Ring", self.by)
        check_kind("Ring", "approximate", self.approximate, bool, "True or False")
        if not isinstance(self.inner, Schedule) and not isinstance(self.outer, Schedule):
            # Computed here, outside any compiled graph, so that an annealed ring does not recompile it at each step:
            # the edges are tensors, and the sizes of the selections take few different values (see _reach).
            largest_inner = self.inner * self.outer if self.dynamic_inner else self.inner
            reach = (_reach(largest_inner), _reach(self.outer), _reach(1.0 - self.outer))
            object.__setattr__(self, "_reach", reach)
            object.__setattr__(self, "_edges", torch.tensor([self.inner, self.outer], dtype=torch.float64).unbind())

    def bounds(self) -> dict[str, Bound]:
        """Declare the number of valid candidates and the edges of the window."""
        skipped, closest, farthest = self._reach or (1.0, 1.0, 1.0)
        window = Window(
            self._places,
            lambda n: int(skipped * n) + 1 if skipped else 0,
            lambda n: n if self.at_least else int(closest * n) + 1,
            lambda n: int(farthest * n) + 1 if farthest else 0,
            self.by,
            "Ring",
            slack=SLACK if self.approximate else 0.0,
        )
        return {"count": Count(), "window": window}

    def log_weight(self, tile: Tile) -> Tensor:
        """Return log-weight 0 inside the ring and ``NEVER`` outside."""
        return _inside(self, tile)

    def describe(self) -> str:
        """Return the description with the percentages filled in."""
        inner = self.inner * self.outer if self.dynamic_inner else self.inner
        kept = f"the closest {100 * self.outer:g} % of the candidates" if self.outer < 1 else "every candidate"
        if inner >= self.outer and not self.at_least:
            return "Keeps no candidate."
        without = f" except the very closest {100 * inner:g} % of all" if inner else ""
        return f"Keeps {kept}{without}{f', {self.at_least} at least' if self.at_least else ''}."

    def closed_form(self) -> ClosedForm | None:
        """Return the window as a closed form; None for a schedule or a guide."""
        return _closed_form(self) if self._reach is not None else None

    def _places(self, earlier: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        if self._reach is None:
            float(self.inner), float(self.outer)  # a schedule raises here, with the advice to call set_progress
        (inner, outer), count = self._edges, earlier["count"]
        stop = (outer * count.double() + ROUNDING).long()
        start = (inner * (stop if self.dynamic_inner else count).double() + ROUNDING).long()
        if self.at_least:
            stop = torch.minimum(torch.maximum(stop, start + self.at_least), count)
            start = torch.minimum(start, (stop - self.at_least).clamp(min=0))
        return start, stop

    _reach: ClassVar[tuple[float, float, float] | None] = None
    _edges: ClassVar[tuple[Tensor, Tensor]]


@dataclass(frozen=True, repr=False)
class Rank(Negatives):
    """Keeps candidates of rank start to stop - 1 among the valid ones, where the closest has rank 0.

    Args:
        start: Number of closest candidates to skip.
        stop: Rank at which the window ends (exclusive); None for no end.
        by: "score", or "guide" to rank by another model.
    """

    start: int = 0
    stop: int | None = None
    by: By = field(default="score", kw_only=True)
    masks: ClassVar = True
    examples: ClassVar = ("Rank(0, 5)", "Rank(2, 4)", "Rank(3)")

    def __post_init__(self) -> None:
        check_counts("Rank", self, "start", least=0)
        if self.stop is not None:
            check_counts("Rank", self, "stop", least=0)
            if self.stop <= self.start:
                raise argument_error("Rank", f"a stop above start={self.start}", "stop", self.stop)
        check_by("Rank", self.by)

    def bounds(self) -> dict[str, Bound]:
        """Declare the number of valid candidates and the edges of the window."""
        start, stop = self.start, self.stop
        window = Window(
            self._places,
            lambda n: start,
            lambda n: n if stop is None else stop,
            lambda n: 0 if stop is None else n,
            self.by,
            "Rank",
            nearest=start if stop is None else stop,
        )
        return {"count": Count(), "window": window}

    def log_weight(self, tile: Tile) -> Tensor:
        """Return log-weight 0 inside the window and ``NEVER`` outside."""
        return _inside(self, tile)

    def describe(self) -> str:
        """Return the description with the ranks filled in."""
        if self.stop is None:
            return f"Keeps every candidate{f' except the closest {self.start}' if self.start else ''}."
        if not self.start:
            return f"Keeps the {_closest(self.stop)}."
        return f"Skips the {_closest(self.start)} and keeps the next {self.stop - self.start}."

    def closed_form(self) -> ClosedForm | None:
        """Return the window as a closed form; None for a guide."""
        return _closed_form(self)

    @property
    def most(self) -> int | None:
        """The number of ranks in the window; None without a stop."""
        return None if self.stop is None else self.stop - self.start

    def shown(self, wanted: int | None) -> int | None:
        """Return how many of the nearest candidates to inspect for ``wanted`` kept ones."""
        if self.by != "score" or (wanted is None and self.stop is None):
            return None
        ends = [end for end in (self.stop, None if wanted is None else self.start + wanted) if end is not None]
        return min(ends)

    def _places(self, earlier: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        count = earlier["count"]
        return count.clamp(max=self.start), count if self.stop is None else count.clamp(max=self.stop)


def _closed_form(band: Ring | Rank) -> ClosedForm | None:
    window = band.bounds()["window"]
    assert isinstance(window, Window)
    return ClosedForm(window=window) if band.by == "score" else None


def _inside(band: Ring | Rank, tile: Tile) -> Tensor:
    value = tile.read(band.by, type(band).__name__)[0].detach()
    before, after = tile.bound["window"]
    outside: Tensor | None = None
    if before is not None:
        outside = within(value, tile.column, before)
    if after is not None:
        farther = beyond(value, tile.column, after)
        outside = farther if outside is None else outside | farther
    return tile.constant(0.0) if outside is None else tile.keep(~outside)


def _reach(fraction: float) -> float:
    """Round the fraction up to one of four values, so that a schedule leads to few different graph shapes."""
    return next(reach for reach in (0.0, 0.125, 0.5, 1.0) if fraction <= reach)


def _closest(number: int) -> str:
    return "closest candidate" if number == 1 else f"closest {number} candidates"
