"""Tables and embeddings from disk: Parquet, JSONL, CSV, TSV, Hugging Face data sets, folders of files; npy, npz,
safetensors. A table is a dict of columns, lists of equal length. ``who`` asks is said in every error."""

from __future__ import annotations

import csv
import gzip
import json
import sys
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from hardneg.core.errors import optional
from hardneg.io.arrays import whats_wrong

Table = dict[str, list[Any]]

table_suffixes = (".parquet", ".jsonl", ".json", ".csv", ".tsv")
vector_suffixes = (".npy", ".npz", ".safetensors")
image_suffixes = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff")


def suffix_of(path: Path) -> str:
    """The suffix that tells the format; ``.gz`` behind it does not count."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


def read_table(path: str | Path, who: str = "mine") -> Table:
    """The columns of a table, whatever its format; a folder is a saved data set, or a folder of images."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{who} needs a file or folder that exists, got {path}.")
    if path.is_dir():
        return _read_folder(path, who)
    readers = {".parquet": _read_parquet, ".jsonl": _read_lines, ".json": _read_lines}
    suffix = suffix_of(path)
    if suffix in (".csv", ".tsv"):
        table = _read_csv(path, "\t" if suffix == ".tsv" else ",", who)
    elif suffix in readers:
        table = readers[suffix](path, who)
    else:
        raise ValueError(f"{who} needs a table ({', '.join(table_suffixes)}) or a folder, got {path}.")
    if not table or not len(next(iter(table.values()))):
        raise ValueError(f"{who} needs a table with at least one row, got none in {path}.")
    return table


def column_names(path: str | Path, who: str = "mine") -> list[str]:
    """The names of the columns, without reading all of a large file where its format says them."""
    path = Path(path)
    if path.is_file() and suffix_of(path) == ".parquet":
        parquet = optional("pyarrow.parquet", "Parquet", extra="mine")
        try:
            return list(parquet.read_schema(path).names)
        except Exception as error:
            raise ValueError(f"{who} needs a whole Parquet file, got {path}: {error}") from None
    if path.is_file() and suffix_of(path) in (".jsonl", ".json"):
        with _open_text(path, who) as file:
            first = next((line for line in file if line.strip()), "{}")
        try:
            row = json.loads(first)
        except json.JSONDecodeError:
            row = None
        if isinstance(row, dict):
            return list(row)
    return list(read_table(path, who))


def read_vectors(path: str | Path, column: str | None = None, who: str = "mine") -> tuple[Tensor, list[Any] | None]:
    """Embeddings [n, d] and, where the file has them, their ids. ``.npy`` stays on disk until its rows are needed."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{who} needs embeddings that exist, got {path}.")
    suffix = path.suffix.lower()
    if suffix == ".npy":
        return _checked(_load_numpy(path, who), path, who), None
    if suffix == ".npz":
        return _named(_load_numpy(path, who), path, column, who)
    if suffix == ".safetensors":
        return _named(_load_safetensors(path, who), path, column, who)
    table = read_table(path, who)
    name = column or next((name for name in ("embedding", "embeddings", "vector", "vectors") if name in table), None)
    if name is None or name not in table:
        raise ValueError(f"{who} needs a column of embeddings in {path}, got columns {sorted(table)}; name it.")
    return column_of_vectors(table[name], path, who), table.get("id") or table.get("_id")


def aligned(
    vectors: Tensor, ids: list[Any] | None, wanted: Sequence[Any], kind: str, path: str | Path, who: str = "mine"
) -> Tensor:
    """The vectors in the order of the rows of a table: by id where their file has ids, by position where it has not."""
    if ids is None:
        if len(vectors) != len(wanted):
            raise ValueError(
                f"{who} needs one embedding for each row of the {kind}, got {len(vectors)} for {len(wanted)}."
            )
        return vectors
    row_of = {str(one): row for row, one in enumerate(ids)}
    if len(row_of) < len(ids):
        raise ValueError(f"{who} needs distinct ids in {path}, got {len(ids) - len(row_of)} repeated.")
    rows = [row_of.get(str(one), -1) for one in wanted]
    if -1 in rows:
        row = rows.index(-1)
        raise ValueError(
            f"{who} needs an embedding for each id of the {kind}, got none for {wanted[row]!r} (row {row}) among "
            f"the ids in {path}, and {rows.count(-1)} missing in all."
        )
    return vectors if rows == list(range(len(vectors))) else vectors[torch.tensor(rows)]


def _load_numpy(path: Path, who: str) -> Any:
    try:
        if path.suffix.lower() == ".npy":
            return np.load(path, mmap_mode="c")
        with np.load(path) as file:
            return {name: file[name] for name in file.files}
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{who} needs a whole file of arrays of numbers, got {path}: {whats_wrong(error)}.") from None


def _load_safetensors(path: Path, who: str) -> dict[str, Any]:
    load = optional("safetensors.torch", "safetensors", extra="mine").load_file
    try:
        tensors = load(str(path))
    except Exception as error:
        raise ValueError(f"{who} needs a whole safetensors file, got {path}: {error}.") from None
    # NumPy has no bfloat16; float32 holds each of its numbers.
    return {name: (one.float() if one.dtype == torch.bfloat16 else one).numpy() for name, one in tensors.items()}


def column_of_vectors(values: list[Any], where: str | Path, who: str = "mine") -> Tensor:
    """A column of lists of numbers as one matrix."""
    try:
        sizes = {len(value) for value in values}
        if len(sizes) != 1 or isinstance(values[0], str):
            raise ValueError(f"lengths {sorted(sizes)[:5]}")
        return _checked(np.asarray(values, dtype=np.float32), where, who)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{who} needs embeddings of one length in {where}, got {error}.") from None


def _checked(array: Any, where: str | Path, who: str) -> Tensor:
    if array.ndim != 2 or array.dtype.kind != "f":
        raise ValueError(f"{who} needs embeddings [n, d] of floats in {where}, got shape {array.shape} {array.dtype}.")
    return torch.from_numpy(array)


def _named(arrays: dict[str, Any], path: Path, column: str | None, who: str) -> tuple[Tensor, list[Any] | None]:
    ids = arrays.pop("ids", None)
    names = [column] if column else [name for name in ("vectors", "embeddings", "embedding") if name in arrays]
    names = names or list(arrays)
    if len(names) != 1 or names[0] not in arrays:
        raise ValueError(f"{who} needs one array of embeddings in {path}, got {sorted(arrays)}; name it.")
    vectors = _checked(arrays[names[0]], path, who)
    if ids is None:
        return vectors, None
    if ids.shape != (len(vectors),) or ids.dtype.kind not in "iuU":
        raise ValueError(
            f"{who} needs one id, a whole number or a text, for each of {len(vectors)} embeddings in {path}, "
            f"got ids {ids.shape} {ids.dtype}."
        )
    return vectors, ids.tolist()


@contextmanager
def _open_text(path: Path, who: str) -> Iterator[IO[str]]:
    """A text file, packed or not; the mark that Excel puts at the beginning of UTF-8 is none of its text."""
    opener: Any = gzip.open if path.suffix.lower() == ".gz" else open
    with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
        try:
            yield file
        except UnicodeDecodeError as error:
            raise ValueError(f"{who} needs text in UTF-8, got {path}: {error.reason} at byte {error.start}.") from None
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{who} needs a whole gzip file, got {path}: {error}.") from None


def _read_lines(path: Path, who: str) -> Table:
    rows = []
    with _open_text(path, who) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{who} needs one JSON object in each line, got {path} line {number}: {error}."
                ) from None
            if not isinstance(row, dict):
                raise ValueError(f"{who} needs one JSON object in each line, got {path} line {number}: {line[:40]!r}.")
            rows.append(row)
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [row.get(name) for row in rows] for name in names}


def _read_csv(path: Path, delimiter: str, who: str) -> Table:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with _open_text(path, who) as file:
        reader = csv.reader(
            file, delimiter=delimiter, quoting=csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
        )
        try:
            return _columns_of(reader, path, who)
        except csv.Error as error:
            raise ValueError(f"{who} needs rows of fields, got {path} line {reader.line_num}: {error}.") from None


def _columns_of(reader: Any, path: Path, who: str) -> Table:
    header: list[str] = next(reader, [])
    if len(set(header)) != len(header):
        raise ValueError(f"{who} needs different names of columns, got {header} in {path}.")
    columns: list[list[Any]] = [[] for _ in header]
    for row in reader:
        if not row:  # an empty line
            continue
        if len(row) != len(header):
            raise ValueError(
                f"{who} needs {len(header)} fields in each row, got {len(row)} in {path} line {reader.line_num}."
            )
        for column, value in zip(columns, row, strict=True):
            column.append(value)
    return dict(zip(header, columns, strict=True))


def _read_parquet(path: Path, who: str) -> Table:
    parquet = optional("pyarrow.parquet", "Parquet", extra="mine")
    try:
        table = parquet.read_table(path)
    except Exception as error:
        raise ValueError(f"{who} needs a whole Parquet file, got {path}: {error}") from None
    return {name: table[name].to_pylist() for name in table.column_names}


def _read_folder(path: Path, who: str) -> Table:
    if (path / "dataset_dict.json").exists():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        raise ValueError(f"{who} needs one split of {path}, got {splits}; give the folder of one: {path / splits[0]}.")
    if (path / "dataset_info.json").exists():
        dataset = optional("datasets", "A saved data set", extra="text").load_from_disk(str(path))
        return {name: list(dataset[name]) for name in dataset.column_names}
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in image_suffixes)
    if not files:
        raise ValueError(f"{who} needs a saved data set or a folder of images, got {path} with neither.")
    names = [str(file.relative_to(path)) for file in files]
    groups = [str(Path(name).parent) for name in names]
    return {"id": names, "image": [str(file) for file in files], "label": groups}
