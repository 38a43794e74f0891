"""Lists of mined negatives, in memory or in any of the formats that `hardneg mine` and sentence-transformers write.

- ``ids``: query_id, positive_ids, negative_ids.
- triplets: anchor, positive, negative; n-tuples: anchor, positive, negative_1 ...; the first two columns by place.
- labeled-list: anchor, a list of documents, and a list of labels (or of scores: then the first is the positive).
- labeled-pair: anchor, document, label.

Rows with the same anchor are one query. A format with one row for each positive repeats the negatives for each: they
count once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardneg.mining.tables import Table, read_table

_numbered = "negative_"


@dataclass(frozen=True)
class Lists:
    """The positives and the negatives of each query, by the names they have: ids or texts."""

    queries: list[Any]
    positives: list[list[Any]]
    negatives: list[list[Any]]
    wanted: int | None = None

    def documents(self) -> Iterator[Any]:
        for each in (self.positives, self.negatives):
            yield from (one for names in each for one in names)


def is_mined(columns: Iterable[str]) -> bool:
    """Whether a table with these columns holds mined negatives."""
    names = set(columns)
    if names & {"negative_ids", "negative", f"{_numbered}1"}:
        return True
    return "positive" in names and bool(names & {"label", "labels", "score", "scores"})


def read_lists(path: str | Path, wanted: int | None = None) -> Lists:
    """The lists of a mined file; ``wanted`` is how many negatives a query was to have."""
    table = read_table(path)
    names = list(table)
    if "negative_ids" in table:
        return _of_ids(table, path, wanted)
    if len(names) < 3:
        raise ValueError(f"audit needs a mined file (anchor, positive, negatives), got columns {names} in {path}.")
    anchors, positives = table[names[0]], table[names[1]]
    tuples = sorted((name for name in names if _is_numbered(name)), key=lambda name: int(name[len(_numbered) :]))
    if "negative" in table:
        return _grouped(zip(anchors, positives, ([one] for one in table["negative"]), strict=True), wanted)
    if tuples:
        rows = zip(*(table[name] for name in tuples), strict=True)
        return _grouped(zip(anchors, positives, (list(row) for row in rows), strict=True), wanted)
    if "label" in table:
        return _labelled(
            ((a, [d], [lab]) for a, d, lab in zip(anchors, positives, table["label"], strict=True)), wanted
        )
    marks = table.get("labels") or _first_is_positive(table.get("scores"))
    if marks is None:
        raise ValueError(f"audit needs negatives in a mined file, got columns {names} in {path}: none says which.")
    return _labelled(zip(anchors, positives, marks, strict=True), wanted)


def _is_numbered(name: str) -> bool:
    return name.startswith(_numbered) and name[len(_numbered) :].isdigit()


def _of_ids(table: Table, path: str | Path, wanted: int | None) -> Lists:
    if "query_id" not in table:
        raise ValueError(f"audit needs query_id beside negative_ids, got columns {sorted(table)} in {path}.")
    positives = table.get("positive_ids") or [[] for _ in table["query_id"]]
    return Lists(
        table["query_id"], [_listed(one) for one in positives], [_listed(n) for n in table["negative_ids"]], wanted
    )


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _grouped(rows: Iterable[tuple[Any, Any, list[Any]]], wanted: int | None) -> Lists:
    """Negatives of each (anchor, positive) pair; over the positives of an anchor the same negative counts once."""
    found: dict[Any, dict[Any, list[Any]]] = {}
    for anchor, positive, negatives in rows:
        found.setdefault(anchor, {}).setdefault(positive, []).extend(one for one in negatives if one is not None)
    merged = []
    for lists in found.values():
        most: Counter[Any] = Counter()
        for names in lists.values():
            most |= Counter(names)
        merged.append(list(most.elements()))
    return Lists(list(found), [list(lists) for lists in found.values()], merged, wanted)


def _labelled(rows: Iterable[tuple[Any, Any, Any]], wanted: int | None) -> Lists:
    """One list for each row; where several rows of an anchor repeat its negatives (one per positive), once."""
    positives: dict[Any, dict[Any, None]] = {}
    most: dict[Any, Counter[Any]] = {}
    for anchor, documents, labels in rows:
        own = positives.setdefault(anchor, {})
        own.update({document: None for document, label in zip(documents, labels, strict=True) if float(label) > 0})
        negatives = [document for document, label in zip(documents, labels, strict=True) if float(label) <= 0]
        before = most.setdefault(anchor, Counter())
        if len(documents) == 1:
            before.update(negatives)
        else:
            most[anchor] = before | Counter(negatives)
    return Lists(
        list(positives),
        [list(own) for own in positives.values()],
        [list(count.elements()) for count in most.values()],
        wanted,
    )


def _first_is_positive(scores: list[Any] | None) -> list[list[int]] | None:
    if scores is None or any(not isinstance(each, (list, tuple)) for each in scores):
        return None
    return [[1, *[0] * (len(each) - 1)] for each in scores]
