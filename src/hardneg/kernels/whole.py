"""What is found of blocks of rows, as tensors of all rows: filled block by block, and cut to a block again.

Tensors of two dimensions or more have a row for each anchor; others, such as the bound of a whole batch, stay as they
are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor

from hardneg.core.pairing import Rows, number_of

Found = TypeVar("Found")


class Whole(Generic[Found]):
    """Of so many rows."""

    value: Found

    def __init__(self, number: int) -> None:
        self.number, self.filled = number, False

    def put(self, rows: Rows, found: Found) -> None:
        """The tensors of all rows are made at the first block, unless that has all rows."""
        if number_of(rows) == self.number:
            self.value = found
            return
        if not self.filled:
            self.value = _changed(lambda part: part.new_empty(self.number, *part.shape[1:]), found)
            self.filled = True

        def written(whole: Tensor, part: Tensor) -> Tensor:
            whole[rows] = part
            return whole

        self.value = _changed(written, self.value, found)


def cut_rows(value: Found, rows: Rows) -> Found:
    """These rows of it."""
    cut: Found = _changed(lambda whole: whole[rows], value)
    return cut


def _changed(change: Callable[..., Tensor], value: Any, *others: Any) -> Any:
    """With each tensor of rows changed, given those at its place in the others."""
    if isinstance(value, Tensor):
        return change(value, *others) if value.ndim >= 2 else value
    if isinstance(value, dict):
        return {name: _changed(change, value[name], *(other[name] for other in others)) for name in value}
    if isinstance(value, (tuple, list)):
        parts = [_changed(change, *each) for each in zip(value, *others, strict=True)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
