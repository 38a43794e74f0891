"""The walks: Algorithm 3's distribution, and an end to every one of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_graph import golden_graph
from torch import Tensor

from hardneg.batching import walks as walks_module
from hardneg.batching.graph import ProximityGraph, build_graph
from hardneg.batching.planners import Proximity
from hardneg.batching.sampler import PlannedBatchSampler
from hardneg.batching.walks import Tables, Walker, Walks, paths, walk, walks
from support.golden_inputs import cases_of

UnitVectors = Callable[..., Tensor]


def ring_of(n: int) -> ProximityGraph:
    return ProximityGraph.from_lists([[(i - 1) % n, (i + 1) % n] for i in range(n)])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def algorithm_3(graph: list[list[int]], u: int, size: int, restart: float, rng: random.Random) -> list[int]:
    """ProSampler's Algorithm 3, line by line."""
    visited: list[int] = []
    v = u
    while len(visited) < size:
        if v not in visited:
            visited.append(v)
        v = u if rng.random() < restart else rng.choice(graph[v])
    return visited


def exact_inclusion_on_ring(n: int, size: int, restart: float) -> np.ndarray:
    """P(node in the batch) on a ring from node 0, exactly: the visited are an arc, the state (left, right, place)."""
    inclusion = np.zeros(n)
    arcs = {(0, 0): np.array([1.0])}  # where the walk stands, given the arc, at the moment the arc was reached
    for length in range(1, size):
        grown: dict[tuple[int, int], np.ndarray] = {}
        for left in range(length):
            right = length - 1 - left
            place = arcs.get((left, right))
            if place is None:
                continue
            move = np.zeros((length, length))
            out = np.zeros((length, 2))
            for spot in range(length):
                move[spot, left] += restart
                for step in (-1, 1):
                    if 0 <= spot + step < length:
                        move[spot, spot + step] += (1 - restart) / 2
                    else:
                        out[spot, 0 if step < 0 else 1] += (1 - restart) / 2
            leave = place @ np.linalg.solve(np.eye(length) - move, out)
            for arc, spot, mass in (((left + 1, right), 0, leave[0]), ((left, right + 1), length, leave[1])):
                grown.setdefault(arc, np.zeros(length + 1))[spot] += mass
        arcs = grown
    for (left, right), place in arcs.items():
        inclusion[np.arange(-left, right + 1) % n] += place.sum()
    return inclusion


def inclusion(result: Walks, n: int) -> np.ndarray:
    return np.bincount(result.nodes.numpy().ravel(), minlength=n) / len(result.nodes)


def worst_deviation(seen: np.ndarray, expected: np.ndarray, repeats: int) -> float:
    """The largest deviation of inclusion frequencies in standard errors, over nodes that are not certain."""
    open_ones = (expected > 1e-3) & (expected < 1 - 1e-3)
    expected, seen = expected[open_ones], seen[open_ones]
    return float((np.abs(seen - expected) / np.sqrt(expected * (1 - expected) / repeats)).max())


def test_exact_ring_agrees_with_the_plain_algorithm() -> None:
    rng, graph = random.Random(0), ring_of(12).neighbours.tolist()
    seen = np.bincount(np.ravel([algorithm_3(graph, 0, 5, 0.1, rng) for _ in range(20_000)]), minlength=12) / 20_000
    assert worst_deviation(seen, exact_inclusion_on_ring(12, 5, 0.1), 20_000) < 4.0


def test_inclusion_is_that_of_algorithm_3() -> None:
    repeats, expected = 20_000, exact_inclusion_on_ring(12, 5, 0.1)
    seen = inclusion(walks(ring_of(12), [0] * repeats, 5, 0.1, seeded(0)), 12)
    assert worst_deviation(seen, expected, repeats) < 4.0
    # The test can fail: a restart probability that is wrong by 0.02 is caught.
    for wrong in (0.08, 0.12):
        off = inclusion(walks(ring_of(12), [0] * repeats, 5, wrong, seeded(0)), 12)
        assert worst_deviation(off, expected, repeats) > 5.0


def test_order_of_visits_is_that_of_algorithm_3() -> None:
    rng, repeats = random.Random(1), 8_000
    graph = ProximityGraph.from_lists([[1, 2, 3], [2], [0, 3, 4], [4], [0, 1]])
    rows = [row[row >= 0].tolist() for row in graph.neighbours]
    plain: dict[tuple[int, ...], int] = {}
    for _ in range(repeats):
        visits = tuple(algorithm_3(rows, 2, 4, 0.3, rng))
        plain[visits] = plain.get(visits, 0) + 1
    ours: dict[tuple[int, ...], int] = {}
    for visits in map(tuple, walks(graph, [2] * repeats, 4, 0.3, seeded(1)).nodes.tolist()):
        ours[visits] = ours.get(visits, 0) + 1
    assert ours.keys() == plain.keys()
    a, b = (np.array([count[key] for key in plain], dtype=float) for count in (plain, ours))
    chi_square = ((a - b) ** 2 / (a + b)).sum()
    assert chi_square < len(a) + 4 * np.sqrt(2 * len(a))


def one_by_one(
    tables: Tables, begins: np.ndarray, homes: np.ndarray, lengths: np.ndarray, draws: np.ndarray
) -> np.ndarray:
    """Each excursion by itself, move by move."""
    path, used = [], 0
    for node, home, length in zip(begins.tolist(), homes.tolist(), lengths.tolist(), strict=True):
        lost = False
        for u in draws[used : used + length].tolist():
            degree = int(tables.degrees[node]) if len(tables.degrees) else tables.width
            lost = lost or degree == 0
            if lost:
                node = home
            elif len(tables.cumulative):
                sums = tables.cumulative[node * tables.width :][:degree]
                node = int(tables.neighbours[node * tables.width + np.flatnonzero(sums > u * sums[-1])[0]])
            else:
                node = int(tables.neighbours[node * tables.width + int(u * degree)])
            path.append(node)
        used += length
    return np.array(path)


@pytest.mark.parametrize("steps", ["uniform", "similarity"])
@pytest.mark.parametrize("restart", [0.15, 0.6, 1.0])
@pytest.mark.parametrize("ragged", [False, True])
def test_excursions_at_once_are_those_one_by_one(
    restart: float, steps: str, ragged: bool, unit_vectors: UnitVectors
) -> None:
    graph = build_graph(unit_vectors(400, 6), 9, 60, seeded(0))
    if ragged:  # rows of 0 to 9 neighbours
        cut = torch.arange(9) >= torch.randint(10, (400, 1), generator=seeded(1))
        graph = ProximityGraph(graph.neighbours.masked_fill(cut, -1), graph.similarities.masked_fill(cut, 0.0))
    tables, rng = Walker(graph, steps=steps)._tables, np.random.default_rng(0)
    homes, lengths = rng.integers(400, size=50), rng.geometric(restart, 50)
    begins, draws = rng.integers(400, size=50), rng.random(int(lengths.sum()))
    expected = one_by_one(tables, begins, homes, lengths, draws)
    assert np.array_equal(paths(tables, begins, homes, lengths, draws), expected)


@pytest.mark.parametrize("restart", [0.0, 0.01, 0.3])
def test_first_excursions_of_several_walks_are_each_their_own(restart: float) -> None:
    """On two islands no walk leaves its own, and a walk that was cut goes on where it stands."""
    one_way = ProximityGraph.from_lists([[(i + 1) % 20] for i in range(20)] + [[20 + (i + 1) % 20] for i in range(20)])
    walker, rng = Walker(one_way), np.random.default_rng(0)
    free = np.zeros(40, dtype=np.uint8)
    for start, begun in zip([3, 25], walker.excursions(np.array([3, 25]), 8, restart, rng), strict=True):
        walker.begin(start, restart)
        first = walker.first_nodes(begun, 19, free)
        island = start // 20 * 20
        assert set(first.tolist()) <= set(range(island, island + 20)) - {start}
        rest = walker.more(19 - len(first), free, rng, 10_000)
        expected = [island + (start + step) % 20 for step in range(1, 20)]
        assert [*first.tolist(), *rest.tolist()] == expected[: len(first) + len(rest)]
        assert len(first) + len(rest) == 19


def test_an_epoch_is_planned_in_few_turns(unit_vectors: UnitVectors, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning runs beside a GPU's steps, so its turns through Python count: fewer than one for a batch."""
    turns: list[int] = []
    original = paths
    monkeypatch.setattr(walks_module, "paths", lambda *args: turns.append(1) or original(*args))
    graph = build_graph(unit_vectors(2048, 8), 20, 200, seeded(0))
    sampler = PlannedBatchSampler(Proximity(restart=0.1), 2048, 16, graph, seed=0, ahead=8)
    assert sorted(node for batch in sampler for node in batch) == list(range(2048))
    assert 0 < len(turns) < len(sampler)


walk_cases = [case for case in cases_of("batchsampler") if "inclusion_prob" in case]


@pytest.mark.parametrize("case", walk_cases, ids=[case["id"].split("/")[1] for case in walk_cases])
def test_golden_inclusion(case: dict[str, Any]) -> None:
    inputs = {c["id"]: c["inputs"] for c in cases_of("batchsampler") if "inputs" in c}
    graph, hyper = case["graph"], case["hyper"]
    if isinstance(graph, str):
        graph = golden_graph(inputs[graph.removeprefix("neighbours of ")])
    else:
        graph = ProximityGraph.from_lists(graph)
    repeats = 20_000
    result = walks(graph, [hyper["start"]] * repeats, hyper["batch_size"], hyper["alpha"], seeded(2))
    seen, recorded = inclusion(result, len(graph)), np.array(case["inclusion_prob"])
    pooled = (seen + recorded) / 2
    error = np.sqrt(pooled * (1 - pooled) * (1 / repeats + 1 / hyper["reps"]))
    assert np.all(np.abs(seen - recorded) <= 5 * error + 1e-9)
    assert int(result.filled.sum()) == 0


def test_walk_gives_distinct_nodes_from_its_start(unit_vectors: UnitVectors) -> None:
    graph = build_graph(unit_vectors(200, 5), 8, 50, seeded(0))
    for kind in walks_module.kinds:
        nodes = walk(graph, 17, 64, 0.2, seeded(3), kind=kind)
        assert nodes[0] == 17
        assert len(set(nodes.tolist())) == 64
        assert torch.equal(nodes, walk(graph, 17, 64, 0.2, seeded(3), kind=kind))


def test_breadth_first_takes_the_closest_first() -> None:
    graph = ProximityGraph.from_lists([[3, 1], [4, 0], [0, 1], [2, 5], [5, 0], [0, 1]])
    assert walk(graph, 0, 6, 0.0, kind="breadth_first").tolist() == [0, 3, 1, 2, 5, 4]


def test_depth_first_goes_as_far_as_it_can() -> None:
    path = ProximityGraph.from_lists([[1], [2], [3], [4], []])
    assert walk(path, 0, 5, 0.0, kind="depth_first").tolist() == [0, 1, 2, 3, 4]
    fork = ProximityGraph.from_lists([[1, 2], [3], [4], [], []])
    for seed in range(10):
        nodes = walk(fork, 0, 5, 0.0, seeded(seed), kind="depth_first").tolist()
        assert nodes in ([0, 1, 3, 2, 4], [0, 2, 4, 1, 3])


def test_random_walk_never_returns_to_its_start() -> None:
    one_way = ProximityGraph.from_lists([[(i + 1) % 30] for i in range(30)])
    assert walk(one_way, 4, 30, 0.9, kind="random").tolist() == [*range(4, 30), *range(4)]


def test_steps_by_similarity() -> None:
    star = ProximityGraph(
        torch.tensor([[1, 2, 3], [0, -1, -1], [0, -1, -1], [0, -1, -1]]),
        torch.tensor([[0.6, 0.3, -0.5], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
    )
    first = walks(star, [0] * 6000, 2, 0.0, seeded(0), steps="similarity").nodes[:, 1]
    share = torch.bincount(first, minlength=4) / 6000
    assert share.tolist() == pytest.approx([0.0, 2 / 3, 1 / 3, 0.0], abs=0.03)
    even = walks(star, [0] * 6000, 2, 0.0, seeded(0)).nodes[:, 1]
    assert (torch.bincount(even, minlength=4) / 6000).tolist() == pytest.approx([0.0, 1 / 3, 1 / 3, 1 / 3], abs=0.03)


def test_every_walk_ends_and_what_was_filled_is_counted() -> None:
    islands = ProximityGraph.from_lists([[1], [0], [3], [2], [], [4]])
    for restart in (0.0, 0.5, 1.0):
        result = walks(islands, range(6), 6, restart, seeded(0))
        assert all(sorted(row) == list(range(6)) for row in result.nodes.tolist())
        assert bool((result.filled >= 2).all())
        assert result.nodes[0, :2].tolist() == [0, 1], "what can be reached comes first"
    alone = walks(ProximityGraph.from_lists([[]]), [0], 1, 0.5)
    assert alone.nodes.tolist() == [[0]]
    assert alone.filled.tolist() == [0]


def test_fill_is_uniform_over_the_rest() -> None:
    islands = ProximityGraph.from_lists([[1], [0], [], [], [], []])
    third = walks(islands, [0] * 500, 3, 0.2, seeded(0)).nodes[:, 2]
    shares = (torch.bincount(third, minlength=6) / 500).tolist()
    assert shares == pytest.approx([0, 0, 0.25, 0.25, 0.25, 0.25], abs=0.08)  # four standard errors


def test_restart_of_one_is_the_start_and_its_neighbours(unit_vectors: UnitVectors) -> None:
    """The paper's description of alpha = 1, where Algorithm 3 as printed never ends."""
    graph = build_graph(unit_vectors(100, 4), 12, None)
    nodes = walk(graph, 5, 13, 1.0, seeded(0))
    assert set(nodes.tolist()) == {5, *graph.neighbours[5].tolist()}


@given(
    rows=st.integers(1, 9).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, n - 1), max_size=4), min_size=n, max_size=n)
    ),
    restart=st.sampled_from([0.0, 0.3, 1.0]),
    kind=st.sampled_from(walks_module.kinds),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_any_small_graph_gives_a_whole_walk(rows: list[list[int]], restart: float, kind: str, seed: int) -> None:
    graph = ProximityGraph.from_lists(rows)
    for size in {1, len(rows)}:
        nodes = walk(graph, seed % len(rows), size, restart, seeded(seed), kind=kind).tolist()
        assert len(set(nodes)) == size
        assert nodes[0] == seed % len(rows)


def test_bad_arguments_are_refused() -> None:
    ring = ring_of(5)
    for arguments, message in [
        ((ring, 0, 6, 0.1), "at most 5 nodes, got size=6"),
        ((ring, 5, 2, 0.1), r"a start in \[0, 5\)"),
        ((ring, 0, 2, 1.5), r"walk needs restart in \[0.0, 1.0\], got restart=1.5"),
        ((ring, 1.5, 2, 0.1), "walk needs a whole number, got start=1.5"),
        ((ring, 0, 2, "often"), "walk needs a number, got restart='often'"),
        ((ring, 0, 2, 0.1, 0), r"walk needs a torch.Generator, such as .*, got generator=0"),
    ]:
        with pytest.raises(ValueError, match=message):
            walk(*arguments)
    with pytest.raises(ValueError, match="a kind among"):
        walk(ring, 0, 2, 0.1, kind="sideways")
    with pytest.raises(ValueError, match="steps among"):
        walk(ring, 0, 2, 0.1, steps="loud")


# Proposition 2 --------------------------------------------------------------------------------------------------------


def escape_probabilities(adjacency: np.ndarray, inside: np.ndarray, restart: float) -> np.ndarray:
    """For each start u the stationary mass outside S of p_u = restart 1_u + (1 - restart) M p_u, M the lazy walk."""
    n = len(adjacency)
    lazy = (np.eye(n) + adjacency / adjacency.sum(0)) / 2
    stationary = restart * np.linalg.inv(np.eye(n) - (1 - restart) * lazy)  # column u is p_u
    return stationary[~inside].sum(0)


def conductance(adjacency: np.ndarray, inside: np.ndarray) -> float:
    degree = adjacency.sum(0)
    return float(adjacency[inside][:, ~inside].sum() / min(degree[inside].sum(), degree[~inside].sum()))


def two_cliques(size: int) -> tuple[np.ndarray, np.ndarray]:
    inside = np.arange(2 * size) < size
    adjacency = (inside[:, None] == inside).astype(float) - np.eye(2 * size)
    adjacency[0, size] = adjacency[size, 0] = 1.0
    return adjacency, inside


def test_proposition_2_fails_as_printed() -> None:
    adjacency, inside = two_cliques(20)
    bound = (1 - 0.5) / (2 * 0.5) * conductance(adjacency, inside)
    worst = escape_probabilities(adjacency, inside, 0.5)[inside].max()
    assert worst == pytest.approx(0.0165, abs=5e-5)
    assert bound == pytest.approx(0.0013, abs=5e-5)


@given(seed=st.integers(0, 10_000), restart=st.floats(0.01, 1.0))
@settings(max_examples=60, deadline=None)
def test_proposition_2_holds_when_the_start_is_drawn_by_degree(seed: int, restart: float) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(4, 16))
    adjacency = np.triu(rng.random((n, n)) < rng.uniform(0.1, 0.9), 1).astype(float)
    ring = np.roll(np.eye(n), 1, axis=1)
    adjacency = np.maximum(np.maximum(adjacency, adjacency.T), np.maximum(ring, ring.T))
    np.fill_diagonal(adjacency, 0.0)
    inside = np.arange(n) < rng.integers(1, n)
    degree = adjacency.sum(0)
    escape = escape_probabilities(adjacency, inside, restart)
    by_degree = (escape * degree)[inside].sum() / degree[inside].sum()
    assert by_degree <= (1 - restart) / (2 * restart) * conductance(adjacency, inside) + 1e-12


def test_our_walk_escapes_as_the_stationary_distribution_says() -> None:
    """An excursion of the restarting walk ends outside S as often as p_u says, lazily walked on the graph itself."""
    adjacency, inside = two_cliques(6)
    lazy = ProximityGraph.from_lists(
        [[*np.flatnonzero(row), *[i] * int(row.sum())] for i, row in enumerate(adjacency)]  # a loop per edge: half
    )
    expected = escape_probabilities(adjacency, inside, 0.3)[0]
    rng, outside, moves = random.Random(0), 0, 60_000
    rows, node = [row[row >= 0].tolist() for row in lazy.neighbours], 0
    for _ in range(moves):
        node = 0 if rng.random() < 0.3 else rng.choice(rows[node])
        outside += not inside[node]
    assert outside / moves == pytest.approx(expected, abs=0.01)
    # The first new node of our walk from 0 is outside with chance 1/6, the one edge of six that leaves.
    second = walks(lazy, [0] * 6000, 2, 0.3, seeded(0)).nodes[:, 1]
    assert float((second >= 6).double().mean()) == pytest.approx(1 / 6, abs=0.02)
