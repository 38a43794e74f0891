"""A run directory: the options, what was trained, what was measured, and a checkpoint that is always whole.

run/
  config.json      the recipe, its options, what was trained, the command and the versions
  metrics.jsonl    one line per record
  checkpoint.pt    the newest state; replaced atomically, so that a crash or a full disk leaves the old one
  checkpoint.previous.pt   the one before it, for the case that the newest is damaged
  checkpoint.best.pt       the weights with which the monitor was highest, if there is one
  embeddings.npz   features and labels of both splits; without labels, features of the test split
  warnings.json    what a run of a comparison warned of
  memory.json      bytes that the run holds, for a comparison that decides whether another run fits
  result.json      written last: its presence says that the run is finished
  events.out...    the records for TensorBoard, if it is installed

Each file carries its checksum, which is verified when it is read. The lines of metrics.jsonl are numbered, and
result.json and the checkpoint hold how many there are.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hardneg.core.errors import Damaged, FileError, HardnegWarning
from hardneg.core.text import printable
from hardneg.io.files import disk_failure, locked, read_json, write_atomically, write_json
from hardneg.io.provenance import environment
from hardneg.training.boards import leave_boards, show_on_boards
from hardneg.training.checkpoints import RECORDS, Checkpoints
from hardneg.training.data_record import check_same_data, check_same_encoder, is_record
from hardneg.training.evaluation.measures import MEASURES
from hardneg.training.records import count_lines, line_of, read_records, text_of

CONFIG_FIX = "put back a copy of it, or use another --out"

BESIDE = ("uniformity",)
"""A figure of the result that TensorBoard shows with the measures, beside the records."""


LEAVES_WITH_STDIN = "HARDNEG_LEAVES_WITH_STDIN"
"""Set for a process that is to end when its standard input is closed: when the one that started it is gone."""


REFUSED, DIVERGED, NO_ROOM, NO_MEMORY, DATA_CHANGED = 2, 3, 4, 5, 6
"""The exit codes of the process of a run: wrong input or damaged files, losses or weights that are not finite, a full
disk, too little memory, other data than the run was begun with."""


class Warned(NamedTuple):
    """A warning of a run; ``kind`` is the same for those that differ in their numbers only."""

    kind: str
    text: str


class PeakMemory(NamedTuple):
    """Bytes: of the process, and of its GPU."""

    host: int
    device: int


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The options that differ, with both values.

    >>> changes({"epochs": 6, "seed": 0}, {"epochs": 7, "seed": 0})
    'epochs: 6 -> 7'
    """
    changed = {name: (then.get(name), value) for name, value in now.items() if then.get(name) != value}
    return ", ".join(f"{name}: {printable(repr(old), 80)} -> {new!r}" for name, (old, new) in changed.items())


@dataclass(frozen=True)
class Run:
    """One training run on disk."""

    path: Path

    @classmethod
    def open(
        cls,
        path: Path | str,
        recipe: str,
        options: dict[str, Any],
        resume: bool,
        usual: Mapping[str, Any] | None = None,
    ) -> Run:
        """Starts a run, or resumes the existing one if it was started with the same options.

        ``usual``: the defaults of the options, at which a run was that was begun before an option was added.
        """
        run, wanted = cls(Path(path)), {"recipe": recipe, "options": options}
        if not run.begun():
            write_json(run.config_path, {**wanted, **environment()})
            return run
        before = run.whole_config()
        if not resume:
            fix = "use --resume to continue it, or another --out"
            raise FileError("train", "a new folder", run.path, "which already holds a run", fix)
        if before["recipe"] != recipe:
            got = f"which holds a checkpoint of recipe {before['recipe']!r}"
            raise FileError("train", f"a run of recipe {recipe!r}", run.path, got)
        then, now = (
            json.loads(json.dumps(one, default=str)) for one in ({**(usual or {}), **before["options"]}, options)
        )
        if changed := changes(then, now):
            got = f"which was started with other options ({changed})"
            raise FileError("train", "the options of the run", run.path, got, "resume with the same ones")
        if run.result() is None:  # a finished run needs no checkpoint
            run.checkpoints.fall_back()
        return run

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.path)

    @property
    def config_path(self) -> Path:
        return self.path / "config.json"

    @property
    def checkpoint_path(self) -> Path:
        return self.checkpoints.newest

    @property
    def result_path(self) -> Path:
        return self.path / "result.json"

    def begun(self) -> bool:
        """Whether the run has results: a run that failed in its first checks may be started with other options."""
        return self.checkpoint_path.exists() or self.result_path.exists() or bool(self.metrics())

    @contextmanager
    def alone(self, patience: float = 10.0) -> Iterator[None]:
        """Keeps other processes off the directory; waits ``patience`` seconds for one that is about to end.

        A directory that it makes is removed again if the run is rejected before it has written anything of its own.
        """
        made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_failure(self.path, error, "make room, then give the command again") from error
        fix = "wait for it, or use another --out"
        with locked(self.path / ".lock", "train", patience=patience, fix=fix):
            for left in self.path.glob(".*.partial"):  # of a process that was killed while it wrote
                left.unlink(missing_ok=True)
            try:
                yield
            except BaseException:
                self._remove_if_rejected(made)
                raise

    def _remove_if_rejected(self, made: list[Path]) -> None:
        """Removes the folders that this process has made, while it still holds their lock."""
        if made and {file.name for file in self.path.iterdir()} <= {".lock", self.config_path.name}:
            for file in self.path.iterdir():
                file.unlink()
            with suppress(OSError):  # another process may have put something beside the run
                for folder in made:
                    folder.rmdir()

    def config(self) -> dict[str, Any]:
        if not self.config_path.exists():
            raise FileError("train", "a run", self.path, "which has no config.json")
        return read_json(self.config_path, CONFIG_FIX, who="train")

    def whole_config(self) -> dict[str, Any]:
        """The config of a resumed run, which needs all of its parts."""
        config = self.config()
        known = isinstance(config.get("recipe"), str) and isinstance(config.get("options"), dict)
        if not known or not is_record(config.get("trained")):
            what = "a recipe, its options and what was trained"
            raise Damaged("train", what, self.config_path, got=f"it lacks {what}", fix=CONFIG_FIX)
        return config

    def check_data(self, now: dict[str, Any]) -> None:
        """Raises ``DataChanged`` if the run was begun with other data."""
        if trained := self.whole_config().get("trained"):
            check_same_data("train", self.path, trained["data"], now)

    def check_encoder(self, now: dict[str, Any]) -> None:
        """Raises if the run was begun with another encoder."""
        if trained := self.whole_config().get("trained"):
            check_same_encoder(trained["encoder"], now)

    def record_trained(
        self,
        encoder: dict[str, Any],
        views: str,
        weight_decay: float,
        data: dict[str, Any],
        scale: dict[str, list[float]] | None = None,
    ) -> None:
        """Puts what is trained into config.json, once; of other data than before, both stay on record."""
        config = self.config()
        now: dict[str, Any] = {"encoder": encoder, "views": views, "weight_decay": weight_decay, "data": data}
        now |= {} if scale is None else {"normalisation": scale}
        trained = config.get("trained") or now
        if trained["data"] != data:
            trained = {**trained, "data": data, "earlier_data": [*trained.get("earlier_data", []), trained["data"]]}
        if trained != config.get("trained"):
            write_json(self.config_path, {**config, "trained": trained})

    def result(self) -> dict[str, Any] | None:
        """The final figures, or None while the run is not finished."""
        if not self.result_path.exists():
            return None
        advice = (
            "delete it to evaluate again from the checkpoint" if self.checkpoint_path.exists() else "put back a copy"
        )
        result = read_json(self.result_path, advice, who="train")
        numbers = [result[name] for name in (*MEASURES, *BESIDE, "steps", "seconds") if result.get(name) is not None]
        if not all(isinstance(one, (int, float)) for one in numbers) or not is_record(result.get("trained")):
            raise Damaged("train", "figures", self.result_path, got="its figures are not numbers", fix=advice)
        return result

    def finish(self, result: dict[str, Any]) -> None:
        trained = self.config().get("trained") if self.config_path.exists() else None
        write_json(self.result_path, {**result, "trained": trained, RECORDS: count_lines(self.metrics_path)})
        figures = {name: result[name] for name in (*MEASURES, *BESIDE) if name in result}
        show_on_boards(self.path, result.get("steps", 0), figures)
        leave_boards(self.path)

    def warn(self, text: str, kind: str = "") -> None:
        """Keeps a warning beside the other files, for whoever started the process."""
        before = self.warned()
        if text not in (one.text for one in before):
            every = [one._asdict() for one in (*before, Warned(kind, text))]
            write_json(self.path / "warnings.json", {"warnings": every})

    def warned(self) -> list[Warned]:
        path = self.path / "warnings.json"
        if not path.exists():
            return []
        try:
            return [Warned(**one) for one in read_json(path, "delete it", who="train")["warnings"]]
        except (Damaged, KeyError, TypeError):
            return [Warned("damaged", f"{path.name} is damaged: what the run warned of is not known.")]

    def took(self, memory: PeakMemory) -> None:
        write_json(self.path / "memory.json", memory._asdict())

    def memory(self) -> PeakMemory | None:
        """What it held when it last recorded it; None before its first epoch has ended, and if the file is damaged."""
        path = self.path / "memory.json"
        try:
            return PeakMemory(**read_json(path, "delete it", who="train")) if path.exists() else None
        except (Damaged, TypeError):
            return None

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    def log(self, **record: Any) -> None:
        try:
            with self.metrics_path.open("a") as file:
                file.write(line_of(record, count_lines(self.metrics_path)))
        except OSError as error:
            raise disk_failure(self.metrics_path, error, "make room, then use --resume") from error
        show_on_boards(self.path, record.get("step", 0), record)

    def metrics(self) -> list[dict[str, Any]]:
        """The records; None where a question had no answer, such as the share of false negatives without labels."""
        written = (self.result() or {}).get(RECORDS)
        return read_records(self.metrics_path, written if isinstance(written, int) else 0)

    def forget_after(self, step: int, written: int = 0) -> None:
        """Drops the records that a resumed run will write again; raises if one of the ``written`` before is lost."""
        leave_boards(self.path)
        if written and not self.metrics_path.exists():
            text = f"{self.metrics_path} is missing: the records of the first {step} steps are lost."
            warnings.warn(HardnegWarning(text, "lost records"), stacklevel=2)
            written = 0
        kept = [record for record in read_records(self.metrics_path, written) if record.get("step", 0) <= step]
        write_atomically(self.metrics_path, lambda file: file.write(text_of(kept).encode()))

    def save(self, state: dict[str, Any]) -> None:
        """Replaces the checkpoint; it names its run, so that one copied from elsewhere is refused."""
        self._sync_records()
        self.checkpoints.save(state | {"of": self._identity(), RECORDS: count_lines(self.metrics_path)})

    def _sync_records(self) -> None:
        """Writes the records to the disk: a checkpoint that outlives a power failure counts on them."""
        with suppress(FileNotFoundError), self.metrics_path.open("rb+") as file:
            os.fsync(file.fileno())

    def save_best(self, state: dict[str, Any]) -> None:
        self.checkpoints.save_best(state | {"of": self._identity()})

    def load(self, device: torch.device | str = "cpu") -> dict[str, Any] | None:
        """The newest checkpoint, or None."""
        state = self.checkpoints.load(device)
        if state is not None and state["of"] != self._identity():
            path = self.checkpoint_path
            got = f"which is the checkpoint of another run ({state['of']})"
            raise FileError("train", "its own checkpoint", path, got, "delete it to train from the beginning")
        return state

    def _identity(self) -> str:
        config = self.config()
        return f"{config['recipe']}: {json.dumps(config['options'], sort_keys=True)}"
