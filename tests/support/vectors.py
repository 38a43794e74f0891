"""Unit vectors to score, and the file of both splits of a run."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor
from torch.nn.functional import normalize

from hardneg.io.embeddings import SPLIT_NAMES, save_arrays


def make_unit_vectors(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    noise = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return normalize(noise, dim=-1).to(dtype)


def save_embeddings(path: Path | BinaryIO, *split: Tensor) -> None:
    """Train features and labels, then those to evaluate."""
    save_arrays(path, **dict(zip(SPLIT_NAMES, split, strict=True)))
