"""Vectors brought to unit norm, exactly and at any scale."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any

import torch
from torch import Tensor

_bits: dict[torch.dtype, tuple[torch.dtype, int, int]] = {
    torch.float32: (torch.int32, 0x7F800000, 0x00800000),
    torch.float64: (torch.int64, 0x7FF0000000000000, 0x0010000000000000),
}
"""The whole numbers of as many bits, the bits of the exponent, and those of the smallest normal number."""


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Leaves autocast where it is on: to leave it takes as long as the operations of a small batch."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def widened(vectors: Tensor) -> Tensor:
    """As float32 at least."""
    return vectors if vectors.dtype == torch.float64 else vectors.float()


def unit(vectors: Annotated[Tensor, "* d"]) -> Annotated[Tensor, "* d"]:
    """Rows of norm 1 in float32 or wider. A zero row stays zero and gets no gradient.

    Rows are first divided by a power of two, which is exact: squares of a norm above 1e19 or below 1e-19 would leave
    the range of float32. NaN and infinity give NaN.

    >>> unit(torch.tensor([[3e25, 4e25], [3e-20, 4e-20], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    if vectors.is_cuda and _is_plain(vectors) and vectors.dtype != torch.float64:
        rows: Tensor = Unit.apply(vectors)  # type: ignore[no-untyped-call]
        return rows
    near_one = scaled(vectors)
    norm = torch.linalg.vector_norm(near_one, dim=-1, keepdim=True)
    return torch.div(near_one, norm + (norm.detach() == 0))


class Unit(torch.autograd.Function):
    """``unit`` of float32 or half precision in few operations, of which a small batch on a GPU is made.

    A norm in float64 needs no scale. (1 - u u') / norm is symmetric: derivatives forward are those backward.
    """

    @staticmethod
    def forward(ctx: Any, vectors: Tensor) -> Tensor:
        norm = _norm_or_infinite(vectors)
        rows = torch.div(vectors, norm, out=torch.empty_like(vectors, dtype=torch.float32))
        ctx.save_for_backward(vectors, rows, norm)
        ctx.save_for_forward(vectors, rows, norm)
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (grad,), (vectors, rows, norm) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative
            return _across(grad, rows, _norm_or_infinite(vectors)).to(vectors.dtype)
        across = torch.addcmul(grad, rows, (grad * rows).sum(-1, keepdim=True), value=-1)
        return torch.div(across, norm, out=torch.empty_like(vectors))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        vectors, rows, _ = ctx.saved_tensors
        return _across(tangents[0], rows, _norm_or_infinite(vectors)).float()


def _norm_or_infinite(vectors: Tensor) -> Tensor:
    """In float64, [*, 1]; infinite for a zero row, which so stays zero and gets no gradient."""
    norm: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True, dtype=torch.float64)
    return norm.masked_fill(norm == 0, math.inf)


def _across(change: Tensor, rows: Tensor, norm: Tensor) -> Tensor:
    """What a change of vectors of this norm changes in their directions."""
    return (change - rows * (change * rows).sum(-1, keepdim=True)) / norm


def _is_plain(vectors: Tensor) -> bool:
    """Whether no compiler, subclass or transform of torch.func must see the single operations."""
    transformed = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return type(vectors) is Tensor and not transformed


def scaled(vectors: Annotated[Tensor, "* d"]) -> Annotated[Tensor, "* d"]:
    """Rows divided by a power of two, so that the largest number of each is near 1; float32 or wider.

    The power is made of the bits of the largest number, which takes fewer operations than its logarithm.
    """
    wide = widened(vectors)
    if not wide.numel():  # torch.compile has no largest of no rows
        return wide
    whole, exponent, lowest = _bits[wide.dtype]
    bits = torch.linalg.vector_norm(wide.detach(), math.inf, dim=-1, keepdim=True).view(whole)
    # The power below the number. Minus 1: of 0 it is infinite, so that a zero row gets no gradient.
    power: Tensor = ((bits - 1) & exponent).clamp(min=lowest).view(wide.dtype)
    return wide / power


def is_zero(vectors: Annotated[Tensor, "* d"]) -> Annotated[Tensor, "*"]:
    """Rows that have no direction."""
    return (vectors == 0).all(-1)
