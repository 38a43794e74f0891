"""The manifest OUT.manifest.json of a mined file: inputs, options and encoder, each with its digest.

The first half writes it, with the fingerprint by which a job recognises its own pieces. The second
half reads it for audits, as untrusted data that another version may have written: a manifest chooses
no code, no model and no file to write. The files that it names are read only if their size and digest
are those recorded when mining; missing vectors come from the cache, by content.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from hardneg import __version__
from hardneg.core.errors import ArgumentError, DataChanged, FileError, NoFile
from hardneg.io.files import read_json
from hardneg.io.functions import load_function
from hardneg.mining.cache_key import digest_of_path, key_of_function
from hardneg.mining.encode import warn_not_reused
from hardneg.mining.engines import Engine
from hardneg.mining.fusion import split_name
from hardneg.mining.inputs import Embedded
from hardneg.mining.miner import Miner
from hardneg.mining.options import Columns, MineOptions, given_inputs, inputs, manifest_of


def describe_inputs(options: MineOptions) -> dict[str, dict[str, Any]]:
    """Return path (relative to the folder of the output), size and digest of every input of a job."""
    folder = Path(options.out).resolve().parent
    return {
        name: {
            "path": os.path.relpath(path.resolve(), folder),
            "bytes": path.stat().st_size if path.is_file() else None,
            "sha256": digest_of_path(path),
        }
        for name, path in paths_read(options).items()
        if path.exists()
    }


def paths_read(options: MineOptions) -> dict[str, Path]:
    """Return the paths that a job reads, by name.

    Runs, imported files and second models are included; an audit that reads a manifest ignores them.
    """
    given = {f"run {name}": path for name, path in map(split_name, options.runs)}
    given |= {f"import {number}": path for number, path in enumerate(options.imports, 1)}
    models = {"guide": options.guide, "cross-encoder": options.cross_encoder}
    given |= {name: path for name, path in models.items() if path is not None and Path(path).exists()}
    return {**given_inputs(options), **{name: Path(path) for name, path in given.items()}}


def read_manifest(path: Path, who: str) -> dict[str, Any]:
    """Return the manifest; empty if there is none.

    Args:
        path: Path of the manifest.
        who: Function named in errors.

    Raises:
        Damaged: If its checksum differs.
    """
    if not path.is_file():
        return {}
    fix = "run the same `hardneg mine` again with --overwrite, or delete it to use the mined file alone"
    return read_json(path, fix, who=who)


def is_of(out: Path, manifest: dict[str, Any]) -> bool:
    """Return whether the manifest was written with this output."""
    return out.exists() and manifest.get("output") == digest_of_path(out)


_large = 1 << 28  # bytes above which an input is stamped by its times instead of its content


def fingerprint(
    options: MineOptions, stamps: dict[str, Any], embedded: Embedded, miner: Miner, engine: Engine
) -> dict[str, Any]:
    """Return everything that must be equal for the pieces of a killed run to be used again.

    It covers the data, the options, the functions that they name, and the blocks into which queries
    and corpus were split, which depend on the device.

    Args:
        options: Options; those that do not affect the result are left out.
        stamps: Stamps of the inputs, from ``stamps_of``.
        embedded: Vectors with the keys of their encoders.
        miner: Blocks, shards and device.
        engine: Processes that must agree on the key of a function without one.
    """
    elsewhere = (
        "device", "cache", "batch_size", "overwrite", "engine", "jobs", "ray_address", "part", "merge", "resume",
    )  # fmt: skip
    relevant = {name: value for name, value in asdict(options).items() if name not in elsewhere}
    return {
        "options": json.dumps(relevant, sort_keys=True),
        "inputs": stamps,
        "encoder": embedded.keys,
        "rescore": None if options.rescore is None else _key_of_rescore(options, options.rescore, engine),
        "blocks": [miner.scorer.query_block, miner.scorer.corpus.block, len(miner.finder.shards)],
        "memory": miner.search.memory_on(miner.scorer.device),
        "device": miner.scorer.device.type,
        "version": __version__,
    }


def _key_of_rescore(options: MineOptions, rescore: str, engine: Engine) -> str:
    key = key_of_function(rescore, load_function(rescore, "mine"), options.cache_key)
    if key is None:
        warn_not_reused(f"The output of {rescore}")
    return key or engine.agree(uuid.uuid4().hex)


def digest(job: dict[str, Any]) -> str:
    """Return a short digest of a fingerprint, part of the names of pieces."""
    return hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:16]


def stamps_of(options: MineOptions) -> dict[str, Any]:
    """Return, for every input of a job, a stamp that changes when its content does."""
    return {name: _stamp(path) for name, path in paths_read(options).items() if path.exists()}


def check_unchanged(options: MineOptions, before: dict[str, Any]) -> None:
    """Raise ``DataChanged`` if an input was replaced during mining: it may have been read before and after."""
    for name, stamp in stamps_of(options).items():
        if stamp != before.get(name):
            got = f"{paths_read(options)[name]}, which has changed since the start"
            raise DataChanged("mine", "inputs that do not change during mining", got, "run the same command again")


def _stamp(path: Path) -> Any:
    """Return the digest of a file or folder; for a large one, its sizes and modification times.

    Each part of a job computes the stamps, and reading hundreds of megabytes each time would be slow.
    """
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    states = [file.stat() for file in files]
    if sum(state.st_size for state in states) < _large:
        return digest_of_path(path)
    return [[file.name, state.st_size, state.st_mtime_ns] for file, state in zip(files, states, strict=True)]


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
