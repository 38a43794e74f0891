"""When the batches of a run are planned again from fresh embeddings, and from which embeddings.

``PlanRefresher`` is called by the training loop after each step. Planners such as ``proximity()`` group similar items
into a batch and need embeddings of all items. These are either harvested from the batches at no cost or computed by
an extra pass of the encoder (``encode=True``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hardneg.batching.graph import ProximityGraph
from hardneg.batching.refresh import Refresh
from hardneg.batching.sampler import PlannedBatchSampler
from hardneg.batching.spec import BatchSpec
from hardneg.core.types import Keys

LEAD = 33
"""Largest number of steps by which a refresh precedes the batches planned from it; enough to build a graph."""


class PlanRefresher:
    """Collects the embeddings of each batch and lets the sampler plan again every ``refresh`` steps after the warm-up.

    Args:
        sampler: The sampler of the run.
        spec: How batches are planned, from ``--batches``.
        total: Number of steps of the run.
        vectors: Returns the unit vectors [n, d] from which batches are planned.
        seed: Seed of the approximate neighbour graph and of replacements for missing vectors.
    """

    def __init__(
        self, sampler: PlannedBatchSampler, spec: BatchSpec, total: int, vectors: Callable[[], Tensor], seed: int
    ) -> None:
        self.sampler, self.spec, self.total = sampler, spec, total
        planner, sizes = spec.planner, ("num_neighbours", "num_candidates")
        chosen = {name: getattr(planner, name) for name in sizes if hasattr(planner, name)}
        self.refresh = Refresh(sampler, spec.refresh, vectors, seed=seed, **chosen)
        self.refreshed: int | None = None  # the step of the last refresh
        self.harvested = torch.zeros(0)

    def before_training(self) -> None:
        """Plan the first epoch from an untrained or pretrained encoder, if there is no warm-up."""
        if self.spec.encode and self.spec.warmup == 0:
            self._plan_anew(0)

    def after_step(self, step: int, epoch: int, harvest: Callable[[], Keys]) -> None:
        """Keep the embeddings of this step, and plan again if it is due.

        Args:
            step: Number of steps completed, this one included.
            epoch: The epoch of this step, counted from 0.
            harvest: Returns the embeddings of the step by item.
        """
        if self.sampler.planner.needs == "nothing":
            return
        if not self.spec.encode:
            self._keep(harvest())
        # Without a warm-up, the first epoch is uniform until a refresh, since there are no embeddings before.
        first = self.refreshed is None and step == max(1, self.spec.warmup) * len(self.sampler) < self.total
        if first or (epoch >= self.spec.warmup and self.is_due(step, epoch)):
            self._plan_anew(step)

    def known(self, step: int) -> Tensor:
        """Return the harvested vectors, [n, d]; an item without one has the vector of a random other item.

        Such items were in a dropped last batch. With vectors of zeros no planner would ever select them; as the
        neighbour of another item each of them can be drawn.

        Args:
            step: Number of steps completed, which varies the random choice.
        """
        missing = ~self.harvested.any(1)
        if not missing.any() or missing.all():
            return self.harvested
        here, there = (torch.nonzero(rows)[:, 0] for rows in (~missing, missing))
        drawn = np.random.default_rng([self.refresh.seed, 4, step]).integers(len(here), size=len(there))
        vectors = self.harvested.clone()
        vectors[there] = vectors[here[torch.from_numpy(drawn).to(here.device)]]
        return vectors

    def is_due(self, step: int, epoch: int) -> bool:
        """Return True shortly before the segment that starts nearest to ``refresh`` steps after the last refresh.

        It is done a few steps early, since on a GPU the graph is built while training continues.

        Args:
            step: Number of steps completed.
            epoch: The current epoch, counted from 0.
        """
        every, done = self.spec.refresh, step - epoch * len(self.sampler)
        begun = (done - 1) // every * every
        size = min(every, len(self.sampler) - begun)
        left = begun + size - done
        nearest = step - (self.refreshed or 0) + min(every, len(self.sampler)) / 2 >= every
        return nearest and left == min(LEAD, (every - 1) // 3, size - 1) and step + left < self.total

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: harvested vectors, last refresh, and the data of the current plan."""
        return {"harvested": self.harvested, "refreshed": self.refreshed, "planned_from": _as_state(self.sampler.data)}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint, unless it has another number of items."""
        if len(state["harvested"]) in (0, self.sampler.num_instances):
            self.harvested, self.refreshed = state["harvested"], state["refreshed"]
            self.sampler.data = _from_state(state["planned_from"])

    def _keep(self, keys: Keys) -> None:
        """Store the vectors of a batch by item."""
        if not len(self.harvested):
            self.harvested = torch.zeros(self.sampler.num_instances, keys.dim, device=keys.vectors.device)
        assert keys.ids is not None
        self.harvested.index_copy_(0, keys.ids, keys.vectors.to(self.harvested))

    def _plan_anew(self, step: int) -> None:
        """Plan again from fresh embeddings."""
        self.refresh.now(step)
        self.refreshed = step


def _as_state(data: Any) -> dict[str, Tensor] | None:
    """Return a graph or vectors as tensors for a checkpoint."""
    if isinstance(data, ProximityGraph):
        return {"neighbours": data.neighbours.int(), "similarities": data.similarities}
    return None if data is None else {"vectors": data}


def _from_state(state: dict[str, Tensor] | None) -> Any:
    """Return the graph or the vectors that ``_as_state`` has stored."""
    if state is None:
        return None
    if "vectors" in state:
        return state["vectors"]
    return ProximityGraph(state["neighbours"].cpu().long(), state["similarities"].cpu())
