"""Pieces of a job as files: each is sealed and written whole or not at all, so that a rerun resumes from there."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from hardneg.io.arrays import Array, names_in_npz, read_member
from hardneg.io.files import run_again, write_atomically
from hardneg.io.sealed import is_whole, sealing
from hardneg.mining.stages import PieceArrays, Store

_most_open = 512


class Files(Store):
    """The store of a job: a folder with one .npz file for each piece.

    ``job`` is in their names: a part that was begun with other data and still runs leaves no piece to this job.
    """

    in_memory = False

    def __init__(self, folder: Path, job: str = "") -> None:
        self.folder, self.job, self._owner = folder, job, os.getpid()
        self._open: dict[Path, StoredPiece] = {}

    def path(self, stage: str, piece: int) -> Path:
        return self.folder / f"{stage}-{piece:06d}{f'.{self.job}' if self.job else ''}.npz"

    def read(self, stage: str, piece: int) -> PieceArrays:
        path = self.path(stage, piece)
        if self._owner != os.getpid():  # a fork shares the offsets of open files with its parent
            self._owner, self._open = os.getpid(), {}
        if path not in self._open:
            if len(self._open) >= _most_open:
                self._open.clear()
            self._open[path] = StoredPiece(path)
        return self._open[path]

    def write(self, stage: str, piece: int, content: PieceArrays) -> None:
        path = self.path(stage, piece)
        write_atomically(path, sealing(lambda file: np.savez(file, **content)), run_again)  # type: ignore[arg-type]

    def has(self, stage: str, piece: int) -> bool:
        path = self.path(stage, piece)
        return is_whole(path, "mine", "it is computed again", lambda each: names_in_npz("mine", each))

    def drop(self, beginning: str) -> None:
        """They stay until the output is written, for a run that is killed before."""


class StoredPiece(Mapping[str, Array]):
    """The arrays of a file, which stays open, each read when it is needed."""

    def __init__(self, path: Path) -> None:
        self.path, self.archive = path, zipfile.ZipFile(path)
        self.names = {name.removesuffix(".npy"): name for name in self.archive.namelist()}

    def __getitem__(self, name: str) -> Array:
        return read_member("mine", self.path, self.archive, self.names[name])

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
