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

import errno
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

import torch

from hardneg.boards import leave_board, show_on_board
from hardneg.options import RECIPES

FIGURES = ("knn", "1nn", "linear", "uniformity")
"""Those of the result that TensorBoard shows beside the records."""


LEAVES_WITH_STDIN = "HARDNEG_LEAVES_WITH_STDIN"
"""Set for a process that is to end when its standard input is closed: when the one that started it is gone."""


DIVERGED = 3
"""The exit code of a process whose run's losses or weights were no longer finite."""


_no_room = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
go_on = "make room, then run the same command again"
"""The advice of verbs that go on by themselves; runs have --resume."""


def write_atomically(
    path: Path, write: Callable[[BinaryIO], object], advice: str = "make room, then use --resume"
) -> None:
    """Writes beside the file, then replaces it: readers see the old content or the new, never a part.

    ``advice`` says how to go on once a full disk has room again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        cause = _cause_of(error)
        if cause is None:
            raise
        if isinstance(cause, OSError):
            raise disk_failure(path, cause, advice) from error
        raise cause from error


def check_folder(path: Path) -> None:
    if any(part.is_file() for part in (path, *path.parents)):
        raise ValueError(f"--out needs a folder, got {path}, where there is a file.")


def disk_failure(path: Path, cause: OSError, advice: str) -> OSError:
    """The error of the disk in a sentence, with the advice where there was no room."""
    what = f"{path} could not be written ({cause.strerror or cause}); what was there before is unchanged"
    return OSError(cause.errno, f"{what}; {advice}" if cause.errno in _no_room else what)


def _cause_of(error: BaseException | None) -> OSError | KeyboardInterrupt | None:
    """The error of the disk, or Ctrl-C; torch.save may bring either as the context of an error of its own."""
    while error is not None and not isinstance(error, (OSError, KeyboardInterrupt)):
        error = error.__cause__ or error.__context__
    return error


def write_json(path: Path, value: Any, advice: str = "make room, then use --resume") -> None:
    text = json.dumps(_without_nan(value), indent=1, default=str, allow_nan=False) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()), advice)


def _without_nan(value: Any) -> Any:
    """None for what is not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _without_nan(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
        with (self.path / ".lock").open("w") as file:
            until = time.monotonic() + patience
            while not _lock(file):
                if time.monotonic() > until:
                    raise ValueError(f"{self.path} is in use by another process; wait for it, or use another --out.")
                time.sleep(0.05)
            for left in self.path.glob(".*.partial"):  # of a process that was killed while it wrote
                left.unlink(missing_ok=True)
            yield

    def config(self) -> dict[str, Any]:
        if not self.config_path.exists():
            raise ValueError(f"{self.path} is not a run: it has no config.json.")
        config: dict[str, Any] = _read_json(self.config_path, "put back a copy of it, or use another --out")
        return config

    def result(self) -> dict[str, Any] | None:
        """The final figures, or None while the run is not finished."""
        if not self.result_path.exists():
            return None
        result: dict[str, Any] = _read_json(self.result_path, "delete it to evaluate again from the checkpoint")
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
        return Memory(**_read_json(path, "delete it")) if path.exists() else None

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    def log(self, **record: Any) -> None:
        try:
            with self.metrics_path.open("a") as file:
                file.write(json.dumps(_without_nan(record), allow_nan=False) + "\n")
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


def _read_json(path: Path, advice: str) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError:
        raise ValueError(f"{path} is damaged; {advice}.") from None


def _lock(file: TextIO) -> bool:
    """Whether the file is now locked for this process. Where the system or the disk has no locks, it counts as so."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return True
    return True


def _command() -> str:
    program, package = Path(sys.argv[0]), Path(__file__).parent
    if program.suffix == ".py" and package in program.parents:  # by python -m, also on every rank of a launcher
        parts = program.relative_to(package.parent).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__main__")
        return shlex.join(["python", "-m", module, *sys.argv[1:]])
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
