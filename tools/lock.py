"""Writes constraints.txt, the versions that development and CI install, or constraints-oldest.txt, the smallest ones.

    python tools/lock.py newest     the newest versions that fit together; torch stays as it is pinned
    python tools/lock.py oldest     the lower bounds of pyproject.toml, for `make test-oldest`
    python tools/lock.py release    requirements-release.txt: what builds and uploads a release, with hashes

pip resolves without installing. No address is written: the index is that of the machine.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NEWEST, OLDEST = ROOT / "constraints.txt", ROOT / "constraints-oldest.txt"
RELEASE = ROOT / "requirements-release.txt"
TOOLS = ("docs", "test", "dev", "bench", "all")  # what users do not install, and what only names other extras


def declared() -> dict[str, str]:
    """Each package that users install, and its lower bound."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(one for name in extras if name not in TOOLS for one in extras[name])]
    return dict(one.split(">=") for one in wanted)


def pinned(path: Path) -> dict[str, str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def oldest() -> str:
    bounds = "".join(f"{name}=={version}\n" for name, version in sorted(declared().items()))
    return "# The lower bounds of pyproject.toml, by `make lock`: `make test-oldest` installs them.\n" + bounds


def resolved(*wanted: str) -> list[dict[str, Any]]:
    """What pip would install into an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        python = Path(folder) / "venv" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
        command = [python, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", report]
        subprocess.run([*command, *wanted], check=True)
        found: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["install"]
    return found


def newest() -> str:
    found = [one["metadata"] for one in resolved(f"{ROOT}[dev,bench]", f"torch=={pinned(NEWEST)['torch']}")]
    pins = {normal(one["name"]): one["version"].partition("+")[0] for one in found}
    pins.pop("hardneg")
    head = "# The lock of development and CI, by `make lock`; users get the ranges of pyproject.toml.\n"
    return head + "".join(f"{name}=={version}\n" for name, version in sorted(pins.items()))


def release() -> str:
    """With the hashes of the wheels for the runner of the workflow: Linux on x86_64, Python 3.11."""
    head = "# What builds and uploads a release, by `make lock` on Linux x86_64 with Python 3.11.\n"
    lines = [
        f"{normal(one['metadata']['name'])}=={one['metadata']['version']} "
        f"--hash=sha256:{one['download_info']['archive_info']['hashes']['sha256']}\n"
        for one in resolved("build", "twine", "setuptools>=77")
    ]
    return head + "".join(sorted(lines))


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    written = {"newest": (NEWEST, newest), "oldest": (OLDEST, oldest), "release": (RELEASE, release)}
    path, text = written[sys.argv[1]]
    path.write_text(text())
