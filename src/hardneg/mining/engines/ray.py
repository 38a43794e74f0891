"""The engine of a Ray cluster whose machines share the files of the job."""

from __future__ import annotations

import os
import pickle
import sys
from collections import Counter
from contextlib import chdir
from dataclasses import dataclass
from typing import Any

from hardneg.core.errors import optional, warn_once
from hardneg.io.processes import safe_children
from hardneg.mining.engines.base import TRIES, ClusterLost, Engine, Work, WorkerLost

PATIENCE = 10.0
"""Seconds without a finished task until the cluster is checked: Ray waits forever for a raylet that is gone."""

_fix = "start the cluster again, then run the same command again: finished pieces are kept"


@dataclass(frozen=True)
class Ray(Engine):
    """A Ray cluster: at ``address``, the one this process has joined, or one that is started here.

    A task that is lost with its worker or machine runs again, ``TRIES`` times at most; one that
    raises ends the job. A cluster that was started here ends with this process.

    Attributes:
        address: Address of the cluster; None uses ``RAY_ADDRESS`` or starts one.
        workers: Number of processes of a cluster started here; 0 means one per core.
    """

    address: str | None = None
    workers: int = 0

    def map(self, work: Work) -> None:
        """Run the tasks that are not done on the cluster.

        Raises:
            WorkerLost: If the workers of a task were killed ``TRIES`` times.
            ClusterLost: If the cluster cannot be reached or stops.
        """
        ray = optional("ray", "--engine ray", extra="ray")
        if not (left := work.pending()):
            return
        if not ray.is_initialized():
            self._join(ray)
        # Ray's own retries would be silent, and endless for a task that runs out of memory.
        call = ray.remote(max_retries=0, num_cpus=1)(_call)
        # As bytes, so that the function is imported only after the worker has set its path.
        job = pickle.dumps(work.function), os.getcwd(), os.getcwd() in sys.path
        tries: Counter[int] = Counter()
        running = {call.remote(*job, task): number for number, task in enumerate(left)}
        while running:
            ended, _ = ray.wait(list(running), num_returns=1, timeout=PATIENCE)
            if not ended:
                _check_raylet(ray)
                continue
            ready = ended[0]
            number = running.pop(ready)
            tries[number] += 1
            if (why := _lost(ray, ready)) is None:
                work.done(left[number])
                continue
            if tries[number] == TRIES:
                raise WorkerLost(work.name(left[number]), TRIES, why)
            warn_once("worker killed", f"A worker process was lost ({why}); its task is run again.")
            running[call.remote(*job, left[number])] = number

    def _join(self, ray: Any) -> None:
        address = self.address or os.environ.get("RAY_ADDRESS")
        here = {} if address else {"num_cpus": self.workers or None, "include_dashboard": False}
        try:
            # Workers of Ray import from the current folder of this process first, so it must contain no modules.
            with chdir(os.path.abspath(os.sep)), safe_children():
                ray.init(address=address, log_to_driver=False, **here)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            where = f"at {address}" if address else "that is started here"
            raise ClusterLost(
                "mine", f"a Ray cluster {where}", _first_line(error), "check that it runs (ray status)"
            ) from error


def _call(function: bytes, folder: str, imports_from_it: bool, task: Any) -> None:
    """Run a task in the working directory of the process that submitted it, if this machine has that folder."""
    import torch

    torch.set_num_threads(1)
    if os.path.isdir(folder):
        os.chdir(folder)
    if imports_from_it and folder not in sys.path:
        sys.path.append(folder)
    pickle.loads(function)(task)


def _lost(ray: Any, ready: Any) -> str | None:
    """Return how the worker of a task was lost, None if the task ended; raise any error of the task itself."""
    errors = ray.exceptions
    try:
        ray.get(ready)
    except errors.RayTaskError as error:
        raise error.cause from error
    except (errors.LocalRayletDiedError, errors.RaySystemError, errors.RuntimeEnvSetupError) as error:
        raise ClusterLost("mine", "a Ray cluster that keeps running", _first_line(error), _fix) from error
    except errors.RayError as error:
        return _first_line(error)
    return None


def _check_raylet(ray: Any) -> None:
    """Raise if the raylet of this machine, which schedules the tasks, is gone."""
    own = ray.get_runtime_context().get_node_id()
    if any(node["NodeID"] == own and not node["Alive"] for node in ray.nodes()):
        raise ClusterLost("mine", "a Ray cluster that keeps running", "one whose local raylet died", _fix)


def _first_line(error: Exception) -> str:
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return line.rstrip(".")
