"""Checkpoint files of a run: the newest state, the one before it, and the best weights.

Each file carries a checksum, and a damaged one is never resumed. ``Checkpoints`` reads and writes the three files of
a run directory; ``Run`` in ``runs.py`` is its only user in training. ``read_state`` reads a single file, also for the
export.
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
"""Keys that every checkpoint of a run has; further ones depend on the recipe and the device."""
RECORDS = "records"
"""Key of the number of lines of metrics.jsonl, in a checkpoint and in result.json."""
FIX = "restore a copy, or delete it to train from the beginning"


class Checkpoints:
    """The three checkpoint files of a run directory.

    Args:
        folder: The run directory.
    """

    def __init__(self, folder: Path) -> None:
        self.newest, self.previous, self.best = (folder / name for name in (NEWEST, PREVIOUS, BEST))

    def save(self, state: dict[str, Any]) -> None:
        """Write the newest checkpoint atomically; its predecessor becomes the previous one.

        A crash or a full disk at any point leaves at least one complete checkpoint.

        Args:
            state: Everything needed to resume, with the keys of ``PARTS``.
        """
        seal = sealing(lambda file: torch.save(state, file))

        def write(file: BinaryIO) -> None:
            seal(file)
            if self.newest.exists():
                self._keep_as_previous()

        write_atomically(self.newest, write)

    def save_best(self, state: dict[str, Any]) -> None:
        """Write the weights with the best value of the monitor so far."""
        write_atomically(self.best, sealing(lambda file: torch.save(state, file)))

    def load(self, device: torch.device | str = "cpu") -> dict[str, Any] | None:
        """Load the newest checkpoint.

        Args:
            device: Device on which its tensors are placed.

        Returns:
            The state, or None if the run has no checkpoint.

        Raises:
            Damaged: If its checksum differs or torch cannot read it.
        """
        return read_state(self.newest, device) if self.newest.exists() else None

    def fall_back(self) -> None:
        """Replace a damaged newest checkpoint with the previous one, with a warning.

        Raises:
            Damaged: If the previous one is missing or damaged as well.
        """
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
        """Return True if the previous checkpoint exists and can be read."""
        try:
            return self.previous.exists() and bool(read_state(self.previous))
        except Damaged:
            return False

    def _keep_as_previous(self) -> None:
        """Keep the newest checkpoint under the name of the previous one, by a hard link where the disk allows it."""
        partial = self.previous.with_name(f".{PREVIOUS}.{os.getpid()}.partial")
        partial.unlink(missing_ok=True)
        try:
            os.link(self.newest, partial)
        except OSError:
            shutil.copyfile(self.newest, partial)
        partial.replace(self.previous)


def read_state(path: Path, device: torch.device | str = "cpu", parts: Set[str] = PARTS) -> dict[str, Any]:
    """Read a checkpoint and verify its checksum.

    Args:
        path: The file.
        device: Device on which its tensors are placed.
        parts: Keys that it must have.

    Raises:
        Damaged: If the checksum differs, torch cannot read the file, or keys are missing.
    """
    check_seal(path, "train", FIX)
    # Accelerate calls the device of a CPU rank "cpu:0", which torch.load does not accept.
    where = "cpu" if torch.device(device).type == "cpu" else device
    try:
        state: Any = torch.load(path, map_location=where, weights_only=True)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # damaged bytes can make torch raise almost any exception
        raise Damaged("train", "a checkpoint", path, got="torch cannot read it", fix=FIX) from error
    if not isinstance(state, dict) or not state.keys() >= parts:
        raise Damaged("train", "a checkpoint", path, got="it is not a checkpoint of a run", fix=FIX)
    return state
