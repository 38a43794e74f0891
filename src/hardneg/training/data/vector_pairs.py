"""Pairs of related vectors computed elsewhere, such as of images and their texts (CLIP, Radford et al. 2021).

    embeddings:pairs.npz    arrays ``first`` [n, d] and ``second`` [n, e], optionally ``labels`` [n]

Two projection heads are trained, one for each side, and evaluated by retrieval of the second side from the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from hardneg.core.errors import ArgumentError, NotFinite, located
from hardneg.io.arrays import read_arrays
from hardneg.training.data.inputs import Sided, TwoTowers
from hardneg.training.data.items import Items, Shown
from hardneg.training.data.text_files import labels_in
from hardneg.training.encoders import seeded
from hardneg.training.options import TrainOptions

_ARRAYS = {
    "first": "np.array(first, dtype=float) has none",
    "second": "np.array(second, dtype=float) has none",
    "labels": "np.array(labels, dtype=str) converts them to text",
}


@dataclass(frozen=True, eq=False)
class VectorPairs(Items, prefix="embeddings", form="embeddings:FILE.npz"):
    """Pairs of vectors.

    Attributes:
        first: Vectors of the first side, float32 [n, d].
        second: Vectors of the second side, float32 [n, e].
        labels: Class of each pair, int64 [n], or None.
        ids: Id of each pair, int64 [n].
        name: Name of the data.
        classes: Names of the classes.
    """

    first: Annotated[Tensor, "n d"]
    second: Annotated[Tensor, "n e"]
    labels: Annotated[Tensor, "n"] | None
    ids: Annotated[Tensor, "n"]
    name: str
    classes: tuple[str, ...] = ()
    noun: ClassVar[str] = "pair"

    @classmethod
    def check(cls, options: TrainOptions) -> None:
        """Raise for unsupported options or a missing file name, without reading data."""
        super().check(options)
        with located("--data"):
            if not options.data.partition("embeddings:")[2].strip():
                raise ArgumentError("data", "embeddings:FILE.npz", repr(options.data))

    @classmethod
    def read(cls, path: str, options: TrainOptions) -> VectorPairs:
        """Read the arrays of an .npz file.

        Args:
            path: Path of the file.
            options: The options of the run.
        """
        found = read_arrays("data", Path(path), _ARRAYS, needed=("first", "second"))
        sides = []
        for name in ("first", "second"):
            array = found[name]
            if array.ndim != 2 or array.dtype.kind not in "fiu" or len(array) != len(found["first"]):
                raise ArgumentError("data", f"`first` [n, d] and `second` [n, e] in {path}", f"{name}={array.shape}")
            sides.append(torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)))
            if not torch.isfinite(sides[-1]).all():
                raise NotFinite("data", f"finite numbers in {name} of {path}", "NaN or infinite values")
        labels, classes = labels_in(found, "labels", Path(path)) if "labels" in found else (None, ())
        return cls(sides[0], sides[1], labels, torch.arange(len(sides[0])), path, classes)

    def views(self, index: Annotated[Tensor, "b"], epoch: int, seed: int) -> tuple[Sided, Sided]:
        """Return the two sides of the pairs at some positions.

        Args:
            index: Positions [b].
            epoch: Unused.
            seed: Unused.
        """
        return Sided(first=self.first[index]), Sided(second=self.second[index])

    def plain(self, index: Annotated[Tensor, "b"]) -> Sided:
        """Return the first side of the pairs at positions [b]."""
        return Sided(first=self.first[index])

    @classmethod
    def rebuilt(cls, record: dict[str, Any], options: TrainOptions) -> nn.Module:
        """Build a linear head for each side.

        Args:
            record: Record of the training pairs, with the widths of both sides.
            options: The options of the run.
        """
        with seeded(options.seed):
            return TwoTowers(*(nn.Linear(width, options.dim) for width in record["widths"]))

    def record(self) -> dict[str, Any]:
        """Return the record of all kinds, with the widths of both sides."""
        return {**super().record(), "widths": [self.first.shape[1], self.second.shape[1]]}

    def check_like(self, record: dict[str, Any]) -> None:
        """Raise if the widths of the vectors differ from the record."""
        now = self.record()["widths"]
        if (before := record["widths"]) != now:
            raise ArgumentError("evaluate", f"vectors of widths {before}, like the training data", f"{now}")

    def shown(self, position: int) -> Shown:
        """Return the id of the pair at a position: vectors cannot be shown."""
        return Shown(text=f"pair {int(self.ids[position])}")
