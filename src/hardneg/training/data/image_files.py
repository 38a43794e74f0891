"""Readers of a user's images (folders, .npz arrays, data sets of the hub) as 8-bit NumPy arrays.

``images.load`` calls ``read_folder``, ``read_npz`` or ``read_hub``; ``image_texts`` reads single files by
``decoded_images``. ``pixels`` converts any image to uint8.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from hardneg.core.errors import ArgumentError, FileError, NoFile, argument_error, optional, warn_once
from hardneg.io.arrays import Array, known_labels, means_no_label, read_arrays


class SplitImages(NamedTuple):
    """One split as it was read.

    Attributes:
        images: Images [n, h, w], [n, h, w, c] or [n, c, h, w].
        labels: Index of each image's class, or None.
        classes: Names of the classes.
    """

    images: Array
    labels: Array | None
    classes: Sequence[str]


class ReadSplits(NamedTuple):
    """The result of a reader.

    Attributes:
        train: The train split, or None if it was not requested.
        test: The test split, or None if it was not requested or does not exist.
        num_train: Size of the train split, also if it was not requested; None if there is one part only, which the
            caller divides.
    """

    train: SplitImages | None
    test: SplitImages | None = None
    num_train: int | None = None


_NPZ = {
    "images": "all images need one size",
    "labels": "np.array(labels, dtype=str) converts them to text",
    "test_images": "all images need one size",
    "test_labels": "np.array(labels, dtype=str) converts them to text",
}


def read_npz(path: Path) -> ReadSplits:
    """Read the arrays images and labels, and optionally test_images and test_labels, of an .npz file."""
    arrays = read_arrays("data", path, _NPZ, needed=("images",))
    labels, test_labels = (
        known_labels(arrays[key], f"{key} of {path}") if key in arrays else None for key in ("labels", "test_labels")
    )
    known = [part for part in (labels, test_labels) if part is not None]
    names, numbers = np.unique(np.concatenate(known), return_inverse=True) if known else ((), np.empty(0))
    classes, cut = [str(name) for name in names], 0 if labels is None else len(labels)
    train = SplitImages(arrays["images"], None if labels is None else numbers[:cut], classes)
    if "test_images" not in arrays:
        return ReadSplits(train)
    test = SplitImages(arrays["test_images"], None if test_labels is None else numbers[cut:], classes)
    return ReadSplits(train, test, num_train=len(train.images))


_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".webp", ".tif", ".tiff"}
_SHOWN = 5


def read_folder(folder: Path, split: str, size: int | None) -> ReadSplits:
    """Read a folder of images, with train/ and test/ (or val/) or without.

    Args:
        folder: The folder.
        split: "train" and "test" read only that split's files.
        size: Resize images to squares with this side, or None.

    Raises:
        NoFile: If the folder does not exist or has no images.
        ArgumentError: If images cannot be read, differ in size, or lie outside the class folders.
    """
    if not folder.is_dir():
        raise NoFile("data", "a folder of images", folder, "which is not a folder")
    train = folder / "train"
    tests = [folder / name for name in ("test", "val", "valid", "validation") if (folder / name).is_dir()]
    if not train.is_dir() or not tests:
        whole = train if train.is_dir() else folder
        return ReadSplits(_folder_parts([whole], folder, size)[whole])
    test = _test_folder(train, tests)
    left_out, unlabelled = {"train": test, "test": train}.get(split), None if _has_classes(test, train) else test
    parts = _folder_parts([train, test], folder, size, left_out, unlabelled)
    return ReadSplits(parts.get(train), parts.get(test), num_train=len(image_files(train)))


def _test_folder(train: Path, tests: list[Path]) -> Path:
    """Return the first folder with classes: the test images of a competition have none, its validation images do."""
    chosen = next((place for place in tests if _has_classes(place, train)), tests[0])
    if chosen != tests[0]:
        warn_once(
            f"image_files.test.{tests[0]}",
            f"The images in {tests[0]} have no classes, so those in {chosen} are used for evaluation.",
        )
    return chosen


def _has_classes(place: Path, train: Path) -> bool:
    """Return False without class folders, or with one folder that is not a training class, such as ``images``."""
    known, names = set(_class_names(train)), _class_names(place)
    return not known or len(names) > 1 or not known.isdisjoint(names)


def _folder_parts(
    places: list[Path], folder: Path, size: int | None, left_out: Path | None = None, unlabelled: Path | None = None
) -> dict[Path, SplitImages]:
    """Read the splits in these folders, except ``left_out``, with the classes of all but ``unlabelled``."""
    classes = sorted({name for place in places if place != unlabelled for name in _class_names(place)})
    listed = {
        place: _classes_of_files(place, [] if place == unlabelled else classes) for place in places if place != left_out
    }
    decoded = decoded_images([path for files in listed.values() for path in files], folder, size)
    known = [name for name in classes if not means_no_label(name)]
    parts = {}
    for place, files in listed.items():
        images = same_shape([decoded.pop(path) for path in files], [str(path) for path in files])
        _warn_if_dark(images, place)
        of_files = np.array([*files.values()])
        labels = known_labels(of_files, f"the class folders of {place}") if classes and place != unlabelled else None
        numbers = None if labels is None else np.array([known.index(name) for name in labels])
        parts[place] = SplitImages(images, numbers, known)
    return parts


def _class_names(folder: Path) -> list[str]:
    if (table := _annotations(folder)) is not None:
        return sorted(set(table.values()))
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _annotations(folder: Path) -> dict[str, str] | None:
    """Return the class of each file name from a table such as Tiny-ImageNet's ``val/val_annotations.txt``, if any."""
    path = folder / f"{folder.name}_annotations.txt"
    if not path.is_file():
        return None
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line]
    if any(len(row) < 2 for row in rows):
        raise FileError("data", "a file name and a class in each line, separated by a tab", path)
    return {name: label for name, label, *_ in rows}


def image_files(folder: Path) -> list[Path]:
    """Return the image files below a folder, sorted, without hidden files and folders."""
    found = (p for p in folder.rglob("*") if p.suffix.lower() in _SUFFIXES)
    # Hidden parts count only below the folder: data in ~/.cache is there on purpose.
    return sorted(p for p in found if not any(part.startswith(".") for part in p.relative_to(folder).parts))


def _classes_of_files(folder: Path, classes: list[str]) -> dict[Path, str]:
    """Return each image file with its class, where there are classes."""
    files = image_files(folder)
    if not files:
        raise NoFile("data", f"images ({', '.join(sorted(_SUFFIXES))})", folder, "which has none")
    if classes and (table := _annotations(folder)) is not None:
        if missing := [path.name for path in files if path.name not in table]:
            got = f"{len(missing)} without one, such as {missing[0]}"
            raise ArgumentError("data", f"a class for every image in {folder.name}_annotations.txt", got)
        return {path: table[path.name] for path in files}
    found = {path: path.relative_to(folder).parts[0] for path in files}
    loose = sum(name not in classes for name in found.values())
    if classes and loose:
        got = f"{loose} images outside the class folders of {folder}"
        raise ArgumentError("data", "every image in a class folder", got)
    return found


def decoded_images(files: list[Path], folder: Path, size: int | None) -> dict[Path, Array]:
    """Decode image files in parallel; unreadable ones are reported together, so that all can be fixed at once.

    Args:
        files: The files.
        folder: Folder to which the error shows paths relatively.
        size: Resize images to squares with this side, or None.

    Raises:
        ArgumentError: If a file is not a readable image.
    """

    def decoded(path: Path) -> Array | ValueError:
        try:
            return read_image(path, size)
        except ValueError as error:
            return error

    with ThreadPoolExecutor() as pool:
        found = dict(zip(files, pool.map(decoded, files), strict=True))
    broken = {path: error for path, error in found.items() if isinstance(error, ValueError)}
    if len(broken) > 1:
        names = [str(path.relative_to(folder) if path.is_relative_to(folder) else path) for path in broken]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        listed = f"{', '.join(names[:_SHOWN])}{more}"
        got = f"{len(broken)} of {len(files)} that are unreadable in {folder}: {listed}. The first error: "
        raise ArgumentError("data", "readable images", got + str(next(iter(broken.values()))))
    for error in broken.values():
        raise error
    return {path: image for path, image in found.items() if not isinstance(image, ValueError)}


def _warn_if_dark(images: Array, folder: Path) -> None:
    """Warn about 12-bit images in 16-bit files, which would be almost black without an error."""
    if (brightest := int(images.max())) <= 16:
        warn_once(
            f"image_files.dark.{folder}",
            f"The brightest pixel in {folder} is {brightest} of 255, so the images are almost black; 16-bit files are "
            "scaled by their full range of 65,535. Convert them to 8 bits over the range that they use.",
        )


def read_hub(path: str, split: str, size: int | None) -> ReadSplits:
    """Read a data set of the Hugging Face hub or its cache.

    Args:
        path: Name of the data set.
        split: "train" and "test" read only that split.
        size: Resize images to squares with this side, or None.

    Raises:
        ArgumentError: If the data set cannot be loaded or has no images.
    """
    load = optional("datasets", f"hf:{path}", extra="text").load_dataset
    try:
        found = load(path)
    except Exception as error:  # the hub, its cache, pyarrow and fsspec raise many types, with many lines
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ArgumentError("data", "a data set of the hub or its cache", f"hf:{path} ({reason})") from error
    train = found["train"] if "train" in found else next(iter(found.values()))
    test = next((found[name] for name in ("test", "validation") if name in found and found[name] is not train), None)
    if test is None:
        return ReadSplits(_hub_part(path, train, size))
    return ReadSplits(
        _hub_part(path, train, size) if split != "test" else None,
        _hub_part(path, test, size) if split != "train" else None,
        num_train=len(train),
    )


def _hub_part(path: str, rows: Any, size: int | None) -> SplitImages:
    """Read the first column of images and the first of class labels."""
    kinds = {name: type(feature).__name__ for name, feature in rows.features.items()}
    image = next((name for name, kind in kinds.items() if kind == "Image"), None)
    label = next((name for name, kind in kinds.items() if kind == "ClassLabel"), None)
    if image is None:
        raise ArgumentError("data", f"a column of images in hf:{path}", f"columns {kinds}")
    where = [f"row {i} of hf:{path}" for i in range(len(rows))]
    images = same_shape([pixels(*row, size) for row in zip(rows[image], where, strict=True)], where)
    if label is None:
        return SplitImages(images, None, ())
    numbers = np.array([-1 if number is None else number for number in rows[label]])
    return SplitImages(images, known_labels(numbers, f"{label} of hf:{path}"), rows.features[label].names)


def read_image(path: Path, size: int | None = None) -> Array:
    """Read an image file as uint8 [h, w] or [h, w, 3], resized to a square of ``size`` if given."""
    Image = optional("PIL.Image", str(path), extra="vision")  # noqa: N806
    try:
        with Image.open(path) as image:
            return pixels(image, str(path), size)
    except (OSError, EOFError, SyntaxError, Image.DecompressionBombError) as error:
        raise ArgumentError("data", "readable images", f"{path}: {error}") from error


def pixels(image: Any, where: str, size: int | None = None) -> Array:
    """Convert an image to uint8 [h, w] or [h, w, 3].

    Args:
        image: A PIL image; arrays and tensors are returned as arrays.
        where: Where the image comes from, for the error.
        size: Resize to a square with this side, cropping the longer dimension.

    Raises:
        ArgumentError: If the image has neither 8 nor 16 bits, or an array should be resized.
    """
    if isinstance(image, np.ndarray | Tensor):
        if size is not None:
            raise argument_error("data", "PIL images to resize", "image", type(image).__name__)
        return np.asarray(image)
    from PIL import ImageOps

    upright = _on_white(_eight_bits(ImageOps.exif_transpose(image), image.format, where))
    return np.asarray(upright if size is None else ImageOps.fit(upright, (size, size)))


def _on_white(image: Any) -> Any:
    """Convert to grey or RGB, with transparent parts in white: colours under a mask were never meant to be seen."""
    from PIL import Image

    grey = image.mode in ("1", "L", "LA", "La")
    opaque, layered = ("L", "LA") if grey else ("RGB", "RGBA")
    if not image.mode.endswith(("A", "a")) and "transparency" not in image.info:
        return image.convert(opaque)
    image = image.convert(layered)
    white = Image.new(opaque, image.size, "white")
    white.paste(image.convert(opaque), mask=image.getchannel("A"))
    return white


def _eight_bits(image: Any, format: str | None, where: str) -> Any:
    """Divide 16-bit grey by 257, so that 65,535 is white; Pillow would clip at 255.

    Mode I has 16 bits in PNG (older Pillows) and in PGM, which Pillow scales to 16 bits. In other formats, as in mode
    F, the value of white is undefined.
    """
    if not image.mode.startswith(("I", "F")):
        return image
    if not image.mode.startswith("I;16") and not (image.mode == "I" and format in ("PNG", "PPM")):
        raise ArgumentError(
            "data",
            "images of 8 or 16 bits",
            f"mode {image.mode!r} in {where}, for which the value of white is undefined",
            "convert it to 8 bits over the range that you need",
        )
    from PIL import Image

    deep = np.asarray(image)
    see_through = deep == image.info.get("transparency", -1)  # PNG may declare one grey value as transparent
    return Image.fromarray(np.where(see_through, 255, np.rint(deep / 257.0)).astype(np.uint8))


def same_shape(images: list[Array], where: list[str]) -> Array:
    """Stack images of one size, converting grey ones to RGB if others are in colour.

    Args:
        images: Images [h, w] or [h, w, 3].
        where: Where each comes from, for the error.

    Raises:
        ArgumentError: If sizes differ.
    """
    if len({image.ndim for image in images}) > 1:  # a few grey images among coloured ones
        _warn_of_few_colours(images, where)
        images = [image if image.ndim == 3 else np.repeat(image[:, :, None], 3, axis=2) for image in images]
    for image, place in zip(images, where, strict=True):
        if image.shape != images[0].shape:
            raise ArgumentError(
                "data",
                "images of one size",
                f"{images[0].shape[:2]} in {where[0]} and {image.shape[:2]} in {place}",
                "resize them, such as by size=64, or folder:PATH@64 on the command line",
            )
    return np.stack(images)


def _warn_of_few_colours(images: list[Array], where: list[str]) -> None:
    """Warn if a few coloured files among grey ones turn all into RGB, which changes the preset of views."""
    coloured = [place for image, place in zip(images, where, strict=True) if image.ndim == 3]
    if 2 * len(coloured) < len(images):
        warn_once(
            f"image_files.colour.{coloured[0]}",
            f"{len(coloured)} of {len(images)} images are in colour, such as {coloured[0]}, and the others are grey: "
            "all are read as RGB. Convert the former to grey if all should be grey.",
        )
