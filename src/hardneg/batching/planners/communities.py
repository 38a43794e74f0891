"""Planners that cut the whole neighbour graph into pieces: communities (B3) and a Cuthill-McKee order (GCBS).

B3 (Thirukovalluru et al., 2025) links each instance with its neighbours of ranks p to p + m by a teacher's similarity:
the closest p are likely false negatives and are left out. METIS cuts that graph into equal parts with few edges between
them, and communities are joined into batches.

GCBS (Sachidananda et al., 2023) orders the data so that neighbours are close to each other, and cuts the order: the
reverse Cuthill-McKee order makes the adjacency matrix of the graph narrow. GCBS keeps the pairs above a quantile of
similarity; here each instance keeps its closest neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hardneg.batching.filling import BatchBuilder
from hardneg.batching.graph import ProximityGraph, graph_of
from hardneg.batching.planners.base import Planner
from hardneg.batching.walks import torch_generator
from hardneg.core.errors import argument_error, check_counts, optional


@dataclass(frozen=True)
class Communities(Planner):
    """Batches joined from the communities around uniformly drawn starts; the last community may be truncated.

    Needs METIS (extra ``communities``).

    Attributes:
        size: Number of instances per community; at most the batch size.
        num_neighbours: Number of neighbours to find; those of ranks ``skip`` to ``num_neighbours`` are linked. B3 has
            ``skip=30, num_neighbours=130``.
        skip: Number of closest neighbours to leave out.
        num_candidates: Number of random candidates for the neighbours when vectors are given; None: all others.
    """

    size: int = 32
    num_neighbours: int = 30
    skip: int = 0
    num_candidates: int | None = None
    needs: ClassVar[str] = "graph"

    def __post_init__(self) -> None:
        check_counts("Communities", self, "size", "num_neighbours")
        check_counts("Communities", self, "skip", least=0)
        if self.num_candidates is not None:
            check_counts("Communities", self, "num_candidates")
        if self.skip >= self.num_neighbours:
            what = f"a skip below num_neighbours={self.num_neighbours}"
            raise argument_error("Communities", what, "skip", self.skip)

    def prepare(self, data: Any, batch_size: int, rng: np.random.Generator) -> tuple[NDArray[Any], list[NDArray[Any]]]:
        """Cut the graph; returns the community of each instance, and the members of each community."""
        graph = graph_of(data, self.num_neighbours, self.num_candidates, torch_generator(rng))
        if graph.num_neighbours <= self.skip:
            what = f"instances with more than skip={self.skip} neighbours"
            raise argument_error("Communities", what, "number of neighbours", graph.num_neighbours, "lower skip")
        parts = max(1, round(len(graph) / min(self.size, batch_size)))
        own = cut(graph, parts, skip=self.skip, seed=int(rng.integers(2**31)))
        order = np.argsort(own, kind="stable")
        return own, np.split(order, np.cumsum(np.bincount(own))[:-1])

    def fill(self, prepared: Any, builder: BatchBuilder, rng: np.random.Generator) -> None:
        """Offer whole communities of uniform starts until the batch is full."""
        own, members = prepared
        node = builder.start()
        while node is not None and builder.missing:
            builder.offer(rng.permutation(members[own[node]]))
            node = builder.draw()


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


def undirected(graph: ProximityGraph, skip: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the undirected graph in compressed rows: the start of each row [n + 1], and the targets.

    Args:
        graph: Graph in which an edge in either direction makes an undirected one.
        skip: Number of closest neighbours of each node that get no edge.
    """
    n, target = len(graph), graph.neighbours.numpy()[:, skip:]
    source = np.repeat(np.arange(n), target.shape[1])
    flat = target.reshape(-1)
    keep = (flat >= 0) & (flat != source)
    source, flat = source[keep], flat[keep]
    both = np.unique(np.concatenate([source * n + flat, flat * n + source]))  # an edge as one number: faster than rows
    return np.searchsorted(both, np.arange(n + 1) * n), both % n


def cut(graph: ProximityGraph, num_parts: int, skip: int = 0, seed: int = 0) -> NDArray[np.int64]:
    """Return the part of each node, shape [n], from METIS on the undirected graph.

    Args:
        graph: Graph to cut.
        num_parts: Number of parts.
        skip: Number of closest neighbours of each node that get no edge.
        seed: Seed of METIS.
    """
    metis = optional("pymetis", "Communities", extra="communities")
    if num_parts <= 1:
        return np.zeros(len(graph), dtype=np.int64)
    edges = metis.CSRAdjacency(*undirected(graph, skip))
    _, parts = metis.part_graph(num_parts, edges, options=metis.Options(seed=seed))
    return np.asarray(parts, dtype=np.int64)
