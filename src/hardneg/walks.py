"""Walks over a proximity graph: the first ``size`` distinct nodes in visiting order (ProSampler, Algorithm 3).

A random walk with restart is a sequence of independent excursions from its start. An excursion of no move at all shows
nothing new, so each one here moves at least once and then goes on with probability 1 - restart: the order of first
visits has exactly the distribution of Algorithm 3, no step is lost waiting at the start, and restart = 1, where the
algorithm as printed never ends, becomes its limit (the start and its neighbours, as the paper describes it).

The inner loop is one function: compiled by numba where the extra ``walks`` is installed, plain Python on memoryviews
and blocks of numpy draws where it is not. Both read the same draws and so visit the same nodes.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardneg.graph import ProximityGraph, as_graph, optional
from hardneg.notices import argument_error, check_range

kinds = ("restart", "random", "breadth_first", "depth_first")
steps_by = ("uniform", "similarity")

Nodes = NDArray[np.int64]


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
    rng = numpy_generator(generator)
    walker = Walker(graph, kind=kind, steps=steps, compiled=compiled)
    free = np.zeros(len(graph), dtype=np.uint8)
    nodes, filled = np.empty((len(starts), size), dtype=np.int64), np.zeros(len(starts), dtype=np.int64)
    for row, start in enumerate(starts):
        walker.begin(start, restart)
        nodes[row, 0], count = start, 1
        while count < size:
            found = walker.more(size - count, free, rng)
            nodes[row, count : count + len(found)] = found
            count += len(found)
            if count < size:
                rest = np.setdiff1d(np.arange(len(graph)), nodes[row, :count])
                nodes[row, count] = rest[rng.integers(len(rest))]
                walker.jump(int(nodes[row, count]))
                count, filled[row] = count + 1, filled[row] + 1
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
        self._neighbours = np.ascontiguousarray(graph.neighbours.numpy(), dtype=np.int32).reshape(-1)
        self._degrees = graph.degrees.numpy().astype(np.int32)
        self._cumulative = _cumulative(graph) if steps == "similarity" else np.empty(0, dtype=np.float64)
        self._seen = np.zeros(len(graph), dtype=np.int32)  # the number of the walk that saw the node last
        self._state = np.zeros(4, dtype=np.int64)  # number of the walk, its start, its place, moves since a new node
        self._frontier: deque[int] = deque()
        if compiled:
            optional("numba", "walks(compiled=True)", extra="walks")
        self._loop = None if compiled is False else compiled_loop()

    def begin(self, start: int, restart: float) -> None:
        """A new walk, which has seen its start only."""
        check_range("walk", "restart", restart, 0.0, 1.0)
        self.restart = 0.0 if self.kind == "random" else float(restart)
        self._state[0] += 1
        self._frontier.clear()
        self.jump(start)

    def jump(self, node: int) -> None:
        """The same walk goes on from a new start."""
        self._seen[node] = self._state[0]
        self._state[1:] = node, node, 0
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
        count = 0
        self._state[3] = 0
        while count < want and self._state[3] < patience:
            draws = rng.random(min(max(2 * (want - count), 64), 8192))
            count = self._advance(taken, found, count, draws, patience)
        return found[:count]

    def _advance(self, taken: Any, found: Any, count: int, draws: Any, patience: int) -> int:
        arrays: list[Any] = [self._neighbours, self._degrees, self._cumulative, self._seen, taken, found]
        state: Any = self._state
        if self._loop is not None:
            return int(self._loop(*arrays, count, state, draws, self.restart, patience))
        # Items of a memoryview are plain numbers, five times as fast to read one by one as those of an array.
        views = [memoryview(array) for array in arrays]
        loop: Any = _advance
        return int(loop(*views, count, memoryview(state), draws.tolist(), self.restart, patience))

    def _search(self, want: int, taken: NDArray[np.uint8], rng: np.random.Generator, patience: int | None) -> Nodes:
        """Breadth first takes the oldest open node and its closest neighbours; depth first the newest, at random."""
        found: list[int] = []
        table = self._neighbours.reshape(-1, self.num_neighbours)
        number = int(self._state[0])
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


def _advance(
    neighbours: Any,
    degrees: Any,
    cumulative: Any,
    seen: Any,
    taken: Any,
    found: Any,
    count: int,
    state: Any,
    draws: Any,
    restart: float,
    patience: int,
) -> int:
    """Moves once per draw until ``found`` is full, patience ends or the draws do; returns how many were found."""
    number, start, node, stale = state[0], state[1], state[2], state[3]
    width = len(neighbours) // len(degrees)
    want = len(found)
    for u in draws:
        if node != start:
            # One draw decides both: what is left of it after the restart decision is uniform again.
            if u < restart:
                node = start
                u = u / restart
            else:
                u = (u - restart) / (1.0 - restart)
        degree = degrees[node]
        if degree == 0:
            if node == start:
                stale = patience
                break
            node = start
            stale += 1
            continue
        first = node * width
        if len(cumulative) > 0:
            step, high = 0, degree - 1
            target = u * cumulative[first + degree - 1]
            while step < high:
                middle = (step + high) // 2
                if cumulative[first + middle] > target:
                    high = middle
                else:
                    step = middle + 1
        else:
            step = min(int(u * degree), degree - 1)
        node = neighbours[first + step]
        if seen[node] != number:
            seen[node] = number
            if taken[node] == 0:
                found[count] = node
                count += 1
                stale = 0
                if count == want:
                    break
                continue
        stale += 1
        if stale >= patience:
            break
    state[2] = node
    state[3] = stale
    return count


@cache
def compiled_loop() -> Callable[..., int] | None:
    """The inner loop compiled by numba, or None where numba is not installed."""
    try:
        numba: Any = importlib.import_module("numba")
    except ImportError:
        return None
    compiled: Callable[..., int] = numba.njit(cache=True, nogil=True)(_advance)
    return compiled


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
