"""Processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import torch

from hardneg.core.errors import warn_once
from hardneg.mining.engines.base import Engine, Work

_tries = 3


@dataclass(frozen=True)
class Local(Engine):
    """``workers`` processes; 0: one for each core that torch uses, and one where there is a GPU.

    They are forks of this process where the system has them, so that nothing is loaded twice.
    """

    workers: int = 1
    device: str | None = None

    @property
    def number(self) -> int:
        on_gpu = self.device.startswith("cuda") if self.device else torch.cuda.is_available()
        return self.workers or (1 if on_gpu else torch.get_num_threads())

    def map(self, work: Work) -> None:
        left = work.left()
        if min(self.number, len(left)) <= 1:
            for task in left:
                work.function(task)
                work.done(task)
            return
        for again in range(_tries):
            left = self._in_processes(work, left, last=again == _tries - 1)
            if not left:
                return

    def _in_processes(self, work: Work, tasks: list[Any], last: bool) -> list[Any]:
        """What is left after a worker was killed."""
        can_fork = "fork" in multiprocessing.get_all_start_methods() and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        method = "fork" if can_fork and os.name == "posix" else "spawn"
        number = min(self.number, len(tasks))
        finished: set[int] = set()
        context = multiprocessing.get_context(method)
        with ProcessPoolExecutor(number, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            futures = {pool.submit(work.function, task): i for i, task in enumerate(tasks)}
            try:
                for future in as_completed(futures):
                    future.result()
                    finished.add(futures[future])
                    work.done(tasks[futures[future]])
            except BrokenProcessPool:
                if last:
                    raise
                warn_once("worker killed", "A worker process was killed; its task is run again.")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [task for i, task in enumerate(tasks) if i not in finished]
