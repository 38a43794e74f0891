"""One sweep over tiles as a differentiable function: whatever it sums, its backward pass recomputes each tile.

The gradient by a tile's similarities is formed by the vector-Jacobian product of pointwise functions, and reaches the
vectors by products: memory is that of a tile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hardneg.core.fused import first_derivative_only
from hardneg.core.pairing import Cut, Pairing, Rows
from hardneg.kernels.leaves import Piece
from hardneg.kernels.plan import Compared, Plan
from hardneg.kernels.products import add_rows

Grads = Sequence[Tensor]
"""The gradients by what a sweep gives."""


class At(NamedTuple):
    """A tile: its anchors, its candidates, and what is compared there."""

    rows: Rows
    cut: Cut
    compared: Compared


class Sweep(ABC):
    """What a sweep sums over the tiles of a plan, and what it hands back to them."""

    def __init__(self, plan: Plan, pieces: Sequence[Piece]) -> None:
        self.plan, self.per_anchor = plan, [piece.per_anchor for piece in pieces]

    @abstractmethod
    def forward(self, pieces: list[Piece]) -> tuple[Tensor, ...]: ...

    def prepare(self, pieces: list[Piece], grads: Grads) -> None:  # noqa: B027
        """What the backward pass needs of all rows before the first tile."""

    def pull_own(self, pieces: list[Piece], wanted: list[bool], grads: Grads) -> Sequence[Tensor | None]:
        """The gradients by the pieces that come from the anchors' own positives."""
        return [None] * len(pieces)

    @abstractmethod
    def pull(self, at: At, pieces: list[Piece], wanted: list[bool], grads: Grads) -> Sequence[Tensor | None]:
        """The gradients by the similarities of a tile and by the pieces."""


def sweep(task: Sweep, pairing: Pairing, pieces: Sequence[Piece]) -> tuple[Tensor, ...]:
    """What a task sums, with gradients to the vectors of the pairing that was planned and to the pieces."""
    vectors = [pairing.anchors.vectors, *(keys.vectors for keys in pairing.candidates)]
    found: tuple[Tensor, ...] = _Swept.apply(task, *vectors, *(piece.tensor for piece in pieces))  # type: ignore[no-untyped-call]
    return found


class _Swept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, task: Sweep, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.task, ctx.number = task, len(tensors) - len(task.per_anchor)
        ctx.shapes = [each.shape for each in tensors[: ctx.number]]
        ctx.save_for_backward(*(tensors[ctx.number :] if task.plan.products.half else tensors))
        return task.forward(_pieces(task, tensors))

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        with torch.autocast(grads[0].device.type, enabled=False):
            task, wanted = ctx.task, list(ctx.needs_input_grad[1:])
            pieces = _pieces(task, ctx.saved_tensors)
            totals = _Totals(task, pieces, wanted, ctx.shapes, grads[0].device)
            task.prepare(pieces, grads)
            totals.add_pieces(slice(0, len(task.plan.pairing)), task.pull_own(pieces, totals.wanted_pieces, grads))
            if any(wanted):
                task.plan.each(lambda rows: totals.pull(rows, pieces, grads))
            return None, *totals.vectors, *totals.pieces


def _pieces(task: Sweep, tensors: Sequence[Tensor]) -> list[Piece]:
    some = tensors[len(tensors) - len(task.per_anchor) :]
    return [Piece(tensor.detach(), per_anchor) for tensor, per_anchor in zip(some, task.per_anchor, strict=True)]


class _Totals:
    """The sums of the gradients of all tiles; None where none is needed."""

    def __init__(
        self, task: Sweep, pieces: list[Piece], wanted: list[bool], shapes: list[torch.Size], device: torch.device
    ) -> None:
        self.task, number = task, len(shapes)
        self.wanted_pieces = wanted[number:]
        products = task.plan.products
        again = [False, *(pool is products.anchors and wanted[0] for pool in products.pools)]  # add to the anchors'
        self.vectors = [
            torch.zeros(shape, dtype=products.dtype, device=device) if want and not twice else None
            for shape, want, twice in zip(shapes, wanted[:number], again, strict=True)
        ]
        self.pieces = [
            torch.zeros_like(piece.tensor) if want else None
            for piece, want in zip(pieces, self.wanted_pieces, strict=True)
        ]

    def pull(self, rows: Rows, pieces: list[Piece], grads: Grads) -> None:
        plan, products, (anchors, *pools) = self.task.plan, self.task.plan.products, self.vectors
        for cut in plan.cuts:
            own = anchors is not None and products.pools[cut.pool] is products.anchors
            pool = anchors if own else pools[cut.pool]
            wanted = [anchors is not None or pool is not None, *self.wanted_pieces]
            grad, *of_pieces = self.task.pull(At(rows, cut, plan.compared(rows, cut)), pieces, wanted, grads)
            if grad is not None:
                products.add_gradient(grad.to(products.dtype_of_gradient), rows, cut, anchors, pool)
            self.add_pieces(rows, of_pieces)

    def add_pieces(self, rows: Rows, gradients: Sequence[Tensor | None]) -> None:
        for total, gradient, per_anchor in zip(self.pieces, gradients, self.task.per_anchor, strict=True):
            if total is not None and gradient is not None:
                add_rows(total, rows if per_anchor else slice(None), gradient)
