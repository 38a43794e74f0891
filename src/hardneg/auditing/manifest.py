"""The manifest of a mined file, read as untrusted data that another version may have written.

A manifest chooses no code, no model and no file to write. The files that it names are read only if their size and
digest are those recorded when mining; missing vectors come from the cache, by content. Called by ``mined``.
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


def manifest_of_file(path: str) -> dict[str, Any]:
    """Return the manifest that `hardneg mine` wrote with exactly this file, or an empty dict.

    Raises:
        DataChanged: If the manifest describes another content of the file.
    """
    file = manifest_of(path)
    manifest = read_manifest(file, "audit")
    if "output" in manifest and not is_of(Path(path), manifest):
        fix = "mine again, or delete the manifest to audit the file as it is"
        what = "a mined file that matches its manifest"
        raise DataChanged("audit", what, f"a file whose content differs from that recorded in {file}", fix)
    return manifest


def similarity_of(recorded: dict[str, Any]) -> str:
    """Return the similarity recorded in a manifest's options, cosine if there is none.

    >>> similarity_of({"similarity": "dot"}), similarity_of({})
    ('dot', 'cosine')
    """
    return "dot" if recorded.get("similarity") == "dot" else "cosine"


def whole_number(value: Any) -> int | None:
    """Return a positive integer as it is, and None for anything else, since a manifest may hold any JSON.

    >>> whole_number(5), whole_number(True), whole_number("5")
    (5, None, None)
    """
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def mine_options(manifest: dict[str, Any], folder: Path) -> tuple[MineOptions, tuple[str, ...]]:
    """Return the options needed to read the mined files again, and notes about options that were skipped.

    Args:
        manifest: The manifest, with ``options`` and ``inputs``.
        folder: Absolute folder of the manifest; relative paths start there.

    Returns:
        Options that name the inputs and their columns, and notes about options unknown to this version.

    Raises:
        ArgumentError: If the manifest does not name the queries.
        DataChanged: If an input has changed since mining.
    """
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
    """Return the path of each mined input, found from the folder of the manifest and checked by size and digest.

    Raises:
        ArgumentError: If the manifest has no digests.
        NoFile: If an input no longer exists.
        FileError: If an input is a folder outside the folder of the manifest.
        DataChanged: If an input has another content.
    """
    given = manifest.get("inputs")
    if not isinstance(given, dict):
        raise ArgumentError("audit", "a manifest with the digests of the mined inputs", "one without", _fix)
    return {name: str(_checked(name, given[name], folder)) for name in inputs if name in given}


def _checked(name: str, given: Any, folder: Path) -> Path:
    """Return the path of one input after all checks."""
    path, digest = (given.get("path"), given.get("sha256")) if isinstance(given, dict) else (None, None)
    if not isinstance(path, str) or "\0" in path or not isinstance(digest, str):
        raise ArgumentError("audit", f"a manifest with path and digest of the {name}", "one without", _fix)
    found = Path(os.path.normpath(folder / path))
    if not found.exists():
        raise NoFile("audit", f"the {name} that were mined", found, "which is missing", _fix)
    # A manifest must not make the audit read folders elsewhere.
    inside = found.resolve().is_relative_to(folder.resolve())
    if found.is_dir() and not inside:
        raise FileError("audit", f"the {name} in the folder of the manifest", found, "a folder outside", _fix)
    may_be = found.is_dir() or (found.is_file() and found.stat().st_size == given.get("bytes"))
    if not may_be or digest_of_path(found) != digest:
        where = "" if inside else ", outside the folder of the manifest"
        raise DataChanged("audit", f"the {name} that were mined", f"{found}{where}, whose content has changed", _fix)
    return found
