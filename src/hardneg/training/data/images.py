"""Named and local image data sets: images, labels and ids, in memory, ready for a device.

    load("digits", "train")                 8 x 8 grey digits, part of scikit-learn
    load("fashion-mnist", "test")           IDX files
    load("cifar10", "train", root="data")   the published archive, or where torchvision put it; also cifar100
    load("folder:photos@64")                class folders, or train/ and test/ with class folders; @64 or size=64
                                            resizes the images to 64 x 64
    load("npz:images.npz")                  arrays images and labels, optionally test_images and test_labels
    load("hf:uoft-cs/cifar10")              a data set of the Hugging Face hub or its cache, by `datasets`

Ids are unique over both splits. Where a data set has no test split, a fixed fifth is held out, stratified by label;
without labels, or with one class, there is nothing to evaluate, and the train split includes this fifth.
A folder's test split is test/ or val/, the first whose images have classes: class folders, or the table
``val/val_annotations.txt`` of Tiny-ImageNet.
Images have 8 bits per channel: 16-bit grey images are scaled, deeper ones raise; transparency is shown on white.
Labels are integers or text; a negative label means none: every image of a split has a label, or none has.

``load`` reads one split and ``load_splits`` both at once; ``ImageData`` is the data kind that training uses. Files are
read by named.py and image_files.py.
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
from hardneg.training.data.items import (
    CLASSIFIED,
    TEST_SHARE,
    Evaluation,
    Items,
    Shown,
    Splits,
    features_of_splits,
    register,
)
from hardneg.training.data.named import NAMED
from hardneg.training.encoders import Encoder, Represent, auto_encoder, build_encoder, check_encoder
from hardneg.training.evaluation.embeddings import evaluate_embeddings
from hardneg.training.evaluation.pairs import alignment
from hardneg.training.normalisation import Scale, scale_of
from hardneg.training.options import TrainOptions

SPLITS = ("train", "test", "all")
USAGE = {"digits": "It needs no files", "folder:PATH": "It has a folder of images for each class"}
"""How data is used, shown in the error about an unknown name."""

PROBED = 64
"""Images at most on which a user's views are compared with what evaluation would see."""


@dataclass(frozen=True, eq=False)
class ImageData(Items):
    """Images of one size with ids and, where known, labels.

    Attributes:
        images: uint8 images [n, c, h, w] with 1 or 3 channels.
        labels: Class of each image, int64 [n], or None.
        ids: Id of each image, int64 [n].
        name: Name of the data.
        classes: Names of the classes.
        augment: The views, set by ``prepared``.
        make_views: The function that makes views, compiled with --compile; set by ``prepared``.
    """

    noun: ClassVar[str] = "image"
    has: ClassVar[str] = "pixels"
    weight_decay: ClassVar[float] = 1e-6  # as in the code of DCL and HCL
    max_held_out: ClassVar[float] = math.inf
    how_to_label: ClassVar[str] = "use class folders or an array `labels`"

    images: Annotated[Tensor, "n c h w"]
    labels: Annotated[Tensor, "n"] | None
    ids: Annotated[Tensor, "n"]
    name: str
    classes: tuple[str, ...] = ()

    augment: Augmentation | None = field(default=None, repr=False)
    make_views: MakeImageViews | None = field(default=None, repr=False)

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
        """Raise for data, augmentations and encoders that cannot be used, without reading data."""
        with located("--data"):
            check_name(options.data)
        with located("--augment"):
            check_augment(options.augment)
        with located("--encoder"):
            if options.encoder != "auto":
                check_encoder(options.encoder)
            # Built without memory, to see that the library is installed and has the model. A user's own function is
            # called only once the images are known.
            if ":" in options.encoder and not names_a_file(options.encoder):
                with torch.device("meta"):
                    build_encoder(options.encoder, 3, projection_dim=options.dim)

    @classmethod
    def read(cls, path: str, options: TrainOptions) -> Splits:
        """Read the train and test split.

        Args:
            path: Unused: ``options.data`` has the whole name.
            options: The options of the run.
        """
        return Splits(*load_splits(options.data, options.data_root))

    @classmethod
    def splits(cls, options: TrainOptions) -> Splits:
        """Read the splits of a run; with ``evaluate_on="validation"`` the test images are not even read."""
        if options.evaluate_on == "validation":  # the test images are not even read
            return Splits(*load(options.data, "train", options.data_root).held_out(options.validation_share))
        return cls.read("", options)

    @classmethod
    def evaluated(cls, options: TrainOptions) -> ImageData:
        """Read only the images that a run is evaluated on."""
        if options.evaluate_on == "validation":
            return load(options.data, "train", options.data_root).held_out(options.validation_share)[1]
        return load(options.data, "test", options.data_root)

    def prepared(self, options: TrainOptions, views: Any = None) -> ImageData:
        """Return the images with the views of ``--augment`` or a user's own.

        Args:
            options: The options of the run.
            views: An augmentation, or a callable (images, ids, epoch, seed) -> (view 1, view 2).
        """
        if views is None:
            on_gpu = options.device != "cpu" and torch.cuda.is_available()
            augment = augment_for_text(options.augment, self.images, channels_last=on_gpu)
        else:
            augment = as_augmentation(views)
        return replace(self, augment=augment, make_views=augment.compiled() if options.compile else augment.views)

    def described(self) -> str:
        """Describe the views in one line, for the record of a run."""
        return described(self._prepared(self.augment))

    def views(self, index: Annotated[Tensor, "b"], epoch: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return two views of the images at some positions.

        Args:
            index: Positions [b].
            epoch: The epoch.
            seed: The seed.
        """
        return self.views_of(self.images[index], self.ids[index], epoch, seed)

    def views_of(self, images: Tensor, ids: Annotated[Tensor, "b"], epoch: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return two views of any images; those of an id are the same within an epoch.

        Args:
            images: uint8 images [b, c, h, w].
            ids: Id of each image [b].
            epoch: The epoch.
            seed: The seed.
        """
        make: MakeImageViews = self._prepared(self.make_views)
        return make(images, ids, epoch, seed)

    def plain(self, index: Annotated[Tensor, "b"]) -> Tensor:
        """Return the images at positions [b], normalised but not augmented."""
        augment: Augmentation = self._prepared(self.augment)
        return augment.plain(self.images[index])

    def scale(self) -> Scale:
        """Return the mean and std by which evaluation normalises, or {} if unknown."""
        return scale_of(self._prepared(self.augment), self.images[:PROBED])

    def check_views(self, options: TrainOptions) -> None:
        """Raise if evaluation would see images of another scale or size than a user's own views."""
        some = slice(min(options.batch_size, PROBED))
        check_plain(self._prepared(self.augment), self.images[some], self.ids[some], options.seed)

    @classmethod
    def rebuilt(cls, record: dict[str, Any], options: TrainOptions) -> Encoder:
        """Build the encoder of a run from the shape of its images.

        Args:
            record: Record of the training images.
            options: The options of the run.
        """
        channels, height, width = record["shape"]
        size = max(height, width)
        name = auto_encoder(size) if options.encoder == "auto" else options.encoder
        return build_encoder(name, channels, projection_dim=options.dim, seed=options.seed, size=size)

    def chosen(self, options: TrainOptions) -> dict[str, Any]:
        """Return the encoder and augmentation that "auto" stands for."""
        with torch.device("meta"):
            encoder = repr(self.encoder(options))
        return {"encoder": encoder, "augment": repr(self.prepared(options).augment)}

    def shown(self, position: int) -> Shown:
        """Return a thumbnail of the image at a position."""
        return Shown(picture=thumbnail(self.images[position]), tiny=max(self.images.shape[2:]) <= 32)

    def record(self) -> dict[str, Any]:
        """Return number, shape and number of classes of the images."""
        return {"images": len(self), "shape": list(self.images.shape[1:]), "classes": self.num_labels()}

    def check_like(self, record: dict[str, Any]) -> None:
        """Raise if the number of channels differs from the record; sizes may differ."""
        before, now = record["shape"][0], self.images.shape[1]
        if before != now:
            raise ArgumentError("evaluate", f"images with {before} channels, like the training images", f"{now}")

    def measures(self, splits: Splits, options: TrainOptions) -> list[str]:
        """Return kNN, 1-NN and linear probe; raise if the images cannot be evaluated.

        Args:
            splits: The splits of the run.
            options: The options of the run.
        """
        splits.fitted.labelled("compare")
        splits.test.labelled(f"compare, of its {options.evaluate_on} images,")
        return [*CLASSIFIED]

    def evaluate(self, splits: Splits, represent: Represent, options: TrainOptions) -> Evaluation:
        """Evaluate features by class; without labels or with one class, return the reason instead.

        Args:
            splits: The splits of the run.
            represent: The features of the trained encoder.
            options: The options of the run.
        """
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
    """Return why there is nothing to evaluate, or ""."""
    if data.labels is None:
        return "its training images have no labels"
    if test.labels is None:
        return "the images to evaluate it on have no labels"
    return "its training images are of one class" if data.num_labels() < 2 else ""


def load(name: str, split: str = "train", root: str | Path | None = None, *, size: int | None = None) -> ImageData:
    """Read one split of a named data set, a folder or a file.

    Args:
        name: Name of the data, one of the forms in the module's docstring.
        split: "train", "test" or "all".
        root: Folder of a named data set; by default HARDNEG_DATA (else the user's cache) and the usual places.
        size: Resize image files to squares with this side; named data sets keep their size.

    Raises:
        UnknownName: If the name has none of the forms.
        ArgumentError: If images or labels cannot be used.
        NoFile: If the data does not exist.

    Example:
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
    """Read the train and test split as ``load`` does, checking that their images have one size.

    Args:
        name: Name of the data.
        root: Folder of a named data set.

    Example:
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
    """Divide into train and test split; where no accuracy can be measured, the train split is everything."""
    rest, held = whole.held_out(TEST_SHARE, seed=0)
    return (rest if whole.num_labels() > 1 else whole), held


def _read(name: str, split: str, root: str | Path | None, size: int | None) -> ReadSplits:
    check_name(name)
    kind, _, path = name.partition(":")
    if kind in ("folder", "hf") and (square := re.fullmatch(r"(.+)@(\d+)", path)):
        path, size = square[1], int(square[2])
    if size is not None and (kind not in ("folder", "hf") or size < 4):
        raise argument_error("data", "a size of at least 4 pixels, for folder: and hf: only", "size", size)
    if kind == "folder":
        return read_folder(Path(path), split, size)
    if kind == "hf":
        return read_hub(path, split, size)
    return read_npz(Path(path)) if kind == "npz" else NAMED[kind](split, None if root is None else Path(root))


def check_name(name: str) -> None:
    """Raise unless ``load`` accepts the name; reads nothing, so that the command line can check first."""
    kind, colon, path = name.partition(":")
    if not (kind in ("folder", "npz", "hf") and path) and not (kind in NAMED and not colon):
        raise UnknownName(name, [*NAMED, "folder:PATH", "npz:PATH", "hf:NAME"], usage=USAGE)


def _chosen(name: str, found: ReadSplits, split: str) -> ImageData:
    """Return the requested parts; ids continue from the train split into the test split."""
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
    """Convert uint8 images [n, h, w], [n, c, h, w] or [n, h, w, c] to [n, c, h, w].

    Args:
        name: Name of the data, for the error.
        images: The images.

    Raises:
        ArgumentError: If the type is not uint8 or the shape is none of these.
    """
    if images.dtype != np.uint8:
        fix = "use (images * 255).round().astype('uint8') for values in [0, 1]" if images.dtype.kind == "f" else None
        raise ArgumentError("data", f"uint8 images in {name!r}", f"images of {images.dtype}", fix)
    if images.ndim == 3:
        return images[:, None]
    if images.ndim == 4 and images.shape[1] not in (1, 3) and images.shape[3] in (1, 3):
        return images.transpose(0, 3, 1, 2)
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        what = "images [n, h, w], [n, c, h, w] or [n, h, w, c] with 1 or 3 channels"
        raise ArgumentError("data", f"{what} in {name!r}", f"images={images.shape}")
    return images
