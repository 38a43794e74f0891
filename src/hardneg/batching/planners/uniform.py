"""Uniform batches: a random permutation cut into pieces, what a plain loader with ``shuffle=True`` does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hardneg.batching.filling import BatchBuilder
from hardneg.batching.planners.base import Planner


@dataclass(frozen=True)
class UniformPlanner(Planner):
    """Uniform batches: every instance is as likely as any other.

    >>> plan = UniformPlanner().plan(10, batch_size=4)
    >>> [len(batch) for batch in plan], sorted(plan.order.tolist()) == list(range(10))
    ([4, 4, 2], True)
    """

    name: ClassVar = "Uniform"
    offers: ClassVar[bool] = False

    def fill(self, prepared: Any, builder: BatchBuilder, rng: np.random.Generator) -> None:
        """Offer nothing: the builder fills open places uniformly."""
