"""Where the kernels' tests run, in which precision, how close they must be, and what they are given."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])  # the interpreter's is garbage
SORTED_FROM = {"sorted": 0, "masked": 1 << 30}
"""Both ways to mask: rows sorted by id or label from so many on, or every block masked."""
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Of gradients, relative to their norm: that of the coefficients' precision in the second product."""


def vectors(rows: int, dim: int, dtype: torch.dtype = torch.float32, length: float = 1.0, seed: int = 0) -> Tensor:
    noise = torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (length * normalize(noise, dim=-1)).to(dtype).to(DEVICE)


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def twice(rows: int) -> Tensor:
    """Ids of both views of each instance, not in order."""
    return (torch.arange(rows, device=DEVICE) * 7919) % max(rows // 2, 1)


def assert_close_in_norm(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    if theirs.ndim == 0:
        tolerance = 30 * tolerance  # the gradient of a temperature is a sum in which most terms cancel
    assert (ours.double() - theirs).norm() <= tolerance * theirs.norm() + 1e-12
