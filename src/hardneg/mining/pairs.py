"""Which corpus rows are positives of which query: read from ids in any usual shape, kept as sorted pairs.

``read_positives`` returns ``Pairs``, with ``RowsOf`` to find the row of an id. Used by the scorer
of mining and by audits; ``as_one`` and ``numbered_ids`` prepare the arguments of ``hn.mine`` and
``hn.audit``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, argument_error
from hardneg.core.types import Keys, Names, hash_text, int_if_whole

_distinct = "give each row its own id or drop the copies"
_without_positive = "give the row or id of its document, or leave the query out"
Positives = Tensor | Sequence[Any]
"""Corpus ids of the positives: [q], [q, p] padded with -1, or one list per query."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """(query, row) pairs sorted by query, then by row.

    The rows of query i are ``rows[start[i]:start[i + 1]]``.

    Attributes:
        start: First pair of each query, and the number of pairs [q + 1].
        rows: Row of the corpus of each pair [m].
    """

    start: Annotated[Tensor, "q+1"]
    rows: Annotated[Tensor, "m"]

    def __len__(self) -> int:
        return len(self.start) - 1

    def of(self, queries: Annotated[Tensor, "b"]) -> tuple[Annotated[Tensor, "m"], Annotated[Tensor, "m"]]:
        """Return the pairs of these queries: positions within ``queries`` [m] and rows [m]."""
        place, _, rows = self.columns(queries)
        return place, rows

    def columns(self, queries: Annotated[Tensor, "b"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the pairs of these queries: positions within ``queries``, number within the query, and rows.

        Example:
            >>> pairs = as_pairs(torch.tensor([0, 0, 1]), torch.tensor([5, 2, 7]), num_queries=2)
            >>> [each.tolist() for each in pairs.columns(torch.tensor([1, 0]))]
            [[0, 1, 1], [0, 0, 1], [7, 2, 5]]
        """
        begin = self.start[queries]
        count = self.start[queries + 1] - begin
        place = torch.repeat_interleave(torch.arange(len(queries), device=queries.device), count)
        column = torch.arange(len(place), device=queries.device) - (count.cumsum(0) - count)[place]
        return place, column, self.rows[begin[place] + column]

    def padded(self, queries: Tensor, score: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Return a score for each pair of these queries, padded [b, p], and which of them are real.

        Args:
            queries: Positions of the queries [b].
            score: Function of positions within ``queries`` [m] and rows [m] that returns scores [m].
        """
        place, column, rows = self.columns(queries)
        values = score(place, rows)
        scores = values.new_zeros(len(queries), int(column.max()) + 1 if len(column) else 1)
        real = torch.zeros_like(scores, dtype=torch.bool)
        scores[place, column], real[place, column] = values, True
        return scores, real

    def count(self) -> Annotated[Tensor, "q"]:
        """Return the number of pairs of each query."""
        return self.start.diff()

    def to(self, device: torch.device) -> Pairs:
        """Return the pairs on a device."""
        return Pairs(self.start.to(device), self.rows.to(device))


def as_pairs(query: Annotated[Tensor, "m"], row: Annotated[Tensor, "m"], num_queries: int) -> Pairs:
    """Return sorted pairs from pairs in any order, repeated or not.

    Args:
        query: Query of each pair [m].
        row: Row of each pair [m].
        num_queries: Number of queries.
    """
    width = int(row.max()) + 1 if len(row) else 1
    both = torch.unique(query * width + row)  # sorted by query, then row; ten times faster than with two columns
    start = torch.zeros(num_queries + 1, dtype=torch.long)
    start[1:] = torch.bincount(both // width, minlength=num_queries).cumsum(0)
    return Pairs(start, both % width)


def as_one(queries: Keys, corpus: Keys) -> tuple[Keys, Keys]:
    """Give queries without ids that are the vectors of the corpus its ids, so that no row is its own negative."""
    first, second = queries.vectors, corpus.vectors
    alike = first.shape == second.shape and first.dtype == second.dtype and first.device == second.device
    # Compare a few rows first: on a GPU the full comparison allocates a byte per number.
    if queries.ids is not None or not alike or not (torch.equal(first[:8], second[:8]) and torch.equal(first, second)):
        return queries, corpus
    ids = torch.arange(len(corpus), device=second.device) if corpus.ids is None else corpus.ids
    return queries.changed(ids=ids), corpus.changed(ids=ids)


def numbered_ids(given: Any, names: Names | None) -> Any:
    """Return ids as ``read_positives`` accepts them: arrays as tensors, texts as the numbers of the corpus ids.

    Args:
        given: Ids in any shape, or a pandas column.
        names: Texts that are the ids of the corpus, or None.

    Raises:
        ArgumentError: If the corpus has texts as ids and ``given`` has none, an unknown one or a
            repeated one.
    """
    given = given.to_numpy() if hasattr(given, "to_numpy") else given  # a column of pandas
    if isinstance(given, np.ndarray):
        given = torch.from_numpy(given.astype(np.int64)) if given.dtype.kind in "iu" else given.tolist()
    if names is None:
        return given
    if isinstance(given, (Tensor, str)) or not hasattr(given, "__iter__"):
        raise ArgumentError("mine", "texts as positives, like the ids of the corpus", type(given).__name__)
    known = Counter(names.tolist())
    if len(known) < len(names):
        got = f"id {known.most_common(1)[0][0]!r} more than once ({len(names) - len(known)} repeated in all)"
        raise ArgumentError("mine", "distinct corpus ids", got, _distinct)
    lists = [[each] if isinstance(each, str) or not hasattr(each, "__iter__") else list(each) for each in given]
    for query, own in enumerate(lists):
        for one in own:
            if one not in known:
                raise ArgumentError("mine", "positives that are in the corpus", f"id {one!r} of query {query}")
    return [[hash_text(one) for one in own] for own in lists]


def read_positives(positives: Positives, num_queries: int, rows_of: RowsOf) -> Pairs:
    """Return positives as pairs of query and corpus row.

    Args:
        positives: Corpus ids: [q], [q, p] padded with -1, or one list per query.
        num_queries: Number of queries q.
        rows_of: Row of each id.

    Raises:
        ArgumentError: If the shape is another, or if an id is not in the corpus.
    """
    query, ids = _flat(positives, num_queries)
    rows = rows_of(ids)
    if len(rows) and int(rows.min()) < 0:
        place = int((rows < 0).nonzero()[0])
        raise ArgumentError(
            "mine",
            "positives that are in the corpus",
            f"id {int(ids[place])} of query {int(query[place])}",
            f"{int((rows < 0).sum())} of {len(rows)} positives are not among the corpus ids",
        )
    return as_pairs(query, rows, num_queries)


class RowsOf:
    """Maps ids to rows of the corpus, -1 for unknown ids.

    Args:
        ids: Distinct ids of the corpus [n]; None if ids are row numbers.
        num_rows: Number of rows n.

    Raises:
        ArgumentError: If ids are repeated.
    """

    def __init__(self, ids: Tensor | None, num_rows: int) -> None:
        self.num_rows = num_rows
        self.sorted: Tensor | None = None
        if ids is not None:
            self.sorted, self.order = ids.cpu().sort()
            same = self.sorted[1:] == self.sorted[:-1]
            if bool(same.any()):
                example = int(self.sorted[1:][same][0])
                raise ArgumentError(
                    "mine",
                    "distinct corpus ids",
                    f"id {example} more than once ({int(same.sum())} repeated in all)",
                    _distinct,
                )

    def __call__(self, ids: Annotated[Tensor, "m"]) -> Annotated[Tensor, "m"]:
        """Return the row of each id [m]."""
        if self.sorted is None:
            return torch.where((ids >= 0) & (ids < self.num_rows), ids, -1)
        place = torch.searchsorted(self.sorted, ids).clamp(max=self.num_rows - 1)
        return torch.where(self.sorted[place] == ids, self.order[place], -1)


def _flat(positives: Positives, num_queries: int) -> tuple[Tensor, Tensor]:
    if isinstance(positives, Tensor):
        return _flat_tensor(positives, num_queries)
    if isinstance(positives, (str, bytes)) or not isinstance(positives, Sequence):
        raise argument_error("mine", "positives as corpus ids: a tensor or one list per query", "positives", positives)
    if len(positives) != num_queries:
        raise ArgumentError("mine", f"positives of {num_queries} queries", f"positives of {len(positives)}")
    lists = [[int_if_whole(one) for one in _as_list(each)] for each in positives]
    if wrong := next(((row, one) for row, own in enumerate(lists) for one in own if not _is_id(one)), None):
        fix = "give the corpus its ids, Keys(vectors, ids=texts)" if isinstance(wrong[1], str) else _without_positive
        raise ArgumentError("mine", "corpus ids as positives, whole numbers", f"{wrong[1]!r} of query {wrong[0]}", fix)
    count = torch.tensor([len(each) for each in lists], dtype=torch.long)
    flat = torch.tensor([int(one) for each in lists for one in each], dtype=torch.long)
    query = torch.repeat_interleave(torch.arange(num_queries), count)
    return query[flat != -1], flat[flat != -1]


def _is_id(one: Any) -> bool:
    return isinstance(one, (int, np.integer)) and not isinstance(one, bool)


def _as_list(ids: Any) -> list[Any]:
    if isinstance(ids, Tensor):
        return [int(one) for one in ids.flatten()]
    return list(ids) if hasattr(ids, "__iter__") and not isinstance(ids, str) else [ids]


def _flat_tensor(positives: Tensor, num_queries: int) -> tuple[Tensor, Tensor]:
    if positives.is_floating_point() and torch.equal(
        positives, positives.round()
    ):  # not NaN, which is unequal to itself
        positives = positives.long()
    if positives.ndim not in (1, 2) or len(positives) != num_queries or positives.is_floating_point():
        raise ArgumentError(
            "mine",
            f"corpus ids [{num_queries}] or [{num_queries}, p] as positives",
            f"positives={tuple(positives.shape)} of {positives.dtype}",
        )
    ids = positives.cpu().long()[:, None].flatten(1)
    real = ids != -1
    return real.nonzero()[:, 0], ids[real]
