"""Human knowledge of queries and documents, for mining and audits: judged pairs, and labels of any kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardneg.core.errors import ArgumentError, argument_error
from hardneg.io.tables import Table, read_table
from hardneg.mining.table_values import checked_ids, key_of

Tag = Tensor | NDArray[Any] | Sequence[Any]
"""Labels or groups, one for each row."""

_queries = ("query-id", "query_id", "qid", "query", "queryid", "topic")
_documents = (
    "corpus-id", "corpus_id", "doc_id", "doc-id", "docid", "document_id", "document-id", "passage_id", "passage-id",
    "pid", "document", "doc", "passage",
)  # fmt: skip
_grades = ("score", "relevance", "rel", "grade", "judgement", "judgment", "label")


def read_grades(path: str, who: str = "mine") -> list[tuple[float, str, str]]:
    """Read all judged pairs as (grade, query id, document id), best grade first; ids are texts.

    Columns are found by their usual names. A table of two columns without a grade contains relevant
    pairs only; with more columns, one must be the grade, so that pairs judged irrelevant are not
    read as relevant.

    Args:
        path: Table of judgements (qrels).
        who: Function named in errors.

    Raises:
        ArgumentError: If a column of ids or grades is missing, or if a grade is not a number.
    """
    table = read_table(path, who)
    query, document, grade = _columns(list(table), path, who)
    grades = [1.0] * len(table[query]) if grade is None else _numbers(table, grade, path, who)
    ids = (checked_ids(table[name], name, f"judgements {path}", who) for name in (query, document))
    pairs = zip(*([key_of(one) for one in each] for each in ids), strict=True)
    rows = [(value, *pair) for value, pair in zip(grades, pairs, strict=True)]
    return sorted(rows, key=lambda row: -row[0])


def _columns(names: list[str], path: str, who: str) -> tuple[str, str, str | None]:
    query, document, grade = (
        next((name for name in known if name in names), None) for known in (_queries, _documents, _grades)
    )
    if query is None and document is None:
        fix = "add a first line such as query-id,corpus-id,score, separated as the others are"
        raise ArgumentError(who, f"a first line that names the columns of {path}", str(names), fix)
    rest = [name for name in names if name not in (query, document, grade)]
    if (query is None or document is None) and len(rest) != 1:
        missing, known = ("query", _queries) if query is None else ("document", _documents)
        raise ArgumentError(who, f"a column of {missing} ids ({', '.join(known[:3])}) in {path}", f"columns {names}")
    query, document = query or rest[0], document or rest[0]
    if grade is None and len(names) > 2:
        raise ArgumentError(
            who,
            f"a column of grades ({', '.join(_grades)}) in {path}",
            f"columns {names}",
            "rename the column of grades, or keep only the two columns of ids if every pair is relevant",
        )
    return query, document, grade


def _numbers(table: Table, name: str, path: str, who: str) -> list[float]:
    numbers = []
    for row, value in enumerate(table[name]):
        try:
            numbers.append(float(value))
        except (TypeError, ValueError, OverflowError):
            numbers.append(math.nan)
        if math.isnan(numbers[-1]):
            raise ArgumentError(who, f"numbers as {name!r} in {path}", f"{value!r} in row {row}")
    return numbers


def numbered_both(
    name: str, first: Tag, second: Tag, sizes: tuple[int, int], who: str = "mine"
) -> tuple[Annotated[Tensor, "n"], Annotated[Tensor, "m"]]:
    """Number two columns of labels so that equal texts get equal numbers: 1 in one file is "1" in another.

    A missing label (None, NaN, an empty text, a number below 0) gets a negative number that no
    other row has.

    Args:
        name: Name of the labels in errors.
        first: Labels of the first side [n].
        second: Labels of the second side [m].
        sizes: Numbers of rows, (n, m).
        who: Function named in errors.

    Example:
        >>> numbered_both("labels", ["cat", 1, None, None], ["1", 1.0, "dog"], (4, 3))
        (tensor([ 0,  1, -4, -5]), tensor([1, 1, 2]))
    """
    both = [*_listed(name, first, sizes[0], who), *_listed(name, second, sizes[1], who)]
    number: dict[str, int] = {}
    out = []
    for row, one in enumerate(both):
        if not (one is None or isinstance(one, (str, int, float))):
            raise ArgumentError(who, f"{name} that are numbers or texts", repr(one))
        out.append(-2 - row if _is_missing(one) else number.setdefault(_as_text(one), len(number)))
    together = torch.tensor(out, dtype=torch.long)
    return together[: sizes[0]], together[sizes[0] :]


def _listed(name: str, given: Tag, size: int, who: str) -> list[Any]:
    if isinstance(given, str) or not hasattr(given, "__len__"):
        raise argument_error(who, f"one {name.rstrip('s')} for each row", name, given)
    if isinstance(given, (Tensor, np.ndarray)) and given.ndim != 1:
        raise argument_error(who, f"one {name.rstrip('s')} for each row, shape ({size},)", name, tuple(given.shape))
    if len(given) != size:
        raise ArgumentError(who, f"one {name.rstrip('s')} for each of {size} rows", f"{len(given)} {name}")
    return given.tolist() if isinstance(given, (Tensor, np.ndarray)) else list(given)


def _is_missing(one: Any) -> bool:
    if isinstance(one, (int, float)) and not isinstance(one, bool):
        return one != one or one < 0
    return one is None or one == ""


def _as_text(one: Any) -> str:
    """Return a label as text; 1.0, which integers become if some are missing, is "1"."""
    return str(int(one)) if isinstance(one, float) and one.is_integer() else str(one)
