"""Atomic writes, JSON with a checksum, and lock files.

``write_atomically`` is behind every output of the package; ``write_json`` and ``read_json`` store objects;
``locked`` keeps two processes from writing one output. Checksums themselves are in ``sealed``.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from hardneg.core.errors import ArgumentError, Damaged, DiskFull, FileError, InUse, NotWritten
from hardneg.io.sealed import checked, with_checksum

_full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_without_locks = (errno.ENOLCK, errno.EOPNOTSUPP)  # network disks without a lock service
run_again = "free disk space, then run the same command again"
"""Advice of commands that resume by themselves; training runs need --resume."""
_resume = "free disk space, then use --resume"


def write_atomically(path: Path, write: Callable[[BinaryIO], object], advice: str = _resume) -> None:
    """Write a file as a whole or not at all: readers see the old content or the new, never a part.

    Args:
        path: The file to create or replace; missing folders are created.
        write: Writes the content to an open binary file.
        advice: How to resume once a full disk has free space, for errors.

    Raises:
        NotWritten: If the disk refuses; ``DiskFull`` if it is full. The old file stays.
    """
    # A random name, not the process id: containers that share a folder often have equal ids.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:16]}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("xb") as file:  # x does not follow a link that exists under this name
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        _sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        cause = _cause_of(error)
        if cause is None:
            raise
        if isinstance(cause, OSError):
            raise disk_failure(path, cause, advice) from error
        raise cause from error


def _sync_folder(folder: Path) -> None:
    """Flush the folder to the disk: after a power failure the old file could return although newer ones exist."""
    with suppress(OSError):  # not every system can open a folder
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def output_folder(out: str | Path) -> Path:
    """Return the path of an output folder.

    Raises:
        ArgumentError: If the path is empty.
        FileError: If a part of the path is a file.
    """
    if not str(out).strip():
        raise ArgumentError("--out", "the path of a folder", repr(out), "use --out . for the current folder")
    path = Path(out)
    if any(part.is_file() for part in (path, *path.parents)):
        raise FileError("--out", "a folder", path, got="which is a file or lies below one")
    return path


def check_free(who: str, folder: Path, needed: int, purpose: str, fix: str) -> None:
    """Raise if the disk of a folder has fewer than ``needed`` bytes free.

    Args:
        who: Caller, for errors.
        folder: A folder on the disk.
        needed: Bytes needed.
        purpose: Use of the bytes, such as "to join the files of corpus/".
        fix: Advice.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        got = f"where {free / 2**30:.1f} GiB are free"
        raise FileError(who, f"{needed / 2**30:.1f} GiB {purpose}", folder, got, fix)


def disk_failure(path: Path, cause: OSError, advice: str) -> NotWritten:
    """Return the error for a file that could not be written, with the advice if the disk is full."""
    if isinstance(cause, NotWritten):
        return cause
    reason = cause.strerror or str(cause)
    if cause.errno in _full:
        return DiskFull(path, cause.errno, reason, advice)
    return NotWritten(path, cause.errno, reason)


def _cause_of(error: BaseException | None) -> OSError | KeyboardInterrupt | None:
    """Return the underlying disk error or Ctrl-C; torch.save raises its own error with either as the context."""
    while error is not None and not isinstance(error, (OSError, KeyboardInterrupt)):
        error = error.__cause__ or error.__context__
    return error


def write_json(path: Path, value: Any, advice: str = _resume) -> None:
    """Write JSON atomically; an object gets a checksum, and NaN and infinity become null."""
    value = without_nan(value)
    value = with_checksum(value) if isinstance(value, dict) else value
    text = json.dumps(value, indent=1, default=str, allow_nan=False) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()), advice)


def without_nan(value: Any) -> Any:
    """Return the value with None for NaN and infinity, which JSON does not have.

    >>> without_nan({"loss": float("nan"), "steps": (1, 2)})
    {'loss': None, 'steps': [1, 2]}
    """
    if isinstance(value, dict):
        return {name: without_nan(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parse_json(text: str | bytes) -> Any:
    """Parse JSON strictly: NaN, infinity, numbers beyond float64 and extreme nesting raise ValueError.

    ``write_json`` writes none of them, so they are signs of damage.
    """
    try:
        return json.loads(text, parse_constant=_not_json, parse_float=_finite, parse_int=_whole)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _finite(text: str) -> float:
    """Return a float, or raise if it is not finite."""
    return float(text) if math.isfinite(float(text)) else _not_json(text)


def _whole(text: str) -> int:
    """Return an int within the range of float64, so that later arithmetic with floats raises no OverflowError."""
    return int(text) if math.isfinite(float(text)) else int(_not_json(text))


def _not_json(text: str) -> Any:
    """Raise for a number that JSON cannot represent."""
    raise ValueError(f"{text[:40]} is not a valid JSON number")


def read_json(path: Path, advice: str, *, who: str = "hardneg") -> dict[str, Any]:
    """Return the object in a file that ``write_json`` wrote, without its checksum.

    Args:
        path: The file.
        advice: Fix, for errors.
        who: Caller, for errors.

    Raises:
        Damaged: If the file is not JSON, not an object, or its checksum differs.
    """
    try:
        value = parse_json(path.read_bytes())
    except (ValueError, IsADirectoryError) as error:
        raise Damaged(who, "JSON", path, got=" ".join(str(error).split()), fix=advice) from None
    if not isinstance(value, dict):
        raise Damaged(who, "JSON", path, got="it is not a JSON object", fix=advice)
    found: dict[str, Any] = checked(value, who, path, advice)
    return found


@contextmanager
def locked(
    path: Path,
    who: str,
    *,
    patience: float = 0.0,
    fix: str = "wait for it, or use another output",
    remove: bool = False,
) -> Iterator[None]:
    """Hold the lock file at ``path`` inside the block.

    The file is created if it is missing and never opened through a link. The lock is the system's, so it ends with the
    process, also after a kill. On a disk without locks, nothing is locked.

    Args:
        path: The lock file.
        who: Caller, for errors.
        patience: Seconds to wait for another process.
        fix: Advice, for errors.
        remove: Whether to delete the file while the lock is still held; a process that waits for it then creates a new
            one.

    Raises:
        InUse: If another process still holds the lock after ``patience`` seconds.
        FileError: If ``path`` is a link, or not a regular file.
    """
    from filelock import FileLock, Timeout

    if path.is_symlink() or (path.exists() and not path.is_file()):
        got = "a link" if path.is_symlink() else "not a regular file"
        raise FileError(who, "to create its lock file", path, got=got, fix=f"delete {path}")
    lock = FileLock(path)
    try:
        lock.acquire(timeout=patience)
    except Timeout:
        raise InUse(who, "an output for itself", path.parent, fix=fix) from None
    except OSError as error:
        if error.errno not in _without_locks:
            raise
    try:
        yield
    finally:
        if remove:
            with suppress(PermissionError):  # Windows cannot delete an open file
                path.unlink(missing_ok=True)
        lock.release()
