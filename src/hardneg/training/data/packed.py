"""Graphs of different sizes, packed into a few tensors: a batch is one large graph with disconnected parts.

    graphs = pack([nodes [n, f], ...], [edges [2, m], ...])      plain tensors, one of each per graph
    graphs = from_geometric(dataset)                            any sequence of PyG's Data
    graphs[torch.tensor([3, 0])]                                a batch, in this order
    graphs.x, graphs.edge_index, graphs.batch                   as PyG's layers expect them

Graphs are undirected and simple: an edge is stored once, and self-loops and repeated edges are dropped.
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
"""Degrees with their own feature; higher ones share the last."""


@dataclass(frozen=True, eq=False)
class Graphs:
    """Undirected graphs: the features of all nodes, all edges, and the sizes of the graphs.

    Attributes:
        x: Node features [n, f] of any number type.
        edges: Edges [2, m] as rows of ``x``, each once, grouped by graph in the order of the graphs.
        num_nodes: Number of nodes of each graph, int64 [g].
        num_edges: Number of edges of each graph, int64 [g].

    Example:
        >>> nodes = [torch.ones(3, 1), torch.ones(2, 1)]
        >>> graphs = pack(nodes, [torch.tensor([[0, 1], [1, 2]]), torch.tensor([[0], [1]])])
        >>> len(graphs), graphs.num_nodes.tolist(), graphs.edges.tolist()
        (2, [3, 2], [[0, 1, 3], [1, 2, 4]])
        >>> graphs[torch.tensor([1])].edge_index.tolist()
        [[0, 1], [1, 0]]
    """

    x: NodeFeatures
    edges: EdgeIndex
    num_nodes: Counts
    num_edges: Counts

    def __len__(self) -> int:
        return len(self.num_nodes)

    @cached_property
    def batch(self) -> Annotated[Tensor, "n"]:
        """The graph of each node, [n]."""
        return _owners(self.num_nodes, len(self.x))

    @cached_property
    def edge_batch(self) -> Annotated[Tensor, "m"]:
        """The graph of each edge, [m]."""
        return _owners(self.num_edges, self.edges.shape[1])

    @cached_property
    def starts(self) -> Counts:
        """The first node of each graph, [g]."""
        return self.num_nodes.cumsum(0) - self.num_nodes

    @cached_property
    def edge_index(self) -> Annotated[Tensor, "2 2m"]:
        """Each edge in both directions, [2, 2m]."""
        return torch.cat([self.edges, self.edges.flip(0)], dim=1)

    @property
    def num_features(self) -> int:
        """Number of features of each node."""
        return self.x.shape[1]

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.x.device

    def __getitem__(self, index: Tensor | slice) -> Graphs:
        """Return the graphs at positions (possibly repeated), or those of a mask or slice."""
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
        """Move all tensors to a device."""
        return Graphs(*(part.to(device) for part in (self.x, self.edges, self.num_nodes, self.num_edges)))

    def joined(self, others: Sequence[Graphs]) -> Graphs:
        """Return one batch of these graphs followed by the others."""
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
        """Return the graphs with float features, as encoders need them."""
        return replace(self, x=self.x.float())


def pack(nodes: Sequence[NodeFeatures], edges: Sequence[EdgeIndex]) -> Graphs:
    """Pack graphs given as one tensor of node features and one of edges each.

    Args:
        nodes: Features [n, f] of each graph.
        edges: Edges [2, m] of each graph, counting its nodes from 0, in one or both directions.

    Raises:
        ArgumentError: If there is no graph, the numbers of tensors differ, or an edge is out of range.
    """
    if not len(nodes) or len(nodes) != len(edges):
        raise ArgumentError("Graphs", "nodes and edges of one graph or more", f"{len(nodes)} and {len(edges)} tensors")
    num_nodes = torch.tensor([len(part) for part in nodes], dtype=torch.int64)
    num_edges = torch.tensor([part.shape[1] for part in edges], dtype=torch.int64)
    return simple(torch.cat(list(nodes)), torch.cat(list(edges), dim=1), num_nodes, num_edges)


def simple(x: NodeFeatures, edges: EdgeIndex, num_nodes: Counts, num_edges: Counts) -> Graphs:
    """Build simple graphs: each edge once, without self-loops.

    Args:
        x: Features of all nodes [n, f], grouped by graph.
        edges: Edges [2, m], grouped by graph, counting the nodes of their own graph from 0.
        num_nodes: Number of nodes of each graph [g].
        num_edges: Number of edges of each graph [g].

    Raises:
        ArgumentError: If a graph has no node or an edge is out of range.
    """
    who, size = "Graphs", num_nodes.repeat_interleave(num_edges)
    if len(num_nodes) == 0 or int(num_nodes.min()) < 1:
        raise ArgumentError(who, "at least one graph, and a node in each", f"sizes={num_nodes.tolist()[:5]}")
    if edges.numel() and bool(((edges < 0) | (edges >= size)).any()):
        wrong = int(torch.nonzero(((edges < 0) | (edges >= size)).any(0))[0, 0])
        graph = int(_owners(num_edges, edges.shape[1])[wrong])
        got = f"the edge {edges[:, wrong].tolist()} in graph {graph} with {int(num_nodes[graph])} nodes"
        raise ArgumentError(who, "edges between nodes of the same graph", got)
    low, high = (edges + (num_nodes.cumsum(0) - num_nodes).repeat_interleave(num_edges)).sort(dim=0).values
    codes = (low * len(x) + high)[low != high].sort().values  # sorted by the lower node, and so by the graph
    codes = codes[torch.cat([codes.new_ones(len(codes[:1]), dtype=torch.bool), codes.diff() > 0])]  # each once
    kept = torch.stack([codes // len(x), codes % len(x)])
    owner = _owners(num_nodes, len(x))[kept[0]]
    return Graphs(x, kept, num_nodes, torch.bincount(owner, minlength=len(num_nodes)))


def degrees(graphs: Graphs) -> Annotated[Tensor, "n"]:
    """Return the degree of each node, [n]."""
    return torch.bincount(graphs.edges.flatten(), minlength=len(graphs.x))


def with_degrees(graphs: Graphs, max_degree: int = MAX_DEGREE) -> Graphs:
    """Replace the features by the one-hot degree of each node, with ``max_degree`` + 1 columns.

    Higher degrees share the last column. Augmentations do not change the features, so they keep the original degrees.

    Args:
        graphs: The graphs.
        max_degree: Largest degree with its own column.
    """
    return replace(graphs, x=one_hot(degrees(graphs).clamp(max=max_degree), max_degree + 1).to(torch.uint8))


def from_geometric(items: Sequence[Any]) -> tuple[Graphs, Annotated[Tensor, "g"] | None]:
    """Pack a sequence of PyG's ``Data``.

    Without ``x``, the features are one-hot degrees. Edge attributes are ignored.

    Args:
        items: Objects with ``edge_index`` and, optionally, ``x`` and ``y``.

    Returns:
        The graphs, and their labels [g] if every item has one in ``y``, else None.

    Raises:
        ArgumentError: If only some of the items have ``x``.
    """
    sizes = [int(item.num_nodes) for item in items]
    bare = [getattr(item, "x", None) is None for item in items]
    if any(bare) and not all(bare):
        got = f"{sum(bare)} of {len(bare)} without"
        raise ArgumentError("Graphs", "node features in all graphs or in none", got)
    nodes = [torch.ones(n, 1) if all(bare) else item.x.reshape(n, -1) for n, item in zip(sizes, items, strict=True)]
    graphs = pack(nodes, [item.edge_index.long() for item in items])
    labels = [getattr(item, "y", None) for item in items]
    known = all(isinstance(label, Tensor) and label.numel() == 1 for label in labels)
    found = torch.stack([label.reshape(()) for label in labels]) if known else None  # type: ignore[union-attr]
    return with_degrees(graphs) if all(bare) else graphs, found


def _owners(counts: Counts, total: int) -> Tensor:
    return torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=total)


def _runs(starts: Counts, lengths: Counts) -> Tensor:
    """Return start, start + 1, ... for each start, ``length`` numbers each."""
    before = lengths.cumsum(0) - lengths
    total = int(lengths.sum())
    return torch.arange(total, device=starts.device) + (starts - before).repeat_interleave(lengths, output_size=total)
