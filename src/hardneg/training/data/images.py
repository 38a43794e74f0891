"""Named and local data sets: images, labels and ids, in memory, ready for a device.

    load("digits", "train")                 8 x 8 grey digits, inside scikit-learn
    load("fashion-mnist", "test")           IDX files
    load("cifar10", "train", root="data")   the original archive, where torchvision put it, or montages; cifar100 alike
    load("folder:photos@64")                class folders, or train/ and test/ with class folders; @64 or size=64
                                            makes the images 64 x 64
    load("npz:images.npz")                  arrays images and labels; test_images and test_labels if there are
    load("hf:uoft-cs/cifar10")              a data set of the Hugging Face hub or its cache, through `datasets`

Ids are unique over both splits. Where a data set has no test split, a fixed fifth of it is one, stratified by label;
without labels, or of one class, there is nothing to evaluate and the train split has this fifth as well.
A folder's test split is test/ or val/, the first whose images have classes: class folders, or the table
``val/val_annotations.txt`` as Tiny-ImageNet has it.
Images have 8 bits: grey ones of 16 bits are scaled, those of more are refused; what is transparent is seen on white.
Labels are whole numbers or text; one below 0 says that there is none: every image of a split has one, or none has.
``load_splits`` reads both splits at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, UnknownName, argument_error, located
from hardneg.io.arrays import Array, warn_of_unseen_classes
from hardneg.io.functions import names_a_file
from hardneg.pages.graph_drawing import thumbnail
from hardneg.training.augmentation.augment import MakeImageViews
from hardneg.training.augmentation.views import (
    Augmentation,
    as_augmentation,
    augment_for_text,
    check_augment,
    check_plain,
    described,
)
from hardneg.training.data.image_files import ReadSplits, read_folder, read_hub, read_npz
from hardneg.training.data.items import TEST_SHARE, Evaluation, Items, Shown, Splits, features_of_splits, register
from hardneg.training.data.named import NAMED
from hardneg.training.encoders import Encoder, Represent, auto_encoder, build_encoder, check_encoder
from hardneg.training.evaluation.embeddings import evaluate_embeddings
from hardneg.training.evaluation.pairs import alignment
from hardneg.training.normalisation import Scale, scale_of
from hardneg.training.options import TrainOptions

SPLITS = ("train", "test", "all")
USAGE = {"digits": "It needs no files", "folder:PATH": "It has a folder of images for each class"}
PROBED = 64
"""Images at most on which a user's views are compared with what evaluation would see."""


@dataclass(frozen=True, eq=False)
class ImageData(Items):
    """Images of one size with their ids and, where known, their labels."""

    noun: ClassVar[str] = "image"
    has: ClassVar[str] = "pixels"
    weight_decay: ClassVar[float] = 1e-6  # as in the code of DCL and HCL
    most_held: ClassVar[float] = math.inf
    how_to_label: ClassVar[str] = "use class folders or an array `labels`"

    images: Annotated[Tensor, "n c h w"]  # uint8
    labels: Annotated[Tensor, "n"] | None  # int64, an index into classes
    ids: Annotated[Tensor, "n"]  # int64
    name: str
    classes: tuple[str, ...] = ()

    augment: Augmentation | None = field(default=None, repr=False)  # the views, once ``prepared``
    make_views: MakeImageViews | None = field(default=None, repr=False)  # the same, compiled with --compile

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.dtype != torch.uint8 or self.images.shape[1] not in (1, 3):
            shape = f"{tuple(self.images.shape)} of {self.images.dtype}"
            raise ArgumentError(f"ImageData {self.name!r}", "uint8 images [n, 1 or 3, h, w]", f"images={shape}")
        super().__post_init__()

    def __len__(self) -> int:
        return len(self.images)

    # As a data kind.

    @classmethod
    def check(cls, options: TrainOptions) -> None:
        with located("--data"):
            check_name(options.data)
        with located("--augment"):
            check_augment(options.augment)
        with located("--encoder"):
            if options.encoder != "auto":
                check_encoder(options.encoder)
            # Whether the library is there and knows it; a user's function is called once the images are known.
            if ":" in options.encoder and not names_a_file(options.encoder):
                with torch.device("meta"):
                    build_encoder(options.encoder, 3, projection_dim=options.dim)

    @classmethod
    def read(cls, path: str, options: TrainOptions) -> Splits:
        return Splits(*load_splits(options.data, options.data_root))

    @classmethod
    def splits(cls, options: TrainOptions) -> Splits:
        if options.evaluate_on == "validation":  # the test images are not even read
            return Splits(*load(options.data, "train", options.data_root).held_out(options.validation_share))
        return cls.read("", options)

    @classmethod
    def evaluated(cls, options: TrainOptions) -> ImageData:
        if options.evaluate_on == "validation":
            return load(options.data, "train", options.data_root).held_out(options.validation_share)[1]
        return load(options.data, "test", options.data_root)

    def prepared(self, options: TrainOptions, views: Any = None) -> ImageData:
        if views is None:
            on_gpu = options.device != "cpu" and torch.cuda.is_available()
            augment = augment_for_text(options.augment, self.images, channels_last=on_gpu)
        else:
            augment = as_augmentation(views)
        return replace(self, augment=augment, make_views=augment.compiled() if options.compile else augment.views)

    def described(self) -> str:
        return described(self._prepared(self.augment))

    def views(self, index: Annotated[Tensor, "b"], epoch: int, seed: int) -> tuple[Tensor, Tensor]:
        return self.views_of(self.images[index], self.ids[index], epoch, seed)

    def views_of(self, images: Tensor, ids: Annotated[Tensor, "b"], epoch: int, seed: int) -> tuple[Tensor, Tensor]:
        """Of any images: those of an id are always the same in an epoch."""
        make: MakeImageViews = self._prepared(self.make_views)
        return make(images, ids, epoch, seed)

    def plain(self, index: Annotated[Tensor, "b"]) -> Tensor:
        augment: Augmentation = self._prepared(self.augment)
        return augment.plain(self.images[index])

    def scale(self) -> Scale:
        return scale_of(self._prepared(self.augment), self.images[:PROBED])

    def check_views(self, options: TrainOptions) -> None:
        some = slice(min(options.batch_size, PROBED))
        check_plain(self._prepared(self.augment), self.images[some], self.ids[some], options.seed)

    @classmethod
    def rebuilt(cls, record: dict[str, Any], options: TrainOptions) -> Encoder:
        channels, height, width = record["shape"]
        size = max(height, width)
        name = auto_encoder(size) if options.encoder == "auto" else options.encoder
        return build_encoder(name, channels, projection_dim=options.dim, seed=options.seed, size=size)

    def chosen(self, options: TrainOptions) -> dict[str, Any]:
        with torch.device("meta"):
            encoder = repr(self.encoder(options))
        return {"encoder": encoder, "augment": repr(self.prepared(options).augment)}

    def shown(self, position: int) -> Shown:
        return Shown(picture=thumbnail(self.images[position]), tiny=max(self.images.shape[2:]) <= 32)

    def record(self) -> dict[str, Any]:
        return {"images": len(self), "shape": list(self.images.shape[1:]), "classes": self.num_labels()}

    def check_like(self, record: dict[str, Any]) -> None:
        """Their size may differ."""
        before, now = record["shape"][0], self.images.shape[1]
        if before != now:
            raise ArgumentError("evaluate", f"images of {before} channels, as the run was trained on", f"{now}")

    def measures(self, splits: Splits, options: TrainOptions) -> list[str]:
        splits.fitted.labelled("compare")
        splits.test.labelled(f"compare, of its {options.evaluate_on} images,")
        return ["knn", "1nn", "linear"]

    def evaluate(self, splits: Splits, represent: Represent, options: TrainOptions) -> Evaluation:
        if why := _no_accuracy(splits.fitted, splits.test):
            return Evaluation({"no_accuracy": why}, {})
        arrays = features_of_splits(splits, represent)
        figures = evaluate_embeddings(*arrays.values(), seed=0)
        return Evaluation(figures | {"alignment": alignment(*represent.views(splits.test))}, arrays)

    def _prepared(self, part: Any) -> Any:
        assert part is not None, "views are those of prepared(options)"
        return part


for _name in NAMED:
    register(ImageData, _name, _name)
for _name, _form in (("folder", "folder:PATH"), ("npz", "npz:PATH"), ("hf", "hf:NAME")):
    register(ImageData, _name, _form)


def _no_accuracy(data: ImageData, test: ImageData) -> str:
    """Why there is nothing to evaluate, if so."""
    if data.labels is None:
        return "its training images have no labels"
    if test.labels is None:
        return "the images to evaluate it on have no labels"
    return "its training images are of one class" if data.num_labels() < 2 else ""


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
    return _divided(_chosen(name, found, "all"))[split == "test"]


def load_splits(name: str, root: str | Path | None = None) -> tuple[ImageData, ImageData]:
    """The train and the test split as ``load`` gives them, of one size, from files that are read once.

    >>> [len(data) for data in load_splits("digits")]
    [1437, 360]
    """
    found = _read(name, "all", root, None)
    if found.num_train is None:
        train, test = _divided(_chosen(name, found, "all"))
    else:
        train, test = _chosen(name, found, "train"), _chosen(name, found, "test")
    _check_one_size(name, [train.images.shape[1:], test.images.shape[1:]])
    if train.labels is not None and test.labels is not None:
        warn_of_unseen_classes(train.labels, test.labels, test.classes)
    return train, test


def _divided(whole: ImageData) -> tuple[ImageData, ImageData]:
    """A train and a test split; where no accuracy can be measured, the train split is everything."""
    rest, held = whole.held_out(TEST_SHARE, seed=0)
    return (rest if whole.num_labels() > 1 else whole), held


def _read(name: str, split: str, root: str | Path | None, size: int | None) -> ReadSplits:
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
        raise UnknownName(name, [*NAMED, "folder:PATH", "npz:PATH", "hf:NAME"], usage=USAGE)


def _chosen(name: str, found: ReadSplits, split: str) -> ImageData:
    """The requested parts; ids run on from the train split into the test split."""
    every = {"train": (found.train, 0), "test": (found.test, found.num_train or 0)}
    parts = [(part, first) for one, (part, first) in every.items() if split in (one, "all") and part is not None]
    arrays = [channels_first(name, part.images) for part, _ in parts]
    _check_one_size(name, [array.shape[1:] for array in arrays])
    labels = [part.labels for part, _ in parts if part.labels is not None]
    ids = [torch.arange(first, first + len(part.images)) for part, first in parts]
    return ImageData(
        images=torch.from_numpy(np.ascontiguousarray(np.concatenate(arrays))),
        labels=torch.from_numpy(np.concatenate(labels).astype(np.int64)) if len(labels) == len(parts) else None,
        ids=torch.cat(ids),
        name=name,
        classes=tuple(str(c) for c in parts[0][0].classes),
    )


def _check_one_size(name: str, shapes: Sequence[tuple[int, ...]]) -> None:
    if len(set(shapes)) > 1:
        found = " and ".join(str(tuple(shape)) for shape in shapes)
        raise ArgumentError("data", "train and test images of one size", f"{found} in {name!r}")


def channels_first(name: str, images: Array) -> Array:
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
