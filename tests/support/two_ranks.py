"""A function on two ranks with gloo, and what each of them returns."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from support.ranks import free_port, leave


def on_two_ranks(work: Callable[[int], Any]) -> list[Any]:
    """Forks, so that ``work`` may be any function of the rank; it returns tensors, numbers and containers of them."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (work, free_port(), folder), nprocs=2, start_method="fork")
        return [torch.load(Path(folder) / str(rank)) for rank in range(2)]


def _rank(rank: int, work: Callable[[int], Any], port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.save(work(rank), Path(folder) / str(rank))
    leave()
