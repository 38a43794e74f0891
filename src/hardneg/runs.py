"""A run directory: what was asked, what was measured, and a checkpoint that is always whole.

run/
  config.json      the recipe, its options, the command and the versions
  metrics.jsonl    one line per record
  checkpoint.pt    the newest state; replaced atomically, so that a crash or a full disk leaves the old one
  result.json      written last: its presence says that the run is finished
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import torch


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes beside the file, then replaces it: readers see the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(
            error.errno, f"{path} could not be written ({error.strerror}); what was there before is unchanged"
        ) from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=1, default=str) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def environment() -> dict[str, Any]:
    """The command and the versions, for reports and manifests."""
    return {
        "command": _command(),
        "commit": _commit(),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {name: _version(name) for name in ("hardneg", "torch", "numpy", "accelerate", "scikit-learn")},
    }


@dataclass(frozen=True)
class Run:
    """One training run on disk."""

    path: Path

    @classmethod
    def open(cls, path: Path | str, recipe: str, options: dict[str, Any], resume: bool) -> Run:
        """Starts a run, or goes on with the one that is there if it was started with the same options."""
        run, asked = cls(Path(path)), {"recipe": recipe, "options": options}
        if not run.config_path.exists():
            write_json(run.config_path, {**asked, **environment()})
            return run
        before = run.config()
        if not resume:
            raise ValueError(f"{run.path} already holds a run; use --resume to go on with it, or another --out.")
        if before["recipe"] != recipe:
            raise ValueError(f"{run.path} holds a checkpoint of recipe {before['recipe']!r}, got {recipe!r}.")
        changed = {
            name: (before["options"].get(name), value)
            for name, value in json.loads(json.dumps(options, default=str)).items()
            if before["options"].get(name) != value
        }
        if changed:
            listed = ", ".join(f"{name}: {old!r} -> {new!r}" for name, (old, new) in changed.items())
            raise ValueError(f"{run.path} was started with other options ({listed}); resume with the same ones.")
        return run

    @property
    def config_path(self) -> Path:
        return self.path / "config.json"

    @property
    def checkpoint_path(self) -> Path:
        return self.path / "checkpoint.pt"

    @property
    def result_path(self) -> Path:
        return self.path / "result.json"

    def config(self) -> dict[str, Any]:
        if not self.config_path.exists():
            raise ValueError(f"{self.path} is not a run: it has no config.json.")
        config: dict[str, Any] = json.loads(self.config_path.read_text())
        return config

    def result(self) -> dict[str, Any] | None:
        """The final figures, or None while the run is not finished."""
        return json.loads(self.result_path.read_text()) if self.result_path.exists() else None

    def finish(self, result: dict[str, Any]) -> None:
        write_json(self.result_path, result)

    def log(self, **record: Any) -> None:
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        path = self.path / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]  # a killed writer may leave half a line

    def forget_after(self, step: int) -> None:
        """Drops the records that a resumed run will write again."""
        kept = [record for record in self.metrics() if record.get("step", 0) <= step]
        text = "".join(json.dumps(record) + "\n" for record in kept)
        write_atomically(self.path / "metrics.jsonl", lambda file: file.write(text.encode()))

    def save(self, state: dict[str, Any]) -> None:
        write_atomically(self.checkpoint_path, lambda file: torch.save(state, file))

    def load(self, device: torch.device | str = "cpu") -> dict[str, Any] | None:
        """The newest checkpoint, or None."""
        if not self.checkpoint_path.exists():
            return None
        state: dict[str, Any] = torch.load(self.checkpoint_path, map_location=device, weights_only=True)
        return state


def _command() -> str:
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return shlex.join(["python", "-m", f"hardneg.{program.parent.name}", *sys.argv[1:]])
    return shlex.join([program.name, *sys.argv[1:]])


def _commit() -> str | None:
    try:
        here = Path(__file__).parent
        answer = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
    except OSError:
        return None
    return answer.stdout.strip() or None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
