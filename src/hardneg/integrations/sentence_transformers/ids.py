"""Pass ids of queries and documents through the trainer of sentence-transformers.

The trainer passes only the tokens of a row and its column ``label`` to the loss, so `with_ids` stores the ids there,
and `read_rows` reads them in the loss::

    label = [group, id of the anchor, id of the positive, ids of the negatives ...]  # -1: missing negative
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, argument_error, check_count, warn_once
from hardneg.core.tensors import constant
from hardneg.integrations.ranks import distinct_ids, own_rank
from hardneg.mining.dataset import as_dataset, is_frame
from hardneg.negatives.known import Known, KnownPairs

Data = TypeVar("Data")
RowNumbers = Annotated[Tensor, "b"]
NONE = torch.iinfo(torch.long).min
"""Marks a missing group, row or document; no real one has this number."""
MOST = 2**31
"""Ids are smaller, so that a pair of ids fits into one 64-bit number."""
_most_rows = 2**20  # maximum number of rows per rank
_labels = ("label", "labels", "score", "scores")
_query_id, _document_ids = "query_id", "document_ids"  # the columns that `hardneg mine --ids` adds
_names_ids = re.compile(r"(.*[_-])?ids?(_\d+)?", re.IGNORECASE)
_is_id = re.compile(r"(?=.*\d)[A-Za-z0-9._:/#-]{1,64}")
"""One ASCII word with a digit: "q1", "MED-10", "4983", a UUID. A column of nothing else hardly contains texts."""


def with_ids(dataset: Data, start: int = 0, *, group: str | None = None) -> Data:
    """Return the data set with a column ``label`` that contains ids for ``NegativesLoss``.

    Equal texts get equal ids. The columns ``query_id`` and ``document_ids`` of ``hardneg mine --ids`` are used as ids
    and
    removed: rows with equal query ids have the same anchor, even if its text differs. Any other column whose texts look
        like ids causes a warning.

    Args:
        dataset: A ``datasets.Dataset`` with columns anchor, positive, negatives ... in this order, as for every ranking
            loss of sentence-transformers, or a ``DatasetDict``, whose parts share ids. A column of lists of negatives
            becomes several columns; None and "" are missing negatives.
        start: First id. Anchors are numbered before documents.
        group: Column of whole numbers for ``OtherLabel()`` and ``positives="group"``; by default ``label`` if it
            exists, else each anchor is its own group.

    Raises:
        ArgumentError: The data set is streamed or not in triplets or n-tuples, has labels that are not groups, or has
            values that are not texts.
    """
    several = dataset if isinstance(dataset, dict) else {"": dataset}
    parts = {name: _Table(part, group) for name, part in several.items()}
    numbers = _numbered(list(parts.values()), start)
    found = {name: part.labelled(own) for (name, part), own in zip(parts.items(), numbers, strict=True)}
    return type(dataset)(found) if isinstance(dataset, dict) else found[""]  # type: ignore[no-any-return]


def known_positives(dataset: Any) -> Known:
    """Return a factor that excludes every (anchor, positive) pair of a data set from the negatives.

    ``NegativesLoss`` excludes the pairs of the batch by itself. With a queue, use this factor too, because the queue
    also contains positives of rows outside the batch.

    Args:
        dataset: Result of ``with_ids``.

    Raises:
        ArgumentError: The data set has no ids.
    """
    parts = list(dataset.values()) if isinstance(dataset, dict) else [dataset]
    if any("label" not in part.column_names for part in parts):
        raise ArgumentError("known_positives", "a data set with ids", "no column 'label'", "use with_ids(dataset)")
    labels = torch.tensor([row[1:3] for part in parts for row in part["label"]], dtype=torch.long).reshape(-1, 2)
    return Known(KnownPairs(labels[:, 0], labels[:, 1]))


def _numbered(tables: list[_Table], start: int) -> list[list[list[int]]]:
    """Number all texts by table, column and row; -1 for missing ones. The anchors of all tables are numbered first.

    Two texts have the same number if they are equal, or if their table gives them the same id.
    """
    start = check_count("with_ids", "start", start, least=0)
    of_text: dict[str, int] = {}
    of_id: dict[tuple[int, bool, Any], int] = {}
    count = start

    def number(text: str, key: tuple[int, bool, Any]) -> int:
        nonlocal count
        if not text:
            return -1
        found = of_id.get(key) if key[2] is not None else None
        found = of_text.get(text) if found is None else found
        if found is None:
            found, count = count, count + 1
        of_text.setdefault(text, found)
        if key[2] is not None:
            of_id.setdefault(key, found)
        return found

    numbers: list[list[list[int]]] = [[] for _ in tables]
    for documents in (False, True):
        for place, table in enumerate(tables):
            columns = list(zip(table.texts, table.ids, strict=True))
            for texts, ids in columns[1:] if documents else columns[:1]:
                row = zip(texts, ids, strict=True)
                numbers[place].append([number(text, (place, documents, one)) for text, one in row])
    if count > MOST:
        raise argument_error("with_ids", f"ids below {MOST}", "the largest id", count - 1)
    return numbers


class _Table:
    """The columns of a data set as lists of texts, with their ids where the data set has them.

    Attributes:
        texts: Columns anchor, positive, negatives ...; "" for a missing negative.
        ids: Ids of the same shape; None where the data set has none.
        groups: Group of each row, or None.
        dropped: Columns to remove from the data set.
        added: Columns to add to it, by name.
    """

    def __init__(self, dataset: Any, group: str | None) -> None:
        dataset = as_dataset(dataset, "with_ids") if is_frame(dataset) else dataset
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "add_column"):
            fix = "load it without streaming, or train without ids"
            raise ArgumentError("with_ids", "a datasets.Dataset of known length", type(dataset).__name__, fix)
        names = list(dataset.column_names)
        if {"positive_ids", "document_id"} & set(names) or _is_labeled_list(dataset, names):
            fix = "mine with --format triplet or n-tuple; --ids adds the ids"
            raise ArgumentError("with_ids", "triplets or n-tuples of texts", f"columns {names}", fix)
        if group is None and "label" in names:
            group = "label"
        unread = [name for name in names if name in _labels and name != group]
        if unread:
            fix = f"remove it: dataset.remove_columns({unread!r}), or name a column of groups: with_ids(..., group=...)"
            raise ArgumentError(
                "with_ids", "a data set without other labels or scores", f"the column {unread[0]!r}", fix
            )
        if group is not None and group not in names:
            raise argument_error("with_ids", f"a column among {names}", "group", group)
        self.dataset, self.groups = dataset, None if group is None else _whole_numbers(list(dataset[group]), group)
        given = [name for name in (_query_id, _document_ids) if name in names and name != group]
        self.names = [name for name in names if name != group and name not in given]
        if len(self.names) < 2:
            raise ArgumentError("with_ids", "columns anchor, positive, ...", f"columns {self.names}")
        if group == "label" and self.groups is not None:
            _check_groups(self.groups, dataset[self.names[0]])
        self.dropped = given if group is None else [group, *given]
        self.texts: list[list[str]] = []
        self.added: dict[str, list[str]] = {}
        for place, name in enumerate(self.names):
            self._read(name, place, list(dataset[name]))
        self.ids: list[list[Any]] = [[None] * len(dataset) for _ in self.texts]
        if _query_id in given:
            self.ids[0] = list(dataset[_query_id])
        if _document_ids in given:
            self._read_document_ids(dataset[_document_ids])

    def _read(self, name: str, place: int, values: list[Any]) -> None:
        """Add one column, or several if it holds lists of negatives."""
        lists = any(isinstance(value, (list, tuple)) for value in values)
        if lists and place > 1:
            rows = [[value] if isinstance(value, str) else list(value or ()) for value in values]
            width = max(map(len, rows))
            names = [f"{name}_{i + 1}" for i in range(width)]
            texts = [[_text(row[i] if i < len(row) else None, name) for row in rows] for i in range(width)]
        else:
            names, texts = [name], [[_text(value, name, needed=place < 2) for value in values]]
        self.texts += texts
        _warn_of_ids(name, texts)
        if self.added or texts != [values] or names != [name]:  # columns keep their order
            if taken := [one for one in names if names != [name] and one in (*self.names, *self.added)]:
                fix = "rename the other columns"
                got = f"{taken} among the other columns"
                raise ArgumentError("with_ids", f"unused names for the parts of the column {name!r}", got, fix)
            self.dropped.append(name)
            self.added.update(zip(names, texts, strict=True))

    def _read_document_ids(self, given: Iterable[Any]) -> None:
        """Assign the ids of each row to its documents in order, skipping missing negatives."""
        for row, own in enumerate(given):
            places = [place for place, column in enumerate(self.texts) if place > 0 and column[row]]
            if not isinstance(own, (list, tuple)) or len(own) != len(places):
                got = f"{_document_ids}={own!r} in row {row} with {len(places)} documents"
                fix = f"remove the column {_document_ids}, or mine again with --ids"
                raise ArgumentError("with_ids", "one id for each document of a row", got, fix)
            for place, one in zip(places, own, strict=True):
                self.ids[place][row] = one

    def labelled(self, ids: list[list[int]]) -> Any:
        """Return the data set with the numbers of all texts in the column ``label``."""
        groups = ids[0] if self.groups is None else self.groups
        dataset = self.dataset.remove_columns(self.dropped)
        for name, column in self.added.items():
            dataset = dataset.add_column(name, column)
        return dataset.add_column("label", [list(row) for row in zip(groups, *ids, strict=True)])


def _is_labeled_list(dataset: Any, names: list[str]) -> bool:
    """Return True for rows of the format "labeled-list" of hardneg mine; other formats are recognised by name."""
    found = "positive" in names and {"labels", "scores"} & set(names) and len(dataset)
    return bool(found) and isinstance(dataset[0]["positive"], (list, tuple))


def _check_groups(groups: list[int], anchors: Iterable[Any]) -> None:
    """Raise if the column ``label`` marks positive pairs (0 and 1 for one anchor); warn if it possibly does."""
    if not set(groups) <= {0, 1} or 0 not in groups:
        return
    of_anchor: dict[Any, int] = {}
    fix = "keep the rows with label 1 and remove the column, or mine with --format triplet"
    if any(of_anchor.setdefault(str(anchor), group) != group for anchor, group in zip(anchors, groups, strict=True)):
        raise ArgumentError("with_ids", "a column label of groups", "labels 0 and 1 of the same anchor", fix)
    if 1 in groups:
        warn_once(
            "with_ids.labels",
            "with_ids uses the column label, which contains only 0 and 1, as the group of each row. If 0 means that "
            f"the two texts do not match, {fix}, because all rows are used as positives.",
        )


def _text(value: Any, name: str, needed: bool = False) -> str:
    """Return a text, or "" for a missing negative; raise ArgumentError for any other value."""
    if isinstance(value, str) and (value or not needed):
        return value
    if value is None and not needed:
        return ""
    fix = None if needed else f"remove the column {name} if it holds no negatives"
    raise argument_error("with_ids", "texts" if needed else "texts, or None for no negative", name, value, fix)


def _warn_of_ids(name: str, columns: list[list[str]]) -> None:
    """Warn once if a column seems to hold ids instead of texts."""
    texts = (text for column in columns for text in column if text)
    first = next((text for column in columns for text in column if text), None)
    if first is not None and (_names_ids.fullmatch(name) or all(map(_is_id.fullmatch, texts))):
        warn_once(
            f"with_ids.texts:{name}",
            f"The column {name!r} seems to contain ids such as {first!r}, which would be used as texts. Replace them "
            f"by the texts, or remove the column. with_ids reads ids from the columns {_query_id} and {_document_ids}.",
        )


def _whole_numbers(values: Iterable[Any], name: str) -> list[int]:
    """Return the values as a list; raise ArgumentError unless all are whole numbers."""
    numbers = list(values)
    for value in numbers:
        if not isinstance(value, int):
            fix = "the rows seem to have ids already" if isinstance(value, list) else None
            raise argument_error("with_ids", "whole numbers as groups", name, value, fix)
    return numbers


@dataclass(frozen=True, eq=False)
class BatchRows:
    """Groups and ids of the rows of a batch.

    Attributes:
        vectors: Embedded anchors, [b, d]; for shape and device.
        group: Group of each row, [b], or None.
        anchors: Id of each anchor, [b], or None without ids; negative if unknown.
        queries: The same, with a unique number for each unknown anchor.
        documents: Ids by column, each [b]; NONE for a missing document.
    """

    vectors: Annotated[Tensor, "b d"]
    group: RowNumbers | None = None
    anchors: RowNumbers | None = None
    queries: RowNumbers | None = None
    documents: tuple[RowNumbers, ...] = ()

    @property
    def owner(self) -> RowNumbers:
        """A number for each row, [b], unique over all ranks."""
        return distinct_ids(self.vectors)

    @property
    def have_ids(self) -> bool:
        """True if the batch comes from a data set with ids."""
        return self.anchors is not None


def read_rows(labels: Tensor | None, num_columns: int, vectors: Annotated[Tensor, "b d"]) -> BatchRows:
    """Read the groups and ids of a batch.

    Args:
        labels: [b, 1 + columns], from ``with_ids``; [b], groups only; None or floating-point for neither.
        num_columns: Number of text columns.
        vectors: Embedded anchors, [b, d].

    Raises:
        ArgumentError: The labels do not fit the columns, which changed after ``with_ids``.
    """
    if labels is None or labels.is_floating_point():
        return BatchRows(vectors)
    labels = labels.long()
    if labels.ndim == 1:
        return BatchRows(vectors, labels)
    if labels.ndim != 2 or labels.shape[1] != 1 + num_columns:
        what = f"labels from with_ids with {1 + num_columns} numbers for {num_columns} text columns"
        fix = "call with_ids after the last change of the columns"
        raise ArgumentError("NegativesLoss", what, f"labels={tuple(labels.shape)}", fix)
    group, anchors, *_ = labels.unbind(1)
    ids = labels[:, 1:]
    queries, *documents = torch.where(
        ids < 0, constant(_unknown, *ids.shape, own_rank(), device=ids.device), ids
    ).unbind(1)
    return BatchRows(vectors, group, anchors, queries, tuple(documents))


def _unknown(rows: int, num_columns: int, rank: int, device: torch.device) -> Annotated[Tensor, "b c"]:
    """Return replacements of unknown ids, [rows, columns]: a unique number for each anchor, NONE for documents.

    Numbers of anchors stay below 2**32, so that a pair fits into 63 bits.
    """
    found = torch.full((rows, num_columns), NONE, device=device)
    found[:, 0] = torch.arange(rows, device=device) + (MOST + rank * _most_rows)
    return found
