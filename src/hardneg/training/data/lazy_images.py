"""Images that stay encoded until they are needed, and the choice of what is decoded in advance.

``opened`` reads the headers of a source, checks them, and returns its images: decoded in one tensor if that fits the
budget and no image has to be resized, otherwise ``LazyImages``, which decode images on access. Workers of a
loader hold a copy of ``LazyImages``: it is a few arrays, whose size is some 100 bytes per image.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, FileError, NotWritten, warn_once
from hardneg.io.arrays import Array
from hardneg.io.files import check_free, locked, write_atomically
from hardneg.io.terminal import progress_bars
from hardneg.training.data.decoding import decode, fitted, reduction
from hardneg.training.data.image_sources import Ends, Headers, Joined, Source, mapped, read_headers
from hardneg.training.data.named import default_root

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

MEMORY_BUDGET = 1 << 30
"""Bytes of decoded pixels that ``--cache-images auto`` keeps in memory, the same on every machine."""
_SHOWN = 5
_DARKEST, _SAMPLED = 16, 64  # the brightest pixel of images that are almost black; images that are looked at
_CHUNK = 64  # images decoded at a time when all are decoded
_PATIENCE = 24 * 3600.0  # seconds that a rank waits for another one that decodes


class Opening(NamedTuple):
    """How image files are opened.

    Attributes:
        side: Resize images to squares with this side, or None.
        cache: "auto", "memory", "disk" or "none", as ``--cache-images``.
        bad: "stop" or "skip": what happens with unreadable images.
    """

    side: int | None = None
    cache: str = "auto"
    bad: str = "stop"


class Kept(NamedTuple):
    """Decoded images of different sizes, one after the other.

    Attributes:
        pixels: All bytes, uint8.
        starts: First byte of each image of the source, int64 [m + 1].
        sizes: Width and height of each, int64 [m, 2].
    """

    pixels: Tensor
    starts: Annotated[Array, "m"]
    sizes: Annotated[Array, "m 2"]

    def get(self, position: int) -> Annotated[Array, "h w c"]:
        """Return the pixels of an image."""
        return self._place(position).numpy()

    def put(self, position: int, pixels: Annotated[Array, "h w c"]) -> None:
        """Store the pixels of an image."""
        place = self._place(position)
        place.copy_(torch.from_numpy(pixels).view(place.shape))

    def _place(self, position: int) -> Tensor:
        start, stop = self.starts[position : position + 2]
        width, height = self.sizes[position]
        return self.pixels[start:stop].view(height, width, -1)


@dataclass(frozen=True, eq=False)
class LazyImages:
    """Images that are decoded when they are needed; indexing and slicing select images without decoding them.

    Attributes:
        source: The encoded images.
        rows: Position of each image in the source, int64 [n].
        size: Width and height to which images are resized.
        channels: 1 or 3.
        headers: Headers of all images of the source, if it has any.
        skips: Whether an image that has become unreadable is replaced by a grey one instead of raising.
        kept: Decoded images, if they are kept in memory or in a file.
    """

    source: Source
    rows: Annotated[Tensor, "n"]
    size: tuple[int, int]
    channels: int
    headers: Headers | None = None
    skips: bool = False
    kept: Kept | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Self:
        return replace(self, rows=self.rows[index])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape that ``pixels`` of all images would have."""
        return len(self), self.channels, self.size[1], self.size[0]

    @cached_property
    def uniform(self) -> bool:
        """Whether no image has to be resized."""
        return self.headers is not None and bool((self.headers.sizes[self.rows.numpy()] == self.size).all())

    def to(self, device: torch.device | str) -> Self:
        """Return the images themselves: they are decoded on the CPU."""
        return self

    def joined(self, others: Sequence[Self]) -> Self:
        """Return these images followed by others of the same source."""
        return replace(self, rows=torch.cat([self.rows, *(other.rows for other in others)]))

    def pictures(self) -> list[Picture]:
        """Decode the images, each in its own size, in mode L or RGB.

        Raises:
            ArgumentError: If an image is unreadable or has other content than when its header was read.
        """
        # Workers of a loader share the cores among them already.
        threads = 1 if torch.utils.data.get_worker_info() else os.cpu_count() or 1
        return list(mapped(self._picture, self.rows.tolist(), threads))

    def pixels(self) -> Annotated[Tensor, "n c h w"]:
        """Decode the images to uint8 [n, c, h, w], cropping the longer dimension of those that are resized."""
        arrays = [np.asarray(fitted(picture, self.size)) for picture in self.pictures()]
        stacked = torch.from_numpy(np.stack(arrays)).view(len(self), self.size[1], self.size[0], self.channels)
        return stacked.permute(0, 3, 1, 2).contiguous()

    def _picture(self, position: int) -> Picture:
        name = self.source.name(position)
        try:
            picture = decode(*self._encoded(position, name))
        except ArgumentError as error:
            if not self.skips:
                raise
            warn_once(f"image_files.lost:{name}", f"{error} A grey image takes its place.")
            picture = self._grey(position)
        mode = "L" if self.channels == 1 else "RGB"
        return picture if picture.mode == mode else picture.convert(mode)

    def _encoded(self, position: int, name: str) -> tuple[Any, str, int | None]:
        """Return the arguments of ``decode``: the pixels that are kept, or a file that has not changed."""
        if self.kept is not None:
            return self.kept.get(position), name, None
        data = self.source.read(position)
        known = isinstance(data, bytes) and self.headers is not None
        if known and Ends.of(data).digest() != self.headers.digests[position]:  # type: ignore[union-attr]
            fix = "restore it, or start a new run"
            raise ArgumentError("data", "images that do not change during a run", f"other content in {name}", fix)
        return data, name, max(self.size)

    def _grey(self, position: int) -> Picture:
        """Return a grey image in place of one that has become unreadable."""
        from PIL import Image

        size = self.size if self.headers is None else tuple(self.headers.sizes[position].tolist())
        return Image.new("L", size, 128)


class Opened(NamedTuple):
    """The images of one split, opened.

    Attributes:
        images: Decoded images [n, c, h, w], or images to decode.
        positions: Position of each image in its source, without those that were skipped, int64 [n].
        digests: Digest of the content of each, int64 [n], if it is known.
    """

    images: Tensor | LazyImages
    positions: Annotated[Tensor, "n"]
    digests: Annotated[Tensor, "n"] | None


def opened(name: str, sources: Sequence[Source], how: Opening) -> list[Opened]:
    """Read the headers of all images, check them, and decode in advance what ``how.cache`` asks for.

    Args:
        name: Name of the data.
        sources: The images of each split.
        how: How images are resized, kept and skipped.

    Returns:
        The images of each split.

    Raises:
        ArgumentError: If images are unreadable and ``how.bad`` is "stop", or if they differ in size and ``how.side`` is
            None.
    """
    source = sources[0] if len(sources) == 1 else Joined(sources)
    with progress_bars() as bars:
        headers = read_headers(source, bars("read headers", len(source)))
    good = _readable(name, source, headers, how.bad)
    size = _one_size(source, headers, good) if how.side is None else (how.side, how.side)
    channels = _channels(source, headers, good)
    images = LazyImages(source, torch.from_numpy(good), size, channels, headers, skips=how.bad == "skip")
    kept = _kept(name, images, how)
    _warn_if_dark(name, kept)
    parts, first = [], 0
    for one in sources:
        inside = (good >= first) & (good < first + len(one))
        positions, digests = torch.from_numpy(good[inside] - first), torch.from_numpy(headers.digests[good[inside]])
        parts.append(Opened(kept[torch.from_numpy(inside)], positions, digests))
        first += len(one)
    return parts


def _readable(name: str, source: Source, headers: Headers, bad: str) -> Annotated[Array, "n"]:
    """Return the positions of readable images; raise for the others, or warn if they are skipped."""
    problems = headers.problems
    good = np.setdiff1d(np.arange(len(source)), [*problems])
    if not problems:
        return good
    first = next(iter(problems.values()))
    names = [source.name(i) for i in sorted(problems)]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    listed = f"{len(names)} of {len(source)} that are unreadable in {name}: {', '.join(names[:_SHOWN])}{more}. "
    if bad == "skip" and len(good):
        warn_once(f"image_files.skipped:{name}", f"Skipped {listed}The first error: {first}")
    elif len(names) == 1 and bad == "stop":
        raise first
    else:
        fix = "use --bad-images skip to train without them" if bad == "stop" else None
        raise ArgumentError("data", "readable images", f"{listed}The first error: {first}", fix)
    return good


def _one_size(source: Source, headers: Headers, good: Array) -> tuple[int, int]:
    sizes = headers.sizes[good]
    if len(others := np.flatnonzero((sizes != sizes[0]).any(1))):
        (first, here), (other, there) = (
            (tuple(sizes[i].tolist()[::-1]), source.name(int(good[i]))) for i in (0, others[0])
        )
        got, fix = f"{first} in {here} and {other} in {there}", "resize them, such as by size=64, or folder:PATH@64"
        raise ArgumentError("data", "images of one size", got, f"{fix} on the command line")
    width, height = sizes[0].tolist()
    return width, height


def _channels(source: Source, headers: Headers, good: Array) -> int:
    """Return 1 if all images are grey; warn if a few coloured ones make all RGB, which changes the views."""
    coloured = good[~headers.grey[good]]
    if 0 < 2 * len(coloured) < len(good):
        example = source.name(int(coloured[0]))
        warn_once(
            f"image_files.colour.{example}",
            f"{len(coloured)} of {len(good)} images are in colour, such as {example}, and the others are grey: "
            "all are read as RGB. Convert the former to grey if all should be grey.",
        )
    return 3 if len(coloured) else 1


def _kept(name: str, images: LazyImages, how: Opening) -> Tensor | LazyImages:
    """Return the images decoded as far as ``how.cache`` asks for it."""
    assert images.headers is not None
    sizes = images.headers.sizes.astype(np.int64)
    sizes = -(-sizes // reduction(sizes.min(1, keepdims=True), max(images.size)))
    starts = np.cumsum([0, *(images.channels * sizes.prod(1))])
    if how.cache == "none" or (how.cache == "auto" and starts[-1] > MEMORY_BUDGET):
        return images
    if how.cache == "disk":
        pixels = _on_disk(name, images, sizes, int(starts[-1]))
        return images if pixels is None else replace(images, kept=Kept(pixels, starts, sizes))
    if images.uniform:
        whole = torch.empty(images.shape, dtype=torch.uint8)
        for row, picture in enumerate(_all_pictures(images)):
            pixels = torch.from_numpy(np.array(fitted(picture, images.size)))
            whole[row] = pixels.view(*pixels.shape[:2], -1).permute(2, 0, 1)
        return whole
    kept = Kept(torch.empty(int(starts[-1]), dtype=torch.uint8), starts, sizes)
    for position, picture in zip(images.rows.tolist(), _all_pictures(images), strict=True):
        width, height = sizes[position].tolist()
        kept.put(position, np.array(fitted(picture, (width, height))))
    return replace(images, kept=kept)


def _all_pictures(images: LazyImages) -> Iterator[Picture]:
    """Decode all images, some at a time, showing the progress."""
    with progress_bars() as bars:
        advance = bars("decode", len(images))
        for first in range(0, len(images), _CHUNK):
            yield from (pictures := images[first : first + _CHUNK].pictures())
            advance(len(pictures))


def _on_disk(name: str, images: LazyImages, sizes: Annotated[Array, "m 2"], total: int) -> Tensor | None:
    """Return all decoded pixels, mapped from a file that is written first if necessary; None if the disk is full.

    The name of the file is a digest of the content and the sizes, so that ranks and later runs find it.
    """
    assert images.headers is not None
    key = hashlib.blake2b(images.headers.digests.tobytes() + sizes.tobytes(), digest_size=16)
    key.update(images.rows.numpy().tobytes() + bytes([images.channels]))
    path = default_root() / "decoded" / f"{key.hexdigest()}.pixels"
    places = iter(zip(images.rows.tolist(), _all_pictures(images), strict=True))

    def write(file: BinaryIO) -> None:
        written = np.zeros(len(sizes), bool)
        written[images.rows.numpy()] = True
        for position, readable in enumerate(written.tolist()):
            width, height = sizes[position].tolist()
            if readable:
                file.write(np.asarray(fitted(next(places)[1], (width, height))).tobytes())
            else:
                file.write(bytes(width * height * images.channels))

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock"), "data", patience=_PATIENCE, fix="use --cache-images none"):
            if not path.is_file():
                check_free("data", path.parent, total, "for decoded images", "use --cache-images none")
                write_atomically(path, write)
    except (NotWritten, FileError, OSError) as error:
        warn_once(f"image_files.cache:{name}", f"Decoded images are not kept: {error}")
        return None
    return torch.from_file(str(path), shared=False, size=total, dtype=torch.uint8)


def _warn_if_dark(name: str, images: Tensor | LazyImages) -> None:
    """Warn about 12-bit images in 16-bit files, which would be almost black without an error."""
    some = images[torch.linspace(0, len(images) - 1, min(_SAMPLED, len(images))).long()]
    if (brightest := int((some.pixels() if isinstance(some, LazyImages) else some).max())) <= _DARKEST:
        warn_once(
            f"image_files.dark.{name}",
            f"The brightest pixel in {name} is {brightest} of 255, so the images are almost black; 16-bit files are "
            "scaled by their full range of 65,535. Convert them to 8 bits over the range that they use.",
        )
