"""Read arrays and labels from .npz and .npy files, with errors that name the array and the problem.

``read_arrays`` reads a file of known arrays; ``read_npz``, ``read_npy`` and ``read_member`` are its parts, for callers
that know less. Headers are checked before anything is allocated, and pickled objects are never loaded.
``plain_labels`` and ``known_labels`` check labels of data sets.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardneg.core.errors import ArgumentError, FileError, HardnegError, NoFile, warn_once
from hardneg.core.text import printable
from hardneg.io.processes import memory_bytes

Array = NDArray[Any]

_ZIP, _NPY = (b"PK\x03\x04", b"PK\x05\x06"), b"\x93NUMPY"  # first bytes; a zip file with members or without any
_NEGATIVE = re.compile(r"-\d+(\.\d+)?")
_SHOWN = 5  # names in an error


def read_arrays(who: str, path: Path, advice: Mapping[str, str], *, needed: Sequence[str]) -> dict[str, Array]:
    """Read the arrays of an .npz file whose names are known.

    Args:
        who: Caller, for errors.
        path: The file.
        advice: For each array that is read, the fix if it holds Python objects.
        needed: Names that the file must have.

    Returns:
        The arrays that the file has, of those in ``advice``.

    Raises:
        NoFile: If there is no such file.
        FileError: If it is another kind of file, is damaged or lacks a needed array.
        ArgumentError: If an array holds objects or structured values.
    """
    arrays = f"for each of {', '.join(needed)}" if len(needed) > 1 else f"`{needed[0]}`"
    what = f"an array {arrays} in an .npz file"
    _check_kind(who, what, path, needed)
    found = read_npz(who, path, tuple(advice), advice)
    if missing := [name for name in needed if name not in found]:
        others = ", ".join(printable(name, 40) for name in names_in_npz(who, path)[:_SHOWN]) or "none"
        fix = f"the arrays that are read are {', '.join(advice)}"
        raise FileError(who, what, path, f"which lacks {', '.join(missing)} and has {others}", fix)
    return found


def _check_kind(who: str, what: str, path: Path, needed: Sequence[str]) -> None:
    """Raise unless the file is a zip archive, as .npz files are."""
    if not path.is_file():
        raise NoFile(who, what, path, "which is not a file")
    with open(path, "rb") as file:
        head = file.read(len(_NPY))
    if not head.startswith(_ZIP):
        kind = "a .npy file of one array" if head == _NPY else "another kind of file"
        call = ", ".join(f"{name}=..." for name in needed)
        raise FileError(who, what, path, f"which is {kind}", f"write it with np.savez(PATH, {call})")


def read_npz(
    who: str, path: Path, names: Sequence[str] | None = None, advice: Mapping[str, str] | None = None
) -> dict[str, Array]:
    """Read the arrays of an .npz file, each checked before it is loaded.

    Args:
        who: Caller, for errors.
        path: The file.
        names: Arrays to read, if the file has them; None for all.
        advice: Fix for each array that holds Python objects.
    """
    with _damage(who, path, ".npz", "which"), zipfile.ZipFile(path) as archive:
        there = {name.removesuffix(".npy"): name for name in archive.namelist()}
        wanted = list(there) if names is None else [name for name in names if name in there]
        return {name: read_member(who, path, archive, there[name], (advice or {}).get(name)) for name in wanted}


def read_member(who: str, path: Path, archive: zipfile.ZipFile, member: str, advice: str | None = None) -> Array:
    """Read one array of an open .npz file, checked before it is loaded."""
    name = member.removesuffix(".npy")
    with _damage(who, path, ".npz", f"whose {name}"):
        with archive.open(member) as file:
            _check_header(who, path, file, name, archive.getinfo(member).file_size, advice)
        with archive.open(member) as file:
            array: Array = np.lib.format.read_array(file, allow_pickle=False)
            return array


def names_in_npz(who: str, path: Path) -> list[str]:
    """Return the names of the arrays in an .npz file."""
    with _damage(who, path, ".npz", "which"), zipfile.ZipFile(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist()]


def read_npy(who: str, path: Path, *, mapped: bool = False) -> Array:
    """Read the array of an .npy file.

    Args:
        who: Caller, for errors.
        path: The file.
        mapped: Whether to leave the array on disk until its rows are needed.
    """
    with _damage(who, path, ".npy", "which"):
        with path.open("rb") as file:
            _check_header(who, path, file, None, path.stat().st_size, None)
        array: Array = np.load(path, mmap_mode="c" if mapped else None, allow_pickle=False)
        return array


@contextmanager
def _damage(who: str, path: Path, kind: str, whose: str) -> Iterator[None]:
    """Turn whatever zipfile, zlib and NumPy raise for wrong bytes, from MemoryError to SyntaxError, into FileError."""
    path.open("rb").close()  # permission and disk errors are raised as they are
    try:
        yield
    except HardnegError:
        raise
    except Exception as error:
        why = f": {error}" if kind == ".npz" else " or of another kind"  # NumPy's text is about magic strings
        raise FileError(who, f"an undamaged {kind} file", path, f"{whose} is damaged{why}") from error


def _check_header(who: str, path: Path, file: IO[bytes], name: str | None, size: int, advice: str | None) -> None:
    """Raise unless an array has plain values and the size in its header, which fits into memory.

    A damaged or hostile header may declare terabytes, which NumPy would try to allocate.
    """
    where = str(path) if name is None else f"{name} of {path}"
    version = np.lib.format.read_magic(file)
    if version > (2, 0):
        raise ArgumentError(who, "plain arrays", f"a structured array in {where}", advice)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    if dtype.hasobject:
        raise ArgumentError(who, "plain arrays", f"Python objects in {where}", advice or "save numbers or text")
    declared = dtype.itemsize
    for length in shape:
        declared *= length  # Python integers do not overflow
    if declared > size - file.tell():
        got = f"whose header declares {declared:,} bytes in {name or 'it'}, more than there are"
        raise FileError(who, "a complete file of arrays", path, got)
    if name is not None and declared > memory_bytes():
        fix = "save it as .npy, which stays on disk, or use a larger machine"
        raise FileError(who, "arrays that fit into memory", path, f"with {declared:,} bytes in {name}", fix)


def plain_labels(who: str, labels: Array, where: str) -> Array:
    """Return labels as integers or text; they stay floats only if some are NaN.

    Args:
        who: Caller, for errors.
        labels: One label per row [n]: integers, floats with integer values, text or UTF-8 bytes.
        where: Array and file, for errors.

    Raises:
        ArgumentError: If labels have another shape or type, or do not fit into int64.

    Example:
        >>> plain_labels("data", np.array([0.0, 2.0]), "y").tolist()
        [0, 2]
    """
    if labels.ndim != 1:
        raise ArgumentError(who, "labels [n], one for each row", f"labels={labels.shape} in {where}")
    if labels.dtype.kind not in "biufUS":
        raise ArgumentError(who, "labels that are integers or text", f"{labels.dtype} in {where}")
    if labels.dtype.kind == "S":
        return _decoded(who, labels, where)
    if labels.dtype.kind == "f":
        odd = ~np.isnan(labels) & (np.isinf(labels) | (labels != np.rint(labels)))
        _check_none(who, labels, odd, "that are integers or text", where)
    if labels.dtype.kind in "uf":  # larger values would overflow int64 and become negative, that is: missing
        wide = labels.astype(np.result_type(labels, np.float64)) if labels.dtype.kind == "f" else labels
        _check_none(who, labels, (wide >= 2**63) | (wide < -(2**63)), "from -2**63 to 2**63 - 1", where)
    has_nan = labels.dtype.kind == "f" and np.isnan(labels).any()
    return labels if has_nan or labels.dtype.kind == "U" else labels.astype(np.int64)


def _decoded(who: str, labels: Array, where: str) -> Array:
    """Return labels in bytes as text."""
    try:
        return np.char.decode(labels, "utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(
            who,
            "labels in bytes to be UTF-8",
            f"{error.object!r} in {where}",
            "convert them to text with np.char.decode(labels, ENCODING)",
        ) from None


def _check_none(who: str, labels: Array, odd: Array, what: str, where: str) -> None:
    """Raise if any label is marked as odd."""
    if odd.any():
        raise ArgumentError(
            who, f"labels {what}", f"{odd.sum()} of {len(labels)} others, such as {labels[odd][0]}, in {where}"
        )


def known_labels(labels: Array, where: str) -> Array | None:
    """Return checked labels, or None if no item has one.

    Empty text, numbers below 0 (also as text) and NaN mean that an item has no label.

    Raises:
        ArgumentError: If only some items have a label.
    """
    labels = plain_labels("data", labels, where)
    if labels.dtype.kind == "U":
        missing = np.isin(labels, [name for name in np.unique(labels) if means_no_label(str(name))])
    else:
        missing = ~(labels >= 0)
    if missing.any() and not missing.all():
        raise ArgumentError(
            "data",
            "a label for every item or for none",
            f"{missing.sum()} of {len(labels)} without one (empty or below 0) in {where}",
            "leave these items out, or remove all labels to train without them",
        )
    return None if missing.any() else labels


def means_no_label(name: str) -> bool:
    """Whether a class name means "no label": it is empty or a number below 0.

    >>> means_no_label(" "), means_no_label("-1"), means_no_label("0")
    (True, True, False)
    """
    return not name.strip() or _NEGATIVE.fullmatch(name) is not None


def warn_of_unseen_classes(
    train_y: Annotated[Tensor, "n"], test_y: Annotated[Tensor, "m"], classes: Sequence[str] = ()
) -> None:
    """Warn about test items of classes without training items, which are often a class spelled in two ways.

    Args:
        train_y: Labels of the training items [n].
        test_y: Labels of the test items [m].
        classes: Name of each label, if the labels were text.
    """
    unseen = ~torch.isin(test_y, train_y.to(test_y.device))
    if not unseen.any():
        return
    labels = torch.unique(test_y[unseen]).tolist()
    names = [classes[label] if classes else str(label) for label in labels[:_SHOWN]]
    more = f" and {len(labels) - _SHOWN} more" if len(labels) > _SHOWN else ""
    warn_once(
        # The key has no class names: after training the same data is checked again, when the names are unknown.
        f"unseen classes: {len(labels)}, {int(unseen.sum())} of {len(test_y)} beside {len(train_y)}",
        f"{int(unseen.sum())} of {len(test_y)} test items belong to classes without training items "
        f"({', '.join(names)}{more}) and will count as errors. Is a class spelled in two ways?",
    )
