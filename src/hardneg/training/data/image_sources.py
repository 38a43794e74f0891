"""Where encoded images come from: files, parts of archives, rows of other libraries' data sets; and their headers.

A ``Source`` returns the bytes of an image by position, and is small enough to be copied to every worker: paths are
kept in one array of bytes, not in a list. ``read_headers`` looks at both ends of each image without decoding it, which
finds sizes, damage and a digest of the content. lazy_images.py decodes what it needs; image_files.py builds sources.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np

from hardneg.core.errors import ArgumentError, FileError, NoFile, optional
from hardneg.io.arrays import Array
from hardneg.io.terminal import Bar
from hardneg.training.data.decoding import Header, read_header

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

    def header(self, position: int, ends: Ends) -> Header:
        """Return size and mode of an image, given its ends; raise ``ArgumentError`` if it is unreadable."""


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


class EncodedImages:
    """Base class for sources of encoded image files."""

    def header(self, position: int, ends: Ends) -> Header:
        """Read the header of an image.

        Args:
            position: Position of the image.
            ends: Its first and last bytes.
        """
        source: Any = self
        return read_header(ends.head, ends.tail, lambda: source.read(position), source.name(position))


@dataclass(frozen=True, eq=False)
class Files(EncodedImages):
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
class Members(EncodedImages):
    """Parts of files: images in uncompressed tar archives, or records of one size.

    Attributes:
        files: The files.
        file_of: File of each image [n].
        offsets: First byte of each image in its file [n].
        lengths: Bytes of each image [n].
        names: Name of each image, or "" for its number.
        planes: Shape [c, w, h] of records that are pixels, not encoded images, with transposed rows and columns.
    """

    files: Sequence[Path]
    file_of: Annotated[Array, "n"]
    offsets: Annotated[Array, "n"]
    lengths: Annotated[Array, "n"]
    names: Sequence[str]
    planes: tuple[int, int, int] | None = None

    @classmethod
    def of(cls, shards: Sequence[Path], suffixes: set[str], advance: Bar) -> tuple[Members, list[str]]:
        """List the images in tar files, with the class of each or "".

        Args:
            shards: The tar files.
            suffixes: Suffixes of images.
            advance: Called after each shard.
        """
        places: list[tuple[int, int, int]] = []
        names: list[str] = []
        classes: list[str] = []
        for number, shard in enumerate(shards):
            images, labels = _listed(shard, suffixes)
            places += [(number, offset, length) for offset, length in images.values()]
            names += [f"{key} in {shard}" for key in images]
            classes += [labels.get(key, "") for key in images]
            advance(1)
        file_of, offsets, lengths = np.array(places, dtype=np.int64).reshape(-1, 3).T.copy()
        return cls([*shards], file_of, offsets, lengths, Strings(names)), classes

    @classmethod
    def records(cls, file: Path, planes: tuple[int, int, int]) -> Members:
        """Return the records of a file of pixels, such as those of STL10.

        Raises:
            FileError: If the length of the file is no multiple of the records'.
        """
        length = int(np.prod(planes))
        number, rest = divmod(file.stat().st_size, length)
        if rest or not number:
            raise FileError("data", f"records of {length:,} bytes", file, f"which has {file.stat().st_size:,} bytes")
        every = np.arange(number)
        return cls([file], np.zeros_like(every), every * length, np.full_like(every, length), (), planes)

    def __len__(self) -> int:
        return len(self.offsets)

    def name(self, position: int) -> str:
        """Return the name of an image in its file."""
        return self.names[position] if self.names else f"record {position} of {self.files[0]}"

    def read(self, position: int) -> Any:
        """Return the bytes of an encoded image, or the pixels of a record."""
        data = self._bytes(position, 0, int(self.lengths[position]))
        if self.planes is None:
            return data
        return np.frombuffer(data, np.uint8).reshape(self.planes).transpose(0, 2, 1)

    def ends(self, position: int) -> Ends:
        """Return the first and last bytes of an image."""
        length = int(self.lengths[position])
        begin = max(BLOCK, length - BLOCK)
        return Ends(self._bytes(position, 0, min(BLOCK, length)), self._bytes(position, begin, length), length)

    def header(self, position: int, ends: Ends) -> Header:
        """Return size and mode of an image."""
        if self.planes is None:
            return super().header(position, ends)
        return Header(*self.planes[1:], grey=self.planes[0] == 1)

    def _bytes(self, position: int, begin: int, end: int) -> bytes:
        try:
            with open(self.files[self.file_of[position]], "rb", buffering=0) as file:
                file.seek(int(self.offsets[position]) + begin)
                return file.read(max(0, end - begin))
        except OSError as error:
            raise _unreadable(self.name(position), error) from error


def tar_files(path: str) -> list[Path]:
    """Return the tar files that a path means: one, those of a folder, or those of a pattern.

    >>> [path.name for path in tar_files("no-{08..10}.tar")]
    ['no-08.tar', 'no-09.tar', 'no-10.tar']
    """
    if numbers := re.search(r"\{(\d+)\.\.(\d+)\}", path):
        first, last = numbers[1], numbers[2]
        every = (f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))
        return [file for one in every for file in tar_files(path[: numbers.start()] + one + path[numbers.end() :])]
    if Path(path).is_dir():
        return sorted(Path(path).rglob("*.tar"))
    return sorted(map(Path, glob(path))) if "*" in path else [Path(path)]


def _listed(shard: Path, suffixes: set[str]) -> tuple[dict[str, tuple[int, int]], dict[str, str]]:
    """Return offset and length of each image of a tar file, and its class where one is given, by key."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, str] = {}
    try:
        with tarfile.open(shard, "r:") as archive:  # uncompressed only
            for member in archive:
                folder, _, name = member.name.rpartition("/")
                key, _, suffix = name.partition(".")
                key = f"{folder}/{key}" if folder else key
                if not member.isfile() or name.startswith("."):
                    continue
                if f".{suffix.lower()}" in suffixes:
                    if key in images:
                        fix = "give each image its own key"
                        raise ArgumentError("data", f"one image for each key of {shard}", f"two for {key!r}", fix)
                    images[key] = (member.offset_data, member.size)
                elif suffix in ("cls", "json") and (content := archive.extractfile(member)) is not None:
                    found = content.read()
                    label = json.loads(found).get("label") if suffix == "json" else found.decode().strip()
                    labels[key] = labels.get(key, "") if label is None else str(label)
    except FileNotFoundError:
        raise NoFile("data", "a shard of WebDataset", shard, "which does not exist") from None
    except (tarfile.TarError, OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        fix = "use uncompressed shards, since images are read by their place in the file"
        raise FileError("data", "an uncompressed tar file", shard, f"which is none ({error})", fix) from error
    return images, labels


@dataclass(frozen=True, eq=False)
class HubRows(EncodedImages):
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

    def header(self, position: int, ends: Ends) -> Header:
        """Return size and mode of an image of one of the parts."""
        part, inside = self._place(position)
        return part.header(inside, ends)

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
                header = source.header(i, ends)
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
