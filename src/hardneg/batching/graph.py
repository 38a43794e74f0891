"""Proximity graph: the closest neighbours of each instance among random candidates (ProSampler, Algorithm 2).

``build_graph`` constructs a ``ProximityGraph`` from embeddings; walks.py and the planners read it, refresh.py renews
it.

Each node is compared with M uniform candidates and keeps the K closest (eq. 3). The paper's C_i is a set without the
node itself; the authors' code draws with replacement and allows the node, hence self loops and repeats. Here there are
none.

A random block of nodes shares one pool of M + 1 candidates, so that the scores are one matrix product instead of a
gather per node. A node in the pool leaves itself out; any other leaves out one candidate at random. Either way its own
candidates are a uniform M-subset of the others; only the independence of different nodes is lost. Pools are cut
from permutations, so that all nodes are candidates equally often.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from hardneg.batching.stored import load_arrays, save_arrays
from hardneg.core.errors import ArgumentError, NotFinite, argument_error, check_among, check_count
from hardneg.search.draws import check_generator
from hardneg.search.exact import DocumentBlock, exact_nearest, screens_in_bfloat16
from hardneg.search.nearest import Corpus, FaissIndex, nearest
from hardneg.search.topk import top_of_rows

GraphRows = Iterator[tuple[Tensor, Tensor, Tensor]]
"""Parts of a graph: nodes [b], their neighbours [b, K] and similarities [b, K]."""

_block = 256  # nodes that share a pool, at most: a larger block is not faster, and ties more nodes together
_pools_per_node = 8  # a node is in M / block pools: with fewer, many nodes would be the neighbour of no other
_chunk_scores = (2**22, 2**26)  # number of scores in memory on a CPU and on a GPU: more is not faster
_int_types = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_approximate_from = 10_000  # number of nodes from which FAISS searches inverted lists
_searched_at_once = 8192  # number of nodes per call of FAISS
_searched_exactly, _most_scores = 256, 2**25  # on a CPU: nodes of a block of products, and products of one
_region_bytes = 2**24  # size of a region of candidates, which should fit the CPU cache


@dataclass(frozen=True, eq=False)
class ProximityGraph:
    """The neighbours of each node, closest first, with their similarities; a frozen value on the CPU.

    Attributes:
        neighbours: Neighbours of each node, shape [n, K]; -1 at the end of a row that has fewer.
        similarities: Similarities of the neighbours, shape [n, K].
        name: How the graph was made.

    Raises:
        ArgumentError: If the shapes differ, or a neighbour is not a node.

    Example:
        >>> graph = ProximityGraph.from_lists([[1, 2], [0], []])
        >>> graph.neighbours.tolist(), graph.degrees.tolist()
        ([[1, 2], [0, -1], [-1, -1]], [2, 1, 0])
    """

    neighbours: Annotated[Tensor, "n K"]
    similarities: Annotated[Tensor, "n K"]
    name: str = "given"

    def __post_init__(self) -> None:
        shape = tuple(self.neighbours.shape)
        if self.neighbours.ndim != 2 or self.neighbours.is_floating_point():
            raise argument_error("ProximityGraph", "whole numbers [n, K]", "neighbours", shape)
        if self.similarities.shape != self.neighbours.shape:
            raise argument_error("ProximityGraph", f"shape {shape}", "similarities", tuple(self.similarities.shape))
        if not self.neighbours.numel():
            return
        low, high = map(int, self.neighbours.aminmax())
        if not -1 <= low <= high < len(self):
            raise argument_error("ProximityGraph", f"nodes in [0, {len(self)})", "neighbours", (low, high))
        if low < 0 and bool(((self.neighbours[:, :-1] < 0) & (self.neighbours[:, 1:] >= 0)).any()):
            raise ArgumentError("ProximityGraph", "-1 only at the end of a row", "-1 before a neighbour")

    def __len__(self) -> int:
        return self.neighbours.shape[0]

    @property
    def num_neighbours(self) -> int:
        """Number of columns, K: the highest possible number of neighbours."""
        return self.neighbours.shape[1]

    @cached_property
    def degrees(self) -> Annotated[Tensor, "n"]:
        """Number of neighbours of each node, shape [n]."""
        if self.num_neighbours and bool((self.neighbours[:, -1] >= 0).all()):
            return torch.full((len(self),), self.num_neighbours)
        return (self.neighbours >= 0).sum(1)

    @cached_property
    def digest(self) -> str:
        """Sixteen hex digits that identify this graph in a plan."""
        # Rows are folded by the powers of an odd number, in whole numbers that wrap around, because hashing every byte
        # takes as long as building the graph on a GPU.
        weights = torch.full((self.num_neighbours,), 0x9E3779B97F4A7C1).cumprod(0)
        hashed = hashlib.sha256(repr((tuple(self.neighbours.shape), self.similarities.dtype)).encode())
        bits = self.similarities.contiguous().view(_int_types[self.similarities.element_size()])
        for part in (self.neighbours, bits):
            hashed.update(torch.mv(part, weights.to(part.dtype)).numpy().data)
        return hashed.hexdigest()[:16]

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]]) -> ProximityGraph:
        """Return a graph from lists of neighbours, with similarity 1."""
        width = max((len(row) for row in rows), default=0)
        padded = [[*row, *[-1] * (width - len(row))] for row in rows]
        neighbours = torch.tensor(padded, dtype=torch.long).reshape(len(rows), width)
        return cls(neighbours, (neighbours >= 0).float(), "given")

    def save(self, path: str | Path) -> None:
        """Write the graph to an .npz file, without pickle and atomically."""
        name = np.array(self.name)
        save_arrays(path, neighbours=self.neighbours.numpy(), similarities=self.similarities.numpy(), name=name)

    @classmethod
    def load(cls, path: str | Path) -> ProximityGraph:
        """Load a saved graph.

        Raises:
            Damaged: If the file has changed since it was saved.
        """

        def made(parts: dict[str, Any]) -> ProximityGraph:
            similarities = torch.from_numpy(parts["similarities"])
            return cls(torch.from_numpy(parts["neighbours"]), similarities, str(parts["name"]))

        return load_arrays("ProximityGraph.load", path, made, "build the graph again")


def build_graph(
    vectors: Annotated[Tensor, "n d"],
    num_neighbours: int,
    num_candidates: int | None,
    generator: torch.Generator | None = None,
    *,
    search: str = "exact",
) -> ProximityGraph:
    """Build the proximity graph N_i = the K of C_i with the largest e_i . e_m, where C_i is M uniform others (eq. 3).

    Vectors are used as given, on any device, with a limited chunk of scores in memory at a time. The graph itself is on
    the CPU, where the walks are. The same seed gives the same graph, on any device if the generator is on the same one;
    a generator on the GPU saves CPU time.

    Args:
        vectors: Embeddings, shape [n, d].
        num_neighbours: Number of neighbours of each node, K.
        num_candidates: Number of random candidates, M; None: all others, which makes the exact kNN graph.
        generator: Source of randomness; None: the global one.
        search: "exact", or "faiss" (extra ``ann``) for ``num_candidates=None``: approximate, with inverted lists, from
            10,000 vectors on.

    Raises:
        ArgumentError: If the vectors are not a floating point matrix, or there are more neighbours than candidates.
        NotFinite: If the vectors contain NaN or infinite values.

    Example:
        >>> vectors = torch.nn.functional.normalize(torch.randn(50, 8), dim=1)
        >>> graph = build_graph(vectors, num_neighbours=5, num_candidates=20)
        >>> graph.neighbours.shape
        torch.Size([50, 5])
    """
    if not isinstance(vectors, Tensor):
        got = type(vectors).__name__
        raise ArgumentError("build_graph", "a tensor of vectors", got, "use torch.as_tensor")
    if generator is not None:
        check_generator("build_graph", generator)
    num_neighbours = check_count("build_graph", "num_neighbours", num_neighbours)
    if num_candidates is not None:
        num_candidates = check_count("build_graph", "num_candidates", num_candidates)
    _check(vectors, num_neighbours, num_candidates, search)
    with torch.no_grad(), torch.autocast(vectors.device.type, enabled=False):
        wide, exponent = in_range(vectors)
        name = f"K={num_neighbours}, M={num_candidates if num_candidates is not None else 'all'}"
        if num_candidates is None:
            rows = _nearest(wide, num_neighbours, search)
            name += ", faiss" if search == "faiss" else ""
        else:
            rows = _sampled(wide, num_neighbours, num_candidates, generator)
        neighbours, similarities = _collected(rows, wide, num_neighbours)
        return ProximityGraph(neighbours, torch.ldexp(similarities, 2 * exponent), name)


def graph_of(data: Tensor | ProximityGraph, k: int, m: int | None, generator: torch.Generator) -> ProximityGraph:
    """Return a graph unchanged, or build one from vectors.

    Args:
        data: A graph, or vectors [n, d].
        k: Number of neighbours, reduced to the number of candidates if there are fewer.
        m: Number of random candidates, reduced to n - 1; None: all others.
        generator: Source of randomness.
    """
    if isinstance(data, ProximityGraph):
        return data
    m = None if m is None else min(m, len(data) - 1)
    return build_graph(data, min(k, len(data) - 1 if m is None else m), m, generator)


def in_range(vectors: Annotated[Tensor, "n d"]) -> tuple[Annotated[Tensor, "n d"], Annotated[Tensor, ""]]:
    """Convert vectors to float32 or wider, scaled by a power of two if their products would overflow or underflow.

    Args:
        vectors: Vectors, shape [n, d].

    Returns:
        The vectors divided by 2^e, and e (0 without scaling).
    """
    wide = vectors.detach().to(torch.promote_types(vectors.dtype, torch.float32))
    exponent = torch.frexp(wide.abs().amax()).exponent.cpu() if wide.numel() else torch.tensor(0)
    if abs(int(exponent)) < 30:
        return wide, torch.zeros_like(exponent)
    return torch.ldexp(wide, -exponent.to(wide.device)), exponent


def as_graph(graph: Any) -> ProximityGraph:
    """Convert lists of neighbours, or any object with ``neighbours`` and optionally ``similarities``, to a graph.

    Raises:
        ArgumentError: If the value is neither.
    """
    if isinstance(graph, ProximityGraph):
        return graph
    if hasattr(graph, "neighbours"):
        neighbours, similarities = torch.as_tensor(graph.neighbours), getattr(graph, "similarities", None)
        plain = (neighbours >= 0).float() if similarities is None else torch.as_tensor(similarities)
        return ProximityGraph(neighbours, plain)
    if isinstance(graph, Iterable):
        return ProximityGraph.from_lists([list(map(int, row)) for row in graph])
    raise argument_error("as_graph", "a ProximityGraph or lists of neighbours", "graph", type(graph).__name__)


def _sampled(vectors: Tensor, k: int, m: int, generator: torch.Generator | None) -> GraphRows:
    """Yield neighbours among random candidates; each random part of the nodes uses a region that fits the CPU cache.

    A pool from a random region is a random pool. Gathering the pools from all of a large data set instead would wait
    for memory at each vector, and the time per node would grow with n.
    """
    n = len(vectors)
    regions = max(1, n // max(m + 1, _region_bytes // (vectors.element_size() * vectors.shape[1])))
    device = generator.device if generator is not None else None
    order = torch.randperm(n, generator=generator, device=device)
    if regions == 1:
        yield from _against_region(order, torch.arange(n), vectors, vectors, k, m, generator)
        return
    others = torch.randperm(n, generator=generator, device=device)
    for nodes, region in zip(order.tensor_split(regions), others.tensor_split(regions), strict=True):
        region = region.sort().values.to(vectors.device)
        yield from _against_region(nodes, region, vectors, _rows(vectors, region), k, m, generator)


def _against_region(
    order: Tensor, region: Tensor, vectors: Tensor, held: Tensor, k: int, m: int, generator: torch.Generator | None
) -> GraphRows:
    """Compare blocks of nodes with their pools, several blocks at once in a batched matrix product."""
    device = vectors.device
    block = min(_block, max(1, m // _pools_per_node))
    blocks = torch.cat([order, order[: -len(order) % block]]).view(-1, block)  # the last block is filled up
    pools, left = _Pools(len(region), m + 1, generator), len(order)
    left_out = torch.randint(m + 1, blocks.shape, generator=generator, device=pools.device).to(device)
    blocks, region = blocks.to(device), region.to(device)
    step = max(1, _chunk_scores[device.type == "cuda"] // ((m + 1) * (block + vectors.shape[1])))
    for nodes, unwanted in zip(torch.split(blocks, step), torch.split(left_out, step), strict=True):
        local = pools.take(len(nodes)).to(device).sort(dim=1).values
        pool = region[local]
        slot = torch.searchsorted(pool, nodes).clamp(max=m)
        own = torch.where(pool.gather(1, slot) == nodes, slot, unwanted)
        scores = torch.bmm(_rows(vectors, nodes), _rows(held, local).transpose(1, 2))
        scores.scatter_(2, own[:, :, None], -torch.inf)
        values, index = top_of_rows(scores.view(-1, m + 1), k, ties=False)
        neighbours = pool.gather(1, index.view(len(nodes), -1)).view(-1, k)
        yield nodes.view(-1)[:left], neighbours[:left], values[:left]
        left -= nodes.numel()


def _rows(vectors: Tensor, index: Tensor) -> Tensor:
    """Return ``vectors[index]``, twice as fast."""
    return vectors.index_select(0, index.view(-1)).view(*index.shape, -1)


def _nearest(vectors: Tensor, k: int, search: str) -> GraphRows:
    """Yield the nearest of all other nodes, by the exact search or the FAISS index that mining uses."""
    n = len(vectors)
    on_cpu = vectors.device.type == "cpu"
    corpus = Corpus(vectors, vectors.device, min(n, _most_scores // _searched_exactly) if on_cpu else n)
    if search == "faiss":
        index = FaissIndex(corpus, "flat" if n < _approximate_from else "ivf", who="build_graph(search='faiss')")
        step, find = _searched_at_once, index.nearest
    elif on_cpu:
        bfloat16 = screens_in_bfloat16(vectors.device, n * n * vectors.shape[1])
        blocks = [DocumentBlock.of(corpus, *block, bfloat16=bfloat16) for block in corpus.blocks()]
        step, find = _searched_exactly, partial(exact_nearest, corpus, blocks)
    else:
        step, find = max(16, _chunk_scores[1] // n), partial(nearest, corpus)
    for nodes in torch.split(torch.arange(n, device=vectors.device), step):
        found = find(vectors[nodes], k, (torch.arange(len(nodes), device=vectors.device), nodes))
        yield nodes, found.rows, found.key.masked_fill(found.rows < 0, 0.0)


class _Pools:
    """Uniform sets of ``size`` of the n nodes, cut from a stream of permutations.

    So all nodes are candidates equally often. Independent pools would leave some nodes out of all of them, and no walk
    could ever reach those. A node's number has no influence, so each pool is uniform on its own.
    """

    def __init__(self, n: int, size: int, generator: torch.Generator | None) -> None:
        self.n, self.size, self.generator = n, size, generator
        self.device = generator.device if generator is not None else None
        self._stream = torch.empty(0, dtype=torch.long, device=self.device)

    def take(self, count: int) -> Annotated[Tensor, "count size"]:
        """Return the next pools."""
        parts, missing = [], count
        while missing:
            if len(self._stream) < self.size:
                self._stream = self._continued(self._stream)
            whole = min(missing, len(self._stream) // self.size)
            parts.append(self._stream[: whole * self.size].view(whole, self.size))
            self._stream = self._stream[whole * self.size :]
            missing -= whole
        return torch.cat(parts)

    def _continued(self, rest: Tensor) -> Tensor:
        """Append a permutation to the rest of the previous one; its nodes come last, so no pool has a node twice."""
        order = torch.randperm(self.n, generator=self.generator, device=self.device)
        is_rest = torch.zeros(self.n, dtype=torch.bool, device=self.device).index_fill_(0, rest, True)[order]
        return torch.cat([rest, order[~is_rest], order[is_rest]])


def _collected(rows: GraphRows, vectors: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Collect all rows where the vectors are, and copy them to the CPU once, to synchronise with a GPU only once."""
    neighbours = torch.empty(len(vectors), k, dtype=torch.int32, device=vectors.device)
    similarities = torch.empty(len(vectors), k, dtype=vectors.dtype, device=vectors.device)
    for nodes, index, values in rows:
        neighbours[nodes] = index.to(torch.int32)
        similarities[nodes] = values.to(vectors.dtype)
    return neighbours.cpu().long(), similarities.cpu()


def _check(vectors: Tensor, k: int, m: int | None, search: str) -> None:
    """Check the arguments of ``build_graph``."""
    if vectors.ndim != 2 or not vectors.is_floating_point():
        raise argument_error("build_graph", "floating point vectors [n, d]", "vectors", tuple(vectors.shape))
    n = len(vectors)
    check_among("build_graph", "search", search, ("exact", "faiss"))
    if m is not None and m >= n:
        what = f"fewer candidates than the {n} vectors"
        raise argument_error(
            "build_graph", what, "num_candidates", m, "use num_candidates=None to compare all with all"
        )
    limit = m if m is not None else n - 1
    if k > limit:
        what = f"at most {limit} neighbours, the number of candidates"
        raise argument_error("build_graph", what, "num_neighbours", k)
    if not bool(torch.isfinite(vectors).all()):
        raise NotFinite("build_graph", "finite vectors", "NaN or inf", "check the encoder's output")
