"""Pairs of a streamed loss: the anchors' own positives, and candidates that were promoted to positives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hardneg.core.objectives import Objective, Row
from hardneg.core.pairing import Rows
from hardneg.kernels.compiled import Outputs, pull_back
from hardneg.kernels.leaves import Holders, Piece
from hardneg.kernels.plan import Compared, Plan
from hardneg.kernels.swept import At, Grads, Sweep
from hardneg.kernels.whole import Whole


def masked_sum(objective: Objective, positive: Tensor, row: Row, real: Tensor) -> Tensor:
    """The sum of the losses of each anchor's real pairs, [b, 1]."""
    return objective.real_losses(positive, row, real, row.support > 0).sum(-1, keepdim=True)


class PromotedPairs(Sweep):
    """The sum of the losses of each anchor's promoted candidates, and their number, [b, 1] each.

    The last of the pieces are the statistics of these names.
    """

    def __init__(self, plan: Plan, pieces: Sequence[Piece], names: tuple[str, ...]) -> None:
        super().__init__(plan, pieces)
        self.names = names

    def forward(self, pieces: list[Piece]) -> tuple[Tensor, ...]:
        plan = self.plan
        found: Whole[tuple[Tensor, Tensor]] = Whole(len(plan.pairing))

        def step(rows: Rows) -> None:
            some, tiles = [piece.of(rows) for piece in pieces], []
            for cut in plan.cuts:
                args = plan.holders, plan.compared(rows, cut), some, self.names
                tiles.append(plan.runner(sum_of_tile, plan.shape(rows, cut), *args))
            total, number = (torch.stack(each).sum(0) for each in zip(*tiles, strict=True))
            found.put(rows, (total, number))

        plan.each(step)
        return found.value

    def pull(self, at: At, pieces: list[Piece], wanted: list[bool], grads: Grads) -> Sequence[Tensor | None]:
        some = [piece.of(at.rows) for piece in pieces]
        args = self.plan.holders, at.compared, some, self.names, tuple(wanted), grads[0][at.rows]
        return self.plan.runner(pull_pairs, self.plan.shape(at.rows, at.cut), *args)


def sum_of_tile(
    holders: Holders,
    compared: Compared,
    pieces: Sequence[Tensor],
    names: tuple[str, ...],
    similarity: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The sums of the losses, and their numbers; of other similarities than the tile's, if those are given."""
    held = holders.held(pieces)
    met = compared.met(compared.similarity() if similarity is None else similarity, held.temperature)
    assert met.promoted is not None
    row = Row(dict(zip(names, pieces[len(pieces) - len(names) :], strict=True)), held.temperature)
    total = masked_sum(held.objective, met.tile.s, row, met.promoted)
    return total, met.promoted.sum(-1, keepdim=True).to(total.dtype)


def pull_pairs(
    holders: Holders,
    compared: Compared,
    pieces: Sequence[Tensor],
    names: tuple[str, ...],
    wanted: Sequence[bool],
    grad: Tensor,
) -> list[Tensor | None]:
    def outputs_of(inputs: Sequence[Tensor]) -> Outputs:
        return [(sum_of_tile(holders, compared, inputs[1:], names, inputs[0])[0], grad)]

    return pull_back(outputs_of, [compared.similarity(), *pieces], wanted)
