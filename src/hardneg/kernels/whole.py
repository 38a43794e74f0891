"""What is found of blocks of rows, as tensors of all rows: filled block by block, and cut to a block again.

Tensors of two dimensions or more have a row for each anchor; others, such as the bound of a whole batch, stay as they
are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
            self.value = _changed(found, lambda part: part.new_empty(self.number, *part.shape[1:]))
            self.filled = True
        for whole, part in zip(_per_row(self.value), _per_row(found), strict=True):
            whole[rows] = part


def cut_rows(value: Found, rows: Rows) -> Found:
    """These rows of it."""
    return _changed(value, lambda whole: whole[rows])


def _changed(value: Found, change: Callable[[Tensor], Tensor]) -> Found:
    found: Any = value
    if isinstance(value, Tensor):
        found = change(value) if value.ndim >= 2 else value
    elif isinstance(value, dict):
        found = {name: _changed(each, change) for name, each in value.items()}
    elif isinstance(value, (tuple, list)):
        parts = [_changed(each, change) for each in value]
        found = type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return found  # type: ignore[no-any-return]


def _per_row(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.ndim >= 2:
            yield value
    elif isinstance(value, (dict, tuple, list)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _per_row(each)
