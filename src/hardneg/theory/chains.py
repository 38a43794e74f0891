"""Markov chains in closed form: the bounds of EMC2 (Yau et al. 2024), and the two propositions of ProSampler.

``transition_matrix`` and ``contraction`` are exact for one chain of EMC2 with uniform proposals; ``EMC2Bounds`` holds
the numbers of a run and computes the bounds of Lemma 3.2, Lemma 3.4 and Theorem 3.7 from them. The paper writes beta
for 1 / temperature. For unit vectors at temperature 0.07 the factor e^(2 / temperature) is 2.6e12: the printed bounds
hold and say nothing about a run of realistic length, whereas ``contraction`` of its scores does.

The bounds of ProSampler's walks (Yang et al. 2023) fail as printed. ``closest_neighbour_probability`` is the exact
probability of which Proposition 1 gives a bound. ``escape`` computes the probabilities that Proposition 2 bounds, and
reports whether its assumptions hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from hardneg.batching.graph import ProximityGraph
from hardneg.core.errors import ArgumentError, argument_error, check_count, check_counts, check_range


def transition_matrix(scores: Annotated[Tensor, "n"]) -> Annotated[Tensor, "n n"]:
    """Return the transition probabilities of one Metropolis-Hastings chain (eq. 9 and 28), from row to column.

    Proposals are uniform over all n candidates, the current one included; the stationary law is softmax(scores).

    Args:
        scores: Similarity / temperature of one anchor with its n candidates, [n].

    Example:
        >>> transition_matrix(torch.tensor([0.0, 0.0]))
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
    """
    _check_scores("transition_matrix", scores)
    moves = (scores[None, :] - scores[:, None]).clamp(max=0.0).exp() / len(scores)
    moves = moves - torch.diag(moves.diagonal())
    return moves + torch.diag(1.0 - moves.sum(1))


def contraction(scores: Annotated[Tensor, "n"], num_steps: int = 1) -> float:
    """Return the exact rate at which one chain forgets its start: 1 - 1 / (n max softmax(scores)), per step.

    It is the second largest eigenvalue of the transition matrix (Liu 1996). The distance to the softmax in total
    variation after r steps is at most its r-th power.

    Args:
        scores: Similarity / temperature of one anchor with its n candidates, [n].
        num_steps: Number of steps r.

    Example:
        >>> contraction(torch.zeros(5))  # a uniform law is reached in one step
        0.0
    """
    _check_scores("contraction", scores)
    largest = float(torch.softmax(scores.double(), dim=0).max())
    return max(0.0, 1.0 - 1.0 / (len(scores) * largest)) ** num_steps


@dataclass(frozen=True)
class EMC2Bounds:
    """The printed bounds of EMC2 for one setting.

    Args:
        num_chains: Number m of positive pairs, one chain each.
        num_candidates: Number m_neg of negatives of each chain.
        temperature: Divides the similarities.
        batch_size: Number B of chains that advance in a training step.
        num_steps: Number R of Metropolis-Hastings steps in a training step.
        norm: Largest norm c of an embedding (Assumption 3.1).

    Raises:
        ArgumentError: If a number is out of its range, or B R exceeds m m_neg e^(2 c^2 / temperature).

    Example:
        >>> bounds = EMC2Bounds(num_chains=100, num_candidates=99, temperature=1.0, batch_size=10, num_steps=9)
        >>> round(bounds.mixing_rate, 6)
        0.999385
    """

    num_chains: int
    num_candidates: int
    temperature: float
    batch_size: int
    num_steps: int
    norm: float = 1.0

    def __post_init__(self) -> None:
        check_counts("EMC2Bounds", self, "num_chains", "num_candidates", "batch_size", "num_steps")
        for name in ("temperature", "norm"):
            check_range("EMC2Bounds", name, getattr(self, name), 1e-6, math.inf, open_high=True)
        if self.batch_size > self.num_chains:
            what = f"a batch of at most {self.num_chains} chains"
            raise ArgumentError("EMC2Bounds", what, f"batch_size={self.batch_size}", "use a smaller batch_size")
        if (
            math.log(self.batch_size * self.num_steps)
            > math.log(self.num_chains * self.num_candidates) + self._exponent
        ):
            what = "B R <= m m_neg e^(2 c^2 / temperature), the assumption of Lemma 3.2"
            got = f"B R = {self.batch_size * self.num_steps}"
            raise ArgumentError("EMC2Bounds", what, got, "use fewer num_steps")

    @property
    def _exponent(self) -> float:
        """Exponent 2 c^2 beta of the largest ratio of two probabilities."""
        return 2.0 * self.norm**2 / self.temperature

    @property
    def _gap(self) -> float:
        """The part B R / (2 m m_neg e^(2 c^2 beta)) that a training step takes off the distance."""
        log_states = math.log(2.0 * self.num_chains * self.num_candidates) + self._exponent
        return math.exp(math.log(self.batch_size * self.num_steps) - log_states)

    @property
    def mixing_rate(self) -> float:
        """Rate of Lemma 3.2, eq. 13: |P(states after t training steps) - stationary| <= rate^t, all chains jointly."""
        return 1.0 - self._gap

    def kernel_lipschitz(self, similarity_lipschitz: float) -> float:
        """Return the constant of Lemma 3.4, eq. 15: the transition probabilities change at most by it times |d theta|.

        Args:
            similarity_lipschitz: The constant L_P by which a similarity changes with the parameters (Assumption 3.3).
        """
        factor = 2.0 ** (self.num_steps + 1) * self.batch_size * similarity_lipschitz
        return factor * _exp(self._exponent) / self.temperature

    def gradient_norm(
        self,
        learning_rate: float,
        num_updates: int,
        *,
        similarity_lipschitz: float,
        gradient_lipschitz: float,
        deviation: float,
        descent: float | None = None,
    ) -> float:
        """Return the bound of Theorem 3.7 on the mean squared norm of the global gradient, with the proof's constants.

        Eq. 19 of the paper hides constants in O(...); this is eq. 58 of its proof.

        Args:
            learning_rate: Step size gamma of SGD.
            num_updates: Number T of updates.
            similarity_lipschitz: L_P of Assumption 3.3.
            gradient_lipschitz: L_H of Assumption 3.5.
            deviation: sigma of Assumption 3.6, the largest deviation of a pair's gradient from its mean.
            descent: E[loss at the start - loss at the end]; 4 / temperature by default (eq. 61, for c = 1).

        Raises:
            ArgumentError: If the learning rate is above the largest one that the theorem allows, or the temperature is
                so low that the bound overflows.
        """
        beta = 1.0 / self.temperature
        rate, gap = self.mixing_rate, self._gap
        if gap == 0.0:
            what = "a temperature at which e^(2 c^2 / temperature) is a finite number"
            raise ArgumentError("EMC2Bounds", what, f"temperature={self.temperature}", "use a higher temperature")
        first = 2.0 * beta * deviation * rate / gap
        kernel = self.kernel_lipschitz(similarity_lipschitz)
        second = 6.0 * kernel * beta * deviation / gap**2 + 2.0 * beta * gradient_lipschitz / gap
        limit = 2.0 * beta * gradient_lipschitz + second * (1.0 + deviation) + first * (beta * gradient_lipschitz + 1.0)
        if not 0.0 < learning_rate <= 1.0 / (2.0 * limit):
            what = f"a learning rate of at most {1.0 / (2.0 * limit):.3g}, as Theorem 3.7 assumes"
            raise ArgumentError("EMC2Bounds", what, f"learning_rate={learning_rate}", "pass a smaller learning_rate")
        descent = 4.0 * beta if descent is None else descent
        noise = (
            8.0 * beta**3 * gradient_lipschitz * deviation**2
            + 2.0 * second * beta * deviation
            + 2.0 * beta * gradient_lipschitz * first * (1.0 + 2.0 * beta * deviation)
        )
        total = descent + 3.0 * first + noise * learning_rate**2 * num_updates
        return total / (learning_rate * num_updates / 2.0)


def _exp(exponent: float) -> float:
    return math.inf if exponent > 709.0 else math.exp(exponent)


def _check_scores(who: str, scores: Tensor) -> None:
    if not isinstance(scores, Tensor) or scores.ndim != 1 or not len(scores):
        got = f"scores={tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
        raise ArgumentError(who, "the scores of one anchor, [n]", got, "pass one row, such as scores.candidates[0]")


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
