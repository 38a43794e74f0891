"""Readers of a user's images (folders, .npz arrays, data sets of the hub): what belongs to which split and class.

``images.load`` calls ``read_folder``, ``read_npz`` or ``read_hub``. Arrays are read at once; files are only listed, as
sources (image_sources.py) that lazy_images.py opens.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hardneg.core.errors import ArgumentError, FileError, NoFile, optional, warn_once
from hardneg.io.arrays import Array, known_labels, means_no_label, read_arrays
from hardneg.training.data.image_sources import Files, HubRows, Source, Strings


class SplitImages(NamedTuple):
    """One split as it was read.

    Attributes:
        images: Images [n, h, w], [n, h, w, c] or [n, c, h, w], or a source of encoded ones.
        labels: Index of each image's class, or None.
        classes: Names of the classes.
    """

    images: Array | Source
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
_OTHERS = {".heic", ".heif", ".avif", ".jxl", ".jp2"}
"""Suffixes of images that Pillow reads only in some installations."""
_SHOWN = 5


def read_folder(folder: Path, split: str) -> ReadSplits:
    """List a folder of images, with train/ and test/ (or val/) or without.

    Args:
        folder: The folder.
        split: "train" and "test" list only that split's files.

    Raises:
        NoFile: If the folder does not exist or has no images.
        ArgumentError: If images lie outside the class folders.
    """
    if not folder.is_dir():
        raise NoFile("data", "a folder of images", folder, "which is not a folder")
    train = folder / "train"
    tests = [folder / name for name in ("test", "val", "valid", "validation") if (folder / name).is_dir()]
    if not train.is_dir() or not tests:
        whole = train if train.is_dir() else folder
        return ReadSplits(_folder_parts([whole])[whole])
    test = _test_folder(train, tests)
    left_out, unlabelled = {"train": test, "test": train}.get(split), None if _has_classes(test, train) else test
    parts = _folder_parts([train, test], left_out, unlabelled)
    num_train = len(parts[train].images) if train in parts else len(image_files(train))
    return ReadSplits(parts.get(train), parts.get(test), num_train)


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
    places: list[Path], left_out: Path | None = None, unlabelled: Path | None = None
) -> dict[Path, SplitImages]:
    """List the splits in these folders, except ``left_out``, with the classes of all but ``unlabelled``."""
    classes = sorted({name for place in places if place != unlabelled for name in _class_names(place)})
    known = {name: number for number, name in enumerate(name for name in classes if not means_no_label(name))}
    parts = {}
    for place in places:
        if place != left_out:
            files, names = _classes_of_files(place, [] if place == unlabelled else classes)
            labels = known_labels(names, f"the class folders of {place}") if names is not None else None
            numbers = None if labels is None else np.array([known[str(name)] for name in labels])
            parts[place] = SplitImages(files, numbers, [*known])
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


def image_files(folder: Path) -> Strings:
    """Return the image files below a folder, relative to it and sorted, without hidden files and folders.

    Links are followed. Images in formats that Pillow does not read here are left out with a warning.
    """
    found, unread = [], []
    readable = _SUFFIXES | (_OTHERS & _registered())

    def walk(place: str, below: str, inside: frozenset[tuple[int, int]]) -> None:
        with os.scandir(place) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.name.startswith("."):  # hidden parts count only below the folder: ~/.cache is no mistake
                    continue
                suffix = os.path.splitext(entry.name)[1].lower()
                if suffix in readable:
                    found.append(below + entry.name)
                elif suffix in _OTHERS:
                    unread.append(below + entry.name)
                elif entry.is_dir():
                    status = entry.stat()
                    if (itself := (status.st_dev, status.st_ino)) not in inside:  # a link to a folder around it
                        walk(entry.path, f"{below}{entry.name}{os.sep}", inside | {itself})

    walk(str(folder), "", frozenset())
    if unread:
        more = f" and {len(unread) - _SHOWN} more" if len(unread) > _SHOWN else ""
        warn_once(
            f"image_files.formats:{folder}",
            f"{len(unread)} images in {folder} are left out, since Pillow cannot read their format here: "
            f"{', '.join(unread[:_SHOWN])}{more}. Convert them to JPEG.",
        )
    return Strings(found)


def _registered() -> set[str]:
    """Return the suffixes that this installation of Pillow reads."""
    Image = optional("PIL.Image", "data", extra="vision")  # noqa: N806
    return {suffix for suffix, format in Image.registered_extensions().items() if format in Image.OPEN}


def _classes_of_files(folder: Path, classes: list[str]) -> tuple[Files, Array | None]:
    """Return the image files of a split and the class of each, where there are classes."""
    names = image_files(folder)
    if not len(names):
        raise NoFile("data", f"images ({', '.join(sorted(_SUFFIXES))})", folder, "which has none")
    if not classes:
        return Files(folder, names), None
    if (table := _annotations(folder)) is not None:
        files = [os.path.basename(name) for name in names]
        if missing := [name for name in files if name not in table]:
            got = f"{len(missing)} without one, such as {missing[0]}"
            raise ArgumentError("data", f"a class for every image in {folder.name}_annotations.txt", got)
        return Files(folder, names), np.array([table[name] for name in files])
    found = [name.partition(os.sep)[0] for name in names]
    known = set(classes)
    if loose := sum(name not in known for name in found):
        got = f"{loose} images outside the class folders of {folder}"
        raise ArgumentError("data", "every image in a class folder", got)
    return Files(folder, names), np.array(found)


def read_hub(path: str, split: str) -> ReadSplits:
    """Open a data set of the Hugging Face hub or its cache.

    Args:
        path: Name of the data set.
        split: "train" and "test" open only that split.

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
        return ReadSplits(_hub_part(path, train))
    return ReadSplits(
        _hub_part(path, train) if split != "test" else None,
        _hub_part(path, test) if split != "train" else None,
        num_train=len(train),
    )


def _hub_part(path: str, rows: Any) -> SplitImages:
    """Return the first column of images and the first of class labels."""
    kinds = {name: type(feature).__name__ for name, feature in rows.features.items()}
    image = next((name for name, kind in kinds.items() if kind == "Image"), None)
    label = next((name for name, kind in kinds.items() if kind == "ClassLabel"), None)
    if image is None:
        raise ArgumentError("data", f"a column of images in hf:{path}", f"columns {kinds}")
    source = HubRows(rows.select_columns([image]).with_format("arrow"), image, f"hf:{path}")
    if label is None:
        return SplitImages(source, None, ())
    numbers = np.array([-1 if number is None else number for number in rows[label]])
    return SplitImages(source, known_labels(numbers, f"{label} of hf:{path}"), rows.features[label].names)
