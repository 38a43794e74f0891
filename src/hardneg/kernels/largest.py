"""A largest value of a streamed loss with its gradient: one more sweep, only where a distribution declares one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hardneg.core.pairing import Cut
from hardneg.core.sweep import Bounds, left_by
from hardneg.kernels.leaves import Gradients, without_autocast
from hardneg.kernels.plan import Plan


class LargestValue(torch.autograd.Function):
    """A largest value as a number with a gradient: that of each pair that reaches it, divided by their number."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, bounds: list[list[Bounds]], place: tuple[int, str], *tensors: Tensor) -> Tensor:
        ctx.plan, ctx.bounds, ctx.place = plan, bounds, place
        ctx.save_for_backward(*tensors)
        values = [bounds_of_rows[place[0]][place[1]] for bounds_of_rows in bounds]
        return values[0].clone() if not values[0].ndim else torch.cat(values)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    @without_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        plan, tensors, wanted = ctx.plan, ctx.saved_tensors, list(ctx.needs_input_grad[3:])
        gradients = Gradients(tensors, plan.leaves.parts, wanted)
        counts = [_number(ctx, i) for i in range(len(plan.rows))]
        everywhere = torch.stack([count.sum() for count in counts]).sum()
        for i, rows in enumerate(plan.rows):
            grad, number = (grads[0][rows], counts[i]) if grads[0].ndim else (grads[0], everywhere)
            for cut, pieces, value, reached in _reaching(ctx, i, wanted):
                gradients.add([value], [reached * (grad / number.clamp(min=1))], pieces, rows, cut)
        return None, None, None, *gradients.totals


def _reaching(ctx: Any, i: int, wanted: list[bool]) -> Iterator[tuple[Cut | None, list[Tensor], Tensor, Tensor]]:
    """For each tile of a block of rows: the values of a bound, and which of them are the largest."""
    plan, (place, name), rows = ctx.plan, ctx.place, ctx.plan.rows[i]
    over = plan.factors[place].bounds()[name].over
    for cut in plan.cuts_over(over):
        with torch.enable_grad():
            pieces = plan.leaves.cut(rows, cut, ctx.saved_tensors, wanted)
            factors, _ = plan.held(pieces)
            tile, mask = plan.masked(rows, cut, pieces, over)
            value = factors[place].bounds()[name].value(tile)
        with torch.no_grad():
            if over == "candidates":
                mask = left_by(factors[:place], ctx.bounds[i][:place])(tile, mask)
            reached = mask & (value == ctx.bounds[i][place][name])
        yield cut, pieces, value, reached.to(value.dtype)


def _number(ctx: Any, i: int) -> Tensor:
    """How many pairs of each row of a block are the largest."""
    none = [False] * len(ctx.saved_tensors)
    return torch.stack([reached.sum(-1, keepdim=True) for *_, reached in _reaching(ctx, i, none)]).sum(0)
