"""The propositions of ProSampler as functions, against scipy, enumeration and power iteration."""

from itertools import combinations

import pytest
import torch

from hardneg.batching import build_graph
from hardneg.core.errors import ArgumentError
from hardneg.theory import closest_neighbour_probability, escape


@pytest.mark.parametrize("closest", [1, 3, 5, 7])
def test_proposition_1_counts_all_candidate_sets(closest):
    """N = 8: of the 7 others, the first ``closest`` are similar; every set of M candidates is equally likely."""
    for candidates in range(1, 8):
        sets = list(combinations(range(7), candidates))
        for neighbours in range(1, candidates + 1):
            hits = sum(sum(item < closest for item in each) >= neighbours for each in sets)
            found = closest_neighbour_probability(8, closest, candidates, neighbours)
            assert found == pytest.approx(hits / len(sets), abs=1e-12)


def test_proposition_1_fails_as_printed():
    printed = (1 - ((50_000 - 5_000) / 50_000) ** 500) ** 100
    assert printed > 0.9999
    assert closest_neighbour_probability(50_000, 5_000, 500, 100) < 1e-4


def test_proposition_1_of_large_numbers():
    stats = pytest.importorskip("scipy.stats")
    for n, closest, candidates, neighbours in (
        (50_000, 5_000, 500, 50),
        (10**6, 10**5, 1000, 100),
        (500, 450, 400, 370),
    ):
        expected = stats.hypergeom.sf(neighbours - 1, n - 1, closest, candidates)
        found = closest_neighbour_probability(n, closest, candidates, neighbours)
        assert found == pytest.approx(float(expected), rel=1e-6)


def two_cliques(size):
    inside = torch.arange(2 * size) < size
    adjacency = (inside[:, None] == inside).double() - torch.eye(2 * size)
    adjacency[0, size] = adjacency[size, 0] = 1.0
    return adjacency, inside


def test_proposition_2_on_two_cliques():
    """FACTS: the worst start is outside with probability 0.0165, the printed bound is 0.0013."""
    adjacency, inside = two_cliques(20)
    found = escape(adjacency, inside, 0.5)
    assert found.worst == pytest.approx(0.0165, abs=5e-5)
    assert found.bound == pytest.approx(0.0013, abs=5e-5)
    assert found.probability <= found.bound
    assert found.undirected
    assert not found.holds
    assert found.conductance == pytest.approx(1 / 381)


def test_escapes_are_those_of_the_iterated_walk():
    """Eq. 10 of the appendix, p = restart 1_u + (1 - restart) M p with M = (I + A D^-1) / 2, iterated in loops."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(7, 7, generator=generator, dtype=torch.float64)
    weights = (weights + weights.T) * (1 - torch.eye(7))
    inside, restart = torch.arange(7) < 3, 0.2
    degree = weights.sum(0)
    outside = []
    for start in range(3):
        p = [float(i == start) for i in range(7)]
        for _ in range(300):
            moved = [0.5 * p[i] + 0.5 * sum(weights[i, j] / degree[j] * p[j] for j in range(7)) for i in range(7)]
            p = [restart * float(i == start) + (1 - restart) * float(moved[i]) for i in range(7)]
        outside.append(sum(p[3:]))
    found = escape(weights, inside, restart)
    assert found.worst == pytest.approx(max(outside), abs=1e-9)
    expected = sum(o * float(d) for o, d in zip(outside, degree, strict=False)) / float(degree[:3].sum())
    assert found.probability == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("restart", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("seed", range(10))
def test_proposition_2_holds_for_a_start_drawn_by_degree(seed, restart):
    generator = torch.Generator().manual_seed(seed)
    weights = (torch.rand(12, 12, generator=generator) < 0.3).double()
    weights = (
        ((weights + weights.T) > 0).double() * (1 - torch.eye(12))
        + torch.eye(12).roll(1, 0)
        + torch.eye(12).roll(-1, 0)
    )
    found = escape(weights, torch.arange(12) < 1 + seed, restart)
    assert found.probability <= found.bound + 1e-12
    assert found.probability <= found.worst


def test_a_proximity_graph_is_directed():
    vectors = torch.nn.functional.normalize(torch.randn(30, 4, generator=torch.Generator().manual_seed(0)), dim=-1)
    graph = build_graph(vectors, 3, 10, torch.Generator().manual_seed(0))
    found = escape(graph, torch.arange(30) < 10, 0.3)
    assert not found.undirected
    assert 0.0 < found.probability < 1.0


def test_wrong_input():
    adjacency, inside = two_cliques(3)
    for arguments in (
        (adjacency, inside, 0.0),
        (adjacency, torch.zeros(6).bool(), 0.5),
        (adjacency, torch.ones(6).bool(), 0.5),
        (adjacency, inside[:3], 0.5),
        (torch.zeros(6, 6), inside, 0.5),
        (-adjacency, inside, 0.5),
    ):
        with pytest.raises(ArgumentError) as raised:
            escape(*arguments)
        assert raised.value.who == "escape"
    for numbers in ((10, 10, 5, 3), (10, 5, 10, 3), (10, 5, 4, 5), (1, 1, 1, 1), (10, 5, 4, 0)):
        with pytest.raises(ArgumentError):
            closest_neighbour_probability(*numbers)
