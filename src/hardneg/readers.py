"""What lies on a disk: the files of the named data sets, and a user's folders and arrays, read as NumPy arrays."""

from __future__ import annotations

import gzip
import importlib.util
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hardneg.notices import argument_error, missing_extra, optional

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


# The named sets.


def _read_digits(split: str, root: Path | None) -> Found:
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise missing_extra("digits", "sklearn", "eval")
    # The file alone: importing scikit-learn takes 2.5 s of processor time, as much as training for some epochs.
    with gzip.open(Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.int64)
    pixels = (table[:, :64] * (255.0 / 16.0)).round().astype(np.uint8)  # 17 grey levels
    return Found(Part(pixels.reshape(-1, 8, 8), table[:, 64], [str(c) for c in range(10)]))


_FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def _read_fashion(split: str, root: Path | None) -> Found:
    places = [here / below for here in _roots(root) for below in (".", "fashion-mnist", "FashionMNIST/raw")]
    places += [] if root else [Path("/usr/share/datasets/fashion-mnist")]

    def part(prefix: str) -> Part:
        images, labels = (_find_idx(places, f"{prefix}-{kind}") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"))
        return Part(_read_idx(images, 3), _read_idx(labels, 1), _FASHION)

    return Found(
        part("train") if split != "test" else None, part("t10k") if split != "train" else None, num_train=60_000
    )


def _find_idx(places: list[Path], name: str) -> Path:
    for place in places:
        for path in (place / name, place / f"{name}.gz"):
            if path.is_file():
                return path
    raise FileNotFoundError(
        f"load needs the file {name}[.gz] of fashion-mnist, got none in {_listed(places)}; "
        "apt install dataset-fashion-mnist, or root=FOLDER with the four IDX files."
    )


def _read_idx(path: Path, ndim: int) -> Array:
    """The IDX format: two zero bytes, the type (8 = uint8), the number of axes, their sizes as big-endian int32."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if raw[:4] != bytes([0, 0, 8, ndim]) or len(raw) < 4 + 4 * ndim:
        raise ValueError(f"load needs an IDX file of uint8 with {ndim} axes, got {path}.")
    shape = np.frombuffer(raw, ">i4", ndim, offset=4)
    if len(raw) != 4 + 4 * ndim + int(np.prod(shape, dtype=np.int64)):
        raise ValueError(
            f"load needs a whole IDX file of shape {tuple(shape.tolist())}, got {len(raw)} bytes in {path}."
        )
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * ndim).reshape(shape)


class Cifar(NamedTuple):
    """Where the two CIFAR sets differ."""

    folder: str
    archive: str
    train_files: tuple[str, ...]
    test_file: str
    label_key: bytes
    names_file: str
    names_key: bytes
    pack_labels: str
    pack_names: str
    pack_origin: str


_CIFAR = {
    "cifar10": Cifar(
        "cifar-10-batches-py", "cifar-10-python.tar.gz", tuple(f"data_batch_{i}" for i in range(1, 6)), "test_batch",
        b"labels", "batches.meta", b"label_names", "y", "classes", "JPEG q95 copy",
    ),
    "cifar100": Cifar(
        "cifar-100-python", "cifar-100-python.tar.gz", ("train",), "test",
        b"fine_labels", "meta", b"fine_label_names", "fine", "fine_names", "JPEG q90 copy",
    ),
}  # fmt: skip


def _read_cifar(name: str, split: str, root: Path | None) -> Found:
    spec, roots = _CIFAR[name], _roots(root)
    for here in roots:
        for place in (here, here / name):
            reader: Callable[[bool], Part] | None = None
            if (place / spec.folder / spec.test_file).is_file():
                reader = partial(_cifar_folder, place / spec.folder, spec)
            elif (place / spec.archive).is_file():
                reader = partial(_cifar_archive, place / spec.archive, spec)
            elif (place / "labels.npz").is_file() and (place / "test.jpg").is_file():
                reader = partial(_cifar_montages, place, spec)
            if reader is not None:
                return Found(
                    reader(True) if split != "test" else None,
                    reader(False) if split != "train" else None,
                    num_train=50_000,
                )
    raise FileNotFoundError(
        f"load needs {spec.archive}, its folder {spec.folder} or the montages of {name}, got none in {_listed(roots)}; "
        f"root=FOLDER (or HARDNEG_DATA) says where, torchvision.datasets.{name.upper()}(FOLDER, download=True) puts it "
        f"there, or use hf:uoft-cs/{name} with `datasets` installed."
    )


def _cifar_folder(folder: Path, spec: Cifar, train: bool) -> Part:
    def open_file(name: str) -> BinaryIO:
        return open(folder / name, "rb")

    return _cifar_pickles(open_file, spec, train)


def _cifar_archive(archive: Path, spec: Cifar, train: bool) -> Part:
    with tarfile.open(archive) as tar:

        def open_file(name: str) -> BinaryIO:
            member = tar.extractfile(f"{spec.folder}/{name}")
            if member is None:
                raise ValueError(f"load needs the file {name} in {archive}, got something else under that name.")
            return member  # type: ignore[return-value]

        return _cifar_pickles(open_file, spec, train)


def _cifar_pickles(open_file: Callable[[str], BinaryIO], spec: Cifar, train: bool) -> Part:
    def read(name: str) -> dict[bytes, Any]:
        with open_file(name) as file:
            content: dict[bytes, Any] = _ArraysOnly(file, encoding="bytes").load()
            return content

    batches = [read(name) for name in (spec.train_files if train else (spec.test_file,))]
    images = np.concatenate([batch[b"data"] for batch in batches]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([batch[spec.label_key] for batch in batches])
    return Part(images, labels, [name.decode() for name in read(spec.names_file)[spec.names_key]])


class _ArraysOnly(pickle.Unpickler):
    """Reads pickled containers and NumPy arrays, and runs nothing else that a file may name."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {
            ("numpy", "ndarray"), ("numpy", "dtype"), ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"), ("numpy._core.numeric", "_frombuffer"), ("_codecs", "encode"),
        }  # fmt: skip
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"load needs arrays in a CIFAR file, got {module}.{name}.")
        return super().find_class(module, name)


def _cifar_montages(folder: Path, spec: Cifar, train: bool) -> Part:
    """Images of 32 x 32 laid out row by row in a square of 100 x 100."""
    split = "train" if train else "test"
    files = sorted(folder.glob("train_*.jpg")) if train else [folder / "test.jpg"]
    with ThreadPoolExecutor() as pool:
        squares = list(pool.map(_read_image, files))
    for square, path in zip(squares, files, strict=True):
        if square.shape != (3200, 3200, 3):
            raise ValueError(f"load needs montages of 3200 x 3200 pixels in colour, got {square.shape} in {path}.")
    tiles = [square.reshape(100, 32, 100, 32, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32) for square in squares]
    with np.load(folder / "labels.npz") as labels:
        return Part(
            np.concatenate(tiles), labels[f"{spec.pack_labels}_{split}"], labels[spec.pack_names], spec.pack_origin
        )


NAMED: dict[str, Callable[[str, Path | None], Found]] = {
    "digits": _read_digits,
    "fashion-mnist": _read_fashion,
    "cifar10": partial(_read_cifar, "cifar10"),
    "cifar100": partial(_read_cifar, "cifar100"),
}


def _roots(root: Path | None) -> list[Path]:
    return [root] if root is not None else [Path(os.environ.get("HARDNEG_DATA") or "../shared/data")]


def _listed(places: list[Path]) -> str:
    return ", ".join(str(place) for place in places)


# Files of the user.


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
    known = [arrays[key] for key in ("labels", "test_labels") if key in arrays]
    if any(labels.ndim != 1 for labels in known):
        raise ValueError(f"load needs one label per image, got labels={known[0].shape} in {path}.")
    names, numbers = np.unique(np.concatenate(known), return_inverse=True) if known else ((), np.empty(0))
    classes, cut = [str(name) for name in names], len(arrays.get("labels", ()))
    train = Part(arrays["images"], numbers[:cut] if "labels" in arrays else None, classes)
    if "test_images" not in arrays:
        return Found(train)
    test = Part(arrays["test_images"], numbers[cut:] if "test_labels" in arrays else None, classes)
    return Found(train, test, num_train=len(train.images))


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
    of_file = [path.relative_to(folder).parts[0] for path in files]
    loose = sum(name not in classes for name in of_file)
    if classes and loose:
        raise ValueError(f"load needs every image in a class folder, got {loose} beside the class folders in {folder}.")
    with ThreadPoolExecutor() as pool:
        images = same_shape(list(pool.map(partial(_read_image, size=size), files)), [str(path) for path in files])
    return Part(images, np.array([classes.index(name) for name in of_file]) if classes else None, classes)


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
    arrays = [pixels(picture, size) for picture in rows[image]]
    images = same_shape(arrays, [f"row {i} of hf:{path}" for i in range(len(arrays))])
    if label is None:
        return Part(images, None, ())
    return Part(images, np.asarray(rows[label]), rows.features[label].names)


def _read_image(path: Path, size: int | None = None) -> Array:
    Image = optional("PIL.Image", str(path), extra="vision")  # noqa: N806
    try:
        with Image.open(path) as image:
            return pixels(image, size)
    except OSError as error:
        raise ValueError(f"load needs readable images, got {path}: {error}.") from error


def pixels(image: Any, size: int | None) -> Array:
    """An image as uint8 [h, w] or [h, w, 3]; ``size`` fits it into a square, cutting what is too long."""
    if isinstance(image, np.ndarray | Tensor):
        if size is not None:
            raise argument_error("load", "PIL images to resize", "image", type(image).__name__)
        return np.asarray(image)
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(image).convert("L" if image.mode in ("1", "L") else "RGB")
    return np.asarray(upright if size is None else ImageOps.fit(upright, (size, size)))


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
