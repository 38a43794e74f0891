"""Arrays and labels as .npz files have them, with errors that say what is wrong with which array."""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardneg.core.errors import warn_once

Array = NDArray[Any]

_ZIP, _NPY = (b"PK\x03\x04", b"PK\x05\x06"), b"\x93NUMPY"  # a zip file with members and one without any
# What zipfile and NumPy raise for a file with wrong bytes: an offset before the start of the file is an OSError, and a
# member that claims to be encrypted a RuntimeError.
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError)
_NEGATIVE = re.compile(r"-\d+(\.\d+)?")
_SHOWN = 5


def read_arrays(who: str, path: Path, advice: Mapping[str, str], *, needed: Sequence[str]) -> dict[str, Array]:
    """Those of the arrays that an .npz file has; ``advice`` names each and says how one of objects becomes plain."""
    arrays = f"for each of {', '.join(needed)}" if len(needed) > 1 else f"`{needed[0]}`"
    what = f"{who} needs an array {arrays} in an .npz file"
    _check_kind(what, path, needed)
    try:
        archive = np.load(path, allow_pickle=False)
    except _DAMAGE as error:
        raise ValueError(f"{who} needs a whole .npz file, got {path}, which is damaged: {error}.") from None
    with archive:
        found = {name: _plain(who, archive, name, path, advice[name]) for name in advice if name in archive}
    if missing := [name for name in needed if name not in found]:
        raise ValueError(f"{what}, got {path}, which lacks {', '.join(missing)}.")
    return found


def _check_kind(what: str, path: Path, needed: Sequence[str]) -> None:
    """Raises for a file that is no .npz, which NumPy would take for a pickle and advise to run the code in it."""
    if not path.is_file():
        raise FileNotFoundError(f"{what}, got no file {path}.")
    with open(path, "rb") as file:
        head = file.read(len(_NPY))
    if not head.startswith(_ZIP):
        kind = "a .npy file of one array" if head == _NPY else "something else"
        call = ", ".join(f"{name}=..." for name in needed)
        raise ValueError(f"{what}, got {path}, which is {kind}; np.savez(PATH, {call}) writes one.")


def whats_wrong(error: Exception) -> str:
    """Why NumPy could not read a file, without its advice to run the code in it."""
    return "it holds Python objects, or is no NumPy file" if "allow_pickle" in str(error) else str(error)


def _plain(who: str, archive: Any, name: str, path: Path, advice: str) -> Array:
    try:
        array = archive[name]
    except _DAMAGE as error:  # NumPy's own advice is to run the code in the file
        if "Object arrays" in str(error):
            raise ValueError(f"{who} needs plain arrays, got objects in {name} of {path}; {advice}.") from None
        raise ValueError(f"{who} needs a whole .npz file, got {path}, whose {name} is damaged: {error}.") from None
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{who} needs an .npz file that NumPy wrote, got {path}, whose {name} is no array.")
    return array


def plain_labels(who: str, labels: Array, where: str) -> Array:
    """Labels as whole numbers or text, one per row; floats stay floats only if some are NaN."""
    if labels.ndim != 1:
        raise ValueError(f"{who} needs labels [n], one for each row, got labels={labels.shape} in {where}.")
    if labels.dtype.kind not in "biufUS":
        raise ValueError(f"{who} needs labels that are whole numbers or text, got {labels.dtype} in {where}.")
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
        raise ValueError(
            f"{who} needs labels that are UTF-8 where they are bytes, got {error.object!r} in {where}; "
            "np.char.decode(labels, ENCODING) makes text of them."
        ) from None


def _check_none(who: str, labels: Array, odd: Array, what: str, where: str) -> None:
    if odd.any():
        raise ValueError(
            f"{who} needs labels {what}, got {odd.sum()} of {len(labels)} that are not, such as {labels[odd][0]}, in "
            f"{where}."
        )


def known_labels(labels: Array, where: str) -> Array | None:
    """The labels, or None where no image has one: a number below 0, also as text, and NaN say that there is none."""
    labels = plain_labels("load", labels, where)
    if labels.dtype.kind == "U":
        missing = np.isin(labels, [name for name in np.unique(labels) if says_none(str(name))])
    else:
        missing = ~(labels >= 0)
    if missing.any() and not missing.all():
        raise ValueError(
            f"load needs a label for every image or for none, got {missing.sum()} of {len(labels)} without one (below "
            f"0) in {where}; leave these images out, or take all labels away to train without them."
        )
    return None if missing.any() else labels


def says_none(name: str) -> bool:
    """Whether the name of a class is a number below 0."""
    return _NEGATIVE.fullmatch(name) is not None


def warn_of_unseen_classes(
    train_y: Annotated[Tensor, "n"], test_y: Annotated[Tensor, "m"], classes: Sequence[str] = ()
) -> None:
    """Warns of test images whose class no training image has: nothing can name it, and a typo looks like a bad arm."""
    unseen = ~torch.isin(test_y, train_y.to(test_y.device))
    if not unseen.any():
        return
    labels = torch.unique(test_y[unseen]).tolist()
    names = [classes[label] if classes else str(label) for label in labels[:_SHOWN]]
    more = f" and {len(labels) - _SHOWN} more" if len(labels) > _SHOWN else ""
    warn_once(
        # The same data is met again after training, where the names of its classes are not known.
        f"unseen classes: {len(labels)}, {int(unseen.sum())} of {len(test_y)} beside {len(train_y)}",
        f"{int(unseen.sum())} of {len(test_y)} test images are of classes that no training image has "
        f"({', '.join(names)}{more}): each of them counts as an error. Is a class spelled in two ways?",
    )
