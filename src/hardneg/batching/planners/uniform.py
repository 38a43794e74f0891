"""Planners that need neither vectors nor a graph: uniform and consecutive batches.

Uniform batches are a random permutation cut into pieces, what a plain loader with ``shuffle=True`` does. Consecutive
batches are pieces of the data in its order, for positives that follow each other (quick-thoughts).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
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

    def fill_all(self, prepared: Any, builder: BatchBuilder, count: int, rng: np.random.Generator) -> None:
        """Cut the next batches from the permutation of the epoch, if neither a guard nor overlaps are in the way."""
        if builder.guard is not None or not builder.covering:
            return super().fill_all(prepared, builder, count, rng)
        ends = np.cumsum(builder.sizes[builder.num_closed : builder.num_closed + count]).tolist()
        nodes = builder.starts(ends[-1] if ends else 0)
        builder.tally.filled += len(nodes)
        builder.add(nodes[low:high] for low, high in pairwise([0, *ends]))
        return None


@dataclass(frozen=True)
class Consecutive(Planner):
    """Consecutive pieces of the data in random order; inside a piece the order is that of the data.

    >>> plan = Consecutive().plan(12, batch_size=4)
    >>> sorted(batch.tolist() for batch in plan)
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    """

    def fill(self, prepared: Any, builder: BatchBuilder, rng: np.random.Generator) -> None:
        """Offer the next free piece at a random place; with coverage "free", a piece from anywhere."""
        if builder.covering and builder.missing:  # whole pieces are taken, so the free instances stay in pieces
            free = np.flatnonzero(builder.taken == 0)
            piece = rng.integers(max(1, len(free) // builder.missing)) * builder.missing
            builder.offer(free[piece : piece + builder.missing])
        elif (start := builder.start()) is not None:  # wraps around at the end
            builder.offer((start + np.arange(1, builder.missing + 1)) % builder.num_instances)
