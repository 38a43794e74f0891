"""Trains with Lightning, killed and resumed, alone or as two ranks: the tests launch it.

    python lightning_runs.py LIBRARY FOLDER JOBS    # JOBS: a list of jobs as JSON, see ``Job``

Imports the library once, and forks each rank of each job.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hardneg as hn
from hardneg.batching import encode
from hardneg.core.errors import HardnegError
from hardneg.integrations.lightning import HardBatches

NUM, LOCAL_BATCH, EPOCHS = 120, 6, 3  # with two ranks, ten batches an epoch


@dataclass(frozen=True)
class Job:
    name: str
    ranks: int = 2
    workers: int = 0
    kill_after: int | None = None  # batches
    resume_from: int | None = None  # the step of the checkpoint
    limit: float = 1.0
    callback: bool = True
    use_distributed_sampler: bool = False


def train(pl: Any, job: Job, folder: Path) -> None:
    data = TensorDataset(torch.arange(NUM), torch.randn(NUM, 5, generator=torch.Generator().manual_seed(0)))

    class Model(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
            self.criterion = hn.ContrastiveLoss("Tilt(linear(1.0, 0.0))", temperature=0.3)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            ids, x = batch
            with open(folder / f"batches-{self.global_rank}.jsonl", "a") as file:
                file.write(json.dumps([self.global_step, ids.tolist()]) + "\n")
            noise = torch.Generator().manual_seed(2 * self.global_step + self.global_rank)
            first, second = (x + 0.3 * torch.randn(x.shape, generator=noise) for _ in range(2))
            return self.criterion(self(first), self(second), ids=ids)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    class Kill(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            if trainer.global_step == job.kill_after:
                os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(1)
    model = Model()
    model.criterion.set_progress(0, 1)  # for jobs without the callback
    sampler = hn.ProximityBatchSampler(NUM, LOCAL_BATCH, restart=0.2, seed=1, segment=3)
    in_order = DataLoader(data, batch_size=64)
    hard = HardBatches(
        sampler,
        lambda: encode(model, in_order, inputs=lambda batch: batch[1], progress=False),
        every=4,
        num_neighbours=5,
        num_candidates=30,
    )
    saved = pl.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=5, save_top_k=-1)
    trainer = pl.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", devices=job.ranks, strategy="ddp" if job.ranks > 1 else "auto",
        limit_train_batches=job.limit, use_distributed_sampler=job.use_distributed_sampler,
        callbacks=[saved, Kill(), *[hard] * job.callback],
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loader = DataLoader(data, batch_sampler=sampler, num_workers=job.workers)
    path = None if job.resume_from is None else folder / f"step={job.resume_from}.ckpt"
    trainer.fit(model, loader, ckpt_path=path)
    if trainer.global_rank == 0:
        torch.save(model.state_dict(), folder / "weights.pt")


def run_rank(library: str, job: Job, folder: Path, rank: int, port: int) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "WORLD_SIZE": str(job.ranks), "NODE_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        train(importlib.import_module(library), job, folder)
    except HardnegError as error:
        (folder / f"error-{rank}.txt").write_text(str(error))
        os._exit(1)  # the other rank may wait for this one


def run(library: str, job: Job, folder: Path) -> list[int | None]:
    """The exit codes of the ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(library, job, folder, rank, port)) for rank in range(job.ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return [process.exitcode for process in ranks]


if __name__ == "__main__":
    torch.set_num_threads(1)
    library, out = sys.argv[1], Path(sys.argv[2])
    for name in (library, "torch._dynamo"):  # once, and not in each fork
        importlib.import_module(name)
    codes = {}
    for options in json.loads(sys.argv[3]):
        job = Job(**options)
        (out / job.name).mkdir(parents=True, exist_ok=True)
        codes.setdefault(job.name, []).append(run(library, job, out / job.name))
    (out / "codes.json").write_text(json.dumps(codes))
