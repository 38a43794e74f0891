"""GraphCL's augmentations (You et al. 2020): whole batches of graphs, drawn by (seed, epoch, id, view) alone.

    node_drop         ratio of the nodes go, with their edges
    edge_perturb      ratio of the edges go, and as many pairs of nodes become edges, if they are none yet
    attribute_mask    the features of ratio of the nodes become 0
    subgraph          the part that grows from a random node by random neighbours; 1 - ratio of the nodes stay

Each is the paper's, with its ratio of 0.2. The authors' code for TU data differs from it: its node drop keeps the edges
among the nodes that it means to drop, and its subgraph those outside; edges are only removed, one direction at a time;
masked features become noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from hardneg.core.errors import UnknownName, check_range
from hardneg.core.keyed import uniforms
from hardneg.training.data.packed import Counts, Graphs

GraphIds = Annotated[Tensor, "g"]

PER_GRAPH, PER_NODE, PER_EDGE = 0, 1, 2  # streams of random numbers
NUM_STREAMS = 3


@dataclass(frozen=True)
class Draw:
    """Random numbers of the nodes and edges of a batch: they depend on the id of the graph, not on its place."""

    graphs: Graphs
    ids: GraphIds
    view: int
    epoch: int
    seed: int

    def per_graph(self, num: int) -> Annotated[Tensor, "num g"]:
        return self._uniforms(num, self.ids, PER_GRAPH)

    def per_node(self, num: int) -> Annotated[Tensor, "num n"]:
        place = torch.arange(len(self.graphs.x), device=self.ids.device) - self.graphs.starts[self.graphs.batch]
        return self._uniforms(num, _joint(self.ids[self.graphs.batch], place), PER_NODE)

    def per_edge(self, num: int) -> Annotated[Tensor, "num m"]:
        counts, owner = self.graphs.num_edges, self.graphs.edge_batch
        place = torch.arange(len(owner), device=self.ids.device) - (counts.cumsum(0) - counts)[owner]
        return self._uniforms(num, _joint(self.ids[owner], place), PER_EDGE)

    def _uniforms(self, num: int, rows: Tensor, stream: int) -> Tensor:
        view = torch.full_like(rows, NUM_STREAMS * self.view + stream)
        return uniforms(num, rows, view, self.epoch, self.seed)


def node_drop(graphs: Graphs, draw: Draw, ratio: float) -> Graphs:
    dropped = _lowest(draw.per_node(1)[0], graphs.batch, _share(graphs.num_nodes, ratio))
    return keep_nodes(graphs, ~dropped)


def subgraph(graphs: Graphs, draw: Draw, ratio: float) -> Graphs:
    """Nodes in the order in which they join: each time one of the neighbours of the part, all alike.

    A node joins an exponential time after its first neighbour did: these times have no memory, so that all that wait
    are equally likely to be next. So the order is that of the shortest paths, and no step is taken one by one.
    Of a graph in pieces, only nodes of the start's piece stay.
    """
    waiting = -torch.log1p(-draw.per_node(1)[0].double()) + 1e-9  # positive, so that paths end
    start = graphs.starts + _whole(draw.per_graph(1)[0], graphs.num_nodes)
    joined = torch.full_like(waiting, torch.inf).index_fill(0, start, 0.0)
    source, target = graphs.edge_index
    while True:
        earlier = joined.scatter_reduce(0, target, joined[source] + waiting[target], "amin")
        if torch.equal(earlier, joined):
            break
        joined = earlier
    num_kept = graphs.num_nodes - _share(graphs.num_nodes, ratio)
    kept = _lowest(joined, graphs.batch, num_kept) & torch.isfinite(joined)
    return keep_nodes(graphs, kept)


def attribute_mask(graphs: Graphs, draw: Draw, ratio: float) -> Graphs:
    masked = _lowest(draw.per_node(1)[0], graphs.batch, _share(graphs.num_nodes, ratio))
    return replace(graphs, x=graphs.x.masked_fill(masked[:, None], 0))


def edge_perturb(graphs: Graphs, draw: Draw, ratio: float) -> Graphs:
    order, first, second = draw.per_edge(3)
    num_moved = _share(graphs.num_edges, ratio)
    moved = _lowest(order, graphs.edge_batch, num_moved)
    owner = graphs.edge_batch[moved]
    size, start = graphs.num_nodes[owner], graphs.starts[owner]
    one = _whole(first[moved], size)
    # A second node beside the first; in a graph of one node there is none, and no edge to move either.
    other = (one + 1 + _whole(second[moved], size - 1)) % size
    drawn = torch.stack([start + torch.minimum(one, other), start + torch.maximum(one, other)])
    edges = torch.cat([graphs.edges[:, ~moved], drawn], dim=1)
    codes = torch.unique(edges[0] * len(graphs.x) + edges[1])  # an edge that is drawn twice, or is there, is one
    edges = torch.stack([codes // len(graphs.x), codes % len(graphs.x)])
    counts = torch.bincount(graphs.batch[edges[0]], minlength=len(graphs))
    return replace(graphs, edges=edges, num_edges=counts)


AUGMENTATIONS: dict[str, Callable[[Graphs, Draw, float], Graphs]] = {
    "node_drop": node_drop,
    "edge_perturb": edge_perturb,
    "attribute_mask": attribute_mask,
    "subgraph": subgraph,
}


@dataclass(frozen=True)
class GraphAugment:
    """Two views of each graph; each by one of the augmentations, which is drawn for the graph and the view.

    ``first`` and ``second`` name them: "random" is any of the four, "none" leaves the graph as it is, and several
    are joined with "+". The authors' code contrasts the graph itself with one view: ``first="none"``.

    >>> from hardneg.training.data.packed import pack
    >>> graphs = pack([torch.ones(5, 1)] * 4, [torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])] * 4)
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
        first, second = (self._view(graphs, ids, view, epoch, seed) for view in (0, 1))
        return first, second

    def _view(self, graphs: Graphs, ids: GraphIds, view: int, epoch: int, seed: int) -> Graphs:
        kinds, graphs = kinds_of((self.first, self.second)[view]), graphs.float()
        if not kinds:
            return graphs
        # The second number of a graph: the first one is the start of its subgraph.
        drawn = Draw(graphs, ids, view, epoch, seed).per_graph(2)[1]
        which = _whole(drawn, torch.full_like(ids, len(kinds)))
        places = [torch.nonzero(which == i)[:, 0] for i in range(len(kinds))]
        parts = []
        for kind, place in zip(kinds, places, strict=True):
            part = graphs[place]
            parts.append(AUGMENTATIONS[kind](part, Draw(part, ids[place], view, epoch, seed), self.ratio))
        return parts[0].joined(parts[1:])[torch.argsort(torch.cat(places))]


def kinds_of(names: str) -> list[str]:
    """The augmentations that a text names, each once."""
    if names == "none":
        return []
    chosen = list(AUGMENTATIONS) if names == "random" else names.split("+")
    for name in chosen:
        if name not in AUGMENTATIONS:
            raise UnknownName(name, [*AUGMENTATIONS, "random", "none"], "as views of graphs")
    return [name for name in AUGMENTATIONS if name in chosen]


def keep_nodes(graphs: Graphs, kept: Annotated[Tensor, "n"]) -> Graphs:
    """The graphs of these nodes and the edges between them."""
    place = kept.cumsum(0) - 1
    whole = kept[graphs.edges].all(0)
    return Graphs(
        graphs.x[kept],
        place[graphs.edges[:, whole]],
        torch.bincount(graphs.batch[kept], minlength=len(graphs)),
        torch.bincount(graphs.edge_batch[whole], minlength=len(graphs)),
    )


def _whole(u: Tensor, below: Tensor) -> Tensor:
    """A whole number in [0, below) of a number in [0, 1); in float64, since 24 bits times a size is not exact."""
    return (u.double() * below).long()


def _share(counts: Counts, ratio: float) -> Counts:
    """floor(ratio n)."""
    return (counts.double() * ratio + 1e-9).long()


def _lowest(keys: Tensor, owner: Tensor, counts: Counts) -> Tensor:
    """True for the ``counts`` lowest keys of each graph; equal ones by their place."""
    order = torch.argsort(keys, stable=True)
    order = order[torch.argsort(owner[order], stable=True)]  # by graph, then by key
    sizes = torch.bincount(owner, minlength=len(counts))
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - (sizes.cumsum(0) - sizes)[owner[order]]
    return rank < counts[owner]


def _joint(ids: Tensor, place: Tensor) -> Tensor:
    """One number of 64 bits of a graph's id and a place in it, both below 2 ** 32."""
    return (place << 32) | ids
