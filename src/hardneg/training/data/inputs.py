"""What an encoder receives: a tensor, or a small class that can be sliced, moved and joined like one.

``InputRows`` is the protocol of such classes; ``Tokens`` (tokens.py), ``Graphs`` (augmentation/graphs.py) and ``Sided``
implement it. ``TwoTowers`` encodes the two sides of ``Sided``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class InputRows(Protocol):
    """A batch that is not a single tensor, such as padded texts or a batch of graphs."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice) -> Self: ...

    def to(self, device: torch.device | str) -> Self:
        """Move the batch to a device."""

    def joined(self, others: Sequence[Self]) -> Self:
        """Return one batch of this one followed by the others."""


Inputs = Any
"""A tensor with one entry per row, or ``InputRows``."""


def joined(parts: Sequence[Inputs]) -> Inputs:
    """Concatenate batches.

    >>> joined([torch.zeros(2, 3), torch.ones(1, 3)]).shape
    torch.Size([3, 3])
    """
    first, *others = parts
    return torch.cat(list(parts)) if isinstance(first, Tensor) else first.joined(others)


@dataclass(frozen=True, eq=False)
class Sided:
    """Rows for two encoders, those of the first before those of the second; the input of ``TwoTowers``.

    Attributes:
        first: Inputs of the first encoder, or None.
        second: Inputs of the second encoder, or None.

    Example:
        >>> both = Sided(torch.zeros(2, 3), torch.ones(1, 5))
        >>> len(both), len(both[1:].first), len(both[1:].second)
        (3, 1, 1)
    """

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
        """Move both sides to a device."""
        return Sided(*(side if side is None else side.to(device) for side in (self.first, self.second)))

    def joined(self, others: Sequence[Sided]) -> Sided:
        """Join batches with all first rows before all second ones.

        The order of rows is therefore only kept for batches with one side each, in this order.
        """
        sides = [[getattr(one, name) for one in (self, *others)] for name in ("first", "second")]
        there = [[side for side in every if _number(side)] for every in sides]
        return Sided(*(joined(every) if every else None for every in there))


class TwoTowers(nn.Module):
    """An encoder for each side of ``Sided``; any other input is encoded by both, and the results are concatenated.

    Args:
        first: Encoder of the first side.
        second: Encoder of the second side.
    """

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, inputs: Inputs) -> Tensor:
        """Return the projections of all rows, [b, d], or [b, 2 d] for inputs that are not ``Sided``."""
        return self._of(inputs, self.first, self.second)

    def features(self, inputs: Inputs) -> Tensor:
        """Return the features of all rows, from each encoder's ``features`` if it has them."""
        return self._of(inputs, *(getattr(tower, "features", tower) for tower in (self.first, self.second)))

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Return the features of texts by both encoders, concatenated, [n, 2 d]; both must be text encoders."""
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
