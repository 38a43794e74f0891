"""When the batches of a run are planned from fresh embeddings, and from which."""

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
"""Steps from the vectors of a graph to the batches planned from it, for a refresh every 100 steps."""


class PlanRefresher:
    """Keeps the embeddings of each batch and, every ``refresh`` steps after the warm-up, lets the sampler plan anew.

    ``vectors`` gives what it plans from: what was ``harvested``, or a pass of the encoder over all items.
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
        if self.spec.encode and self.spec.warmup == 0:
            self._plan_anew(0)

    def after_step(self, step: int, epoch: int, harvest: Callable[[], Keys]) -> None:
        """Keeps what the method harvested in this step, and plans anew if that is due."""
        if self.sampler.planner.needs == "nothing":
            return
        if not self.spec.encode:
            self._keep(harvest())
        # Without a warm-up, the first epoch is uniform until a refresh, since nothing is known of the items before.
        first = self.refreshed is None and step == max(1, self.spec.warmup) * len(self.sampler) < self.total
        if first or (epoch >= self.spec.warmup and self.is_due(step, epoch)):
            self._plan_anew(step)

    def known(self, step: int) -> Tensor:
        """The harvested vectors; an item without one has that of a random other, as whose neighbour it can be drawn.

        Such items are those that a dropped last batch would have held. With vectors of 0 no planner would find them.
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
        """Shortly before the segment of the plan that begins nearest to ``refresh`` steps after the last one.

        Shortly before, since on a GPU the graph is built while training continues.
        """
        every, done = self.spec.refresh, step - epoch * len(self.sampler)
        begun = (done - 1) // every * every
        size = min(every, len(self.sampler) - begun)
        left = begun + size - done
        nearest = step - (self.refreshed or 0) + min(every, len(self.sampler)) / 2 >= every
        return nearest and left == min(LEAD, (every - 1) // 3, size - 1) and step + left < self.total

    def state(self) -> dict[str, Any]:
        return {"harvested": self.harvested, "refreshed": self.refreshed, "planned_from": _as_state(self.sampler.data)}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes the state of a checkpoint, unless it is of another number of items."""
        if len(state["harvested"]) in (0, self.sampler.num_instances):
            self.harvested, self.refreshed = state["harvested"], state["refreshed"]
            self.sampler.data = _from_state(state["planned_from"])

    def _keep(self, keys: Keys) -> None:
        if not len(self.harvested):
            self.harvested = torch.zeros(self.sampler.num_instances, keys.dim, device=keys.vectors.device)
        assert keys.ids is not None
        self.harvested.index_copy_(0, keys.ids, keys.vectors.to(self.harvested))

    def _plan_anew(self, step: int) -> None:
        self.refresh.now(step)
        self.refreshed = step


def _as_state(data: Any) -> dict[str, Tensor] | None:
    if isinstance(data, ProximityGraph):
        return {"neighbours": data.neighbours.int(), "similarities": data.similarities}
    return None if data is None else {"vectors": data}


def _from_state(state: dict[str, Tensor] | None) -> Any:
    if state is None:
        return None
    if "vectors" in state:
        return state["vectors"]
    return ProximityGraph(state["neighbours"].cpu().long(), state["similarities"].cpu())
