"""Labels of pairs: which rows of a table of pairs are positives, and which are judged not to be.

In Quora's question pairs (``is_duplicate``), NLI data or the output of ``hardneg mine --format labeled-pair``, only
some pairs are positives. A column that may mark the others is never ignored silently. Used by mining, training and
audits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hardneg.core.errors import ArgumentError

LABELS = (
    "label", "labels", "is_duplicate", "is_positive", "is_relevant", "relevant", "relevance", "duplicate", "gold_label",
    "is_paraphrase", "is_match", "is_similar",
)  # fmt: skip
# Labels only if all are 0 or 1: the scores of a miner are similarities, and columns of the other names may hold texts.
SCORES = ("score", "scores", "similarity", "similarity_score")
AMBIGUOUS = ("paraphrase", "match", "target", "quality")  # MRPC has its labels in "Quality"
_usual = (*LABELS, *SCORES, *AMBIGUOUS)
_truths = {"true": "1", "false": "0"}


def is_label(name: str, kinds: Sequence[str] = _usual) -> bool:
    """Return True for a usual name of labels in any spelling.

    >>> [is_label(one) for one in ("is_duplicate", "isDuplicate", "Gold-Label", "text")]
    [True, True, True, False]
    """
    return _plain(name) in map(_plain, kinds)


def _plain(name: str) -> str:
    """Return a name in lower case without separators."""
    return "".join(each for each in name.lower() if each.isalnum())


def mark_of(value: Any) -> str | None:
    """Return a label as text, equal for 1, 1.0, True and "1"; None if it is missing.

    >>> [mark_of(one) for one in (1, 1.0, True, "1", "True", "entailment", None)]
    ['1', '1', '1', '1', '1', 'entailment', None]
    """
    if value is None or value == "" or value != value:
        return None
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()
    return _truths.get(text.lower(), text)


def label_column(names: Collection[str], given: str | None, who: str, option: str) -> str:
    """Return the column of the labels: the one given, or the first with a usual name.

    Args:
        names: Columns of the table.
        given: Column that the user named, or None.
        who: Caller, for errors.
        option: Option that names the column, for errors.

    Raises:
        ArgumentError: If there is no such column.
    """
    found = given or next((name for one in _usual for name in names if is_label(name, (one,))), None)
    if found is None or found not in names:
        fix = f"name it with {option}"
        raise ArgumentError(
            who, f"a column of labels ({given or ', '.join(LABELS[:3])})", f"columns {list(names)}", fix
        )
    return found


def ignored_label(table: Mapping[str, Sequence[Any]], used: Collection[str | None], positives: str) -> str | None:
    """Return a column that is not used although it may mark pairs that are not positives; None if there is none.

    Args:
        table: Columns of the table.
        used: Columns that are read.
        positives: Column of the positives.
    """
    for name in table:
        if not is_label(name) or name in used:
            continue
        marks: set[str | None] = set()
        for cell, value in zip(table[positives], table[name], strict=False):
            listed = isinstance(value, (list, tuple))
            # Lists of another length are the ids that `with_ids` adds.
            if not listed or (isinstance(cell, (list, tuple)) and len(cell) == len(value)):
                marks |= {mark_of(one) for one in (value if listed else [value])}
        if (marks <= {"0", "1"} and "0" in marks) or (is_label(name, LABELS) and marks - {"1", None}):
            return name
    return None


def split_by_label(
    rows: Sequence[Sequence[Any]], labels: Sequence[Any], wanted: Any, who: str, option: str
) -> tuple[list[list[Any]], list[list[Any]], int]:
    """Split the documents of each row by their label.

    Args:
        rows: Documents of each row.
        labels: Label of each row or, if a row lists documents, a list of their labels.
        wanted: Label of positives.
        who: Caller, for errors.
        option: Option that names the wanted label, for errors.

    Returns:
        Documents with the wanted label, documents with another one, and the number of documents without a label, which
        are in neither.

    Raises:
        ArgumentError: If a row has the wrong number of labels, or no pair has the wanted one.
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
        got = f"{wanted!r}; the labels are {', '.join(list(seen)[:5]) or 'missing'}"
        raise ArgumentError(who, f"{option} to be the label of at least one pair", got)
    return positives, others, unknown
