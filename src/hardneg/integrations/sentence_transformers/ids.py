"""Pass ids of queries and documents through the trainer of sentence-transformers.

The trainer passes only the tokens of a row and its column ``label`` to the loss, so `with_ids` stores the ids there,
and `read_rows` reads them in the loss::

    label = [group, id of the anchor, id of the positive, ids of the negatives ...]  # -1: missing negative
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardneg.core.errors import ArgumentError, argument_error, check_count, optional, warn_once
from hardneg.core.tensors import constant
from hardneg.integrations.ranks import distinct_ids, own_rank
from hardneg.mining.dataset import as_dataset, is_frame
from hardneg.negatives.known import Known, KnownPairs

Data = TypeVar("Data")
RowNumbers = Annotated[Tensor, "b"]
Numbers = NDArray[np.int64]
Column = Any
"""A ``pyarrow.ChunkedArray``; pyarrow has no types."""
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
    rows = [
        _values(_columns(part)["label"].combine_chunks().flatten()).reshape(len(part), -1)
        for part in parts
        if len(part)
    ]
    pairs = torch.from_numpy(np.concatenate([np.empty((0, 2), np.int64), *(row[:, 1:3] for row in rows)]))
    return Known(KnownPairs(pairs[:, 0], pairs[:, 1]))


def _numbered(tables: list[_Table], start: int) -> list[list[Numbers]]:
    """Number all texts by table, column and row; -1 for missing ones. The anchors of all tables are numbered first.

    Two texts have the same number if they are equal, or if their table gives them the same id.
    """
    start = check_count("with_ids", "start", start, least=0)
    anchors = [(place, 0) for place in range(len(tables))]
    documents = [(place, i) for place, table in enumerate(tables) for i in range(1, len(table.texts))]
    order = anchors + documents
    numbers = _coded([tables[place].texts[i] for place, i in order])
    if any(table.ids for table in tables):
        numbers = _joined(numbers, _coded_ids(tables, order))
    count = start + int(numbers.max(initial=-1)) + 1
    if count > MOST:
        raise argument_error("with_ids", f"ids below {MOST}", "the largest id", count - 1)
    numbers = np.where(numbers < 0, -1, numbers + start)
    ends = np.cumsum([len(tables[place].dataset) for place, _ in order])
    found = dict(zip(order, np.split(numbers, ends[:-1]), strict=True))
    return [[found[place, i] for i in range(len(table.texts))] for place, table in enumerate(tables)]


def _coded(columns: list[Column]) -> Numbers:
    """Number the values of columns below each other in the order of their first appearance; -1 for missing values."""
    arrow = _arrow()
    kind = arrow.large_string() if _is_text(columns[0].type) else columns[0].type
    whole = arrow.chunked_array([chunk for column in columns for chunk in column.cast(kind).chunks], kind)
    return _values(
        arrow.chunked_array([chunk.indices for chunk in whole.dictionary_encode().chunks], arrow.int32()), -1
    )


def _coded_ids(tables: list[_Table], order: list[tuple[int, int]]) -> Numbers:
    """Number the given ids of all texts, apart by table, and by queries and documents; -1 for texts without an id."""
    parts, count = {}, 0
    for place, table in enumerate(tables):
        for own in ([0], list(range(1, len(table.texts)))):
            given = [i for i in own if i in table.ids]
            codes = _coded([table.ids[i] for i in given]) if given else np.empty(0, np.int64)
            split = np.split(np.where(codes < 0, -1, codes + count), len(given) or 1)
            parts.update({(place, i): part for i, part in zip(given, split, strict=False)})
            count += int(codes.max(initial=-1)) + 1
    missing = {place: np.full(len(table.dataset), -1) for place, table in enumerate(tables)}
    return np.concatenate([parts.get(column, missing[column[0]]) for column in order])


def _joined(texts: Numbers, ids: Numbers) -> Numbers:
    """Number rows by id, and by text where the id is new or missing; in the order of their first appearance.

    Args:
        texts: Number of each text; negative for missing ones, which stay so.
        ids: Number of each id; negative where a text has none.
    """
    there = np.flatnonzero(texts >= 0)
    pairs = texts[there] * (int(ids.max(initial=-1)) + 2) + ids[there] + 1
    _, first, inverse = np.unique(pairs, return_index=True, return_inverse=True)
    of_text: dict[int, int] = {}
    of_id: dict[int, int] = {}
    count, numbers = 0, np.empty(len(first), np.int64)
    for pair in np.argsort(first):
        text, one = int(texts[there[first[pair]]]), int(ids[there[first[pair]]])
        found = of_id.get(one, of_text.get(text, count))
        count += found == count
        of_text.setdefault(text, found)
        if one >= 0:
            of_id.setdefault(one, found)
        numbers[pair] = found
    joined = np.full(len(texts), -1)
    joined[there] = numbers[inverse]
    return joined


class _Table:
    """The columns of a data set with texts, with their ids where the data set has them.

    Attributes:
        dataset: The data set.
        texts: Columns anchor, positive, negatives ...; null for a missing negative.
        ids: Ids of the texts by place, where the data set has them.
        groups: Group of each row, or None.
        dropped: Columns to remove from the data set.
        added: Columns to add to it, by name.
    """

    def __init__(self, dataset: Any, group: str | None) -> None:
        dataset = as_dataset(dataset, "with_ids") if is_frame(dataset) else dataset
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "add_column"):
            fix = "load it without streaming, or train without ids"
            raise ArgumentError("with_ids", "a datasets.Dataset of known length", type(dataset).__name__, fix)
        group = _check_names(dataset, group)
        names, columns = list(dataset.column_names), _columns(dataset)
        self.dataset, self.groups = dataset, None if group is None else _whole_numbers(columns[group], group)
        given = [name for name in (_query_id, _document_ids) if name in names and name != group]
        self.names = [name for name in names if name != group and name not in given]
        if len(self.names) < 2:
            raise ArgumentError("with_ids", "columns anchor, positive, ...", f"columns {self.names}")
        self.dropped = given if group is None else [group, *given]
        self.texts: list[Column] = []
        self.added: dict[str, Column] = {}
        for place, name in enumerate(self.names):
            self._read(name, place, columns[name])
        if group == "label" and self.groups is not None:
            _check_groups(self.groups, self.texts[0])
        self.ids: dict[int, Column] = {0: columns[_query_id]} if _query_id in given else {}
        if _document_ids in given:
            self.ids |= self._document_ids(columns[_document_ids])

    def _read(self, name: str, place: int, column: Column) -> None:
        """Add one column, or several if it holds lists of negatives."""
        is_list = _is_list(column.type) and place > 1
        parts = _spread(column) if is_list else [column]
        texts = [_texts(part, name, needed=place < 2) for part in parts]
        self.texts += texts
        _warn_of_ids(name, texts)
        if self.added or is_list or column.null_count or not _is_text(column.type):  # columns keep their order
            names = [f"{name}_{i + 1}" for i in range(len(texts))] if is_list else [name]
            if taken := [one for one in names if is_list and one in (*self.names, *self.added)]:
                fix = "rename the other columns"
                got = f"{taken} among the other columns"
                raise ArgumentError("with_ids", f"unused names for the parts of the column {name!r}", got, fix)
            self.dropped.append(name)
            self.added.update({one: text.fill_null("") for one, text in zip(names, texts, strict=True)})

    def _document_ids(self, given: Column) -> dict[int, Column]:
        """Return the ids of the documents by place, assigned to each row's documents that are not missing, in order."""
        there = np.stack([text.is_valid().to_numpy() for text in self.texts[1:]], axis=1)
        lengths = _lengths(given) if _is_list(given.type) else np.full(len(given), -1)
        if len(wrong := np.flatnonzero(lengths != there.sum(1))):
            row = int(wrong[0])
            got = f"{_document_ids}={given[row].as_py()!r} in row {row} with {int(there[row].sum())} documents"
            fix = f"remove the column {_document_ids}, or mine again with --ids"
            raise ArgumentError("with_ids", "one id for each document of a row", got, fix)
        places = np.where(there, np.cumsum(there).reshape(there.shape) - 1, -1)
        flat = given.combine_chunks().flatten()
        return {i + 1: _taken(flat, places[:, i]) for i in range(places.shape[1])}

    def labelled(self, ids: list[Numbers]) -> Any:
        """Return the data set with the numbers of all texts in the column ``label``."""
        dataset = self.dataset.remove_columns(self.dropped)
        for name, column in self.added.items():
            dataset = dataset.add_column(name, column)
        rows = np.stack([ids[0] if self.groups is None else self.groups, *ids], axis=1)
        ends = np.arange(len(rows) + 1, dtype=np.int32) * rows.shape[1]
        return dataset.add_column("label", _arrow().ListArray.from_arrays(ends, rows.reshape(-1)))


def _check_names(dataset: Any, group: str | None) -> str | None:
    """Return the name of the column of groups; raise ArgumentError for the columns of other formats."""
    names = list(dataset.column_names)
    if {"positive_ids", "document_id"} & set(names) or _is_labeled_list(dataset, names):
        fix = "mine with --format triplet or n-tuple; --ids adds the ids"
        raise ArgumentError("with_ids", "triplets or n-tuples of texts", f"columns {names}", fix)
    if group is None and "label" in names:
        group = "label"
    unread = [name for name in names if name in _labels and name != group]
    if unread:
        fix = f"remove it: dataset.remove_columns({unread!r}), or name a column of groups: with_ids(..., group=...)"
        raise ArgumentError("with_ids", "a data set without other labels or scores", f"the column {unread[0]!r}", fix)
    if group is not None and group not in names:
        raise argument_error("with_ids", f"a column among {names}", "group", group)
    return group


def _is_labeled_list(dataset: Any, names: list[str]) -> bool:
    """Return True for rows of the format "labeled-list" of hardneg mine; other formats are recognised by name."""
    found = "positive" in names and {"labels", "scores"} & set(names) and len(dataset)
    return bool(found) and isinstance(dataset[0]["positive"], (list, tuple))


def _check_groups(groups: Numbers, anchors: Column) -> None:
    """Raise if the column ``label`` marks positive pairs (0 and 1 for one anchor); warn if it possibly does."""
    if not set(np.unique(groups)) <= {0, 1} or 0 not in groups:
        return
    codes = _coded([anchors])
    fix = "keep the rows with label 1 and remove the column, or mine with --format triplet"
    if set(codes[groups == 0]) & set(codes[groups == 1]):
        raise ArgumentError("with_ids", "a column label of groups", "labels 0 and 1 of the same anchor", fix)
    if 1 in groups:
        warn_once(
            "with_ids.labels",
            "with_ids uses the column label, which contains only 0 and 1, as the group of each row. If 0 means that "
            f"the two texts do not match, {fix}, because all rows are used as positives.",
        )


def _texts(column: Column, name: str, needed: bool) -> Column:
    """Return texts with null for missing negatives; raise ArgumentError for any other value."""
    arrow = _arrow()
    if not len(column) or (column.null_count == len(column) and not needed):
        return arrow.chunked_array([arrow.nulls(len(column), arrow.string())])
    if not _is_text(column.type):
        raise _not_a_text(column.drop_null()[0] if column.null_count < len(column) else column[0], name, needed)
    empty = arrow.compute.equal(column, "")
    if needed and (column.null_count or arrow.compute.any(empty).as_py()):
        raise _not_a_text(column.filter(arrow.compute.fill_null(empty, True))[0], name, needed)
    return arrow.compute.if_else(empty, None, column)


def _not_a_text(value: Any, name: str, needed: bool) -> ArgumentError:
    fix = None if needed else f"remove the column {name} if it holds no negatives"
    what = "texts" if needed else "texts, or None for no negative"
    return argument_error("with_ids", what, name, value.as_py(), fix)


def _warn_of_ids(name: str, columns: list[Column]) -> None:
    """Warn once if a column seems to hold ids instead of texts."""
    first = next((text.as_py() for column in columns for text in column if text.is_valid), None)
    texts = (text.as_py() for column in columns for text in column if text.is_valid)
    if first is not None and (_names_ids.fullmatch(name) or all(map(_is_id.fullmatch, texts))):
        warn_once(
            f"with_ids.texts:{name}",
            f"The column {name!r} seems to contain ids such as {first!r}, which would be used as texts. Replace them "
            f"by the texts, or remove the column. with_ids reads ids from the columns {_query_id} and {_document_ids}.",
        )


def _whole_numbers(column: Column, name: str) -> Numbers:
    """Return the values of a column; raise ArgumentError unless all are whole numbers."""
    types = _arrow().types
    whole = types.is_integer(column.type) or types.is_boolean(column.type)
    if len(column) and (not whole or column.null_count):
        value = (column.filter(column.is_null()) if whole else column)[0].as_py()
        fix = "the rows seem to have ids already" if isinstance(value, list) else None
        raise argument_error("with_ids", "whole numbers as groups", name, value, fix)
    return _values(column)


def _arrow() -> Any:
    """Return pyarrow with its functions."""
    optional("pyarrow.compute", "with_ids", extra="text")
    return optional("pyarrow", "with_ids", extra="text")


def _columns(dataset: Any) -> dict[str, Column]:
    """Return the columns of a data set without converting them to Python objects."""
    table = dataset.with_format("arrow")[:]
    return dict(zip(table.column_names, table.columns, strict=True))


def _is_text(kind: Any) -> bool:
    types = _arrow().types
    return bool(types.is_string(kind) or types.is_large_string(kind))


def _is_list(kind: Any) -> bool:
    types = _arrow().types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _values(column: Any, missing: int = 0) -> Numbers:
    """Return whole numbers of Arrow as an array, with a number for the missing ones."""
    return np.asarray(column.fill_null(missing), dtype=np.int64)


def _lengths(lists: Column) -> Numbers:
    """Return the length of each list; 0 for a missing one."""
    return _values(_arrow().compute.list_value_length(lists))


def _taken(flat: Any, places: Numbers) -> Column:
    """Return the values at some places, and null at negative ones."""
    arrow = _arrow()
    return arrow.chunked_array([flat.take(arrow.array(places, mask=places < 0))])


def _spread(lists: Column) -> list[Column]:
    """Return the first, second ... elements of lists, as many as the longest list has, with null where one ends."""
    lengths, flat = _lengths(lists), lists.combine_chunks().flatten()
    begin = np.cumsum(lengths) - lengths
    return [_taken(flat, np.where(i < lengths, begin + i, -1)) for i in range(lengths.max(initial=0))]


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
