"""Files that are written whole or not at all, JSON, and locks."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from hardneg.core.errors import ArgumentError, Damaged, DiskFull, FileError, InUse, NotWritten
from hardneg.io.sealed import checked, with_checksum

_no_room = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
run_again = "make room, then run the same command again"
"""The advice of commands that resume by themselves; runs have --resume."""


def write_atomically(
    path: Path, write: Callable[[BinaryIO], object], advice: str = "make room, then use --resume"
) -> None:
    """Writes beside the file, then replaces it: readers see the old content or the new, never a part.

    ``advice`` says how to resume once a full disk has free space.
    """
    # Not the number of the process: in containers that share a folder it is often the same.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:16]}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
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


def output_folder(out: str | Path) -> Path:
    """The path of an output folder; raises if it is empty or leads through a file."""
    if not str(out).strip():
        raise ArgumentError("--out", "the path of a folder", repr(out), "use --out . for the current one")
    path = Path(out)
    if any(part.is_file() for part in (path, *path.parents)):
        raise FileError("--out", "a folder", path, got="where there is a file")
    return path


def check_free(who: str, folder: Path, needed: int, purpose: str, fix: str) -> None:
    """Raises where the disk of a folder has no room for so many bytes."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        got = f"where {free / 2**30:.1f} GiB are free"
        raise FileError(who, f"{needed / 2**30:.1f} GiB {purpose}", folder, got, fix)


def disk_failure(path: Path, cause: OSError, advice: str) -> NotWritten:
    """The error of the disk, with the advice if it is full."""
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
        return json.loads(text, parse_constant=_not_json, parse_float=_finite, parse_int=_whole)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _finite(text: str) -> float:
    return float(text) if math.isfinite(float(text)) else _not_json(text)


def _whole(text: str) -> int:
    """An int within the range of a float, on which arithmetic with floats raises no OverflowError."""
    return int(text) if math.isfinite(float(text)) else int(_not_json(text))


def _not_json(text: str) -> Any:
    raise ValueError(f"{text[:40]} is not a number of JSON")


def read_json(path: Path, advice: str, *, who: str = "hardneg") -> dict[str, Any]:
    """The object in a file that ``write_json`` wrote, without its checksum.

    Raises ``Damaged`` if it is not JSON, no object, or does not have its checksum; ``advice`` is the fix.
    """
    try:
        value = parse_json(path.read_bytes())
    except (ValueError, IsADirectoryError) as error:
        raise Damaged(who, "JSON", path, got=" ".join(str(error).split()), fix=advice) from None
    if not isinstance(value, dict):
        raise Damaged(who, "JSON", path, got="it holds no dict", fix=advice)
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
    """Holds the lock file at ``path``; raises ``InUse`` if another process still has it after ``patience`` seconds.

    The file is created if it is missing, never truncated, and never opened through a link. ``remove`` takes it away
    while it is still held: a process that then gets the lock of the file that is gone opens the new one.
    """
    until = time.monotonic() + patience
    while True:
        with _opened_for_lock(path, who) as file:
            if _lock(file):
                if not _is_at(path, file):
                    continue
                try:
                    yield
                finally:
                    if remove:
                        with suppress(PermissionError):  # Windows deletes no file that is open
                            path.unlink(missing_ok=True)
                return
        if time.monotonic() > until:
            raise InUse(who, "an output for itself", path.parent, fix=fix)
        time.sleep(0.05)


def _is_at(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False


def _opened_for_lock(path: Path, who: str) -> BinaryIO:
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    fix = f"delete {path}"
    if path.is_symlink():  # also where the system has no O_NOFOLLOW
        raise FileError(who, "a lock file of its own", path, got="a link", fix=fix)
    try:
        number = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise FileError(who, "a lock file of its own", path, got=error.strerror, fix=fix) from error
        raise
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise FileError(who, "a lock file of its own", path, got="something that is no file", fix=fix)
    return os.fdopen(number, "rb+")


def _lock(file: BinaryIO) -> bool:
    """Whether the file is now locked for this process. Also True where the system or the disk has no locks."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return True
    return True
