"""Plans segments in a process of its own, so that a training loop that keeps the host busy does not wait for them.

A thread would not do: the loop that launches kernels and the planning are both Python. The process is started by
``python -c`` and not by multiprocessing, which would run the user's script again.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hardneg.batching.graph import ProximityGraph
from hardneg.batching.plan import Plan
from hardneg.batching.planners.base import Epoch, Planner
from hardneg.io.processes import python

_memory = "/dev/shm"  # files that are never written to a disk, where there are such

# Ctrl-C reaches all processes of a terminal; this one ends with its pipe, and not with a traceback.
_SERVE = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from hardneg.batching.background import serve
serve()
"""


class PlanningProcess:
    """``segment`` blocks without holding the interpreter: call it from a thread."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(python("-c", _SERVE), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._folder = tempfile.TemporaryDirectory(dir=_memory if Path(_memory).is_dir() else None)
        self._close = weakref.finalize(self, _end, self._process, self._folder)

    def segment(self, rules: Epoch, plan: Plan, planner: Planner, graph: ProximityGraph, count: int) -> Plan:
        """The plan with ``count`` more batches; raises ``OSError`` or ``EOFError`` if the process is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(sys.path, self._process.stdin)  # a planner of the user's is imported from where it is here
        shared = SharedGraph(self._folder.name, tuple(graph.neighbours.shape), graph.digest)
        for here, there in zip((graph.neighbours, graph.similarities), shared.tensors("w+"), strict=True):
            there.copy_(here)
        pickle.dump((rules, plan, planner, shared, count), self._process.stdin, protocol=5)
        self._process.stdin.flush()
        planned: Plan = pickle.load(self._process.stdout)
        return planned


@dataclass(frozen=True)
class SharedGraph:
    """A graph in files that both processes map into their memory; through a pipe it would take longer than planning."""

    folder: str
    shape: tuple[int, ...]
    digest: str

    def tensors(self, mode: Literal["r+", "w+"]) -> tuple[Tensor, Tensor]:
        files = (("neighbours", np.int32), ("similarities", np.float32))
        neighbours, similarities = (
            torch.from_numpy(np.memmap(Path(self.folder, name), kind, mode, shape=self.shape)) for name, kind in files
        )
        return neighbours, similarities

    def graph(self) -> ProximityGraph:
        neighbours, similarities = self.tensors("r+")
        graph = ProximityGraph(neighbours.long(), similarities)
        graph.__dict__["digest"] = self.digest  # known already
        return graph


def _end(process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]) -> None:
    """Closes the pipe, on which the process ends by itself."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # of a process that is gone
                pipe.close()
    process.wait(timeout=10)
    folder.cleanup()


def serve() -> None:
    """Plans what comes from standard input until it is closed."""
    jobs, results = sys.stdin.buffer, sys.stdout.buffer
    torch.set_num_threads(1)
    while True:
        try:
            sys.path[:] = pickle.load(jobs)
            job = pickle.load(jobs)
        except EOFError:  # the training process is gone
            return
        pickle.dump(_planned(*job), results, protocol=5)
        results.flush()


def _planned(rules: Epoch, plan: Plan, planner: Planner, shared: SharedGraph, count: int) -> Plan:
    graph = shared.graph()
    prepared = planner.prepared(graph, rules.batch_size, rules.seed)
    return rules.extended(plan, rules.filler(plan), planner, graph, prepared, count)
