"""Processes that begin with the libraries imported: forks of this one, or of a server that has no threads."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from support import disk as disk
from support.ranks import free_port

HAS_SERVER = "forkserver" in multiprocessing.get_all_start_methods()  # not on Windows
CONTEXT: Any = multiprocessing.get_context("forkserver" if HAS_SERVER else "spawn")
"""One server for all tests of a process: what any of them needs is imported once."""
if HAS_SERVER:
    CONTEXT.set_forkserver_preload(
        [
            "hardneg.auditing.files", "hardneg.cli.app", "hardneg.comparing", "hardneg.mining.job",
            "hardneg.training.recipes.moco", "hardneg.training.recipes.simclr",
            "accelerate", "datasets", "torch._dynamo",
        ]
    )  # fmt: skip


def in_forks(jobs: Iterable[Callable[[], None]]) -> list[int]:
    """Runs one after the other; their exit codes, negative for a signal."""
    return [_ended(_fork(job)) for job in jobs]


def on_forked_ranks(job: Callable[[], None], number: int) -> None:
    """Runs the job on several ranks at once, and ends this process as they ended."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(number)}
    ranks = [_fork(job, {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(number)]
    (code,) = {_ended(rank) for rank in ranks}
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def _fork(job: Callable[[], None], environment: dict[str, str] | None = None) -> int:
    child = os.fork()
    if child:
        return child
    try:
        os.environ |= environment or {}
        job()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
