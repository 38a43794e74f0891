"""Ray Core: the tasks of a job on the machines of a cluster, which share its files."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hardneg.core.errors import optional
from hardneg.mining.engines.base import Engine, Work


@dataclass(frozen=True)
class Ray(Engine):
    """A cluster at ``address``, the one that this process has joined, or one that is started here.

    A task that is lost with its machine runs again on another, as often as needed; one that raises ends the job. A
    cluster that was started here ends with this process.
    """

    address: str | None = None
    workers: int = 0

    def map(self, work: Work) -> None:
        ray = optional("ray", "--engine ray", extra="ray")
        if not ray.is_initialized():
            address = self.address or os.environ.get("RAY_ADDRESS")
            here = {} if address else {"num_cpus": self.workers or None, "include_dashboard": False}
            ray.init(address=address, log_to_driver=False, **here)
        call = ray.remote(max_retries=-1, num_cpus=1)(_call)
        running = {call.remote(work.function, task): task for task in work.left()}
        while running:
            (ready,), _ = ray.wait(list(running), num_returns=1)
            task = running.pop(ready)
            _result(ray, ready)
            work.done(task)


def _call(function: Callable[[Any], None], task: Any) -> None:
    import torch

    torch.set_num_threads(1)
    function(task)


def _result(ray: Any, ready: Any) -> None:
    """Raises what the task raised, as if it had run here."""
    try:
        ray.get(ready)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
