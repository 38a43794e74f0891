"""The proximity graph: its candidates are uniform, its neighbours the closest of them, its errors clear."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from hardneg.batching import graph as graph_module
from hardneg.batching.graph import ProximityGraph, as_graph, build_graph
from hardneg.batching.planners import NearestNeighbours, Strata
from hardneg.core.errors import ArgumentError, NotFinite
from support.errors import raises
from support.golden_inputs import cases_of

UnitVectors = Callable[..., Tensor]


def candidates_of(n: int, m: int, seed: int, vectors: Tensor) -> Tensor:
    """Each node's candidates: with K = M all of them are kept."""
    return build_graph(vectors, m, m, torch.Generator().manual_seed(seed)).neighbours


@pytest.mark.parametrize(
    ("n", "m", "share", "region_bytes"), [(9, 3, 8, 2**24), (40, 3, 1, 2**24), (9, 3, 1, 64), (40, 3, 1, 64)]
)
def test_candidates_are_a_uniform_set_of_the_others(
    n: int, m: int, share: int, region_bytes: int, unit_vectors: UnitVectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a pool for each node, by blocks of nodes that share one, and by pools from a region of the nodes."""
    monkeypatch.setattr(graph_module, "_pools_per_node", share)
    monkeypatch.setattr(graph_module, "_region_bytes", region_bytes)
    vectors, repeats = unit_vectors(n, 4), 1500
    together = np.zeros((n, n, n))
    for seed in range(repeats):
        rows = candidates_of(n, m, seed, vectors).numpy()
        for a in range(m):
            for b in range(m):
                together[np.arange(n), rows[:, a], rows[:, b]] += 1
    once = np.einsum("ijj->ij", together)
    assert np.all(np.diagonal(once) == 0), "a node is never its own candidate"
    others = ~np.eye(n, dtype=bool)
    assert once.sum() == repeats * n * m
    _check_frequencies(once[others], repeats, m / (n - 1))
    distinct = others[:, :, None] & others[:, None, :] & others[None]
    _check_frequencies(together[distinct], repeats, m * (m - 1) / ((n - 1) * (n - 2)))


def _check_frequencies(counts: np.ndarray, repeats: int, probability: float) -> None:
    """The most extreme of many binomial counts, at a level of 1e-4 for all of them together."""
    tail = stats.binom.cdf(counts.min(), repeats, probability) + stats.binom.sf(counts.max() - 1, repeats, probability)
    assert counts.size * tail > 1e-4


def test_no_candidate_is_repeated(unit_vectors: UnitVectors) -> None:
    for n, m in ((600, 599), (600, 40), (2000, 30)):
        rows = candidates_of(n, m, seed=0, vectors=unit_vectors(n, 3)).sort(dim=1).values
        assert bool((rows[:, 1:] != rows[:, :-1]).all())
        assert not bool((rows == torch.arange(n)[:, None]).any())


def test_all_nodes_are_candidates_equally_often(unit_vectors: UnitVectors) -> None:
    """Shared pools must not leave nodes out of all of them: nothing could reach those."""
    for n, m in ((720, 200), (1797, 1000), (3000, 20)):
        counts = torch.bincount(candidates_of(n, m, seed=0, vectors=unit_vectors(n, 3)).flatten(), minlength=n)
        assert int(counts.min()) > m / 2
        assert int(counts.max()) < 2 * m


def test_neighbours_are_the_closest_candidates(unit_vectors: UnitVectors) -> None:
    vectors = unit_vectors(700, 6)
    candidates = candidates_of(700, 50, seed=3, vectors=vectors)
    graph = build_graph(vectors, 7, 50, torch.Generator().manual_seed(3))
    reference = among_candidates(vectors, candidates, 7)
    assert torch.equal(graph.neighbours, reference.neighbours)
    torch.testing.assert_close(graph.similarities, reference.similarities)
    assert bool((graph.similarities.diff(dim=1) <= 0).all())


@pytest.mark.parametrize("case", [case for case in cases_of("batchsampler") if "inputs" in case], ids=lambda c: c["id"])
def test_golden_graph_with_given_candidates(case: dict) -> None:
    """The authors' candidates, with repeats and the node itself; the walk over this graph has its own golden case."""
    spec = case["inputs"]
    graph = golden_graph(spec)
    vectors, candidates = golden_points(spec)
    for node, row in enumerate(graph.neighbours.tolist()):
        scores = vectors[candidates[node]] @ vectors[node]
        expected = sorted(scores.tolist(), reverse=True)[: len(row)]
        assert (vectors[row] @ vectors[node]).tolist() == pytest.approx(expected, abs=1e-12)
        assert graph.similarities[node].tolist() == pytest.approx(expected, abs=1e-12)
    # FACTS of the official graph on these inputs: 20 self loops, repeats in 32 of the 50 rows.
    assert int((graph.neighbours == torch.arange(50)[:, None]).sum()) == 20
    assert sum(len(set(row)) < len(row) for row in graph.neighbours.tolist()) == 32


def among_candidates(vectors: Tensor, candidates: Annotated[Tensor, "n m"], num_neighbours: int) -> ProximityGraph:
    """The K closest of the candidates given for each node, repeats and the node itself included."""
    top = torch.einsum("nmd,nd->nm", vectors[candidates], vectors).topk(num_neighbours)
    return ProximityGraph(candidates.gather(1, top.indices), top.values)


def golden_points(spec: dict) -> tuple[Tensor, Tensor]:
    points = np.random.default_rng([spec["seed"], 6]).standard_normal((spec["N_points"], spec["d_points"]))
    points /= np.linalg.norm(points, axis=-1, keepdims=True)
    drawn = np.random.default_rng([spec["seed"], 5]).integers(0, spec["N_points"], (spec["N_points"], spec["M"]))
    return torch.from_numpy(points), torch.from_numpy(drawn)


def golden_graph(spec: dict) -> ProximityGraph:
    return among_candidates(*golden_points(spec), 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_graph_is_that_of_brute_force(
    dtype: torch.dtype, unit_vectors: UnitVectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = unit_vectors(300, 5, dtype=dtype)
    scores = (vectors @ vectors.T).fill_diagonal_(-torch.inf)
    expected = scores.topk(8)
    graph = build_graph(vectors, 8, None)
    assert torch.equal(graph.neighbours, expected.indices)
    torch.testing.assert_close(graph.similarities, expected.values)
    monkeypatch.setattr(graph_module, "_searched_exactly", 17)  # blocks of 17 rows, the last one smaller
    monkeypatch.setattr(graph_module, "_most_scores", 17 * 31)
    chunked = build_graph(vectors, 8, None)
    assert torch.equal(chunked.neighbours, graph.neighbours)


def test_all_candidates_but_one_is_nearly_the_exact_graph(
    unit_vectors: UnitVectors, generator: torch.Generator
) -> None:
    vectors = unit_vectors(200, 5)
    exact, all_others = build_graph(vectors, 6, None), build_graph(vectors, 6, 199, generator)
    assert torch.equal(exact.neighbours, all_others.neighbours)


def test_faiss_finds_the_exact_graph_of_few_vectors(unit_vectors: UnitVectors) -> None:
    pytest.importorskip("faiss", reason="the extra `ann` is not installed")
    vectors = unit_vectors(500, 8, dtype=torch.float32)
    graph, exact = build_graph(vectors, 10, None, search="faiss"), build_graph(vectors, 10, None)
    assert torch.equal(graph.neighbours, exact.neighbours)
    many = unit_vectors(12_000, 4, dtype=torch.float32)
    found, right = build_graph(many, 10, None, search="faiss"), build_graph(many, 10, None)
    recall = np.mean([len(np.intersect1d(a, b)) / 10 for a, b in zip(found.neighbours, right.neighbours, strict=True)])
    assert recall > 0.95


def test_same_seed_same_graph_and_another_seed_another(unit_vectors: UnitVectors) -> None:
    vectors = unit_vectors(400, 4)
    first, again, other = (build_graph(vectors, 5, 50, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert first.digest == again.digest
    assert torch.equal(first.neighbours, again.neighbours)
    assert first.digest != other.digest


def test_half_precision_and_gradients_are_left_outside(unit_vectors: UnitVectors) -> None:
    vectors = unit_vectors(50, 4, dtype=torch.bfloat16).requires_grad_()
    graph = build_graph(vectors, 5, 20, torch.Generator().manual_seed(0))
    assert graph.similarities.dtype == torch.float32
    assert not graph.similarities.requires_grad


@pytest.mark.gpu
def test_gpu_gives_the_graph_of_the_cpu(unit_vectors: UnitVectors) -> None:
    vectors = unit_vectors(1000, 8)
    for m in (None, 100):
        here = build_graph(vectors, 10, m, torch.Generator().manual_seed(0))
        there = build_graph(vectors.cuda(), 10, m, torch.Generator().manual_seed(0))
        assert torch.equal(here.neighbours, there.neighbours)


def test_saved_and_loaded_without_pickle(tmp_path: Path, unit_vectors: UnitVectors) -> None:
    graph = build_graph(unit_vectors(60, 4), 5, 20, torch.Generator().manual_seed(0))
    graph.save(tmp_path / "graph.npz")
    loaded = ProximityGraph.load(tmp_path / "graph.npz")
    assert loaded.digest == graph.digest
    assert loaded.name == graph.name == "K=5, M=20"
    assert torch.equal(loaded.similarities, graph.similarities)
    with np.load(tmp_path / "graph.npz", allow_pickle=False) as file:
        assert sorted(file) == ["name", "neighbours", "similarities"]


def test_graph_is_frozen_and_checked() -> None:
    graph = ProximityGraph.from_lists([[1], [0]])
    with pytest.raises(AttributeError):
        graph.neighbours = torch.zeros(1)  # type: ignore[misc]
    for rows in ([[2], [0]], [[-2], [0]]):
        with raises(ArgumentError, who="ProximityGraph", what="nodes in"):
            ProximityGraph.from_lists(rows)
    with raises(ArgumentError, who="ProximityGraph", what="-1 only at the end", got="-1 before a neighbour"):
        ProximityGraph(torch.tensor([[-1, 1], [0, 1]]), torch.ones(2, 2))
    with pytest.raises(ValueError, match="whole numbers"):
        ProximityGraph(torch.zeros(2, 2), torch.ones(2, 2))
    assert len(as_graph([[1], [0]])) == 2


@pytest.mark.parametrize(
    ("k", "m", "message"),
    [
        (
            6,
            5,
            r"build_graph needs at most 5 neighbours, the number of candidates, got num_neighbours=6",
        ),
        (5, 20, r"fewer candidates than the 20 vectors, got num_candidates=20; use num_candidates=None to compare"),
        (20, None, r"at most 19 neighbours"),
        (0, 5, r"num_neighbours of 1 or more"),
    ],
)
def test_bad_numbers_are_refused(k: int, m: int | None, message: str, unit_vectors: UnitVectors) -> None:
    with pytest.raises(ValueError, match=message):
        build_graph(unit_vectors(20, 3), k, m)


def test_arrays_and_seeds_are_answered_with_what_to_pass(unit_vectors: UnitVectors) -> None:
    vectors = unit_vectors(10, 4)
    with raises(ArgumentError, who="build_graph", what="of vectors", got="ndarray", fix="as_tensor"):
        build_graph(vectors.numpy(), 2, 5)  # type: ignore[arg-type]
    with raises(ArgumentError, who="build_graph", what="manual_seed(0)", got="generator=3"):
        build_graph(vectors, 2, 5, 3)  # type: ignore[arg-type]


def test_vectors_that_are_not_finite_are_refused(unit_vectors: UnitVectors) -> None:
    vectors = unit_vectors(20, 3)
    vectors[3, 1] = float("nan")
    with raises(NotFinite, who="build_graph", what="finite vectors", got="NaN or inf"):
        build_graph(vectors, 3, 10)


# Proposition 1 --------------------------------------------------------------------------------------------------------


def all_neighbours_similar(n: int, similar: int, m: int, k: int) -> float:
    """P(all K neighbours are among the S similar ones) = P(at least K of the M candidates are): hypergeometric tail."""
    return float(stats.hypergeom.sf(k - 1, n - 1, similar, m))


def test_proposition_1_in_its_exact_form() -> None:
    n, similar, m, k, repeats = 60, 20, 15, 4, 2000
    vectors = torch.zeros(n, 1, dtype=torch.float64)
    vectors[: similar + 1] = torch.linspace(1.0, 0.9, similar + 1, dtype=torch.float64)[:, None]
    vectors[similar + 1 :] = torch.linspace(-0.1, -1.0, n - similar - 1, dtype=torch.float64)[:, None]
    hits = 0
    for seed in range(repeats):
        graph = build_graph(vectors, k, m, torch.Generator().manual_seed(seed))
        hits += bool((graph.similarities[0] > 0.5).all())
    assert stats.binomtest(hits, repeats, all_neighbours_similar(n, similar, m, k)).pvalue > 1e-3
    # The test can fail: candidates with replacement from all n, as the authors draw them, are another number.
    assert stats.binomtest(hits, repeats, stats.binom.sf(k - 1, m, similar / n)).pvalue < 1e-3


def test_proposition_1_fails_as_printed() -> None:
    n, similar, m, k = 50_000, 5_000, 500, 100
    printed = (1 - ((n - similar) / n) ** m) ** k
    assert printed == pytest.approx(1.0, abs=1e-4)
    assert all_neighbours_similar(n, similar, m, k) < 1e-4


@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1e19, 1e25])
def test_neighbours_do_not_depend_on_the_scale(scale: float, unit_vectors: UnitVectors) -> None:
    vectors = unit_vectors(120, 6).float()
    vectors[7] = 0.0
    power = 2.0 ** round(np.log2(scale))  # exact, so that ties and roundings are the same
    for candidates in (None, 40):
        plain, scaled = (
            build_graph(v, 5, candidates, torch.Generator().manual_seed(0)) for v in (vectors, vectors * power)
        )
        assert torch.equal(plain.neighbours, scaled.neighbours)
        if 1e-15 < scale < 1e20:
            assert torch.equal(plain.similarities * power**2, scaled.similarities)
    for planner in (NearestNeighbours(), Strata(6)):
        plans = [planner.plan(v, 12, torch.Generator().manual_seed(0)) for v in (vectors, vectors * power)]
        assert plans[0].order.tolist() == plans[1].order.tolist()
