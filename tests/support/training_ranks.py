"""Runs a list of training jobs, alone or as one of several ranks: the tests launch it, and call it."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import normalize

import hardneg.training.data.images
from hardneg.training.data.images import ImageData
from hardneg.training.encoders import build_encoder
from hardneg.training.loop import Loop
from hardneg.training.options import RECIPES
from hardneg.training.recipes import run_recipe


def pixels(loop: Loop) -> Tensor:
    """Vectors that no rounding of training changes."""
    assert isinstance(loop.data, ImageData)
    return normalize(loop.data.images.flatten(1).float(), dim=1)


class Cut(Exception):
    """Training ends here, and is to go on from its checkpoint."""


def run_job(job: dict[str, Any], out: Path) -> None:
    """Trains, and leaves which positions this rank saw at each step in ``batches-RANK.json``.

    A job with ``cut_at`` is interrupted at that step on all ranks, and resumed.
    """
    rank, seen, step = os.environ.get("RANK", "0"), [], Loop._one_step
    cut = {"at": job.get("cut_at")}

    def watched(self: Loop, epoch: int, index: Tensor, *rest: Any) -> None:
        if self.step == cut["at"]:
            cut["at"] = None
            raise Cut
        seen.append((epoch, index.tolist()))
        step(self, epoch, index, *rest)

    vectors = pixels if job.get("fixed_vectors") else Loop._vectors
    encoder = partial(build_encoder, norm="batch") if job.get("batch_statistics") else build_encoder
    with (
        patch.object(Loop, "_one_step", watched),
        patch.object(Loop, "_vectors", vectors),
        patch.object(hardneg.training.data.images, "build_encoder", encoder),
    ):
        options, where = RECIPES[job["recipe"]](**job["options"]), out / job["name"]
        try:
            run_recipe(job["recipe"], options, where, quiet=True)
        except Cut:
            run_recipe(job["recipe"], options, where, quiet=True, resume=True)
    (out / job["name"] / f"batches-{rank}.json").write_text(json.dumps(seen))


def main() -> None:
    torch.set_num_threads(1)
    jobs, out = sys.argv[1:]
    for job in json.loads(Path(jobs).read_text()):
        run_job(job, Path(out))
    torch.distributed.barrier()
    os._exit(0)  # at a plain end of the interpreter gloo's threads abort the process now and then


if __name__ == "__main__":
    main()
