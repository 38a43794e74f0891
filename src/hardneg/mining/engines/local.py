"""Processes of this machine."""

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
        for again in range(TRIES):
            left = self._in_processes(work, left, last=again == TRIES - 1)
            if not left:
                return

    def _in_processes(self, work: Work, tasks: list[Any], last: bool) -> list[Any]:
        """What is left after a worker was killed."""
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
                    raise WorkerLost(f"{work.name(left[0])}, or of one beside it,", TRIES) from None
                warn_once("worker killed", "A worker process was killed; its task is run again.")
            except BaseException:
                stop.send(None)  # no worker receives it: all see that it is there
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [task for i, task in enumerate(tasks) if i not in finished]


def _begin(stopped: Connection) -> None:
    """Begin a worker: it ends when its pool is stopped or the process that started it is gone, whatever it works on.

    Ctrl-C, which reaches all processes of a terminal, is left to that process.
    """
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel, stopped])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
