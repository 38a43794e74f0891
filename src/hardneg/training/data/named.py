"""Readers of the named image data sets (digits, fashion-mnist, cifar10, cifar100, stl10).

``NAMED`` maps names to readers of (split, root); ``images.load`` calls them. ``default_root`` is the folder for all
data.
"""

from __future__ import annotations

import gzip
import importlib.util
import os
import pickle
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from hardneg.core.errors import ArgumentError, NoFile, missing_extra
from hardneg.io.arrays import Array
from hardneg.training.data.image_files import ReadSplits, SplitImages, arranged
from hardneg.training.data.image_sources import Members


def _read_digits(split: str, root: Path | None) -> ReadSplits:
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise missing_extra("digits", "sklearn", "eval")
    # Read the file directly: importing scikit-learn takes 2.5 s of processor time, as much as several epochs.
    with gzip.open(Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.int64)
    pixels = (table[:, :64] * (255.0 / 16.0)).round().astype(np.uint8)  # 17 grey levels
    return ReadSplits(SplitImages(pixels.reshape(-1, 8, 8), table[:, 64], [str(c) for c in range(10)]))


_FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def _read_fashion(split: str, root: Path | None) -> ReadSplits:
    places = [(root or default_root()) / below for below in (".", "fashion-mnist", "FashionMNIST/raw")]
    places += [] if root else [Path("/usr/share/datasets/fashion-mnist")]

    def part(prefix: str) -> SplitImages:
        images, labels = (_find_idx(places, f"{prefix}-{kind}") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"))
        return SplitImages(_read_idx(images, 3), _read_idx(labels, 1), _FASHION)

    return ReadSplits(
        part("train") if split != "test" else None, part("t10k") if split != "train" else None, num_train=60_000
    )


def _find_idx(places: list[Path], name: str) -> Path:
    for place in places:
        for path in (place / name, place / f"{name}.gz"):
            if path.is_file():
                return path
    fix = "apt install dataset-fashion-mnist, or --data-root FOLDER (in Python root=FOLDER) with the four IDX files"
    raise NoFile(
        "data",
        f"the file {name}[.gz] of fashion-mnist",
        places[0],
        f"which does not have it, nor {', '.join(map(str, places[1:]))}",
        fix,
    )


def _read_idx(path: Path, ndim: int) -> Array:
    """Read the IDX format: two zero bytes, type (8 = uint8), number of axes, their sizes as big-endian int32."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if raw[:4] != bytes([0, 0, 8, ndim]) or len(raw) < 4 + 4 * ndim:
        raise ArgumentError("data", f"an IDX file of uint8 with {ndim} axes", str(path))
    shape = np.frombuffer(raw, ">i4", ndim, offset=4)
    if len(raw) != 4 + 4 * ndim + int(np.prod(shape, dtype=np.int64)):
        what = f"a complete IDX file of shape {tuple(shape.tolist())}"
        raise ArgumentError("data", what, f"{len(raw)} bytes in {path}")
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * ndim).reshape(shape)


class Cifar(NamedTuple):
    """The differences between the two CIFAR sets.

    Attributes:
        folder: Folder of the extracted archive.
        archive: Name of the archive.
        train_files: Files of the train split.
        test_file: File of the test split.
        label_key: Key of the labels in each file.
        names_file: File of the class names.
        names_key: Key of the class names.
    """

    folder: str
    archive: str
    train_files: tuple[str, ...]
    test_file: str
    label_key: bytes
    names_file: str
    names_key: bytes


_CIFAR = {
    "cifar10": Cifar(
        "cifar-10-batches-py", "cifar-10-python.tar.gz", tuple(f"data_batch_{i}" for i in range(1, 6)), "test_batch",
        b"labels", "batches.meta", b"label_names",
    ),
    "cifar100": Cifar(
        "cifar-100-python", "cifar-100-python.tar.gz", ("train",), "test",
        b"fine_labels", "meta", b"fine_label_names",
    ),
}  # fmt: skip


def _read_cifar(name: str, split: str, root: Path | None) -> ReadSplits:
    spec, here = _CIFAR[name], root or default_root()
    for place in (here, here / name):
        if (place / spec.folder / spec.test_file).is_file():
            read: Callable[[bool], SplitImages] = partial(_cifar_folder, place / spec.folder, spec)
        elif (place / spec.archive).is_file():
            read = partial(_cifar_archive, place / spec.archive, spec)
        else:
            continue
        return ReadSplits(read(True) if split != "test" else None, read(False) if split != "train" else None, 50_000)
    fix = (
        f"set --data-root FOLDER (in Python root=FOLDER) or HARDNEG_DATA, download by torchvision.datasets."
        f"{name.upper()}(FOLDER, download=True), or use hf:uoft-cs/{name} with `datasets` installed"
    )
    raise NoFile("data", f"{spec.archive} or its folder {spec.folder}", here, "which has neither", fix)


def _cifar_folder(folder: Path, spec: Cifar, train: bool) -> SplitImages:
    return _cifar_pickles(lambda name: (folder / name).open("rb"), spec, train)


def _cifar_archive(archive: Path, spec: Cifar, train: bool) -> SplitImages:
    with tarfile.open(archive) as tar:

        def open_file(name: str) -> BinaryIO:
            member = tar.extractfile(f"{spec.folder}/{name}")
            if member is None:
                raise ArgumentError("data", f"the file {name} in {archive}", "no regular file of this name")
            return member  # type: ignore[return-value]

        return _cifar_pickles(open_file, spec, train)


def _cifar_pickles(open_file: Callable[[str], BinaryIO], spec: Cifar, train: bool) -> SplitImages:
    def read(name: str) -> dict[bytes, Any]:
        with open_file(name) as file:
            content: dict[bytes, Any] = _ArraysOnly(file, encoding="bytes").load()
            return content

    batches = [read(name) for name in (spec.train_files if train else (spec.test_file,))]
    images = np.concatenate([batch[b"data"] for batch in batches]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([batch[spec.label_key] for batch in batches])
    return SplitImages(images, labels, [name.decode() for name in read(spec.names_file)[spec.names_key]])


class _ArraysOnly(pickle.Unpickler):
    """Unpickle containers and NumPy arrays only, so that a file cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class; raise UnpicklingError for any other."""
        allowed = {
            ("numpy", "ndarray"), ("numpy", "dtype"), ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"), ("numpy._core.numeric", "_frombuffer"), ("_codecs", "encode"),
        }  # fmt: skip
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"A CIFAR file may contain arrays only, got {module}.{name}.")
        return super().find_class(module, name)


STL10 = (3, 96, 96)
"""Shape of a record of STL10: planes of columns."""


def read_stl10(root: Path | None, splits: str = "") -> ReadSplits:
    """Open the binaries of STL10: training on its unlabelled images, probes on the labelled ones.

    Args:
        root: Folder with stl10_binary, or None for the usual ones.
        splits: The value of ``--splits``, with the names unlabeled, train and test.
    """
    here = root or default_root()
    places = [here / name for name in ("stl10_binary", "stl10/stl10_binary", ".")]
    folder = next((place for place in places if (place / "train_X.bin").is_file()), None)
    if folder is None:
        fix = "download by torchvision.datasets.STL10(FOLDER, download=True) and set --data-root FOLDER or HARDNEG_DATA"
        raise NoFile("data", "the folder stl10_binary", here, "which does not have it", fix)
    named = folder / "class_names.txt"
    classes = named.read_text(encoding="utf-8").split() if named.is_file() else [str(c) for c in range(10)]

    def part(name: str) -> SplitImages:
        labels = folder / f"{name}_y.bin"
        known = np.fromfile(labels, np.uint8).astype(np.int64) - 1 if labels.is_file() else None
        return SplitImages(Members.records(folder / f"{name}_X.bin", STL10), known, classes)

    names = [name for name in ("unlabeled", "train", "test") if (folder / f"{name}_X.bin").is_file()]
    usual = "train=unlabeled,probe=train,test=test" if "unlabeled" in names else ""
    return arranged("stl10", {name: part(name) for name in names}, splits or usual)


NAMED: dict[str, Callable[[str, Path | None], ReadSplits]] = {
    "digits": _read_digits,
    "fashion-mnist": _read_fashion,
    "cifar10": partial(_read_cifar, "cifar10"),
    "cifar100": partial(_read_cifar, "cifar100"),
    "stl10": lambda split, root: read_stl10(root),
}


def default_root() -> Path:
    """Return the folder HARDNEG_DATA, or ``hardneg`` in the user's cache folder."""
    named = os.environ.get("HARDNEG_DATA")
    cache = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or Path.home() / ".cache"
    return Path(named) if named else Path(cache) / "hardneg"
