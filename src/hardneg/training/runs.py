"""A run directory: what was asked, what was measured, and a checkpoint that is always whole.

run/
  config.json      the recipe, its options, the command and the versions
  metrics.jsonl    one line per record
  checkpoint.pt    the newest state; replaced atomically, so that a crash or a full disk leaves the old one
  embeddings.npz   features and labels of both splits, where there are labels
  warnings.json    what a run of a comparison warned of
  memory.json      bytes that the run holds, for a comparison that asks whether there is room for another
  result.json      written last: its presence says that the run is finished
  events.out...    the records for TensorBoard, if it is installed
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hardneg.io.files import check_folder, locked, read_json, without_nan, write_atomically, write_json
from hardneg.io.provenance import environment
from hardneg.training.options import RECIPES
from hardneg.training.tensorboard import leave_board, show_on_board

FIGURES = ("knn", "1nn", "linear", "uniformity")
"""Those of the result that TensorBoard shows beside the records."""


LEAVES_WITH_STDIN = "HARDNEG_LEAVES_WITH_STDIN"
"""Set for a process that is to end when its standard input is closed: when the one that started it is gone."""


DIVERGED = 3
"""The exit code of a process whose run's losses or weights were no longer finite."""


class Memory(NamedTuple):
    """Bytes: of the process, and of its GPU."""

    host: int
    device: int


@dataclass(frozen=True)
class Run:
    """One training run on disk."""

    path: Path

    @classmethod
    def open(cls, path: Path | str, recipe: str, options: dict[str, Any], resume: bool) -> Run:
        """Starts a run, or goes on with the one that is there if it was started with the same options."""
        run, asked = cls(Path(path)), {"recipe": recipe, "options": options}
        if not run.begun():
            write_json(run.config_path, {**asked, **environment()})
            return run
        before = run.config()
        if not resume:
            raise ValueError(f"{run.path} already holds a run; use --resume to go on with it, or another --out.")
        if before["recipe"] != recipe:
            raise ValueError(f"{run.path} holds a checkpoint of recipe {before['recipe']!r}, got {recipe!r}.")
        # A run of an older version was at the defaults of the options that were added since.
        then = json.loads(json.dumps(RECIPES[recipe]().as_dict() | before["options"], default=str))
        changed = {
            name: (then.get(name), value)
            for name, value in json.loads(json.dumps(options, default=str)).items()
            if then.get(name) != value
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

    def begun(self) -> bool:
        """Whether there is anything to lose: a run that failed at the door may be started with other options."""
        return self.checkpoint_path.exists() or self.result_path.exists() or bool(self.metrics())

    @contextmanager
    def alone(self, patience: float = 10.0) -> Iterator[None]:
        """Keeps other processes off the directory; waits ``patience`` seconds for one that is about to end."""
        check_folder(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        fix = "wait for it, or use another --out"
        with locked(self.path / ".lock", "train", patience=patience, fix=fix):
            for left in self.path.glob(".*.partial"):  # of a process that was killed while it wrote
                left.unlink(missing_ok=True)
            yield

    def config(self) -> dict[str, Any]:
        if not self.config_path.exists():
            raise ValueError(f"{self.path} is not a run: it has no config.json.")
        config: dict[str, Any] = read_json(self.config_path, "put back a copy of it, or use another --out")
        return config

    def result(self) -> dict[str, Any] | None:
        """The final figures, or None while the run is not finished."""
        if not self.result_path.exists():
            return None
        result: dict[str, Any] = read_json(self.result_path, "delete it to evaluate again from the checkpoint")
        return result

    def finish(self, result: dict[str, Any]) -> None:
        write_json(self.result_path, result)
        show_on_board(self.path, result.get("steps", 0), {name: result[name] for name in FIGURES if name in result})
        leave_board(self.path)

    def warn(self, text: str) -> None:
        """Puts a warning beside the other files: what a process says is gone when a comparison goes on."""
        if text not in (told := self.warnings()):
            write_json(self.path / "warnings.json", [*told, text])

    def warnings(self) -> list[str]:
        path = self.path / "warnings.json"
        try:
            return [str(one) for one in json.loads(path.read_text())] if path.exists() else []
        except ValueError:
            return []  # nothing that is worth an error

    def took(self, memory: Memory) -> None:
        write_json(self.path / "memory.json", memory._asdict())

    def memory(self) -> Memory | None:
        """What it held when it last said so, or None before its first epoch has ended."""
        path = self.path / "memory.json"
        return Memory(**read_json(path, "delete it")) if path.exists() else None

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    def log(self, **record: Any) -> None:
        try:
            with self.metrics_path.open("a") as file:
                file.write(json.dumps(without_nan(record), allow_nan=False) + "\n")
        except OSError as error:
            what = f"{self.metrics_path} could not be written ({error.strerror}); make room, then use --resume"
            raise OSError(error.errno, what) from error
        show_on_board(self.path, record.get("step", 0), record)

    def metrics(self) -> list[dict[str, Any]]:
        """The records; None where a question had no answer, such as the share of false negatives without labels."""
        lines = self.metrics_path.read_text().splitlines() if self.metrics_path.exists() else []
        if lines and not lines[-1].endswith("}"):
            lines.pop()  # a killed writer may leave half a line
        try:
            return [json.loads(line) for line in lines]
        except json.JSONDecodeError:
            raise ValueError(f"{self.metrics_path} is damaged; put back a copy of it, or delete it.") from None

    def forget_after(self, step: int) -> None:
        """Drops the records that a resumed run will write again."""
        leave_board(self.path)
        kept = [record for record in self.metrics() if record.get("step", 0) <= step]
        text = "".join(json.dumps(record) + "\n" for record in kept)
        write_atomically(self.metrics_path, lambda file: file.write(text.encode()))

    def save(self, state: dict[str, Any]) -> None:
        """Replaces the checkpoint; it says whose it is, so that one copied from elsewhere is told apart."""
        state = state | {"of": self._asked()}
        write_atomically(self.checkpoint_path, lambda file: torch.save(state, file))

    def load(self, device: torch.device | str = "cpu") -> dict[str, Any] | None:
        """The newest checkpoint, or None."""
        path = self.checkpoint_path
        if not path.exists():
            return None
        try:
            # On the CPU, Accelerate's ranks are on "cpu:0", where torch.load can put nothing.
            where = "cpu" if torch.device(device).type == "cpu" else device
            state: dict[str, Any] = torch.load(path, map_location=where, weights_only=True)
            of = state["of"]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise ValueError(
                f"{path} cannot be read as a checkpoint ({type(error).__name__}: {str(error).partition(chr(10))[0]}); "
                "put back a copy of it, or delete it to train from the beginning."
            ) from error
        if of != self._asked():
            raise ValueError(f"{path} is the checkpoint of another run ({of}); delete it to train from the beginning.")
        return state

    def _asked(self) -> str:
        config = self.config()
        return f"{config['recipe']}: {json.dumps(config['options'], sort_keys=True)}"
