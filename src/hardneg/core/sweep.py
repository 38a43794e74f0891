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
from hardneg.core.tiles import NEVER, Tile

Bounds = Mapping[str, Any]
"""The finished bounds of one factor, by name."""
MaskedTile = tuple[Tile, Tensor]
"""A tile, and which of its candidates are valid."""


class Factor(Protocol):
    def bounds(self) -> Mapping[str, Bound]: ...

    def log_weight(self, tile: Tile) -> Tensor: ...


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


def find_bounds(factors: Sequence[Factor], blocks: Sequence[Rows]) -> list[list[Bounds]]:
    """For each block of rows, the bounds of every factor; without gradient. One pass for each factor that has some."""
    found: list[list[Bounds]] = [[] for _ in blocks]
    for i, factor in enumerate(factors):
        declared = factor.bounds()
        if not declared:
            for before in found:
                before.append({})
            continue
        with torch.no_grad():
            states = [
                reduce_rows(declared, rows, left_by(factors[:i], before))
                for rows, before in zip(blocks, found, strict=True)
            ]
            _share_batch_scope(declared, states)
        for before, state in zip(found, states, strict=True):
            before.append(finish(declared, state))
    return found


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
        finished[name] = bound.finish(states[name], finished)
    return finished


def _share_batch_scope(declared: Mapping[str, Bound], states: list[dict[str, State]]) -> None:
    for name, bound in declared.items():
        if bound.scope == "batch":
            total = states[0][name]
            for state in states[1:]:
                total = bound.merge(total, state[name])
            for state in states:
                state[name] = total
