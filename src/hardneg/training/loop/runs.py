"""The run directory: options, description of the trained data and encoder, records, figures and checkpoints.

run/
  config.json              recipe, options, what was trained, command line and versions
  metrics.jsonl            one line per record
  checkpoint.pt            the newest state, replaced atomically, so that a crash or a full disk leaves the old one
  checkpoint.previous.pt   the state before it, in case the newest file is damaged
  checkpoint.best.pt       the weights with the best value of the monitor, if there is one
  embeddings.npz           features and labels of both splits; without labels, features of the test split
  warnings.json            warnings of a run of a comparison
  memory.json              bytes used by the run, from which a comparison decides whether another run fits
  result.json              final figures, written last: if it exists, the run is finished
  events.out...            the records for TensorBoard, if it is installed

Each file carries a checksum, which is verified when the file is read. The lines of metrics.jsonl are numbered, and
result.json and the checkpoint store their number.

``Run`` is the only writer. The training loop opens it with ``Run.open`` under the lock ``Run.exclusive``; comparisons,
reports and the export read it.
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
from hardneg.training.evaluation.measures import MEASURES
from hardneg.training.loop.boards import leave_boards, show_on_boards
from hardneg.training.loop.checkpoints import RECORDS, Checkpoints
from hardneg.training.loop.data_record import check_same_data, check_same_encoder, is_record
from hardneg.training.loop.records import count_lines, line_of, read_records, text_of

CONFIG_FIX = "restore a copy, or use another --out"

CHANGEABLE = ("workers", "cache_images", "bad_images")
"""Options that may change when a run is resumed, since the result does not depend on them."""

EXTRA_FIGURES = ("uniformity",)
"""Figures of the result that TensorBoard shows in addition to the measures of the evaluation."""

LEAVES_WITH_STDIN = "HARDNEG_LEAVES_WITH_STDIN"
"""Environment variable of a child process that ends when its standard input closes: when its parent is gone."""

REFUSED, DIVERGED, NO_DISK_SPACE, NO_MEMORY, DATA_CHANGED = 2, 3, 4, 5, 6
"""Exit codes of the process of a run, by which a comparison learns why the run failed.

In this order: wrong input or damaged files; NaN or infinite losses or weights; a full disk; too little memory; other
data than the run was started with.
"""


class Warned(NamedTuple):
    """A warning of a run.

    Attributes:
        kind: Groups warnings that differ only in their numbers.
        text: The message.
    """

    kind: str
    text: str


class PeakMemory(NamedTuple):
    """Memory of a run in bytes.

    Attributes:
        host: Resident memory of the process.
        device: Memory of its GPU, with that of the CUDA context; 0 without a GPU.
    """

    host: int
    device: int


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe the options that differ, with both values.

    Args:
        then: Options of the existing run.
        now: Options of the command.

    Example:
        >>> changes({"epochs": 6, "seed": 0}, {"epochs": 7, "seed": 0})
        'epochs: 6 -> 7'
    """
    changed = {name: (then.get(name), value) for name, value in now.items() if then.get(name) != value}
    return ", ".join(f"{name}: {printable(repr(old), 80)} -> {new!r}" for name, (old, new) in changed.items())


@dataclass(frozen=True)
class Run:
    """One training run on disk.

    Attributes:
        path: The run directory.
    """

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
        """Start a run, or resume the existing one if it was started with the same options.

        Args:
            path: The run directory.
            recipe: Name of the recipe.
            options: Options as a plain dictionary.
            resume: Allow a directory that already holds a run.
            usual: Defaults of the options, which stand for those that an older run has not recorded.

        Raises:
            FileError: If there is a run and ``resume`` is False, or if it has another recipe or other options.
            Damaged: If config.json, or the newest and the previous checkpoint, are damaged.
        """
        run, wanted = cls(Path(path)), {"recipe": recipe, "options": options}
        if not run.has_results():
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
        now |= {name: then[name] for name in CHANGEABLE if name in then}
        if changed := changes(then, now):
            got = f"which was started with other options ({changed})"
            raise FileError("train", "the options of the run", run.path, got, "resume with the same ones")
        if run.result() is None:  # a finished run needs no checkpoint
            run.checkpoints.fall_back()
        return run

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoint files of the run."""
        return Checkpoints(self.path)

    @property
    def config_path(self) -> Path:
        """Path of config.json."""
        return self.path / "config.json"

    @property
    def checkpoint_path(self) -> Path:
        """Path of the newest checkpoint."""
        return self.checkpoints.newest

    @property
    def result_path(self) -> Path:
        """Path of result.json, which exists once the run is finished."""
        return self.path / "result.json"

    def has_results(self) -> bool:
        """Return True if the run has results; one that failed in its first checks may be started with other options."""
        return self.checkpoint_path.exists() or self.result_path.exists() or bool(self.metrics())

    @contextmanager
    def exclusive(self, patience: float = 10.0) -> Iterator[None]:
        """Lock the directory against other processes while the context lasts.

        Directories created here are removed again if the run is rejected before it has written anything.

        Args:
            patience: Seconds to wait for another process that is about to end.

        Raises:
            InUse: If another process still holds the lock.
        """
        made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_failure(self.path, error, "free disk space, then run the command again") from error
        fix = "wait for it, or use another --out"
        with locked(self.path / ".lock", "train", patience=patience, fix=fix):
            for left in self.path.glob(".*.partial"):  # left by a process that was killed while writing
                left.unlink(missing_ok=True)
            try:
                yield
            except BaseException:
                self._remove_if_rejected(made)
                raise

    def _remove_if_rejected(self, made: list[Path]) -> None:
        """Remove the directories that this process has created, while it still holds their lock."""
        if made and {file.name for file in self.path.iterdir()} <= {".lock", self.config_path.name}:
            for file in self.path.iterdir():
                file.unlink()
            with suppress(OSError):  # another process may have written into a parent folder
                for folder in made:
                    folder.rmdir()

    def config(self) -> dict[str, Any]:
        """Return the content of config.json; raise ``FileError`` if the directory holds no run."""
        if not self.config_path.exists():
            raise FileError("train", "a run", self.path, "which has no config.json")
        return read_json(self.config_path, CONFIG_FIX, who="train")

    def whole_config(self) -> dict[str, Any]:
        """Return config.json of a run to resume; raise ``Damaged`` if parts are missing."""
        config = self.config()
        known = isinstance(config.get("recipe"), str) and isinstance(config.get("options"), dict)
        if not known or not is_record(config.get("trained")):
            what = "the recipe, its options or the description of the data and the encoder"
            raise Damaged("train", what, self.config_path, got=f"it lacks {what}", fix=CONFIG_FIX)
        return config

    def check_data(self, now: dict[str, Any]) -> None:
        """Raise ``DataChanged`` if the run was started with other data.

        Args:
            now: Description of the current data, from ``data_record``.
        """
        if trained := self.whole_config().get("trained"):
            check_same_data("train", self.path, trained["data"], now)

    def check_encoder(self, now: dict[str, Any]) -> None:
        """Raise if the run was started with another encoder.

        Args:
            now: Description of the current encoder, from ``encoder_record``.
        """
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
        """Add a description of what is trained to config.json, once per run.

        If the run continues with other data, the new data is recorded and the old kept under ``earlier_data``.

        Args:
            encoder: Description of the encoder.
            views: Description of the augmentation.
            weight_decay: The weight decay in use, after the default of the data was applied.
            data: Description of the data.
            scale: Mean and standard deviation that normalise the inputs, if any.
        """
        config = self.config()
        now: dict[str, Any] = {"encoder": encoder, "views": views, "weight_decay": weight_decay, "data": data}
        now |= {} if scale is None else {"normalisation": scale}
        trained = config.get("trained") or now
        if trained["data"] != data:
            trained = {**trained, "data": data, "earlier_data": [*trained.get("earlier_data", []), trained["data"]]}
        if trained != config.get("trained"):
            write_json(self.config_path, {**config, "trained": trained})

    def result(self) -> dict[str, Any] | None:
        """Return the final figures, or None while the run is not finished.

        Raises:
            Damaged: If result.json fails its checksum or a figure is not a number.
        """
        if not self.result_path.exists():
            return None
        advice = (
            "delete it to evaluate again from the checkpoint" if self.checkpoint_path.exists() else "restore a copy"
        )
        result = read_json(self.result_path, advice, who="train")
        names = (*MEASURES, *EXTRA_FIGURES, "steps", "seconds")
        numbers = [result[name] for name in names if result.get(name) is not None]
        if not all(isinstance(one, (int, float)) for one in numbers) or not is_record(result.get("trained")):
            raise Damaged("train", "figures", self.result_path, got="its figures are not numbers", fix=advice)
        return result

    def finish(self, result: dict[str, Any]) -> None:
        """Write result.json, which marks the run as finished, and close its boards.

        Args:
            result: The final figures; the description of what was trained and the number of records are added.
        """
        trained = self.config().get("trained") if self.config_path.exists() else None
        write_json(self.result_path, {**result, "trained": trained, RECORDS: count_lines(self.metrics_path)})
        figures = {name: result[name] for name in (*MEASURES, *EXTRA_FIGURES) if name in result}
        show_on_boards(self.path, result.get("steps", 0), figures)
        leave_boards(self.path)

    def warn(self, text: str, kind: str = "") -> None:
        """Store a warning in warnings.json, unless it is already there.

        Args:
            text: The message.
            kind: Groups warnings that differ only in their numbers.
        """
        before = self.warned()
        if text not in (one.text for one in before):
            every = [one._asdict() for one in (*before, Warned(kind, text))]
            write_json(self.path / "warnings.json", {"warnings": every})

    def warned(self) -> list[Warned]:
        """Return the stored warnings, oldest first; a damaged file yields one warning that says so."""
        path = self.path / "warnings.json"
        if not path.exists():
            return []
        try:
            return [Warned(**one) for one in read_json(path, "delete it", who="train")["warnings"]]
        except (Damaged, KeyError, TypeError):
            return [Warned("damaged", f"{path.name} is damaged: the warnings of the run are lost.")]

    def record_memory(self, memory: PeakMemory) -> None:
        """Store the memory of the run in memory.json, for a comparison that decides whether another run fits."""
        write_json(self.path / "memory.json", memory._asdict())

    def memory(self) -> PeakMemory | None:
        """Return the memory last stored; None before the first epoch has ended or if the file is damaged."""
        path = self.path / "memory.json"
        try:
            return PeakMemory(**read_json(path, "delete it", who="train")) if path.exists() else None
        except (Damaged, TypeError):
            return None

    @property
    def metrics_path(self) -> Path:
        """Path of metrics.jsonl."""
        return self.path / "metrics.jsonl"

    def log(self, **record: Any) -> None:
        """Append a record to metrics.jsonl and show it on the boards.

        Raises:
            DiskFull: If there is no space left.
        """
        try:
            with self.metrics_path.open("a") as file:
                file.write(line_of(record, count_lines(self.metrics_path)))
        except OSError as error:
            raise disk_failure(self.metrics_path, error, "free disk space, then use --resume") from error
        show_on_boards(self.path, record.get("step", 0), record)

    def metrics(self) -> list[dict[str, Any]]:
        """Return all records.

        A figure is None where it is undefined, such as the false-negative rate without labels.

        Raises:
            Damaged: If a record was changed, or one that a finished run had written is missing.
        """
        written = (self.result() or {}).get(RECORDS)
        return read_records(self.metrics_path, written if isinstance(written, int) else 0)

    def forget_after(self, step: int, written: int = 0) -> None:
        """Drop the records after a step, which a resumed run writes again.

        Args:
            step: Step of the checkpoint from which the run resumes.
            written: Number of records when that checkpoint was written.

        Raises:
            Damaged: If one of these records was changed or is missing.
        """
        leave_boards(self.path)
        if written and not self.metrics_path.exists():
            text = f"{self.metrics_path} is missing: the records of the first {step} steps are lost."
            warnings.warn(HardnegWarning(text, "lost records"), stacklevel=2)
            written = 0
        kept = [record for record in read_records(self.metrics_path, written) if record.get("step", 0) <= step]
        write_atomically(self.metrics_path, lambda file: file.write(text_of(kept).encode()))

    def save(self, state: dict[str, Any]) -> None:
        """Write a checkpoint; records are flushed to the disk first.

        The checkpoint stores recipe and options, so that one copied from another run is refused.

        Args:
            state: State of the loop, with the keys of ``checkpoints.PARTS``.
        """
        self._sync_records()
        self.checkpoints.save(state | {"of": self._identity(), RECORDS: count_lines(self.metrics_path)})

    def _sync_records(self) -> None:
        """Flush the records to the disk: a checkpoint that survives a power failure relies on them."""
        with suppress(FileNotFoundError), self.metrics_path.open("rb+") as file:
            os.fsync(file.fileno())

    def save_best(self, state: dict[str, Any]) -> None:
        """Write the weights with the best value of the monitor so far."""
        self.checkpoints.save_best(state | {"of": self._identity()})

    def load(self, device: torch.device | str = "cpu") -> dict[str, Any] | None:
        """Load the newest checkpoint.

        Args:
            device: Device on which its tensors are placed.

        Returns:
            The state, or None if the run has no checkpoint.

        Raises:
            FileError: If the checkpoint belongs to another run.
            Damaged: If it cannot be read.
        """
        state = self.checkpoints.load(device)
        if state is not None and state["of"] != self._identity():
            path = self.checkpoint_path
            got = f"which is the checkpoint of another run ({state['of']})"
            raise FileError("train", "its own checkpoint", path, got, "delete it to train from the beginning")
        return state

    def _identity(self) -> str:
        """Return recipe and options as text, by which a checkpoint recognises its run."""
        config = self.config()
        return f"{config['recipe']}: {json.dumps(config['options'], sort_keys=True)}"
