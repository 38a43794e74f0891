"""How a result was made: the command, the commit, the machine and the versions."""

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
"""Names the commit where the code runs from a copy without its repository, as on a borrowed machine."""


def environment() -> dict[str, Any]:
    """The command and the versions, for reports and manifests."""
    return {
        "command": _command(),
        "commit": _commit(),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": _versions(),
    }


def _command() -> str:
    program, package = Path(sys.argv[0]), Path(__file__).parents[1]
    if program.suffix == ".py" and package in program.parents:  # by python -m, also on every rank of a launcher
        parts = program.relative_to(package.parent).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__main__")
        return shlex.join(["python", "-m", module, *sys.argv[1:]])
    return shlex.join([program.name, *sys.argv[1:]])


def _commit() -> str | None:
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
    """Of what any result may depend on, and of whatever else is installed of the libraries that extras bring."""
    found = {name: _version(name) for name in (*_usual, *_others)}
    return {name: version for name, version in found.items() if version is not None or name in _usual}


@cache  # the metadata of a package is read and parsed each time
def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
