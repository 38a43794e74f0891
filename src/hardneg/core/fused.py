"""Functions in few operations, with their gradients: a small batch on a GPU costs as much as its operations.

Derivatives of higher order go through plain operations.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from torch import Tensor


def is_plain(tensor: Tensor) -> bool:
    """Whether no compiler, subclass or transform of torch.func must see the single operations."""
    transformed = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return type(tensor) is Tensor and not transformed


class Unit(torch.autograd.Function):
    """``unit`` of float32 or half precision. A norm in float64 needs no scale; that of a zero row is made infinite.

    (1 - u u') / norm is symmetric: derivatives forward are those backward.
    """

    @staticmethod
    def forward(ctx: Any, vectors: Tensor) -> Tensor:
        norm = _norm(vectors)
        norm.masked_fill_(norm == 0, math.inf)
        rows = torch.div(vectors, norm, out=torch.empty_like(vectors, dtype=torch.float32))
        ctx.save_for_backward(vectors, rows, norm)
        ctx.save_for_forward(vectors, rows, norm)
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (grad,), (vectors, rows, norm) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative
            return _across(grad, vectors, rows).to(vectors.dtype)
        across = torch.addcmul(grad, rows, (grad * rows).sum(-1, keepdim=True), value=-1)
        return torch.div(across, norm, out=torch.empty_like(vectors))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        vectors, rows, _ = ctx.saved_tensors
        return _across(tangents[0], vectors, rows).float()


def _norm(vectors: Tensor) -> Annotated[Tensor, "* 1"]:
    norm: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True, dtype=torch.float64)
    return norm


def _across(change: Tensor, vectors: Tensor, rows: Tensor) -> Tensor:
    """What a change of vectors changes in their directions, in operations that have derivatives."""
    norm = _norm(vectors)
    return (change - rows * (change * rows).sum(-1, keepdim=True)) / norm.masked_fill(norm == 0, math.inf)


class LogSumExp(torch.autograd.Function):
    """log of the sum of e^x of each row, of which some x is finite, as [b, 1], and the softmax, which is all it keeps.

    torch.logsumexp takes three times as many operations. The largest share is 1 / sum of e^(x - largest x).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        share = torch.softmax(x, dim=-1)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(share)
        ctx.save_for_forward(share)
        return x.amax(-1, keepdim=True) - share.amax(-1, keepdim=True).log(), share

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Tensor | None:
        (total, of_share), (share,) = gradients, ctx.saved_tensors
        if of_share is not None:  # in a second derivative
            along = (of_share * share).sum(-1, keepdim=True)
            total, of_share = -along if total is None else total - along, share * of_share
        grad = None if total is None else total * share
        return grad if grad is None or of_share is None else grad + of_share

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> tuple[Tensor, Tensor]:
        (share,) = ctx.saved_tensors
        along = (share * tangents[0]).sum(-1, keepdim=True)
        return along, share * (tangents[0] - along)
