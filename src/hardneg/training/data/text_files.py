"""Readers of texts from disk: lines of a plain file, or columns of a table.

The data kinds of texts (texts.py, pairs.py, image_texts.py) parse a path by ``split_columns``, read a file by
``read_lines`` or ``io.tables.read_table``, and take columns of a table by the other functions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, FileError, NoFile, UnknownName
from hardneg.core.text import printable
from hardneg.io.arrays import known_labels
from hardneg.io.pair_labels import LABELS, SCORES, ignored_label, is_label, mark_of
from hardneg.io.tables import Table, open_text, suffix_of, table_suffixes

GAP = 1_000_000
"""Documents start at multiples of this, so that sentences of different documents are never neighbours."""

TEXT_COLUMNS = ("text", "sentence", "sentence1", "anchor", "query", "question")
"""Usual names of a column of texts, in order of preference."""

PAIR_COLUMNS = (
    ("anchor", "positive"),
    ("query", "positive"),
    ("question", "answer"),
    ("query", "answer"),
    ("sentence1", "sentence2"),
)
"""Usual names of columns of pairs, in order of preference."""


class Lines(NamedTuple):
    """Sentences with their positions; neighbours in a document differ by 1.

    Attributes:
        texts: The sentences.
        places: Position of each sentence; documents are ``GAP`` apart.
    """

    texts: list[str]
    places: list[int]


def split_columns(path: str, fewest: int, most: int, form: str) -> tuple[Path, list[str]]:
    """Split a path into the file and the columns in brackets after it.

    Args:
        path: Path as given in ``--data``, without its prefix.
        fewest: Fewest columns, if there are brackets.
        most: Largest number of columns.
        form: How the path should be written, for the error.

    Raises:
        ArgumentError: If there is no file, or the number of columns is wrong.

    Example:
        >>> split_columns("notes.csv[title,topic]", 1, 2, "text:FILE[text,label]")[1]
        ['title', 'topic']
    """
    found = re.fullmatch(r"(.+?)\[([^\[\]]*)\]", path)
    file, columns = (found[1], [one.strip() for one in found[2].split(",")]) if found else (path, [])
    if not file.strip() or (found and not (fewest <= len(columns) <= most and all(columns))):
        raise ArgumentError("data", form, repr(path))
    return Path(file), columns


def is_table(path: Path) -> bool:
    """Return whether a path is a table: a folder (saved data set) or a file with a table's suffix."""
    return path.is_dir() or suffix_of(path) in table_suffixes


def read_lines(path: Path) -> Lines:
    """Read one sentence per line, from a plain or compressed file; an empty line starts a new document.

    Raises:
        NoFile: If there is no file.
        ArgumentError: If the file has no sentence.
    """
    if not path.is_file():
        raise NoFile("data", "a file of texts", path, "which is not a file")
    with open_text(path, "data") as file:
        lines = list(file)
    texts, places, place = [], [], 0
    for line in lines:
        if sentence := line.strip():
            texts.append(sentence)
            places.append(place)
            place += 1
        elif texts:
            place = (place // GAP + 1) * GAP if places[-1] // GAP == place // GAP else place
    if not texts:
        raise ArgumentError("data", "at least one sentence", f"none in {path}")
    return Lines(texts, places)


def column_in(table: Mapping[str, Any], name: str, path: Path) -> Any:
    """Return a column of a table; raise UnknownName if it does not exist."""
    if name not in table:
        raise UnknownName(name, list(table), f"in {path}")
    return table[name]


def texts_in(table: Table, name: str, path: Path) -> list[str]:
    """Return a column of texts, stripped.

    Raises:
        UnknownName: If the column does not exist.
        FileError: If a row is empty or no text.
    """
    values = column_in(table, name, path)
    wrong = next((i for i, value in enumerate(values) if not isinstance(value, str) or not value.strip()), None)
    if wrong is not None:
        got = f"{str(values[wrong])[:40]!r} in row {wrong}"
        raise FileError("data", f"a text in every row of the column {name!r}", path, f"which has {got}")
    return [value.strip() for value in values]


def labels_in(table: Mapping[str, Any], name: str, path: Path) -> tuple[Tensor | None, tuple[str, ...]]:
    """Return a column of classes as indices [n] and the classes' names; (None, ()) if no row has a class.

    Raises:
        UnknownName: If the column does not exist.
        FileError: If a row has several labels.
    """
    values = ["" if value is None else value for value in column_in(table, name, path)]
    if several := [value for value in values if isinstance(value, (list, dict))]:
        got = f"which has {printable(several[0], 40)}"
        raise FileError("data", f"one label in every row of the column {name!r}", path, got)
    found = known_labels(np.asarray(values), f"{name} of {path}")
    if found is None:
        return None, ()
    names, numbers = np.unique(found, return_inverse=True)
    return torch.from_numpy(numbers.astype(np.int64)), tuple(str(one) for one in names)


def negatives_in(table: Table, path: Path) -> list[list[str]]:
    """Return each row's negatives from ``hardneg mine``: the columns ``negative`` or negative_1, negative_2, ..."""
    names = [name for name in table if re.fullmatch(r"negative(_\d+)?", name)]
    columns = [texts_in(table, name, path) for name in names]
    return [list(row) for row in zip(*columns, strict=True)] if columns else []


def usual_column(table: Table, path: Path) -> Sequence[str]:
    """Return the column of texts if the user names none: one with a usual name, or the only one besides labels and ids.

    Raises:
        ArgumentError: If there is no such column or more than one.
    """
    for name in TEXT_COLUMNS:
        if name in table:
            return (name,)
    others = [name for name in table if name not in ("id", "_id", "label", "labels", "score")]
    if len(others) == 1:
        return others
    what = f"a column of texts in {path}, whose first line names the columns"
    raise ArgumentError("data", what, f"columns {sorted(table)}", "name it: text:FILE[column]")


def positive_rows(table: Table, first: str, second: str, wanted: Sequence[str], path: Path) -> Table:
    """Return the rows with the label ``name=value``.

    Without a label, raise if the table has a column that may mark which pairs are positives: ignoring it would train on
    negatives.

    Args:
        table: The table.
        first: Column of the first texts.
        second: Column of the second texts.
        wanted: Nothing, or one text ``name=value``.
        path: Path of the table, for errors.

    Raises:
        ArgumentError: If a column of labels is ignored, the label is malformed, or no row has it.
    """
    if not wanted:
        ignored = ignored_label({**table, second: column_in(table, second, path)}, (first, second), second)
        if ignored is not None:
            fix = f"use pairs:{path}[{first},{second},{ignored}=1] with the label of positives, or remove the column"
            got = f"a column {ignored!r} in {path}, which would be ignored"
            raise ArgumentError("data", "a label that marks positive pairs", got, fix)
        return table
    name, found, value = wanted[0].partition("=")
    if not found:
        raise ArgumentError("data", "the label of positives written as column=value", repr(wanted[0]))
    labels = column_in(table, name.strip(), path)
    kept = [row for row, label in enumerate(labels) if mark_of(label) == mark_of(value)]
    if not kept:
        known = ", ".join(list(dict.fromkeys(map(str, labels)))[:5])
        raise ArgumentError("data", f"pairs with {name.strip()}={value.strip()} in {path}", f"only {known}")
    return {column: [values[row] for row in kept] for column, values in table.items()}


def pair_columns(table: Table, path: Path) -> Sequence[str]:
    """Return the columns of pairs if the user names none: a common pair of names, or the only two text columns.

    Raises:
        ArgumentError: If there are no such columns.
    """
    for pair in PAIR_COLUMNS:
        if all(name in table for name in pair):
            return pair
    others = [
        name
        for name in table
        if not re.fullmatch(r"negative(_\d+)?|id|_id", name) and not is_label(name, (*LABELS, *SCORES))
    ]
    if len(others) == 2:
        return others
    raise ArgumentError("data", f"two columns of texts in {path}", f"columns {sorted(table)}", "name them: FILE[a,b]")
