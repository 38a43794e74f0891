"""What the manifest beside a mined file says of it, also one of another version.

A manifest is data: it chooses no code, no model and no file to write. The files that it names are read only where they
are those that were mined, by size and digest; vectors that are not among them come from the cache, by content.
"""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from hardneg.core.errors import ArgumentError, DataChanged, FileError, NoFile
from hardneg.mining.cache_key import digest_of_path
from hardneg.mining.manifest import is_of, read_manifest
from hardneg.mining.options import Columns, MineOptions, inputs, manifest_of

_fix = "name the files with --queries, --corpus and their embeddings, or mine again"


def manifest_beside(path: str) -> dict[str, Any]:
    """The manifest that `hardneg mine` wrote with exactly this file, or an empty dict."""
    file = manifest_of(path)
    manifest = read_manifest(file, "audit")
    if "output" in manifest and not is_of(Path(path), manifest):
        fix = "mine again, or delete the manifest to audit the file as it is"
        raise DataChanged(
            "audit", "a mined file and its manifest of one job", f"another file than {file} describes", fix
        )
    return manifest


def similarity_of(recorded: dict[str, Any]) -> str:
    """That of the manifest; a cosine where it says none."""
    return "dot" if recorded.get("similarity") == "dot" else "cosine"


def whole_number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def mine_options(manifest: dict[str, Any], folder: Path) -> tuple[MineOptions, tuple[str, ...]]:
    """What is needed of a manifest's options to read its files again, and what there is to say about them."""
    recorded = manifest["options"]
    columns = recorded.get("columns")
    columns = columns if isinstance(columns, dict) else {}
    options, names = ({one.name for one in fields(kind)} for kind in (MineOptions, Columns))
    foreign = sorted((set(recorded) - options) | (set(columns) - names))
    notes = (f"The manifest has options that this version does not know: {', '.join(foreign)}.",) if foreign else ()
    paths = input_paths(manifest, folder)
    if "queries" not in paths:
        raise ArgumentError("audit", "a manifest that names the queries", "one that does not", _fix)
    column = recorded.get("embedding_column")
    named = Columns(**{name: value for name, value in columns.items() if name in names and isinstance(value, str)})
    mined = MineOptions(paths["queries"], out="", columns=named)
    return replace(
        mined,
        **paths,
        positive_label=label if isinstance(label := recorded.get("positive_label"), str) else None,
        embedding_column=column if isinstance(column, str) else None,
        missing_positives="drop" if recorded.get("missing_positives") == "drop" else "error",
        search="bm25" if recorded.get("search") == "bm25" else "exact",
    ), notes


def input_paths(manifest: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The files that were mined, found from the folder of the manifest; those of other content are an error."""
    given = manifest.get("inputs")
    if not isinstance(given, dict):
        raise ArgumentError("audit", "a manifest with the digests of what was mined", "one without", _fix)
    return {name: str(_checked(name, given[name], folder)) for name in inputs if name in given}


def _checked(name: str, given: Any, folder: Path) -> Path:
    path, digest = (given.get("path"), given.get("sha256")) if isinstance(given, dict) else (None, None)
    if not isinstance(path, str) or "\0" in path or not isinstance(digest, str):
        raise ArgumentError("audit", f"a path and a digest of the {name}", "a manifest without", _fix)
    found = Path(os.path.normpath(folder / path))
    if not found.exists():
        raise NoFile("audit", f"the {name} that were mined", found, "which is not there", _fix)
    # A manifest must not make the audit read folders elsewhere.
    inside = found.resolve().is_relative_to(folder.resolve())
    if found.is_dir() and not inside:
        raise FileError("audit", f"the {name} in the folder of the manifest", found, "a folder outside", _fix)
    may_be = found.is_dir() or (found.is_file() and found.stat().st_size == given.get("bytes"))
    if not may_be or digest_of_path(found) != digest:
        where = "" if inside else ", outside the folder of the manifest"
        raise DataChanged("audit", f"the {name} that were mined", f"{found}{where}, of other content", _fix)
    return found
