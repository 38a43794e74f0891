"""Vectors brought to unit norm, exactly and at any scale."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor


def widened(vectors: Tensor) -> Tensor:
    """As float32 at least."""
    return vectors.to(torch.promote_types(vectors.dtype, torch.float32))


def unit(vectors: Annotated[Tensor, "* d"]) -> Annotated[Tensor, "* d"]:
    """Rows of norm 1 in float32 or wider. A zero row stays zero and gets no gradient.

    Rows are first divided by a power of two, which is exact: squares of a norm above 1e19 or below 1e-19 would leave
    the range of float32. NaN and infinity give NaN.

    >>> unit(torch.tensor([[3e25, 4e25], [3e-20, 4e-20], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    near_one = scaled(vectors)
    if not near_one.shape[-1]:
        return near_one
    norm = torch.linalg.vector_norm(near_one, dim=-1, keepdim=True)
    return torch.div(near_one, norm + (norm.detach() == 0))


def scaled(vectors: Annotated[Tensor, "* d"]) -> Annotated[Tensor, "* d"]:
    """Rows divided by a power of two, so that the largest number of each is near 1; float32 or wider."""
    wide = widened(vectors)
    if not wide.shape[-1]:
        return wide
    with torch.no_grad():
        largest = torch.linalg.vector_norm(wide, math.inf, dim=-1, keepdim=True)
        most = math.frexp(torch.finfo(wide.dtype).max)[1] - 2  # a subnormal number asks for more
        size = torch.frexp(largest).exponent.clamp(-most, most)  # of NaN or infinity: any number will do
        power = torch.exp2(-size.to(wide.dtype)).masked_fill(largest == 0, 0.0)
    return wide * power


def is_zero(vectors: Annotated[Tensor, "* d"]) -> Annotated[Tensor, "*"]:
    """Rows that have no direction."""
    return (vectors == 0).all(-1)
