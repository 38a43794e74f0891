"""Bounds: what a distribution needs to know of a whole row, as reductions that merge.

A bound is reduced over the candidates that the factors before it left (or over the anchor's positives), tile by tile,
shard by shard or rank by rank: ``merge(of(first), of(second))`` is what ``of`` both would give, and ``finish`` turns
that into the numbers that ``tile.bound`` holds. Ties are broken by column. A bound is right for exactly
the scores that it was reduced from: every pass cuts the same tiles.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hardneg.core.tiles import NEVER, Tile

Value = Callable[[Tile], Tensor]
State = tuple[Tensor, ...]


class Bound(ABC):
    """A reduction over the candidates of a row, or of all rows of the batch."""

    over: str = "candidates"
    """``"candidates"``: those that the factors before left; ``"positives"``: the anchor's own and promoted ones."""
    scope: str = "row"
    """``"row"``, or ``"batch"``: one number for all anchors, which mining cannot have."""
    grad: bool = False
    """Whether the gradient flows through it; a streamed loss can do that for a ``Largest`` only."""

    @abstractmethod
    def of(self, tile: Tile, mask: Tensor) -> State:
        """The state of the pairs in the mask."""

    @abstractmethod
    def merge(self, first: State, second: State) -> State:
        """The state of both; the columns of the second come after those of the first."""

    def shortened(self, state: State) -> State:
        """The same in less memory, to be kept or sent."""
        return state

    def finish(self, state: State, earlier: Mapping[str, Any]) -> Any:
        """What ``tile.bound`` holds: [r, 1]. ``earlier``: the bounds declared before this one."""
        return state[0]


class Count(Bound):
    """The number of candidates."""

    def of(self, tile: Tile, mask: Tensor) -> State:
        return (mask.sum(-1, keepdim=True),)

    def merge(self, first: State, second: State) -> State:
        return (first[0] + second[0],)


@dataclass(frozen=True, eq=False)
class Largest(Bound):
    """The largest of a pointwise value; -inf of nothing.

    With ``grad`` the gradient flows to it, evenly where several are the largest.
    """

    value: Value
    over: str = "candidates"
    scope: str = "row"
    grad: bool = False

    def of(self, tile: Tile, mask: Tensor) -> State:
        value = self.value(tile)
        value = torch.where(mask, value if self.grad else value.detach(), NEVER)
        if not value.shape[1]:
            return (value.new_full(() if self.scope == "batch" else (len(value), 1), NEVER),)
        return (value.amax() if self.scope == "batch" else value.amax(-1, keepdim=True),)

    def merge(self, first: State, second: State) -> State:
        return (torch.maximum(first[0], second[0]),)


Edge = tuple[Tensor, Tensor]
"""Value and column, [r, 1] each, of the last member of the closest so many."""
Size = Callable[[int], int]
"""At most how many of a row of n candidates."""


@dataclass(frozen=True, eq=False)
class Window(Bound):
    """Ranks start to stop - 1 of each row, the closest being 0, as the edges of the two sets of closest candidates.

    ``places(earlier)`` gives start and stop, [r, 1]. Selections need their sizes before the rows are seen: at most
    ``skipped`` candidates come before the window, at most ``closest`` before its end, at most ``farthest`` after it,
    of a row of n; 0 where there is no such edge. ``by``: what is ranked, for ``tile.read``. ``nearest``: how many of
    the closest decide, if that is known. ``slack``: by what share of the ranks an edge may be off where that is faster.
    Needs a bound "count" before it.
    """

    places: Callable[[Mapping[str, Any]], tuple[Tensor, Tensor]]
    skipped: Size
    closest: Size
    farthest: Size
    by: str
    who: str
    nearest: int | None = None
    slack: float = 0.0

    def value(self, tile: Tile) -> Tensor:
        return tile.read(self.by, self.who)[0].detach()

    def of(self, tile: Tile, mask: Tensor) -> State:
        value = torch.where(mask, self.value(tile), NEVER)
        return value, tile.column[None]  # [1, c]: the rows share their columns

    def merge(self, first: State, second: State) -> State:
        columns = [first[1], second[1]]
        if len({len(each) for each in columns}) > 1:
            columns = [column.expand(value.shape) for value, column in (first, second)]
        return self.shortened((torch.cat([first[0], second[0]], dim=1), torch.cat(columns, dim=1)))

    def shortened(self, state: State) -> State:
        """The nearest only, where they decide, in the order of their columns."""
        value, column = state
        if self.nearest is None or value.shape[1] <= max(2 * self.nearest, 64):
            return state
        if not self.nearest:
            return value[:, :0], column[:, :0]
        column = column.expand(value.shape)
        size = torch.full_like(value[:, :1], self.nearest, dtype=torch.long)
        edge = _edge(value, column, size, value.topk(self.nearest, dim=1).values[:, -1:])
        chosen = torch.where(~beyond(value, column, edge), value, NEVER)
        index = chosen.topk(self.nearest, dim=1).indices.sort(dim=1).values
        return value.gather(1, index), column.gather(1, index)

    def finish(self, state: State, earlier: Mapping[str, Any]) -> tuple[Edge | None, Edge | None]:
        value, column = state[0], state[1].expand(state[0].shape)
        start, stop = self.places(earlier)
        n, count = value.shape[1], earlier["count"]
        skipped, closest, farthest = (min(size(n), n) for size in (self.skipped, self.closest, self.farthest))
        ends = bool(n and farthest)
        from_top = ends and closest <= farthest
        top = value.topk(max(skipped, closest if from_top else 0), dim=1).values  # of both edges
        before = after = None
        if skipped:
            before = _edge(value, column, start, _place(top, start - 1))
        if from_top:
            after = _edge(value, column, stop, _place(top, stop - 1))
        elif ends:
            after = _edge(value, column, stop, _place_from_end(value, count - stop, min(farthest + 1, n)))
        return before, after


def beyond(value: Tensor, column: Tensor, edge: Edge) -> Tensor:
    """True for candidates that are not among the closest; not for NaN, which stays visible."""
    return (value < edge[0]) | ((value == edge[0]) & (column > edge[1]))


def within(value: Tensor, column: Tensor, edge: Edge) -> Tensor:
    """True for candidates that are among the closest; not for NaN."""
    return (value > edge[0]) | ((value == edge[0]) & (column <= edge[1]))


def _place(top: Tensor, place: Tensor) -> Tensor:
    """The value at this place from the top."""
    return torch.where(place < 0, torch.inf, top.gather(1, place.clamp(0, top.shape[1] - 1)))


def _place_from_end(value: Tensor, place: Tensor, most: int) -> Tensor:
    """The value at this place from the bottom of what is there."""
    low = torch.where(value == NEVER, torch.inf, value).topk(most, dim=1, largest=False).values
    return low.gather(1, place.clamp(0, most - 1))


def _edge(value: Tensor, column: Tensor, size: Tensor, last: Tensor) -> Edge:
    """The edge of the ``size`` closest, ``last`` being the lowest value among them."""
    missing = size - (value > last).sum(-1, keepdim=True)  # so many of those equal to the last, by column
    equals = (value == last).cumsum(-1, dtype=torch.int32)
    place = torch.searchsorted(equals, missing.to(torch.int32)).clamp(max=max(value.shape[1] - 1, 0))
    return torch.where(size > 0, last, torch.inf), torch.where(missing > 0, column.gather(1, place), -1)
