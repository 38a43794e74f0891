"""Functions in few operations, with their gradients: a small batch on a GPU costs as much as its operations.

They are for plain tensors, see ``is_plain``. Derivatives of higher order go through operations that have derivatives.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_plain(tensor: Tensor) -> bool:
    """Whether nothing must see the single operations: no compiler, subclass, transform or derivative forward."""
    if type(tensor) is not Tensor or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    batched = torch._C._functorch.is_legacy_batchedtensor(tensor)  # of torch.autograd.grad(is_grads_batched=True)
    return not batched and forward_ad._current_level < 0


class Unit(torch.autograd.Function):
    """``unit`` of float32 or half precision. A norm in float64 needs no scale; that of a zero row is made infinite."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor) -> Tensor:
        norm = _norm(vectors)
        norm.masked_fill_(norm == 0, math.inf)
        rows = torch.div(vectors, norm, out=torch.empty_like(vectors, dtype=torch.float32))
        ctx.save_for_backward(vectors, rows, norm)
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (grad,), (vectors, rows, norm) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled() or not is_plain(grad):  # div(out=) has neither a derivative nor a batch
            norm = _norm(vectors)
            across: Tensor = grad - rows * (grad * rows).sum(-1, keepdim=True)
            return (across / norm.masked_fill(norm == 0, math.inf)).to(vectors.dtype)
        across = torch.addcmul(grad, rows, (grad * rows).sum(-1, keepdim=True), value=-1)
        return torch.div(across, norm, out=torch.empty_like(vectors))


def _norm(vectors: Tensor) -> Annotated[Tensor, "* 1"]:
    norm: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True, dtype=torch.float64)
    return norm


class LogSumExp(torch.autograd.Function):
    """log of the sum of e^x of each row, of which some x is finite, as [b, 1], and the softmax, which is all it keeps.

    torch.logsumexp takes twice as many operations. The largest share is 1 / sum of e^(x - largest x).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        share = torch.softmax(x, dim=-1)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(share)
        return x.amax(-1, keepdim=True) - share.amax(-1, keepdim=True).log(), share

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Tensor | None:
        total, of_share = gradients
        share: Tensor = ctx.saved_tensors[0]
        if of_share is None:
            return None if total is None else total * share
        along = of_share - (of_share * share).sum(-1, keepdim=True)  # in a second derivative
        return (along if total is None else along + total) * share
