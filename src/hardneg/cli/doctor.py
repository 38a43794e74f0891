"""`hardneg doctor`: versions, device and extras of this installation, and what is missing for which verb.

The extras and their packages are read from the metadata of the installed package; ``PURPOSES`` names what each extra is
for.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from hardneg import __version__
from hardneg.cli.output import Output
from hardneg.io.terminal import Terminal

PURPOSES = {
    "train": "train, compare, any --config",
    "eval": "evaluate, compare, the data set digits",
    "vision": "train on image files or with kornia",
    "report": "report and audit with images",
    "text": "--model, texts in train, .parquet files",
    "lexical": "mine --bm25",
    "ann": "mine --search flat, ivf or hnsw",
    "onnx": "export --format onnx",
    "ray": "mine --engine ray",
    "communities": 'train --batches "communities()"',
    "resume": "data loaders with state",
    "lightning": "PyTorch Lightning",
    "graphs": "train on graphs",
    "wandb": "records on Weights & Biases",
}
"""What each extra is for, in the order of the table."""


@dataclass(frozen=True)
class Extra:
    """An extra of hardneg and its packages.

    Attributes:
        purpose: Verbs and options that need it.
        installed: Version of each installed package.
        missing: Packages that are missing or too old, with the version needed.
        install: Command that installs the extra.
    """

    purpose: str
    installed: dict[str, str]
    missing: list[str]
    install: str


def examine() -> dict[str, Any]:
    """Return the versions, the device, the compiler and the extras of this installation."""
    requirements = _requirements()
    core = _extra("", "everything", requirements)
    return {
        "hardneg": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "device": _device(),
        "compiler": shutil.which("cl") if os.name == "nt" else shutil.which(os.environ.get("CXX", "g++")),
        "core": asdict(core),
        "extras": {name: asdict(_extra(name, purpose, requirements)) for name, purpose in PURPOSES.items()},
    }


def _requirements() -> list[tuple[str, str, str]]:
    """Return (extra, package, smallest version) of every requirement in the metadata; the extra is "" for the core."""
    found = []
    for line in metadata.requires("hardneg") or []:
        package, _, rest = line.partition(">=")
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        smallest = re.match(r"[\w.]+", rest)
        found.append((extra[1] if extra else "", re.split(r"[ ;\[]", package)[0], smallest[0] if smallest else "0"))
    return found


def _extra(name: str, purpose: str, requirements: list[tuple[str, str, str]]) -> Extra:
    """Compare the requirements of one extra with what is installed."""
    installed: dict[str, str] = {}
    missing = []
    for extra, package, smallest in requirements:
        if extra != name:
            continue
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            missing.append(f"{package}>={smallest}")
            continue
        installed[package] = version
        if _numbers(version) < _numbers(smallest):
            missing.append(f"{package}>={smallest}")
    return Extra(purpose, installed, missing, f"pip install 'hardneg[{name}]'" if name else "pip install hardneg")


def _numbers(version: str) -> list[int]:
    """Return the leading numbers of a version, for comparisons."""
    return [int(one) for one in re.findall(r"\d+", re.split(r"[^\d.]", version)[0])]


def _device() -> str:
    """Describe the device that torch uses, or why torch cannot be imported."""
    try:
        import torch

        if torch.cuda.is_available():
            memory = torch.cuda.get_device_properties(0).total_memory / 2**30
            several = f"{torch.cuda.device_count()} x " if torch.cuda.device_count() > 1 else ""
            return f"{several}{torch.cuda.get_device_name()}, {memory:.0f} GiB (CUDA {torch.version.cuda})"
        return f"CPU with {torch.get_num_threads()} threads; torch sees no GPU"
    except Exception as error:
        return f"torch cannot be imported: {error}"


def examine_and_show(output: Output) -> None:
    """Print the result of ``examine``.

    Raises:
        typer.Exit: With code 1 if a package that every verb needs is missing or too old.
    """
    found = examine()
    output.result(found, lambda: _show(found))
    if found["core"]["missing"]:
        raise typer.Exit(1)


def _show(found: dict[str, Any]) -> None:
    console = Terminal()
    core = found["core"]
    for name, value in (
        ("hardneg", f"{found['hardneg']} on Python {found['python']}, {found['system']}"),
        ("torch", f"{core['installed'].get('torch', 'missing')}: {found['device']}"),
        ("compiler", found["compiler"] or "none, so torch.compile cannot generate code for a CPU"),
        ("needed", ", ".join(f"{package} {version}" for package, version in core["installed"].items())),
    ):
        console.print(Text(f"{name:9}{value}"))
    if core["missing"]:
        console.print(Text(f"missing: {', '.join(core['missing'])}; {core['install']}", style="red"))
    table = Table("extra", "for", "status", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, one in found["extras"].items():
        status = Text(f"missing {', '.join(one['missing'])}", style="yellow") if one["missing"] else Text("installed")
        table.add_row(name, one["purpose"], status)
    console.print(table)
    if missing := [name for name, one in found["extras"].items() if one["missing"]]:
        console.print(Text(f"To install what is missing: pip install 'hardneg[{','.join(missing)}]'"))
