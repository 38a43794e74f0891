"""Files that are written whole or not at all, JSON, and locks."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from hardneg.core.errors import Damaged, DiskFull, FileError, NotWritten
from hardneg.io.sealed import checked, with_checksum

_no_room = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
go_on = "make room, then run the same command again"
"""The advice of verbs that go on by themselves; runs have --resume."""


def write_atomically(
    path: Path, write: Callable[[BinaryIO], object], advice: str = "make room, then use --resume"
) -> None:
    """Writes beside the file, then replaces it: readers see the old content or the new, never a part.

    ``advice`` says how to go on once a full disk has room again.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        with partial.open("xb") as file:  # x: a link that someone left under this name is not followed
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        _keep_name(path.parent)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        cause = _cause_of(error)
        if cause is None:
            raise
        if isinstance(cause, OSError):
            raise disk_failure(path, cause, advice) from error
        raise cause from error


def _keep_name(folder: Path) -> None:
    """Writes the folder itself to the disk: else a power failure could bring the old file back after newer ones."""
    with suppress(OSError):  # not every system can open a folder
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def check_folder(path: Path) -> None:
    if any(part.is_file() for part in (path, *path.parents)):
        raise FileError("--out", "a folder", path, got="where there is a file")


def disk_failure(path: Path, cause: OSError, advice: str) -> NotWritten:
    """The error of the disk, with the advice where there was no room."""
    if isinstance(cause, NotWritten):
        return cause
    reason = cause.strerror or str(cause)
    if cause.errno in _no_room:
        return DiskFull(path, cause.errno, reason, advice)
    return NotWritten(path, cause.errno, reason)


def _cause_of(error: BaseException | None) -> OSError | KeyboardInterrupt | None:
    """The error of the disk, or Ctrl-C; torch.save may bring either as the context of an error of its own."""
    while error is not None and not isinstance(error, (OSError, KeyboardInterrupt)):
        error = error.__cause__ or error.__context__
    return error


def write_json(path: Path, value: Any, advice: str = "make room, then use --resume") -> None:
    """Writes JSON, whole or not at all; an object carries its checksum."""
    value = without_nan(value)
    value = with_checksum(value) if isinstance(value, dict) else value
    text = json.dumps(value, indent=1, default=str, allow_nan=False) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()), advice)


def without_nan(value: Any) -> Any:
    """None for what is not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {name: without_nan(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parse_json(text: str | bytes) -> Any:
    """As ``json.loads``, but NaN, infinity, numbers beyond a float and endless nesting are a ValueError.

    ``write_json`` writes none of them, so they are damage.
    """
    try:
        return json.loads(text, parse_constant=_not_json, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _finite(text: str) -> float:
    return float(text) if math.isfinite(float(text)) else _not_json(text)


def _not_json(text: str) -> Any:
    raise ValueError(f"{text[:40]} is not a number of JSON")


def read_json(path: Path, advice: str, *, who: str = "hardneg", kind: type = dict) -> Any:
    """The content of a file that ``write_json`` wrote, without its checksum.

    Raises ``Damaged`` if it is not JSON, not of this kind, or does not have its checksum; ``advice`` is the fix.
    """
    try:
        value = parse_json(path.read_bytes())
    except (ValueError, IsADirectoryError) as error:
        raise Damaged(who, "JSON", path, got=" ".join(str(error).split()), fix=advice) from None
    if not isinstance(value, kind):
        raise Damaged(who, "JSON", path, got=f"it holds no {kind.__name__}", fix=advice)
    return checked(value, who, path, advice)


def lock(file: TextIO) -> bool:
    """Whether the file is now locked for this process. Where the system or the disk has no locks, it counts as so."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return True
    return True
