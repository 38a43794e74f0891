"""Mined negatives as training data: the formats and column names of sentence-transformers, or ids and scores.

- ``triplet``: anchor, positive, negative; one row for each positive and negative.
- ``n-tuple``: anchor, positive, negative_1 ... negative_k; queries with fewer than k negatives are left out.
- ``labeled-pair``: anchor, positive (any document), label 1 or 0.
- ``labeled-list``: anchor, positive (a list: the positive, then the negatives), labels.
- ``ids``: query_id, positive_ids, negative_ids, scores and, with several retrievers, found_by.

With scores, as there: ``scores`` beside triplets and n-tuples, ``score`` and ``scores`` instead of the labels. A
cross-encoder's are in ``teacher_scores``, in any case. With ids: ``query_id`` and ``document_ids`` (``document_id`` of
a labeled pair), in the order of the documents of the row, as scores are.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from hardneg.core.errors import FileError, check_among, optional
from hardneg.io.files import disk_failure, run_again, write_atomically
from hardneg.io.outputs import old_name
from hardneg.mining.problem import Problem, Side

formats = ("triplet", "n-tuple", "labeled-pair", "labeled-list", "ids")
_rows_at_once = 50_000
_other_files = (
    ".csv", ".tsv", ".txt", ".json", ".npy", ".npz", ".safetensors", ".arrow", ".feather", ".pkl", ".pt",
    ".gz", ".zip", ".bz2", ".xz", ".zst",
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What was mined, by row of the corpus, as NumPy arrays; positive_scores belong to positives laid end to end."""

    problem: Problem
    rows: NDArray[np.int64]  # [q, k], -1 where short
    scores: NDArray[Any]  # [q, k]
    positive_scores: NDArray[Any]  # [m]
    found_by: NDArray[np.int64]  # [q, k], bits
    retrievers: tuple[str, ...]
    teacher: tuple[NDArray[Any], NDArray[Any]] | None = None  # scores of a cross-encoder: [q, k], [m]


@dataclass(frozen=True)
class Layout:
    """The format, the names of the columns, and whether scores and ids are written."""

    format: str = "triplet"
    anchor: str = "anchor"
    positive: str = "positive"
    scores: bool = False
    ids: bool = False

    def __post_init__(self) -> None:
        check_among("mine", "format", self.format, formats)


def has_rows(result: Result, layout: Layout) -> bool:
    """Whether anything will be written."""
    found = result.rows >= 0
    if layout.format == "n-tuple":
        return bool(found.all(1).any())
    return layout.format in ("labeled-pair", "ids") or bool(found.any())


def columns_of(result: Result, layout: Layout) -> dict[str, list[Any]]:
    """The whole output as columns."""
    parts = list(chunks_of(result, layout))
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


def chunks_of(result: Result, layout: Layout) -> Iterator[dict[str, list[Any]]]:
    """The output as columns, some thousand queries at a time; at least one, maybe of no rows."""
    count = np.array([len(own) for own in result.problem.positives])
    end = count.cumsum()
    step = max(1, _rows_at_once // max(1, result.rows.shape[1]))
    for low in range(0, len(count), step):
        high = min(low + step, len(count))
        query = np.repeat(np.arange(low, high), count[low:high])
        positive = np.array([row for own in result.problem.positives[low:high] for row in own], dtype=np.int64)
        inside = slice(end[low] - count[low], end[high - 1])
        taught = None if result.teacher is None else result.teacher[1][inside]
        yield _builders[layout.format](Piece(result, query, positive, result.positive_scores[inside], taught), layout)


@dataclass(frozen=True)
class Piece:
    """The positives of some queries: whose, which document and its score, [m] each."""

    result: Result
    query: NDArray[np.int64]
    positive: NDArray[np.int64]
    scores: NDArray[Any]
    taught: NDArray[Any] | None = None  # the scores of a cross-encoder

    def only(self, kept: Any) -> Piece:
        taught = None if self.taught is None else self.taught[kept]
        return Piece(self.result, self.query[kept], self.positive[kept], self.scores[kept], taught)

    def more(
        self, layout: Layout, positive: NDArray[Any], query: NDArray[Any], others: Sequence[Any]
    ) -> dict[str, Any]:
        """Ids and a cross-encoder's scores of rows, each a positive (place) and columns of the query's negatives."""
        out: dict[str, Any] = {}
        rows, teacher, ids = self.result.rows, self.result.teacher, self.result.problem.corpus.ids
        each = list(zip(positive.tolist(), query.tolist(), others, strict=True))
        if layout.ids:
            out["query_id"] = [self.result.problem.queries.ids[q] for _, q, _ in each]
            out["document_ids"] = [[ids[row] for row in (self.positive[p], *rows[q, slots])] for p, q, slots in each]
        if teacher is not None and self.taught is not None:
            taught = self.taught
            out["teacher_scores"] = [[float(taught[p]), *teacher[0][q, slots].tolist()] for p, q, slots in each]
        return out

    @property
    def negatives(self) -> NDArray[np.int64]:
        """[m, k], -1 where short."""
        return self.result.rows[self.query]

    def columns(self, layout: Layout, query: NDArray[Any], documents: NDArray[Any]) -> dict[str, list[Any]]:
        return {layout.anchor: _named(self.result.problem.queries, query), layout.positive: self.documents(documents)}

    def documents(self, rows: NDArray[Any]) -> list[Any]:
        return _named(self.result.problem.corpus, rows)


def _named(side: Side, rows: NDArray[Any]) -> list[Any]:
    """Texts or, without them, ids."""
    names = side.texts if side.texts is not None else side.ids
    return [names[row] for row in rows.tolist()]


def _triplets(piece: Piece, layout: Layout) -> dict[str, list[Any]]:
    place, column = (piece.negatives >= 0).nonzero()
    out = piece.columns(layout, piece.query[place], piece.positive[place])
    out["negative"] = piece.documents(piece.negatives[place, column])
    if layout.scores:
        out["scores"] = np.stack([piece.scores[place], piece.result.scores[piece.query[place], column]], 1).tolist()
    return out | piece.more(layout, place, piece.query[place], list(column[:, None]))


def _tuples(piece: Piece, layout: Layout) -> dict[str, list[Any]]:
    piece = piece.only((piece.negatives >= 0).all(1))
    out = piece.columns(layout, piece.query, piece.positive)
    for number, rows in enumerate(piece.negatives.T, 1):
        out[f"negative_{number}"] = piece.documents(rows)
    if layout.scores:
        out["scores"] = np.concatenate([piece.scores[:, None], piece.result.scores[piece.query]], 1).tolist()
    every = [slice(None)] * len(piece.query)
    return out | piece.more(layout, np.arange(len(piece.query)), piece.query, every)


def _pairs(piece: Piece, layout: Layout) -> dict[str, list[Any]]:
    result, distinct = piece.result, np.unique(piece.query)
    place, column = (result.rows[distinct] >= 0).nonzero()
    others = distinct[place]
    owner = np.concatenate([piece.query, others])
    order = np.argsort(owner, kind="stable")
    rows = np.concatenate([piece.positive, result.rows[others, column]])
    if layout.scores:
        name, values = "score", np.concatenate([piece.scores, result.scores[others, column]])
    else:
        name, values = "label", np.repeat([1, 0], [len(piece.query), len(others)])
    out = {**piece.columns(layout, owner[order], rows[order]), name: values[order].tolist()}
    if layout.ids:
        queries, documents = result.problem.queries.ids, result.problem.corpus.ids
        out["query_id"] = [queries[one] for one in owner[order].tolist()]
        out["document_id"] = [documents[one] for one in rows[order].tolist()]
    if result.teacher is not None and piece.taught is not None:
        taught = np.concatenate([piece.taught, result.teacher[0][others, column]])
        out["teacher_scores"] = taught[order].tolist()
    return out


def _lists(piece: Piece, layout: Layout) -> dict[str, list[Any]]:
    piece = piece.only((piece.negatives >= 0).any(1))
    kept = piece.negatives >= 0
    out = piece.columns(layout, piece.query, piece.positive)
    first, rest = out[layout.positive], piece.negatives
    out[layout.positive] = [[one, *piece.documents(rest[i][kept[i]])] for i, one in enumerate(first)]
    if layout.scores:
        scores = piece.result.scores[piece.query]
        out["scores"] = [[own, *scores[i][kept[i]].tolist()] for i, own in enumerate(piece.scores.tolist())]
    else:
        out["labels"] = [[1, *[0] * int(number)] for number in kept.sum(1)]
    return out | piece.more(layout, np.arange(len(piece.query)), piece.query, list(kept))


def _ids(piece: Piece, layout: Layout) -> dict[str, list[Any]]:
    result, distinct = piece.result, np.unique(piece.query).tolist()
    ids, queries = result.problem.corpus.ids, result.problem.queries.ids
    kept = {i: result.rows[i] >= 0 for i in distinct}
    out = {
        "query_id": [queries[i] for i in distinct],
        "positive_ids": [[ids[row] for row in result.problem.positives[i]] for i in distinct],
        "negative_ids": [[ids[row] for row in result.rows[i][kept[i]].tolist()] for i in distinct],
        "scores": [result.scores[i][kept[i]].tolist() for i in distinct],
    }
    if result.teacher is not None:
        out["teacher_scores"] = [result.teacher[0][i][kept[i]].tolist() for i in distinct]
    if len(result.retrievers) > 1:
        found = [result.found_by[i][kept[i]].tolist() for i in distinct]
        out["found_by"] = [[_retrievers(bits, result.retrievers) for bits in each] for each in found]
    return out


def _retrievers(bits: int, names: tuple[str, ...]) -> str:
    return "+".join(name for i, name in enumerate(names) if bits >> i & 1)


_builders = {"triplet": _triplets, "n-tuple": _tuples, "labeled-pair": _pairs, "labeled-list": _lists, "ids": _ids}


def write_output(path: Path, result: Result, layout: Layout) -> int:
    """Writes the output, whole or not at all, and says how many rows.

    ``.parquet``, ``.jsonl``; any other name is a folder for Hugging Face ``datasets``.
    """
    write = {".parquet": _write_parquet, ".jsonl": _write_lines}.get(path.suffix.lower())
    if write is None:
        return _write_dataset(path, result, layout)
    counted: list[int] = []
    write_atomically(path, lambda file: counted.append(write(file, result, layout)), run_again)
    return counted[0]


def check_format(path: Path) -> None:
    """Raises before the work for what would fail after it."""
    suffix = path.suffix.lower()
    if suffix in _other_files:
        raise FileError("mine", "an output that is .parquet, .jsonl or a folder", path)
    if suffix == ".parquet":
        optional("pyarrow", ".parquet", extra="text")
    if suffix in (".parquet", ".jsonl"):
        if path.is_dir():
            raise FileError("mine", f"a file as {suffix} output", path, "which is a folder")
        return
    optional("datasets", "A folder as output", extra="text")
    if path.exists() and not (path / "dataset_info.json").exists():
        raise FileError("mine", "a data set where it replaces a folder", path, "which is something else")


def _write_parquet(file: BinaryIO, result: Result, layout: Layout) -> int:
    parquet = optional("pyarrow.parquet", ".parquet", extra="text")
    writer, written = None, 0
    for table in _tables(result, layout):
        writer = writer or parquet.ParquetWriter(file, table.schema)
        writer.write_table(table)
        written += len(table)
    assert writer is not None
    writer.close()
    return written


def _tables(result: Result, layout: Layout) -> Iterator[Any]:
    """The rows part by part, as Arrow tables of one schema."""
    pyarrow = optional("pyarrow", ".parquet", extra="text")
    schema = None
    for part in chunks_of(result, layout):
        table = pyarrow.table(part, schema=schema)
        if schema is None:
            schema = _filled_schema(pyarrow, table.schema)
            table = table.cast(schema)
        yield table


def _filled_schema(pyarrow: Any, schema: Any) -> Any:
    """Types for columns that are empty in the first rows, which would otherwise be of no type; scores in float32."""
    kinds = dict.fromkeys(("score", "scores", "teacher_scores"), pyarrow.float32())
    kinds |= dict.fromkeys(("label", "labels"), pyarrow.int64())
    fields = []
    for field in schema:
        kind = kinds.get(field.name, pyarrow.string())
        many = field.name in ("scores", "labels") or pyarrow.types.is_list(field.type)
        inner = field.type.value_type if pyarrow.types.is_list(field.type) else field.type
        known = not pyarrow.types.is_null(inner) and field.name not in ("score", "scores")
        fields.append(field if known else pyarrow.field(field.name, pyarrow.list_(kind) if many else kind))
    return pyarrow.schema(fields)


def _write_lines(file: BinaryIO, result: Result, layout: Layout) -> int:
    written = 0
    for part in chunks_of(result, layout):
        for values in zip(*part.values(), strict=True):
            line = json.dumps(dict(zip(part, values, strict=True)), ensure_ascii=False)
            file.write(line.encode() + b"\n")
            written += 1
    return written


def _write_dataset(path: Path, result: Result, layout: Layout) -> int:
    datasets, pyarrow = (optional(name, "A folder as output", extra="text") for name in ("datasets", "pyarrow"))
    dataset = datasets.Dataset(pyarrow.concat_tables(_tables(result, layout)))
    try:
        dataset.save_to_disk(str(path))
    except BaseException as error:
        shutil.rmtree(path, ignore_errors=True)
        if isinstance(error, OSError):
            raise disk_failure(path, error, run_again) from error
        raise
    return len(dataset)


def recover(path: Path) -> None:
    """Puts a folder back that a killed run had moved away a moment before it put the new one there, and removes one
    that it had replaced and not yet removed; only where the system cannot exchange the two at once."""
    old = old_name(path)
    if old.exists() and not path.exists():
        os.replace(old, path)
    elif (old / "dataset_info.json").exists():
        shutil.rmtree(old)
