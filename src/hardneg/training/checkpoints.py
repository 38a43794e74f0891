"""The newest state of a run, the one before it, and the best weights, each with its checksum: what is damaged is never
resumed.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Set
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hardneg.core.errors import Damaged, HardnegWarning
from hardneg.io.files import write_atomically
from hardneg.io.sealed import check_seal, sealing

NEWEST, PREVIOUS, BEST = "checkpoint.pt", "checkpoint.previous.pt", "checkpoint.best.pt"
PARTS = {
    "of", "step", "epoch", "epoch_seconds", "method", "optimizer", "harvested", "refreshed", "planned_from", "plan",
    "rng", "records",
}  # fmt: skip
RECORDS = "records"
"""The number of lines of metrics.jsonl, in a checkpoint and in result.json."""
FIX = "put back a copy of it, or delete it to train from the beginning"


class Checkpoints:
    """Files of a run directory."""

    def __init__(self, folder: Path) -> None:
        self.newest, self.previous, self.best = (folder / name for name in (NEWEST, PREVIOUS, BEST))

    def save(self, state: dict[str, Any]) -> None:
        """Replaces the newest; the one that it replaces becomes the previous one once the new one is written."""
        seal = sealing(lambda file: torch.save(state, file))

        def write(file: BinaryIO) -> None:
            seal(file)
            if self.newest.exists():
                self._keep_as_previous()

        write_atomically(self.newest, write)

    def save_best(self, state: dict[str, Any]) -> None:
        """The weights with which the monitor was highest so far."""
        write_atomically(self.best, sealing(lambda file: torch.save(state, file)))

    def load(self, device: torch.device | str = "cpu") -> dict[str, Any] | None:
        """The newest state, or None; raises ``Damaged`` if it is."""
        return read_state(self.newest, device) if self.newest.exists() else None

    def fall_back(self) -> None:
        """Replaces a damaged checkpoint by the one before, with a warning, if that is whole."""
        try:
            self.load()
        except Damaged as error:
            if not self._previous_is_whole():
                raise
            self.previous.replace(self.newest)
            warnings.warn(
                f"{self.newest} is damaged ({error.got}); the run resumes from the checkpoint before it.",
                HardnegWarning,
                stacklevel=2,
            )

    def _previous_is_whole(self) -> bool:
        try:
            return self.previous.exists() and bool(read_state(self.previous))
        except Damaged:
            return False

    def _keep_as_previous(self) -> None:
        """By a second name where the disk has them: whole or nothing, without another copy."""
        partial = self.previous.with_name(f".{PREVIOUS}.{os.getpid()}.partial")
        partial.unlink(missing_ok=True)
        try:
            os.link(self.newest, partial)
        except OSError:
            shutil.copyfile(self.newest, partial)
        partial.replace(self.previous)


def read_state(path: Path, device: torch.device | str = "cpu", parts: Set[str] = PARTS) -> dict[str, Any]:
    """A checkpoint; raises ``Damaged`` if its checksum differs, or if it is no checkpoint of a run."""
    check_seal(path, "train", FIX)
    # On the CPU, Accelerate's ranks are on "cpu:0", where torch.load can put nothing.
    where = "cpu" if torch.device(device).type == "cpu" else device
    try:
        state: Any = torch.load(path, map_location=where, weights_only=True)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # torch raises whatever the bytes of a damaged file lead it to
        raise Damaged("train", "a checkpoint", path, got="torch cannot read it", fix=FIX) from error
    if not isinstance(state, dict) or not state.keys() >= parts:
        raise Damaged("train", "a checkpoint", path, got="it is no checkpoint of a run", fix=FIX)
    return state
