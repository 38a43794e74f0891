"""Walks over a proximity graph: the first ``size`` distinct nodes in visiting order (ProSampler, Algorithm 3).

A random walk with restart is a sequence of independent excursions from its start. An excursion of no move at all shows
nothing new, so each one here moves at least once and then goes on with probability 1 - restart: the order of first
visits has exactly the distribution of Algorithm 3, no step is lost waiting at the start, and restart = 1, where the
algorithm as printed never ends, becomes its limit (the start and its neighbours, as the paper describes it).

Excursions are made several at a time, in turns, since each move waits for memory and different excursions do not wait
for each other. The inner loop is compiled by numba where the extra ``walks`` is installed; where it is not, numpy moves
all excursions at once (of whole batches, where these ignore each other). A few long excursions leave numpy nothing to
do at once: then the loop runs as plain Python. All three read the same draws and so visit the same nodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardneg.batching.graph import ProximityGraph, as_graph
from hardneg.batching.walk_lanes import Tables, collect, paths
from hardneg.batching.walk_loop import compiled_loop, walk_on
from hardneg.core.errors import argument_error, check_range, optional

kinds = ("restart", "random", "breadth_first", "depth_first")
steps_by = ("uniform", "similarity")

Nodes = NDArray[np.int64]
Visit = Callable[[Any, Any, Any], Any]
"""Adds what some excursions find to ``found``: called with taken, found and counts."""

_lanes = 20  # excursions from which numpy is faster than plain Python


def walk(
    graph: ProximityGraph,
    start: int,
    size: int,
    restart: float,
    generator: torch.Generator | None = None,
    *,
    kind: str = "restart",
    steps: str = "uniform",
) -> Annotated[Tensor, "size"]:
    """The first ``size`` distinct nodes of a walk from ``start``, in visiting order.

    ``kind``: ``"restart"`` (Algorithm 3), ``"random"`` (never returns), ``"breadth_first"`` (closest neighbours first),
    ``"depth_first"`` (a random branch as far as it goes). ``steps``: uniform over the neighbours (the algorithm), or
    proportional to their similarity (the text; a negative similarity counts as 0). A walk that finds nothing new for a
    long time (10,000 + 50 x size moves), or has nowhere to go, is filled: a uniform one of the nodes it has not seen
    joins, and the walk goes on from there. ``walks`` says how many nodes were filled.

    >>> ring = ProximityGraph.from_lists([[(i - 1) % 12, (i + 1) % 12] for i in range(12)])
    >>> nodes = walk(ring, start=3, size=5, restart=0.2, generator=torch.Generator().manual_seed(0))
    >>> len(set(nodes.tolist())), int(nodes[0])
    (5, 3)
    """
    return walks(graph, [start], size, restart, generator, kind=kind, steps=steps).nodes[0]


@dataclass(frozen=True, eq=False)
class Walks:
    """Several walks, and how many nodes of each were not reached but filled in."""

    nodes: Annotated[Tensor, "w size"]
    filled: Annotated[Tensor, "w"]


def walks(
    graph: ProximityGraph,
    starts: Any,
    size: int,
    restart: float,
    generator: torch.Generator | None = None,
    *,
    kind: str = "restart",
    steps: str = "uniform",
    compiled: bool | None = None,
) -> Walks:
    """Independent walks, one from each start. ``compiled`` forces or forbids numba; both give the same nodes."""
    graph = as_graph(graph)
    starts = [int(start) for start in starts]
    if not 1 <= size <= len(graph):
        raise argument_error("walk", f"at least 1 and at most {len(graph)} nodes", "size", size)
    if not all(0 <= start < len(graph) for start in starts):
        raise argument_error("walk", f"a start in [0, {len(graph)})", "start", starts)
    walker = Walker(graph, kind=kind, steps=steps, compiled=compiled)
    nodes, filled = walker.independent(starts, size, restart, numpy_generator(generator))
    return Walks(torch.from_numpy(nodes), torch.from_numpy(filled))


class Walker:
    """One walk at a time over a graph; asked for more nodes until the batch is full.

    ``patience`` is how many moves without a new node end the search; its default of 10,000 + 50 per node leaves
    Algorithm 3's distribution untouched wherever a node has a chance of more than about one in a thousand per move.
    """

    def __init__(
        self,
        graph: ProximityGraph,
        *,
        kind: str = "restart",
        steps: str = "uniform",
        patience: int | None = None,
        compiled: bool | None = None,
    ) -> None:
        if kind not in kinds:
            raise argument_error("walk", f"a kind among {kinds}", "kind", kind)
        if steps not in steps_by:
            raise argument_error("walk", f"steps among {steps_by}", "steps", steps)
        self.kind = kind
        self.restart = 0.0
        self.patience = patience
        self.num_neighbours = graph.num_neighbours
        self._degrees = graph.degrees.numpy()
        self._tables = Tables(
            np.ascontiguousarray(graph.neighbours.numpy(), dtype=np.int64).reshape(-1),
            self._degrees[:0].copy() if bool((self._degrees == graph.num_neighbours).all()) else self._degrees,
            _cumulative(graph) if steps == "similarity" else np.empty(0, dtype=np.float64),
            graph.num_neighbours,
        )
        self._seen = np.zeros(len(graph), dtype=np.int32)  # the number of the walk that saw the node last
        self._number, self._start, self._place = 0, 0, 0
        self._frontier: deque[int] = deque()
        if compiled:
            optional("numba", "walks(compiled=True)", extra="walks")
        self._loop = None if compiled is False else compiled_loop()
        self._scratch = np.empty(len(graph) if self._loop is None else 0, dtype=np.int64)

    def independent(
        self, starts: Any, size: int, restart: float, rng: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Whole walks that ignore each other: their nodes [w, size], and how many of each were filled in [w]."""
        count, moves = len(starts), max(size + size // 4, 64)
        nodes, filled = np.empty((count, size), dtype=np.int64), np.zeros(count, dtype=np.int64)
        nodes[:, 0] = starts
        none_taken = np.zeros(len(self._seen), dtype=np.uint8)
        self.begin(int(starts[0]), restart)
        for row, visited in enumerate(self._first_excursions(nodes[:, 0], moves if size > 1 else 0, rng)):
            self.begin(int(nodes[row, 0]), restart)
            found = 1
            if visited is not None:
                counts = np.zeros(2, dtype=np.int64)
                visited(none_taken, nodes[row, 1:], counts)
                found += int(counts[0])
            while found < size:
                more = self.more(size - found, none_taken, rng)
                nodes[row, found : found + len(more)] = more
                found += len(more)
                if found < size:
                    rest = np.setdiff1d(np.arange(len(none_taken)), nodes[row, :found])
                    nodes[row, found] = rest[rng.integers(len(rest))]
                    self.jump(int(nodes[row, found]))
                    found, filled[row] = found + 1, filled[row] + 1
        return nodes, filled

    def _first_excursions(self, starts: Nodes, moves: int, rng: np.random.Generator) -> Iterator[Visit | None]:
        """For each start about as many excursions as ``moves`` allow, all drawn, and in numpy made, at once."""
        if self.kind not in ("restart", "random") or self.restart * moves < 1.0:
            yield from [None] * len(starts)
            return
        lengths = rng.geometric(self.restart, (len(starts), int(self.restart * moves)))
        ends = np.cumsum(lengths.sum(1))[:-1]
        draws = np.split(rng.random(int(lengths.sum())), ends)
        if self._loop is not None:
            for own, drawn, start in zip(lengths, draws, starts.tolist(), strict=True):
                yield partial(self._run, own, drawn) if self._degrees[start] else None
            return
        homes = np.repeat(starts, lengths.shape[1])
        path = paths(self._tables, homes, homes, lengths.reshape(-1), np.concatenate(draws))
        for own, start in zip(np.split(path, ends), starts.tolist(), strict=True):
            yield partial(self._collect, own) if self._degrees[start] else None

    def begin(self, start: int, restart: float) -> None:
        """A new walk, which has seen its start only."""
        if not 0.0 <= restart <= 1.0:
            check_range("walk", "restart", restart, 0.0, 1.0)
        self.restart = 0.0 if self.kind == "random" else float(restart)
        self._number += 1
        self._frontier.clear()
        self.jump(start)

    def jump(self, node: int) -> None:
        """The same walk goes on from a new start."""
        self._seen[node] = self._number
        self._start = self._place = node
        self._frontier.append(node)

    def more(self, want: int, taken: NDArray[np.uint8], rng: np.random.Generator, patience: int | None = None) -> Nodes:
        """Up to ``want`` further nodes, in visiting order, that this walk has not seen and that are not taken.

        Fewer mean that ``patience`` moves showed nothing new.
        """
        patience = self.patience if self.patience is not None else patience
        if self.kind in ("breadth_first", "depth_first"):
            return self._search(want, taken, rng, patience)
        if patience is None:
            patience = 10_000 + 50 * want
        found = np.empty(want, dtype=np.int64)
        counts = np.zeros(2, dtype=np.int64)  # nodes found, moves since the last one
        made = 0
        while counts[0] < want and counts[1] < patience and self._degrees[self._start]:
            # As many moves as the rest should take at the rate so far: the fewer turns, the more is done at once.
            wanted = (want - counts[0]) * (made / max(counts[0], 1) if made else 1.0)
            made += self._advance(int(min(max(1.25 * wanted, 64), max(patience, 64), 8192)), rng, taken, found, counts)
        return found[: counts[0]]

    def _advance(self, moves: int, rng: np.random.Generator, taken: Any, found: Any, counts: Any) -> int:
        """Some excursions, about as many as ``moves`` allow; returns how many moves they made.

        One that is longer than that is cut and goes on next time, which changes nothing: its length has no memory.
        """
        if self.restart * moves >= 1.0:
            lengths: Any = rng.geometric(self.restart, int(self.restart * moves))
            cut = False
        else:
            length = rng.geometric(self.restart) if self.restart else moves + 1
            cut = length > moves
            lengths = np.array([min(length, moves)])
        last = self._run(lengths, rng.random(int(lengths.sum())), taken, found, counts)
        self._place = last if cut else self._start
        return int(lengths.sum())

    def _run(self, lengths: Any, draws: Any, taken: Any, found: Any, counts: Any) -> int:
        """Excursions of these lengths; returns the node where the last one ends."""
        if self._loop is None and len(lengths) >= _lanes:
            begins = np.full(len(lengths), self._start)
            begins[0] = self._place
            path = paths(self._tables, begins, np.full(len(lengths), self._start), lengths, draws)
            self._collect(path, taken, found, counts)
            return int(path[-1])
        total = len(draws)
        work: Any = np.empty(total + 3 * len(lengths) + 4, dtype=np.int64)
        work[0], work[1], work[2], work[3] = self._start, self._place, self._number, self.num_neighbours
        tables = (*self._tables[:3], self._seen)
        if self._loop is not None:
            self._loop(*tables, taken, found, counts, lengths, draws, work)
        else:
            # Items of a memoryview are plain numbers, five times as fast to read one by one as those of an array.
            walk_on(*(memoryview(a) for a in (*tables, taken, found, counts, lengths, draws, work)))  # type: ignore[arg-type]
        return int(work[total + 3])

    def _collect(self, path: Nodes, taken: Any, found: Any, counts: Any) -> None:
        collect(path, self._number, self._seen, taken, found, counts, self._scratch)

    def _search(self, want: int, taken: NDArray[np.uint8], rng: np.random.Generator, patience: int | None) -> Nodes:
        """Breadth first takes the oldest open node and its closest neighbours; depth first the newest, at random."""
        found: list[int] = []
        table = self._tables.neighbours.reshape(len(taken), self.num_neighbours)  # also where no node has a neighbour
        number = self._number
        idle, patience = 0, patience if patience is not None else len(self._seen) + 1
        while self._frontier and len(found) < want and idle < patience:
            before = len(found)
            if self.kind == "breadth_first":
                row = table[self._frontier[0], : self._degrees[self._frontier[0]]]
                new = list(dict.fromkeys(row[self._seen[row] != number].tolist()))[: want - len(found)]
                if not new:
                    self._frontier.popleft()
            else:
                row = table[self._frontier[-1], : self._degrees[self._frontier[-1]]]
                new = row[self._seen[row] != number].tolist()
                new = [new[rng.integers(len(new))]] if new else []
                if not new:
                    self._frontier.pop()
            for node in new:
                self._seen[node] = number
                self._frontier.append(node)
                if not taken[node]:
                    found.append(node)
            idle = 0 if len(found) > before else idle + 1
        return np.array(found, dtype=np.int64)


def numpy_generator(generator: torch.Generator | None) -> np.random.Generator:
    """A numpy generator seeded by one draw from the torch generator."""
    device = generator.device if generator is not None else None
    return np.random.default_rng(int(torch.randint(2**62, (), generator=generator, device=device)))


def torch_generator(rng: np.random.Generator) -> torch.Generator:
    return torch.Generator().manual_seed(int(rng.integers(2**62)))


def _cumulative(graph: ProximityGraph) -> NDArray[np.float64]:
    present = (graph.neighbours >= 0).numpy()
    weight = np.where(present, graph.similarities.double().numpy().clip(min=0.0), 0.0)
    weight = np.where(weight.sum(1, keepdims=True) > 0, weight, present)  # no similar neighbour: all alike
    return np.ascontiguousarray(weight.cumsum(1)).reshape(-1)
