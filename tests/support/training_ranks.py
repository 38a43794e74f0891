"""Runs a list of training jobs, alone or as one of several ranks: the tests launch it, and call it."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import normalize

import hardneg.training.data.images
from hardneg.training.data.images import ImageData
from hardneg.training.encoders import build_encoder
from hardneg.training.loop.train import Loop
from support.forks import CONTEXT
from support.ranks import free_port
from support.training_runs import run


def pixels(loop: Loop) -> Tensor:
    """Vectors that no rounding of training changes."""
    assert isinstance(loop.data, ImageData)
    return normalize(loop.data.images.flatten(1).float(), dim=1)


class Cut(Exception):
    """Training ends here, and is to go on from its checkpoint."""


def run_job(job: dict[str, Any], out: Path) -> None:
    """Trains, and leaves which positions this rank saw at each step in ``batches-RANK.json``.

    Digests of the views of images that are decoded when they are needed are in ``views-RANK.json``.

    A job with ``cut_at`` is interrupted at that step on all ranks, and resumed.
    """
    rank, seen, shown, step = os.environ.get("RANK", "0"), [], [], Loop._one_step
    cut = {"at": job.get("cut_at")}

    def watched(self: Loop, epoch: int, index: Tensor, *rest: Any) -> None:
        if self.step == cut["at"]:
            cut["at"] = None
            raise Cut
        seen.append((epoch, index.tolist()))
        if self.data.fetches:
            views = torch.stack(self.data.views(index, epoch, self.options.seed, *rest[1:]))
            shown.append([blake2b(item.numpy().tobytes()).hexdigest() for item in views.unbind(1)])
        step(self, epoch, index, *rest)

    vectors = pixels if job.get("fixed_vectors") else Loop._vectors
    encoder = partial(build_encoder, norm="batch") if job.get("batch_statistics") else build_encoder
    with (
        patch.object(Loop, "_one_step", watched),
        patch.object(Loop, "_vectors", vectors),
        patch.object(hardneg.training.data.images, "build_encoder", encoder),
    ):
        try:
            run(job["recipe"], out / job["name"], job["options"])
        except Cut:
            run(job["recipe"], out / job["name"], job["options"], resume=True)
    (out / job["name"] / f"batches-{rank}.json").write_text(json.dumps(seen))
    (out / job["name"] / f"views-{rank}.json").write_text(json.dumps(shown))


def run_jobs(jobs: list[dict[str, Any]], out: Path) -> None:
    torch.set_num_threads(1)
    for job in jobs:
        run_job(job, out)
    torch.distributed.barrier()
    os._exit(0)  # at a plain end of the interpreter gloo's threads abort the process now and then


def on_two_ranks(jobs: list[dict[str, Any]], out: Path) -> None:
    """As a launcher does, but in processes that need not import the libraries."""
    port = free_port()
    ranks = [CONTEXT.Process(target=_one_rank, args=(rank, port, jobs, out)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(300)
    assert [rank.exitcode for rank in ranks] == [0, 0]


def _one_rank(rank: int, port: int, jobs: list[dict[str, Any]], out: Path) -> None:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in places.items()}}
    run_jobs(jobs, out)


if __name__ == "__main__":
    run_jobs(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
