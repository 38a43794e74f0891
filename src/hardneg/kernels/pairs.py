"""Pairs of a streamed loss: the anchors' own positives, and candidates that were promoted to positives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hardneg.core.objectives import Objective, Row
from hardneg.kernels.compiled import pull_back
from hardneg.kernels.leaves import Holders, Piece
from hardneg.kernels.plan import Compared, Plan
from hardneg.kernels.swept import At, Grads, Sweep


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
        found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in plan.rows]
        for i, rows, cut in plan.tiles():
            some = [piece.of(rows) for piece in pieces]
            compared = plan.compared(rows, cut)
            args = plan.holders, compared, some, self.names
            found[i].append(plan.runner(sum_of_tile, plan.shape(rows, cut), *args))
        return tuple(torch.cat([torch.stack([tile[k] for tile in row]).sum(0) for row in found]) for k in (0, 1))

    def pull(self, at: At, pieces: list[Piece], wanted: list[bool], grads: Grads) -> Sequence[Tensor | None]:
        some = [piece.of(at.rows) for piece in pieces]
        args = self.plan.holders, at.compared, some, self.names, tuple(wanted), grads[0][at.rows]
        return self.plan.runner(pull_pairs, self.plan.shape(at.rows, at.cut), *args)


def sum_of_tile(
    holders: Holders, compared: Compared, pieces: Sequence[Tensor], names: tuple[str, ...]
) -> tuple[Tensor, Tensor]:
    return _sum(holders, compared, compared.similarity(), pieces, names)


def pull_pairs(
    holders: Holders,
    compared: Compared,
    pieces: Sequence[Tensor],
    names: tuple[str, ...],
    wanted: Sequence[bool],
    grad: Tensor,
) -> list[Tensor | None]:
    def outputs_of(inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        return [_sum(holders, compared, inputs[0], inputs[1:], names)[0]], [grad]

    return pull_back(outputs_of, [compared.similarity(), *pieces], wanted)


def _sum(
    holders: Holders, compared: Compared, similarity: Tensor, pieces: Sequence[Tensor], names: tuple[str, ...]
) -> tuple[Tensor, Tensor]:
    held = holders.held(pieces)
    met = compared.met(similarity, held.temperature)
    assert met.promoted is not None
    row = Row(dict(zip(names, pieces[len(pieces) - len(names) :], strict=True)), held.temperature)
    total = masked_sum(held.objective, met.tile.s, row, met.promoted)
    return total, met.promoted.sum(-1, keepdim=True).to(total.dtype)
