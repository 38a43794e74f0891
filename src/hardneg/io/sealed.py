"""Checksums inside stored files, so that damage is found when they are read.

Binary files (checkpoints, arrays) end with a line ``hardneg-sha256:<digest of all bytes before it>``: readers of .pt,
.npz and .npy files ignore bytes after their content. If that line is missing, the end of the file was lost. JSON
objects have a key ``"checksum"``, and each line of a .jsonl file is such an object. A truncated JSON file cannot be
parsed, so one without a checksum is accepted as it is.

Binary files: ``sealing`` and ``check_seal``. JSON: ``with_checksum`` and ``checked``, called by ``files``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from hardneg.core.errors import Damaged, FileError, warn_once

_mark = b"\nhardneg-sha256:"
_length = len(_mark) + 64 + 1  # with 64 hexadecimal digits and a newline
CHECKSUM = "checksum"


def sealing(write: Callable[[Any], object]) -> Callable[[BinaryIO], None]:
    """Return a writer for ``write_atomically`` that appends the checksum to the output of ``write``."""

    def write_and_seal(file: BinaryIO) -> None:
        write(file)
        file.flush()
        file.seek(0, 2)
        file.write(_mark + digest_of(Path(file.name)).encode() + b"\n")

    return write_and_seal


def digest_of(path: Path, length: int | None = None) -> str:
    """Return the sha256 of a file, or of its first ``length`` bytes."""
    found, left = hashlib.sha256(), length if length is not None else path.stat().st_size
    with path.open("rb") as file:
        while left > 0 and (block := file.read(min(1 << 20, left))):
            found.update(block)
            left -= len(block)
    return found.hexdigest()


def check_seal(path: Path, who: str, fix: str, *, required: bool = True) -> None:
    """Raise ``Damaged`` unless the file ends with the checksum of its content.

    Args:
        path: The file.
        who: Caller, for errors.
        fix: Advice, for errors.
        required: Whether a file without a checksum is damaged; False for formats that others write too and that reveal
            a lost end themselves.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - _length))
        end = file.read()
    if not (end.startswith(_mark) and end.endswith(b"\n")):
        if required:
            raise Damaged(who, "an undamaged file", path, got="the checksum at its end is missing", fix=fix)
    elif end[len(_mark) : -1].decode("ascii", "replace") != digest_of(path, size - _length):
        raise Damaged(who, "an undamaged file", path, got="its checksum differs", fix=fix)


def is_whole(path: Path, who: str, then: str, read: Callable[[Path], object]) -> bool:
    """Whether a file exists, has its checksum and can be read; warns about a damaged one.

    Args:
        path: The file.
        who: Caller, for the warning.
        then: What happens to a damaged file, for the warning.
        read: Reads the file, and raises ``FileError`` if it cannot.
    """
    if not path.exists():
        return False
    try:
        check_seal(path, who, then)
        read(path)
    except FileError:
        warn_once(f"damaged {path}", str(Damaged(who, "an undamaged file", path, fix=then)))
        return False
    return True


def with_checksum(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with the checksum of its JSON text, replacing an earlier one."""
    rest = {name: value for name, value in record.items() if name != CHECKSUM}
    return {**rest, CHECKSUM: _checksum(rest)}


def checked(record: Any, who: str, path: Path, fix: str) -> Any:
    """Return the record without its checksum.

    Raises:
        Damaged: If the checksum differs, or the key ``checksum`` itself was damaged.
    """
    if not isinstance(record, dict) or not record:
        return record
    if CHECKSUM not in record:
        *names, last = record
        if record[last] == _checksum({name: record[name] for name in names}):  # the key of the checksum is damaged
            raise Damaged(who, "an undamaged file", path, got=f"{last!r} instead of {CHECKSUM!r}", fix=fix)
        return record
    rest = {name: value for name, value in record.items() if name != CHECKSUM}
    if record[CHECKSUM] != _checksum(rest):
        raise Damaged(who, "an undamaged file", path, got="its checksum differs", fix=fix)
    return rest


def _checksum(record: dict[str, Any]) -> str:
    """Return the checksum of a record as it will be read back: keys are text, NaN is null, a tuple is a list."""
    read_back = json.loads(json.dumps(record, default=str), parse_constant=lambda _: None)
    return hashlib.sha256(json.dumps(read_back, sort_keys=True).encode()).hexdigest()[:16]
