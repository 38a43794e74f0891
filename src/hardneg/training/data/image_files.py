"""A user's images: folders, arrays and data sets of the hub, read as NumPy arrays of 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from hardneg.core.errors import ArgumentError, FileError, NoFile, argument_error, optional, warn_once
from hardneg.io.arrays import Array, known_labels, read_arrays, means_no_label


class SplitImages(NamedTuple):
    """One split as it was read: images [n, h, w], [n, h, w, c] or [n, c, h, w]."""

    images: Array
    labels: Array | None
    classes: Sequence[str]


class ReadSplits(NamedTuple):
    """What a reader found: the requested splits; without ``num_train`` there is one part only, to be split here."""

    train: SplitImages | None
    test: SplitImages | None = None
    num_train: int | None = None


_NPZ = {
    "images": "all images need one size",
    "labels": "np.array(labels, dtype=str) makes text of them",
    "test_images": "all images need one size",
    "test_labels": "np.array(labels, dtype=str) makes text of them",
}


def read_npz(path: Path) -> ReadSplits:
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
    if not folder.is_dir():
        raise NoFile("data", "a folder of images", folder, "where there is none")
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
    """The first one with classes; the test images of a competition have none, and its validation images do."""
    chosen = next((place for place in tests if _has_classes(place, train)), tests[0])
    if chosen != tests[0]:
        warn_once(
            f"image_files.test.{tests[0]}",
            f"The images in {tests[0]} have no classes, so those in {chosen} are evaluated on.",
        )
    return chosen


def _has_classes(place: Path, train: Path) -> bool:
    """False for images without class folders, or in a single one that is no class of training, such as ``images``."""
    known, names = set(_class_names(train)), _class_names(place)
    return not known or len(names) > 1 or not known.isdisjoint(names)


def _folder_parts(
    places: list[Path], folder: Path, size: int | None, left_out: Path | None = None, unlabelled: Path | None = None
) -> dict[Path, SplitImages]:
    """The splits in these places, but for one of them, with the classes of all but the unlabelled one."""
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
    """The class of each file by its name, from a table such as Tiny-ImageNet's ``val/val_annotations.txt``, if any."""
    path = folder / f"{folder.name}_annotations.txt"
    if not path.is_file():
        return None
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line]
    if any(len(row) < 2 for row in rows):
        raise FileError("data", "a file name and a class in each line, with a tab between them", path)
    return {name: label for name, label, *_ in rows}


def image_files(folder: Path) -> list[Path]:
    found = (p for p in folder.rglob("*") if p.suffix.lower() in _SUFFIXES)
    # Only below the folder: whoever keeps data in ~/.cache means it.
    return sorted(p for p in found if not any(part.startswith(".") for part in p.relative_to(folder).parts))


def _classes_of_files(folder: Path, classes: list[str]) -> dict[Path, str]:
    """Each image file with its class, where there are any."""
    files = image_files(folder)
    if not files:
        raise NoFile("data", f"images ({', '.join(sorted(_SUFFIXES))})", folder, "where there are none")
    if classes and (table := _annotations(folder)) is not None:
        if missing := [path.name for path in files if path.name not in table]:
            got = f"{len(missing)} without one, such as {missing[0]}"
            raise ArgumentError("data", f"a class for every image in {folder.name}_annotations.txt", got)
        return {path: table[path.name] for path in files}
    found = {path: path.relative_to(folder).parts[0] for path in files}
    loose = sum(name not in classes for name in found.values())
    if classes and loose:
        raise ArgumentError("data", "every image in a class folder", f"{loose} beside the class folders in {folder}")
    return found


def decoded_images(files: list[Path], folder: Path, size: int | None) -> dict[Path, Array]:
    """All of the images; unreadable ones are reported together, so that all can be fixed at once."""

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
        got = f"{len(broken)} of {len(files)} that are not in {folder}: {listed}. Of the first: "
        raise ArgumentError("data", "readable images", got + str(next(iter(broken.values()))))
    for error in broken.values():
        raise error
    return {path: image for path, image in found.items() if not isinstance(image, ValueError)}


def _warn_if_dark(images: Array, folder: Path) -> None:
    """Images of 12 bits in files of 16 would be almost black, without an error."""
    if (brightest := int(images.max())) <= 16:
        warn_once(
            f"image_files.dark.{folder}",
            f"The brightest pixel in {folder} is {brightest} of 255, so hardly anything is left of the images; files "
            "of 16 bits are read over their full range of 65,535. Write them as 8 bits over the range that they use.",
        )


def read_hub(path: str, split: str, size: int | None) -> ReadSplits:
    load = optional("datasets", f"hf:{path}", extra="text").load_dataset
    try:
        found = load(path)
    except Exception as error:  # whatever the hub, its cache, pyarrow and fsspec raise, on many lines
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
    """The first column of images and the first of class labels."""
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
    Image = optional("PIL.Image", str(path), extra="vision")  # noqa: N806
    try:
        with Image.open(path) as image:
            return pixels(image, str(path), size)
    except (OSError, EOFError, SyntaxError, Image.DecompressionBombError) as error:
        raise ArgumentError("data", "readable images", f"{path}: {error}") from error


def pixels(image: Any, where: str, size: int | None = None) -> Array:
    """An image as uint8 [h, w] or [h, w, 3]; ``size`` fits it into a square, cutting what is too long."""
    if isinstance(image, np.ndarray | Tensor):
        if size is not None:
            raise argument_error("data", "PIL images to resize", "image", type(image).__name__)
        return np.asarray(image)
    from PIL import ImageOps

    upright = _on_white(_eight_bits(ImageOps.exif_transpose(image), image.format, where))
    return np.asarray(upright if size is None else ImageOps.fit(upright, (size, size)))


def _on_white(image: Any) -> Any:
    """Grey or RGB, seen on white where it is transparent: what lies under the mask was never meant to be seen."""
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
    """16 bits of grey are divided by 257, so that 65,535 is white; Pillow would cut them off at 255.

    Mode I is 16 bits in PNG (older Pillows) and in PGM, which Pillow scales to them. Elsewhere, as in mode F, nobody
    knows which value is white.
    """
    if not image.mode.startswith(("I", "F")):
        return image
    if not image.mode.startswith("I;16") and not (image.mode == "I" and format in ("PNG", "PPM")):
        raise ArgumentError(
            "data",
            "images of 8 or 16 bits",
            f"mode {image.mode!r} in {where}, which does not define the value of white",
            "write it as 8 bits over the range that you mean",
        )
    from PIL import Image

    deep = np.asarray(image)
    see_through = deep == image.info.get("transparency", -1)  # the one grey that PNG may call transparent
    return Image.fromarray(np.where(see_through, 255, np.rint(deep / 257.0)).astype(np.uint8))


def same_shape(images: list[Array], where: list[str]) -> Array:
    if len({image.ndim for image in images}) > 1:  # a few grey images among coloured ones
        _warn_of_few_colours(images, where)
        images = [image if image.ndim == 3 else np.repeat(image[:, :, None], 3, axis=2) for image in images]
    for image, place in zip(images, where, strict=True):
        if image.shape != images[0].shape:
            raise ArgumentError(
                "data",
                "images of one size",
                f"{images[0].shape[:2]} in {where[0]} and {image.shape[:2]} in {place}",
                "size=64, or folder:PATH@64 on the command line, makes all of them 64 x 64",
            )
    return np.stack(images)


def _warn_of_few_colours(images: list[Array], where: list[str]) -> None:
    """One coloured file among grey ones makes all of them three channels, of another preset of views."""
    coloured = [place for image, place in zip(images, where, strict=True) if image.ndim == 3]
    if 2 * len(coloured) < len(images):
        warn_once(
            f"image_files.colour.{coloured[0]}",
            f"{len(coloured)} of {len(images)} images are in colour, such as {coloured[0]}, and the others grey: all "
            "are read as RGB. Write these as grey images, if they are meant to be.",
        )
