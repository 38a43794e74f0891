"""Named and local data sets: images, labels and ids, in memory, ready for a device.

    load("digits", "train")                 8 x 8 grey digits, inside scikit-learn
    load("fashion-mnist", "test")           IDX files
    load("cifar10", "train", root="data")   the original archive, where torchvision put it, or montages; cifar100 alike
    load("folder:photos@64")                class folders, or train/ and test/ with class folders; @64 or size=64
                                            makes the images 64 x 64
    load("npz:images.npz")                  arrays images and labels; test_images and test_labels if there are
    load("hf:uoft-cs/cifar10")              a data set of the Hugging Face hub or its cache, through `datasets`

Ids are unique over both splits. Where a data set has no test split, a fixed fifth of it is one, stratified by label.
Images have 8 bits: grey ones of 16 bits are scaled, those of more are refused; what is transparent is seen on white.
Labels are whole numbers or text; one below 0 says that there is none: every image of a split has one, or none has.
``load_splits`` reads both splits at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, UnknownName, argument_error
from hardneg.io.arrays import Array, known_labels, warn_of_unseen_classes
from hardneg.training.data.image_files import Found, Part, pixels, read_folder, read_hub, read_npz, same_shape
from hardneg.training.data.named import NAMED

SPLITS = ("train", "test", "all")
TEST_SHARE = 0.2


@dataclass(frozen=True, eq=False)
class ImageData:
    """Images of one size with their ids and, where known, their labels."""

    images: Annotated[Tensor, "n c h w"]  # uint8
    labels: Annotated[Tensor, "n"] | None  # int64, an index into classes
    ids: Annotated[Tensor, "n"]  # int64
    name: str
    classes: tuple[str, ...] = ()
    origin: str = ""  # which copy of the data this is, for reports: "JPEG copy"

    def __post_init__(self) -> None:
        who, n = f"ImageData {self.name!r}", len(self.images)
        if self.images.ndim != 4 or self.images.dtype != torch.uint8 or self.images.shape[1] not in (1, 3):
            shape = f"{tuple(self.images.shape)} of {self.images.dtype}"
            raise ArgumentError(who, "uint8 images [n, 1 or 3, h, w]", f"images={shape}")
        if n == 0:
            raise ArgumentError(who, "at least one image", "none")
        for field in ("labels", "ids"):
            value = getattr(self, field)
            if value is not None and (value.shape != (n,) or value.dtype != torch.int64):
                got = f"{tuple(value.shape)} of {value.dtype}"
                raise ArgumentError(who, f"int64 {field}, one per image ({n})", f"{field}={got}")
        if (repeated := n - len(np.unique(self.ids.cpu()))) > 0:
            raise ArgumentError(who, "distinct ids", f"{repeated} repeated")
        if self.labels is not None and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < len(self.classes):
            low, high = int(self.labels.min()), int(self.labels.max())
            raise ArgumentError(who, f"labels in [0, {len(self.classes)})", f"labels from {low} to {high}")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def in_channels(self) -> int:
        return self.images.shape[1]

    @property
    def size(self) -> tuple[int, int]:
        return self.images.shape[2], self.images.shape[3]

    def labelled(self, who: str) -> Annotated[Tensor, "n"]:
        """The labels, or an error that says who needs them: none, or one class only, cannot be evaluated."""
        if self.labels is None:
            raise ArgumentError(who, "labels", f"none in {self.name!r}", "use class folders or an array `labels`")
        if self.num_labels() < 2:
            raise ArgumentError(who, "at least two classes", f"one in {self.name!r}: {self.classes}")
        return self.labels

    def num_labels(self) -> int:
        """How many classes its images really have: 0 without labels, and 1 is too few to evaluate."""
        return 0 if self.labels is None else len(torch.unique(self.labels))

    def take(self, index: Annotated[Tensor, "m"]) -> ImageData:
        labels = None if self.labels is None else self.labels[index]
        return replace(self, images=self.images[index], labels=labels, ids=self.ids[index])

    def held_out(self, share: float = TEST_SHARE, seed: int = 0) -> tuple[ImageData, ImageData]:
        """The rest and a held-out share, stratified by label: a validation split that leaves the test split alone."""
        if not 0.0 < share < 1.0:
            raise argument_error("held_out", "a share in (0, 1)", "share", share)
        held = _stratified(self.labels, len(self), share, seed)
        return self.take(torch.nonzero(~held)[:, 0]), self.take(torch.nonzero(held)[:, 0])

    def to(self, device: torch.device | str) -> ImageData:
        labels = None if self.labels is None else self.labels.to(device)
        return replace(self, images=self.images.to(device), labels=labels, ids=self.ids.to(device))


def load(name: str, split: str = "train", root: str | Path | None = None, *, size: int | None = None) -> ImageData:
    """Reads one split ("train", "test" or "all") of a named data set, a folder or a file.

    ``root`` says where the files of a named set are; without it HARDNEG_DATA (default: the user's cache) and the usual
    places are looked at. ``size`` makes image files square; the named sets keep their own size.

    >>> load("digits", "test").images.shape
    torch.Size([360, 1, 8, 8])
    """
    if split not in SPLITS:
        raise argument_error("data", f"a split among {SPLITS}", "split", split)
    found = _read(name, split, root, size)
    if found.num_train is not None or split == "all":
        return _chosen(name, found, split)
    rest, held = _chosen(name, found, "all").held_out(TEST_SHARE, seed=0)
    return rest if split == "train" else held


def load_splits(name: str, root: str | Path | None = None, *, size: int | None = None) -> tuple[ImageData, ImageData]:
    """The train and the test split as ``load`` gives them, of one size, from files that are read once.

    >>> [len(data) for data in load_splits("digits")]
    [1437, 360]
    """
    found = _read(name, "all", root, size)
    if found.num_train is None:
        train, test = _chosen(name, found, "all").held_out(TEST_SHARE, seed=0)
    else:
        train, test = _chosen(name, found, "train"), _chosen(name, found, "test")
    _check_one_size(name, [train.images.shape[1:], test.images.shape[1:]])
    if train.labels is not None and test.labels is not None:
        warn_of_unseen_classes(train.labels, test.labels, test.classes)
    return train, test


def _read(name: str, split: str, root: str | Path | None, size: int | None) -> Found:
    check_name(name)
    kind, _, path = name.partition(":")
    if kind in ("folder", "hf") and (square := re.fullmatch(r"(.+)@(\d+)", path)):
        path, size = square[1], int(square[2])
    if size is not None and (kind not in ("folder", "hf") or size < 4):
        raise argument_error("data", "a size of at least 4 pixels, and that for folder: and hf: only", "size", size)
    if kind == "folder":
        return read_folder(Path(path), split, size)
    if kind == "hf":
        return read_hub(path, split, size)
    return read_npz(Path(path)) if kind == "npz" else NAMED[kind](split, None if root is None else Path(root))


def check_name(name: str) -> None:
    """Raises unless ``load`` would know the name; reads nothing, for the command line."""
    kind, colon, path = name.partition(":")
    if not (kind in ("folder", "npz", "hf") and path) and not (kind in NAMED and not colon):
        usage = {"digits": "It needs no files", "folder:PATH": "It has a folder of images for each class"}
        raise UnknownName(name, [*NAMED, "folder:PATH", "npz:PATH", "hf:NAME"], usage=usage)


def from_pairs(pairs: Iterable[tuple[Any, int]], name: str, *, size: int | None = None) -> ImageData:
    """Any sequence of (PIL image or uint8 array, label), such as a torchvision data set, held in memory."""
    images, labels = zip(*pairs, strict=True)
    where = [f"item {i} of {name}" for i in range(len(images))]
    arrays = same_shape([pixels(*item, size) for item in zip(images, where, strict=True)], where)
    numbers = known_labels(np.asarray(labels), name)
    classes = [] if numbers is None else [str(i) for i in range(int(numbers.max()) + 1)]
    return _chosen(name, Found(Part(arrays, numbers, classes), num_train=len(arrays)), "train")


def _chosen(name: str, found: Found, split: str) -> ImageData:
    """The requested parts; ids run on from the train split into the test split."""
    parts = {"train": [(found.train, 0)], "test": [(found.test, found.num_train or 0)]}
    chosen = [*parts["train"], *parts["test"]] if split == "all" else parts[split]
    return _joined(name, [(part, first) for part, first in chosen if part is not None])


def _joined(name: str, parts: list[tuple[Part, int]]) -> ImageData:
    arrays = [_channels_first(name, part.images) for part, _ in parts]
    _check_one_size(name, [array.shape[1:] for array in arrays])
    labels = [part.labels for part, _ in parts if part.labels is not None]
    ids = [torch.arange(first, first + len(part.images)) for part, first in parts]
    return ImageData(
        images=torch.from_numpy(np.ascontiguousarray(np.concatenate(arrays))),
        labels=torch.from_numpy(np.concatenate(labels).astype(np.int64)) if len(labels) == len(parts) else None,
        ids=torch.cat(ids),
        name=name,
        classes=tuple(str(c) for c in parts[0][0].classes),
        origin=parts[0][0].origin,
    )


def _check_one_size(name: str, shapes: Sequence[tuple[int, ...]]) -> None:
    if len(set(shapes)) > 1:
        found = " and ".join(str(tuple(shape)) for shape in shapes)
        raise ArgumentError("data", "train and test images of one size", f"{found} in {name!r}")


def _channels_first(name: str, images: Array) -> Array:
    if images.dtype != np.uint8:
        hint = "; use (images * 255).round().astype('uint8') for values in [0, 1]" if images.dtype.kind == "f" else ""
        raise ArgumentError("data", f"uint8 images in {name!r}", f"images of {images.dtype}{hint}")
    if images.ndim == 3:
        return images[:, None]
    if images.ndim == 4 and images.shape[1] not in (1, 3) and images.shape[3] in (1, 3):
        return images.transpose(0, 3, 1, 2)
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        what = "images [n, h, w], [n, c, h, w] or [n, h, w, c] with 1 or 3 channels"
        raise ArgumentError("data", f"{what} in {name!r}", f"images={images.shape}")
    return images


def _stratified(labels: Tensor | None, n: int, share: float, seed: int) -> Annotated[Tensor, "n"]:
    """True for ceil(share n) of the rows, of each class its share to within one row."""
    # RandomState's stream is frozen by NumPy, so the split is the same with every version.
    order = np.random.RandomState(seed).permutation(n)
    classes = np.zeros(n, dtype=np.int64) if labels is None else labels.cpu().numpy()
    position = np.empty(n)
    for label in np.unique(classes):
        members = order[classes[order] == label]
        # Row r of a class of m is due at (r + 0.5) / m: the rows due first, over all classes, are held out.
        position[members] = (np.arange(len(members)) + 0.5) / len(members)
    held = np.zeros(n, dtype=bool)
    held[order[np.argsort(position[order], kind="stable")[: math.ceil(share * n - 1e-9)]]] = True
    if not 0 < held.sum() < n:
        raise ArgumentError(f"A split of {share:g}", "more images", str(n))
    return torch.from_numpy(held)
