"""The two propositions of ProSampler (Yang et al. 2023) in the forms that hold.

Both bounds fail as printed. ``closest_neighbour_probability`` is the exact probability of which Proposition 1 gives a
bound. ``escape`` computes the probabilities that Proposition 2 bounds, and reports whether its assumptions hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from hardneg.batching.graph import ProximityGraph
from hardneg.core.errors import ArgumentError, argument_error, check_count, check_range


def closest_neighbour_probability(
    num_instances: int, num_closest: int, num_candidates: int, num_neighbours: int
) -> float:
    """Return the probability that all K neighbours of a node are among its S most similar instances (Proposition 1).

    The neighbours are the K closest of M random candidates, so all are among the S exactly if at least K candidates
    are: a hypergeometric tail, as candidates are drawn without replacement and without the node itself. The printed
    bound (1 - ((N - S) / N)^M)^K is not one: it can be 1.0 where this is 0.0.

    Args:
        num_instances: Number N of instances.
        num_closest: Number S of instances that count as similar.
        num_candidates: Number M of random candidates.
        num_neighbours: Number K of neighbours.

    Raises:
        ArgumentError: If S or M exceed N - 1, or K exceeds M.

    Example:
        >>> round(closest_neighbour_probability(50_000, 5_000, 500, 50), 4)
        0.5221
    """
    who = "closest_neighbour_probability"
    others = check_count(who, "num_instances", num_instances, least=2) - 1
    for name, value, most in (
        ("num_closest", num_closest, others),
        ("num_candidates", num_candidates, others),
        ("num_neighbours", num_neighbours, num_candidates),
    ):
        if check_count(who, name, value) > most:
            raise argument_error(who, f"{name} of at most {most}", name, value)
    total = _log_choose(others, num_candidates)
    most = min(num_candidates, num_closest)
    logs = [
        _log_choose(num_closest, k) + _log_choose(others - num_closest, num_candidates - k) - total
        for k in range(max(num_neighbours, num_candidates - (others - num_closest)), most + 1)
    ]
    return min(1.0, math.fsum(map(math.exp, logs)))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


@dataclass(frozen=True)
class Escape:
    """Probabilities that a lazy random walk with restart is outside a set of nodes, and the bound of Proposition 2."""

    probability: float
    """With a start that is drawn from the set in proportion to its degree."""
    worst: float
    """From the worst start in the set; it can exceed the bound."""
    bound: float
    """(1 - restart) / (2 restart) times the conductance of the set."""
    conductance: float
    """Edges that leave the set, divided by the smaller volume of the set and its complement."""
    undirected: bool
    """True if every edge has its reverse. Proposition 2 assumes it; a proximity graph is directed."""

    @property
    def holds(self) -> bool:
        """True if the bound holds from every start, as Proposition 2 states."""
        return self.worst <= self.bound + 1e-12


def escape(graph: ProximityGraph | Annotated[Tensor, "n n"], inside: Annotated[Tensor, "n"], restart: float) -> Escape:
    """Compute how likely a lazy random walk with restart leaves a set, against the bound of Proposition 2.

    The bound holds for an undirected graph when the start is drawn from the set in proportion to its degree (Spielman
    and Teng 2013). The paper states it for every start and uses it for a directed graph.

    Args:
        graph: A proximity graph of n nodes, or a matrix of non-negative edge weights [n, n], from row to column. The
            exact probabilities take a dense solve of [n, n].
        inside: True for the nodes of the set, [n].
        restart: Probability of a return to the start, in (0, 1].

    Raises:
        ArgumentError: If the set is empty or holds all nodes, a node of a walk has no edge, or shapes do not agree.

    Example:
        >>> cliques = torch.block_diag(torch.ones(3, 3), torch.ones(3, 3)) - torch.eye(6)
        >>> cliques[0, 3] = cliques[3, 0] = 1.0
        >>> found = escape(cliques, torch.arange(6) < 3, restart=0.5)
        >>> found.probability <= found.bound < found.worst
        True
    """
    check_range("escape", "restart", restart, 0.0, 1.0)
    if restart == 0:
        raise argument_error("escape", "a restart above 0", "restart", restart)
    weights = _adjacency(graph)
    inside = torch.as_tensor(inside, dtype=torch.bool)
    if inside.shape != weights.shape[:1]:
        raise ArgumentError("escape", f"a mask of {len(weights)} nodes", f"inside={tuple(inside.shape)}")
    if not bool(inside.any()) or bool(inside.all()):
        raise ArgumentError("escape", "a set with some and not all of the nodes", f"{int(inside.sum())} nodes")
    degree = weights.sum(1)
    if bool((degree <= 0).any()):
        node = int((degree <= 0).int().argmax())
        raise ArgumentError("escape", "an edge from every node", f"node {node} without one", "leave such nodes out")
    size = len(weights)
    lazy = (torch.eye(size, dtype=torch.float64) + weights / degree[:, None]) / 2.0  # rows are the current node
    stationary = torch.linalg.solve(
        torch.eye(size, dtype=torch.float64) - (1.0 - restart) * lazy, torch.eye(size, dtype=torch.float64) * restart
    )
    outside = stationary[inside][:, ~inside].sum(1)
    volume = degree[inside].sum()
    conductance = float(weights[inside][:, ~inside].sum() / torch.minimum(volume, degree[~inside].sum()))
    return Escape(
        probability=float((outside * degree[inside]).sum() / volume),
        worst=float(outside.max()),
        bound=(1.0 - restart) / (2.0 * restart) * conductance,
        conductance=conductance,
        undirected=bool(torch.allclose(weights, weights.T)),
    )


def _adjacency(graph: ProximityGraph | Tensor) -> Annotated[Tensor, "n n"]:
    """Return the edge weights as float64; edges of a proximity graph weigh 1, as in its uniform walk."""
    if isinstance(graph, ProximityGraph):
        weights = torch.zeros(len(graph), len(graph) + 1, dtype=torch.float64)
        to = torch.where(graph.neighbours < 0, len(graph), graph.neighbours)
        return weights.scatter_(1, to, 1.0)[:, :-1]
    weights = torch.as_tensor(graph, dtype=torch.float64)
    if weights.ndim != 2 or weights.shape[0] != weights.shape[1] or bool((weights < 0).any()):
        raise ArgumentError("escape", "non-negative edge weights [n, n]", f"graph={tuple(weights.shape)}")
    return weights
