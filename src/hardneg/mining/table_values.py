"""Read cells of a table as texts, ids and positives; any other value is an error that names column and row.

Used for every table of queries, documents and judgements.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from hardneg.core.errors import ArgumentError
from hardneg.core.types import int_if_whole


def as_list(value: Any, name: str, row: int) -> list[Any]:
    """Return the positives in a cell, which contains one or a list of them.

    Args:
        value: The cell.
        name: Its column, for errors.
        row: Its row, for errors.

    Raises:
        ArgumentError: If a value is neither an id nor a text, or if a text spells out a list.
    """
    if value is None:
        return []
    if isinstance(value, str) and _writes_a_list(value):
        raise ArgumentError(
            "mine",
            "positives that are ids or texts",
            (f"the text {value[:60]!r} in column {name!r}, row {row}, which looks like a list"),
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
    """Return whether a text is a list as Python or JSON write it, which lists become in a CSV file."""
    if not (value.startswith("[") and value.endswith("]")):
        return False
    try:
        return isinstance(ast.literal_eval(value), list)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def checked_texts(columns: list[list[Any]], names: list[str], kind: str, who: str) -> list[str]:
    """Return the text of each row, with those of several columns joined.

    Args:
        columns: Cells of each column.
        names: Names of the columns.
        kind: Name of the table in errors.
        who: Function named in errors.

    Raises:
        ArgumentError: If a cell is not a text.
    """
    if len(columns) > 1:  # a missing title in some rows counts as empty
        columns = [["" if part is None and any(row) else part for part in row] for row in zip(*columns, strict=True)]
        columns = [list(column) for column in zip(*columns, strict=True)]
    for name, column in zip(names, columns, strict=True):
        for row, value in enumerate(column):
            if not isinstance(value, str):
                raise ArgumentError(who, f"text in the {kind}", f"{value!r} in column {name!r}, row {row}")
            _check_unicode(value, name, row, who)
    return columns[0] if len(columns) == 1 else [" ".join(parts).strip() for parts in zip(*columns, strict=True)]


def checked_ids(ids: list[Any], name: str, kind: str, who: str) -> list[Any]:
    """Return ids that are all texts or all numbers.

    3.0, which integers become in a column with missing values, is 3.

    Args:
        ids: Cells of the column.
        name: Name of the column.
        kind: Name of the table in errors.
        who: Function named in errors.

    Raises:
        ArgumentError: If a cell is neither a number nor a text.
    """
    ids = [int_if_whole(one) for one in ids]
    for row, one in enumerate(ids):
        if isinstance(one, bool) or not isinstance(one, (str, int)):
            raise ArgumentError(who, f"ids that are numbers or texts in the {kind}", f"{one!r} in {name!r}, row {row}")
        _check_unicode(one, name, row, who)
    return of_one_kind(ids)


def _check_unicode(value: str | int, name: str, row: int, who: str) -> None:
    """Raise for half a surrogate pair, which JSON can contain and no text file can: the job would fail at its end."""
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            what = f"{value[error.start]!r} in column {name!r}, row {row}"
            raise ArgumentError(who, "valid Unicode text", f"half a surrogate pair, {what}") from None


def of_one_kind(ids: list[Any]) -> list[Any]:
    """Return the ids unchanged if all are texts or all 64-bit integers, else as texts.

    Example:
        >>> of_one_kind([1, "b"])
        ['1', 'b']
    """
    texts = sum(isinstance(one, str) for one in ids)
    if texts == len(ids) or (not texts and all(-(2**63) <= one < 2**63 for one in ids)):
        return ids
    return [str(one) for one in ids]


def key_of(one: Any) -> str:
    """Return the text by which an id is matched: 12 in one file is "12" in another."""
    return one if isinstance(one, str) else str(one)


def row_in(known: Mapping[str, int], one: Any) -> int:
    """Return the row of an id, -1 if it is unknown; "3.0" is the id "3" unless there is an id "3.0".

    Example:
        >>> row_in({"3": 7}, 3.0)
        7
    """
    key = key_of(one)
    row = known.get(key, -1)
    return known.get(key.removesuffix(".0"), -1) if row < 0 and key.endswith(".0") else row


class RowNumbers(Mapping[str, int]):
    """Row numbers as a mapping from their text to themselves, without a dict of the size of the corpus.

    Example:
        >>> RowNumbers(range(3))["2"]
        2
    """

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
