"""Files that are written whole or not at all, JSON, and locks."""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from hardneg.core.errors import FileError, InUse

_no_room = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
go_on = "make room, then run the same command again"
"""The advice of verbs that go on by themselves; runs have --resume."""


def write_atomically(
    path: Path, write: Callable[[BinaryIO], object], advice: str = "make room, then use --resume"
) -> None:
    """Writes beside the file, then replaces it: readers see the old content or the new, never a part.

    ``advice`` says how to go on once a full disk has room again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        cause = _cause_of(error)
        if cause is None:
            raise
        if isinstance(cause, OSError):
            raise disk_failure(path, cause, advice) from error
        raise cause from error


def check_folder(path: Path) -> None:
    if any(part.is_file() for part in (path, *path.parents)):
        raise ValueError(f"--out needs a folder, got {path}, where there is a file.")


def check_output(
    who: str, path: Path, reads: Sequence[Path], *, overwrite: bool, is_ours: Callable[[], bool] = lambda: False
) -> None:
    """Raises if an output is, holds or lies in what is read, or would replace a file that ``who`` has not made.

    Paths are compared as files, so that links, other spellings and other cases of a name count. ``is_ours`` is called
    where there is such a file already.
    """
    for read in reads:
        how = (
            "is"
            if _same(path, read)
            else "holds"
            if _inside(read, path)
            else "lies in"
            if _inside(path, read)
            else None
        )
        if how is not None:
            got = f"{path}, which {how} the input {read}"
            raise FileError(who, "an output that is none of its inputs", path, got, "use another --out")
    if path.exists() and not overwrite and not is_ours():
        what = "an output that does not exist, or one of its own that is unchanged"
        raise FileError(who, what, path, f"{path}, which something else has written", "pass --overwrite to replace it")


def _same(first: Path, second: Path) -> bool:
    if os.path.realpath(first) == os.path.realpath(second):
        return True
    return first.exists() and second.exists() and os.path.samefile(first, second)


def _inside(inner: Path, outer: Path) -> bool:
    """Whether a path lies in a folder that exists, by whatever names."""
    return outer.is_dir() and any(_same(part, outer) for part in Path(os.path.realpath(inner)).parents)


def swap_in(new: Path, path: Path) -> None:
    """Puts a file or folder at a path, whole; a folder that was there is left at ``new`` where the system can exchange
    two names at once, else it is removed."""
    if not (path.is_dir() and not path.is_symlink()):
        os.replace(new, path)
    elif not _exchange(new, path):
        old = old_name(path)
        os.replace(path, old)
        os.replace(new, path)
        shutil.rmtree(old, ignore_errors=True)


def old_name(path: Path) -> Path:
    """Where a folder is for the moment in which another takes its place."""
    return path.with_name(f".{path.name}.old")


def _exchange(first: Path, second: Path) -> bool:
    """Linux's renameat2 with RENAME_EXCHANGE; False where it is missing or the disk cannot do it."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    found: int = rename(here, os.fsencode(first), here, os.fsencode(second), exchange)
    return found == 0


def disk_failure(path: Path, cause: OSError, advice: str) -> OSError:
    """The error of the disk in a sentence, with the advice where there was no room."""
    what = f"{path} could not be written ({cause.strerror or cause}); what was there before is unchanged"
    return OSError(cause.errno, f"{what}; {advice}" if cause.errno in _no_room else what)


def _cause_of(error: BaseException | None) -> OSError | KeyboardInterrupt | None:
    """The error of the disk, or Ctrl-C; torch.save may bring either as the context of an error of its own."""
    while error is not None and not isinstance(error, (OSError, KeyboardInterrupt)):
        error = error.__cause__ or error.__context__
    return error


def write_json(path: Path, value: Any, advice: str = "make room, then use --resume") -> None:
    text = json.dumps(without_nan(value), indent=1, default=str, allow_nan=False) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()), advice)


def without_nan(value: Any) -> Any:
    """None for what is not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {name: without_nan(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path, advice: str) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError:
        raise ValueError(f"{path} is damaged; {advice}.") from None


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
    """Whether the file is now locked for this process. Where the system or the disk has no locks, it counts as so."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return True
    return True
