"""Consecutive batches: pieces of the data in its order, for positives that follow each other (quick-thoughts)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hardneg.batching.filling import BatchFiller
from hardneg.batching.planners.base import Planner


@dataclass(frozen=True)
class Consecutive(Planner):
    """Consecutive pieces of the data in random order; inside a piece the order is that of the data.

    >>> plan = Consecutive().plan(12, batch_size=4)
    >>> sorted(batch.tolist() for batch in plan)
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    """

    def fill(self, prepared: Any, filler: BatchFiller, rng: np.random.Generator) -> None:
        """Offer the next free piece at a random place; with coverage "free", a piece from anywhere."""
        if filler.covering and filler.missing:  # whole pieces are taken, so the free instances stay in pieces
            free = np.flatnonzero(filler.taken == 0)
            piece = rng.integers(max(1, len(free) // filler.missing)) * filler.missing
            filler.offer(free[piece : piece + filler.missing])
        elif (start := filler.start()) is not None:  # wraps around at the end
            filler.offer((start + np.arange(1, filler.missing + 1)) % filler.num_instances)
