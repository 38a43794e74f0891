"""Labels of pairs: which rows of a table of pairs are positives, and which are judged not to be.

Of Quora's question pairs (``is_duplicate``), NLI or what ``hardneg mine --format labeled-pair`` writes, only some are
positives. A column that may say so is never ignored in silence.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hardneg.core.errors import ArgumentError

LABELS = (
    "label", "labels", "is_duplicate", "is_positive", "is_relevant", "relevant", "relevance", "duplicate", "gold_label",
)  # fmt: skip
SCORES = ("score", "scores")  # marks only where all are 0 or 1; those of a miner are similarities
_truths = {"true": "1", "false": "0"}


def mark_of(value: Any) -> str | None:
    """A label as text, the same for 1, 1.0, True and "1"; None where it is missing.

    >>> [mark_of(one) for one in (1, 1.0, True, "1", "True", "entailment", None)]
    ['1', '1', '1', '1', '1', 'entailment', None]
    """
    if value is None or value == "" or value != value:
        return None
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()
    return _truths.get(text.lower(), text)


def label_column(names: Collection[str], given: str | None, who: str, option: str) -> str:
    """The column of the labels: as named, or the first of a usual name."""
    found = given or next((name for name in (*LABELS, *SCORES) if name in names), None)
    if found is None or found not in names:
        fix = f"name it with {option}"
        raise ArgumentError(
            who, f"a column of labels ({given or ', '.join(LABELS[:3])})", f"columns {list(names)}", fix
        )
    return found


def ignored_label(table: Mapping[str, Sequence[Any]], used: Collection[str | None], positives: str) -> str | None:
    """A column that nothing reads and that may say that some pairs are no positives."""
    for name in (*LABELS, *SCORES):
        if name not in table or name in used:
            continue
        marks: set[str | None] = set()
        for cell, value in zip(table[positives], table[name], strict=False):
            listed = isinstance(value, (list, tuple))
            if not listed or (isinstance(cell, (list, tuple)) and len(cell) == len(value)):  # else ids of with_ids
                marks |= {mark_of(one) for one in (value if listed else [value])}
        if (marks <= {"0", "1"} and "0" in marks) or (name in LABELS and marks - {"1", None}):
            return name
    return None


def split_by_label(
    rows: Sequence[Sequence[Any]], labels: Sequence[Any], wanted: Any, who: str, option: str
) -> tuple[list[list[Any]], list[list[Any]], int]:
    """The documents of each row with the wanted label, those with another, and how many have none, which are neither.

    A label is one of the row or, of a list of documents, a list of their labels.
    """
    mark, positives, others, unknown = mark_of(wanted), [], [], 0
    seen: dict[str, None] = {}
    for place, (documents, value) in enumerate(zip(rows, labels, strict=True)):
        listed = list(value) if isinstance(value, (list, tuple)) else [value] * len(documents)
        if len(listed) != len(documents):
            raise ArgumentError(who, "one label for each document", f"{value!r} in row {place}")
        own = [mark_of(one) for one in listed]
        positives.append([one for one, each in zip(documents, own, strict=True) if each == mark])
        others.append([one for one, each in zip(documents, own, strict=True) if each not in (mark, None)])
        unknown += own.count(None)
        seen.update(dict.fromkeys(each for each in own if each is not None))
    if mark not in seen:
        got = f"{wanted!r}, where the labels are {', '.join(list(seen)[:5]) or 'missing'}"
        raise ArgumentError(who, f"{option} to be a label of some pair", got)
    return positives, others, unknown
