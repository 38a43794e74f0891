"""The manifest OUT.manifest.json: inputs, options and encoder of a mined file, each with its digest.

It also contains the fingerprint by which a job recognises its own pieces. Nothing in a manifest is
run or written to. Its readers (audits) use the files that it names only if their content is the one
that was mined, and vectors only from a cache of that content.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hardneg import __version__
from hardneg.core.errors import DataChanged
from hardneg.io.files import read_json
from hardneg.io.functions import load_function
from hardneg.mining.cache_key import digest_of_path, key_of_function
from hardneg.mining.encode import warn_not_reused
from hardneg.mining.engine import Miner
from hardneg.mining.engines.base import Engine
from hardneg.mining.fusion import split_name
from hardneg.mining.inputs import Embedded
from hardneg.mining.options import MineOptions, given_inputs


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

    Runs, imported files and second models are listed, but never read from a manifest.
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
    elsewhere = ("device", "cache", "batch_size", "overwrite", "engine", "workers", "ray_address", "part", "merge")
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
