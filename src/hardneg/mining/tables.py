"""Tables and embeddings from disk: Parquet, JSONL, CSV, TSV, Hugging Face data sets, folders of files; npy, npz,
safetensors. A table is a dict of columns, lists of equal length."""

from __future__ import annotations

import csv
import gzip
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from hardneg.notices import optional

Table = dict[str, list[Any]]

table_suffixes = (".parquet", ".jsonl", ".json", ".csv", ".tsv")
vector_suffixes = (".npy", ".npz", ".safetensors")
image_suffixes = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff")


def suffix_of(path: Path) -> str:
    """The suffix that tells the format; ``.gz`` behind it does not count."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


def read_table(path: str | Path) -> Table:
    """The columns of a table, whatever its format; a folder is a saved data set, or a folder of images."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"mine needs a file or folder that exists, got {path}.")
    if path.is_dir():
        return _read_folder(path)
    readers = {".parquet": _read_parquet, ".jsonl": _read_lines, ".json": _read_lines}
    suffix = suffix_of(path)
    if suffix in (".csv", ".tsv"):
        table = _read_csv(path, "\t" if suffix == ".tsv" else ",")
    elif suffix in readers:
        table = readers[suffix](path)
    else:
        raise ValueError(f"mine needs a table ({', '.join(table_suffixes)}) or a folder, got {path}.")
    if not table or not len(next(iter(table.values()))):
        raise ValueError(f"mine needs a table with at least one row, got none in {path}.")
    return table


def read_vectors(path: str | Path, column: str | None = None) -> tuple[Tensor, list[Any] | None]:
    """Embeddings [n, d] and, where the file has them, their ids. ``.npy`` stays on disk until its rows are needed."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"mine needs embeddings that exist, got {path}.")
    if path.suffix == ".npy":
        return _checked(np.load(path, mmap_mode="c"), path), None
    if path.suffix == ".npz":
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        return _named(arrays, path, column)
    if path.suffix == ".safetensors":
        load = optional("safetensors.torch", "safetensors", extra="mine").load_file
        return _named({name: tensor.numpy() for name, tensor in load(str(path)).items()}, path, column)
    table = read_table(path)
    name = column or next((name for name in ("embedding", "embeddings", "vector", "vectors") if name in table), None)
    if name is None or name not in table:
        raise ValueError(f"mine needs a column of embeddings in {path}, got columns {sorted(table)}; name it.")
    return column_of_vectors(table[name], path), table.get("id") or table.get("_id")


def column_of_vectors(values: list[Any], where: str | Path) -> Tensor:
    """A column of lists of numbers as one matrix."""
    try:
        sizes = {len(value) for value in values}
        if len(sizes) != 1 or isinstance(values[0], str):
            raise ValueError(f"lengths {sorted(sizes)[:5]}")
        return _checked(np.asarray(values, dtype=np.float32), where)
    except (TypeError, ValueError) as error:
        raise ValueError(f"mine needs embeddings of one length in {where}, got {error}.") from None


def _checked(array: Any, where: str | Path) -> Tensor:
    if array.ndim != 2 or array.dtype.kind != "f":
        raise ValueError(f"mine needs embeddings [n, d] of floats in {where}, got shape {array.shape} {array.dtype}.")
    return torch.from_numpy(array)


def _named(arrays: dict[str, Any], path: Path, column: str | None) -> tuple[Tensor, list[Any] | None]:
    ids = arrays.pop("ids", None)
    names = [column] if column else [name for name in ("vectors", "embeddings", "embedding") if name in arrays]
    names = names or list(arrays)
    if len(names) != 1 or names[0] not in arrays:
        raise ValueError(f"mine needs one array of embeddings in {path}, got {sorted(arrays)}; name it.")
    return _checked(arrays[names[0]], path), None if ids is None else ids.tolist()


@contextmanager
def _open_text(path: Path) -> Iterator[IO[str]]:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", newline="") as file:
        try:
            yield file
        except UnicodeDecodeError as error:
            raise ValueError(f"mine needs text in UTF-8, got {path}: {error.reason} at byte {error.start}.") from None


def _read_lines(path: Path) -> Table:
    rows = []
    with _open_text(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"mine needs one JSON object in each line, got {path} line {number}: {error}."
                ) from None
            if not isinstance(row, dict):
                raise ValueError(f"mine needs one JSON object in each line, got {path} line {number}: {line[:40]!r}.")
            rows.append(row)
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [row.get(name) for row in rows] for name in names}


def _read_csv(path: Path, delimiter: str) -> Table:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with _open_text(path) as file:
        reader = csv.reader(
            file, delimiter=delimiter, quoting=csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
        )
        header = next(reader, [])
        if len(set(header)) != len(header):
            raise ValueError(f"mine needs different names of columns, got {header} in {path}.")
        columns: list[list[Any]] = [[] for _ in header]
        for number, row in enumerate(reader, 2):
            if len(row) != len(header):
                raise ValueError(
                    f"mine needs {len(header)} fields in each row, got {len(row)} in {path} line {number}."
                )
            for column, value in zip(columns, row, strict=True):
                column.append(value)
    return dict(zip(header, columns, strict=True))


def _read_parquet(path: Path) -> Table:
    parquet = optional("pyarrow.parquet", "Parquet", extra="mine")
    try:
        table = parquet.read_table(path)
    except Exception as error:
        raise ValueError(f"mine needs a whole Parquet file, got {path}: {error}") from None
    return {name: table[name].to_pylist() for name in table.column_names}


def _read_folder(path: Path) -> Table:
    if (path / "dataset_dict.json").exists():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        raise ValueError(f"mine needs one split of {path}, got {splits}; give the folder of one: {path / splits[0]}.")
    if (path / "dataset_info.json").exists():
        dataset = optional("datasets", "A saved data set", extra="text").load_from_disk(str(path))
        return {name: list(dataset[name]) for name in dataset.column_names}
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in image_suffixes)
    if not files:
        raise ValueError(f"mine needs a saved data set or a folder of images, got {path} with neither.")
    names = [str(file.relative_to(path)) for file in files]
    groups = [str(Path(name).parent) for name in names]
    return {"id": names, "image": [str(file) for file in files], "label": groups}
