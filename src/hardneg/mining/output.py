"""Mined negatives as training data: the formats and column names of sentence-transformers, or ids and scores.

- ``triplet``: anchor, positive, negative; one row for each positive and negative.
- ``n-tuple``: anchor, positive, negative_1 ... negative_k; queries with fewer than k negatives are left out.
- ``labeled-pair``: anchor, positive (any document), label 1 or 0.
- ``labeled-list``: anchor, positive (a list: the positive, then the negatives), labels.
- ``ids``: query_id, positive_ids, negative_ids, scores and, with several retrievers, found_by.

With scores, as there: ``scores`` beside triplets and n-tuples, ``score`` and ``scores`` instead of the labels.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from hardneg.core.errors import FileError, check_among, optional
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
    """What was mined, by row of the corpus, as NumPy arrays; positive_scores belong to positives laid end to end."""

    problem: Problem
    rows: NDArray[np.int64]  # [q, k], -1 where short
    scores: NDArray[Any]  # [q, k]
    positive_scores: NDArray[Any]  # [m]
    found_by: NDArray[np.int64]  # [q, k], bits
    retrievers: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """The format, the names of the columns, and whether scores are written."""

    format: str = "triplet"
    anchor: str = "anchor"
    positive: str = "positive"
    scores: bool = False

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
    build = {
        "triplet": _triplets,
        "n-tuple": _tuples,
        "labeled-pair": _pairs,
        "labeled-list": _lists,
        "ids": _ids,
    }[layout.format]
    step = max(1, _rows_at_once // max(1, result.rows.shape[1]))
    for low in range(0, len(count), step):
        high = min(low + step, len(count))
        query = np.repeat(np.arange(low, high), count[low:high])
        positive = np.array([row for own in result.problem.positives[low:high] for row in own], dtype=np.int64)
        scores = result.positive_scores[end[low] - count[low] : end[high - 1]]
        yield build(result, layout, query, positive, scores)


def _documents(result: Result, rows: Any) -> list[Any]:
    corpus = result.problem.corpus
    named = corpus.texts if corpus.texts is not None else corpus.ids
    return [named[row] for row in rows.tolist()]


def _anchors(result: Result, query: Any) -> list[Any]:
    queries = result.problem.queries
    named = queries.texts if queries.texts is not None else queries.ids
    return [named[row] for row in query.tolist()]


def _triplets(result: Result, layout: Layout, query: Any, positive: Any, positive_scores: Any) -> dict[str, list[Any]]:
    negative = result.rows[query]
    place, column = (negative >= 0).nonzero()
    out = {
        layout.anchor: _anchors(result, query[place]),
        layout.positive: _documents(result, positive[place]),
        "negative": _documents(result, negative[place, column]),
    }
    if layout.scores:
        both = np.stack([positive_scores[place], result.scores[query[place], column]], 1)
        out["scores"] = both.tolist()
    return out


def _tuples(result: Result, layout: Layout, query: Any, positive: Any, positive_scores: Any) -> dict[str, list[Any]]:
    full = (result.rows[query] >= 0).all(1)
    query, positive, positive_scores = query[full], positive[full], positive_scores[full]
    out = {layout.anchor: _anchors(result, query), layout.positive: _documents(result, positive)}
    for column in range(result.rows.shape[1]):
        out[f"negative_{column + 1}"] = _documents(result, result.rows[query, column])
    if layout.scores:
        out["scores"] = np.concatenate([positive_scores[:, None], result.scores[query]], 1).tolist()
    return out


def _pairs(result: Result, layout: Layout, query: Any, positive: Any, positive_scores: Any) -> dict[str, list[Any]]:
    distinct = np.unique(query)
    place, column = (result.rows[distinct] >= 0).nonzero()
    owner = np.concatenate([query, distinct[place]])
    rows = np.concatenate([positive, result.rows[distinct[place], column]])
    label = np.concatenate([np.ones(len(query), dtype=np.int64), np.zeros(len(place), dtype=np.int64)])
    scores = np.concatenate([positive_scores, result.scores[distinct[place], column]])
    order = np.argsort(owner, kind="stable")
    values = {"score": scores[order].tolist()} if layout.scores else {"label": label[order].tolist()}
    return {layout.anchor: _anchors(result, owner[order]), layout.positive: _documents(result, rows[order]), **values}


def _lists(result: Result, layout: Layout, query: Any, positive: Any, positive_scores: Any) -> dict[str, list[Any]]:
    some = (result.rows[query] >= 0).any(1)
    query, positive, positive_scores = query[some], positive[some], positive_scores[some]
    kept = result.rows[query] >= 0
    documents = [
        _documents(result, np.concatenate([positive[i : i + 1], result.rows[query[i]][kept[i]]]))
        for i in range(len(query))
    ]
    out = {layout.anchor: _anchors(result, query), layout.positive: documents}
    if layout.scores:
        own, scores = positive_scores.tolist(), result.scores[query]
        out["scores"] = [[own[i], *scores[i][kept[i]].tolist()] for i in range(len(query))]
    else:
        out["labels"] = [[1, *[0] * int(number)] for number in kept.sum(1)]
    return out


def _ids(result: Result, layout: Layout, query: Any, positive: Any, positive_scores: Any) -> dict[str, list[Any]]:
    ids, distinct = result.problem.corpus.ids, np.unique(query).tolist()
    kept = [result.rows[i] >= 0 for i in distinct]
    out = {
        "query_id": [result.problem.queries.ids[i] for i in distinct],
        "positive_ids": [[ids[row] for row in result.problem.positives[i]] for i in distinct],
        "negative_ids": [
            [ids[row] for row in result.rows[i][keep].tolist()] for i, keep in zip(distinct, kept, strict=True)
        ],
        "scores": [result.scores[i][keep].tolist() for i, keep in zip(distinct, kept, strict=True)],
    }
    if len(result.retrievers) > 1:
        out["found_by"] = [
            [_names(bits, result.retrievers) for bits in result.found_by[i][keep].tolist()]
            for i, keep in zip(distinct, kept, strict=True)
        ]
    return out


def _names(bits: int, retrievers: tuple[str, ...]) -> str:
    return "+".join(name for i, name in enumerate(retrievers) if bits >> i & 1)


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
    pyarrow, parquet = (
        optional("pyarrow", ".parquet", extra="text"),
        optional("pyarrow.parquet", ".parquet", extra="text"),
    )
    writer, written = None, 0
    for part in chunks_of(result, layout):
        table = pyarrow.table(part) if writer is None else pyarrow.table(part, schema=writer.schema)
        if writer is None:
            table = table.cast(_filled_schema(pyarrow, table.schema, layout))
            writer = parquet.ParquetWriter(file, table.schema)
        writer.write_table(table)
        written += len(table)
    assert writer is not None
    writer.close()
    return written


def _filled_schema(pyarrow: Any, schema: Any, layout: Layout) -> Any:
    """Types for columns that are empty in the first rows, which would otherwise be of no type."""
    text = pyarrow.string()
    number = {"score": pyarrow.float32(), "label": pyarrow.int64()}
    lists = {"scores": pyarrow.list_(pyarrow.float32()), "labels": pyarrow.list_(pyarrow.int64())}
    fields = []
    for field in schema:
        kind = field.type
        if pyarrow.types.is_null(kind):
            kind = number.get(field.name, lists.get(field.name, text))
        elif pyarrow.types.is_list(kind) and pyarrow.types.is_null(kind.value_type):
            kind = lists.get(field.name, pyarrow.list_(text))
        elif field.name in ("score", "scores"):
            kind = number["score"] if field.name == "score" else lists["scores"]
        fields.append(pyarrow.field(field.name, kind))
    return pyarrow.schema(fields)


def _write_lines(file: BinaryIO, result: Result, layout: Layout) -> int:
    written = 0
    for part in chunks_of(result, layout):
        names = list(part)
        for values in zip(*part.values(), strict=True):
            line = json.dumps(dict(zip(names, values, strict=True)), ensure_ascii=False)
            file.write(line.encode() + b"\n")
            written += 1
    return written


def _write_dataset(path: Path, result: Result, layout: Layout) -> int:
    dataset = optional("datasets", "A folder as output", extra="text").Dataset.from_dict(columns_of(result, layout))
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
