"""Lists of mined negatives, in memory or in any of the formats that `hardneg mine` and other tools write.

- ``ids``: query_id, positive_ids, negative_ids.
- triplets: anchor, positive, negative; n-tuples: anchor, positive, negative_1 ...; lists of positives and of negatives
  for each query: query, pos, neg.
- labeled-list: anchor, a list of documents, and a list of labels (or of scores: then the first is the positive).
- labeled-pair: anchor, document, label.

Columns are found by these names; where a name is missing, the first two remaining columns are anchor and document.
Rows with the same anchor are one query. A format with one row for each positive repeats the negatives for each: they
count once. Read ``read_lists`` first; ``mined`` calls it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

from hardneg.core.errors import ArgumentError
from hardneg.io.tables import Table, read_table

_numbered = "negative_"
_anchors = ("anchor", "query", "question")
_positives = ("positive", "positives", "pos")
_negatives = ("negative", "negatives", "neg")
_others = ("id", "_id", "label", "labels", "score", "scores")


@dataclass(frozen=True)
class Lists:
    """The positives and negatives of each query, by name: ids or texts.

    Attributes:
        queries: Name of each query.
        positives: Names of the positives of each query.
        negatives: Names of the negatives of each query, repeated if the file repeats them.
        wanted: Number of negatives that each query was to get; None if unknown.
        are_texts: Whether names are texts; False if they are ids.
    """

    queries: list[Any]
    positives: list[list[Any]]
    negatives: list[list[Any]]
    wanted: int | None = None
    are_texts: bool = True

    def only(self, places: list[int]) -> Lists:
        """Return the lists of the queries at these places."""
        queries, positives, negatives = (
            [each[i] for i in places] for each in (self.queries, self.positives, self.negatives)
        )
        return replace(self, queries=queries, positives=positives, negatives=negatives)

    def documents(self) -> Iterator[Any]:
        """Yield the names of all positives, then of all negatives, with repetitions."""
        for each in (self.positives, self.negatives):
            yield from (one for names in each for one in names)


def is_mined(columns: Iterable[str]) -> bool:
    """Whether a table with these columns holds mined negatives.

    >>> is_mined(["anchor", "positive", "negative_1"]), is_mined(["id", "text"])
    (True, False)
    """
    names = set(columns)
    if names & {"negative_ids", *_negatives, f"{_numbered}1"}:
        return True
    return "positive" in names and bool(names & {"label", "labels", "score", "scores"})


def read_lists(path: str | Path, wanted: int | None = None) -> Lists:
    """Read the lists of a mined file in any of the formats above.

    Args:
        path: The file or folder.
        wanted: Number of negatives that each query was to get, from the manifest.

    Raises:
        ArgumentError: If no column holds negatives, or its values are neither ids nor texts.
    """
    table = read_table(path, "audit")
    names = list(table)
    if "negative_ids" in table:
        return _of_ids(table, path, wanted)
    anchors, documents = _anchors_and_documents(table, path)
    negative = next((name for name in _negatives if name in table), None)
    tuples = sorted((name for name in names if _is_numbered(name)), key=lambda name: int(name[len(_numbered) :]))
    if negative is not None or tuples:
        columns = [table[name] for name in tuples or [str(negative)]]
        rows = ([one for value in row for one in _listed(value)] for row in zip(*columns, strict=True))
        both = zip(anchors, map(_listed, documents), rows, strict=True)
        return _merged(((anchor, tuple(own), own, others) for anchor, own, others in both), path, wanted)
    marks = table.get("label") or table.get("labels") or _first_is_positive(table.get("scores"))
    if marks is None:
        got = f"columns {names} in {path}, none of which marks negatives"
        raise ArgumentError("audit", "negatives in a mined file", got, "mine labeled pairs without --scores")
    labelled = zip(anchors, map(_listed, documents), map(_listed, marks), strict=True)
    return _merged(_labelled(labelled, path), path, wanted)


def _anchors_and_documents(table: Table, path: str | Path) -> tuple[list[Any], list[Any]]:
    """Return the columns of the anchors and of the positives (or of any documents), by name or else by position."""
    anchor, document = (next((name for name in known if name in table), None) for known in (_anchors, _positives))
    taken = (anchor, document, *_negatives, *_others)
    rest = iter(name for name in table if name not in taken and not _is_numbered(name))
    anchor, document = anchor or next(rest, None), document or next(rest, None)
    if anchor is None or document is None:
        columns = list(table)
        raise ArgumentError("audit", "a mined file (anchor, positive, negatives)", f"columns {columns} in {path}")
    return table[anchor], table[document]


def _is_numbered(name: str) -> bool:
    return name.startswith(_numbered) and name[len(_numbered) :].isdigit()


def _of_ids(table: Table, path: str | Path, wanted: int | None) -> Lists:
    """Read the format ``ids``."""
    if "query_id" not in table:
        raise ArgumentError("audit", "a column query_id with negative_ids", f"columns {sorted(table)} in {path}")
    queries = table["query_id"]
    positives = [_listed(one) for one in table.get("positive_ids") or [None] * len(queries)]
    negatives = [_listed(one) for one in table["negative_ids"]]
    for row, (query, *lists) in enumerate(zip(queries, positives, negatives, strict=True)):
        _check_names((query, *lists[0], *lists[1]), path, row)
    return Lists(queries, positives, negatives, wanted, are_texts=False)


def _listed(value: Any) -> list[Any]:
    """Return a value as a list without missing entries; a single value becomes a list of one."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return [one for one in values if one is not None]


def _check_names(names: Iterable[Any], path: str | Path, row: int) -> None:
    """Raise unless all names are text or numbers."""
    for name in names:
        if not isinstance(name, (str, int, float)):
            raise ArgumentError("audit", "ids or texts in a mined file", f"{name!r} in row {row} of {path}")


MinedRow = tuple[Any, Hashable, list[Any], list[Any]]
"""Anchor, key, positives and negatives; rows of an anchor with the same key form one list."""


def _labelled(rows: Iterable[tuple[Any, list[Any], list[Any]]], path: str | Path) -> Iterator[MinedRow]:
    """Split labelled documents into positives and negatives; rows of several documents are separate lists."""
    for number, (anchor, documents, labels) in enumerate(rows):
        marked = list(zip(documents, _numbers(labels, len(documents), path, number), strict=True))
        positives = [document for document, label in marked if label > 0]
        negatives = [document for document, label in marked if label <= 0]
        yield anchor, "pairs" if len(documents) == 1 else number, positives, negatives


def _merged(rows: Iterable[MinedRow], path: str | Path, wanted: int | None) -> Lists:
    """Merge rows with the same anchor; a negative that several of its lists repeat counts once."""
    positives: dict[Any, dict[Any, None]] = {}
    lists: dict[Any, dict[Hashable, Counter[Any]]] = {}
    for number, (anchor, key, own, others) in enumerate(rows):
        _check_names((anchor, *own, *others), path, number)
        positives.setdefault(anchor, {}).update(dict.fromkeys(own))
        lists.setdefault(anchor, {}).setdefault(key, Counter()).update(others)
    negatives = [list(reduce(or_, each.values()).elements()) for each in lists.values()]
    return Lists(list(positives), [list(own) for own in positives.values()], negatives, wanted)


def _numbers(labels: list[Any], size: int, path: str | Path, row: int) -> list[float]:
    """Return the labels of a row as numbers."""
    try:
        if len(labels) == size:
            return [float(label) for label in labels]
    except (TypeError, ValueError):
        pass
    raise ArgumentError("audit", f"numbers as labels of {size} documents", f"{labels!r} in row {row} of {path}")


def _first_is_positive(scores: list[Any] | None) -> list[list[int]] | None:
    """Return labels for lists of scores, whose first document is the positive; None if the scores are not lists."""
    if scores is None or any(not isinstance(each, (list, tuple)) for each in scores):
        return None
    return [[1, *[0] * (len(each) - 1)] for each in scores]
