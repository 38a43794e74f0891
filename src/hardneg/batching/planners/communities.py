"""B3 (Thirukovalluri et al., 2025): cut the neighbour graph into small communities, join communities into batches.

B3 builds the graph from a teacher's ranks and leaves out the top ranks as likely false negatives; here the graph is
given (``build_graph`` with num_candidates does the same job by chance: most true neighbours are never candidates).
METIS cuts into equal parts with few edges between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hardneg.batching.filler import Room
from hardneg.batching.graph import ProximityGraph, build_graph
from hardneg.batching.planners.base import Planner
from hardneg.batching.walks import torch_generator
from hardneg.core.errors import argument_error, optional


@dataclass(frozen=True)
class Communities(Planner):
    """A batch joins the communities of uniform starts until it is full; the last one may come in part.

    ``size`` is the number of instances of a community (at most a batch). Needs the extra ``communities`` (METIS).
    ``num_neighbours`` is how the kNN graph is built when vectors are given.
    """

    size: int = 32
    num_neighbours: int = 30
    needs: ClassVar[str] = "graph"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise argument_error("Communities", "communities of at least one instance", "size", self.size)

    def prepare(self, data: Any, batch_size: int, rng: np.random.Generator) -> tuple[NDArray[Any], list[NDArray[Any]]]:
        graph = data
        if not isinstance(data, ProximityGraph):
            graph = build_graph(data, min(self.num_neighbours, len(data) - 1), None, torch_generator(rng))
        own = cut(graph, max(1, round(len(graph) / min(self.size, batch_size))), seed=int(rng.integers(2**31)))
        order = np.argsort(own, kind="stable")
        return own, np.split(order, np.cumsum(np.bincount(own))[:-1])

    def fill(self, prepared: Any, room: Room, rng: np.random.Generator) -> None:
        own, members = prepared
        node = room.start()
        while node is not None and room.missing:
            room.offer(rng.permutation(members[own[node]]))
            node = room.draw()


def cut(graph: ProximityGraph, num_parts: int, seed: int = 0) -> NDArray[np.int64]:
    """The part of each node: METIS on the undirected graph, in which one direction makes an edge."""
    metis = optional("pymetis", "Communities", extra="communities")
    n = len(graph)
    if num_parts <= 1:
        return np.zeros(n, dtype=np.int64)
    target = graph.neighbours.numpy()
    source = np.repeat(np.arange(n), target.shape[1])
    keep = (target.reshape(-1) >= 0) & (target.reshape(-1) != source)
    source, flat = source[keep], target.reshape(-1)[keep]
    both = np.unique(np.stack([np.r_[source, flat], np.r_[flat, source]], axis=1), axis=0)
    starts = np.searchsorted(both[:, 0], np.arange(n + 1))
    edges = metis.CSRAdjacency(starts, both[:, 1])
    _, parts = metis.part_graph(num_parts, edges, options=metis.Options(seed=seed))
    return np.asarray(parts, dtype=np.int64)
