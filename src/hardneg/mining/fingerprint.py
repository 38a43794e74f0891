"""What a mining job is made of: pieces of another job, or of other data, are never used for this one."""

from __future__ import annotations

import hashlib
import json
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hardneg import __version__
from hardneg.core.errors import DataChanged
from hardneg.io.functions import load_function
from hardneg.mining.cache_key import digest_of_path, key_of_function
from hardneg.mining.encode import warn_not_reused
from hardneg.mining.engine import Miner
from hardneg.mining.engines.base import Engine
from hardneg.mining.inputs import Embedded
from hardneg.mining.manifest import paths_read
from hardneg.mining.options import MineOptions

_large = 1 << 28  # bytes


def fingerprint(
    options: MineOptions, stamps: dict[str, Any], embedded: Embedded, miner: Miner, engine: Engine
) -> dict[str, Any]:
    """What must be the same for the pieces of a killed run to be used: the data, the options, the functions that they
    name, and how queries and corpus were cut into blocks, which follows from the device."""
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
        warn_not_reused(f"what {rescore} gives")
    return key or engine.agree(uuid.uuid4().hex)


def digest(job: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:16]


def stamps_of(options: MineOptions) -> dict[str, Any]:
    """Of everything that a job reads, by name: what changes when it does."""
    return {name: _stamp(path) for name, path in paths_read(options).items() if path.exists()}


def check_unchanged(options: MineOptions, before: dict[str, Any]) -> None:
    """Raises where an input was replaced while it was mined: it may have been read before and after."""
    for name, stamp in stamps_of(options).items():
        if stamp != before.get(name):
            got = f"another content of {paths_read(options)[name]} than at the beginning"
            raise DataChanged("mine", "inputs that stay the same while it works", got, "run the same command again")


def _stamp(path: Path) -> Any:
    """What changes when a file or folder does: its digest or, of a large one, which each part would read, the times."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    states = [file.stat() for file in files]
    if sum(state.st_size for state in states) < _large:
        return digest_of_path(path)
    return [[file.name, state.st_size, state.st_mtime_ns] for file, state in zip(files, states, strict=True)]
