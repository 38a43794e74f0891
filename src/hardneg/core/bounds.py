"""Row bounds, and the passes over tiles that find them and compute log-weights.

A bound is a number (or a few) per row that a distribution needs before it can weigh a single pair: the largest score, a
rank, a count. It is a mergeable reduction over the candidates that the previous factors kept (or over the anchor's
positives): ``merge(of(first), of(second))`` equals ``of`` over both, so tiles, shards and ranks can be reduced
separately. ``finish`` turns the result into the value that ``tile.bound`` holds. Ties are broken by column. A bound is
exact only for the scores it was reduced from, so every pass must use the same tiles.

A factor is a distribution with ``bounds()`` and ``log_weight(tile)``. It never sees which candidates are valid; the
functions here mask them. A product of factors is evaluated from left to right, and a factor with bounds sees only the
candidates that the previous factors kept.

Read ``Bound`` and its subclasses first, then ``dense_weights`` (one tile) and ``find_bounds`` (many tiles). Losses,
mining and audits all call these two.
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
"""Pointwise function of a tile, [r, c]."""
State = tuple[Tensor, ...]
"""Partial result of a bound, which ``merge`` combines with others."""


class Bound(ABC):
    """A reduction over the candidates of a row, or of all rows of the batch; the base class of all bounds."""

    over: str = "candidates"
    """``"candidates"``: those that the previous factors kept; ``"positives"``: the anchor's own and same-label ones."""
    scope: str = "row"
    """``"row"``, or ``"batch"`` for one number for all anchors, which mining does not support."""
    grad: bool = False
    """True if the gradient flows through it; a streamed loss supports that for ``Largest`` only."""

    @abstractmethod
    def of(self, tile: Tile, mask: Tensor) -> State:
        """Reduce the pairs of a tile.

        Args:
            tile: Scores [r, c] with tags.
            mask: True for pairs that take part, [r, c].
        """

    @abstractmethod
    def merge(self, first: State, second: State) -> State:
        """Combine two states; the columns of the second come after those of the first."""

    def shortened(self, state: State) -> State:
        """Return an equivalent state in less memory, to be stored or sent."""
        return state

    def finish(self, state: State, earlier: Mapping[str, Any]) -> Any:
        """Return the value that ``tile.bound`` holds, usually [r, 1].

        Args:
            state: The merged state of the whole row.
            earlier: Finished bounds that were declared before this one, by name.
        """
        return state[0]


class Count(Bound):
    """The number of candidates."""

    def of(self, tile: Tile, mask: Tensor) -> State:
        """Count the pairs in the mask, [r, 1]."""
        return (mask.sum(-1, keepdim=True),)

    def merge(self, first: State, second: State) -> State:
        """Add two counts."""
        return (first[0] + second[0],)


@dataclass(frozen=True, eq=False)
class Largest(Bound):
    """The largest value of a pointwise function; -inf for rows without candidates.

    Args:
        value: Function of a tile that returns the values, [r, c].
        over: ``"candidates"`` or ``"positives"``.
        scope: ``"row"``, or ``"batch"`` for the largest of all rows.
        grad: Let the gradient flow to the largest value, split evenly between ties.
    """

    value: Value
    over: str = "candidates"
    scope: str = "row"
    grad: bool = False

    def of(self, tile: Tile, mask: Tensor) -> State:
        """Return the largest value in the mask, [r, 1], or a scalar for the whole batch."""
        value = self.value(tile)
        value = torch.where(mask, value if self.grad else value.detach(), NEVER)
        if not value.shape[1]:
            return (value.new_full(() if self.scope == "batch" else (len(value), 1), NEVER),)
        return (value.amax() if self.scope == "batch" else value.amax(-1, keepdim=True),)

    def merge(self, first: State, second: State) -> State:
        """Return the larger of two states."""
        return (torch.maximum(first[0], second[0]),)


@dataclass(frozen=True, eq=False)
class LogMeanExp(Bound):
    """log of the mean of e^value; -inf for rows without candidates.

    It is reduced in float64 relative to the largest value. The result of equal values is exactly that value, and other
    tiles change the result by at most a rounding error of float64.

    Args:
        value: Function of a tile that returns the values, [r, c].
    """

    value: Value

    def of(self, tile: Tile, mask: Tensor) -> State:
        """Return the largest value, the sum of the exponentials relative to it, and the count, [r, 1] each."""
        value = torch.where(mask, self.value(tile).detach().double(), NEVER)
        if not value.shape[1]:
            empty = value.new_zeros(len(value), 1)
            return empty + NEVER, empty, empty
        top = value.amax(-1, keepdim=True)
        return top, (value - _finite(top)).exp().sum(-1, keepdim=True), mask.sum(-1, keepdim=True).double()

    def merge(self, first: State, second: State) -> State:
        """Rescale both sums to the larger of the two largest values and add them."""
        top = torch.maximum(first[0], second[0])
        sums = [total * (each - _finite(top)).exp() for each, total, _ in (first, second)]
        return top, sums[0] + sums[1], first[2] + second[2]

    def finish(self, state: State, earlier: Mapping[str, Any]) -> Tensor:
        """Return the log-mean, [r, 1], in float64."""
        top, total, count = state
        return torch.where(count == 0, NEVER, top + (total / count).log())


def _finite(top: Tensor) -> Tensor:
    """Replace -inf, the largest value of a row without candidates, with 0."""
    return torch.where(top == NEVER, 0.0, top)


Edge = tuple[Tensor, Tensor]
"""Value and column, [r, 1] each, of the last member of a set of closest candidates."""
Size = Callable[[int], int]
"""Function of the number of candidates in a row that returns an upper limit for a count."""


@dataclass(frozen=True, eq=False)
class Window(Bound):
    """Ranks start to stop - 1 of each row, 0 being the closest, as the edges of two sets of closest candidates.

    It needs a bound named "count" to be declared before it.

    Args:
        places: Function of the earlier bounds that returns start and stop, [r, 1] each.
        skipped: Upper limit of the number of candidates before the window, as a function of the row length; 0 if the
            window starts at rank 0. Limits are needed because topk must know its size before it sees the rows.
        closest: Upper limit of the number of candidates before the end of the window.
        farthest: Upper limit of the number of candidates after the window; 0 if the window extends to the last one.
        by: The value that is ranked, ``"score"`` or ``"guide"``; see ``Tile.read``.
        who: Name of the distribution, for error messages.
        nearest: Number of closest candidates that determine the edges, if known; shortens the state.
        slack: Share of the ranks by which an edge may be off where that is faster.
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
        """Return the values that are ranked, without gradient, [r, c]."""
        return tile.read(self.by, self.who)[0].detach()

    def of(self, tile: Tile, mask: Tensor) -> State:
        """Return the values, [r, c], and their columns."""
        value = torch.where(mask, self.value(tile), NEVER)
        return value, tile.column[None]  # [1, c]: the rows share their columns

    def merge(self, first: State, second: State) -> State:
        """Concatenate two states and shorten the result."""
        columns = [first[1], second[1]]
        if len({len(each) for each in columns}) > 1:
            columns = [column.expand(value.shape) for value, column in (first, second)]
        return self.shortened((torch.cat([first[0], second[0]], dim=1), torch.cat(columns, dim=1)))

    def shortened(self, state: State) -> State:
        """Keep only the ``nearest`` candidates if they determine the edges, in the order of their columns."""
        value, column = state
        if self.nearest is None or value.shape[1] <= max(2 * self.nearest, 64):
            return state
        if not self.nearest:
            return value[:, :0], column[:, :0]
        column = column.expand(value.shape)
        size = torch.full_like(value[:, :1], self.nearest, dtype=torch.long)
        edge = edge_of(value, column, size, value.topk(self.nearest, dim=1).values[:, -1:])
        chosen = torch.where(~beyond(value, column, edge), value, NEVER)
        index = chosen.topk(self.nearest, dim=1).indices.sort(dim=1).values
        return value.gather(1, index), column.gather(1, index)

    def finish(self, state: State, earlier: Mapping[str, Any]) -> tuple[Edge | None, Edge | None]:
        """Return the edge before the window and the edge at its end; None for an edge that does not exist."""
        value, column = state[0], state[1].expand(state[0].shape)
        start, stop = self.places(earlier)
        n, count = value.shape[1], earlier["count"]
        skipped, closest, farthest = (min(size(n), n) for size in (self.skipped, self.closest, self.farthest))
        ends = bool(n and farthest)
        from_top = ends and closest <= farthest
        top = value.topk(max(skipped, closest if from_top else 0), dim=1).values  # one topk for both edges
        before = after = None
        if skipped:
            before = edge_of(value, column, start, _place(top, start - 1))
        if from_top:
            after = edge_of(value, column, stop, _place(top, stop - 1))
        elif ends:
            after = edge_of(value, column, stop, _place_from_end(value, count - stop, min(farthest + 1, n)))
        return before, after


def beyond(value: Tensor, column: Tensor, edge: Edge) -> Tensor:
    """Return True for candidates farther than the edge; False for NaN, which must stay visible."""
    return (value < edge[0]) | ((value == edge[0]) & (column > edge[1]))


def within(value: Tensor, column: Tensor, edge: Edge) -> Tensor:
    """Return True for candidates up to and including the edge; False for NaN."""
    return (value > edge[0]) | ((value == edge[0]) & (column <= edge[1]))


def _place(top: Tensor, place: Tensor) -> Tensor:
    """Return the value at this rank from the top; +inf for negative ranks."""
    return torch.where(place < 0, torch.inf, top.gather(1, place.clamp(0, top.shape[1] - 1)))


def _place_from_end(value: Tensor, place: Tensor, most: int) -> Tensor:
    """Return the value at this rank from the bottom, not counting masked candidates."""
    low = torch.where(value == NEVER, torch.inf, value).topk(most, dim=1, largest=False).values
    return low.gather(1, place.clamp(0, most - 1))


def edge_of(value: Tensor, column: Tensor, size: Tensor, last: Tensor) -> Edge:
    """Return the edge of the ``size`` closest candidates, where ``last`` is the lowest value among them.

    Args:
        value: Values of the candidates, [r, c].
        column: Their columns, [r, c].
        size: Number of closest candidates, [r, 1].
        last: Lowest value among them, [r, 1].
    """
    missing = size - (value > last).sum(-1, keepdim=True)  # number of ties with the last value to include, by column
    equals = (value == last).cumsum(-1, dtype=torch.int32)
    place = torch.searchsorted(equals, missing.to(torch.int32)).clamp(max=max(value.shape[1] - 1, 0))
    return torch.where(size > 0, last, torch.inf), torch.where(missing > 0, column.gather(1, place), -1)


Bounds = Mapping[str, Any]
"""The finished bounds of one factor, by name."""
TileAndMask = tuple[Tile, Tensor]
"""A tile, and a mask of its valid candidates."""


class Factor(Protocol):
    """The part of a distribution that this module uses; see ``hardneg.negatives.base``."""

    def bounds(self) -> Mapping[str, Bound]:
        """Return the bounds it needs, by name."""
        ...

    def log_weight(self, tile: Tile) -> Tensor:
        """Return the log-weights of a tile, [r, c] or broadcastable to it."""
        ...

    def log_weights(self, scores: Scores) -> LogWeights:
        """Return the log-weights of whole rows, [b, n]."""
        ...

    def allows(self, tile: Tile) -> Tensor | None:
        """Return a mask if the factor is one and needs no log-weights; otherwise None."""
        ...

    @property
    def pointwise(self) -> bool:
        """True if ``log_weight`` works on single tiles."""
        ...

    @property
    def looks_around(self) -> bool:
        """True if weights depend on the candidates that other factors kept."""
        ...


class RowBlock(Protocol):
    """A block of anchors that yields its tiles: the same at each call, in the order of their columns."""

    def tiles(self) -> Iterable[TileAndMask]:
        """Yield the tiles of the candidates, with their masks."""
        ...

    def positives(self) -> Iterable[TileAndMask]:
        """Yield tiles of the anchors' own positives and of candidates that are positives by label."""
        ...


def weigh(factors: Sequence[Factor], tile: Tile, bounds: Sequence[Bounds]) -> Tensor:
    """Compute the log-weights of a tile under a product of factors, [r, c] or broadcastable to it.

    Args:
        factors: The factors, at least one.
        tile: The tile; its ``bound`` is ignored.
        bounds: Finished bounds of each factor.

    Returns:
        The sum of the factors' log-weights, for valid and invalid candidates alike.
    """
    total = factors[0].log_weight(tile.bounded(bounds[0]))
    for factor, bound in zip(factors[1:], bounds[1:], strict=True):
        total = total + factor.log_weight(tile.bounded(bound))
    return total


class Reducer:
    """Strategy to compute the bounds of one factor for a block of rows; subclasses use kernels or shards."""

    def states(self, factors: Sequence[Factor], i: int, rows: Any, before: Sequence[Bounds]) -> dict[str, State]:
        """Return the states of the bounds of factor i, given the bounds of the factors before it."""
        return reduce_rows(factors[i].bounds(), rows, left_by(factors[:i], before))

    def finish(self, declared: Mapping[str, Bound], states: Mapping[str, State], rows: Any) -> Bounds:
        """Turn the states into finished bounds."""
        return finish(declared, states)


def find_bounds(factors: Sequence[Factor], blocks: Sequence[Any], reducer: Reducer = Reducer()) -> list[list[Bounds]]:
    """Find the bounds of every factor for each block of rows, without gradient.

    This takes one pass over the tiles for each factor that has bounds.

    Args:
        factors: The factors of the product, in order.
        blocks: Blocks of rows.
        reducer: Computes the states of one block.

    Returns:
        For each block, the finished bounds of each factor.
    """
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
            if not batch:  # finish at once, so that only one block's states are in memory
                before.append(reducer.finish(declared, states.pop(), rows))
        if batch:
            _share_batch_scope(declared, states)
            for rows, before, state in zip(blocks, found, states, strict=True):
                before.append(reducer.finish(declared, state, rows))
    return found


def dense_weights(factors: Sequence[Factor], scores: Scores) -> LogWeights:
    """Compute the log-weights of a product over all candidates as one tile, with gradient through the bounds.

    Factors that are not pointwise get whole rows with the candidates that the previous factors kept.

    Args:
        factors: The factors of the product, in order.
        scores: Dense scores of b anchors.

    Returns:
        Log-weights [b, n]; NEVER for candidates that are not valid.
    """
    tile, valid, left = scores.tile(), scores.valid, scores.valid
    total: Tensor | None = None
    for factor in factors:
        allowed = factor.allows(tile)
        if allowed is not None:  # a mask needs fewer operations than log-weights
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
    # Not masked_fill, which copies its input first.
    return torch.where(valid, total, constant(torch.full, (), NEVER, dtype=total.dtype, device=total.device))


def _dense_bounds(factor: Factor, scores: Scores, tile: Tile, left: Tensor) -> Bounds:
    declared = factor.bounds()
    states = {}
    for name, bound in declared.items():
        one = (tile, left) if bound.over == "candidates" else (scores.positive_tile(), scores.positive_valid)
        states[name] = bound.of(*one)
    return finish(declared, states)


Narrow = Callable[[Tile, Tensor], Tensor]
"""Function of a tile and a mask [r, c] that returns a smaller mask."""


def left_by(factors: Sequence[Factor], bounds: Sequence[Bounds]) -> Narrow:
    """Return a function that narrows a mask to the candidates that these factors keep."""
    return lambda tile, valid: valid & (weigh(factors, tile, bounds) != NEVER) if factors else valid


def reduce_rows(declared: Mapping[str, Bound], rows: RowBlock, left: Narrow) -> dict[str, State]:
    """Reduce a factor's bounds over all tiles of one block of rows and merge the states.

    Args:
        declared: The bounds by name.
        rows: The block of rows.
        left: Function of a tile and its valid mask that returns the candidates to reduce over.
    """
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
    """Finish all bounds of a factor in the order they were declared; detach those without gradient."""
    finished: dict[str, Any] = {}
    for name, bound in declared.items():
        value = bound.finish(states[name], finished)
        finished[name] = value if bound.grad else _detached(value)
    return finished


def _detached(value: Any) -> Any:
    """Detach a tensor, or a tuple of tensors, as a streamed loss would."""
    if isinstance(value, tuple):
        return tuple(_detached(each) for each in value)
    return value.detach() if isinstance(value, Tensor) else value


def _share_batch_scope(declared: Mapping[str, Bound], states: list[dict[str, State]]) -> None:
    """Merge bounds of batch scope over all blocks, so that every block has the same state."""
    for name, bound in declared.items():
        if bound.scope == "batch":
            total = states[0][name]
            for state in states[1:]:
                total = bound.merge(total, state[name])
            for state in states:
                state[name] = total
