"""Walks over a proximity graph: the first ``size`` distinct nodes in visiting order (ProSampler, Algorithm 3).

A random walk with restart is a sequence of independent excursions from its start. An excursion of no move at all shows
nothing new, so each one here moves at least once and then continues with probability 1 - restart: the order of first
visits has exactly the distribution of Algorithm 3, no step is lost waiting at the start, and restart = 1, where the
algorithm as printed never ends, becomes its limit (the start and its neighbours, as the paper describes it).

Excursions are independent, so numpy moves all of them at once, those of several walks together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardneg.batching.graph import ProximityGraph, as_graph
from hardneg.batching.plan import Nodes
from hardneg.core.errors import argument_error, check_count, check_range
from hardneg.search.draws import drawn_seed

kinds = ("restart", "random", "breadth_first", "depth_first")
steps_by = ("uniform", "similarity")


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
    joins, and the walk continues from there. ``walks`` says how many nodes were filled.

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
) -> Walks:
    """Independent walks, one from each start."""
    graph = as_graph(graph)
    starts = [check_count("walk", "start", start, least=0) for start in starts]
    size = check_count("walk", "size", size)
    if size > len(graph):
        raise argument_error("walk", f"at most {len(graph)} nodes", "size", size)
    if not all(start < len(graph) for start in starts):
        raise argument_error("walk", f"a start in [0, {len(graph)})", "start", starts)
    walker = Walker(graph, kind=kind, steps=steps)
    nodes, filled = walker.independent(starts, size, restart, numpy_generator(generator))
    return Walks(torch.from_numpy(nodes), torch.from_numpy(filled))


def check_walk(who: str, kind: str, steps: str) -> None:
    if kind not in kinds:
        raise argument_error(who, f"a kind among {kinds}", "kind", kind)
    if steps not in steps_by:
        raise argument_error(who, f"steps among {steps_by}", "steps", steps)


class Excursions(NamedTuple):
    """The nodes of some excursions from one start, and where the walk is after them."""

    path: Nodes
    place: int


class Walker:
    """One walk at a time over a graph; called for more nodes until the batch is full.

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
    ) -> None:
        check_walk("walk", kind, steps)
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
        self._scratch = np.empty(len(graph), dtype=np.int64)

    def independent(
        self, starts: Any, size: int, restart: float, rng: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Whole walks that ignore each other: their nodes [w, size], and how many of each were filled in [w]."""
        count, moves = len(starts), max(size + size // 4, 64)
        nodes, filled = np.empty((count, size), dtype=np.int64), np.zeros(count, dtype=np.int64)
        nodes[:, 0] = starts
        none_taken = np.zeros(len(self._seen), dtype=np.uint8)
        for row, begun in enumerate(self.excursions(nodes[:, 0], moves if size > 1 else 0, restart, rng)):
            self.begin(int(nodes[row, 0]), restart)
            first = self.found_on(begun, size - 1, none_taken)
            nodes[row, 1 : 1 + len(first)] = first
            found = 1 + len(first)
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

    def excursions(self, starts: Nodes, moves: int, restart: float, rng: np.random.Generator) -> Iterator[Excursions]:
        """For each start about as many excursions as ``moves`` allow; those of all starts are made at once."""
        if self.kind not in ("restart", "random") or moves < 1 or not self.num_neighbours:
            return iter([Excursions(starts[:0], int(start)) for start in starts])
        lengths, cut = self._lengths(len(starts), moves, self._restart_of(restart), rng)
        homes = np.repeat(starts, lengths.shape[1])
        path = paths(self._tables, homes, homes, lengths.reshape(-1), rng.random(int(lengths.sum())))
        whole = np.split(path, np.cumsum(lengths.sum(1))[:-1])
        places = [own[-1] if unfinished else start for own, unfinished, start in zip(whole, cut, starts, strict=True)]
        return (Excursions(own, int(place)) for own, place in zip(whole, places, strict=True))

    def found_on(self, begun: Excursions, want: int, taken: NDArray[np.uint8]) -> Nodes:
        """The nodes on the first excursions of this walk that are new and not taken, at most ``want``."""
        self._place = begun.place
        return self._new(begun.path, want, taken)[0] if want else begun.path[:0]

    def begin(self, start: int, restart: float) -> None:
        """A new walk, which has seen its start only."""
        self.restart = self._restart_of(restart)
        self._number += 1
        self._frontier.clear()
        self.jump(start)

    def jump(self, node: int) -> None:
        """The same walk continues from a new start."""
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
        found = [np.empty(0, dtype=np.int64)]
        missing, made, idle = want, 0, 0  # nodes, moves, and moves since the last node
        while missing and idle < patience and self._degrees[self._start]:
            # As many moves as the rest should take at the rate so far, and never few: numpy's time is in its calls.
            wanted = 1.25 * missing * (made / max(want - missing, 1) if made else 1.0)
            path = self._advance(int(min(max(wanted, 1024), max(4 * patience, 64), 8192)), rng)
            new, last = self._new(path, missing, taken)
            found.append(new)
            missing, made = missing - len(new), made + len(path)
            idle = len(path) - 1 - last if len(new) else idle + len(path)
        return np.concatenate(found)

    def _new(self, path: Nodes, want: int, taken: NDArray[np.uint8]) -> tuple[Nodes, int]:
        """The first ``want`` nodes of a path that are new and free, and the last one's place; marks what it sees."""
        place = np.flatnonzero(self._seen[path] != self._number)
        nodes = path[place]
        self._scratch[nodes[::-1]] = place[::-1]  # the first visit is written last
        first = self._scratch[nodes] == place
        nodes, place = nodes[first], place[first]
        free = np.flatnonzero(taken[nodes] == 0)[:want]
        self._seen[nodes[: free[-1] + 1] if len(free) == want else nodes] = self._number
        return nodes[free], int(place[free[-1]]) if len(free) else -1

    def _advance(self, moves: int, rng: np.random.Generator) -> Nodes:
        """The nodes of some excursions, about as many as ``moves`` allow."""
        (lengths,), (cut,) = self._lengths(1, moves, self.restart, rng)
        homes = np.full(len(lengths), self._start)
        begins = homes.copy()
        begins[0] = self._place
        path = paths(self._tables, begins, homes, lengths, rng.random(int(lengths.sum())))
        self._place = int(path[-1]) if cut else self._start
        return path

    def _lengths(self, count: int, moves: int, restart: float, rng: np.random.Generator) -> tuple[Nodes, Any]:
        """Lengths of the excursions of some walks [count, k], and which walks end in the middle of one.

        An excursion longer than ``moves`` is cut and continues next time, which changes nothing: its length has no
        memory.
        """
        if restart * moves >= 1.0:
            return rng.geometric(restart, (count, int(restart * moves))), np.zeros(count, dtype=bool)
        lengths = rng.geometric(restart, (count, 1)) if restart else np.full((count, 1), moves + 1)
        return np.minimum(lengths, moves), lengths[:, 0] > moves

    def _restart_of(self, restart: float) -> float:
        check_range("walk", "restart", restart, 0.0, 1.0)
        return 0.0 if self.kind == "random" else float(restart)

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
    return np.random.default_rng(drawn_seed("walk", generator, 2**62))


def torch_generator(rng: np.random.Generator) -> torch.Generator:
    return torch.Generator().manual_seed(int(rng.integers(2**62)))


def _cumulative(graph: ProximityGraph) -> NDArray[np.float64]:
    present = (graph.neighbours >= 0).numpy()
    weight = np.where(present, graph.similarities.double().numpy().clip(min=0.0), 0.0)
    weight = np.where(weight.sum(1, keepdims=True) > 0, weight, present)  # no similar neighbour: all alike
    return np.ascontiguousarray(weight.cumsum(1)).reshape(-1)


Whole = NDArray[np.int64]


class Tables(NamedTuple):
    """A graph as the walks read it: flat neighbours, their number in each row, and the running sums of their weights.

    ``degrees`` is empty where every row is full, ``cumulative`` where all neighbours are alike.
    """

    neighbours: Whole
    degrees: Whole
    cumulative: NDArray[np.float64]
    width: int


def paths(tables: Tables, begins: Whole, homes: Whole, lengths: Whole, draws: NDArray[np.float64]) -> Whole:
    """The nodes of excursions of these lengths, one draw per move, one excursion behind the other.

    Each begins at its own node; one that has nowhere to go stands at its home from then on.
    """
    order = np.argsort(-lengths, kind="stable")  # the longest first: those still on their way are the first ones
    first = (np.cumsum(lengths) - lengths)[order]
    alive = len(lengths) - np.cumsum(np.bincount(lengths))[: int(lengths.max())]  # how many make move 0, 1, ...
    ends = np.cumsum(alive)
    turn = np.repeat(np.arange(len(alive)), alive)
    places = first[np.arange(len(draws)) - np.repeat(ends - alive, alive)] + turn  # move by move
    path = np.empty(len(draws), dtype=np.int64)
    path[places] = _moves(tables, begins[order], homes[order], draws[places], ends.tolist())
    return path


def _moves(tables: Tables, at: Whole, home: Whole, draws: NDArray[np.float64], ends: list[int]) -> Whole:
    """All excursions that have not ended move once, again and again."""
    made, begin = np.empty(len(draws), dtype=np.int64), 0
    if not len(tables.degrees) and not len(tables.cumulative):
        step = (draws * tables.width).astype(np.int64)
        for end in ends:
            at = tables.neighbours.take(at[: end - begin] * tables.width + step[begin:end])
            made[begin:end], begin = at, end
        return made
    lost = np.zeros(len(at), dtype=bool)
    for end in ends:
        at, home, lost = at[: end - begin], home[: end - begin], lost[: end - begin]
        degree = tables.degrees[at] if len(tables.degrees) else np.full(len(at), tables.width)
        lost = lost | (degree == 0)
        step = _chosen(tables, at, degree, draws[begin:end])
        at = np.where(lost, home, tables.neighbours.take(at * tables.width + np.where(lost, 0, step)))
        made[begin:end], begin = at, end
    return made


def _chosen(tables: Tables, at: Whole, degree: Whole, draws: NDArray[np.float64]) -> Whole:
    """Which neighbour is next: uniform, or proportional to its weight."""
    if not len(tables.cumulative):
        return (draws * degree).astype(np.int64)
    sums = tables.cumulative.reshape(-1, tables.width)[at]
    last = np.maximum(degree - 1, 0)
    target = draws * np.take_along_axis(sums, last[:, None], 1)[:, 0]
    passed: Whole = ((sums <= target[:, None]) & (np.arange(tables.width) < last[:, None])).sum(1)
    return passed
