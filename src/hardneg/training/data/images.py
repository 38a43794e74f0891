"""Named and local image data sets: images, labels and ids, in memory, ready for a device.

    load("digits", "train")                 8 x 8 grey digits, part of scikit-learn
    load("fashion-mnist", "test")           IDX files
    load("cifar10", "train", root="data")   the published archive, or where torchvision put it; also cifar100
    load("folder:photos@64")                class folders, or train/ and test/ with class folders; @64 or size=64
                                            resizes the images to 64 x 64
    load("list:images.csv")                 paths, classes and splits in columns of a table
    load("tar:shards")                      shards of WebDataset
    load("stl10")                           STL10's binaries
    load("npz:images.npz")                  arrays images and labels, optionally test_images and test_labels
    load("hf:uoft-cs/cifar10")              a data set of the Hugging Face hub or its cache, by `datasets`

Ids are unique over both splits. Where a data set has no test split, a fixed fifth is held out, stratified by label;
without labels, or with one class, there is nothing to evaluate, and the train split includes this fifth.
The test split is test or val, the first whose images have classes: class folders, or a table of annotations such as
those of Tiny-ImageNet and ImageNet.
Images have 8 bits per channel: 16-bit grey images are scaled, deeper ones raise; transparency is shown on white.
Labels are integers or text; a negative label means none: every image of a split has a label, or none has.

``load`` reads one split and ``load_splits`` both at once; ``ImageData`` is the data kind that training uses. Files are
read by named.py and image_files.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
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
from hardneg.training.data.decoding import channels_first
from hardneg.training.data.given import GIVEN, read_given
from hardneg.training.data.image_files import (
    ROLES,
    ReadSplits,
    SplitImages,
    read_folder,
    read_hub,
    read_list,
    read_npz,
    read_tar,
)
from hardneg.training.data.inputs import joined
from hardneg.training.data.items import (
    CLASSIFIED,
    KINDS,
    PREFETCHED,
    TEST_SHARE,
    Evaluation,
    Items,
    Shown,
    Splits,
    features_of_splits,
    register,
)
from hardneg.training.data.lazy_images import LazyImages, Opened, Opening, opened
from hardneg.training.data.named import NAMED, read_stl10
from hardneg.training.encoders import Encoder, Represent, auto_encoder, build_encoder, check_encoder
from hardneg.training.evaluation.embeddings import evaluate_embeddings
from hardneg.training.evaluation.pairs import alignment
from hardneg.training.normalisation import Scale, scale_of
from hardneg.training.options import HeadShape, TrainOptions

SPLITS = ("train", "test", "all")
USAGE = {"digits": "It needs no files", "folder:PATH": "It has a folder of images for each class"}
"""How data is used, shown in the error about an unknown name."""

FILES: dict[str, Callable[[Any, str], ReadSplits]] = {
    "folder": read_folder,
    "list": read_list,
    "tar": read_tar,
    "hf": read_hub,
    GIVEN: read_given,
}
"""Readers of (path, splits) for images that are decoded when they are needed, by prefix."""

FORMS = {"folder": "folder:PATH", "list": "list:FILE", "tar": "tar:PATH", "npz": "npz:PATH", "hf": "hf:NAME"}
"""How data of each prefix is named."""

DECODED = 8
"""Images that are decoded at a time to cut their crops, since photos may take 50 MB each."""

PROBED = 64
"""Images at most on which a user's views are compared with what evaluation would see."""


@dataclass(frozen=True, eq=False)
class ImageData(Items):
    """Images of one size with ids and, where known, labels.

    Attributes:
        images: uint8 images [n, c, h, w] with 1 or 3 channels, or images that are decoded when they are needed.
        labels: Class of each image, int64 [n], or None.
        ids: Id of each image, int64 [n].
        name: Name of the data.
        classes: Names of the classes.
        digests: Digest of the file of each image, int64 [n], which stands for its pixels in the fingerprint.
        augment: The views, set by ``prepared``.
        make_views: The function that makes views, compiled with --compile; set by ``prepared``.
    """

    noun: ClassVar[str] = "image"
    has: ClassVar[str] = "pixels"
    weight_decay: ClassVar[float] = 1e-6  # as in the code of DCL and HCL
    max_held_out: ClassVar[float] = math.inf
    how_to_label: ClassVar[str] = "use class folders or an array `labels`"

    images: Annotated[Tensor, "n c h w"] | LazyImages
    labels: Annotated[Tensor, "n"] | None
    ids: Annotated[Tensor, "n"]
    name: str
    classes: tuple[str, ...] = ()
    digests: Annotated[Tensor, "n"] | None = field(default=None, repr=False)

    augment: Augmentation | None = field(default=None, repr=False)
    make_views: MakeImageViews | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        shape = tuple(self.images.shape)
        if getattr(self.images, "dtype", torch.uint8) != torch.uint8 or len(shape) != 4 or shape[1] not in (1, 3):
            got = f"images={shape} of {getattr(self.images, 'dtype', None)}"
            raise ArgumentError(f"ImageData {self.name!r}", "uint8 images [n, 1 or 3, h, w]", got)
        super().__post_init__()

    def __len__(self) -> int:
        return len(self.images)

    @classmethod
    def of(
        cls,
        images: Opened,
        name: str,
        labels: Array | None = None,
        classes: Sequence[Any] = (),
        first: int = 0,
        ids: Array | None = None,
    ) -> ImageData:
        """Return opened images as a split.

        Args:
            images: The images.
            name: Name of the data.
            labels: Class of each image of the source, or None.
            classes: Names of the classes.
            first: Id of the first image of the source.
            ids: Id of each image of the source, instead.
        """
        known = None if labels is None else torch.from_numpy(labels.astype(np.int64))
        if known is not None and images.digests is not None:  # files, of which some may have been skipped
            known = known[images.positions]
        names = tuple(str(one) for one in classes)
        numbers = first + images.positions
        if ids is not None:
            numbers = torch.from_numpy(ids.astype(np.int64))[images.positions]
        return cls(images.images, known, numbers, name, names, images.digests)

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
        how = Opening(None, options.cache_images, options.bad_images)
        return load_splits(options.data, options.data_root, how, options.splits, options.evaluate_on != "validation")

    @classmethod
    def splits(cls, options: TrainOptions) -> Splits:
        """Read the splits of a run; with ``evaluate_on="validation"`` the test images are not even read."""
        found = cls.read("", options)
        if options.evaluate_on != "validation":
            return found
        rest, held = found.fitted.held_out(options.validation_share)
        return Splits(rest, held) if found.probe is None else Splits(found.train, held, rest)

    @classmethod
    def evaluated(cls, options: TrainOptions) -> ImageData:
        """Read only the images that a run is evaluated on."""
        if options.evaluate_on == "validation":
            validation: ImageData = cls.splits(options).test
            return validation
        how = {"cache": options.cache_images, "bad_images": options.bad_images, "splits": options.splits}
        return load(options.data, "test", options.data_root, **how)  # type: ignore[arg-type]

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

    def pixels(self, index: Annotated[Tensor, "b"] | slice) -> Annotated[Tensor, "b c h w"]:
        """Return the images at some positions as uint8, on the device of the ids.

        Args:
            index: Positions [b], or a slice.
        """
        if isinstance(self.images, Tensor):
            return self.images[index]
        chosen = self.images[index if isinstance(index, slice) else index.cpu()]
        return chosen.pixels().to(self.ids.device)

    @property
    def fetches(self) -> bool:
        """Whether workers prepare views: for images that are decoded when they are needed."""
        return isinstance(self.images, LazyImages)

    def estimate(self, batch_size: int, workers: int) -> str:
        """Return the size of images that are decoded when they are needed, and of the batches that are held.

        Args:
            batch_size: Images per batch of a rank.
            workers: Number of worker processes of a rank.
        """
        if isinstance(self.images, Tensor):
            return ""
        (n, channels, height, width), kept = self.images.shape, self.images.kept
        one, held = channels * height * width, PREFETCHED * workers + 1
        state = "decoded in advance" if kept else f"decoded when needed ({n * one / 1e9:.3g} GB if all were kept)"
        batches = f"up to {held} batches at a time, {2 * held * batch_size * one / 1e6:.2g} MB of crops on each rank"
        return f"{n:,} images of {width} x {height} pixels, {state}; {batches}."

    def fetch(self, index: Annotated[Tensor, "b"], epoch: int, seed: int) -> Tensor:
        """Return what ``views`` starts from: decoded images, or a crop of the original image for each view.

        Args:
            index: Positions [b].
            epoch: The epoch.
            seed: The seed.
        """
        return self.fetch_of(index, self.ids[index], epoch, seed)

    def fetch_of(self, index: Annotated[Tensor, "b"], ids: Annotated[Tensor, "b"], epoch: int, seed: int) -> Tensor:
        """Return what ``views_of`` starts from, with views that belong to these ids.

        Args:
            index: Positions [b].
            ids: Id of each image [b].
            epoch: The epoch.
            seed: The seed.
        """
        crops = getattr(self._prepared(self.augment), "crops", None)
        if crops is None or isinstance(self.images, Tensor) or self.images.uniform:
            return self.pixels(index)
        parts = zip(index.cpu().split(DECODED), ids.cpu().split(DECODED), strict=True)  # type: ignore[no-untyped-call]
        made = [crops(self.images[rows].pictures(), of, epoch, seed, self.images.size) for rows, of in parts]
        return torch.cat(made, 1)

    def views(
        self, index: Annotated[Tensor, "b"], epoch: int, seed: int, fetched: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return two views of the images at some positions.

        Args:
            index: Positions [b].
            epoch: The epoch.
            seed: The seed.
            fetched: What ``fetch`` has returned for the same arguments, if it was called before.
        """
        fetched = self.fetch(index, epoch, seed) if fetched is None else fetched
        return self.views_of(fetched, self.ids[index], epoch, seed)

    def views_of(self, images: Tensor, ids: Annotated[Tensor, "b"], epoch: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return two views of any images; those of an id are the same within an epoch.

        Args:
            images: uint8 images [b, c, h, w], or what ``fetch_of`` returns.
            ids: Id of each image [b].
            epoch: The epoch.
            seed: The seed.
        """
        make: MakeImageViews = self._prepared(self.make_views)
        return make(images.to(ids.device, non_blocking=True), ids, epoch, seed)

    def plain(self, index: Annotated[Tensor, "b"]) -> Tensor:
        """Return the images at positions [b], normalised but not augmented."""
        augment: Augmentation = self._prepared(self.augment)
        return augment.plain(self.pixels(index))

    def scale(self) -> Scale:
        """Return the mean and std by which evaluation normalises, or {} if unknown."""
        return scale_of(self._prepared(self.augment), self.pixels(slice(PROBED)))

    def check_views(self, options: TrainOptions) -> None:
        """Raise if evaluation would see images of another scale or size than a user's own views."""
        some = slice(min(options.batch_size, PROBED))
        check_plain(self._prepared(self.augment), self.pixels(some), self.ids[some], options.seed)

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
        head = {"auto": options.projector, "mlp": HeadShape(), "linear": None}[options.head]
        return build_encoder(name, channels, projection_dim=options.dim, seed=options.seed, size=size, head=head)

    def chosen(self, options: TrainOptions) -> dict[str, Any]:
        """Return the encoder and augmentation that "auto" stands for."""
        with torch.device("meta"):
            encoder = repr(self.encoder(options))
        return {"encoder": encoder, "augment": repr(self.prepared(options).augment)}

    def shown(self, position: int) -> Shown:
        """Return a thumbnail of the image at a position."""
        return Shown(
            picture=thumbnail(self.pixels(slice(position, position + 1))[0]), tiny=max(self.images.shape[2:]) <= 32
        )

    def content(self) -> Iterator[tuple[str, Any]]:
        """Iterate over what the fingerprint covers: pixels, or the digests of files with the size of the images."""
        for name, part in super().content():
            if name == "images" and self.digests is not None:
                yield name, list(self.images.shape[1:])
            else:
                yield name, part

    def record(self) -> dict[str, Any]:
        """Return number, shape and number of classes of the images."""
        return {"images": len(self), "shape": list(self.images.shape[1:]), "classes": self.num_labels()}

    def check_like(self, record: dict[str, Any]) -> None:
        """Raise if the number of channels differs from the record; sizes may differ."""
        before, now = record["shape"][0], self.images.shape[1]
        if before != now:
            raise ArgumentError("evaluate", f"images with {before} channels, like the training images", f"{now}")

    def measures(self, splits: Splits, options: TrainOptions) -> list[str]:
        """Return kNN, 1-NN and linear probe; raise if the images have no classes.

        Args:
            splits: The splits of the run.
            options: The options of the run.
        """
        splits.fitted.labelled("compare")
        splits.test.labelled(f"compare, of its {options.evaluate_on} images,")
        return [*CLASSIFIED]

    def evaluate(self, splits: Splits, represent: Represent, options: TrainOptions) -> Evaluation:
        """Evaluate features by class; without labels or with one class, by retrieval of the second view.

        Args:
            splits: The splits of the run.
            represent: The features of the trained encoder.
            options: The options of the run.
        """
        if why := _no_accuracy(splits.fitted, splits.test):
            figures = splits.test.by_retrieval(represent).figures
            return Evaluation({**figures, "no_accuracy": why}, {"test_x": represent.items(splits.test)})
        arrays = features_of_splits(splits, represent)
        figures = evaluate_embeddings(*arrays.values(), seed=0)
        return Evaluation(figures | {"alignment": alignment(*represent.views(splits.test))}, arrays)

    def _prepared(self, part: Any) -> Any:
        assert part is not None, "views are those of prepared(options)"
        return part


for _name in NAMED:
    register(ImageData, _name, _name)
for _name, _form in FORMS.items():
    register(ImageData, _name, _form)
KINDS[GIVEN] = ImageData  # not in the help: there is nothing to type


def _no_accuracy(data: ImageData, test: ImageData) -> str:
    """Return why there is nothing to evaluate, or ""."""
    if data.labels is None:
        return "its training images have no labels"
    if test.labels is None:
        return "the images to evaluate it on have no labels"
    return "its training images are of one class" if data.num_labels() < 2 else ""


def load(
    name: str,
    split: str = "train",
    root: str | Path | None = None,
    *,
    size: int | None = None,
    cache: str = "auto",
    bad_images: str = "stop",
    splits: str = "",
) -> ImageData:
    """Read one split of a named data set, a folder or a file.

    Args:
        name: Name of the data, one of the forms in the module's docstring.
        split: "train", "test" or "all".
        root: Folder of a named data set; by default HARDNEG_DATA (else the user's cache) and the usual places.
        size: Resize image files to squares with this side; named data sets keep their size.
        cache: Whether image files are decoded in advance: "auto", "memory", "disk" or "none".
        bad_images: "stop" raises for unreadable image files, "skip" leaves them out.
        splits: Names of the splits, such as "train=train,test=val"; empty for the usual ones.

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
    found, parts = _read(name, split, root, Opening(size, cache, bad_images), splits)
    if found.num_train is None and split != "all":
        return _divided(parts["train"])[split == "test"]
    return parts[split] if split != "all" else _joined([parts[role] for role in ("train", "test") if role in parts])


def load_splits(
    name: str, root: str | Path | None = None, how: Opening = Opening(), splits: str = "", tested: bool = True
) -> Splits:
    """Read the splits of a run as ``load`` does, checking that their images have one size.

    Args:
        name: Name of the data.
        root: Folder of a named data set.
        how: How image files are opened.
        splits: Which splits are used for what, as ``--splits``.
        tested: Whether the test split is read; otherwise it is None.

    Example:
        >>> [len(data) for data in load_splits("digits")[:2]]
        [1437, 360]
    """
    found, parts = _read(name, "all" if tested else "train", root, how, splits)
    train, test = _divided(parts["train"]) if found.num_train is None else (parts["train"], parts.get("test"))
    probe = parts.get("probe")
    fitted = train if probe is None else probe
    if test is not None and fitted.labels is not None and test.labels is not None:
        warn_of_unseen_classes(fitted.labels, test.labels, test.classes)
    return Splits(train, test, probe)


def _divided(whole: ImageData) -> tuple[ImageData, ImageData]:
    """Divide into train and test split; where no accuracy can be measured, the train split is everything."""
    rest, held = whole.held_out(TEST_SHARE, seed=0)
    return (rest if whole.num_labels() > 1 else whole), held


def _read(
    name: str, split: str, root: str | Path | None, how: Opening, splits: str = ""
) -> tuple[ReadSplits, dict[str, ImageData]]:
    """Return what the reader of a name has found, and the images of each role that was requested."""
    check_name(name)
    kind, _, path = name.partition(":")
    if kind in FILES and (square := re.fullmatch(r"(.+)@(\d+)", path)):
        path, how = square[1], how._replace(side=int(square[2]))
    resized = kind in FILES or kind == "stl10"
    if how.side is not None and (not resized or how.side < 4):
        raise argument_error("data", "a size of at least 4 pixels (only image files accept one)", "size", how.side)
    folder = None if root is None else Path(root)
    if splits and not resized:
        raise ArgumentError("data", f"no --splits for {name}, whose splits are fixed", f"splits={splits!r}")
    if kind in FILES:
        found = FILES[kind](Path(path) if kind == "folder" else path, splits)
    elif kind == "stl10":
        found = read_stl10(folder, splits)
    else:
        found = read_npz(Path(path)) if kind == "npz" else NAMED[kind](split, folder)
    return found, _parts(name, found, split, how)


def check_name(name: str) -> None:
    """Raise unless ``load`` accepts the name; reads nothing, so that the command line can check first."""
    kind, colon, path = name.partition(":")
    if not (kind in (*FORMS, GIVEN) and path) and not (kind in NAMED and not colon):
        raise UnknownName(name, [*NAMED, *FORMS.values()], usage=USAGE)


def _parts(name: str, found: ReadSplits, split: str, how: Opening) -> dict[str, ImageData]:
    """Return the images of the requested roles; ids continue from one role to the next."""
    roles = {"train": ("train", "probe"), "test": ("test",), "all": ROLES}[split]
    if found.num_train is None:  # one part, which the caller divides
        roles = ("train",)
    wanted, firsts, first = {}, {}, 0
    for role in ROLES:
        part: SplitImages | None = getattr(found, role)
        if part is not None and role in roles:
            wanted[role] = part
        firsts[role] = first
        first += (found.num_train or 0) if role == "train" else 0 if part is None else len(part.images)
        if part is not None and part.ids is not None:
            first = int(part.ids.max()) + 1
    sources = [part.images for part in wanted.values() if not isinstance(part.images, np.ndarray)]
    arrays = [part.images for part in wanted.values() if isinstance(part.images, np.ndarray)]
    images = opened(name, sources, how) if sources else [_in_memory(name, one) for one in arrays]
    _check_one_size(name, [one.images.shape[1:] for one in images])
    return {
        role: ImageData.of(one, name, part.labels, part.classes, firsts[role], part.ids)
        for (role, part), one in zip(wanted.items(), images, strict=True)
    }


def _in_memory(name: str, images: Array) -> Opened:
    pixels = torch.from_numpy(np.require(channels_first(name, images), requirements=["C", "W"]))
    return Opened(pixels, torch.arange(len(pixels)), None)


def _joined(parts: list[ImageData]) -> ImageData:
    """Return the images of all parts, with labels if every part has them."""
    first, *others = parts
    if not others:
        return first

    def whole(tensors: list[Any]) -> Any:
        return None if any(one is None for one in tensors) else joined(tensors)

    labels, digests = whole([part.labels for part in parts]), whole([part.digests for part in parts])
    images, ids = whole([part.images for part in parts]), whole([part.ids for part in parts])
    return replace(first, images=images, labels=labels, ids=ids, digests=digests)


def _check_one_size(name: str, shapes: Sequence[tuple[int, ...]]) -> None:
    if len(set(shapes)) > 1:
        found = " and ".join(str(tuple(shape)) for shape in shapes)
        raise ArgumentError("data", "train and test images of one size", f"{found} in {name!r}")
