"""The sweep: bounds first, factor by factor, then the weights of each tile. Whoever uses tiles goes through here.

A factor is a distribution with ``bounds()`` and ``log_weight(tile)``. It never sees who is valid: the sweep masks. A
product is swept left to right, and a bounded factor sees what the factors before it left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hardneg.core.bounds import Bound, State
from hardneg.core.constants import kept
from hardneg.core.tiles import NEVER, Tile
from hardneg.core.types import LogWeights, Scores

Bounds = Mapping[str, Any]
"""The finished bounds of one factor, by name."""
MaskedTile = tuple[Tile, Tensor]
"""A tile, and which of its candidates are valid."""


class Factor(Protocol):
    """A distribution, as far as a sweep knows it."""

    def bounds(self) -> Mapping[str, Bound]: ...

    def log_weight(self, tile: Tile) -> Tensor: ...

    def log_weights(self, scores: Scores) -> LogWeights: ...

    @property
    def pointwise(self) -> bool: ...

    @property
    def looks_around(self) -> bool: ...


class Rows(Protocol):
    """One block of anchors: its tiles, the same at each call, in the order of their columns."""

    def tiles(self) -> Iterable[MaskedTile]: ...

    def positives(self) -> Iterable[MaskedTile]:
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
    tile, left = scores.tile(), scores.valid
    total: Tensor | None = None
    for factor in factors:
        if total is not None and (factor.looks_around or not factor.pointwise):
            left = scores.valid & (total != NEVER)
        if factor.pointwise:
            bounds = _dense_bounds(factor, scores, tile, left)
            log_w = factor.log_weight(tile.bounded(bounds) if bounds else tile)
        else:
            log_w = factor.log_weights(scores if total is None else scores.narrowed(left))
        total = log_w if total is None else total + log_w
    assert total is not None
    # Not masked_fill, which copies first.
    return torch.where(scores.valid, total, kept(torch.full, (), NEVER, dtype=total.dtype, device=total.device))


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


def reduce_rows(declared: Mapping[str, Bound], rows: Rows, left: Left) -> dict[str, State]:
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
