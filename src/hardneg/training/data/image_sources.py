"""Where encoded images come from: files, parts of archives, rows of other libraries' data sets; and their headers.

A ``Source`` returns the bytes of an image by position, and is small enough to be copied to every worker: paths are
kept in one array of bytes, not in a list. ``read_headers`` looks at both ends of each image without decoding it, which
finds sizes, damage and a digest of the content. lazy_images.py decodes what it needs; image_files.py builds sources.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np

from hardneg.core.errors import ArgumentError, optional
from hardneg.io.arrays import Array
from hardneg.io.terminal import Bar
from hardneg.training.data.decoding import read_header

BLOCK = 4096
"""Bytes at each end of an encoded image that ``read_headers`` reads."""
_CHUNK = 256
_THREADS = 16


class Ends(NamedTuple):
    """The first and last bytes of an encoded image.

    Attributes:
        head: The first ``BLOCK`` bytes, or all.
        tail: The last ``BLOCK`` bytes, or all after the head.
        length: Number of bytes of the image.
    """

    head: bytes
    tail: bytes
    length: int

    @classmethod
    def of(cls, data: bytes | memoryview) -> Ends:
        """Return the ends of bytes in memory."""
        return cls(bytes(data[:BLOCK]), bytes(data[max(BLOCK, len(data) - BLOCK) :]), len(data))

    def digest(self) -> int:
        """Return 64 bits that change with the length and with the content of both ends."""
        found = hashlib.blake2b(self.head, digest_size=8)
        found.update(self.tail)
        found.update(self.length.to_bytes(8, "little"))
        return int.from_bytes(found.digest(), "little", signed=True)


class Source(Protocol):
    """Images by position, not decoded."""

    def __len__(self) -> int: ...

    def name(self, position: int) -> str:
        """Return where an image comes from, for messages."""

    def read(self, position: int) -> Any:
        """Return the bytes of an image; sources of other libraries may return a PIL image or an array."""

    def ends(self, position: int) -> Ends:
        """Return the first and last bytes of an image."""


class Strings(Sequence[str]):
    """Texts in one array of bytes: a list of a million paths would take 100 MB, and again in every worker.

    >>> paths = Strings(["a/0.jpg", "b/1.jpg"])
    >>> len(paths), paths[1]
    (2, 'b/1.jpg')
    """

    def __init__(self, texts: Iterable[str]) -> None:
        encoded = [os.fsencode(text) for text in texts]
        self._ends = np.cumsum([0, *map(len, encoded)])
        self._bytes = b"".join(encoded)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, position: Any) -> Any:
        if isinstance(position, slice):
            return [self[i] for i in range(*position.indices(len(self)))]
        if not -len(self) <= position < len(self):
            raise IndexError(position)
        position %= len(self)
        return os.fsdecode(self._bytes[self._ends[position] : self._ends[position + 1]])


@dataclass(frozen=True, eq=False)
class Files:
    """Image files below a folder.

    Attributes:
        folder: The folder.
        names: Path of each file relative to it; absolute paths are kept.
    """

    folder: Path
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.names)

    def name(self, position: int) -> str:
        """Return the path of a file."""
        return os.path.join(self.folder, self.names[position])

    def read(self, position: int) -> bytes:
        """Return the content of a file; raise ``ArgumentError`` if it cannot be read."""
        try:
            with open(self.name(position), "rb") as file:
                return file.read()
        except OSError as error:
            raise _unreadable(self.name(position), error) from error

    def ends(self, position: int) -> Ends:
        """Return the first and last bytes of a file."""
        try:
            with open(self.name(position), "rb", buffering=0) as file:
                length, head = os.fstat(file.fileno()).st_size, file.read(BLOCK)
                file.seek(max(BLOCK, length - BLOCK))
                return Ends(head, file.read(BLOCK), length)
        except OSError as error:
            raise _unreadable(self.name(position), error) from error


def _unreadable(path: str, error: OSError) -> ArgumentError:
    """Return the error for a file that cannot be opened or read."""
    return ArgumentError("data", "readable images", f"{path}: {error.strerror or error}")


@dataclass(frozen=True, eq=False)
class HubRows:
    """Images in a column of a ``datasets.Dataset``, whose Arrow files stay on disk.

    Attributes:
        rows: The data set, with format "arrow".
        column: The column of images.
        place: Name of the data set.
    """

    rows: Any
    column: str
    place: str

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, position: int) -> str:
        """Return the number of a row."""
        return f"row {position} of {self.place}"

    def read(self, position: int) -> bytes:
        """Return the bytes of an image, which may be in a file of its own."""
        found = self._buffer(position)
        return found if isinstance(found, bytes) else found.tobytes()

    def ends(self, position: int) -> Ends:
        """Return the first and last bytes of an image, without reading the others."""
        return Ends.of(self._buffer(position))

    def _buffer(self, position: int) -> bytes | memoryview:
        image = self.rows[position][self.column][0]
        if image["bytes"].is_valid:
            return memoryview(image["bytes"].as_buffer())
        return Files(Path(), [image["path"].as_py()]).read(0)


@dataclass(frozen=True, eq=False)
class Joined:
    """Several sources, one after the other.

    Attributes:
        parts: The sources.
    """

    parts: Sequence[Source]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def name(self, position: int) -> str:
        """Return the name of an image in its part."""
        part, inside = self._place(position)
        return part.name(inside)

    def read(self, position: int) -> Any:
        """Return an image of one of the parts."""
        part, inside = self._place(position)
        return part.read(inside)

    def ends(self, position: int) -> Ends:
        """Return the first and last bytes of an image of one of the parts."""
        part, inside = self._place(position)
        return part.ends(inside)

    def _place(self, position: int) -> tuple[Source, int]:
        for part in self.parts:
            if position < len(part):
                return part, position
            position -= len(part)
        raise IndexError(position)


class Headers(NamedTuple):
    """The headers of all images of a source.

    Attributes:
        sizes: Width and height of each image as it is shown, int32 [n, 2]; 0 where the header cannot be read.
        grey: Whether each image has one channel, bool [n].
        digests: Digest of both ends of each image, int64 [n].
        lengths: Bytes of each image, int64 [n].
        problems: Error of each unreadable image, by position.
    """

    sizes: Annotated[Array, "n 2"]
    grey: Annotated[Array, "n"]
    digests: Annotated[Array, "n"]
    lengths: Annotated[Array, "n"]
    problems: dict[int, ArgumentError]


def read_headers(source: Source, advance: Bar | None = None) -> Headers:
    """Read the headers of all images of a source, in threads.

    Args:
        source: The images.
        advance: Called with the number of images read since the last call.
    """
    n = len(source)
    found = Headers(np.zeros((n, 2), np.int32), np.zeros(n, bool), np.zeros(n, np.int64), np.zeros(n, np.int64), {})
    optional("PIL.Image", "data", extra="vision").init()  # once, before the threads

    def read(start: int) -> int:
        for i in range(start, min(start + _CHUNK, n)):
            try:
                ends = source.ends(i)
                header = read_header(ends.head, ends.tail, lambda: source.read(i), source.name(i))  # noqa: B023
                found.sizes[i], found.grey[i] = header[:2], header.grey
                found.digests[i], found.lengths[i] = ends.digest(), ends.length
            except ArgumentError as error:
                found.problems[i] = error
        return min(_CHUNK, n - start)

    for done in mapped(read, range(0, n, _CHUNK), _THREADS):
        if advance is not None:
            advance(done)
    return found


def mapped(function: Callable[[Any], Any], items: Sequence[Any], threads: int) -> Iterator[Any]:
    """Apply a function to items in threads, in order; without threads for a single one."""
    if min(threads, len(items)) <= 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(min(threads, len(items))) as pool:
        yield from pool.map(function, items)
