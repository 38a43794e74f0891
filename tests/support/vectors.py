"""Unit vectors to score."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize


def make_unit_vectors(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    noise = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return normalize(noise, dim=-1).to(dtype)
