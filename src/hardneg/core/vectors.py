"""Vectors brought to unit norm, exactly and at any scale."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any

import torch
from torch import Tensor

from hardneg.core.fused import Unit, has_unit

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
    if has_unit(vectors):
        rows: Tensor = Unit.apply(vectors)  # type: ignore[no-untyped-call]
        return rows
    near_one = scaled(vectors)
    norm = torch.linalg.vector_norm(near_one, dim=-1, keepdim=True)
    return torch.div(near_one, norm + (norm.detach() == 0))


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
