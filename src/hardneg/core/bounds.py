"""Bounds, and the sweep that finds them and weighs tiles. Whoever uses tiles goes through here.

A bound is what a distribution needs to know of a whole row, as a reduction that merges. It is reduced over the
candidates that the factors before it left (or over the anchor's positives), tile by tile, shard by shard or rank by
rank: ``merge(of(first), of(second))`` is what ``of`` both would give, and ``finish`` turns that into the numbers that
``tile.bound`` holds. Ties are broken by column. A bound is right for exactly the scores that it was reduced from: every
pass cuts the same tiles.

A factor is a distribution with ``bounds()`` and ``log_weight(tile)``. It never sees which candidates are valid: the
sweep masks them. A product is swept left to right, and a bounded factor sees what the factors before it left.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hardneg.core.tensors import constant
from hardneg.core.tiles import NEVER, Tile
from hardneg.core.types import LogWeights, Scores

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


Bounds = Mapping[str, Any]
"""The finished bounds of one factor, by name."""
TileAndMask = tuple[Tile, Tensor]
"""A tile, and which of its candidates are valid."""


class Factor(Protocol):
    """A distribution, as far as a sweep knows it."""

    def bounds(self) -> Mapping[str, Bound]: ...

    def log_weight(self, tile: Tile) -> Tensor: ...

    def log_weights(self, scores: Scores) -> LogWeights: ...

    def allows(self, tile: Tile) -> Tensor | None: ...

    @property
    def pointwise(self) -> bool: ...

    @property
    def looks_around(self) -> bool: ...


class RowBlock(Protocol):
    """One block of anchors: its tiles, the same at each call, in the order of their columns."""

    def tiles(self) -> Iterable[TileAndMask]: ...

    def positives(self) -> Iterable[TileAndMask]:
        """The anchors' own positives, and the candidates that were promoted to positives."""
        ...


def weigh(factors: Sequence[Factor], tile: Tile, bounds: Sequence[Bounds]) -> Tensor:
    """The log-weights of a tile, [r, c] or broadcastable to it; valid or not."""
    total = factors[0].log_weight(tile.bounded(bounds[0]))
    for factor, bound in zip(factors[1:], bounds[1:], strict=True):
        total = total + factor.log_weight(tile.bounded(bound))
    return total


class Reducer:
    """How the bounds of one factor are found for a block of rows."""

    def states(self, factors: Sequence[Factor], i: int, rows: Any, before: Sequence[Bounds]) -> dict[str, State]:
        """The states of the bounds of factor i, given the bounds of the factors before it."""
        return reduce_rows(factors[i].bounds(), rows, left_by(factors[:i], before))

    def finish(self, declared: Mapping[str, Bound], states: Mapping[str, State], rows: Any) -> Bounds:
        return finish(declared, states)


def find_bounds(factors: Sequence[Factor], blocks: Sequence[Any], reducer: Reducer = Reducer()) -> list[list[Bounds]]:
    """For each block of rows, the bounds of every factor; without gradient. One pass for each factor that has some."""
    found: list[list[Bounds]] = [[] for _ in blocks]
    for i, factor in enumerate(factors):
        declared = factor.bounds()
        if not declared:
            for before in found:
                before.append({})
            continue
        batch = any(bound.scope == "batch" for bound in declared.values())
        states: list[dict[str, State]] = []
        for rows, before in zip(blocks, found, strict=True):
            with torch.no_grad():
                states.append(reducer.states(factors, i, rows, before))
            if not batch:  # at once, so that the states of one block are held and not those of all
                before.append(reducer.finish(declared, states.pop(), rows))
        if batch:
            _share_batch_scope(declared, states)
            for rows, before, state in zip(blocks, found, states, strict=True):
                before.append(reducer.finish(declared, state, rows))
    return found


def dense_weights(factors: Sequence[Factor], scores: Scores) -> LogWeights:
    """The log-weights of a product over all candidates: the sweep of one tile, with gradient through the bounds.

    A factor without ``log_weight`` gets the whole rows that the factors before it left.
    """
    tile, valid, left = scores.tile(), scores.valid, scores.valid
    total: Tensor | None = None
    for factor in factors:
        allowed = factor.allows(tile)
        if allowed is not None:  # a mask takes fewer operations than its log-weights
            left = valid = valid & allowed
            continue
        if total is not None and (factor.looks_around or not factor.pointwise):
            left = valid & (total != NEVER)
        if factor.pointwise:
            bounds = _dense_bounds(factor, scores, tile, left)
            log_w = factor.log_weight(tile.bounded(bounds) if bounds else tile)
        else:
            log_w = factor.log_weights(scores if left is scores.valid else scores.narrowed(left))
        total = log_w if total is None else total + log_w
    if total is None:
        total = tile.constant(0.0)
    # Not masked_fill, which copies first.
    return torch.where(valid, total, constant(torch.full, (), NEVER, dtype=total.dtype, device=total.device))


def _dense_bounds(factor: Factor, scores: Scores, tile: Tile, left: Tensor) -> Bounds:
    declared = factor.bounds()
    states = {}
    for name, bound in declared.items():
        one = (tile, left) if bound.over == "candidates" else (scores.positive_tile(), scores.positive_valid)
        states[name] = bound.of(*one)
    return finish(declared, states)


Left = Callable[[Tile, Tensor], Tensor]


def left_by(factors: Sequence[Factor], bounds: Sequence[Bounds]) -> Left:
    """Which valid candidates these factors leave."""
    return lambda tile, valid: valid & (weigh(factors, tile, bounds) != NEVER) if factors else valid


def reduce_rows(declared: Mapping[str, Bound], rows: RowBlock, left: Left) -> dict[str, State]:
    """The merged states of a factor's bounds over the tiles of one block of rows."""
    states: dict[str, State] = {}
    for over in ("candidates", "positives"):
        some = {name: bound for name, bound in declared.items() if bound.over == over}
        if not some:
            continue
        for tile, mask in rows.tiles() if over == "candidates" else rows.positives():
            mask = left(tile, mask) if over == "candidates" else mask
            for name, bound in some.items():
                state = bound.of(tile, mask)
                states[name] = bound.merge(states[name], state) if name in states else state
    return states


def finish(declared: Mapping[str, Bound], states: Mapping[str, State]) -> Bounds:
    finished: dict[str, Any] = {}
    for name, bound in declared.items():
        value = bound.finish(states[name], finished)
        finished[name] = value if bound.grad else _detached(value)
    return finished


def _detached(value: Any) -> Any:
    """Without gradient, as in a streamed loss: a tensor, or a tuple of them."""
    if isinstance(value, tuple):
        return tuple(_detached(each) for each in value)
    return value.detach() if isinstance(value, Tensor) else value


def _share_batch_scope(declared: Mapping[str, Bound], states: list[dict[str, State]]) -> None:
    for name, bound in declared.items():
        if bound.scope == "batch":
            total = states[0][name]
            for state in states[1:]:
                total = bound.merge(total, state[name])
            for state in states:
                state[name] = total
