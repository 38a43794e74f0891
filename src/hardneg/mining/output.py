"""Write mined negatives as training data, in the formats and column names of sentence-transformers.

- ``triplet``: anchor, positive, negative; one row for each positive and negative.
- ``n-tuple``: anchor, positive, negative_1 ... negative_k; queries with fewer than k negatives are
  left out.
- ``labeled-pair``: anchor, positive (any document), label 1 or 0.
- ``labeled-list``: anchor, positive (a list: the positive, then the negatives), labels.
- ``ids``: query_id, positive_ids, negative_ids, scores and, with several retrievers, found_by.

With scores, as in sentence-transformers: ``scores`` in addition for triplets and n-tuples,
``score`` and ``scores`` instead of the labels. Scores of a cross-encoder are always in
``teacher_scores``. With ids: ``query_id`` and ``document_ids`` (``document_id`` of a labeled pair),
in the order of the documents of the row, like scores.

``columns_of`` returns the output in memory (for data sets), ``write_output`` writes it (for jobs).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardneg.core.errors import FileError, MissingExtra, check_among, optional
from hardneg.io.files import disk_failure, run_again, write_atomically
from hardneg.io.outputs import old_name
from hardneg.mining.problem import Problem

formats = ("triplet", "n-tuple", "labeled-pair", "labeled-list", "ids")
_rows_at_once = 50_000
_other_files = (
    ".csv", ".tsv", ".txt", ".json", ".npy", ".npz", ".safetensors", ".arrow", ".feather", ".pkl", ".pt",
    ".gz", ".zip", ".bz2", ".xz", ".zst",
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """The mined negatives by row of the corpus, as NumPy arrays.

    Attributes:
        problem: Queries, documents and positives.
        rows: Rows of the negatives [q, k], -1 where short.
        scores: Scores of the negatives [q, k].
        positive_scores: Scores of all positives, concatenated query by query [m].
        found_by: Retrievers of each negative as bits [q, k].
        retrievers: Names of the retrievers.
        teacher: Scores of a cross-encoder for negatives [q, k] and positives [m], for distillation.
    """

    problem: Problem
    rows: NDArray[np.int64]
    scores: NDArray[Any]
    positive_scores: NDArray[Any]
    found_by: NDArray[np.int64]
    retrievers: tuple[str, ...]
    teacher: tuple[NDArray[Any], NDArray[Any]] | None = None


JUDGED = "judged"
"""Name, in ``found_by``, of the source of documents that are judged irrelevant to the query."""


def with_judged_negatives(result: Result, score: Callable[[Tensor, Tensor], Tensor]) -> Result:
    """Return the result with documents judged irrelevant first, the most similar first, then the mined ones.

    Lists keep their length: judged documents replace the last mined ones.

    Args:
        result: Mined negatives, with judged ones in its problem.
        score: Function that scores pairs of query [m] and row [m].
    """
    k, bit = result.rows.shape[1], 1 << len(result.retrievers)
    rows, scores, found_by = result.rows.copy(), result.scores.copy(), result.found_by.copy()
    for query, judged in enumerate(result.problem.judged_negatives):
        if not judged:
            continue
        values = score(torch.full((len(judged),), query), torch.tensor(judged)).to(torch.float64).cpu().numpy()
        order = np.argsort(-values, kind="stable")[:k]
        own = np.array(judged)[order]
        rest = np.flatnonzero((result.rows[query] >= 0) & ~np.isin(result.rows[query], judged))[: k - len(own)]
        by = [result.found_by[query][result.rows[query] == row].sum() | bit for row in own]
        for target, first, mined, empty in (
            (rows, own, result.rows, -1),
            (scores, values[order], result.scores, -np.inf),
            (found_by, by, result.found_by, 0),
        ):
            target[query] = empty
            target[query, : len(own)] = first
            target[query, len(own) : len(own) + len(rest)] = mined[query, rest]
    names = (*result.retrievers, JUDGED)
    return replace(result, rows=rows, scores=scores, found_by=found_by, retrievers=names)


@dataclass(frozen=True)
class Layout:
    """The format of the output, its column names, and whether scores and ids are written.

    Attributes:
        format: One of ``formats``.
        anchor: Name of the column of queries.
        positive: Name of the column of positives.
        scores: Whether scores are written.
        ids: Whether ids are written.
    """

    format: str = "triplet"
    anchor: str = "anchor"
    positive: str = "positive"
    scores: bool = False
    ids: bool = False

    def __post_init__(self) -> None:
        check_among("mine", "format", self.format, formats)


def has_rows(result: Result, layout: Layout) -> bool:
    """Return whether any row will be written."""
    found = result.rows >= 0
    if layout.format == "n-tuple":
        return bool(found.all(1).any())
    return layout.format in ("labeled-pair", "ids") or bool(found.any())


def columns_of(result: Result, layout: Layout) -> dict[str, list[Any]]:
    """Return the complete output as columns."""
    parts = list(chunks_of(result, layout))
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


def chunks_of(result: Result, layout: Layout) -> Iterator[dict[str, list[Any]]]:
    """Yield the output as columns, some thousand queries at a time; at least one chunk, maybe without rows."""
    count = np.array([len(own) for own in result.problem.positives])
    end = count.cumsum()
    step = max(1, _rows_at_once // max(1, result.rows.shape[1]))
    for low in range(0, len(count), step):
        high = min(low + step, len(count))
        if layout.format == "ids":
            yield _ids(result, range(low, high))
            continue
        query = np.repeat(np.arange(low, high), count[low:high])
        positive = np.array([row for own in result.problem.positives[low:high] for row in own], dtype=np.int64)
        inside = slice(end[low] - count[low], end[high - 1])
        pairs = [(positive, result.rows), (result.positive_scores[inside], result.scores)]
        pairs += [] if result.teacher is None else [(result.teacher[1][inside], result.teacher[0])]
        yield _columns(result.problem, layout, query, *(np.column_stack([own, each[query]]) for own, each in pairs))


def _columns(
    problem: Problem,
    layout: Layout,
    query: NDArray[np.int64],
    documents: NDArray[np.int64],
    scores: NDArray[Any],
    taught: NDArray[Any] | None = None,
) -> dict[str, list[Any]]:
    """Return rows for training, in columns.

    Args:
        problem: Texts and ids.
        layout: Format and names.
        query: Query of each positive [m].
        documents: Rows of each positive and its negatives [m, 1 + k], -1 where short.
        scores: Their scores [m, 1 + k].
        taught: Scores of a cross-encoder [m, 1 + k].
    """
    rows, one = OutputRows.of(layout.format, query, documents >= 0), layout.format == "labeled-pair"
    queries, names = (side.ids if side.texts is None else side.texts for side in (problem.queries, problem.corpus))
    owners = query[rows.place].tolist()
    out: dict[str, list[Any]] = {layout.anchor: [queries[owner] for owner in owners]}
    if layout.format == "labeled-list":
        out[layout.positive] = rows.named(documents, names)
    else:
        width = rows.column.shape[1]
        negatives = ["negative"] if layout.format == "triplet" else [f"negative_{i}" for i in range(1, width)]
        for i, name in enumerate([layout.positive, *negatives]):
            out[name] = [names[row] for row in documents[rows.place, rows.column[:, i]].tolist()]
    if layout.scores:
        out["score" if one else "scores"] = rows.values(scores)
    elif layout.format.startswith("labeled"):
        is_positive = np.broadcast_to(np.arange(documents.shape[1]) == 0, documents.shape).astype(np.int64)
        out["label" if one else "labels"] = rows.values(is_positive)
    if layout.ids:
        out["query_id"] = [problem.queries.ids[owner] for owner in owners]
        out["document_id" if one else "document_ids"] = rows.named(documents, problem.corpus.ids)
    return out if taught is None else {**out, "teacher_scores": rows.values(taught)}


class OutputRows(NamedTuple):
    """The documents of each row of the output.

    Attributes:
        place: Position of the positive that each row belongs to [r].
        column: Columns of its documents [r, w]: 0 is the positive, 1 to k the negatives, -1 none.
    """

    place: NDArray[np.int64]
    column: NDArray[np.int64]

    @classmethod
    def of(cls, format: str, query: NDArray[np.int64], found: NDArray[np.bool_]) -> OutputRows:
        """Return the rows of a format.

        Args:
            format: Format of the output.
            query: Query of each positive [m].
            found: Which of its documents exist [m, 1 + k].
        """
        every = np.arange(found.shape[1])
        if format == "triplet":
            place, column = found[:, 1:].nonzero()
            return cls(place, np.column_stack([np.zeros_like(column), column + 1]))
        if format == "labeled-pair":  # each negative of a query once, after its positives
            again = np.diff(query, prepend=-1) == 0
            place, column = (found & ~(again[:, None] & (every > 0))).nonzero()
            order = np.lexsort((column > 0, query[place]))
            return cls(place[order], column[order, None])
        place = np.flatnonzero(found.all(1) if format == "n-tuple" else found[:, 1:].any(1))
        return cls(place, np.where(found[place], every, -1))

    def values(self, matrix: NDArray[Any]) -> list[Any]:
        """Return the list of values of each row; for rows with one document, the value itself."""
        taken, some = matrix[self.place[:, None], self.column], self.column >= 0
        if self.column.shape[1] == 1 or some.all():
            return (taken[:, 0] if self.column.shape[1] == 1 else taken).tolist()  # type: ignore[no-any-return]
        return [row[kept].tolist() for row, kept in zip(taken, some, strict=True)]

    def named(self, documents: NDArray[np.int64], names: Sequence[Any]) -> list[Any]:
        """Return names (texts or ids) instead of the rows of documents."""
        rows = self.values(documents)
        return [names[each] if isinstance(each, int) else [names[row] for row in each] for each in rows]


def _ids(result: Result, chosen: range) -> dict[str, list[Any]]:
    ids, queries = result.problem.corpus.ids, result.problem.queries.ids
    kept = {i: result.rows[i] >= 0 for i in chosen}
    out = {
        "query_id": [queries[i] for i in chosen],
        "positive_ids": [[ids[row] for row in result.problem.positives[i]] for i in chosen],
        "negative_ids": [[ids[row] for row in result.rows[i][kept[i]].tolist()] for i in chosen],
        "scores": [result.scores[i][kept[i]].tolist() for i in chosen],
    }
    if result.teacher is not None:
        out["teacher_scores"] = [result.teacher[0][i][kept[i]].tolist() for i in chosen]
    if len(result.retrievers) > 1:
        found = [result.found_by[i][kept[i]].tolist() for i in chosen]
        out["found_by"] = [[_retrievers(bits, result.retrievers) for bits in each] for each in found]
    return out


def _retrievers(bits: int, names: tuple[str, ...]) -> str:
    return "+".join(name for i, name in enumerate(names) if bits >> i & 1)


def write_output(path: Path, result: Result, layout: Layout) -> int:
    """Write the output, complete or not at all, and return the number of rows.

    Args:
        path: ``.parquet`` or ``.jsonl``; any other name is a folder for Hugging Face ``datasets``.
        result: Mined negatives.
        layout: Format and names.
    """
    write = {".parquet": _write_parquet, ".jsonl": _write_lines}.get(path.suffix.lower())
    if write is None:
        return _write_dataset(path, result, layout)
    counted: list[int] = []
    write_atomically(path, lambda file: counted.append(write(file, result, layout)), run_again)
    return counted[0]


def check_format(path: Path) -> None:
    """Raise before the work if the output could not be written after it.

    Raises:
        FileError: If the suffix is unknown, or if the path is something else than the format needs.
        MissingExtra: If the library for the format is not installed.
    """
    suffix = path.suffix.lower()
    if suffix in _other_files:
        raise FileError("mine", "an output that is .parquet, .jsonl or a folder", path)
    if suffix == ".parquet":
        try:
            optional("pyarrow", ".parquet", extra="text")
        except MissingExtra as error:
            raise MissingExtra(error.who, error.what, fix=f"{error.fix}, or write .jsonl") from None
    if suffix in (".parquet", ".jsonl"):
        if path.is_dir():
            raise FileError("mine", f"a file as {suffix} output", path, "which is a folder")
        return
    optional("datasets", "A folder as output", extra="text")
    if path.exists() and not (path / "dataset_info.json").exists():
        raise FileError("mine", "an output folder that is new or a saved data set", path, "which is another folder")


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
    """Yield the rows in chunks, as Arrow tables of one schema."""
    pyarrow = optional("pyarrow", ".parquet", extra="text")
    schema = None
    for part in chunks_of(result, layout):
        table = pyarrow.table(part, schema=schema)
        if schema is None:
            schema = _filled_schema(pyarrow, table.schema)
            table = table.cast(schema)
        yield table


def _filled_schema(pyarrow: Any, schema: Any) -> Any:
    """Return the schema with types for columns that are empty in the first chunk, and scores in float32."""
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
        with _without_bars(datasets):
            dataset.save_to_disk(str(path))
    except BaseException as error:
        shutil.rmtree(path, ignore_errors=True)
        if isinstance(error, OSError):
            raise disk_failure(path, error, run_again) from error
        raise
    return len(dataset)


@contextmanager
def _without_bars(datasets: Any) -> Iterator[None]:
    """Hide the progress bar of the library, which it also writes to logs."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def recover(path: Path) -> None:
    """Repair a folder whose replacement was killed.

    If a killed run had moved the old folder away before it moved the new one there, move it back;
    if it had replaced the folder, delete the old one. Needed only if the system cannot exchange two
    folders at once.
    """
    old = old_name(path)
    if old.exists() and not path.exists():
        os.replace(old, path)
    elif (old / "dataset_info.json").exists():
        shutil.rmtree(old)
