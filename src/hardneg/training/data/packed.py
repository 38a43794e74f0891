"""Graphs of different sizes, packed into a few tensors: a batch is one large graph without edges between its parts.

    graphs = pack([nodes [n, f], ...], [edges [2, m], ...])      plain tensors, one of each per graph
    graphs = from_geometric(dataset)                            any sequence of PyG's Data
    graphs[torch.tensor([3, 0])]                                a batch, in this order
    graphs.x, graphs.edge_index, graphs.batch                   as PyG's layers take them

Graphs are undirected and simple: an edge is held once, and self-loops and repeated edges are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from hardneg.core.errors import ArgumentError

NodeFeatures = Annotated[Tensor, "n f"]
EdgeIndex = Annotated[Tensor, "2 m"]
Counts = Annotated[Tensor, "g"]

MAX_DEGREE = 100


@dataclass(frozen=True, eq=False)
class Graphs:
    """Undirected graphs: node features of all of them, their edges, and how many of both each has.

    >>> graphs = pack([torch.ones(3, 1), torch.ones(2, 1)], [torch.tensor([[0, 1], [1, 2]]), torch.tensor([[0], [1]])])
    >>> len(graphs), graphs.num_nodes.tolist(), graphs.edges.tolist()
    (2, [3, 2], [[0, 1, 3], [1, 2, 4]])
    >>> graphs[torch.tensor([1])].edge_index.tolist()
    [[0, 1], [1, 0]]
    """

    x: NodeFeatures  # numbers of any type
    edges: EdgeIndex  # rows of x; each edge once; those of a graph beside each other, in the order of the graphs
    num_nodes: Counts  # int64
    num_edges: Counts  # int64

    def __len__(self) -> int:
        return len(self.num_nodes)

    @cached_property
    def batch(self) -> Annotated[Tensor, "n"]:
        """The graph of each node."""
        return _owners(self.num_nodes, len(self.x))

    @cached_property
    def edge_batch(self) -> Annotated[Tensor, "m"]:
        """The graph of each edge."""
        return _owners(self.num_edges, self.edges.shape[1])

    @cached_property
    def starts(self) -> Counts:
        """The first node of each graph."""
        return self.num_nodes.cumsum(0) - self.num_nodes

    @cached_property
    def edge_index(self) -> Annotated[Tensor, "2 2m"]:
        """Each edge in both directions."""
        return torch.cat([self.edges, self.edges.flip(0)], dim=1)

    @property
    def num_features(self) -> int:
        return self.x.shape[1]

    @property
    def device(self) -> torch.device:
        return self.x.device

    def __getitem__(self, index: Tensor | slice) -> Graphs:
        """The graphs of these positions, also repeated ones, or of a mask or slice."""
        if isinstance(index, slice):
            index = torch.arange(len(self), device=self.device)[index]
        elif index.dtype == torch.bool:
            index = torch.nonzero(index)[:, 0]
        num_nodes, num_edges = self.num_nodes[index], self.num_edges[index]
        nodes = _runs(self.starts[index], num_nodes)
        edges = _runs((self.num_edges.cumsum(0) - self.num_edges)[index], num_edges)
        moved = (num_nodes.cumsum(0) - num_nodes - self.starts[index]).repeat_interleave(num_edges)
        return Graphs(self.x[nodes], self.edges[:, edges] + moved, num_nodes, num_edges)

    def to(self, device: torch.device | str) -> Graphs:
        return Graphs(*(part.to(device) for part in (self.x, self.edges, self.num_nodes, self.num_edges)))

    def joined(self, others: Sequence[Graphs]) -> Graphs:
        """These graphs and the others behind them."""
        parts, before, shifted = [self, *others], 0, []
        for part in parts:
            shifted.append(part.edges + before)
            before += len(part.x)
        return Graphs(
            torch.cat([part.x for part in parts]),
            torch.cat(shifted, dim=1),
            torch.cat([part.num_nodes for part in parts]),
            torch.cat([part.num_edges for part in parts]),
        )

    def float(self) -> Graphs:
        """With features as encoders take them."""
        return replace(self, x=self.x.float())


def pack(nodes: Sequence[NodeFeatures], edges: Sequence[EdgeIndex]) -> Graphs:
    """Graphs from the features of their nodes and their edges, in one or in both directions, one tensor for each."""
    if not len(nodes) or len(nodes) != len(edges):
        raise ArgumentError("Graphs", "nodes and edges of one graph or more", f"{len(nodes)} and {len(edges)} tensors")
    num_nodes = torch.tensor([len(part) for part in nodes], dtype=torch.int64)
    num_edges = torch.tensor([part.shape[1] for part in edges], dtype=torch.int64)
    return simple(torch.cat(list(nodes)), torch.cat(list(edges), dim=1), num_nodes, num_edges)


def simple(x: NodeFeatures, edges: EdgeIndex, num_nodes: Counts, num_edges: Counts) -> Graphs:
    """Graphs from edges that count the nodes of their own graph from 0: each once, none from a node to itself."""
    who, size = "Graphs", num_nodes.repeat_interleave(num_edges)
    if len(num_nodes) == 0 or int(num_nodes.min()) < 1:
        raise ArgumentError(who, "at least one graph, and a node in each", f"sizes={num_nodes.tolist()[:5]}")
    if edges.numel() and bool(((edges < 0) | (edges >= size)).any()):
        wrong = int(torch.nonzero(((edges < 0) | (edges >= size)).any(0))[0, 0])
        graph = int(_owners(num_edges, edges.shape[1])[wrong])
        got = f"the edge {edges[:, wrong].tolist()} in graph {graph} of {int(num_nodes[graph])} nodes"
        raise ArgumentError(who, "edges between nodes of their graph", got)
    low, high = (edges + (num_nodes.cumsum(0) - num_nodes).repeat_interleave(num_edges)).sort(dim=0).values
    codes = (low * len(x) + high)[low != high].sort().values  # sorted by the lower node, and so by the graph
    codes = codes[torch.cat([codes.new_ones(len(codes[:1]), dtype=torch.bool), codes.diff() > 0])]  # each once
    kept = torch.stack([codes // len(x), codes % len(x)])
    owner = _owners(num_nodes, len(x))[kept[0]]
    return Graphs(x, kept, num_nodes, torch.bincount(owner, minlength=len(num_nodes)))


def degrees(graphs: Graphs) -> Annotated[Tensor, "n"]:
    return torch.bincount(graphs.edges.flatten(), minlength=len(graphs.x))


def with_degrees(graphs: Graphs, max_degree: int = MAX_DEGREE) -> Graphs:
    """The same graphs with the degree of a node as its features, one of ``max_degree`` + 1 columns being 1.

    Higher degrees share the last column. They are those of the graph as it was read: augmentations do not change them.
    """
    return replace(graphs, x=one_hot(degrees(graphs).clamp(max=max_degree), max_degree + 1).to(torch.uint8))


def from_geometric(items: Sequence[Any]) -> tuple[Graphs, Annotated[Tensor, "g"] | None]:
    """Graphs and labels of a sequence of PyG's ``Data``: ``x``, ``edge_index``, and ``y`` where all of them have one.

    Without ``x``, the features are one-hot degrees. Attributes of edges are not used.
    """
    sizes = [int(item.num_nodes) for item in items]
    bare = [getattr(item, "x", None) is None for item in items]
    if any(bare) and not all(bare):
        raise ArgumentError("Graphs", "node features of all graphs or of none", f"{sum(bare)} of {len(bare)} without")
    nodes = [torch.ones(n, 1) if all(bare) else item.x.reshape(n, -1) for n, item in zip(sizes, items, strict=True)]
    graphs = pack(nodes, [item.edge_index.long() for item in items])
    labels = [getattr(item, "y", None) for item in items]
    known = all(isinstance(label, Tensor) and label.numel() == 1 for label in labels)
    found = torch.stack([label.reshape(()) for label in labels]) if known else None  # type: ignore[union-attr]
    return with_degrees(graphs) if all(bare) else graphs, found


def _owners(counts: Counts, total: int) -> Tensor:
    return torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=total)


def _runs(starts: Counts, lengths: Counts) -> Tensor:
    """start, start + 1, ... of each start, as many as its length."""
    before = lengths.cumsum(0) - lengths
    total = int(lengths.sum())
    return torch.arange(total, device=starts.device) + (starts - before).repeat_interleave(lengths, output_size=total)
