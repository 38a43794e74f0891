"""Nearest-neighbour batches: a random instance and its nearest neighbours (the kNN sampler of ProSampler, section 3.2).

These are the hardest batches, with the most false negatives: the end of the scale, not a recommendation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hardneg.batching.filling import BatchBuilder
from hardneg.batching.graph import in_range
from hardneg.batching.planners.base import Planner


@dataclass(frozen=True)
class NearestNeighbours(Planner):
    """The free instances closest to a uniform start; exact, with one row of similarities per batch."""

    needs: ClassVar[str] = "vectors"

    def prepare(self, data: Tensor, batch_size: int, rng: np.random.Generator) -> Tensor:
        """Return the vectors in float32 or wider."""
        return in_range(data)[0]

    def fill(self, prepared: Any, builder: BatchBuilder, rng: np.random.Generator) -> None:
        """Offer the nearest free neighbours of a uniform start, closest first."""
        vectors: Tensor = prepared
        node = builder.start()
        if node is None:
            return
        taken = torch.from_numpy(builder.taken == 1).to(vectors.device)
        scores = (vectors @ vectors[node]).masked_fill(taken, -torch.inf)
        wanted = min(builder.missing if builder.guard is None else 2 * builder.missing, len(vectors))
        builder.offer(scores.topk(wanted).indices.cpu().numpy())
        if builder.missing and wanted < len(vectors):
            builder.offer(scores.argsort(descending=True).cpu().numpy()[wanted:])
