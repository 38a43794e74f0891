"""Pairs of a streamed loss: the anchors' own positives, and candidates that were promoted to positives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hardneg.core.objectives import Objective, Row
from hardneg.core.pairing import Cut
from hardneg.kernels.leaves import Gradients, Part, without_autocast
from hardneg.kernels.plan import Plan


def masked_sum(objective: Objective, positive: Tensor, row: Row, real: Tensor) -> Tensor:
    """The sum of the losses of each anchor's real pairs, [b, 1]."""
    return objective.real_losses(positive, row, real, row.support > 0).sum(-1, keepdim=True)


class PromotedPairs(torch.autograd.Function):
    """The sum of the losses of each anchor's promoted candidates, and their number, [b, 1] each."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, names: list[str], *tensors: Tensor) -> tuple[Tensor, Tensor]:
        ctx.plan, ctx.names = plan, names
        ctx.save_for_backward(*tensors)
        none = [False] * len(tensors)
        found = [
            [_of_tile(plan, names, rows, cut, _pieces(plan, rows, cut, tensors, none)) for cut in plan.cuts]
            for rows in plan.rows
        ]
        sums, counts = (torch.cat([torch.stack([tile[i] for tile in row]).sum(0) for row in found]) for i in (0, 1))
        ctx.mark_non_differentiable(counts)
        return sums, counts

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    @without_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        plan, tensors, wanted = ctx.plan, ctx.saved_tensors, list(ctx.needs_input_grad[2:])
        gradients = Gradients(tensors, _parts(plan, tensors), wanted)
        for rows in plan.rows:
            for cut in plan.cuts:
                with torch.enable_grad():
                    pieces = _pieces(plan, rows, cut, tensors, wanted)
                    total, _ = _of_tile(plan, ctx.names, rows, cut, pieces)
                gradients.add([total], [grads[0][rows]], pieces, rows, cut)
        return None, None, *gradients.totals


def _parts(plan: Plan, tensors: Sequence[Tensor]) -> list[Part]:
    return [*plan.leaves.parts, *[Part("rows")] * (len(tensors) - len(plan.leaves.parts))]


def _pieces(plan: Plan, rows: slice, cut: Cut, tensors: Sequence[Tensor], grad: Sequence[bool]) -> list[Tensor]:
    return plan.leaves.cut(rows, cut, tensors, grad, _parts(plan, tensors))


def _of_tile(plan: Plan, names: list[str], rows: slice, cut: Cut, pieces: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    number = len(plan.leaves.parts)
    _, objective = plan.held(pieces[:number])
    met = plan.met(rows, cut, pieces)
    assert met.promoted is not None
    row = Row(dict(zip(names, pieces[number:], strict=True)), met.tile.temperature)
    total = masked_sum(objective, met.tile.s, row, met.promoted)
    return total, met.promoted.sum(-1, keepdim=True).to(total.dtype)
