"""ProSampler, Algorithms 1 to 3: a batch is a walk over the proximity graph from a random start.

The paper's walks ignore each other (an "epoch" of the authors' code is about three times as long as a plain one, and
visits hubs up to ten times). With coverage "once" a walk passes through instances that are already taken, but collects
only free ones; if it finds too few, it continues from another uniform free instance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hardneg.batching.filling import BatchBuilder
from hardneg.batching.graph import graph_of
from hardneg.batching.planners.base import Planner
from hardneg.batching.walks import Walker, check_walk, torch_generator
from hardneg.core.errors import argument_error, check_counts, check_range
from hardneg.core.schedules import Number, Schedule

_at_once = 8
"""Number of batches whose first excursions are made together; their starts are taken in advance, so not too many."""


@dataclass(frozen=True)
class Proximity(Planner):
    """Batches of similar instances, from random walks with restart.

    Attributes:
        restart: Probability of returning to the start: high stays close to it (kNN batches), low wanders off.
        kind: Search on the graph, as for ``walk``.
        steps: Choice of the next neighbour, as for ``walk``.
        num_neighbours: Number of neighbours of the graph when vectors are given.
        num_candidates: Number of random candidates for the neighbours; None: all others. Both are reduced to the size
            of the data.
        patience: Number of moves without a new node that end a search; by default, with coverage "once", four per open
            place and at least 200.

    Example:
        >>> import torch
        >>> vectors = torch.nn.functional.normalize(torch.randn(60, 8), dim=1)
        >>> plan = Proximity(restart=0.2, num_neighbours=10).plan(vectors, 16, torch.Generator().manual_seed(0))
        >>> plan.describe(vectors).coverage
        1.0
    """

    restart: Number = 0.1
    kind: str = "restart"
    steps: str = "uniform"
    num_neighbours: int = 100
    num_candidates: int | None = 1000
    patience: int | None = None
    needs: ClassVar[str] = "graph"

    def __post_init__(self) -> None:
        check_range("Proximity", "restart", self.restart, 0.0, 1.0)
        check_counts("Proximity", self, "num_neighbours")
        if self.num_candidates is not None:
            check_counts("Proximity", self, "num_candidates")
            if self.num_neighbours > self.num_candidates:
                what = f"at most num_candidates={self.num_candidates} neighbours"
                raise argument_error("Proximity", what, "num_neighbours", self.num_neighbours)
        if self.patience is not None:
            check_counts("Proximity", self, "patience")
        check_walk("Proximity", self.kind, self.steps)

    def prepare(self, data: Any, batch_size: int, rng: np.random.Generator) -> Walker:
        """Return a walker on the graph."""
        graph = graph_of(data, self.num_neighbours, self.num_candidates, torch_generator(rng))
        return Walker(graph, kind=self.kind, steps=self.steps, patience=self.patience)

    def fill_all(self, prepared: Walker, builder: BatchBuilder, count: int, rng: np.random.Generator) -> None:
        """Fill the next batches; without a guard, the first excursions of several batches are made together.

        Raises:
            ArgumentError: If ``restart`` is still a schedule.
        """
        if isinstance(self.restart, Schedule):
            raise argument_error("Proximity", "a number", "restart", self.restart, "use planner.at(step, total)")
        if builder.guard is not None:
            super().fill_all(prepared, builder, count, rng)
        elif builder.covering:
            while count:
                some = min(count, _at_once)
                self._fill_some(prepared, builder, some, rng)
                count -= some
        else:
            first, sizes = builder.num_closed, builder.sizes[builder.num_closed : builder.num_closed + count]
            starts = builder.order[np.arange(first, first + count) % builder.num_instances]
            nodes, filled = prepared.independent(starts, max(sizes), self.restart, rng)
            builder.tally.filled += int(filled.sum())
            builder.add(batch[:size] for batch, size in zip(nodes, sizes, strict=True))

    def _fill_some(self, walker: Walker, builder: BatchBuilder, count: int, rng: np.random.Generator) -> None:
        """Fill some batches whose first excursions are made together."""
        assert not isinstance(self.restart, Schedule)
        starts, size = builder.starts(count), builder.sizes[builder.num_closed]
        free = 1.0 - np.count_nonzero(builder.taken) / builder.num_instances
        moves = int(1.5 * size / max(free, 0.02))
        for start, begun in zip(starts.tolist(), walker.excursions(starts, moves, self.restart, rng), strict=True):
            builder.open()
            builder.enter(start)
            walker.begin(start, self.restart)
            builder.offer(walker.first_nodes(begun, builder.missing, builder.taken))
            self._search(walker, builder, rng)
            builder.fill()
            builder.close()

    def fill(self, prepared: Walker, builder: BatchBuilder, rng: np.random.Generator) -> None:
        """Walk from a uniform start until the batch is full."""
        assert not isinstance(self.restart, Schedule)
        node = builder.start()
        if node is not None:
            prepared.begin(node, self.restart)
            self._search(prepared, builder, rng)

    def _search(self, walker: Walker, builder: BatchBuilder, rng: np.random.Generator) -> None:
        """Walk until the batch is full; continue from another free node when nothing more is found."""
        while builder.missing:
            patience = max(200, 4 * builder.missing) if builder.covering else None
            wanted = builder.missing
            found = walker.more(wanted, builder.taken, rng, patience)
            builder.offer(found)
            if len(found) < wanted:
                node = builder.draw()
                if node is None:
                    return
                builder.tally.filled += 1
                walker.jump(node)


@dataclass(frozen=True, repr=False)
class falling(Schedule):  # noqa: N801
    """Restart probability of the authors' code: max(start - per_step * step, end), with the epoch as step.

    From 0.2 it reaches 0.05 in epoch 8 of 1,000, while the paper describes a linear decrease over the whole training.

    Args:
        start: Value at step 0.
        end: Lowest value.
        per_step: Decrease per step.

    Example:
        >>> [round(falling(0.2)(epoch), 2) for epoch in (0, 1, 7, 8, 100)]
        [0.2, 0.18, 0.06, 0.05, 0.05]
    """

    start: float
    end: float = 0.05
    per_step: float = 0.02
    examples: ClassVar = ("falling(0.2)",)

    def __call__(self, step: int, total: int | None = None) -> float:
        """Return the restart probability of an epoch."""
        return max(self.start - self.per_step * step, self.end)
