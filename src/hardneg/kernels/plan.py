"""What a streamed loss sweeps, and in which tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hardneg.core.bounds import Largest
from hardneg.core.objectives import Objective
from hardneg.core.pairing import Cut, Met, Pairing
from hardneg.core.statistics import Statistic, Support
from hardneg.core.sweep import MaskedTile
from hardneg.kernels.leaves import Leaves
from hardneg.negatives.base import Negatives

TILE_OF = {"cpu": (256, 2048), "cuda": (4096, 8192)}
"""Rows and columns of a tile, by the kind of device."""


@dataclass(eq=False)
class Plan:
    """What is swept, and in which tiles: the same in every pass, forward and backward."""

    pairing: Pairing
    factors: tuple[Negatives, ...]
    objective: Objective
    tile: tuple[int, int] | None = None
    leaves: Leaves = field(init=False)
    cuts: list[Cut] = field(init=False)
    rows: list[slice] = field(init=False)

    def __post_init__(self) -> None:
        device = self.pairing.anchors.vectors.device.type
        rows, columns = self.tile or TILE_OF.get(device, TILE_OF["cuda"])
        self.leaves = Leaves(self.pairing, [*self.factors, self.objective])
        self.cuts = self.pairing.cuts(columns)
        self.rows = [slice(low, min(low + rows, len(self.pairing))) for low in range(0, len(self.pairing), rows)]

    @property
    def largest(self) -> list[tuple[int, str]]:
        """The bounds through which a gradient flows: factor and name."""
        return [
            (i, name)
            for i, factor in enumerate(self.factors)
            for name, bound in factor.bounds().items()
            if isinstance(bound, Largest) and bound.grad
        ]

    def statistics(self, objective: Objective) -> dict[str, Statistic]:
        return {"support": Support(), **objective.statistics()}

    def blocks(self) -> list[Block]:
        return [Block(self, rows) for rows in self.rows]

    def met(self, rows: slice, cut: Cut, pieces: Sequence[Tensor]) -> Met:
        return self.pairing.tile(rows, cut, pieces[0], pieces[2 + cut.pool], self.leaves.temperature(pieces))

    def positive(self, rows: slice, pieces: Sequence[Tensor]) -> MaskedTile:
        return self.pairing.positive_tile(rows, pieces[0], pieces[1], self.leaves.temperature(pieces))

    def cuts_over(self, over: str) -> Sequence[Cut | None]:
        """The tiles that hold candidates, or positives: None for the anchors' own, then those with promoted ones."""
        if over == "candidates":
            return self.cuts
        return [None, *(self.cuts if self.pairing.label_positives else [])]

    def masked(self, rows: slice, cut: Cut | None, pieces: Sequence[Tensor], over: str) -> MaskedTile:
        """A tile, and which of its pairs are candidates, or positives."""
        if cut is None:
            return self.positive(rows, pieces)
        met = self.met(rows, cut, pieces)
        if over == "candidates":
            return met.tile, met.valid
        assert met.promoted is not None
        return met.tile, met.promoted

    def held(self, pieces: Sequence[Tensor]) -> tuple[tuple[Negatives, ...], Objective]:
        *factors, objective = self.leaves.held(pieces)
        return tuple(factors), objective


@dataclass(eq=False)
class Block:
    """Some anchors, for the sweep of the bounds."""

    plan: Plan
    rows: slice

    def tiles(self) -> Iterator[MaskedTile]:
        for cut in self.plan.cuts:
            met = self.plan.pairing.tile(self.rows, cut)
            yield met.tile, met.valid

    def positives(self) -> Iterator[MaskedTile]:
        yield self.plan.pairing.positive_tile(self.rows)
        if self.plan.pairing.label_positives:
            for cut in self.plan.cuts:
                met = self.plan.pairing.tile(self.rows, cut)
                assert met.promoted is not None
                yield met.tile, met.promoted
