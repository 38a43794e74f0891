"""A user's images: folders, arrays and data sets of the hub, read as NumPy arrays of 8 bits."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hardneg.notices import argument_error, optional, warn_once

Array = NDArray[Any]


class Part(NamedTuple):
    """One split as it was read: images [n, h, w], [n, h, w, c] or [n, c, h, w]."""

    images: Array
    labels: Array | None
    classes: Sequence[str]
    origin: str = ""


class Found(NamedTuple):
    """What a reader found: the splits asked for; without ``num_train`` there is one part only, to be split here."""

    train: Part | None
    test: Part | None = None
    num_train: int | None = None


def read_npz(path: Path) -> Found:
    if not path.is_file():
        raise FileNotFoundError(f"load needs an .npz file with arrays images and labels, got no file {path}.")
    try:
        with np.load(path) as file:
            arrays = {key: file[key] for key in ("images", "labels", "test_images", "test_labels") if key in file}
    except zipfile.BadZipFile as error:
        raise ValueError(f"load needs a whole .npz file, got {path}, which is damaged: {error}.") from error
    except ValueError as error:
        raise ValueError(f"load needs plain arrays, all images of one size, got objects in {path}.") from error
    if "images" not in arrays:
        raise ValueError(f"load needs an array `images` [n, h, w], [n, c, h, w] or [n, h, w, c], got none in {path}.")
    labels, test_labels = (
        known_labels(arrays[key], f"{key} of {path}") if key in arrays else None for key in ("labels", "test_labels")
    )
    known = [part for part in (labels, test_labels) if part is not None]
    names, numbers = np.unique(np.concatenate(known), return_inverse=True) if known else ((), np.empty(0))
    classes, cut = [str(name) for name in names], 0 if labels is None else len(labels)
    train = Part(arrays["images"], None if labels is None else numbers[:cut], classes)
    if "test_images" not in arrays:
        return Found(train)
    test = Part(arrays["test_images"], None if test_labels is None else numbers[cut:], classes)
    return Found(train, test, num_train=len(train.images))


def known_labels(labels: Array, where: str) -> Array | None:
    """The labels, or None where no image has one: a number below 0, also as text, and NaN say that there is none."""
    if labels.ndim != 1:
        raise ValueError(f"load needs one label per image, got labels={labels.shape} in {where}.")
    if labels.dtype.kind in "US":
        missing = np.isin(labels, [name for name in np.unique(labels) if _NEGATIVE.fullmatch(str(name))])
    else:
        missing = ~(labels >= 0)
    if missing.any() and not missing.all():
        raise ValueError(
            f"load needs a label for every image or for none, got {missing.sum()} of {len(labels)} without one (below "
            f"0) in {where}; leave these images out, or take all labels away to train without them."
        )
    return None if missing.any() else labels


_NEGATIVE = re.compile(r"-\d+(\.\d+)?")
_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".webp", ".tif", ".tiff"}


def read_folder(folder: Path, split: str, size: int | None) -> Found:
    if not folder.is_dir():
        raise FileNotFoundError(f"load needs a folder of images, got no folder {folder}.")
    train = folder / "train"
    names = ("test", "val", "valid", "validation")
    test = next((folder / name for name in names if (folder / name).is_dir()), None)
    if not train.is_dir() or test is None:
        folder = train if train.is_dir() else folder
        return Found(_folder_part(folder, _class_names(folder), size))
    classes = sorted(set(_class_names(train)) | set(_class_names(test)))
    return Found(
        _folder_part(train, classes, size) if split != "test" else None,
        _folder_part(test, classes, size) if split != "train" else None,
        num_train=len(_image_files(train)),
    )


def _class_names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _image_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in _SUFFIXES and not p.name.startswith("."))


def _folder_part(folder: Path, classes: list[str], size: int | None) -> Part:
    files = _image_files(folder)
    if not files:
        raise FileNotFoundError(f"load needs images ({', '.join(sorted(_SUFFIXES))}), got none in {folder}.")
    of_file = [path.relative_to(folder).parts[0] for path in files]  # the class, where there are any
    loose = sum(name not in classes for name in of_file)
    if classes and loose:
        raise ValueError(f"load needs every image in a class folder, got {loose} beside the class folders in {folder}.")
    with ThreadPoolExecutor() as pool:
        images = same_shape(list(pool.map(partial(read_image, size=size), files)), [str(path) for path in files])
    _warn_if_dark(images, folder)
    known = [name for name in classes if not _NEGATIVE.fullmatch(name)]
    labels = known_labels(np.array(of_file), f"the class folders of {folder}") if classes else None
    return Part(images, None if labels is None else np.array([known.index(name) for name in labels]), known)


def _warn_if_dark(images: Array, folder: Path) -> None:
    """Images of 12 bits in files of 16 come out almost black; nobody would see it."""
    if (brightest := int(images.max())) <= 16:
        warn_once(
            f"image_files.dark.{folder}",
            f"The brightest pixel in {folder} is {brightest} of 255, so hardly anything is left of the images; files "
            "of 16 bits are read over their full range of 65,535. Write them as 8 bits over the range that they use.",
        )


def read_hub(path: str, split: str, size: int | None) -> Found:
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(f"hf:{path} needs the package datasets; pip install datasets.") from error
    found = datasets.load_dataset(path)
    train = found["train"] if "train" in found else next(iter(found.values()))
    test = next((found[name] for name in ("test", "validation") if name in found and found[name] is not train), None)
    if test is None:
        return Found(_hub_part(path, train, size))
    return Found(
        _hub_part(path, train, size) if split != "test" else None,
        _hub_part(path, test, size) if split != "train" else None,
        num_train=len(train),
    )


def _hub_part(path: str, rows: Any, size: int | None) -> Part:
    """The first column of images and the first of class labels."""
    kinds = {name: type(feature).__name__ for name, feature in rows.features.items()}
    image = next((name for name, kind in kinds.items() if kind == "Image"), None)
    label = next((name for name, kind in kinds.items() if kind == "ClassLabel"), None)
    if image is None:
        raise ValueError(f"load needs a column of images in hf:{path}, got columns {kinds}.")
    where = [f"row {i} of hf:{path}" for i in range(len(rows))]
    images = same_shape([pixels(*row, size) for row in zip(rows[image], where, strict=True)], where)
    if label is None:
        return Part(images, None, ())
    numbers = np.array([-1 if number is None else number for number in rows[label]])
    return Part(images, known_labels(numbers, f"{label} of hf:{path}"), rows.features[label].names)


def read_image(path: Path, size: int | None = None) -> Array:
    Image = optional("PIL.Image", str(path), extra="vision")  # noqa: N806
    try:
        with Image.open(path) as image:
            return pixels(image, str(path), size)
    except OSError as error:
        raise ValueError(f"load needs readable images, got {path}: {error}.") from error


def pixels(image: Any, where: str, size: int | None = None) -> Array:
    """An image as uint8 [h, w] or [h, w, 3]; ``size`` fits it into a square, cutting what is too long."""
    if isinstance(image, np.ndarray | Tensor):
        if size is not None:
            raise argument_error("load", "PIL images to resize", "image", type(image).__name__)
        return np.asarray(image)
    from PIL import ImageOps

    upright = _eight_bits(ImageOps.exif_transpose(image), image.format, where)
    upright = upright.convert("L" if upright.mode in ("1", "L", "LA") else "RGB")
    return np.asarray(upright if size is None else ImageOps.fit(upright, (size, size)))


def _eight_bits(image: Any, format: str | None, where: str) -> Any:
    """16 bits of grey are divided by 257, so that 65,535 is white; Pillow would cut them off at 255.

    Mode I is 16 bits in PNG (older Pillows) and in PGM, which Pillow scales to them. Elsewhere, as in mode F, nobody
    knows which value is white.
    """
    if not image.mode.startswith(("I", "F")):
        return image
    if not image.mode.startswith("I;16") and not (image.mode == "I" and format in ("PNG", "PPM")):
        raise ValueError(
            f"load needs images of 8 or 16 bits, got mode {image.mode!r} in {where}, where nobody knows which value is "
            "white; write it as 8 bits over the range that you mean."
        )
    from PIL import Image

    return Image.fromarray(np.rint(np.asarray(image) / 257.0).astype(np.uint8))


def same_shape(images: list[Array], where: list[str]) -> Array:
    if len({image.ndim for image in images}) > 1:  # a few grey images among coloured ones
        images = [image if image.ndim == 3 else np.repeat(image[:, :, None], 3, axis=2) for image in images]
    for image, place in zip(images, where, strict=True):
        if image.shape != images[0].shape:
            raise ValueError(
                f"load needs images of one size, got {images[0].shape[:2]} in {where[0]} and {image.shape[:2]} in "
                f"{place}; size=64, or folder:PATH@64 on the command line, makes all of them 64 x 64."
            )
    return np.stack(images)
