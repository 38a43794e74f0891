"""Arrays and labels as .npz files have them, with errors that say what is wrong with which array."""

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

_ZIP, _NPY = (b"PK\x03\x04", b"PK\x05\x06"), b"\x93NUMPY"  # a zip file with members and one without any
_NEGATIVE = re.compile(r"-\d+(\.\d+)?")
_SHOWN = 5


def read_arrays(who: str, path: Path, advice: Mapping[str, str], *, needed: Sequence[str]) -> dict[str, Array]:
    """Those of the arrays that an .npz file has; ``advice`` names each and says how one of objects becomes plain."""
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
    if not path.is_file():
        raise NoFile(who, what, path, "where there is no file")
    with open(path, "rb") as file:
        head = file.read(len(_NPY))
    if not head.startswith(_ZIP):
        kind = "a .npy file of one array" if head == _NPY else "something else"
        call = ", ".join(f"{name}=..." for name in needed)
        raise FileError(who, what, path, f"which is {kind}", f"np.savez(PATH, {call}) writes one")


def read_npz(
    who: str, path: Path, names: Sequence[str] | None = None, advice: Mapping[str, str] | None = None
) -> dict[str, Array]:
    """The arrays of an .npz file, or those of these names that it has, each checked before it is loaded."""
    with _damage(who, path, ".npz", "which"), zipfile.ZipFile(path) as archive:
        there = {name.removesuffix(".npy"): name for name in archive.namelist()}
        wanted = list(there) if names is None else [name for name in names if name in there]
        return {name: read_member(who, path, archive, there[name], (advice or {}).get(name)) for name in wanted}


def read_member(who: str, path: Path, archive: zipfile.ZipFile, member: str, advice: str | None = None) -> Array:
    """One array of an open .npz file, checked before it is loaded."""
    name = member.removesuffix(".npy")
    with _damage(who, path, ".npz", f"whose {name}"):
        with archive.open(member) as file:
            _check_header(who, path, file, name, archive.getinfo(member).file_size, advice)
        with archive.open(member) as file:
            array: Array = np.lib.format.read_array(file, allow_pickle=False)
            return array


def names_in_npz(who: str, path: Path) -> list[str]:
    with _damage(who, path, ".npz", "which"), zipfile.ZipFile(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist()]


def read_npy(who: str, path: Path, *, mapped: bool = False) -> Array:
    """The array of an .npy file; ``mapped`` leaves it on disk until its rows are needed."""
    with _damage(who, path, ".npy", "which"):
        with path.open("rb") as file:
            _check_header(who, path, file, None, path.stat().st_size, None)
        array: Array = np.load(path, mmap_mode="c" if mapped else None, allow_pickle=False)
        return array


@contextmanager
def _damage(who: str, path: Path, kind: str, whose: str) -> Iterator[None]:
    """Whatever zipfile, zlib and NumPy raise for wrong bytes, from MemoryError to SyntaxError, as one error."""
    path.open("rb").close()  # what the disk refuses stays an error of the disk
    try:
        yield
    except HardnegError:
        raise
    except Exception as error:
        why = f": {error}" if kind == ".npz" else " or of another kind"  # NumPy speaks of magic strings
        raise FileError(who, f"a whole {kind} file", path, f"{whose} is damaged{why}") from error


def _check_header(who: str, path: Path, file: IO[bytes], name: str | None, size: int, advice: str | None) -> None:
    """Raises unless the array is of plain values and of the size that its header declares, which fits into memory."""
    where = str(path) if name is None else f"{name} of {path}"
    version = np.lib.format.read_magic(file)
    if version > (2, 0):
        raise ArgumentError(who, "plain arrays", f"fields with names in {where}", advice)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    if dtype.hasobject:
        raise ArgumentError(who, "plain arrays", f"objects in {where}", advice or "save numbers or texts")
    declared = dtype.itemsize
    for length in shape:
        declared *= length  # whole numbers of Python, which do not wrap
    if declared > size - file.tell():
        raise FileError(
            who, "a whole file of arrays", path, f"whose header declares {declared:,} bytes in {name or 'it'}"
        )
    if name is not None and declared > memory_bytes():
        fix = "save it as .npy, which stays on disk, or use a larger machine"
        raise FileError(who, "arrays that fit into memory", path, f"with {declared:,} bytes in {name}", fix)


def plain_labels(who: str, labels: Array, where: str) -> Array:
    """Labels as whole numbers or text, one per row; floats stay floats only if some are NaN."""
    if labels.ndim != 1:
        raise ArgumentError(who, "labels [n], one for each row", f"labels={labels.shape} in {where}")
    if labels.dtype.kind not in "biufUS":
        raise ArgumentError(who, "labels that are whole numbers or text", f"{labels.dtype} in {where}")
    if labels.dtype.kind == "S":
        return _decoded(who, labels, where)
    if labels.dtype.kind == "f":
        odd = ~np.isnan(labels) & (np.isinf(labels) | (labels != np.rint(labels)))
        _check_none(who, labels, odd, "that are whole numbers or text", where)
    if labels.dtype.kind in "uf":  # int64 would wrap them, and they would seem to be below 0
        wide = labels.astype(np.result_type(labels, np.float64)) if labels.dtype.kind == "f" else labels
        _check_none(who, labels, (wide >= 2**63) | (wide < -(2**63)), "from -2**63 to 2**63 - 1", where)
    has_nan = labels.dtype.kind == "f" and np.isnan(labels).any()
    return labels if has_nan or labels.dtype.kind == "U" else labels.astype(np.int64)


def _decoded(who: str, labels: Array, where: str) -> Array:
    try:
        return np.char.decode(labels, "utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(
            who,
            "labels that are UTF-8 where they are bytes",
            f"{error.object!r} in {where}",
            "np.char.decode(labels, ENCODING) makes text of them",
        ) from None


def _check_none(who: str, labels: Array, odd: Array, what: str, where: str) -> None:
    if odd.any():
        raise ArgumentError(
            who, f"labels {what}", f"{odd.sum()} of {len(labels)} that are not, such as {labels[odd][0]}, in {where}"
        )


def known_labels(labels: Array, where: str) -> Array | None:
    """The labels, or None where no item has one: an empty text, a number below 0, also as text, and NaN are none."""
    labels = plain_labels("data", labels, where)
    if labels.dtype.kind == "U":
        missing = np.isin(labels, [name for name in np.unique(labels) if says_none(str(name))])
    else:
        missing = ~(labels >= 0)
    if missing.any() and not missing.all():
        raise ArgumentError(
            "data",
            "a label for every item or for none",
            f"{missing.sum()} of {len(labels)} without one (empty or below 0) in {where}",
            "leave these items out, or take all labels away to train without them",
        )
    return None if missing.any() else labels


def says_none(name: str) -> bool:
    """Whether the name of a class is empty or a number below 0."""
    return not name.strip() or _NEGATIVE.fullmatch(name) is not None


def warn_of_unseen_classes(
    train_y: Annotated[Tensor, "n"], test_y: Annotated[Tensor, "m"], classes: Sequence[str] = ()
) -> None:
    """Warns of test items whose class no training item has: nothing can name it, and a typo looks like a bad arm."""
    unseen = ~torch.isin(test_y, train_y.to(test_y.device))
    if not unseen.any():
        return
    labels = torch.unique(test_y[unseen]).tolist()
    names = [classes[label] if classes else str(label) for label in labels[:_SHOWN]]
    more = f" and {len(labels) - _SHOWN} more" if len(labels) > _SHOWN else ""
    warn_once(
        # The same data is met again after training, where the names of its classes are not known.
        f"unseen classes: {len(labels)}, {int(unseen.sum())} of {len(test_y)} beside {len(train_y)}",
        f"{int(unseen.sum())} of {len(test_y)} test items are of classes that no training item has "
        f"({', '.join(names)}{more}): each of them counts as an error. Is a class spelled in two ways?",
    )
