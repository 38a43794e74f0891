"""Walks over a proximity graph: the first ``size`` distinct nodes in visiting order (ProSampler, Algorithm 3).

``walk`` and ``walks`` are the public functions. ``Walker`` gives the planner (planners/proximity.py) the nodes of a
walk in parts, until a batch is full. ``paths`` at the end moves many excursions at once.

A random walk with restart is a sequence of independent excursions from its start. An excursion without a move would
visit nothing new, so each one here moves at least once and then continues with probability 1 - restart. The order of
first visits has exactly the distribution of Algorithm 3, no move is wasted at the start, and restart = 1, where the
algorithm as printed never ends, becomes its limit: the start and its neighbours, as the paper describes it.

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
"""Searches on the graph."""
steps_by = ("uniform", "similarity")
"""Ways to choose the next neighbour."""


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
    """Return the first ``size`` distinct nodes of a walk, in visiting order.

    A walk that finds nothing new for a long time (10,000 + 50 x size moves), or has nowhere to go, continues from a
    uniform node that it has not visited. ``walks`` counts these nodes as filled.

    Args:
        graph: Graph to walk on.
        start: First node.
        size: Number of nodes.
        restart: Probability of returning to the start at each move.
        generator: Source of randomness; None: the global one.
        kind: "restart" (Algorithm 3), "random" (never returns), "breadth_first" (closest neighbours first) or
            "depth_first" (a random branch as far as possible).
        steps: "uniform" over the neighbours (the algorithm), or "similarity" for steps in proportion to it (the paper's
            text; a negative similarity counts as 0).

    Returns:
        Nodes, shape [size].

    Raises:
        ArgumentError: If ``size`` exceeds the number of nodes, or an argument is out of range.

    Example:
        >>> ring = ProximityGraph.from_lists([[(i - 1) % 12, (i + 1) % 12] for i in range(12)])
        >>> nodes = walk(ring, start=3, size=5, restart=0.2, generator=torch.Generator().manual_seed(0))
        >>> len(set(nodes.tolist())), int(nodes[0])
        (5, 3)
    """
    return walks(graph, [start], size, restart, generator, kind=kind, steps=steps).nodes[0]


@dataclass(frozen=True, eq=False)
class Walks:
    """Several walks.

    Attributes:
        nodes: Nodes of each walk in visiting order, shape [w, size].
        filled: Number of nodes of each walk that were not reached but filled in, shape [w].
    """

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
    """Return independent walks, one from each start; the other arguments are those of ``walk``.

    Args:
        graph: Graph to walk on.
        starts: First node of each walk.
        size: Number of nodes of each walk.
        restart: Probability of returning to the start at each move.
        generator: Source of randomness; None: the global one.
        kind: Search on the graph.
        steps: Choice of the next neighbour.

    Raises:
        ArgumentError: If a start is not a node, or ``size`` exceeds the number of nodes.
    """
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
    """Raise unless the kind and the steps of a walk exist.

    Args:
        who: Name of the caller, for errors.
        kind: Search on the graph, one of ``kinds``.
        steps: Choice of the next neighbour, one of ``steps_by``.
    """
    if kind not in kinds:
        raise argument_error(who, f"a kind among {kinds}", "kind", kind)
    if steps not in steps_by:
        raise argument_error(who, f"steps among {steps_by}", "steps", steps)


class Tables(NamedTuple):
    """A graph as flat arrays, which walks can read fast.

    Attributes:
        neighbours: Neighbours of all nodes, flat: [n * width].
        degrees: Number of neighbours of each node, [n]; empty where every row is full.
        cumulative: Running sums of the weights of each row, flat: [n * width]; empty for uniform steps.
        width: Number of columns of the graph.
    """

    neighbours: Nodes
    degrees: Nodes
    cumulative: NDArray[np.float64]
    width: int


class Excursions(NamedTuple):
    """Excursions of one walk.

    Attributes:
        path: Visited nodes, one excursion after the other.
        place: Node that the walk is at afterwards.
    """

    path: Nodes
    place: int


class Walker:
    """One walk at a time over a graph, continued until a batch is full.

    Args:
        graph: Graph to walk on.
        kind: Search on the graph, as for ``walk``.
        steps: Choice of the next neighbour, as for ``walk``.
        patience: Number of moves without a new node that end the search. The default of 10,000 + 50 per node leaves
            Algorithm 3's distribution unchanged wherever a node has a chance of more than about one in a thousand per
            move.
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
        self._seen = np.zeros(len(graph), dtype=np.int32)  # number of the last walk that visited the node
        self._number, self._start, self._place = 0, 0, 0
        self._frontier: deque[int] = deque()
        self._scratch = np.empty(len(graph), dtype=np.int64)

    def independent(
        self, starts: Any, size: int, restart: float, rng: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return complete walks that ignore each other.

        Args:
            starts: First node of each walk, [w].
            size: Number of nodes of each walk.
            restart: Restart probability.
            rng: Source of randomness.

        Returns:
            Nodes [w, size], and the number of nodes of each walk that were filled in [w].
        """
        count, moves = len(starts), max(size + size // 4, 64)
        nodes, filled = np.empty((count, size), dtype=np.int64), np.zeros(count, dtype=np.int64)
        nodes[:, 0] = starts
        none_taken = np.zeros(len(self._seen), dtype=np.uint8)
        for row, begun in enumerate(self.excursions(nodes[:, 0], moves if size > 1 else 0, restart, rng)):
            self.begin(int(nodes[row, 0]), restart)
            first = self.first_nodes(begun, size - 1, none_taken)
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
        """Yield for each start about as many excursions as ``moves`` allow; those of all starts are made at once."""
        if self.kind not in ("restart", "random") or moves < 1 or not self.num_neighbours:
            return iter([Excursions(starts[:0], int(start)) for start in starts])
        lengths, cut = self._lengths(len(starts), moves, self._restart_of(restart), rng)
        homes = np.repeat(starts, lengths.shape[1])
        path = paths(self._tables, homes, homes, lengths.reshape(-1), rng.random(int(lengths.sum())))
        whole = np.split(path, np.cumsum(lengths.sum(1))[:-1])
        places = [own[-1] if unfinished else start for own, unfinished, start in zip(whole, cut, starts, strict=True)]
        return (Excursions(own, int(place)) for own, place in zip(whole, places, strict=True))

    def first_nodes(self, begun: Excursions, want: int, taken: NDArray[np.uint8]) -> Nodes:
        """Return at most ``want`` nodes of the first excursions of this walk that are new and not taken."""
        self._place = begun.place
        return self._new(begun.path, want, taken)[0] if want else begun.path[:0]

    def begin(self, start: int, restart: float) -> None:
        """Start a new walk, which has visited only its start."""
        self.restart = self._restart_of(restart)
        self._number += 1
        self._frontier.clear()
        self.jump(start)

    def jump(self, node: int) -> None:
        """Continue the same walk from a new start."""
        self._seen[node] = self._number
        self._start = self._place = node
        self._frontier.append(node)

    def more(self, want: int, taken: NDArray[np.uint8], rng: np.random.Generator, patience: int | None = None) -> Nodes:
        """Return up to ``want`` further nodes in visiting order.

        Args:
            want: Number of nodes.
            taken: 1 for nodes to pass through without collecting them, shape [n].
            rng: Source of randomness.
            patience: Number of moves without a new node that ends the search; the walker's own limit takes precedence.

        Returns:
            Nodes that this walk had not visited and that are not taken; fewer than ``want`` if the search ended.
        """
        patience = self.patience if self.patience is not None else patience
        if self.kind in ("breadth_first", "depth_first"):
            return self._search(want, taken, rng, patience)
        if patience is None:
            patience = 10_000 + 50 * want
        found = [np.empty(0, dtype=np.int64)]
        missing, made, idle = want, 0, 0  # nodes, moves, and moves since the last node
        while missing and idle < patience and self._degrees[self._start]:
            # The moves that the rest should need at the rate so far, and never few: numpy's time is in its calls.
            wanted = 1.25 * missing * (made / max(want - missing, 1) if made else 1.0)
            path = self._advance(int(min(max(wanted, 1024), max(4 * patience, 64), 8192)), rng)
            new, last = self._new(path, missing, taken)
            found.append(new)
            missing, made = missing - len(new), made + len(path)
            idle = len(path) - 1 - last if len(new) else idle + len(path)
        return np.concatenate(found)

    def _new(self, path: Nodes, want: int, taken: NDArray[np.uint8]) -> tuple[Nodes, int]:
        """Return the first ``want`` new and free nodes of a path and the place of the last one; marks visited nodes."""
        place = np.flatnonzero(self._seen[path] != self._number)
        nodes = path[place]
        self._scratch[nodes[::-1]] = place[::-1]  # the first visit is written last
        first = self._scratch[nodes] == place
        nodes, place = nodes[first], place[first]
        free = np.flatnonzero(taken[nodes] == 0)[:want]
        self._seen[nodes[: free[-1] + 1] if len(free) == want else nodes] = self._number
        return nodes[free], int(place[free[-1]]) if len(free) else -1

    def _advance(self, moves: int, rng: np.random.Generator) -> Nodes:
        """Return the nodes of excursions, about as many as ``moves`` allow."""
        (lengths,), (cut,) = self._lengths(1, moves, self.restart, rng)
        homes = np.full(len(lengths), self._start)
        begins = homes.copy()
        begins[0] = self._place
        path = paths(self._tables, begins, homes, lengths, rng.random(int(lengths.sum())))
        self._place = int(path[-1]) if cut else self._start
        return path

    def _lengths(self, count: int, moves: int, restart: float, rng: np.random.Generator) -> tuple[Nodes, Any]:
        """Draw excursion lengths [count, k] of several walks, and whether each walk ends inside an excursion [count].

        An excursion longer than ``moves`` is cut and continued next time, which changes nothing: its length has no
        memory.
        """
        if restart * moves >= 1.0:
            return rng.geometric(restart, (count, int(restart * moves))), np.zeros(count, dtype=bool)
        lengths = rng.geometric(restart, (count, 1)) if restart else np.full((count, 1), moves + 1)
        return np.minimum(lengths, moves), lengths[:, 0] > moves

    def _restart_of(self, restart: float) -> float:
        """Return the restart probability for this kind of walk."""
        check_range("walk", "restart", restart, 0.0, 1.0)
        return 0.0 if self.kind == "random" else float(restart)

    def _search(self, want: int, taken: NDArray[np.uint8], rng: np.random.Generator, patience: int | None) -> Nodes:
        """Search breadth first (oldest open node, closest neighbours first) or depth first (newest node, at random)."""
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
    """Return a numpy generator seeded by one draw from the torch generator."""
    return np.random.default_rng(drawn_seed("walk", generator, 2**62))


def torch_generator(rng: np.random.Generator) -> torch.Generator:
    """Return a torch generator seeded by one draw from the numpy generator."""
    return torch.Generator().manual_seed(int(rng.integers(2**62)))


def paths(tables: Tables, begins: Nodes, homes: Nodes, lengths: Nodes, draws: NDArray[np.float64]) -> Nodes:
    """Return the nodes of excursions with the given lengths, one excursion after the other.

    Args:
        tables: The graph.
        begins: First node of each excursion, [e]; it is not part of the path.
        homes: Node at which an excursion stays once it has nowhere to go, [e].
        lengths: Number of moves of each excursion, [e].
        draws: Uniform random numbers, one per move, [sum of lengths].
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


def _cumulative(graph: ProximityGraph) -> NDArray[np.float64]:
    """Return the running sums of the similarities of each row, flat; uniform for a row without a positive one."""
    present = (graph.neighbours >= 0).numpy()
    weight = np.where(present, graph.similarities.double().numpy().clip(min=0.0), 0.0)
    weight = np.where(weight.sum(1, keepdims=True) > 0, weight, present)  # no similar neighbour: uniform
    return np.ascontiguousarray(weight.cumsum(1)).reshape(-1)


def _moves(tables: Tables, at: Nodes, home: Nodes, draws: NDArray[np.float64], ends: list[int]) -> Nodes:
    """Move all excursions that have not ended once, again and again; returns the nodes move by move."""
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


def _chosen(tables: Tables, at: Nodes, degree: Nodes, draws: NDArray[np.float64]) -> Nodes:
    """Return which neighbour is next: uniform, or in proportion to its weight."""
    if not len(tables.cumulative):
        return (draws * degree).astype(np.int64)
    sums = tables.cumulative.reshape(-1, tables.width)[at]
    last = np.maximum(degree - 1, 0)
    target = draws * np.take_along_axis(sums, last[:, None], 1)[:, 0]
    passed: Nodes = ((sums <= target[:, None]) & (np.arange(tables.width) < last[:, None])).sum(1)
    return passed
