"""Subprocess that plans segments, so that a training loop which keeps Python busy does not wait for them.

A thread would not help, since both the loop that launches kernels and the planning are Python. The process is started
by ``python -c`` and not by multiprocessing, which would run the user's script again. ``Refresh`` (refresh.py) owns the
process, and ``PlannedBatchSampler.plan_next`` (sampler.py) uses it.
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

_memory = "/dev/shm"  # files here stay in memory, on systems that have it

# Ctrl-C reaches all processes of a terminal; this one ends with its pipe instead, without a traceback.
_PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from hardneg.batching.background import plan_from_stdin
plan_from_stdin()
"""


class PlanningProcess:
    """A subprocess that plans segments, and ends with this object.

    ``segment`` blocks, but releases the interpreter: call it from a thread.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(python("-c", _PROGRAM), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._folder = tempfile.TemporaryDirectory(dir=_memory if Path(_memory).is_dir() else None)
        self._close = weakref.finalize(self, _end, self._process, self._folder)

    def segment(self, rules: Epoch, plan: Plan, planner: Planner, graph: ProximityGraph, count: int) -> Plan:
        """Plan ``count`` more batches in the subprocess.

        Args:
            rules: Sizes and guarantees of the batches.
            plan: Plan to extend.
            planner: Chooses the batches; must be picklable.
            graph: Graph to plan from.
            count: Number of batches.

        Raises:
            OSError: If the process has ended.
            EOFError: If the process ends while it plans.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(sys.path, self._process.stdin)  # so that a user's planner can be imported
        shared = SharedGraph(self._folder.name, tuple(graph.neighbours.shape), graph.digest)
        for here, there in zip((graph.neighbours, graph.similarities), shared.tensors("w+"), strict=True):
            there.copy_(here)
        pickle.dump((rules, plan, planner, shared, count), self._process.stdin, protocol=5)
        self._process.stdin.flush()
        planned: Plan = pickle.load(self._process.stdout)
        return planned


@dataclass(frozen=True)
class SharedGraph:
    """A graph in files that both processes map into memory; sending it through a pipe would take longer than planning.

    Attributes:
        folder: Folder of the files.
        shape: Shape of the neighbours, [n, K].
        digest: Digest of the graph.
    """

    folder: str
    shape: tuple[int, ...]
    digest: str

    def tensors(self, mode: Literal["r+", "w+"]) -> tuple[Tensor, Tensor]:
        """Map the neighbours (int32) and similarities (float32), each of shape [n, K].

        Args:
            mode: "w+" to create the files, "r+" to open them.
        """
        files = (("neighbours", np.int32), ("similarities", np.float32))
        neighbours, similarities = (
            torch.from_numpy(np.memmap(Path(self.folder, name), kind, mode, shape=self.shape)) for name, kind in files
        )
        return neighbours, similarities

    def graph(self) -> ProximityGraph:
        """Return the graph; its digest is not computed again."""
        neighbours, similarities = self.tensors("r+")
        graph = ProximityGraph(neighbours.long(), similarities)
        graph.__dict__["digest"] = self.digest  # avoids computing it again
        return graph


def _end(process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]) -> None:
    """Close the pipes, which ends the process, and remove the files."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # of a process that is gone
                pipe.close()
    process.wait(timeout=10)
    folder.cleanup()


def plan_from_stdin() -> None:
    """Plan the jobs that arrive on standard input, until it is closed. Runs in the subprocess."""
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
    """Return the plan with ``count`` more batches."""
    graph = shared.graph()
    prepared = planner.prepared(graph, rules.batch_size, rules.seed)
    return rules.extended(plan, rules.builder(plan), planner, graph, prepared, count)
