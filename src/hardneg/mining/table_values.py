"""Cells of a table as texts, ids and positives; any other value is an error that names column and row."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from hardneg.core.errors import ArgumentError
from hardneg.core.types import int_if_whole


def as_list(value: Any, name: str, row: int) -> list[Any]:
    """The positives in a cell: a list of them, or one."""
    if value is None:
        return []
    if isinstance(value, str) and _writes_a_list(value):
        raise ArgumentError(
            "mine",
            "positives that are ids or texts",
            (f"the text {value[:60]!r} in column {name!r}, row {row}, which writes out a list"),
            "keep lists in .jsonl or .parquet, or write one row for each positive",
        )
    values = [int_if_whole(one) for one in (value if isinstance(value, (list, tuple)) else [value])]
    for one in values:
        if isinstance(one, bool) or not isinstance(one, (str, int)):
            got = f"{one!r} in column {name!r}, row {row}"
            fix = "write the id or text of a document, or leave the row out"
            raise ArgumentError("mine", "positives that are ids or texts", got, fix)
        _check_unicode(one, name, row, "mine")
    return values


def _writes_a_list(value: str) -> bool:
    """Whether a text is a list as Python or JSON write it, which is what becomes of a list in a CSV."""
    if not (value.startswith("[") and value.endswith("]")):
        return False
    try:
        return isinstance(ast.literal_eval(value), list)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def checked_texts(columns: list[list[Any]], names: list[str], kind: str, who: str) -> list[str]:
    """The texts of each row; those of several columns joined."""
    if len(columns) > 1:  # a title that is missing in some rows leaves the text alone
        columns = [["" if part is None and any(row) else part for part in row] for row in zip(*columns, strict=True)]
        columns = [list(column) for column in zip(*columns, strict=True)]
    for name, column in zip(names, columns, strict=True):
        for row, value in enumerate(column):
            if not isinstance(value, str):
                raise ArgumentError(who, f"text in the {kind}", f"{value!r} in column {name!r}, row {row}")
            _check_unicode(value, name, row, who)
    return columns[0] if len(columns) == 1 else [" ".join(parts).strip() for parts in zip(*columns, strict=True)]


def checked_ids(ids: list[Any], name: str, kind: str, who: str) -> list[Any]:
    """Ids, all texts or all numbers; 3.0, which whole numbers become beside missing values, is 3."""
    ids = [int_if_whole(one) for one in ids]
    for row, one in enumerate(ids):
        if isinstance(one, bool) or not isinstance(one, (str, int)):
            raise ArgumentError(who, f"ids that are numbers or texts in the {kind}", f"{one!r} in {name!r}, row {row}")
        _check_unicode(one, name, row, who)
    return of_one_kind(ids)


def _check_unicode(value: str | int, name: str, row: int, who: str) -> None:
    """Half a surrogate pair, which JSON can write and no file of text can hold, is found before the work."""
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            what = f"{value[error.start]!r} in column {name!r}, row {row}"
            raise ArgumentError(who, "text of whole characters", f"half of one, {what}") from None


def of_one_kind(ids: list[Any]) -> list[Any]:
    """Ids as they are if all are texts or all are numbers of 64 bits; as texts otherwise, so that a file holds them."""
    texts = sum(isinstance(one, str) for one in ids)
    if texts == len(ids) or (not texts and all(-(2**63) <= one < 2**63 for one in ids)):
        return ids
    return [str(one) for one in ids]


def key_of(one: Any) -> str:
    """Ids are matched as text: 12 in one file is "12" in another."""
    return one if isinstance(one, str) else str(one)


def row_in(known: Mapping[str, int], one: Any) -> int:
    """The row of an id, -1 if it is unknown; "3.0" is the id "3" unless there is an id "3.0"."""
    key = key_of(one)
    row = known.get(key, -1)
    return known.get(key.removesuffix(".0"), -1) if row < 0 and key.endswith(".0") else row


class RowNumbers(Mapping[str, int]):
    """The numbers of rows as their names, without a dict of as many as a large corpus has."""

    def __init__(self, rows: range) -> None:
        self.rows = rows

    def __getitem__(self, name: str) -> int:
        if name.isdecimal() and len(name) < 20 and name == str(int(name)) and int(name) in self.rows:
            return int(name)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return map(str, self.rows)

    def __len__(self) -> int:
        return len(self.rows)
