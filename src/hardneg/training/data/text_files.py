"""Texts from disk: lines of a plain file, or columns of a table."""

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
from hardneg.io.pair_labels import LABELS, ignored_label, mark_of
from hardneg.io.tables import Table, open_text, suffix_of, table_suffixes

GAP = 1_000_000
"""Between the places of the last sentence of a document and the first of the next."""
TEXT_COLUMNS = ("text", "sentence", "sentence1", "anchor", "query", "question")
PAIR_COLUMNS = (
    ("anchor", "positive"),
    ("query", "positive"),
    ("question", "answer"),
    ("query", "answer"),
    ("sentence1", "sentence2"),
)


class Lines(NamedTuple):
    """Sentences, and where each stands: neighbours of one document differ by 1."""

    texts: list[str]
    places: list[int]


def split_columns(path: str, fewest: int, most: int, form: str) -> tuple[Path, list[str]]:
    """The file and the columns in brackets behind it.

    >>> split_columns("notes.csv[title,topic]", 1, 2, "text:FILE[text,label]")[1]
    ['title', 'topic']
    """
    found = re.fullmatch(r"(.+?)\[([^\[\]]*)\]", path)
    file, columns = (found[1], [one.strip() for one in found[2].split(",")]) if found else (path, [])
    if not file.strip() or (found and not (fewest <= len(columns) <= most and all(columns))):
        raise ArgumentError("data", form, repr(path))
    return Path(file), columns


def is_table(path: Path) -> bool:
    return path.is_dir() or suffix_of(path) in table_suffixes


def read_lines(path: Path) -> Lines:
    """One sentence per line of a file, packed or not; an empty line begins another document."""
    if not path.is_file():
        raise NoFile("data", "a file of texts", path, "where there is none")
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
    if name not in table:
        raise UnknownName(name, list(table), f"in {path}")
    return table[name]


def texts_in(table: Table, name: str, path: Path) -> list[str]:
    """A column of texts, none of them empty."""
    values = column_in(table, name, path)
    wrong = next((i for i, value in enumerate(values) if not isinstance(value, str) or not value.strip()), None)
    if wrong is not None:
        got = f"{str(values[wrong])[:40]!r} in row {wrong}"
        raise FileError("data", f"a text in every row of the column {name!r}", path, f"which has {got}")
    return [value.strip() for value in values]


def labels_in(table: Mapping[str, Any], name: str, path: Path) -> tuple[Tensor | None, tuple[str, ...]]:
    """A column of classes, as numbers and their names; None where it has none."""
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
    """What ``hardneg mine`` wrote beside the pairs: a column ``negative``, or negative_1, negative_2 ..."""
    names = [name for name in table if re.fullmatch(r"negative(_\d+)?", name)]
    columns = [texts_in(table, name, path) for name in names]
    return [list(row) for row in zip(*columns, strict=True)] if columns else []


def usual_column(table: Table, path: Path) -> Sequence[str]:
    """The column of the texts where none is named: that of a usual name, or the only one beside labels and ids."""
    for name in TEXT_COLUMNS:
        if name in table:
            return (name,)
    others = [name for name in table if name not in ("id", "_id", "label", "labels", "score")]
    if len(others) == 1:
        return others
    what = f"a column of texts in {path}, whose first line names the columns"
    raise ArgumentError("data", what, f"columns {sorted(table)}", "name it: text:FILE[column]")


def positive_rows(table: Table, first: str, second: str, wanted: Sequence[str], path: Path) -> Table:
    """The rows with the label ``name=value``; without one, a column that may say which pairs are positives raises."""
    if not wanted:
        ignored = ignored_label({**table, second: column_in(table, second, path)}, (first, second), second)
        if ignored is not None:
            fix = f"write pairs:{path}[{first},{second},{ignored}=1], by the label of the positives, or leave it out"
            got = f"a column {ignored!r} in {path}, which is not read"
            raise ArgumentError("data", "to know which pairs are positives", got, fix)
        return table
    name, found, value = wanted[0].partition("=")
    if not found:
        raise ArgumentError("data", "the label of positives as column=value", repr(wanted[0]))
    labels = column_in(table, name.strip(), path)
    kept = [row for row, label in enumerate(labels) if mark_of(label) == mark_of(value)]
    if not kept:
        known = ", ".join(list(dict.fromkeys(map(str, labels)))[:5])
        raise ArgumentError("data", f"pairs with {name.strip()}={value.strip()} in {path}", f"only {known}")
    return {column: [values[row] for row in kept] for column, values in table.items()}


def pair_columns(table: Table, path: Path) -> Sequence[str]:
    """The columns of the pairs where none are named: those of a usual name, or the only two of texts."""
    for pair in PAIR_COLUMNS:
        if all(name in table for name in pair):
            return pair
    others = [
        name
        for name in table
        if not re.fullmatch(r"negative(_\d+)?|id|_id|scores?|labels?", name) and name not in LABELS
    ]
    if len(others) == 2:
        return others
    raise ArgumentError("data", f"two columns of texts in {path}", f"columns {sorted(table)}", "name them: FILE[a,b]")
