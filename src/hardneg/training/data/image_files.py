"""Readers of a user's images: which files belong to which split and class.

    folder:PATH   class folders or a flat folder, with or without train/ and test/ (read_folder)
    list:FILE     a table with the columns path, label and split (read_list)
    tar:PATH      shards of WebDataset on this machine (read_tar)
    hf:NAME       a data set of the Hugging Face hub, its cache, or a folder of save_to_disk (read_hub)
    npz:FILE      arrays in memory (read_npz)

Images are only listed, as sources (image_sources.py) that lazy_images.py opens. ``arranged`` chooses the splits.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hardneg.core.errors import ArgumentError, FileError, NoFile, optional, warn_once
from hardneg.io.arrays import Array, known_labels, means_no_label, read_arrays
from hardneg.io.tables import read_table
from hardneg.io.terminal import progress_bars
from hardneg.training.data.image_sources import Files, HubRows, Joined, Members, Source, Strings, tar_files
from hardneg.training.data.text_files import column_in, split_columns, texts_in


class SplitImages(NamedTuple):
    """One split as it was read.

    Attributes:
        images: Images [n, h, w], [n, h, w, c] or [n, c, h, w], or a source of encoded ones.
        labels: Index of each image's class, or None.
        classes: Names of the classes.
        ids: Distinct id of each image, int64 [n]; None counts them.
    """

    images: Array | Source
    labels: Array | None
    classes: Sequence[str]
    ids: Array | None = None


class ReadSplits(NamedTuple):
    """The result of a reader.

    Attributes:
        train: The train split, or None if it was not requested.
        test: The test split, or None if it was not requested or does not exist.
        num_train: Size of the train split, also if it was not requested; None if there is one part only, which the
            caller divides.
        probe: Labelled images that the evaluation is fitted to, if not those of the train split.
    """

    train: SplitImages | None
    test: SplitImages | None = None
    num_train: int | None = None
    probe: SplitImages | None = None


ROLES = ("train", "test", "probe")
TESTS = ("test", "val", "valid", "validation")
"""Names of splits to evaluate on; the first whose images have classes is used."""


def parse_splits(text: str) -> dict[str, list[str]]:
    """Parse ``--splits`` into the names of the splits of each role.

    Raises:
        ArgumentError: If a role is unknown or repeated, or there is none for training.

    Example:
        >>> parse_splits("train=train+unlabeled,test=val")
        {'train': ['train', 'unlabeled'], 'test': ['val']}
    """
    parts = [part.partition("=") for part in text.split(",") if part.strip()]
    found = {role.strip(): [one.strip() for one in names.split("+")] for role, _, names in parts}
    known = all(role in ROLES and all(names) for role, names in found.items()) and len(found) == len(parts)
    if not known or (found and "train" not in found):
        fix = "write --splits train=NAME,test=NAME, with + between several names, and probe=NAME for a labelled split"
        raise ArgumentError("data", f"splits for {', '.join(ROLES)}", f"splits={text!r}", fix)
    return found


def arranged(name: str, available: Mapping[str, SplitImages], splits: str) -> ReadSplits:
    """Choose the splits to train on, to evaluate on, and to fit probes to.

    Args:
        name: Name of the data.
        available: The splits by name.
        splits: The value of ``--splits``; empty for the usual names.
    """
    chosen = parse_splits(splits)
    if missing := [one for names in chosen.values() for one in names if one not in available]:
        got = f"{missing[0]!r} in splits={splits!r}"
        raise ArgumentError("data", f"a split of {name} among {', '.join(available)}", got)
    if chosen:
        parts = {role: _together([available[one] for one in names]) for role, names in chosen.items()}
    else:
        train = "train" if "train" in available else next(iter(available))
        tests = [one for one in TESTS if one in available and one != train]
        labelled = [one for one in tests if available[one].labels is not None]
        parts = {"train": available[train]}
        if tests:
            parts["test"] = available[(labelled or tests)[0]]
    train_images = parts["train"]
    num_train = len(train_images.images) if "test" in parts else None
    return ReadSplits(train_images, parts.get("test"), num_train, parts.get("probe"))


def _together(parts: list[SplitImages]) -> SplitImages:
    """Return one split with the images of several, with labels if all have them."""
    if len(parts) == 1:
        return parts[0]
    labels = [part.labels for part in parts if part.labels is not None]
    known = np.concatenate(labels) if len(labels) == len(parts) else None
    return SplitImages(Joined([part.images for part in parts]), known, parts[0].classes)  # type: ignore[misc]


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


def read_folder(folder: Path, splits: str = "") -> ReadSplits:
    """List a folder of images, with train/ and test/ (or val/) or without.

    Args:
        folder: The folder.
        splits: The value of ``--splits``, with names of folders below it.

    Raises:
        NoFile: If the folder does not exist or has no images.
        ArgumentError: If images lie outside the class folders.
    """
    if not folder.is_dir():
        raise NoFile("data", "a folder of images", folder, "which is not a folder")
    if splits:
        names = [one for each in parse_splits(splits).values() for one in each if (folder / one).is_dir()]
        unlabelled = [folder / one for one in names if not _has_classes(folder / one, folder / names[0])]
        found = _folder_parts([folder / one for one in names], unlabelled)
        return arranged(str(folder), {one: found[folder / one] for one in names}, splits)
    train, tests = folder / "train", [folder / name for name in TESTS if (folder / name).is_dir()]
    if not train.is_dir() or not tests:
        whole = train if train.is_dir() else folder
        return ReadSplits(_folder_parts([whole])[whole])
    test = _test_folder(train, tests)
    parts = _folder_parts([train, test], [] if _has_classes(test, train) else [test])
    return ReadSplits(parts[train], parts[test], len(parts[train].images))


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


def _folder_parts(places: list[Path], unlabelled: Sequence[Path] = ()) -> dict[Path, SplitImages]:
    """List the splits in these folders, with the classes of all but the unlabelled ones."""
    classes = sorted({name for place in places if place not in unlabelled for name in _class_names(place)})
    listed = {place: _classes_of_files(place, [] if place in unlabelled else classes) for place in places}
    return {
        place: _labelled(files, names, f"the class folders of {place}", classes)
        for place, (files, names) in listed.items()
    }


def _labelled(images: Source, names: Array | None, where: str, classes: Sequence[str]) -> SplitImages:
    """Return a split from the class name of each image; names such as "-1" mean that it has none."""
    known = {name: number for number, name in enumerate(name for name in classes if not means_no_label(name))}
    labels = None if names is None or not len(classes) else known_labels(names, where)
    numbers = None if labels is None else np.array([known[str(name)] for name in labels])
    return SplitImages(images, numbers, [*known])


def _class_names(folder: Path) -> list[str]:
    if (table := _annotations(folder)) is not None:
        return sorted(set(table.values()))
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _annotations(folder: Path) -> dict[str, str] | None:
    """Return the class of each image from a table for a flat folder, by the name of its file without the suffix.

    These are Tiny-ImageNet's ``val/val_annotations.txt`` and ImageNet's ``LOC_val_solution.csv``, which is in a folder
    around ``ILSVRC/Data/CLS-LOC/val``.
    """
    places = [folder / f"{folder.name}_annotations.txt"]
    places += [place / f"LOC_{folder.name}_solution.csv" for place in (folder, *folder.absolute().parents[:4])]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        return None
    lines = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line]
    comma = path.suffix == ".csv"
    rows = [line.split("," if comma else "\t") for line in (lines[1:] if comma else lines)]
    if any(len(row) < 2 or not row[1].strip() for row in rows):
        raise FileError("data", "a file name and a class in each line", path)
    return {os.path.splitext(name)[0]: label.split()[0] for name, label, *_ in rows}


def image_files(folder: Path) -> Strings:
    """Return the image files below a folder, relative to it and sorted, without hidden files and folders.

    Links are followed. Images in formats that Pillow does not read here are left out with a warning.
    """
    found, unread = [], []
    readable = readable_suffixes()

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


def readable_suffixes() -> set[str]:
    """Return the suffixes of images that this installation of Pillow reads."""
    Image = optional("PIL.Image", "data", extra="vision")  # noqa: N806
    registered = {suffix for suffix, format in Image.registered_extensions().items() if format in Image.OPEN}
    return _SUFFIXES | (_OTHERS & registered)


def _classes_of_files(folder: Path, classes: list[str]) -> tuple[Files, Array | None]:
    """Return the image files of a split and the class of each, where there are classes."""
    names = image_files(folder)
    if not len(names):
        raise NoFile("data", f"images ({', '.join(sorted(_SUFFIXES))})", folder, "which has none")
    if not classes:
        return Files(folder, names), None
    if (table := _annotations(folder)) is not None:
        files = [os.path.basename(name) for name in names]
        if missing := [name for name in files if os.path.splitext(name)[0] not in table]:
            got = f"{len(missing)} without one, such as {missing[0]}"
            raise ArgumentError("data", f"a class for every image of {folder} in its table of annotations", got)
        return Files(folder, names), np.array([table[os.path.splitext(name)[0]] for name in files])
    found = [name.partition(os.sep)[0] for name in names]
    known = set(classes)
    if loose := sum(name not in known for name in found):
        got = f"{loose} images outside the class folders of {folder}"
        raise ArgumentError("data", "every image in a class folder", got)
    return Files(folder, names), np.array(found)


PATHS = ("path", "image", "image_path", "file_name", "filename", "file")
LABELS = ("label", "class", "target", "wnid")


def read_list(path: str, splits: str = "") -> ReadSplits:
    """List the images that a table names.

    Args:
        path: A table of any format, with columns in brackets or the usual names: paths of images, absolute or relative
            to the table, their classes, and their splits.
        splits: The value of ``--splits``, with values of the column of splits.

    Raises:
        ArgumentError: If a path occurs twice, or only some images of a split have a class.
    """
    file, columns = split_columns(path, 1, 3, "list:FILE[path,label,split]")
    table = read_table(file, "data")
    usual = ("path", PATHS), ("label", LABELS), ("split", ("split", "set", "fold"))
    names = [*columns, *[None] * 3][:3] if columns else [_first(known, table) for _, known in usual]
    if names[0] is None:
        what = f"a column of paths in {file}, such as {PATHS[0]}"
        raise ArgumentError("data", what, f"columns {sorted(table)}", "name it: list:FILE[path,label,split]")
    paths = texts_in(table, names[0], file)
    if len(set(paths)) < len(paths):
        twice = next(one for one, number in Counter(paths).items() if number > 1)
        raise ArgumentError("data", f"every image of {file} once", f"{twice} in several rows", "delete one of them")
    labels, split = (
        None if name is None else np.array(["" if one is None else str(one) for one in column_in(table, name, file)])
        for name in names[1:]
    )
    classes = [] if labels is None else sorted(set(labels.tolist()))
    found = {}
    for part in dict.fromkeys(["train"] if split is None else split.tolist()):
        rows = np.arange(len(paths)) if split is None else np.flatnonzero(split == part)
        source = Files(file.parent, Strings(paths[row] for row in rows))
        found[part] = _labelled(source, None if labels is None else labels[rows], f"{part} of {file}", classes)
    return arranged(str(file), found, splits)


def _first(names: Sequence[str], table: Mapping[str, Any]) -> str | None:
    return next((name for name in names if name in table), None)


def read_tar(path: str, splits: str = "") -> ReadSplits:
    """List the images in shards of WebDataset, which are uncompressed tar files on this machine.

    The images of a shard belong to a split whose name is in the name of the shard or of its folder; ``KEY.cls`` or the
    field "label" of ``KEY.json`` has the class of ``KEY.jpg``.

    Args:
        path: A tar file, a folder of them, or a pattern such as "imagenet-train-{000..146}.tar" or "*.tar".
        splits: The value of ``--splits``.

    Raises:
        ArgumentError: If shards are on another machine.
        NoFile: If there is none.
    """
    if "://" in path or path.startswith("pipe:"):
        raise ArgumentError("data", "shards on this machine, since batches need any image", path, "download them first")
    shards = tar_files(path)
    if not shards:
        raise NoFile("data", "shards of WebDataset (.tar)", Path(path), "where there are none")
    by_split: dict[str, list[Path]] = {}
    for shard in shards:
        words = [*re.findall("[a-z]+", shard.stem.lower()), shard.parent.name.lower()]
        split = next((word for word in words if word in ("train", *TESTS, "unlabeled")), "train")
        by_split.setdefault(split, []).append(shard)
    found, names = {}, {}
    with progress_bars() as bars:
        advance = bars("list shards", len(shards))
        for split, some in by_split.items():
            found[split], names[split] = Members.of(some, readable_suffixes(), advance)
    classes = sorted({name for each in names.values() for name in each}, key=lambda name: (len(name), name))
    listed = {
        split: _labelled(images, np.array(names[split]), f"{split} of {path}", classes)
        for split, images in found.items()
    }
    return arranged(path, listed, splits)


def read_hub(path: str, splits: str = "") -> ReadSplits:
    """Open a data set of the Hugging Face hub, its cache, or a folder of ``save_to_disk``, without reading images.

    Args:
        path: Name of the data set, or the folder.
        splits: The value of ``--splits``.

    Raises:
        ArgumentError: If the data set cannot be loaded or has no images.
    """
    datasets = optional("datasets", f"hf:{path}", extra="text")
    saved = any((Path(path) / name).is_file() for name in ("dataset_dict.json", "state.json"))
    try:
        found = datasets.load_from_disk(path) if saved else datasets.load_dataset(path)
    except Exception as error:  # the hub, its cache, pyarrow and fsspec raise many types, with many lines
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ArgumentError("data", "a data set of the hub or its cache", f"hf:{path} ({reason})") from error
    every = found if isinstance(found, dict) else {"train": found}
    return arranged(f"hf:{path}", {name: hub_part(path, rows) for name, rows in every.items()}, splits)


def hub_part(path: str, rows: Any) -> SplitImages:
    """Return the first column of images and the first of class labels of a ``datasets.Dataset``.

    Args:
        path: Name of the data set, for messages.
        rows: The data set.
    """
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
