"""Images that were given in Python, as ``hn.train(data=...)``: a torch ``Dataset``, arrays, or a list of paths.

``give`` keeps them under a name of data, ``given:NAME``, which then works like that of a folder; ``read_given`` is its
reader. The name lives in this process only: a run is resumed by giving the same data again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from torch import Tensor

from hardneg.core.errors import ArgumentError
from hardneg.io.arrays import Array, known_labels
from hardneg.io.terminal import progress_bars
from hardneg.training.data.decoding import Header, decode
from hardneg.training.data.image_files import ReadSplits, SplitImages, hub_part
from hardneg.training.data.image_sources import Ends, Files, Source, Strings

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

GIVEN = "given"
"""Prefix of the names of such data."""
_REPEATED = 8  # items that are read twice
_FIX = "return images without random changes: views= takes the augmentation, such as from_transform(transform)"
_given: dict[str, ReadSplits] = {}


class Part(NamedTuple):
    """One split as a caller gives it.

    Attributes:
        images: A torch ``Dataset`` of images or (image, label), uint8 images [n, c, h, w], or paths of images.
        labels: Class of each image, numbers or text; None takes those of the data set, if it has any.
        ids: Distinct id of each image, int64 [n]; None counts them.
    """

    images: Any
    labels: Any = None
    ids: Any = None


def give(name: str, train: Part, test: Part | None = None) -> str:
    """Keep images under a name and return the text for ``--data``.

    Args:
        name: A name for messages and the record of runs.
        train: Images to train on.
        test: Images to evaluate on; None holds out a fifth of the others.

    Raises:
        ArgumentError: If they are no images, or labels or ids do not fit them.
    """
    parts = [_read(part, f"{name}, {role}") for role, part in (("train", train), ("test", test)) if part is not None]
    if len({isinstance(part.images, np.ndarray) for part in parts}) == 2:
        raise ArgumentError("data", "images to train and to test on of the same kind", f"arrays and files in {name!r}")
    known = [part.labels for part in parts if part.labels is not None]
    classes, numbers = np.unique(np.concatenate(known), return_inverse=True) if known else ((), np.empty(0))
    names, done = [str(one) for one in classes], 0
    for i, part in enumerate(parts):
        if part.labels is not None:
            parts[i] = part._replace(labels=numbers[done : done + len(part.labels)], classes=names)
            done += len(part.labels)
    _given[name] = ReadSplits(parts[0]) if test is None else ReadSplits(parts[0], parts[1], len(parts[0].images))
    return f"{GIVEN}:{name}"


def read_given(name: str, splits: str = "") -> ReadSplits:
    """Return the images that were given under a name.

    Raises:
        ArgumentError: If there are none in this process, or splits are chosen.
    """
    if splits:
        raise ArgumentError("data", "no --splits for data given in Python", f"splits={splits!r}", "pass test=...")
    if name not in _given:
        fix = "call hn.train again with the same data and resume=True"
        raise ArgumentError("data", "data that this process was given", f"{GIVEN}:{name}, of another one", fix)
    return _given[name]


def _read(part: Part, where: str) -> SplitImages:
    """Return one split, with labels as they were given."""
    images, labels = part.images, part.labels
    if isinstance(images, tuple) and len(images) == 2 and labels is None and isinstance(images[0], Tensor | np.ndarray):
        images, labels = images
    if isinstance(images, Tensor | np.ndarray):
        source: Array | Source = np.asarray(images)
    elif _are_paths(images):
        source = Files(Path(), Strings(os.path.abspath(path) for path in images))
    elif hasattr(images, "features") and hasattr(images, "select_columns"):  # a datasets.Dataset
        found = hub_part(where, images)
        source, labels = found.images, _names(found) if labels is None else labels
    else:
        source, found_labels = Examples.of(images, where)
        labels = found_labels if labels is None else labels
    known = None if labels is None else known_labels(np.asarray(labels), where)
    for what, values in (("label", known), ("id", part.ids)):
        if values is not None and len(values) != len(source):
            got = f"{len(values)} {what}s and {len(source)} images ({where})"
            raise ArgumentError("data", f"one {what} for each image", got)
    ids = None if part.ids is None else np.asarray(part.ids)
    if ids is not None and (ids.dtype.kind not in "iu" or ids.min() < 0):
        raise ArgumentError("data", f"ids that are integers from 0 on ({where})", f"{ids.dtype} from {ids.min()}")
    return SplitImages(source, known, (), ids)


def _are_paths(images: Any) -> bool:
    return isinstance(images, Sequence) and len(images) > 0 and isinstance(images[0], str | os.PathLike)


def _names(part: SplitImages) -> Array | None:
    return None if part.labels is None else np.asarray(part.classes)[part.labels]


@dataclass(frozen=True, eq=False)
class Examples:
    """The images of a torch ``Dataset``, each of which was read once to learn its size, label and content.

    Attributes:
        data: The data set.
        place: Its name.
        sizes: Width and height of each image [n, 2].
        grey: Whether each image has one channel [n].
        digests: Digest of the pixels of each image [n, 16].
        problems: Error of each unreadable image, by position.
    """

    data: Any
    place: str
    sizes: Annotated[Array, "n 2"]
    grey: Annotated[Array, "n"]
    digests: Annotated[Array, "n 16"]
    problems: dict[int, ArgumentError]

    @classmethod
    def of(cls, data: Any, place: str) -> tuple[Examples, list[Any] | None]:
        """Read all items once; return them with the label of each, if they have labels.

        Raises:
            ArgumentError: If it is no data set of images, or an image is another one when it is read again.
        """
        if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or not len(data):
            what = "a torch Dataset with a length, uint8 images, or a list of paths"
            raise ArgumentError("data", what, f"{type(data).__name__} ({place})")
        n = len(data)
        found = cls(data, place, np.zeros((n, 2), np.int32), np.zeros(n, bool), np.zeros((n, 16), np.uint8), {})
        labels: list[Any] = [None] * n
        with progress_bars() as bars:
            advance = bars("read images", n)
            for position in range(n):
                labels[position] = found._learn(position)
                advance(1)
        for position in range(min(_REPEATED, n)):
            if position not in found.problems and found._digest(found._decoded(position)) != found._known(position):
                raise ArgumentError("data", f"the same image whenever it is read ({place})", "another one", _FIX)
        some = next((label for label in labels if label is not None), None)
        known = [some if position in found.problems else label for position, label in enumerate(labels)]
        return found, None if any(label is None for label in known) else known

    def __len__(self) -> int:
        return len(self.sizes)

    def name(self, position: int) -> str:
        """Return the number of an item."""
        return f"item {position} of {self.place}"

    def read(self, position: int) -> Any:
        """Return an image as the data set does: of PIL, or an array.

        Raises:
            ArgumentError: If the data set fails, or returns anything else.
        """
        return self._item(position)[0]

    def ends(self, position: int) -> Ends:
        """Return the digest of the pixels in place of their ends."""
        return Ends.of(self._known(position))

    def header(self, position: int, ends: Ends) -> Header:
        """Return size and mode of an image; raise the error of one that is unreadable."""
        if position in self.problems:
            raise self.problems[position]
        width, height = self.sizes[position].tolist()
        return Header(width, height, bool(self.grey[position]))

    def _learn(self, position: int) -> Any:
        """Store what an item is, and return its label."""
        try:
            image, label = self._item(position)
            picture = decode(image, self.name(position))
        except ArgumentError as error:
            self.problems[position] = error
            return None
        self.sizes[position], self.grey[position] = picture.size, picture.mode == "L"
        self.digests[position] = np.frombuffer(self._digest(picture), np.uint8)
        return label

    def _item(self, position: int) -> tuple[Any, Any]:
        try:
            item = self.data[position]
        except Exception as error:  # a user's code raises anything
            raise ArgumentError("data", "readable images", f"{self.name(position)}: {error!r}") from error
        image, label = (item[0], item[1]) if isinstance(item, tuple | list) and len(item) > 1 else (item, None)
        if getattr(image, "is_floating_point", bool)():
            what = "PIL images or uint8 arrays"
            raise ArgumentError("data", what, f"{image.dtype} in {self.name(position)}", "leave out its ToTensor()")
        if not hasattr(image, "mode") and not isinstance(image, Tensor | np.ndarray):
            raise ArgumentError(
                "data", "PIL images or uint8 arrays", f"{type(image).__name__} in {self.name(position)}"
            )
        return image, label.item() if isinstance(label, Tensor | np.generic) and np.ndim(label) == 0 else label

    def _decoded(self, position: int) -> Picture:
        return decode(self.read(position), self.name(position))

    def _known(self, position: int) -> bytes:
        known: bytes = self.digests[position].tobytes()
        return known

    @staticmethod
    def _digest(picture: Picture) -> bytes:
        found = hashlib.blake2b(str(picture.size).encode(), digest_size=16)
        found.update(picture.tobytes())
        digest: bytes = found.digest()
        return digest
