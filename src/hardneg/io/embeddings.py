"""Embeddings of both splits of a data set, with labels, as one .npz file; and arrays packed as text for JSON.

Training runs save ``embeddings.npz`` with ``save_arrays``; evaluation and audits read it with ``load_embeddings``.
``pack_bits`` and ``pack_numbers`` store one answer per test item in the JSON of a run.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
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

AGAIN = "delete result.json of the run and train again with --resume"
SPLIT_NAMES = ("train_x", "train_y", "test_x", "test_y")
_ADVICE = {name: f"use np.array({name}, dtype={'float' if '_x' in name else 'str'})" for name in SPLIT_NAMES}


def save_arrays(path: str | Path | BinaryIO, **parts: Tensor) -> None:
    """Save features and labels of both splits, or ``test_x`` alone for items without labels, as one .npz file.

    Args:
        path: The file or an open binary stream.
        **parts: ``train_x`` [n, d], ``train_y`` [n], ``test_x`` [m, d] and ``test_y`` [m], which are checked together.
    """
    if parts.keys() == set(SPLIT_NAMES):
        check_split(**parts)
    np.savez(path, **{name: _as_array(part) for name, part in parts.items()})  # type: ignore[arg-type]


def load_evaluated(path: Path) -> tuple[EmbeddingRows, Labels | None]:
    """Load the test split of a saved file, which may have no train split.

    Returns:
        Features [m, d], and labels [m] or None.
    """
    if not path.is_file() or "train_x" in names_in_npz("load_embeddings", path):
        return load_embeddings(path)[2:]
    # Users write such files without a checksum; a truncated zip file is recognised anyway.
    check_seal(path, "load_embeddings", AGAIN, required=False)
    advice = {name: _ADVICE[name] for name in ("test_x", "test_y")}
    found = read_arrays("load_embeddings", path, advice, needed=("test_x",))
    labels = plain_labels("load_embeddings", found["test_y"], f"test_y of {path}") if "test_y" in found else None
    return _as_features(found["test_x"]), None if labels is None else torch.from_numpy(labels)


def load_embeddings(path: str | Path) -> tuple[EmbeddingRows, Labels, EmbeddingRows, Labels]:
    """Load ``train_x``, ``train_y``, ``test_x`` and ``test_y`` from a saved .npz file.

    Args:
        path: A file that a run or ``np.savez`` has written. Labels that are text become their alphabetical rank.

    Returns:
        Features [n, d] and labels [n] of the train split, then those of the test split.

    Raises:
        NoFile: If there is no such file.
        FileError: If it is damaged or lacks an array.
        ArgumentError: If shapes or types do not fit, or there is only one class.
    """
    return read_embeddings(Path(path))[0]


def read_embeddings(path: Path) -> tuple[tuple[EmbeddingRows, Labels, EmbeddingRows, Labels], list[str]]:
    """Return the four arrays, and the class names if the labels are text."""
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
    """Raise unless both splits are finite features of one width with a label per row, of at least two classes.

    Args:
        train_x: Features [n, d].
        train_y: Labels [n].
        test_x: Features [m, d].
        test_y: Labels [m].
    """
    for name, x, y in (("train", train_x, train_y), ("test", test_x, test_y)):
        if x.ndim != 2 or not len(x) or y.shape != x.shape[:1] or y.is_floating_point():
            got = f"{name}_x={tuple(x.shape)} and {name}_y={tuple(y.shape)} of {y.dtype}"
            raise ArgumentError("Evaluation", "features [n, d] and one integer label per row", got)
        if not torch.isfinite(x).all():
            count = int((~torch.isfinite(x)).sum())
            raise NotFinite("Evaluation", "finite features", f"{count} NaN or infinite values in {name}_x")
    if train_x.shape[1] != test_x.shape[1]:
        raise argument_error("Evaluation", f"test features of width {train_x.shape[1]}", "test_x", tuple(test_x.shape))
    if train_y.min() == train_y.max():
        got = f"only one (every label is {int(train_y[0])})"
        raise ArgumentError("Evaluation", "at least two classes in train_y", got)


def pack_bits(answers: NDArray[np.bool_]) -> str:
    """Pack booleans as base64 text, 8 per byte: 10,000 of them take 1,668 characters.

    >>> unpack_bits(pack_bits(np.array([True, False, True])), 3)
    array([ True, False,  True])
    """
    return base64.b64encode(np.packbits(answers).tobytes()).decode()


def unpack_bits(text: Any, number: int) -> NDArray[np.bool_] | None:
    """Return the booleans that ``pack_bits`` packed, or None unless the text holds ``number`` bits."""
    try:
        packed = np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
    except (TypeError, ValueError, binascii.Error):
        return None
    return np.unpackbits(packed, count=number).astype(bool) if len(packed) == -(-number // 8) else None


def pack_numbers(numbers: NDArray[Any]) -> str:
    """Pack numbers as base64 text, 4 bytes each (float32)."""
    return base64.b64encode(numbers.astype("<f4").tobytes()).decode()


def unpack_numbers(text: Any, number: int) -> NDArray[np.float32] | None:
    """Return the numbers that ``pack_numbers`` packed, or None unless the text holds ``number`` finite ones.

    >>> unpack_numbers(pack_numbers(np.array([0.5, -1.0])), 2)
    array([ 0.5, -1. ], dtype=float32)
    """
    try:
        found = np.frombuffer(base64.b64decode(text, validate=True), "<f4")
    except (TypeError, ValueError, binascii.Error):
        return None
    return found if len(found) == number and np.isfinite(found).all() else None


def outcomes_in(result: Mapping[str, Any], metric: str, number: int) -> NDArray[Any] | None:
    """Return the outcome of each evaluated item, [items]: bits of an accuracy, or numbers of another score.

    Args:
        result: Figures of a run, with packed outcomes under "correct" or "scores".
        metric: Name of the measure whose mean they have.
        number: Number of items.
    """
    right = unpack_bits((result.get("correct") or {}).get(metric), number)
    return unpack_numbers((result.get("scores") or {}).get(metric), number) if right is None else right


def _as_features(array: Array) -> EmbeddingRows:
    """Return an array as a float32 tensor."""
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))


def _as_array(part: Tensor) -> Any:
    """Return a tensor as an array, floats as float32."""
    part = part.detach().cpu()
    return (part.float() if part.is_floating_point() else part).numpy()
