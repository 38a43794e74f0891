"""The engine of processes on this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from hardneg.core.errors import warn_once
from hardneg.io.processes import safe_children
from hardneg.mining.engines.base import TRIES, Engine, Work, WorkerLost


@dataclass(frozen=True)
class Local(Engine):
    """Worker processes of this machine.

    They are forks of this process where the system supports it, so that nothing is loaded twice.

    Attributes:
        workers: Number of processes; 0 means one per core that torch uses, or one if there is a GPU.
        device: Device of the search.
    """

    workers: int = 1
    device: str | None = None

    @property
    def number(self) -> int:
        """Number of processes to use."""
        on_gpu = self.device.startswith("cuda") if self.device else torch.cuda.is_available()
        return self.workers or (1 if on_gpu else torch.get_num_threads())

    def map(self, work: Work) -> None:
        """Run the tasks in worker processes, or here if one process is enough.

        A task whose worker is killed runs again, ``TRIES`` times at most.
        """
        left = work.pending()
        if min(self.number, len(left)) <= 1:
            for task in left:
                work.function(task)
                work.done(task)
            return
        for again in range(TRIES):
            left = self._in_processes(work, left, last=again == TRIES - 1)
            if not left:
                return

    def _in_processes(self, work: Work, tasks: list[Any], last: bool) -> list[Any]:
        """Run tasks in a pool and return those that are not done because a worker was killed."""
        can_fork = "fork" in multiprocessing.get_all_start_methods() and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        method = "fork" if can_fork and os.name == "posix" else "spawn"
        number = min(self.number, len(tasks))
        finished: set[int] = set()
        context = multiprocessing.get_context(method)
        stopped, stop = context.Pipe(duplex=False)
        with safe_children(), ProcessPoolExecutor(number, context, initializer=_begin, initargs=(stopped,)) as pool:
            try:
                futures = {pool.submit(work.function, task): i for i, task in enumerate(tasks)}
                for future in as_completed(futures):
                    future.result()
                    finished.add(futures[future])
                    work.done(tasks[futures[future]])
            except BrokenProcessPool:
                left = [task for i, task in enumerate(tasks) if i not in finished]
                if last:
                    raise WorkerLost(f"{work.name(left[0])}, or of another piece at that time,", TRIES) from None
                warn_once("worker killed", "A worker process was killed; its task is run again.")
            except BaseException:
                stop.send(None)  # no worker receives it: its presence wakes all of them
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [task for i, task in enumerate(tasks) if i not in finished]


def _begin(stopped: Connection) -> None:
    """Start a worker, which ends when its pool is stopped or its parent is gone, even in the middle of a task.

    Ctrl-C reaches all processes of a terminal; only the parent handles it.
    """
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel, stopped])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
