"""What an encoder receives: a tensor, or a small class that is sliced, moved and joined like one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor


class Rows(Protocol):
    """A batch that is no tensor, such as padded texts or packed graphs."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice) -> Self: ...

    def to(self, device: torch.device | str) -> Self: ...

    def joined(self, others: Sequence[Self]) -> Self:
        """This batch and the others behind it, as one."""


Inputs = Any
"""A tensor with one entry per row, or ``Rows``."""


def joined(parts: Sequence[Inputs]) -> Inputs:
    """Batches one behind the other, as one.

    >>> joined([torch.zeros(2, 3), torch.ones(1, 3)]).shape
    torch.Size([3, 3])
    """
    first, *others = parts
    return torch.cat(list(parts)) if isinstance(first, Tensor) else first.joined(others)
