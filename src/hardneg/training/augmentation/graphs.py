"""Batches of graphs, and GraphCL's augmentations (You et al. 2020), keyed by (seed, epoch, id, view) alone.

    node_drop         removes a share ``ratio`` of the nodes with their edges
    edge_perturb      removes a share ``ratio`` of the edges and adds as many random ones
    attribute_mask    sets the features of a share ``ratio`` of the nodes to 0
    subgraph          keeps a share 1 - ``ratio`` of the nodes, grown from a random node along random neighbours

They follow the paper, with its ratio of 0.2. The authors' code for TU data differs: its node drop keeps the edges among
the nodes to drop, its subgraph those outside; edges are only removed, one direction at a time; masked features become
noise.

A batch is PyG's: one large graph with disconnected parts. ``GraphData`` (data/graphs.py) collates it from a list of
``Data`` and calls ``GraphAugment.views``. All augmentations work on whole batches: one graph at a time, they would take
longer than the training step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

import torch
from torch import Tensor

from hardneg.core.errors import UnknownName, check_range, optional
from hardneg.core.keyed import uniforms

Counts = Annotated[Tensor, "g"]
GraphIds = Annotated[Tensor, "g"]

PER_GRAPH, PER_NODE, PER_EDGE = 0, 1, 2  # streams of random numbers
NUM_STREAMS = 3


@dataclass(frozen=True, eq=False)
class Graphs:
    """A batch of undirected graphs as an encoder's inputs: the tensors of PyG's ``Batch``, with a length and slices.

    Attributes:
        x: Node features [n, f], grouped by graph.
        edge_index: Edges [2, m] in both directions.
        batch: Graph of each node [n], non-decreasing.
        num_graphs: Number of graphs; some may have no node.

    Example:
        >>> from torch_geometric.data import Data
        >>> path = Data(x=torch.ones(3, 1), edge_index=torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]))
        >>> graphs = Graphs.collate([path, path])
        >>> len(graphs), graphs.num_nodes.tolist(), graphs[1:].edge_index.tolist()
        (2, [3, 3], [[0, 1, 1, 2], [1, 0, 2, 1]])
    """

    x: Annotated[Tensor, "n f"]
    edge_index: Annotated[Tensor, "2 m"]
    batch: Annotated[Tensor, "n"]
    num_graphs: int

    @classmethod
    def collate(cls, items: Sequence[Any]) -> Graphs:
        """Return one batch of PyG's ``Data`` with ``x`` and ``edge_index``."""
        whole = optional("torch_geometric.data", "graphs", extra="graphs").Batch.from_data_list(items)
        return cls(whole.x, whole.edge_index, whole.batch, len(items))

    def __len__(self) -> int:
        return self.num_graphs

    @cached_property
    def num_nodes(self) -> Counts:
        """Number of nodes of each graph, [g]."""
        return torch.bincount(self.batch, minlength=self.num_graphs)

    @cached_property
    def starts(self) -> Counts:
        """The first node of each graph, [g]."""
        return self.num_nodes.cumsum(0) - self.num_nodes

    @cached_property
    def edges(self) -> Annotated[Tensor, "2 e"]:
        """Each edge once, from its lower node to its higher one, [2, e]."""
        return self.edge_index[:, self.edge_index[0] < self.edge_index[1]]

    def subgraph(self, kept: Annotated[Tensor, "n"]) -> Graphs:
        """Return the graphs of the nodes where ``kept`` [n] is true, and the edges between them."""
        subgraph = optional("torch_geometric.utils", "graphs", extra="graphs").subgraph
        edge_index, _ = subgraph(kept, self.edge_index, relabel_nodes=True, num_nodes=len(kept))
        return Graphs(self.x[kept], edge_index, self.batch[kept], self.num_graphs)

    def __getitem__(self, rows: slice) -> Graphs:
        """Return the graphs of a slice without a step."""
        start, stop, _ = rows.indices(len(self))
        found = self.subgraph((self.batch >= start) & (self.batch < stop))
        return replace(found, batch=found.batch - start, num_graphs=max(stop - start, 0))

    def to(self, device: torch.device | str) -> Graphs:
        """Move all tensors to a device."""
        return Graphs(self.x.to(device), self.edge_index.to(device), self.batch.to(device), self.num_graphs)

    def joined(self, others: Sequence[Graphs]) -> Graphs:
        """Return one batch of these graphs followed by the others."""
        parts, nodes, graphs, edges, batch = [self, *others], 0, 0, [], []
        for part in parts:
            edges.append(part.edge_index + nodes)
            batch.append(part.batch + graphs)
            nodes, graphs = nodes + len(part.x), graphs + len(part)
        return Graphs(torch.cat([part.x for part in parts]), torch.cat(edges, dim=1), torch.cat(batch), graphs)

    def float(self) -> Graphs:
        """Return the graphs with float features, as encoders need them."""
        return replace(self, x=self.x.float())


@dataclass(frozen=True)
class Draw:
    """Random numbers for the graphs, nodes and edges of a batch, which depend on a graph's id and not on its position.

    Numbers of graphs and nodes are drawn once for the whole batch, since drawing a few takes as long as drawing many.

    Attributes:
        key: Id of each graph [g], view (0 or 1), epoch and seed.
        of_graphs: Two uniform numbers for each graph, [2, g].
        of_nodes: A uniform number for each node, [n].
    """

    key: tuple[GraphIds, int, int, int]
    of_graphs: Annotated[Tensor, "2 g"]
    of_nodes: Annotated[Tensor, "n"]

    @classmethod
    def of(cls, graphs: Graphs, *key: Any) -> Draw:
        """Return the numbers of a batch for its ids, a view, an epoch and a seed."""
        place = torch.arange(len(graphs.x), device=graphs.batch.device) - graphs.starts[graphs.batch]
        nodes = _uniforms(1, _joint(key[0][graphs.batch], place), PER_NODE, *key[1:])[0]
        return cls(key, _uniforms(2, key[0], PER_GRAPH, *key[1:]), nodes)  # type: ignore[arg-type]

    def part(self, kept: Annotated[Tensor, "n"]) -> Draw:
        """Return the numbers of the nodes where ``kept`` [n] is true, which keeps or removes whole graphs."""
        return replace(self, of_nodes=self.of_nodes[kept])

    def of_edges(self, graphs: Graphs) -> Annotated[Tensor, "3 e"]:
        """Return three uniform numbers for each edge in ``graphs.edges``, [3, e]."""
        owner = graphs.batch[graphs.edges[0]]
        place = torch.arange(len(owner), device=owner.device) - torch.searchsorted(owner, owner)
        return _uniforms(3, _joint(self.key[0][owner], place), PER_EDGE, *self.key[1:])


def _uniforms(num: int, rows: Tensor, stream: int, view: int, epoch: int, seed: int) -> Annotated[Tensor, "num n"]:
    return uniforms(num, rows, torch.full_like(rows, NUM_STREAMS * view + stream), epoch, seed)


def node_drop(graphs: Graphs, draw: Draw, ratio: float) -> Graphs:
    """Remove floor(ratio n) random nodes of each graph, with their edges.

    Args:
        graphs: The batch.
        draw: Its random numbers.
        ratio: Share of the nodes.
    """
    dropped = _lowest(draw.of_nodes, graphs.batch, _share(graphs.num_nodes, ratio))
    return graphs.subgraph(~dropped)


def subgraph(graphs: Graphs, draw: Draw, ratio: float) -> Graphs:
    """Keep n - floor(ratio n) nodes of each graph: a random start, then repeatedly a random neighbour of the kept part.

    Each neighbour of the part is equally likely to be next. This is equivalent to a node joining an exponential waiting
    time after its first neighbour, since such times are memoryless; so the order of joining is the order of shortest
    path lengths, and no sequential growth is needed. In a disconnected graph, only nodes of the start's component are
    kept.

    Args:
        graphs: The batch.
        draw: Its random numbers.
        ratio: Share of the nodes to remove.
    """
    waiting = -torch.log1p(-draw.of_nodes.double()) + 1e-9  # positive, so that shortest paths are finite
    start = graphs.starts + _whole(draw.of_graphs[0], graphs.num_nodes)
    start = start[graphs.num_nodes > 0]
    joined = torch.full_like(waiting, torch.inf).index_fill(0, start, 0.0)
    source, target = graphs.edge_index
    while True:
        earlier = joined.scatter_reduce(0, target, joined[source] + waiting[target], "amin")
        if torch.equal(earlier, joined):
            break
        joined = earlier
    num_kept = graphs.num_nodes - _share(graphs.num_nodes, ratio)
    kept = _lowest(joined, graphs.batch, num_kept) & torch.isfinite(joined)
    return graphs.subgraph(kept)


def attribute_mask(graphs: Graphs, draw: Draw, ratio: float) -> Graphs:
    """Set the features of floor(ratio n) random nodes of each graph to 0.

    Args:
        graphs: The batch.
        draw: Its random numbers.
        ratio: Share of the nodes.
    """
    masked = _lowest(draw.of_nodes, graphs.batch, _share(graphs.num_nodes, ratio))
    return replace(graphs, x=graphs.x.masked_fill(masked[:, None], 0))


def edge_perturb(graphs: Graphs, draw: Draw, ratio: float) -> Graphs:
    """Replace floor(ratio m) random edges of each graph with random pairs of nodes.

    A pair that is drawn twice or is an edge already is kept once, so the number of edges may shrink.

    Args:
        graphs: The batch.
        draw: Its random numbers.
        ratio: Share of the edges.
    """
    order, first, second = draw.of_edges(graphs)
    owner = graphs.batch[graphs.edges[0]]
    moved = _lowest(order, owner, _share(torch.bincount(owner, minlength=len(graphs)), ratio))
    size, start = graphs.num_nodes[owner[moved]], graphs.starts[owner[moved]]
    one = _whole(first[moved], size)
    # A second node other than the first; a graph with one node has neither, but no edge to move either.
    other = (one + 1 + _whole(second[moved], size - 1)) % size
    edges = torch.cat([graphs.edges[:, ~moved], torch.stack([start + one, start + other])], dim=1)
    to_undirected = optional("torch_geometric.utils", "graphs", extra="graphs").to_undirected
    return replace(graphs, edge_index=to_undirected(edges, num_nodes=len(graphs.x)))  # removes duplicates


AUGMENTATIONS: dict[str, Callable[[Graphs, Draw, float], Graphs]] = {
    "node_drop": node_drop,
    "edge_perturb": edge_perturb,
    "attribute_mask": attribute_mask,
    "subgraph": subgraph,
}


@dataclass(frozen=True)
class GraphAugment:
    """Two views of each graph; for each graph and view, one of the allowed augmentations is drawn.

    Attributes:
        first: Augmentations of the first view: "random" for any of the four, "none" for the graph itself, or names
            joined by "+". The authors' code contrasts the graph itself with one view: ``first="none"``.
        second: Augmentations of the second view.
        ratio: Share of nodes or edges that an augmentation changes.

    Example:
        >>> from torch_geometric.data import Data
        >>> cycle = torch.tensor([[0, 1, 2, 3, 4, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 0, 1, 2, 3, 4]])
        >>> graphs = Graphs.collate([Data(x=torch.ones(5, 1), edge_index=cycle)] * 4)
        >>> first, second = GraphAugment("node_drop", "none").views(graphs, ids=torch.arange(4), epoch=0, seed=0)
        >>> first.num_nodes.tolist(), second.num_nodes.tolist()
        ([4, 4, 4, 4], [5, 5, 5, 5])
    """

    first: str = "random"
    second: str = "random"
    ratio: float = 0.2

    def __post_init__(self) -> None:
        check_range("GraphAugment", "ratio", self.ratio, 0.0, 1.0, open_high=True)
        for names in (self.first, self.second):
            kinds_of(names)

    def views(self, graphs: Graphs, ids: GraphIds, epoch: int, seed: int) -> tuple[Graphs, Graphs]:
        """Return two views of a batch, with float features.

        Args:
            graphs: The batch.
            ids: Id of each graph [g].
            epoch: The epoch, part of the random key.
            seed: The seed, part of the random key.
        """
        first, second = (self._view(graphs, ids, view, epoch, seed) for view in (0, 1))
        return first, second

    def _view(self, graphs: Graphs, ids: GraphIds, view: int, epoch: int, seed: int) -> Graphs:
        kinds, graphs = kinds_of((self.first, self.second)[view]), graphs.float()
        if not kinds:
            return graphs
        draw = Draw.of(graphs, ids, view, epoch, seed)
        # The second number of each graph: ``subgraph`` uses the first one for its start.
        which = _whole(draw.of_graphs[1], torch.full_like(ids, len(kinds)))[graphs.batch]  # [n]
        parts = []
        for i, kind in enumerate(kinds):
            part = graphs.subgraph(which == i)  # the other graphs have no node here
            parts.append(AUGMENTATIONS[kind](part, draw.part(which == i), self.ratio))
        found = parts[0].joined(parts[1:])
        owner, order = (found.batch % len(graphs)).sort(stable=True)
        place = torch.empty_like(order).index_copy(0, order, torch.arange(len(order), device=order.device))
        return Graphs(found.x[order], place[found.edge_index], owner, len(graphs))


def kinds_of(names: str) -> list[str]:
    """Parse names of augmentations joined by "+", without duplicates and in the order of ``AUGMENTATIONS``.

    >>> kinds_of("subgraph+node_drop"), kinds_of("none")
    (['node_drop', 'subgraph'], [])
    """
    if names == "none":
        return []
    chosen = list(AUGMENTATIONS) if names == "random" else names.split("+")
    for name in chosen:
        if name not in AUGMENTATIONS:
            raise UnknownName(name, [*AUGMENTATIONS, "random", "none"], "as views of graphs")
    return [name for name in AUGMENTATIONS if name in chosen]


def _whole(u: Tensor, below: Tensor) -> Tensor:
    """Map uniform numbers in [0, 1) to integers in [0, below); in float64, since 24 bits times a size is not exact."""
    return (u.double() * below).long()


def _share(counts: Counts, ratio: float) -> Counts:
    """Return floor(ratio n), robust to rounding errors."""
    return (counts.double() * ratio + 1e-9).long()


def _lowest(keys: Tensor, owner: Tensor, counts: Counts) -> Tensor:
    """Mark the ``counts`` lowest keys of each graph; ties go to the earlier position."""
    order = torch.argsort(keys, stable=True)
    order = order[torch.argsort(owner[order], stable=True)]  # by graph, then by key
    sizes = torch.bincount(owner, minlength=len(counts))
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - (sizes.cumsum(0) - sizes)[owner[order]]
    return rank < counts[owner]


def _joint(ids: Tensor, place: Tensor) -> Tensor:
    """Combine a graph's id and a position in it, both below 2 ** 32, into one 64-bit number."""
    return (place << 32) | ids
