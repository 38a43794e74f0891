"""Find the columns of a table that hold ids, texts, labels and positives, by their names or by the usual ones.

``side_of_table`` reads queries or documents, ``documents_of_table`` the positives of each query. Both are called by
``mining.inputs`` for the files of `hardneg mine`, and by audits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hardneg.core.errors import ArgumentError, spelled
from hardneg.io.pair_labels import ignored_label, label_column, split_by_label
from hardneg.io.tables import Table
from hardneg.mining.options import Columns
from hardneg.mining.problem import Side
from hardneg.mining.table_values import as_list, checked_ids, checked_texts

# Usual names, in the order in which they are tried: those of sentence-transformers, BEIR and MS MARCO.
_query_ids = ("id", "_id", "query_id", "query-id", "qid", "queryid")
_query_texts = ("query", "anchor", "question", "text", "sentence1", "image")
_positives = ("positive", "positives", "pos", "positive_ids", "answer", "sentence2")
_corpus_ids = ("id", "_id", "doc_id", "corpus_id", "corpus-id", "docid", "document_id", "pid", "passage_id")
_corpus_texts = ("text", "document", "passage", "positive", "answer", "contents", "image")


def side_of_table(
    table: Table, text: str | None, identity: str | None, label: str | None, kind: str, who: str = "mine"
) -> Side:
    """Return the ids, texts and labels of a table, by the given column names or the usual ones.

    Args:
        table: Columns by name.
        text: Column of the texts; several names joined by ``+`` are joined to one text.
        identity: Column of the ids.
        label: Column of class labels; None reads no labels.
        kind: ``"queries"`` or ``"corpus"``: which usual names to look for, and the name in errors.
        who: Function named in errors.

    Raises:
        ArgumentError: If a named column is missing, or if a cell is neither a text nor an id.
    """
    texts, ids = (_query_texts, _query_ids) if kind == "queries" else (_corpus_texts, _corpus_ids)
    names = text.split("+") if text else [name for name in texts if name in table][:1]
    for name in [*names, *([identity] if identity else []), *([label] if label else [])]:
        if name not in table:
            raise ArgumentError(who, f"the column {name!r} in the {kind}", f"columns {sorted(table)}")
    id_name = identity or next((name for name in ids if name in table), None)
    size = len(next(iter(table.values())))
    return Side(
        list(range(size)) if id_name is None else checked_ids(table[id_name], id_name, kind, who),
        checked_texts([table[name] for name in names], names, kind, who) if names else None,
        labels=table[label] if label else None,
        named=id_name is not None,
    )


@dataclass(frozen=True)
class JudgedDocuments:
    """The judged documents of each row of the queries.

    Attributes:
        positives: Ids or texts of the positives of each row.
        irrelevant: Ids or texts of the documents judged irrelevant, of each row.
        unlabelled: Number of pairs without a label, which are left out.
    """

    positives: list[list[Any]]
    irrelevant: list[list[Any]]
    unlabelled: int = 0


def documents_of_table(table: Table, columns: Columns, needed: bool, label: Any = None) -> JudgedDocuments | None:
    """Return the positives and irrelevant documents of each row; a single value is a list of one.

    Args:
        table: Columns by name.
        columns: Names of the columns of positives and labels.
        needed: Whether a missing column of positives is an error.
        label: Label of the positives; documents with another label are irrelevant.

    Returns:
        The documents of each row; None without a column of positives that is not needed.

    Raises:
        ArgumentError: If the column is missing, or if a column of labels would be ignored.
    """
    name = positive_name(table, columns.positive, needed)
    if name is None:
        return None
    rows = [as_list(value, name, row) for row, value in enumerate(table[name])]
    if label is None:
        used = (name, columns.label, columns.query_id, *(columns.query or "").split("+"))
        check_no_label_ignored("mine", table, used, name)
        return JudgedDocuments(rows, [[] for _ in rows])
    option = spelled("mine", "positive_label")
    column = label_column(table, columns.label, "mine", spelled("mine", "label_column"))
    return JudgedDocuments(*split_by_label(rows, table[column], label, "mine", option))


def check_no_label_ignored(
    who: str, table: Mapping[str, Sequence[Any]], used: Sequence[str | None], positives: str, otherwise: str = ""
) -> None:
    """Raise if a column that is not read looks like labels of pairs, some of which may not be positives.

    Args:
        who: Function named in the error.
        table: Columns by name.
        used: Columns that are read.
        positives: Column of the positives.
        otherwise: Alternative to ``positive_label`` that the error offers.
    """
    ignored = ignored_label(table, used, positives)
    if ignored is not None:
        some = list(dict.fromkeys(str(value) for value in table[ignored]))[:4]
        otherwise = otherwise or f"or {spelled(who, 'label_column')} if it is a class, or leave the column out"
        fix = f"give {spelled(who, 'positive_label')}, the label of the positives, {otherwise}"
        got = f"a column {ignored!r} ({', '.join(some)}), which is not read"
        raise ArgumentError(who, "to know which pairs are positives", got, fix)


def positive_name(table: Table, given: str | None, needed: bool) -> str | None:
    """Return the column of positives: the given one, or the first with a usual name; None if there is none.

    Raises:
        ArgumentError: If the given column is missing, or if there is none and one is needed.
    """
    name = given or next((name for name in _positives if name in table), None)
    if name is None or name not in table:
        if given or needed:
            fix = f"name it with {spelled('mine', 'positive_column')}, or give {spelled('mine', 'judgements')}"
            what = f"a column of positives ({given or ', '.join(_positives)})"
            raise ArgumentError("mine", what, str(sorted(table)), fix)
        return None
    return name
