"""Provenance of a result: the command, the commit, the machine and the versions.

``environment`` goes into reports, manifests and run records, so that a figure can be traced and repeated.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

COMMIT = "HARDNEG_COMMIT"
"""Environment variable with the commit, for code that is copied to a machine without its repository."""


def environment() -> dict[str, Any]:
    """Return the command, the commit, the machine and the versions of libraries, for reports and manifests."""
    return {
        "command": _command(),
        "commit": _commit(),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": _versions(),
    }


def _command() -> str:
    """Return the command line as a user would type it."""
    program, package = Path(sys.argv[0]), Path(__file__).parents[1]
    if program.suffix == ".py" and package in program.parents:  # started by python -m, also by a launcher
        parts = program.relative_to(package.parent).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__main__")
        return shlex.join(["python", "-m", module, *sys.argv[1:]])
    return shlex.join([program.name, *sys.argv[1:]])


def _commit() -> str | None:
    """Return the commit of the code, or None outside of a repository."""
    if named := os.environ.get(COMMIT):
        return named
    try:
        here = Path(__file__).parent
        answer = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
    except OSError:
        return None
    return answer.stdout.strip() or None


_usual = ("hardneg", "torch", "numpy", "accelerate", "scikit-learn")
_others = (
    "bm25s", "datasets", "faiss-cpu", "huggingface-hub", "pyarrow", "ray", "safetensors", "scipy",
    "sentence-transformers", "tokenizers", "torch-geometric", "transformers", "triton",
)  # fmt: skip


def _versions() -> dict[str, str | None]:
    """Return the versions of libraries that results may depend on; optional ones only if they are installed."""
    found = {name: _version(name) for name in (*_usual, *_others)}
    return {name: version for name, version in found.items() if version is not None or name in _usual}


@cache  # reading and parsing the metadata of a package takes milliseconds
def _version(name: str) -> str | None:
    """Return the version of a package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
