"""Ids of queries and documents through the trainer of sentence-transformers.

Of a row the trainer passes on only its tokenised texts and the column ``label``, so that is where the ids travel:

    label = [group, id of the anchor, id of the positive, ids of the negatives ..., -1 where there is none]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, TypeVar

import torch
from torch import Tensor

from hardneg.core.constants import kept
from hardneg.core.errors import ArgumentError, argument_error, check_count
from hardneg.integrations.ranks import distinct_ids, own_rank
from hardneg.mining.dataset import as_dataset, is_frame
from hardneg.negatives.known import Known, KnownPairs

Data = TypeVar("Data")
Number = Annotated[Tensor, "b"]
NONE = torch.iinfo(torch.long).min
"""No group, row or document: equal to no real one."""
MOST = 2**31
"""Ids are below, so that a pair of them is one number."""
_most_rows = 2**20  # of a rank
_labels = ("label", "labels", "score", "scores")


def with_ids(dataset: Data, start: int = 0, *, group: str | None = None) -> Data:
    """The data set with a column ``label`` that carries ids; equal texts have equal ids, anchors have the first ones.

    Columns are anchor, positive, negatives ..., in this order, as for every ranking loss of sentence-transformers. A
    column of negatives may hold lists of any length, which become several columns; None and "" are no negative. A
    ``DatasetDict`` is numbered as one, so that its parts share ids. ``start`` is the first id.

    group: a column of whole numbers, read by ``OtherLabel()`` and ``positives="group"``; a column ``label`` is taken
        for one. Without, each anchor is a group of its own.
    """
    several = dataset if isinstance(dataset, dict) else {"": dataset}
    parts = {name: _Table(part, group) for name, part in several.items()}
    numbers = _numbered(list(parts.values()), start)
    found = {name: part.labelled(numbers) for name, part in parts.items()}
    return type(dataset)(found) if isinstance(dataset, dict) else found[""]  # type: ignore[no-any-return]


def known_positives(dataset: Any) -> Known:
    """All (anchor, positive) pairs of a data set with ids, as a factor: no document is a negative of its query.

    NegativesLoss knows those of the batch by itself; a queue also holds positives of rows that are elsewhere.
    """
    parts = list(dataset.values()) if isinstance(dataset, dict) else [dataset]
    if any("label" not in part.column_names for part in parts):
        raise ArgumentError("known_positives", "a data set with ids", "no column 'label'", "use with_ids(dataset)")
    labels = torch.tensor([row[1:3] for part in parts for row in part["label"]], dtype=torch.long).reshape(-1, 2)
    return Known(KnownPairs(labels[:, 0], labels[:, 1]))


def _numbered(tables: list[_Table], start: int) -> dict[str, int]:
    start = check_count("with_ids", "start", start, least=0)
    columns = [table.texts[0] for table in tables] + list(chain(*(table.texts[1:] for table in tables)))
    texts = dict.fromkeys(text for text in chain(*columns) if text)
    numbers = {text: number for number, text in enumerate(texts, start)}
    if start + len(numbers) > MOST:
        raise argument_error("with_ids", f"ids below {MOST}", "the largest id", start + len(numbers) - 1)
    return numbers


class _Table:
    """The columns of a data set as lists of texts: anchors, positives, negatives ..."""

    def __init__(self, dataset: Any, group: str | None) -> None:
        dataset = as_dataset(dataset, "with_ids") if is_frame(dataset) else dataset
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "add_column"):
            fix = "load it without streaming, or train without ids"
            raise ArgumentError("with_ids", "a datasets.Dataset of known length", type(dataset).__name__, fix)
        names = list(dataset.column_names)
        if group is None and "label" in names:
            group = "label"
        unread = [name for name in names if name in _labels and name != group]
        if unread:
            fix = "remove it, or name the group's column: with_ids(..., group=...)"
            raise ArgumentError("with_ids", "the column label for the ids", f"columns {names}", fix)
        if group is not None and group not in names:
            raise argument_error("with_ids", f"a column among {names}", "group", group)
        self.dataset, self.groups = dataset, None if group is None else _whole_numbers(list(dataset[group]), group)
        self.names = [name for name in names if name != group]
        if len(self.names) < 2:
            raise ArgumentError("with_ids", "columns anchor, positive, ...", f"columns {self.names}")
        self.dropped = [] if group is None else [group]
        self.texts: list[list[str]] = []
        self.added: dict[str, list[str]] = {}
        for place, name in enumerate(self.names):
            self._read(name, place, list(dataset[name]))

    def _read(self, name: str, place: int, values: list[Any]) -> None:
        lists = any(isinstance(value, (list, tuple)) for value in values)
        if lists and place > 1:
            rows = [[value] if isinstance(value, str) else list(value or ()) for value in values]
            width = max(map(len, rows))
            names = [f"{name}_{i + 1}" for i in range(width)]
            texts = [[_text(row[i] if i < len(row) else None, name) for row in rows] for i in range(width)]
        else:
            names, texts = [name], [[_text(value, name, needed=place < 2) for value in values]]
        self.texts += texts
        if self.added or texts != [values] or names != [name]:  # columns keep their order
            if taken := [one for one in names if names != [name] and one in (*self.names, *self.added)]:
                fix = "rename the other columns"
                raise ArgumentError(
                    "with_ids", f"names of columns that {name!r}, as several, leaves free", f"{taken}", fix
                )
            self.dropped.append(name)
            self.added.update(zip(names, texts, strict=True))

    def labelled(self, numbers: dict[str, int]) -> Any:
        ids = [[numbers[text] if text else -1 for text in column] for column in self.texts]
        groups = ids[0] if self.groups is None else self.groups
        dataset = self.dataset.remove_columns(self.dropped)
        for name, column in self.added.items():
            dataset = dataset.add_column(name, column)
        return dataset.add_column("label", [list(row) for row in zip(groups, *ids, strict=True)])


def _text(value: Any, name: str, needed: bool = False) -> str:
    if isinstance(value, str) and (value or not needed):
        return value
    if value is None and not needed:
        return ""
    raise argument_error("with_ids", "texts" if needed else "texts, or None for no negative", name, value)


def _whole_numbers(values: Iterable[Any], name: str) -> list[int]:
    numbers = list(values)
    for value in numbers:
        if not isinstance(value, int):
            fix = "the rows seem to have ids already" if isinstance(value, list) else None
            raise argument_error("with_ids", "whole numbers as groups", name, value, fix)
    return numbers


@dataclass(frozen=True, eq=False)
class Rows:
    """What is known of the rows of a batch besides their texts."""

    vectors: Annotated[Tensor, "b d"]
    group: Number | None = None
    anchors: Number | None = None
    queries: Number | None = None  # the same, with a number of its own for each unknown anchor
    documents: tuple[Number, ...] = ()  # by column; NONE where there is no document

    @property
    def owner(self) -> Number:
        """A number for each row, different on all ranks."""
        return distinct_ids(self.vectors)

    @property
    def have_ids(self) -> bool:
        return self.anchors is not None


def read_rows(labels: Tensor | None, num_columns: int, vectors: Annotated[Tensor, "b d"]) -> Rows:
    """The groups and ids in the labels of a batch: [b, 1 + columns] of ``with_ids``, [b] for groups only."""
    if labels is None or labels.is_floating_point():
        return Rows(vectors)
    labels = labels.long()
    if labels.ndim == 1:
        return Rows(vectors, labels)
    if labels.ndim != 2 or labels.shape[1] != 1 + num_columns:
        what = f"labels of with_ids, {1 + num_columns} numbers for {num_columns} columns of texts"
        fix = "call with_ids after the last change of the columns"
        raise ArgumentError("NegativesLoss", what, f"labels={tuple(labels.shape)}", fix)
    group, anchors, *_ = labels.unbind(1)
    ids = labels[:, 1:]
    queries, *documents = torch.where(ids < 0, kept(_unknown, *ids.shape, own_rank(), device=ids.device), ids).unbind(1)
    return Rows(vectors, group, anchors, queries, tuple(documents))


def _unknown(rows: int, num_columns: int, rank: int, device: torch.device) -> Annotated[Tensor, "b c"]:
    """What stands for unknown ids: for each anchor a number that no data set and no other row has; NONE for documents.

    Numbers of anchors stay below 2**32, so that a pair is a number of 63 bits.
    """
    found = torch.full((rows, num_columns), NONE, device=device)
    found[:, 0] = torch.arange(rows, device=device) + (MOST + rank * _most_rows)
    return found
