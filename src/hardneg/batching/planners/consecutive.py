"""Consecutive batches: pieces of the data in its order, for positives that follow each other (quick-thoughts)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hardneg.batching.filling import BatchBuilder
from hardneg.batching.planners.base import Planner


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
