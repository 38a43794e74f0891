"""Random numbers by name: one for each (seed, query, candidate), the same in any order, block or process."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

_odd = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # splitmix64's constants, as signed numbers


def uniform(seed: int, query: Annotated[Tensor, "b"], item: Annotated[Tensor, "b m"]) -> Annotated[Tensor, "b m"]:
    """Uniform in (0, 1), float64, by hashing (seed, query, item) with splitmix64.

    >>> bool((uniform(0, torch.arange(2), torch.arange(3).expand(2, 3)).diff(dim=0) != 0).all())
    True
    """
    key = _mix(_mix(torch.full_like(query, seed)) + query)
    bits = _mix(_mix(key[:, None] + item * _odd[0]))
    return (((bits >> 11) & ((1 << 53) - 1)).double() + 0.5) * 2.0**-53


def gumbel(seed: int, query: Annotated[Tensor, "b"], item: Annotated[Tensor, "b m"]) -> Annotated[Tensor, "b m"]:
    return -torch.log(-torch.log(uniform(seed, query, item)))


def _mix(x: Tensor) -> Tensor:
    x = x + _odd[0]
    x = (x ^ _shift(x, 30)) * _odd[1]
    x = (x ^ _shift(x, 27)) * _odd[2]
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    """Logical shift to the right; torch's keeps the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)
