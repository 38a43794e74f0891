"""Read tables and embeddings from disk.

Tables: Parquet, JSON, JSON lines, CSV, TSV, TREC files, saved Hugging Face data sets, folders of shards or images. A
table is a dict of columns, lists of equal length. Embeddings: .npy, .npz, .safetensors, a column of a table, or folders
of these.

``read_table`` and ``read_vectors`` are the entries, for mining, audits and training; ``column_names`` looks into a
table without reading it; ``aligned`` brings embeddings into the order of a table. Every error names the caller,
``who``.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, FileError, NoFile, optional, spelled
from hardneg.core.types import as_vectors
from hardneg.io.arrays import read_npy, read_npz
from hardneg.io.files import check_free
from hardneg.io.processes import memory_bytes

Table = dict[str, list[Any]]

table_suffixes = (".parquet", ".jsonl", ".json", ".csv", ".tsv", ".qrels", ".run", ".trec")
vector_suffixes = (".npy", ".npz", ".safetensors")
image_suffixes = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff")
_in_memory = 1 << 30  # bytes; more embeddings of several files are joined in a temporary file
_unpacked_bytes, _unpacked_times = 1 << 28, 100  # limits of a gzip file; text seldom packs below a twentieth


def suffix_of(path: Path) -> str:
    """Return the suffix that determines the format, in lower case and without a final ``.gz``.

    >>> suffix_of(Path("corpus.JSONL.gz"))
    '.jsonl'
    """
    return Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


def read_table(path: str | Path, who: str = "mine", *, may_be_empty: bool = False) -> Table:
    """Read the columns of a table in any format.

    Args:
        path: A file, or a folder with a saved data set, shards of a table, or images.
        who: Caller, for errors.
        may_be_empty: Whether a table without rows is accepted.

    Returns:
        Columns by name. A folder of images gives ``id``, ``image`` (paths) and ``label`` (subfolders).

    Raises:
        NoFile: If the path does not exist.
        ArgumentError: If the format is unknown or there are no rows.
        FileError: If the file is damaged or not of its format.
    """
    path = Path(path)
    if not path.exists():
        raise NoFile(who, "a file or folder that exists", path)
    if path.is_dir():
        return _read_folder(path, who)
    readers = {".parquet": _read_parquet, ".jsonl": _read_lines, ".json": _read_json}
    readers |= dict.fromkeys((".qrels", ".run", ".trec"), _read_trec)
    suffix = suffix_of(path) if suffix_of(path) != ".txt" else _suffix_by_content(path, who)
    if suffix in (".csv", ".tsv"):
        table = _read_csv(path, "\t" if suffix == ".tsv" else ",", who)
    elif suffix in readers:
        table = readers[suffix](path, who)
    else:
        raise ArgumentError(who, f"a table ({', '.join(table_suffixes)}) or a folder", str(path))
    if not may_be_empty and (not table or not len(next(iter(table.values())))):
        raise ArgumentError(who, "a table with at least one row", f"none in {path}")
    return table


def _suffix_by_content(path: Path, who: str) -> str:
    """Return the format of a ``.txt`` file by its first line: TREC's qrels or run, or a table with tabs or commas."""
    with open_text(path, who) as file:
        first = next((line for line in file if line.strip()), "")
    fields = first.split()
    if (len(fields) == 4 and _is_number(fields[3])) or (len(fields) == 6 and all(map(_is_number, fields[3:5]))):
        return ".trec"
    if "\t" in first or "," in first:
        return ".tsv" if "\t" in first else ".csv"
    fix = "rename it to .tsv or .csv if it is a table whose first line names the columns"
    what = "qrels, a run or a table with tabs or commas in a .txt file"
    raise ArgumentError(who, what, f"{path}, which begins with {first.strip()[:60]!r}", fix)


def _is_number(text: str) -> bool:
    """Whether a text is a number other than NaN."""
    try:
        return float(text) == float(text)
    except ValueError:
        return False


def column_names(path: str | Path, who: str = "mine") -> list[str]:
    """Return the names of the columns, without reading a large file if its format allows."""
    path = Path(path)
    if path.is_file() and suffix_of(path) == ".parquet":
        parquet = optional("pyarrow.parquet", "Parquet", extra="text")
        with _whole("Parquet file", path, who):
            return list(parquet.read_schema(path).names)
    if path.is_file() and suffix_of(path) in (".jsonl", ".json"):
        with open_text(path, who) as file:
            first = next((line for line in file if line.strip()), "{}")
        try:
            row = json.loads(first)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            return list(row)
    return list(read_table(path, who))


def read_vectors(path: str | Path, column: str | None = None, who: str = "mine") -> tuple[Tensor, list[Any] | None]:
    """Read embeddings and, if the file has them, their ids.

    Args:
        path: A file of embeddings, a table with a column of them, or a folder of such files.
        column: Column or array of the embeddings; None uses the usual name, or the only column or array.
        who: Caller, for errors.

    Returns:
        Vectors [n, d] and ids [n] or None. ``.npy`` stays on disk until its rows are needed.

    Raises:
        NoFile: If the path does not exist.
        ArgumentError: If there is no such column, or it holds no vectors.
    """
    path = Path(path)
    if not path.exists():
        raise NoFile(who, "embeddings that exist", path)
    if path.is_dir() and holds_vectors(path):
        return _joined(path, column, who)
    suffix = path.suffix.lower()
    if suffix == ".npy":
        return _checked(read_npy(who, path, mapped=True), path, who), None
    if suffix == ".npz":
        return _named(read_npz(who, path), path, column, who)
    if suffix == ".safetensors":
        return _named(_load_safetensors(path, who), path, column, who)
    table = read_table(path, who)
    name = column or next((name for name in ("embedding", "embeddings", "vector", "vectors") if name in table), None)
    if name is None or name not in table:
        fix = f"name it with {spelled(who, 'embedding_column')}"
        raise ArgumentError(who, f"a column of embeddings in {path}", f"columns {sorted(table)}", fix)
    return column_of_vectors(table[name], path, who), table.get("id") or table.get("_id")


def holds_vectors(path: str | Path) -> bool:
    """Whether a path is a file of embeddings, or a folder of such files."""
    path = Path(path)
    return bool(_files_of(path, vector_suffixes)) if path.is_dir() else suffix_of(path) in vector_suffixes


def _files_of(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return the files with these suffixes in a folder, sorted by name; hidden ones are skipped."""
    found = (file for file in folder.iterdir() if file.is_file() and not file.name.startswith((".", "_")))
    return sorted(file for file in found if suffix_of(file) in suffixes)


def _joined(folder: Path, column: str | None, who: str) -> tuple[Tensor, list[Any] | None]:
    """Return the embeddings of all files in a folder as one matrix, in a temporary file if they are large."""
    parts = [read_vectors(file, column, who) for file in _files_of(folder, vector_suffixes)]
    shapes = {(vectors.shape[1], vectors.dtype) for vectors, _ in parts}
    some_ids = {ids is None for _, ids in parts}
    if len(shapes) > 1 or len(some_ids) > 1:
        got = ", ".join(sorted(f"[n, {dim}] of {dtype}" for dim, dtype in shapes))
        what = f"embeddings of one dimension and type in {folder}, all with ids or all without"
        raise ArgumentError(who, what, got)
    first = parts[0][0].numpy()
    array = _empty(folder, (sum(len(vectors) for vectors, _ in parts), first.shape[1]), first.dtype, who)
    low = 0
    for vectors, _ in parts:
        array[low : low + len(vectors)] = vectors.numpy()
        low += len(vectors)
    ids = None if parts[0][1] is None else [one for _, each in parts for one in each or ()]
    return torch.from_numpy(array), ids


def _empty(folder: Path, shape: tuple[int, int], dtype: Any, who: str) -> Any:
    """Return an array to fill, backed by a temporary file if it is large."""
    needed = shape[0] * shape[1] * dtype.itemsize
    if needed <= _in_memory:
        return np.empty(shape, dtype)
    fix = "free disk space there, set TMPDIR to a folder on another disk, or join them into one .npy file"
    check_free(who, Path(tempfile.gettempdir()), needed, f"to join the files of {folder}", fix)
    with tempfile.TemporaryFile() as file:
        return np.memmap(file, dtype, "w+", shape=shape)


def aligned(
    vectors: Tensor,
    ids: list[Any] | None,
    wanted: Sequence[Any],
    kind: str,
    path: str | Path,
    who: str = "mine",
    *,
    skipped: Sequence[bool] = (),
) -> Tensor:
    """Return the vectors in the order of the rows of a table.

    Args:
        vectors: Vectors [n, d] of a file.
        ids: Their ids; None if they are in the order of the table.
        wanted: Ids of the rows of the table [m].
        kind: Kind of the rows, such as "queries", for errors.
        path: The file, for errors.
        who: Caller, for errors.
        skipped: Rows that will be skipped later [m] and need no vector; they get an arbitrary one.

    Raises:
        ArgumentError: If ids repeat, rows lack a vector, or there are no ids and the numbers of rows differ.
    """
    if ids is None:
        if len(vectors) != len(wanted):
            what = f"one embedding for each row of the {kind}"
            raise ArgumentError(who, what, f"{len(vectors)} for {len(wanted)}")
        return vectors
    row_of = {str(one): row for row, one in enumerate(ids)}
    if len(row_of) < len(ids):
        raise ArgumentError(who, f"distinct ids in {path}", f"{len(ids) - len(row_of)} repeated")
    rows = [row_of.get(str(one), -1) for one in wanted]
    rows = [0 if row < 0 and skip else row for row, skip in zip(rows, skipped or [False] * len(rows), strict=True)]
    if -1 in rows:
        row = rows.index(-1)
        got = f"none for {wanted[row]!r} (row {row}) among the ids in {path}, and {rows.count(-1)} missing in all"
        raise ArgumentError(who, f"an embedding for each id of the {kind}", got)
    return vectors if rows == list(range(len(vectors))) else vectors[torch.tensor(rows)]


def _load_safetensors(path: Path, who: str) -> dict[str, Any]:
    """Return the tensors of a safetensors file as arrays."""
    load = optional("safetensors.torch", "safetensors", extra="text").load_file
    with _whole("safetensors file", path, who):
        tensors = load(str(path))
    # NumPy has no bfloat16; float32 represents all its values.
    return {name: (one.float() if one.dtype == torch.bfloat16 else one).numpy() for name, one in tensors.items()}


def column_of_vectors(values: list[Any], where: str | Path, who: str = "mine") -> Tensor:
    """Return a column of lists of numbers as a matrix [n, d] of float32.

    Raises:
        ArgumentError: If values are not lists of numbers, or their lengths differ.

    Example:
        >>> column_of_vectors([[1.0, 0.0], [0.0, 1.0]], "table.parquet").shape
        torch.Size([2, 2])
    """
    what = f"embeddings of one length in {where}"
    try:
        sizes = {len(value) for value in values}
    except TypeError:
        raise ArgumentError(who, what, "values that are not lists") from None
    if len(sizes) != 1 or isinstance(values[0], str):
        raise ArgumentError(who, what, f"lengths {sorted(sizes)[:5]}")
    try:
        return _checked(np.asarray(values, dtype=np.float32), where, who)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(who, what, "values that are not numbers") from None


def _checked(array: Any, where: str | Path, who: str) -> Tensor:
    """Return an array as vectors [n, d] after checking shape and type."""
    if array.ndim != 2 or array.shape[1] == 0 or array.dtype.kind != "f":  # [n, 0] may declare any n
        raise ArgumentError(who, f"embeddings [n, d] of floats in {where}", f"shape {array.shape} {array.dtype}")
    return as_vectors(array)


def _named(arrays: dict[str, Any], path: Path, column: str | None, who: str) -> tuple[Tensor, list[Any] | None]:
    """Return the array of embeddings of a file with several arrays, and its ids."""
    ids = arrays.pop("ids", None)
    names = [column] if column else [name for name in ("vectors", "embeddings", "embedding") if name in arrays]
    names = names or list(arrays)
    if len(names) != 1 or names[0] not in arrays:
        fix = f"name it with {spelled(who, 'embedding_column')}"
        raise ArgumentError(who, f"one array of embeddings in {path}", str(sorted(arrays)), fix)
    vectors = _checked(arrays[names[0]], path, who)
    if ids is None:
        return vectors, None
    if ids.shape != (len(vectors),) or ids.dtype.kind not in "iuU":
        raise ArgumentError(
            who,
            f"one id (integer or text) for each of the {len(vectors)} embeddings in {path}",
            f"ids {ids.shape} {ids.dtype}",
        )
    return vectors, ids.tolist()


class _Unpacked(gzip.GzipFile):
    """A gzip file that refuses to unpack a small file to far more than text does (a "zip bomb")."""

    def __init__(self, path: Path, who: str) -> None:
        super().__init__(path, "rb")
        self.path, self.who = path, who
        self.most = min(max(_unpacked_bytes, _unpacked_times * path.stat().st_size), memory_bytes())

    def read(self, size: int | None = -1) -> bytes:
        """Read and unpack up to ``size`` bytes."""
        left = max(self.most + 1 - self.tell(), 1)
        content = super().read(left if size is None or size < 0 else min(size, left))
        if self.tell() > self.most:
            got = f"which unpacks to more than {self.most:,} bytes"
            raise FileError(self.who, "a gzip file of text", self.path, got, "unpack it if it is meant to be so large")
        return content

    def read1(self, size: int = -1) -> bytes:
        """Read and unpack a block."""
        return self.read(1 << 16 if size < 0 else size)


@contextmanager
def _whole(kind: str, path: Path, who: str, got: str = "which is damaged or of another kind") -> Iterator[None]:
    """Turn whatever another library raises for a damaged file into FileError."""
    try:
        yield
    except Exception as error:
        raise FileError(who, f"an undamaged {kind}", path, got) from error


@contextmanager
def open_text(path: Path, who: str) -> Iterator[IO[str]]:
    """Open a UTF-8 text file, packed or not, without the byte order mark that Excel writes."""
    binary: Any = _Unpacked(path, who) if path.suffix.lower() == ".gz" else path.open("rb")
    with io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as file:
        try:
            yield file
        except UnicodeDecodeError as error:
            got = f"{error.reason} at byte {error.start}"
            raise FileError(who, "text in UTF-8", path, got, "save it as UTF-8") from None
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise FileError(who, "an undamaged gzip file", path, f"which is damaged: {error}") from None


def _read_lines(path: Path, who: str) -> Table:
    """Read one JSON object per line."""
    rows = []
    what = "one JSON object in each line"
    with open_text(path, who) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                place = f"line {number}, character {error.pos + 1}"
                raise FileError(who, what, path, f"which is not JSON at {place}") from None
            except (ValueError, RecursionError):  # a number with too many digits, or extreme nesting
                raise FileError(who, what, path, f"which Python cannot read in line {number}") from None
            if not isinstance(row, dict):
                raise FileError(who, what, path, f"line {number}: {line[:40]!r}")
            rows.append(row)
    return _as_columns(rows)


def _read_json(path: Path, who: str) -> Table:
    """Read one array of JSON objects, or one object per line."""
    with open_text(path, who) as file:
        while (start := file.read(1)).isspace():
            pass
    if start != "[":
        return _read_lines(path, who)
    with open_text(path, who) as file:
        text = file.read()  # outside of the try below: errors of decoding have their own reason
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError):
        raise FileError(who, "an array of JSON objects", path, "which is not JSON") from None
    if not all(isinstance(row, dict) for row in rows):
        raise FileError(who, "an array of JSON objects", path, "which contains other values")
    return _as_columns(rows)


def _as_columns(rows: list[dict[str, Any]]) -> Table:
    """Return rows as columns; missing keys become None."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [row.get(name) for row in rows] for name in names}


def _read_trec(path: Path, who: str) -> Table:
    """Read TREC's qrels (query, 0, document, grade) or a run (query, Q0, document, rank, score, tag)."""
    names = {4: ("query_id", None, "doc_id", "relevance"), 6: ("query_id", None, "doc_id", "rank", "score", None)}
    columns: dict[str, list[Any]] = {}
    width = 0
    with open_text(path, who) as file:
        for number, line in enumerate(file, 1):
            fields = line.split()
            width = width or len(fields)
            if fields and (len(fields) != width or width not in names):
                got = f"{len(fields)} in line {number}"
                raise FileError(who, "4 fields (qrels) or 6 (a run) in each line", path, got)
            for name, field in zip(names.get(width, ()), fields, strict=False):
                if name is not None:
                    columns.setdefault(name, []).append(field)
    return columns


def _read_csv(path: Path, delimiter: str, who: str) -> Table:
    """Read CSV or TSV."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with open_text(path, who) as file:
        reader = csv.reader(
            file, delimiter=delimiter, quoting=csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
        )
        try:
            return _columns_of(reader, path, who)
        except csv.Error as error:
            raise ArgumentError(who, "rows of fields", f"{path} line {reader.line_num}: {error}") from None


def _columns_of(reader: Any, path: Path, who: str) -> Table:
    """Return the rows of a CSV reader as columns."""
    header: list[str] = next(reader, [])
    if len(set(header)) != len(header):
        fix = "add a first line with the names of the columns if there is none"
        raise ArgumentError(who, "distinct column names in the first line", f"{header} in {path}", fix)
    columns: list[list[Any]] = [[] for _ in header]
    for row in reader:
        if not row:  # an empty line
            continue
        if len(row) != len(header):
            raise ArgumentError(
                who, f"{len(header)} fields in each row", f"{len(row)} in {path} line {reader.line_num}"
            )
        for column, value in zip(columns, row, strict=True):
            column.append(value)
    return dict(zip(header, columns, strict=True))


def _read_parquet(path: Path, who: str) -> Table:
    """Read a Parquet file or a folder partitioned by the values of a column."""
    parquet = optional("pyarrow.parquet", "Parquet", extra="text")
    with _whole("Parquet file", path, who):
        table = parquet.read_table(path)
    return {name: table[name].to_pylist() for name in table.column_names}


def _read_shards(path: Path, shards: list[Path], who: str) -> Table:
    """Read the files of a folder as one table."""
    tables = [read_table(file, who) for file in shards]
    names = list(tables[0])
    for file, table in zip(shards, tables, strict=True):
        if set(table) != set(names):
            raise FileError(who, f"files with the same columns in {path}", file, f"which has {sorted(table)}")
    return {name: [value for table in tables for value in table[name]] for name in names}


def column_of(dataset: Any, name: str) -> list[Any]:
    """Return a column of a Hugging Face data set as a list, at once: one row after another takes ten times as long."""
    return list(dataset[name][:])


def _read_folder(path: Path, who: str) -> Table:
    """Read a folder: a saved data set, shards of a table, or images by class."""
    if (path / "dataset_dict.json").exists():
        splits = sorted(file.parent.name for file in path.glob("*/dataset_info.json"))
        fix = f"give the folder of one: {path / splits[0]}" if splits else None
        raise ArgumentError(who, f"one split of {path}", str(splits), fix)
    if (path / "dataset_info.json").exists():
        load = optional("datasets", "A saved data set", extra="text").load_from_disk
        with _whole("saved data set", path, who, "which is damaged"):
            dataset = load(str(path))
            return {name: column_of(dataset, name) for name in dataset.column_names}
    if shards := _files_of(path, table_suffixes):
        return _read_shards(path, shards, who)
    if any(path.rglob("*.parquet")):  # partitioned: one folder for each value of a column
        return _read_parquet(path, who)
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in image_suffixes)
    if not files:
        raise ArgumentError(who, "a saved data set, table files or images", f"{path}, which has none")
    names = [str(file.relative_to(path)) for file in files]
    groups = [str(Path(name).parent) for name in names]
    return {"id": names, "image": [str(file) for file in files], "label": groups}
