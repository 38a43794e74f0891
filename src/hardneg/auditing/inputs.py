"""Readers for the files of `hardneg audit`: embeddings with ids and labels, judgements, runs and mined lists.

``files`` reads its input with these functions. ``read_lists`` accepts the formats that `hardneg mine` and other tools
write:

- ``ids``: query_id, positive_ids, negative_ids.
- triplets: anchor, positive, negative; n-tuples: anchor, positive, negative_1 ...; lists of positives and of negatives
  for each query: query, pos, neg.
- labeled-list: anchor, a list of documents, and a list of labels (or of scores: then the first is the positive).
- labeled-pair: anchor, document, label.

Columns of lists are found by these names; where a name is missing, the first two remaining columns are anchor and
document. Rows with the same anchor are one query. A format with one row for each positive repeats the negatives for
each: they count once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hardneg.auditing.options import AuditOptions
from hardneg.core.errors import ArgumentError, FileError, NoFile
from hardneg.core.schedules import LONG, value_of
from hardneg.io.arrays import names_in_npz, read_npy, read_npz
from hardneg.io.embeddings import SPLIT_NAMES, load_embeddings
from hardneg.io.files import read_json
from hardneg.io.tables import Table, aligned, open_text, read_table, read_vectors, suffix_of, vector_suffixes
from hardneg.mining.judgements import read_grades
from hardneg.mining.problem import Side
from hardneg.mining.table_columns import side_of_table
from hardneg.mining.table_values import RowNumbers
from hardneg.negatives.grammar import read_number

WHO = "audit"


def read_side(options: AuditOptions, kind: str, table_path: str | None, vectors_path: str | None) -> Side:
    """Read the queries or the corpus from a file of embeddings, a table, or a table and its file of embeddings.

    Args:
        options: Names of the columns of ids, texts, embeddings, labels and groups.
        kind: ``"queries"`` or ``"corpus"``, which chooses the columns and the words of errors.
        table_path: Table with ids and texts; a file of embeddings is accepted too.
        vectors_path: File of embeddings; a table with a column of embeddings is accepted too.

    Returns:
        The side, whose vectors are None where only a table without embeddings was given.

    Raises:
        ArgumentError: If a column is named but there is no table, or the embeddings do not match the rows of the table.
    """
    if vectors_path is not None and suffix_of(Path(vectors_path)) not in vector_suffixes and table_path is None:
        table_path = vectors_path
    if table_path is not None and suffix_of(Path(table_path)) in vector_suffixes:
        table_path, vectors_path = None, vectors_path or table_path
    vectors, ids = (None, None) if vectors_path is None else read_vectors(vectors_path, options.embedding_column, WHO)
    tags = {} if vectors_path is None else _arrays(Path(vectors_path), options)
    columns = options.columns
    text, identity = (columns.query, columns.query_id) if kind == "queries" else (columns.corpus, columns.corpus_id)
    if table_path is None:
        assert vectors is not None
        if text is not None or identity is not None:
            got = "embeddings without a table"
            raise ArgumentError(WHO, f"a table of {kind} for the column {text or identity!r}", got)
        return Side(ids or range(len(vectors)), None, vectors, **tags, named=ids is not None)
    table = read_table(table_path, WHO)
    side = side_of_table(table, text, identity, None, kind, WHO)
    if vectors is not None:
        order = torch.arange(len(vectors))
        rows = aligned(order, None if vectors_path == table_path else ids, side.ids, kind, str(vectors_path), WHO)
        if rows is not order:
            vectors, tags = vectors[rows], {word: tag[rows.numpy()] for word, tag in tags.items()}
    for word, column in (("labels", options.label_column), ("groups", options.group_column)):
        if column is not None and column in table:
            tags[word] = table[column]
    return replace(side, vectors=vectors, **tags)


def _arrays(path: Path, options: AuditOptions) -> dict[str, Any]:
    """Return the labels and groups that are stored in the same .npz as the embeddings."""
    if path.suffix != ".npz":
        return {}
    wanted = {"labels": options.label_column or "labels", "groups": options.group_column or "groups"}
    arrays = read_npz(WHO, path, tuple(wanted.values()))
    return {word: arrays[name] for word, name in wanted.items() if name in arrays}


def check_columns_found(options: AuditOptions, *sides: Side) -> None:
    """Raise unless every column named in the options exists; columns of a separate file are checked by its reader."""
    for word, column in (("labels", options.label_column), ("groups", options.group_column)):
        if column is None or getattr(options, word) is not None:
            continue
        if any(getattr(side, word) is None for side in sides):
            where = options.input if len(sides) == 1 else "queries and corpus"
            raise ArgumentError(WHO, f"the column or array {column!r} of {word} in {where}", "none")


def is_run(path: Path) -> bool:
    """Return whether a path is the directory of a training run or the embeddings.npz in one."""
    if path.is_dir():
        return (path / "embeddings.npz").exists()
    return path.suffix == ".npz" and set(SPLIT_NAMES) <= set(names_in_npz(WHO, path))


@dataclass(frozen=True)
class RunRecord:
    """What the config.json of a run says about its loss and its vectors.

    Attributes:
        title: The run in words, such as "simclr with Tilt(1.0) on digits, seed 0"; None without a config.json.
        temperature: The last temperature of its options; None if unknown.
        projects: Whether the loss compared projections of the saved features; None if unknown.
    """

    title: str | None = None
    temperature: float | None = None
    projects: bool | None = None

    @classmethod
    def of(cls, path: Path) -> RunRecord:
        """Read the record of a run from its directory or the embeddings.npz in it.

        Raises:
            Damaged: If config.json is damaged.
        """
        file = (path if path.is_dir() else path.parent) / "config.json"
        if not file.is_file():
            return cls()
        config = read_json(file, "delete it, and give --temperature", who=WHO)
        options, trained = (one if isinstance(one, dict) else {} for one in map(config.get, ("options", "trained")))
        number = options.get("temperature")
        known = value_of(read_number(number, WHO), LONG, LONG) if isinstance(number, (int, float, str)) else None
        negatives = options.get("negatives", "Uniform()")
        chosen = "" if negatives == "Uniform()" else f" with {negatives}"
        data = Path(str(options.get("data")).rpartition(":")[2]).name
        title = f"{config.get('recipe')}{chosen} on {data}, seed {options.get('seed')}"
        encoder = trained.get("encoder")
        return cls(title, known, encoder.get("projects") if isinstance(encoder, dict) else None)

    def notes(self, given: float | None) -> Iterator[str]:
        """Yield remarks for the audit.

        Args:
            given: The temperature that the user gave, which replaces that of the run.
        """
        if self.projects:
            yield (
                "The vectors are the features that are evaluated. The loss compared projections of them, whose "
                "similarities are not saved."
            )
        elif self.projects is not None:
            yield "The vectors are those that the loss compared."
        if self.temperature not in (None, given):
            used = f"{given:g}, not the run's {self.temperature:g}" if given else f"{self.temperature:g}, as in the run"
            yield f"The temperature is {used}."


def split_of_run(path: Path, split: str) -> tuple[Tensor, Tensor]:
    """Return the features [n, d] and labels [n] of a split that a training run has saved."""
    train_x, train_y, test_x, test_y = load_embeddings(path / "embeddings.npz" if path.is_dir() else path)
    return (train_x, train_y) if split == "train" else (test_x, test_y)


def read_tags(what: str, path: str, column: str | None) -> Sequence[Any]:
    """Read labels or groups from .npy, .npz, a table, or a text file with one value per line.

    Args:
        what: ``"labels"`` or ``"groups"``: the usual name of the column, and the word in errors.
        path: The file.
        column: Column or array to read; None takes the usual name or the only one there is.

    Raises:
        NoFile: If the file does not exist.
        ArgumentError: If no column or array fits, or its values are neither integers nor text.
        FileError: If a table has no header.
    """
    file = Path(path)
    if not file.exists():
        raise NoFile(WHO, f"a file of {what} that exists", path)
    if file.suffix == ".npy":
        return _flat(read_npy(WHO, file), what, path)
    if file.suffix == ".txt":
        with open_text(file, WHO) as lines:
            return lines.read().splitlines()
    names = names_in_npz(WHO, file) if file.suffix == ".npz" else list(table := read_table(path, WHO))
    if len(names) == 1 and file.suffix != ".npz" and names[0].strip().lstrip("-").isdecimal():
        got, fix = f"whose first line is {names[0]}", f"name the column in the first line, such as {what[:-1]}"
        raise FileError(WHO, f"a table of {what} with a header", path, got, fix)
    usual = next((name for name in (what, what[:-1], "class", "y") if name in names), None)
    name = column or usual or (names[0] if len(names) == 1 or (file.suffix == ".npz" and names) else None)
    if name is None or name not in names:
        fix = f"name it with --{what[:-1]}-column"
        raise ArgumentError(WHO, f"a column or array of {what} in {path}", str(sorted(names)), fix)
    return _flat(read_npz(WHO, file, [name])[name], what, path) if file.suffix == ".npz" else table[name]


def _flat(array: Any, what: str, path: str) -> list[Any]:
    """Return a one-dimensional array of integers or text as a list."""
    if array.ndim != 1 or array.dtype.kind not in "iuUSb":
        got = f"shape {array.shape} of {array.dtype}"
        raise ArgumentError(WHO, f"{what} [n] that are integers or text in {path}", got)
    values: list[Any] = array.tolist()
    return values


def rows_by_name(ids: Sequence[Any]) -> Mapping[str, int]:
    """Map each id as text to its row: 12 in one file matches "12" in another.

    >>> rows_by_name(["a", 12])
    {'a': 0, '12': 1}
    """
    if isinstance(ids, range):
        return RowNumbers(ids)
    rows = {str(name): row for row, name in enumerate(ids)}
    if len(rows) < len(ids):
        raise ArgumentError(WHO, "distinct ids", f"{len(ids) - len(rows)} repeated")
    return rows


class JudgedLists(NamedTuple):
    """Rows of the corpus that are judged for each query.

    Attributes:
        relevant: Rows judged relevant, the best first.
        irrelevant: Rows judged and not relevant.
    """

    relevant: list[list[int]]
    irrelevant: list[list[int]]


def judged_lists(path: str, queries: Mapping[str, int], documents: Mapping[str, int], size: int) -> JudgedLists:
    """Read a table of judgements as rows of the corpus for each query.

    Args:
        path: Table of query id, document id and grade (qrels); a grade above 0 is relevant.
        queries: Row of each query id.
        documents: Row of each document id.
        size: Number of queries.

    Returns:
        Judged rows of each query. Pairs whose query or document is not in the data are skipped.

    Raises:
        ArgumentError: If no relevant pair matches the data.
    """
    judged = read_grades(path, WHO)
    lists = JudgedLists([[] for _ in range(size)], [[] for _ in range(size)])
    for grade, query, document in judged:
        if query in queries and document in documents:
            (lists.relevant if grade > 0 else lists.irrelevant)[queries[query]].append(documents[document])
    if not any(lists.relevant):
        what = f"judgements in {path} that match the ids of the queries and documents"
        fix = "check the ids (without ids, rows are numbered from 0)"
        raise ArgumentError(WHO, what, f"{len(judged)} pairs without a relevant match", fix)
    return lists


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
