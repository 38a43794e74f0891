"""OUT.manifest.json: how a mined file was made, from which files and with which encoder, each by its digest.

Nothing in it is run or written to: those who read it take the files that it names only where their content is the one
that was mined, and vectors only from a cache of that content.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hardneg.io.files import read_json
from hardneg.mining.cache_key import digest_of_path
from hardneg.mining.options import MineOptions, given_inputs
from hardneg.mining.runs import split_name


def describe_inputs(options: MineOptions) -> dict[str, dict[str, Any]]:
    """Path (from the folder of the output), size and digest of what a job reads."""
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
    """What a job reads, by name; runs, imported files and second models are never read from a manifest."""
    given = {f"run {name}": path for name, path in map(split_name, options.runs)}
    given |= {f"import {number}": path for number, path in enumerate(options.imports, 1)}
    models = {"guide": options.guide, "cross-encoder": options.cross_encoder}
    given |= {name: path for name, path in models.items() if path is not None and Path(path).exists()}
    return {**given_inputs(options), **{name: Path(path) for name, path in given.items()}}


def read_manifest(path: Path, who: str) -> dict[str, Any]:
    """The manifest, empty where there is none; raises ``Damaged`` if its checksum differs."""
    if not path.is_file():
        return {}
    fix = "run the same `hardneg mine` again with --overwrite, or delete it to go by the mined file alone"
    return read_json(path, fix, who=who)


def is_of(out: Path, manifest: dict[str, Any]) -> bool:
    """Whether the output is the one that the manifest was written with."""
    return out.exists() and manifest.get("output") == digest_of_path(out)
