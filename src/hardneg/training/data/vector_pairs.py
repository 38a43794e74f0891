"""Pairs of vectors that belong together, such as of images and their texts (CLIP, Radford et al. 2021), made elsewhere.

    embeddings:pairs.npz    arrays ``first`` [n, d] and ``second`` [n, e]; ``labels`` if there are

Two projection heads are trained on them, one for each side. They are evaluated by retrieval of the second from the
first.
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
    "labels": "np.array(labels, dtype=str) makes text of them",
}


@dataclass(frozen=True, eq=False)
class VectorPairs(Items, prefix="embeddings", form="embeddings:FILE.npz"):
    """The vectors of both sides, row by row."""

    first: Annotated[Tensor, "n d"]
    second: Annotated[Tensor, "n e"]
    labels: Annotated[Tensor, "n"] | None
    ids: Annotated[Tensor, "n"]
    name: str
    classes: tuple[str, ...] = ()
    noun: ClassVar[str] = "pair"

    @classmethod
    def check(cls, options: TrainOptions) -> None:
        super().check(options)
        with located("--data"):
            if not options.data.partition("embeddings:")[2].strip():
                raise ArgumentError("data", "embeddings:FILE.npz", repr(options.data))

    @classmethod
    def read(cls, path: str, options: TrainOptions) -> VectorPairs:
        found = read_arrays("data", Path(path), _ARRAYS, needed=("first", "second"))
        sides = []
        for name in ("first", "second"):
            array = found[name]
            if array.ndim != 2 or array.dtype.kind not in "fiu" or len(array) != len(found["first"]):
                raise ArgumentError("data", f"`first` [n, d] and `second` [n, e] in {path}", f"{name}={array.shape}")
            sides.append(torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)))
            if not torch.isfinite(sides[-1]).all():
                raise NotFinite("data", f"finite numbers in {name} of {path}", "others")
        labels, classes = labels_in(found, "labels", Path(path)) if "labels" in found else (None, ())
        return cls(sides[0], sides[1], labels, torch.arange(len(sides[0])), path, classes)

    def views(self, index: Annotated[Tensor, "b"], epoch: int, seed: int) -> tuple[Sided, Sided]:
        return Sided(first=self.first[index]), Sided(second=self.second[index])

    def plain(self, index: Annotated[Tensor, "b"]) -> Sided:
        return Sided(first=self.first[index])

    @classmethod
    def rebuilt(cls, record: dict[str, Any], options: TrainOptions) -> nn.Module:
        with seeded(options.seed):
            return TwoTowers(*(nn.Linear(width, options.dim) for width in record["widths"]))

    def record(self) -> dict[str, Any]:
        return {**super().record(), "widths": [self.first.shape[1], self.second.shape[1]]}

    def check_like(self, record: dict[str, Any]) -> None:
        now = self.record()["widths"]
        if (before := record["widths"]) != now:
            raise ArgumentError("evaluate", f"vectors of {before} numbers, as it was trained on", f"{now}")

    def shown(self, position: int) -> Shown:
        return Shown(text=f"pair {int(self.ids[position])}")
