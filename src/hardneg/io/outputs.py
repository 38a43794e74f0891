"""Rules for outputs: never overwrite an input or a file of others, and replace whole folders at once.

``check_output`` runs before the work of a command; ``swap_in`` puts a finished folder in its place; ``sealed_page`` and
``is_sealed_page`` mark the pages that hardneg has written, so that only those are replaced.
"""

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
    """Raise unless a command may write its output to ``path``.

    Paths are compared as files, so links, other spellings and other cases of a name are recognised.

    Args:
        who: Caller, for errors.
        path: The output.
        reads: Files and folders that the command reads.
        overwrite: Whether an existing output of others may be replaced.
        is_ours: Whether an existing output was written by this command; called only if there is one.

    Raises:
        FileError: If the output is, contains or lies in an input, or something else has written it.
        NotWritten: If there is no permission to write to its folder.
    """
    _check_permission(path)
    what, fix = "an output apart from its inputs", "use another --out"
    for read in reads:
        if same_file(path, read):
            raise FileError(who, what, path, f"which is the input {read}", fix)
        if _inside(read, path) or _inside(path, read):
            how = "contains" if _inside(read, path) else "lies in"
            raise FileError(who, what, path, f"which {how} the input {read}", fix)
    if path.exists() and not overwrite and not is_ours():
        what = "an output that does not exist yet, or an earlier output of this command"
        raise FileError(who, what, path, "which something else has written", "pass --overwrite to replace it")


def _check_permission(path: Path) -> None:
    """Raise before the work starts if its result could not be written."""
    folder = next(one for one in (*path.absolute().parents, Path(path.anchor)) if one.exists())
    if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
        raise NotWritten(path, errno.EACCES, f"no permission to write to {folder}", "use another --out")


def same_file(first: Path, second: Path) -> bool:
    """Return whether two paths refer to the same file, even if their names differ."""
    if os.path.realpath(first) == os.path.realpath(second):
        return True
    return first.exists() and second.exists() and os.path.samefile(first, second)


def _inside(inner: Path, outer: Path) -> bool:
    """Return whether a path lies in an existing folder, also through links."""
    return outer.is_dir() and any(same_file(part, outer) for part in Path(os.path.realpath(inner)).parents)


def swap_in(new: Path, path: Path) -> None:
    """Move a finished file or folder to ``path``, replacing an existing one in a single step.

    An old folder ends up at ``new`` if the system can exchange two names atomically; otherwise it is deleted.
    """
    if not (path.is_dir() and not path.is_symlink()):
        os.replace(new, path)
    elif not _exchange(new, path):
        old = old_name(path)
        os.replace(path, old)
        os.replace(new, path)
        shutil.rmtree(old, ignore_errors=True)


def old_name(path: Path) -> Path:
    """Return the temporary name of a folder that is being replaced."""
    return path.with_name(f".{path.name}.old")


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names with Linux's renameat2; False if the system or the disk cannot do it."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    found: int = rename(here, os.fsencode(first), here, os.fsencode(second), exchange)
    return found == 0


def sealed_page(text: str) -> str:
    """Return an HTML page with the checksum of its text in a final comment."""
    return f"{text}{_page_mark}{hashlib.sha256(text.encode()).hexdigest()} -->\n"


def is_sealed_page(path: Path) -> bool:
    """Whether a page was made by ``sealed_page`` and is unchanged."""
    content = path.read_bytes().decode("utf-8", "replace")
    text, mark, _ = content.rpartition(_page_mark)
    return bool(mark) and sealed_page(text) == content


def is_sealed_json(path: Path) -> bool:
    """Whether a JSON file has the checksum of its content."""
    try:
        record = parse_json(path.read_bytes())
        return isinstance(record, dict) and CHECKSUM in record and checked(record, "", path, "") is not None
    except (ValueError, Damaged):
        return False
