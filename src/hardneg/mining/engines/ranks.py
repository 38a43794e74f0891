"""The engine of processes that torchrun or accelerate launch started; files carry the results."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch

from hardneg.mining.engines.base import Engine, Work


@dataclass(frozen=True)
class Ranks(Engine):
    """This process among the processes of the job, which must see the same folders.

    Attributes:
        rank: Number of this process.
        size: Number of processes.
    """

    rank: int = 0
    size: int = 1

    def map(self, work: Work) -> None:
        """Run this rank's share of the tasks and wait for the other ranks."""
        for number, task in enumerate(work.tasks):
            if number % self.size == self.rank and not work.is_done(task):
                work.function(task)
            work.done(task)
        self.wait()

    def wait(self) -> None:
        """Wait until every rank gets here."""
        if self.size > 1:
            torch.distributed.barrier()

    def agree(self, value: str) -> str:
        """Return the value of rank 0."""
        if self.size == 1:
            return value
        values = [value]
        torch.distributed.broadcast_object_list(values, src=0)
        return values[0]

    def leave(self) -> None:
        """Close the process group."""
        if self.size > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    @property
    def first(self) -> bool:
        """True on rank 0."""
        return self.rank == 0


def join_ranks() -> Ranks:
    """Join the ranks that torchrun announces in the environment; without it, return a single rank."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Ranks()
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", timeout=timedelta(days=7))
    return Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size())


def device_of_rank() -> str | None:
    """Return the GPU of this process, such as ``"cuda:1"``; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"
