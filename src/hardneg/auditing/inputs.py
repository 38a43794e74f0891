"""What `hardneg audit` reads: embeddings with ids and labels, judgements, the splits of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hardneg.auditing.options import AuditOptions
from hardneg.core.errors import ArgumentError, NoFile
from hardneg.io.arrays import names_in_npz, read_npy, read_npz
from hardneg.io.embeddings import SPLIT_NAMES, load_embeddings
from hardneg.io.tables import aligned, open_text, read_table, read_vectors, suffix_of, vector_suffixes
from hardneg.mining.judgements import read_grades
from hardneg.mining.problem import Side
from hardneg.mining.table_columns import side_of_table
from hardneg.mining.table_values import RowNumbers

WHO = "audit"


def side_of(options: AuditOptions, kind: str, path: str | None, beside: str | None) -> Side:
    """One side from a file of embeddings, a table, or a table with embeddings beside it.

    For queries, ``path`` holds the embeddings and ``beside`` names the rows; for a corpus, ``path`` is the table and
    ``beside`` the embeddings.
    """
    table_path, vectors_path = (beside, path) if kind == "queries" else (path, beside)
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
            raise ArgumentError(WHO, f"a table of {kind} for the column {text or identity!r}", "embeddings alone")
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
    """Labels and groups that lie in the same .npz as the embeddings."""
    if path.suffix != ".npz":
        return {}
    wanted = {"labels": options.label_column or "labels", "groups": options.group_column or "groups"}
    arrays = read_npz(WHO, path, tuple(wanted.values()))
    return {word: arrays[name] for word, name in wanted.items() if name in arrays}


def check_columns_found(options: AuditOptions, *sides: Side) -> None:
    """A column that was named must be there, unless it is that of a file of its own."""
    for word, column in (("labels", options.label_column), ("groups", options.group_column)):
        if column is None or getattr(options, word) is not None:
            continue
        if any(getattr(side, word) is None for side in sides):
            where = options.input if len(sides) == 1 else "queries and corpus"
            raise ArgumentError(WHO, f"the column or array {column!r} of {word} in {where}", "none")


def is_run(path: Path) -> bool:
    """A run directory, or the embeddings.npz of one."""
    if path.is_dir():
        return (path / "embeddings.npz").exists()
    return path.suffix == ".npz" and set(SPLIT_NAMES) <= set(names_in_npz(WHO, path))


def split_of_run(path: Path, split: str) -> tuple[Tensor, Tensor]:
    """The features and labels that a training run left."""
    train_x, train_y, test_x, test_y = load_embeddings(path / "embeddings.npz" if path.is_dir() else path)
    return (train_x, train_y) if split == "train" else (test_x, test_y)


def read_tags(what: str, path: str, column: str | None) -> Sequence[Any]:
    """Labels or groups from .npy, .npz, a table, or a text file with one in each line."""
    file = Path(path)
    if not file.exists():
        raise NoFile(WHO, f"a file of {what} that exists", path)
    if file.suffix == ".npy":
        return _flat(read_npy(WHO, file), what, path)
    if file.suffix == ".txt":
        with open_text(file, WHO) as lines:
            return lines.read().splitlines()
    names = names_in_npz(WHO, file) if file.suffix == ".npz" else list(table := read_table(path, WHO))
    usual = next((name for name in (what, what[:-1], "class", "y") if name in names), None)
    name = column or usual or (names[0] if len(names) == 1 or (file.suffix == ".npz" and names) else None)
    if name is None or name not in names:
        fix = f"name it with --{what[:-1]}-column"
        raise ArgumentError(WHO, f"a column or array of {what} in {path}", str(sorted(names)), fix)
    return _flat(read_npz(WHO, file, [name])[name], what, path) if file.suffix == ".npz" else table[name]


def _flat(array: Any, what: str, path: str) -> list[Any]:
    if array.ndim != 1 or array.dtype.kind not in "iuUSb":
        raise ArgumentError(WHO, f"{what} [n] of whole numbers or texts in {path}", f"{array.shape} {array.dtype}")
    values: list[Any] = array.tolist()
    return values


def rows_by_name(ids: Sequence[Any]) -> Mapping[str, int]:
    """Ids are matched as text: 12 in one file is "12" in another."""
    if isinstance(ids, range):
        return RowNumbers(ids)
    rows = {str(name): row for row, name in enumerate(ids)}
    if len(rows) < len(ids):
        raise ArgumentError(WHO, "distinct ids", f"{len(ids) - len(rows)} repeated")
    return rows


class Judged(NamedTuple):
    """The rows of the corpus that are judged relevant to each query, the best first, and those judged irrelevant."""

    relevant: list[list[int]]
    irrelevant: list[list[int]]


def judged_lists(path: str, queries: Mapping[str, int], documents: Mapping[str, int], size: int) -> Judged:
    """The judged rows of each query; pairs of other queries, or of documents that are not there, do not count."""
    judged = read_grades(path, WHO)
    lists = Judged([[] for _ in range(size)], [[] for _ in range(size)])
    for grade, query, document in judged:
        if query in queries and document in documents:
            (lists.relevant if grade > 0 else lists.irrelevant)[queries[query]].append(documents[document])
    if not any(lists.relevant):
        what = "judgements of these queries and documents"
        fix = "check the ids (without ids, rows are numbered from 0)"
        raise ArgumentError(WHO, what, f"{len(judged)} pairs of which none match", fix)
    return lists
