"""Put queries, corpus and positives together, with a documented and counted rule for each irregularity.

- Rows of queries with the same id (or, without ids, the same text) are one query with several positives.
- Queries of the same text under several ids share their positives: none of these is a negative of
  that text.
- Documents with the same text are one document, under the first of their ids: the text of a
  positive is never a negative under another id, and no text is a negative twice.
- A document with the text of the query itself is never its negative.
- Empty texts are left out; positives that refer to them are missing in the corpus, an error unless
  missing ones are dropped.
- A string in a column of positives is one positive, never a list of characters; a string that
  spells out a list is an error.
- Rows with another label than the requested one are not positives; their documents are in the
  corpus, judged irrelevant.
- Positives are ids or texts of the corpus; if only some of the texts are in the corpus, the others
  are added to it.
- Queries without any positive are left out.

``Side`` holds queries or documents, ``build_problem`` applies the rules and returns a ``Problem``.
Called by ``inputs.py`` for files and by ``dataset.py`` for data sets; ``table_columns.py`` reads
the sides from tables.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, spelled, warn_once, written
from hardneg.mining.alignment import Alignment
from hardneg.mining.table_values import RowNumbers, key_of, of_one_kind, row_in


@dataclass
class Side:
    """Queries or documents, in the order of their file.

    Attributes:
        ids: Ids as they were given; row numbers if there are none.
        texts: Text of each row, if there are texts.
        vectors: Embedding of each row [n, d], maybe a memory map.
        labels: Class label of each row, for ``OtherLabel()``.
        groups: Group of each row.
        named: False if the ids are only row numbers.
        own_ids: True if a file of embeddings contains the ids.
    """

    ids: Sequence[Any]
    texts: list[str] | None = None
    vectors: Tensor | None = None
    labels: Sequence[Any] | None = None
    groups: Sequence[Any] | None = None
    named: bool = True
    own_ids: bool = False

    def only(self, rows: list[int]) -> Side:
        """Return the side with some of the rows.

        Args:
            rows: Row numbers to keep; for all rows in order the vectors are shared, not copied,
                since they may be on disk.
        """
        if rows == list(range(len(self.ids))):
            return replace(self)  # a copy, since queries and documents get their vectors separately
        kept: dict[str, Any] = {}
        for name in ("ids", "texts", "labels", "groups"):
            column = getattr(self, name)
            kept[name] = None if column is None else [column[row] for row in rows]
        vectors = None if self.vectors is None else self.vectors[torch.tensor(rows, dtype=torch.long)]
        return replace(self, vectors=vectors, **kept)

    def __len__(self) -> int:
        return len(self.ids)


def texts_of(side: Side, who: str) -> list[str]:
    """Return the texts of a side.

    Raises:
        ArgumentError: If there are only embeddings; ``who`` is named in the error.
    """
    if side.texts is None:
        raise ArgumentError(who, "texts", "embeddings only")
    return side.texts


@dataclass
class Problem:
    """Queries, documents and positives by row, ready to be mined.

    Attributes:
        queries: One row for each query.
        corpus: One row for each distinct document.
        positives: Rows of the corpus that are positives, for each query.
        own: Row of the corpus that is the query itself, or -1, for each query.
        counts: Number of rows that each rule of this module applied to.
        judged_negatives: Rows judged irrelevant, for each query; empty if there are none at all.
        alignment: How close the positives are, once there are vectors.
    """

    queries: Side
    corpus: Side
    positives: list[list[int]]
    own: list[int]
    counts: dict[str, int] = field(default_factory=dict)
    judged_negatives: list[list[int]] = field(default_factory=list)
    alignment: Alignment | None = None


def build_problem(
    queries: Side,
    corpus: Side | None,
    positives: Sequence[list[Any]] | None,
    judged: Sequence[tuple[Any, Any]] = (),
    *,
    irrelevant: Sequence[list[Any]] | None = None,
    judged_irrelevant: Sequence[tuple[Any, Any]] = (),
    same: bool = False,
    drop_missing: bool = False,
) -> Problem:
    """Put queries, corpus and positives together by the rules of this module.

    Args:
        queries: Queries; several rows may belong to one.
        corpus: Documents; None takes the texts of the positives as the corpus.
        positives: Ids or texts of the positives, for each row of the queries.
        judged: (query id, document id) pairs that are positives, too.
        irrelevant: Ids or texts of documents judged irrelevant, for each row of the queries.
        judged_irrelevant: (query id, document id) pairs of documents judged irrelevant.
        same: Whether the queries are the corpus, row by row.
        drop_missing: Drop and count positives that are missing in the corpus instead of raising.

    Raises:
        ArgumentError: If ids, texts or positives contradict each other, or if no query has a positive.
    """
    counts: dict[str, int] = {}
    given = [list(each) for each in positives] if positives is not None else [[] for _ in queries.ids]
    others = [list(each) for each in irrelevant] if irrelevant is not None else [[] for _ in given]
    both = [own + more for own, more in zip(given, others, strict=True)]
    if corpus is None:
        if positives is None:
            raise ArgumentError("mine", "a corpus, or a column of positives to use as the corpus", "neither")
        corpus = _positives_as_corpus(both)
    documents, row_of = _documents(corpus, counts)
    row_of_positive = row_of
    if any(both) and not same:
        documents, row_of_positive = _positives_by(both, documents, row_of, corpus, counts)
    if (judged or judged_irrelevant) and not (queries.named and corpus.named):
        without = "the queries without" if not queries.named else "the corpus without"
        fix = f"name it with {spelled('mine', 'corpus_id_column' if queries.named else 'query_id_column')}"
        raise ArgumentError("mine", "ids of queries and corpus for judged pairs", f"{without} a column of ids", fix)
    groups, first = _group_queries(queries, counts)
    rows: list[list[int]] = [[] for _ in first]
    false: list[list[int]] = [[] for _ in first]
    missing, unknown = [], []
    for place, _, _, row in _matched(queries, others, row_of_positive, judged_irrelevant, row_of):
        if row >= 0 and place >= 0 and groups[place] >= 0:
            false[groups[place]].append(row)
    for place, query, one, row in _matched(queries, given, row_of_positive, judged, row_of):
        if place < 0:
            unknown.append(query)
        elif groups[place] >= 0 and row >= 0:
            rows[groups[place]].append(row)
        elif groups[place] >= 0:
            missing.append((query, one))
    _warn_of_unknown(unknown, len(judged))
    counts["judgements_of_unknown_queries"] = len(unknown)
    if missing and not drop_missing:
        raise _missing(missing, corpus)
    counts["positives_not_in_corpus"] = len(missing)
    return _finished(queries, documents, (rows, false), first, row_of if same else None, counts)


def _matched(
    queries: Side,
    lists: Sequence[list[Any]],
    row_of_listed: Mapping[Any, int],
    pairs: Sequence[tuple[Any, Any]],
    row_of: Mapping[Any, int],
) -> Iterator[tuple[int, Any, Any, int]]:
    """Yield the documents of every query: its row, its name, the document, and the document's row; -1 if unknown.

    Args:
        queries: The queries.
        lists: Ids or texts of documents, for each row of the queries.
        row_of_listed: Rows of these documents.
        pairs: Further pairs of a query id and a document id.
        row_of: Rows of the documents of the pairs.
    """
    names = queries.ids if queries.named else range(len(queries))
    for place, documents in enumerate(lists):
        for one in documents:
            yield place, names[place], one, row_in(row_of_listed, one)
    place_of = {key_of(identity): place for place, identity in enumerate(queries.ids)} if pairs else {}
    for query, one in pairs:
        yield row_in(place_of, query), query, one, row_in(row_of, one)


def _missing(missing: list[tuple[Any, Any]], corpus: Side) -> ArgumentError:
    """Return the error for missing positives: their number, the first with its query, and a likely reason."""
    query, one = missing[0]
    texts = corpus.texts or ()
    empty = not key_of(one).strip() or any(
        key_of(name) == key_of(one) and not text.strip() for name, text in zip(corpus.ids, texts, strict=False)
    )
    shown = repr(one) if len(repr(one)) < 60 else f"{repr(one)[:56]} ..."
    why = ", which is an empty text" if empty else ""
    got = f"{len(missing)} that are not, first {shown} of the query {query!r}{why}"
    leave = f"leave them out with {written('mine', 'missing_positives', 'drop')}"
    if {key_of(each) for _, each in missing} == {str(len(corpus))} and _are_rows(corpus):
        # Advice to drop the missing one would leave all others one row off.
        fix = f"subtract 1 from the ids, which seem to be counted from 1: rows are numbered 0 to {len(corpus) - 1}"
    elif empty:
        fix = f"fill it in, or {leave}"
    elif _are_rows(corpus):
        fix = f"use the numbers of the rows, 0 to {len(corpus) - 1}, or a table with ids; or {leave}"
    else:
        known = f"{corpus.ids[0]!r}" if len(corpus) else "none"
        fix = f"compare them with the ids of the corpus, such as {known}, or {leave}"
    return ArgumentError("mine", "positives that are in the corpus", got, fix)


def _are_rows(side: Side) -> bool:
    """Return whether the ids are only row numbers."""
    return not side.own_ids and (isinstance(side.ids, range) or list(side.ids) == list(range(len(side))))


def _warn_of_unknown(unknown: list[Any], judged: int) -> None:
    """Warn about judgements of unknown queries: they belong to another split, or the ids do not match."""
    if unknown:
        names = list(dict.fromkeys(map(key_of, unknown)))
        shown = ", ".join(repr(name) for name in names[:3]) + (", ..." if len(names) > 3 else "")
        warn_once(
            f"unknown queries: {len(unknown)} {shown}",
            f"{len(unknown):,} of {judged:,} judgements belong to {len(names):,} queries that are not in the data "
            f"({shown}) and are ignored. That is expected for judgements of another split; otherwise check the ids.",
        )


def _finished(
    queries: Side,
    documents: Side,
    judged: tuple[list[list[int]], list[list[int]]],
    first: list[int],
    same: Mapping[str, int] | None,
    counts: Any,
) -> Problem:
    """Return the problem without queries that have no positive, after sharing positives among equal texts."""
    rows, false = judged
    counts["queries_of_the_same_text"] = _share_positives(queries, first, rows)
    _share_positives(queries, first, false)
    kept = [group for group, own in enumerate(rows) if own]
    counts["queries_without_positive"] = len(first) - len(kept)
    if not kept:
        fix = "check that the ids match and that scores are above 0; rows of a .npy file have their numbers as ids"
        raise ArgumentError("mine", "at least one query with a positive in the corpus", "none", fix)
    kept_queries = queries.only([first[group] for group in kept])
    own = [-1] * len(kept)
    if same is not None:
        own = [same.get(key_of(one), -1) for one in kept_queries.ids]
    elif kept_queries.texts is not None and documents.texts is not None:
        where = {text: row for row, text in enumerate(documents.texts)}
        own = [where.get(text, -1) for text in kept_queries.texts]
    counts.update(queries=len(kept), corpus=len(documents), queries_that_are_documents=sum(row >= 0 for row in own))
    positives = [list(dict.fromkeys(rows[group])) for group in kept]
    verified = [
        [row for row in dict.fromkeys(false[group]) if row != itself and row not in rows[group]]
        for group, itself in zip(kept, own, strict=True)
    ]
    counts["judged_negatives"] = sum(map(len, verified))
    return Problem(kept_queries, documents, positives, own, counts, verified if any(verified) else [])


def _share_positives(queries: Side, first: list[int], rows: list[list[int]]) -> int:
    """Give queries with the same text each other's positives, and return the number of duplicates."""
    of_text: dict[str, list[int]] = {}
    for group, row in enumerate(first):
        if queries.texts is not None:
            of_text.setdefault(queries.texts[row], []).append(group)
    shared = [groups for groups in of_text.values() if len(groups) > 1]
    for groups in shared:
        every = [row for group in groups for row in rows[group]]
        for group in groups:
            rows[group] = every
    return sum(len(groups) - 1 for groups in shared)


def _documents(corpus: Side, counts: dict[str, int]) -> tuple[Side, Mapping[str, int]]:
    """Return the corpus without duplicates and empty texts, and the row of every id."""
    if (
        isinstance(corpus.ids, range) and corpus.texts is None and len(corpus)
    ):  # only vectors: no loop over maybe millions of rows
        counts.update(repeated_documents=0, copies_of_documents=0, empty_documents=0)
        return replace(corpus), RowNumbers(corpus.ids)
    row_of: dict[Any, int] = {}
    row_of_text: dict[str | None, int] = {}
    text_of: dict[Any, str | None] = {}
    rows: list[int] = []
    repeated = copies = empty = 0
    for row, identity in enumerate(corpus.ids):
        key = key_of(identity)
        text = None if corpus.texts is None else corpus.texts[row]
        if key in text_of:
            if text is None or text_of[key] != text:
                raise ArgumentError("mine", "distinct ids in the corpus", f"id {identity!r} for different documents")
            repeated += 1
            continue
        text_of[key] = text
        if text is not None and not text.strip():
            empty += 1
        elif text is not None and text in row_of_text:
            copies += 1
            row_of[key] = row_of_text[text]
        else:
            row_of[key] = row_of_text[text] = len(rows)
            rows.append(row)
    counts.update(repeated_documents=repeated, copies_of_documents=copies, empty_documents=empty)
    if not rows:
        raise ArgumentError("mine", "a corpus with at least one document", "none")
    return corpus.only(rows), row_of


def _group_queries(queries: Side, counts: dict[str, int]) -> tuple[list[int], list[int]]:
    """Return the query of each row (-1 for an empty text) and the first row of each query."""
    groups: list[int] = []
    first: list[int] = []
    where: dict[Hashable, int] = {}
    empty = 0
    for row in range(len(queries)):
        text = None if queries.texts is None else queries.texts[row]
        if text is not None and not text.strip():
            empty += 1
            groups.append(-1)
            continue
        key = key_of(queries.ids[row]) if queries.named or text is None else text
        if key not in where:
            where[key] = len(first)
            first.append(row)
        elif text is not None and queries.texts is not None and queries.texts[first[where[key]]] != text:
            raise ArgumentError("mine", "one text for each query id", f"id {queries.ids[row]!r} with different texts")
        elif text is None and not _same_vectors(queries, first[where[key]], row):
            raise ArgumentError(
                "mine", "one embedding for each query id", f"id {queries.ids[row]!r} with different ones"
            )
        groups.append(where[key])
    counts.update(empty_queries=empty, rows_of_queries=len(queries))
    return groups, first


def _same_vectors(side: Side, first: int, second: int) -> bool:
    return side.vectors is None or torch.equal(side.vectors[first], side.vectors[second])


def _positives_as_corpus(given: list[list[Any]]) -> Side:
    """Return the distinct texts of the positives as the documents."""
    texts = list(dict.fromkeys(one for each in given for one in each))
    for row, one in ((row, one) for row, each in enumerate(given) for one in each if not isinstance(one, str)):
        flag = spelled("mine", "corpus")
        fix = f'write it as a text, "{one}"; if positives are ids, give the documents with {flag}'
        raise ArgumentError("mine", "texts as positives where they are the corpus", f"{one!r} in row {row}", fix)
    return Side(list(range(len(texts))), texts, named=False)


def _positives_by(
    given: list[list[Any]], documents: Side, row_of: Mapping[str, int], corpus: Side, counts: dict[str, int]
) -> tuple[Side, Mapping[str, int]]:
    """Return the documents and the row of each positive, which may be given by id or by text.

    Positives are ids if any of them is one; otherwise texts, and those that the corpus lacks are
    added to it. If none is an id and none a text of the corpus, they may be ids of another column
    and must not become documents: an error.
    """
    flat = [one for each in given for one in each]
    are_ids = corpus.named and any(key_of(one) in row_of for one in flat)
    if are_ids or documents.texts is None or not all(isinstance(one, str) for one in flat):
        return documents, row_of
    where = {text: row for row, text in enumerate(documents.texts)}
    new = [text for text in dict.fromkeys(flat) if text not in where and text.strip()]
    if new and not any(text in where for text in flat):
        raise ArgumentError(
            "mine",
            "positives that are ids or texts of the corpus",
            f"{len(new)} that are neither, such as {new[0][:60]!r}",
            (
                "name the columns with --corpus-id-column and --corpus-column, or leave --corpus out "
                "to take the positives as the corpus"
            ),
        )
    counts["positives_added_to_corpus"] = len(new)
    if new and documents.vectors is not None:
        raise ArgumentError(
            "mine",
            "embeddings of every document",
            f"{len(new)} positives that are not in the corpus",
            "add them to the corpus, or refer to documents by id",
        )
    if new:
        documents = _with_texts(documents, new)
    assert documents.texts is not None
    return documents, {key_of(text): row for row, text in enumerate(documents.texts)}


def _with_texts(documents: Side, new: list[str]) -> Side:
    """Return the corpus with further texts; their ids are their texts, or row numbers if the corpus has no ids."""
    assert documents.texts is not None
    ids = of_one_kind([*documents.ids, *new]) if documents.named else list(range(len(documents) + len(new)))
    labels = None if documents.labels is None else [*documents.labels, *[None] * len(new)]
    return Side(ids, [*documents.texts, *new], labels=labels, named=documents.named)
