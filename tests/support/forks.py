"""Processes that begin with the libraries imported: forks of this one, or of a server that has no threads."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterable

CONTEXT = multiprocessing.get_context("forkserver")
"""One server for all tests of a process: what any of them needs is imported once."""
CONTEXT.set_forkserver_preload(
    [
        "hardneg.auditing.files", "hardneg.cli.app", "hardneg.comparing", "hardneg.mining.job",
        "hardneg.training.recipes.moco", "hardneg.training.recipes.simclr", "accelerate", "datasets", "torch._dynamo",
    ]
)  # fmt: skip


def in_forks(jobs: Iterable[Callable[[], None]]) -> list[int]:
    """Runs one after the other; their exit codes, negative for a signal."""
    codes = []
    for job in jobs:
        child = os.fork()
        if child == 0:
            try:
                job()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return codes
