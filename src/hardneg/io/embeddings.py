"""Embeddings of both splits of a data set, with labels, as one .npz file; and yes-or-no answers as text for JSON."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardneg.core.errors import ArgumentError, NotFinite, argument_error
from hardneg.io.arrays import Array, names_in_npz, plain_labels, read_arrays
from hardneg.io.sealed import check_seal

EmbeddingRows = Annotated[Tensor, "n d"]
Labels = Annotated[Tensor, "n"]

AGAIN = "make it again: delete result.json of the run and train again with --resume"
SPLIT_NAMES = ("train_x", "train_y", "test_x", "test_y")
_ADVICE = {name: f"np.array({name}, dtype={'float' if '_x' in name else 'str'}) has none" for name in SPLIT_NAMES}


def save_arrays(path: str | Path | BinaryIO, **parts: Tensor) -> None:
    """Features and labels of both splits, checked, or only ``test_x``, of items without labels, as one .npz file."""
    if parts.keys() == set(SPLIT_NAMES):
        check_split(**parts)
    np.savez(path, **{name: _as_array(part) for name, part in parts.items()})  # type: ignore[arg-type]


def load_evaluated(path: Path) -> tuple[EmbeddingRows, Labels | None]:
    """The test split of a saved file, with its labels if there are any; the file may have no train split."""
    if not path.is_file() or "train_x" in names_in_npz("load_embeddings", path):
        return load_embeddings(path)[2:]
    check_seal(path, "load_embeddings", AGAIN, required=False)  # users write such files too; a zip shows a lost end
    advice = {name: _ADVICE[name] for name in ("test_x", "test_y")}
    found = read_arrays("load_embeddings", path, advice, needed=("test_x",))
    labels = plain_labels("load_embeddings", found["test_y"], f"test_y of {path}") if "test_y" in found else None
    return _as_features(found["test_x"]), None if labels is None else torch.from_numpy(labels)


def load_embeddings(path: str | Path) -> tuple[EmbeddingRows, Labels, EmbeddingRows, Labels]:
    """The four arrays of a saved .npz file, checked; labels that are text become their numbers in the alphabet."""
    return read_embeddings(Path(path))[0]


def read_embeddings(path: Path) -> tuple[tuple[EmbeddingRows, Labels, EmbeddingRows, Labels], list[str]]:
    """The split, and the names of its classes where its labels are text."""
    who = "load_embeddings"
    if path.is_file():
        check_seal(path, who, AGAIN, required=False)
    found = read_arrays(who, path, _ADVICE, needed=SPLIT_NAMES)
    for name in ("train_x", "test_x"):
        if found[name].dtype.kind not in "biuf":
            raise ArgumentError(who, f"numbers in {name}", f"{found[name].dtype} in {path}")
    labels = [plain_labels(who, found[name], f"{name} of {path}") for name in ("train_y", "test_y")]
    classes: list[str] = []
    if any(part.dtype.kind == "U" for part in labels):
        names, numbers = np.unique(np.concatenate(labels), return_inverse=True)
        classes, labels = [str(name) for name in names], np.split(numbers, [len(labels[0])])
    train_y, test_y = (torch.from_numpy(part) for part in labels)
    split = _as_features(found["train_x"]), train_y, _as_features(found["test_x"]), test_y
    check_split(*split)
    return split, classes


def check_split(train_x: EmbeddingRows, train_y: Labels, test_x: EmbeddingRows, test_y: Labels) -> None:
    """Raises unless both splits are finite features of one width with a label per row, of two classes or more."""
    for name, x, y in (("train", train_x, train_y), ("test", test_x, test_y)):
        if x.ndim != 2 or not len(x) or y.shape != x.shape[:1] or y.is_floating_point():
            got = f"{name}_x={tuple(x.shape)} and {name}_y={tuple(y.shape)} of {y.dtype}"
            raise ArgumentError("Evaluation", "features [n, d] and a whole-number label per row", got)
        if not torch.isfinite(x).all():
            others = int((~torch.isfinite(x)).sum())
            raise NotFinite("Evaluation", "finite features", f"{others} others in {name}_x")
    if train_x.shape[1] != test_x.shape[1]:
        raise argument_error("Evaluation", f"test features of width {train_x.shape[1]}", "test_x", tuple(test_x.shape))
    if train_y.min() == train_y.max():
        raise ArgumentError("Evaluation", "at least two classes in train_y", f"one: every label is {int(train_y[0])}")


def _as_features(array: Array) -> EmbeddingRows:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))


def _as_array(part: Tensor) -> Any:
    part = part.detach().cpu()
    return (part.float() if part.is_floating_point() else part).numpy()


def pack_bits(answers: NDArray[np.bool_]) -> str:
    """10,000 answers are 1,668 characters.

    >>> unpack_bits(pack_bits(np.array([True, False, True])), 3)
    array([ True, False,  True])
    """
    return base64.b64encode(np.packbits(answers).tobytes()).decode()


def pack_numbers(numbers: NDArray[Any]) -> str:
    """Numbers, one per item, as text: float32."""
    return base64.b64encode(numbers.astype("<f4").tobytes()).decode()


def unpack_numbers(text: Any, number: int) -> NDArray[np.float32] | None:
    """The numbers, or None where the text does not hold so many finite ones.

    >>> unpack_numbers(pack_numbers(np.array([0.5, -1.0])), 2)
    array([ 0.5, -1. ], dtype=float32)
    """
    try:
        found = np.frombuffer(base64.b64decode(text, validate=True), "<f4")
    except (TypeError, ValueError, binascii.Error):
        return None
    return found if len(found) == number and np.isfinite(found).all() else None


def unpack_bits(text: Any, number: int) -> NDArray[np.bool_] | None:
    """The answers, or None where the text does not hold so many."""
    try:
        packed = np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
    except (TypeError, ValueError, binascii.Error):
        return None
    return np.unpackbits(packed, count=number).astype(bool) if len(packed) == -(-number // 8) else None
