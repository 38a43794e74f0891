"""Vectors at unit length, right for lengths from the smallest to the largest number of their type."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import normalize


def directions(vectors: Annotated[Tensor, "... d"]) -> Annotated[Tensor, "... d"]:
    """x / |x|, and 0 for a zero vector.

    The square of a number below 1e-19 or above 1e19 is 0 or infinite in float32: rows of such numbers are divided by
    their largest first. All others are as ``normalize`` gives them, to the bit.

    >>> directions(torch.tensor([[3e-30, 4e-30], [3e30, 4e30], [0.0, 0.0]])).tolist()[0]
    [0.6..., 0.8...]
    """
    largest = torch.linalg.vector_norm(vectors, ord=float("inf"), dim=-1, keepdim=True)
    far = (largest > 0) & ((largest < 1e-6) | (largest > 1e15))
    return normalize(vectors / torch.where(far, largest, 1.0), dim=-1)
