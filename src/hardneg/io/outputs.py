"""Where a command may write: never to what it reads, and over a file only where that is its own; whole folders."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from hardneg.core.errors import Damaged, FileError, NotWritten
from hardneg.io.files import parse_json
from hardneg.io.sealed import CHECKSUM, checked

_page_mark = "<!-- hardneg-sha256:"


def check_output(
    who: str, path: Path, reads: Sequence[Path], *, overwrite: bool, is_ours: Callable[[], bool] = lambda: False
) -> None:
    """Raises if an output is, holds or lies in what is read, or would replace a file that ``who`` has not made, or if
    its folder cannot be written to.

    Paths are compared as files, so that links, other spellings and other cases of a name count. ``is_ours`` is called
    where there is such a file already.
    """
    _check_permission(path)
    what, fix = "an output that is none of its inputs", "use another --out"
    for read in reads:
        if same_file(path, read):
            raise FileError(who, what, path, f"which is the input {read}", fix)
        if _inside(read, path) or _inside(path, read):
            how = "holds" if _inside(read, path) else "lies in"
            raise FileError(who, what, path, f"which {how} the input {read}", fix)
    if path.exists() and not overwrite and not is_ours():
        what = "an output that does not exist, or that it has made itself"
        raise FileError(who, what, path, "which something else has written", "pass --overwrite to replace it")


def _check_permission(path: Path) -> None:
    """Raises before the work where its result could not be written."""
    folder = next(one for one in (*path.absolute().parents, Path(path.anchor)) if one.exists())
    if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
        raise NotWritten(path, errno.EACCES, f"no permission to write to {folder}", "use another --out")


def same_file(first: Path, second: Path) -> bool:
    """By whatever names."""
    if os.path.realpath(first) == os.path.realpath(second):
        return True
    return first.exists() and second.exists() and os.path.samefile(first, second)


def _inside(inner: Path, outer: Path) -> bool:
    """Whether a path lies in a folder that exists, by whatever names."""
    return outer.is_dir() and any(same_file(part, outer) for part in Path(os.path.realpath(inner)).parents)


def swap_in(new: Path, path: Path) -> None:
    """Puts a file or folder at a path, whole; a folder that was there is left at ``new`` where the system can exchange
    two names at once, else it is removed.
    """
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


def sealed_page(text: str) -> str:
    """An HTML page with the checksum of its text in a comment at its end."""
    return f"{text}{_page_mark}{hashlib.sha256(text.encode()).hexdigest()} -->\n"


def is_sealed_page(path: Path) -> bool:
    """Whether a page is one that ``sealed_page`` has made, unchanged."""
    content = path.read_bytes().decode("utf-8", "replace")
    text, mark, _ = content.rpartition(_page_mark)
    return bool(mark) and sealed_page(text) == content


def is_sealed_json(path: Path) -> bool:
    """Whether a JSON file carries the checksum of its content."""
    try:
        record = parse_json(path.read_bytes())
        return isinstance(record, dict) and CHECKSUM in record and checked(record, "", path, "") is not None
    except (ValueError, Damaged):
        return False
