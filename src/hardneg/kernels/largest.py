"""A largest value of a streamed loss with its gradient: one more sweep, only where a distribution declares one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hardneg.core.pairing import Rows
from hardneg.core.sweep import Bounds, left_by
from hardneg.kernels.compiled import Outputs, pull_back
from hardneg.kernels.leaves import Piece
from hardneg.kernels.plan import Compared, Plan
from hardneg.kernels.swept import At, Grads, Sweep
from hardneg.kernels.whole import cut_rows


class LargestValue(Sweep):
    """A largest value as a number with a gradient: that of each pair that reaches it, divided by their number.

    Not compiled: a pair reaches the value where both have the same bits. The last of the pieces are the scores of the
    anchors' own positives.
    """

    share: Tensor

    def __init__(self, plan: Plan, pieces: Sequence[Piece], bounds: list[Bounds], place: tuple[int, str]) -> None:
        super().__init__(plan, pieces)
        self.bounds, (self.place, self.name) = bounds, place
        self.over = plan.factors[self.place].bounds()[self.name].over

    def forward(self, pieces: list[Piece]) -> tuple[Tensor, ...]:
        self.value = self.bounds[self.place][self.name].clone()
        return (self.value,)

    def prepare(self, pieces: list[Piece], grads: Grads) -> None:
        """The gradient of each pair that reaches the value of its row."""
        plan = self.plan
        number = torch.zeros(len(plan.pairing), 1, dtype=torch.long, device=grads[0].device)
        if self.over == "positives":
            number += self._of_own([piece.tensor for piece in pieces])[1].sum(-1, keepdim=True)
        for rows in plan.rows if self._in_tiles else ():
            some = [piece.of(rows) for piece in pieces]
            for cut in plan.cuts:
                compared = plan.compared(rows, cut)
                reached = self._of_tile(rows, compared, [compared.similarity(), *some])[1]
                number[rows] += reached.sum(-1, keepdim=True)
        self.share = grads[0] / (number if grads[0].ndim else number.sum()).clamp(min=1)

    def pull_own(self, pieces: list[Piece], wanted: list[bool], grads: Grads) -> Sequence[Tensor | None]:
        if self.over == "candidates":
            return [None] * len(pieces)

        def outputs_of(inputs: Sequence[Tensor]) -> Outputs:
            value, reached = self._of_own(inputs)
            return [(value, reached * self.share)]

        return pull_back(outputs_of, [piece.tensor for piece in pieces], wanted)

    def pull(self, at: At, pieces: list[Piece], wanted: list[bool], grads: Grads) -> Sequence[Tensor | None]:
        if not self._in_tiles:
            return [None] * len(wanted)

        def outputs_of(inputs: Sequence[Tensor]) -> Outputs:
            value, reached = self._of_tile(at.rows, at.compared, inputs)
            return [(value, reached * (self.share[at.rows] if self.share.ndim else self.share))]

        return pull_back(outputs_of, [at.compared.similarity(), *(piece.of(at.rows) for piece in pieces)], wanted)

    @property
    def _in_tiles(self) -> bool:
        return self.over == "candidates" or self.plan.pairing.label_positives

    def _of_own(self, pieces: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The values of the anchors' own positives, and which of them are the largest."""
        held = self.plan.holders.held(pieces)
        tile, real = self.plan.own_tile(pieces[-1], held.temperature)
        value = held.factors[self.place].bounds()[self.name].value(tile)  # type: ignore[attr-defined]
        return value, real & (value == self.value)

    def _of_tile(self, rows: Rows, compared: Compared, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The values of a tile, and which of them are the largest."""
        held = self.plan.holders.held(inputs[1:])
        met = compared.met(inputs[0], held.temperature)
        value = held.factors[self.place].bounds()[self.name].value(met.tile)  # type: ignore[attr-defined]
        bounds = cut_rows(self.bounds, rows)
        with torch.no_grad():
            mask = met.promoted
            if self.over == "candidates":
                mask = left_by(held.factors[: self.place], bounds[: self.place])(met.tile, met.valid)
            return value, mask & (value == bounds[self.place][self.name])
