"""Graphs and plans on disk: .npz files without pickle, written atomically and with a checksum.

Used by ``ProximityGraph.save`` and ``load`` (graph.py), and by those of ``Plan`` (plan.py).
"""

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
    """Write the arrays to an .npz file atomically, with a checksum."""
    write_atomically(Path(path), sealing(lambda file: np.savez(file, **arrays)), "free disk space, then save again")


def load_arrays(who: str, path: str | Path, make: Callable[[dict[str, Any]], Stored], fix: str) -> Stored:
    """Load arrays that ``save_arrays`` wrote, and build a value from them.

    Args:
        who: Name of the caller, for errors.
        path: The file.
        make: Makes the value from the arrays by name.
        fix: Advice for errors.

    Raises:
        Damaged: If the file has changed since it was saved, or cannot be read.
    """
    check_seal(Path(path), who, fix)
    try:
        with np.load(path, allow_pickle=False) as file:
            return make(dict(file))
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(who, "an undamaged file", path, got="it cannot be read", fix=fix) from error
