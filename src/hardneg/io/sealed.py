"""Stored files that carry their own checksum, so that damage is found when they are read.

Binary files (checkpoints, arrays) end with a line ``hardneg-sha256:<digest of all bytes before it>``: readers of .pt,
.npz and .npy files ignore what follows their content. JSON objects carry ``"checksum"``, and each line of a .jsonl file
is such an object. A file without a checksum was written by an older version and passes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from hardneg.core.errors import Damaged

_mark = b"\nhardneg-sha256:"
_length = len(_mark) + 64 + 1
CHECKSUM = "checksum"


def sealing(write: Callable[[Any], object]) -> Callable[[BinaryIO], None]:
    """A writer that appends the checksum, for ``write_atomically``; it reads back what ``write`` has written."""

    def write_and_seal(file: BinaryIO) -> None:
        write(file)
        file.flush()
        file.seek(0, 2)
        file.write(_mark + digest_of(Path(file.name)).encode() + b"\n")

    return write_and_seal


def digest_of(path: Path, length: int | None = None) -> str:
    """The sha256 of a file, or of its first ``length`` bytes."""
    found, left = hashlib.sha256(), length if length is not None else path.stat().st_size
    with path.open("rb") as file:
        while left > 0 and (block := file.read(min(1 << 20, left))):
            found.update(block)
            left -= len(block)
    return found.hexdigest()


def check_seal(path: Path, who: str, fix: str) -> None:
    """Raises ``Damaged`` if the file's content does not have the checksum at its end."""
    size = path.stat().st_size
    if size < _length:
        return
    with path.open("rb") as file:
        file.seek(size - _length)
        end = file.read()
    if end.startswith(_mark) and end[len(_mark) : -1].decode("ascii", "replace") != digest_of(path, size - _length):
        raise Damaged(who, "an undamaged file", path, got="its checksum differs", fix=fix)


def with_checksum(record: dict[str, Any]) -> dict[str, Any]:
    """The record with the checksum of its JSON text."""
    return {**record, CHECKSUM: _checksum(record)}


def checked(record: Any, who: str, path: Path, fix: str) -> Any:
    """The record without its checksum; raises ``Damaged`` if it has another one."""
    if not isinstance(record, dict) or CHECKSUM not in record:
        return record
    rest = {name: value for name, value in record.items() if name != CHECKSUM}
    if record[CHECKSUM] != _checksum(rest):
        raise Damaged(who, "an undamaged file", path, got="its checksum differs", fix=fix)
    return rest


def _checksum(record: dict[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_page_mark = "<!-- hardneg-sha256:"


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
        record = json.loads(path.read_bytes())
        return isinstance(record, dict) and CHECKSUM in record and checked(record, "", path, "") is not None
    except (ValueError, RecursionError):  # Damaged is one
        return False
