"""The built-in data kinds, and which kind a name in ``--data`` belongs to.

Importing this module registers all built-in kinds.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hardneg.core.errors import ArgumentError, NoFile, UnknownName
from hardneg.io.functions import module_of, run_file
from hardneg.io.tables import suffix_of, table_suffixes
from hardneg.training.data.graphs import GraphData as GraphData
from hardneg.training.data.image_texts import ImageTexts as ImageTexts
from hardneg.training.data.images import USAGE
from hardneg.training.data.images import ImageData as ImageData
from hardneg.training.data.items import KINDS, Items, forms, split_name
from hardneg.training.data.pairs import TextPairs as TextPairs
from hardneg.training.data.pairs import VectorPairs as VectorPairs
from hardneg.training.data.texts import Texts as Texts


def kind_of(name: str, *, may_run: bool = True) -> type[Items]:
    """Return the data kind of a name, without reading data.

    A name that starts with the path of a Python file, such as ``file.py:spirals:1000``, runs that file, which registers
    its kinds.

    Args:
        name: Value of ``--data``.
        may_run: Whether a Python file may be run; False for names read from files that someone else may have written.

    Raises:
        UnknownName: If no kind has this prefix.
        NoFile: If the name is a path that does not exist.
        ArgumentError: If the name is a path without a kind, or names a Python file that may not be run.

    Example:
        >>> kind_of("digits").noun
        'image'
    """
    file, name = split_name(name)
    if file and may_run:
        run_file(Path(file), "data", "a Python file that exists and registers the kind")
    elif file and module_of(f"{file}:") not in sys.modules:
        fix = "import the file first, in Python: hardneg.training.data.kinds.kind_of(name)"
        got = f"one from {file}, which is not run for names read from a file"
        raise ArgumentError("data", "a known kind", got, fix)
    prefix = name.partition(":")[0]
    if name and prefix not in KINDS and (kinds := _kinds_of_path(Path(name))):
        fix = f"use {' or '.join(f'{kind}:{name}' for kind in kinds)}"
        raise ArgumentError("data", "the kind of data before a path", repr(name), fix)
    if prefix not in KINDS and name.startswith(("/", ".", "~")):
        fix = f"check the path, and put the kind of data before it, such as folder:{name}"
        raise NoFile("data", "a file or folder that exists", name, fix=fix)
    if prefix not in KINDS:
        raise UnknownName(name, forms(), usage=USAGE)
    return KINDS[prefix]


def _kinds_of_path(path: Path) -> tuple[str, ...]:
    """Return the kinds that a file or folder may be of; empty if the path does not exist."""
    if path.is_dir():
        return (
            ("folder", "imagetext")
            if any(suffix_of(file) in table_suffixes for file in path.iterdir())
            else ("folder",)
        )
    if not path.is_file():
        return ()
    known = {".npz": ("npz", "embeddings"), ".txt": ("text",), ".tar": ("tar",)}
    return known.get(suffix_of(path), ("pairs", "text", "list", "imagetext"))
