"""Graphs and plans on disk: .npz files without pickle, whole or not at all, with a checksum."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hardneg.core.errors import Damaged
from hardneg.io.files import write_atomically
from hardneg.io.sealed import check_seal, sealing

Stored = TypeVar("Stored")


def save_arrays(path: str | Path, **arrays: Any) -> None:
    write_atomically(Path(path), sealing(lambda file: np.savez(file, **arrays)), "make room, then save again")


def load_arrays(who: str, path: str | Path, make: Callable[[dict[str, Any]], Stored], fix: str) -> Stored:
    """What ``make`` makes of the arrays; raises ``Damaged`` if the file is not what was saved."""
    check_seal(Path(path), who, fix)
    try:
        with np.load(path, allow_pickle=False) as file:
            return make(dict(file))
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(who, "an undamaged file", path, got="it cannot be read", fix=fix) from error
