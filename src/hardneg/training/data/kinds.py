"""The data kinds: which of them a name in ``--data`` belongs to."""

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
from hardneg.training.data.text_pairs import TextPairs as TextPairs
from hardneg.training.data.texts import Texts as Texts
from hardneg.training.data.vector_pairs import VectorPairs as VectorPairs


def kind_of(name: str, *, may_run: bool = True) -> type[Items]:
    """The kind of data that a name belongs to; reads no data.

    A name that begins with the path of a Python file, ``file.py:spirals:1000``, runs that file, which registers its
    kinds. ``may_run=False`` is for names from files that someone else may have written.

    >>> kind_of("digits").noun
    'image'
    """
    file, name = split_name(name)
    if file and may_run:
        run_file(Path(file), "data", "a Python file that exists and registers the kind")
    elif file and module_of(f"{file}:") not in sys.modules:
        fix = "import the file first, in Python: hardneg.training.data.kinds.kind_of(name)"
        raise ArgumentError("data", "a kind that is known", f"{file}, which is not run for a name in a file", fix)
    prefix = name.partition(":")[0]
    if name and prefix not in KINDS and (kinds := _kinds_of_path(Path(name))):
        fix = f"write {' or '.join(f'{kind}:{name}' for kind in kinds)}"
        raise ArgumentError("data", "the kind of data before a path", repr(name), fix)
    if prefix not in KINDS and name.startswith(("/", ".", "~")):
        fix = f"check the path, and write the kind of data before it, such as folder:{name}"
        raise NoFile("data", "a file or folder that exists", name, "which is not there", fix)
    if prefix not in KINDS:
        raise UnknownName(name, forms(), usage=USAGE)
    return KINDS[prefix]


def _kinds_of_path(path: Path) -> tuple[str, ...]:
    """The kinds that a file or folder could be of; none where nothing is there."""
    if path.is_dir():
        return (
            ("folder", "imagetext")
            if any(suffix_of(file) in table_suffixes for file in path.iterdir())
            else ("folder",)
        )
    if not path.is_file():
        return ()
    return {".npz": ("npz", "embeddings"), ".txt": ("text",)}.get(suffix_of(path), ("pairs", "text", "imagetext"))
