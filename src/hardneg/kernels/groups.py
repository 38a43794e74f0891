"""Which function finds the largest product of each group of columns; Triton is imported only where it may run."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

from hardneg.core.exact import largest_of_groups


def runs_in_triton(device: torch.device) -> bool:
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET", "0") == "0":
        return False
    from hardneg.kernels import triton_groups

    return triton_groups.can_run(device)


def largest_on(device: torch.device) -> Callable[[Tensor, Tensor, int], Tensor]:
    if not runs_in_triton(device):
        return largest_of_groups
    from hardneg.kernels import triton_groups

    return triton_groups.largest_of_groups
