"""GCBS (Sachidananda et al., 2023): order the data so that neighbours are close to each other, and cut the order.

The reverse Cuthill-McKee order of the neighbour graph makes its adjacency matrix narrow; a batch is a piece of the
order. GCBS keeps the pairs above a quantile of similarity; here each instance keeps its closest neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hardneg.batching.filling import BatchBuilder
from hardneg.batching.graph import graph_of
from hardneg.batching.planners.base import Planner
from hardneg.batching.planners.communities import undirected
from hardneg.batching.walks import torch_generator
from hardneg.core.errors import check_counts, optional


@dataclass(frozen=True)
class CuthillMcKee(Planner):
    """Batches are the pieces of the Cuthill-McKee order that contain uniform starts; short ones take from the next.

    Needs scipy (extra ``eval``).

    Attributes:
        num_neighbours: Number of neighbours in the graph when vectors are given.
        num_candidates: Number of random candidates for the neighbours; None: all others.
    """

    num_neighbours: int = 10
    num_candidates: int | None = None
    needs: ClassVar[str] = "graph"

    def __post_init__(self) -> None:
        check_counts("CuthillMcKee", self, "num_neighbours")
        if self.num_candidates is not None:
            check_counts("CuthillMcKee", self, "num_candidates")

    def prepare(self, data: Any, batch_size: int, rng: np.random.Generator) -> tuple[NDArray[Any], NDArray[Any], int]:
        """Return the order, the place of each instance in it, and the batch size."""
        sparse = optional("scipy.sparse", "CuthillMcKee", extra="eval")
        order_of = optional("scipy.sparse.csgraph", "CuthillMcKee", extra="eval").reverse_cuthill_mckee
        starts, targets = undirected(graph_of(data, self.num_neighbours, self.num_candidates, torch_generator(rng)))
        edges = sparse.csr_matrix((np.ones(len(targets), dtype=np.int8), targets, starts), shape=(len(data), len(data)))
        order = order_of(edges, symmetric_mode=True).astype(np.int64)
        order = np.roll(order, rng.integers(len(order)))  # so that the cuts are at random places
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        return order, place, batch_size

    def fill(self, prepared: Any, builder: BatchBuilder, rng: np.random.Generator) -> None:
        """Offer the piece of a uniform start, followed by the rest of the order."""
        order, place, batch_size = prepared
        node = builder.start()
        if node is not None:
            builder.offer(np.roll(order, -(place[node] // batch_size * batch_size)))
