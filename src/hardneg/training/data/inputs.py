"""What an encoder receives: a tensor, or a small class that is sliced, moved and joined like one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class InputRows(Protocol):
    """A batch that is not one tensor, such as padded texts or packed graphs."""

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


@dataclass(frozen=True, eq=False)
class Sided:
    """Rows for two encoders, those of the first before those of the second: ``TwoTowers`` takes them."""

    first: Inputs | None = None
    second: Inputs | None = None

    def __len__(self) -> int:
        return _number(self.first) + _number(self.second)

    def __getitem__(self, rows: slice) -> Sided:
        start, stop, _ = rows.indices(len(self))
        cut = _number(self.first)
        first, second = slice(min(start, cut), min(stop, cut)), slice(max(start - cut, 0), max(stop - cut, 0))
        return Sided(_part(self.first, first), _part(self.second, second))

    def to(self, device: torch.device | str) -> Sided:
        return Sided(*(side if side is None else side.to(device) for side in (self.first, self.second)))

    def joined(self, others: Sequence[Sided]) -> Sided:
        """All first rows before all second ones: so only such as are on one side each, in this order."""
        sides = [[getattr(one, name) for one in (self, *others)] for name in ("first", "second")]
        there = [[side for side in every if _number(side)] for every in sides]
        return Sided(*(joined(every) if every else None for every in there))


class TwoTowers(nn.Module):
    """An encoder for each side of ``Sided``; any other input is encoded by both, one behind the other in each row."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, inputs: Inputs) -> Tensor:
        return self._of(inputs, self.first, self.second)

    def features(self, inputs: Inputs) -> Tensor:
        return self._of(inputs, *(getattr(tower, "features", tower) for tower in (self.first, self.second)))

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Where both encode texts: their features, one behind the other in each row."""
        return torch.cat([tower.encode(texts) for tower in (self.first, self.second)], dim=1)  # type: ignore[operator]

    def _of(self, inputs: Inputs, first: Callable[[Any], Tensor], second: Callable[[Any], Tensor]) -> Tensor:
        if not isinstance(inputs, Sided):
            return torch.cat([first(inputs), second(inputs)], dim=1)
        sides = ((first, inputs.first), (second, inputs.second))
        return torch.cat([tower(side) for tower, side in sides if _number(side)])


def _number(side: Inputs | None) -> int:
    return 0 if side is None else len(side)


def _part(side: Inputs | None, rows: slice) -> Inputs | None:
    return None if side is None or rows.start >= rows.stop else side[rows]
