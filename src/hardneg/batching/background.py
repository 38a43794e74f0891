"""Plans segments in a process of its own, so that a training loop that keeps the host busy does not wait for them.

A thread would not do: the loop that launches kernels and the planning are both Python. The process is started by
``python -c`` and not by multiprocessing, which would run the user's script again.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import weakref
from typing import Any

import torch

from hardneg.batching.graph import ProximityGraph
from hardneg.batching.plan import Plan
from hardneg.batching.planners.base import Epoch, Planner


class PlanningProcess:
    """``segment`` blocks without holding the interpreter: call it from a thread."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", "from hardneg.batching.background import serve; serve()"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._close = weakref.finalize(self, _end, self._process)

    def segment(self, rules: Epoch, plan: Plan, planner: Planner, graph: ProximityGraph, count: int) -> Plan:
        """The plan with ``count`` more batches; raises ``OSError`` or ``EOFError`` if the process is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        arrays = graph.neighbours.int().numpy(), graph.similarities.numpy(), graph.digest
        pickle.dump((rules, plan, planner, arrays, count), self._process.stdin, protocol=5)
        self._process.stdin.flush()
        planned: Plan = pickle.load(self._process.stdout)
        return planned


def _end(process: subprocess.Popen[bytes]) -> None:
    """Closes the pipe, on which the process ends by itself."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait(timeout=10)


def serve() -> None:
    """Plans what comes from standard input until it is closed."""
    jobs, results = sys.stdin.buffer, sys.stdout.buffer
    torch.set_num_threads(1)
    while True:
        try:
            job = pickle.load(jobs)
        except EOFError:  # the training process is gone
            return
        pickle.dump(_planned(*job), results, protocol=5)
        results.flush()


def _planned(rules: Epoch, plan: Plan, planner: Planner, arrays: tuple[Any, Any, str], count: int) -> Plan:
    graph = ProximityGraph(torch.from_numpy(arrays[0]).long(), torch.from_numpy(arrays[1]))
    graph.__dict__["digest"] = arrays[2]  # known already
    prepared = planner.prepared(graph, rules.batch_size, rules.seed)
    return rules.extended(plan, rules.room(plan), planner, graph, prepared, count)
