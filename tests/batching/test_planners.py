"""Planners: what every one promises, what each is for, and the plan as a value."""

from __future__ import annotations

import csv
import pickle
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hardneg.batching.graph import ProximityGraph, build_graph
from hardneg.batching.plan import Segment
from hardneg.batching.planners import (
    Communities,
    Consecutive,
    CuthillMcKee,
    Guard,
    NearestNeighbours,
    Plan,
    Planner,
    Proximity,
    SingleSource,
    Strata,
    UniformPlanner,
    falling,
    registered_planners,
)
from hardneg.batching.planners.communities import undirected
from hardneg.batching.spec import paper_kinds, parse_batches
from hardneg.batching.walks import kinds as walk_kinds
from hardneg.core.errors import ArgumentError, NotFinite
from hardneg.core.schedules import linear
from support.errors import raises, warns

UnitVectors = Callable[..., Tensor]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def clustered(num_clusters: int = 12, per_cluster: int = 25, noise: float = 0.15) -> tuple[Tensor, Tensor]:
    """Unit vectors around random centres, shuffled, and their clusters."""
    centres = torch.nn.functional.normalize(torch.randn(num_clusters, 16, generator=seeded(0)), dim=1)
    labels = torch.arange(num_clusters).repeat(per_cluster)
    spread = noise * torch.randn(len(labels), 16, generator=seeded(1))
    return torch.nn.functional.normalize(centres[labels] + spread, dim=1), labels


def every_planner(n: int) -> list[Planner]:
    planners = [
        UniformPlanner(),
        Proximity(num_neighbours=10, num_candidates=100),
        Proximity(kind="breadth_first", num_neighbours=10),
        Proximity(kind="depth_first", num_neighbours=10),
        Proximity(kind="random", steps="similarity", num_neighbours=10),
        NearestNeighbours(),
        Strata(),
        SingleSource(torch.arange(n) % 3),
        Consecutive(),
    ]
    if find_spec("scipy") is not None:
        planners.append(CuthillMcKee())
    try:
        import pymetis  # noqa: F401
    except ImportError:
        return planners
    return [*planners, Communities(size=8, num_neighbours=10), Communities(size=8, num_neighbours=20, skip=5)]


def test_every_registered_planner_is_tested_here() -> None:
    pytest.importorskip("scipy", reason="the extra `eval` is not installed")
    pytest.importorskip("pymetis", reason="the extra `communities` is not installed")
    assert {planner.name for planner in every_planner(30)} == {
        name
        for name in registered_planners()
        if registered_planners()[name].__module__.startswith("hardneg.batching.planners")
    }


@pytest.mark.parametrize("planner", every_planner(300), ids=repr)
@pytest.mark.parametrize("drop_last", [False, True])
def test_covering_plan_has_every_instance_once(planner: Planner, drop_last: bool) -> None:
    vectors, _ = clustered()
    plan = planner.plan(vectors, 32, seeded(0), drop_last=drop_last)
    assert plan.complete
    assert [len(batch) for batch in plan] == [32] * 9 + ([] if drop_last else [12])
    assert len(set(plan.order.tolist())) == len(plan.order) == (288 if drop_last else 300)


@pytest.mark.parametrize("planner", every_planner(300), ids=repr)
def test_free_plan_has_as_many_batches_of_distinct_instances(planner: Planner) -> None:
    vectors, _ = clustered()
    plan = planner.plan(vectors, 32, seeded(0), coverage="free")
    assert [len(set(batch.tolist())) for batch in plan] == [32] * 9 + [12]
    starts = [int(batch[0]) for batch in plan]
    assert len(set(starts)) == len(starts) or isinstance(planner, SingleSource)


@pytest.mark.parametrize("planner", every_planner(300), ids=repr)
def test_same_seed_same_plan(planner: Planner) -> None:
    vectors, _ = clustered()
    first, again, other = (planner.plan(vectors, 32, seeded(s)) for s in (4, 4, 5))
    assert first.digest() == again.digest()
    assert first.order.tolist() != other.order.tolist()


@pytest.mark.parametrize("planner", every_planner(300), ids=repr)
def test_guard_keeps_groups_and_near_duplicates_apart(planner: Planner) -> None:
    vectors, _ = clustered()
    groups = torch.arange(300) // 4
    groups[:20] = -1  # nobody's group: these may share a batch
    vectors[200:210] = vectors[100:110]  # exact copies
    guard = Guard(groups=groups, near_duplicate=0.9999, vectors=vectors)
    plan = planner.plan(vectors, 30, seeded(0), guard=guard)
    assert sorted(plan.order.tolist()) == list(range(300))
    for batch in plan:
        own = groups[batch]
        own = own[own >= 0]
        assert len(own.unique()) == len(own)
        close = vectors[batch] @ vectors[batch].T - 2 * torch.eye(len(batch))
        assert float(close.max()) <= 0.9999


@given(
    sizes=st.lists(st.integers(1, 6), min_size=8, max_size=20),
    batch_size=st.integers(2, 8),
    seed=st.integers(0, 50),
)
@settings(max_examples=60, deadline=None)
def test_groups_that_fit_are_all_placed(sizes: list[int], batch_size: int, seed: int) -> None:
    """With whole batches, a plan exists iff no group has more members than there are batches; then it is found."""
    groups = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    num_batches = len(groups) // batch_size
    groups = groups[torch.randperm(len(groups), generator=seeded(seed))][: num_batches * batch_size]
    if num_batches == 0 or len(groups.unique()) < batch_size or int(groups.bincount().max()) > num_batches:
        return
    plan = UniformPlanner().plan(len(groups), batch_size, seeded(seed), guard=Guard(groups=groups))
    assert sorted(plan.order.tolist()) == list(range(len(groups)))
    assert all(len(groups[batch].unique()) == len(batch) for batch in plan)


def test_a_group_too_large_for_the_epoch_is_left_out_with_a_warning() -> None:
    groups = torch.cat([torch.zeros(15, dtype=torch.long), torch.arange(1, 26)])
    with warns("guard.repeated"):
        plan = UniformPlanner().plan(40, 4, seeded(0), guard=Guard(groups=groups))
    assert [len(batch) for batch in plan] == [4] * 10
    assert all(int((groups[batch] == 0).sum()) == 1 for batch in plan)
    described = plan.describe()
    assert described.left_out == described.repeats == plan.segments[0].repeated == 5


def test_hardness_comes_in_the_order_of_the_paper() -> None:
    """Uniform, ProSampler, kNN (ProSampler, Fig. 4), in similarity and in false negatives."""
    vectors, labels = clustered(per_cluster=60, noise=0.2)
    uniform, proximity, knn = (
        planner.plan(vectors, 48, seeded(0)).describe(vectors, labels)
        for planner in (UniformPlanner(), Proximity(0.1, num_neighbours=20, num_candidates=200), NearestNeighbours())
    )
    assert uniform.similarity == pytest.approx(uniform.uniform_similarity, abs=0.02)
    assert uniform.similarity + 0.05 < proximity.similarity < knn.similarity - 0.05
    assert uniform.false_negatives < proximity.false_negatives < knn.false_negatives


def test_the_extremes_of_proximity_are_knn_and_uniform() -> None:
    vectors, _ = clustered(per_cluster=40, noise=0.4)
    n = len(vectors)
    for restart, least in ((0.99, 0.95), (1.0, 1.0)):
        near = Proximity(restart).plan(build_graph(vectors, 19, n - 1), 20, seeded(0), coverage="free")
        closest = [set((vectors @ vectors[batch[0]]).topk(20).indices.tolist()) for batch in near]
        assert np.mean([len(own & set(b.tolist())) / len(b) for own, b in zip(closest, near, strict=True)]) >= least
    similarities = []
    for seed in range(8):
        graph = build_graph(vectors, 1, 1, seeded(seed))
        uniform = Proximity(restart=0.0, kind="random").plan(graph, 20, seeded(seed), coverage="free")
        similarities.append(uniform.describe(vectors).similarity)
    error = np.std(similarities) / np.sqrt(len(similarities))
    assert abs(np.mean(similarities) - uniform.describe(vectors).uniform_similarity) < 4 * error


def test_strata_draw_from_one_cluster() -> None:
    vectors, labels = clustered(num_clusters=6, per_cluster=50, noise=0.05)
    plan = Strata(num_strata=6).plan(vectors, 10, seeded(2))
    purity = np.mean([np.bincount(labels[batch]).max() / len(batch) for batch in plan])
    assert purity > 0.85
    assert plan.describe(vectors).similarity > plan.describe(vectors).uniform_similarity + 0.3


def test_communities_are_small_and_tight() -> None:
    pytest.importorskip("pymetis", reason="the extra `communities` is not installed")
    vectors, labels = clustered(num_clusters=12, per_cluster=24, noise=0.1)
    plan = Communities(size=8, num_neighbours=10).plan(vectors, 24, seeded(0))
    described = plan.describe(vectors, labels)
    assert described.uniform_similarity < described.similarity
    # Three communities of eight from anywhere: of 23 others some 7 share the community, and few more the cluster.
    assert 7 / 23 - 0.1 < described.false_negatives < 0.6


def test_communities_leave_out_the_closest_ranks() -> None:
    """B3's window: of clusters of 24, ranks 0 to 22 are the own cluster; without them communities cross clusters."""
    pytest.importorskip("pymetis", reason="the extra `communities` is not installed")
    vectors, labels = clustered(num_clusters=12, per_cluster=24, noise=0.1)
    close, far = (
        Communities(size=8, num_neighbours=end, skip=skip).plan(vectors, 24, seeded(0)).describe(vectors, labels)
        for skip, end in ((0, 20), (23, 60))
    )
    assert far.false_negatives < 0.5 * close.false_negatives
    assert far.similarity < close.similarity
    starts, targets = undirected(ProximityGraph.from_lists([[1, 2], [0, 3], [3, 1], [2, 0]]), skip=1)
    edges = {(i, int(j)) for i in range(4) for j in targets[starts[i] : starts[i + 1]]}
    assert edges == {(0, 2), (2, 0), (1, 3), (3, 1), (2, 1), (1, 2), (3, 0), (0, 3)}
    with raises(ArgumentError, who="Communities", what="num_neighbours=30", got="skip=30"):
        Communities(skip=30)
    with raises(ArgumentError, who="Communities", what="skip=30", got="number of neighbours=19"):
        Communities(skip=30, num_neighbours=130).plan(vectors[:20], 4)


def test_gcbs_batches_are_pieces_of_a_cuthill_mckee_order() -> None:
    pytest.importorskip("scipy", reason="the extra `eval` is not installed")
    ring = ProximityGraph.from_lists([[(i - 1) % 60, (i + 1) % 60] for i in range(60)])
    shuffled = torch.randperm(60, generator=seeded(1)).tolist()
    place = {node: i for i, node in enumerate(shuffled)}
    graph = ProximityGraph.from_lists([[shuffled[j] for j in ring.neighbours[place[node]]] for node in range(60)])
    plan = CuthillMcKee().plan(graph, 10, seeded(0))
    assert sorted(plan.order.tolist()) == list(range(60))
    for batch in plan:  # on a ring such an order goes both ways at once: a batch is one arc or two
        places = np.sort([place[int(node)] for node in batch])
        assert (np.diff(np.append(places, places[0] + 60)) > 1).sum() <= 3
    vectors, labels = clustered(num_clusters=12, per_cluster=25, noise=0.1)
    found = CuthillMcKee().plan(vectors, 25, seeded(0)).describe(vectors, labels)
    assert found.similarity > found.uniform_similarity + 0.2


@pytest.mark.parametrize("text", ["proximity", "knn", "strata", "communities", "cuthill_mckee"])
def test_batches_of_the_command_line_may_be_free(text: str) -> None:
    assert parse_batches(f"{text}()").coverage == "once"
    assert parse_batches(f"{text}(coverage='free')").coverage == "free"


@pytest.mark.parametrize(
    ("text", "kind", "steps"),
    [
        ("proximity()", "restart", "uniform"),
        ("proximity(kind='walk', steps='similarity')", "restart", "similarity"),
        ("proximity(kind='bfs')", "breadth_first", "uniform"),
        ("proximity(kind='breadth_first')", "breadth_first", "uniform"),
        ("proximity(kind='dfs')", "depth_first", "uniform"),
        ("proximity(kind='random')", "random", "uniform"),
    ],
)
def test_the_command_line_knows_the_ways_of_table_12(text: str, kind: str, steps: str) -> None:
    planner = parse_batches(text).planner
    assert planner == Proximity(linear(0.2, 0.05), kind, steps)


@pytest.mark.parametrize(("text", "match"), [("kind='sideways'", "a kind among"), ("steps='far'", "steps among")])
def test_other_ways_are_reported(text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        parse_batches(f"proximity({text})")


def test_a_wrong_kind_is_answered_by_all_names() -> None:
    with pytest.raises(ValueError, match="a kind among") as error:
        parse_batches("proximity(kind='bsf')")
    every = (*paper_kinds, *walk_kinds)
    assert all(repr(name) in str(error.value) for name in every)
    assert all(parse_batches(f"proximity(kind={name!r})") for name in every)


def test_single_source_batches_and_their_remainder() -> None:
    column = torch.tensor([0] * 50 + [1] * 33 + [2] * 17)
    plan = SingleSource(column).plan(100, 10, seeded(0))
    mixed = [len(column[batch].unique()) > 1 for batch in plan]
    assert sum(mixed) == 1  # 5 + 3 + 1 whole batches; 3 + 7 remain
    assert mixed[-1]
    with raises(ArgumentError, who="SingleSource", what="90 instances", got="len(column)=100"):
        SingleSource(column).plan(90, 10)


def test_schedules_of_the_restart() -> None:
    assert [round(falling(0.2)(epoch), 3) for epoch in range(10)] == [
        max(round(0.2 - 0.02 * epoch, 3), 0.05) for epoch in range(10)
    ]
    planner = Proximity(restart=linear(0.2, 0.05))
    assert planner.at(0, 100).restart == 0.2  # type: ignore[attr-defined]
    assert planner.at(50, 100).restart == pytest.approx(0.125)  # type: ignore[attr-defined]
    with raises(ArgumentError, who="Proximity", got="restart=linear(0.2, 0.05)"):
        planner.plan(clustered()[0], 32)


def test_plan_is_saved_loaded_and_exported(tmp_path: Path) -> None:
    vectors, labels = clustered()
    plan = Proximity(num_neighbours=10).plan(vectors, 32, seeded(0))
    plan.save(tmp_path / "plan.npz")
    loaded = Plan.load(tmp_path / "plan.npz")
    assert loaded.digest() == plan.digest()
    assert loaded.segments == plan.segments
    assert [batch.tolist() for batch in loaded] == [batch.tolist() for batch in plan]
    assert list(tmp_path.iterdir()) == [tmp_path / "plan.npz"], "nothing unfinished is left"
    plan.to_csv(tmp_path / "plan.csv")
    with open(tmp_path / "plan.csv") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["instance"]) for row in rows] == plan.order.tolist()
    assert rows[33] == {"batch": "1", "place": "1", "instance": str(plan[1][1]), "segment": "0"}
    assert "coverage 100.0%" in str(plan.describe(vectors, labels))


def test_a_plan_is_not_changed_by_the_plans_that_extend_it() -> None:
    begun = Plan.from_batches([[3, 1]], num_instances=9, batch_size=2)
    one = begun
    for i in range(4):
        one = one.extended([np.array([i, i + 4])], Segment(len(one), 1, "", ""))
    other = begun.extended([np.array([8])], Segment(1, 1, "", ""))
    both = one.extended([np.array([8])], Segment(len(one), 1, "", ""))
    assert [batch.tolist() for batch in begun] == [[3, 1]]
    assert [batch.tolist() for batch in other] == [[3, 1], [8]]
    assert [batch.tolist() for batch in one] == [[3, 1], [0, 4], [1, 5], [2, 6], [3, 7]]
    assert both.order.tolist() == [*one.order.tolist(), 8]
    assert pickle.loads(pickle.dumps(both)).digest() == both.digest()


def test_plan_goes_to_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    plan = UniformPlanner().plan(10, 4, seeded(0))
    plan.to_parquet(tmp_path / "plan.parquet")
    table = parquet.read_table(tmp_path / "plan.parquet")
    assert table["instance"].to_pylist() == plan.order.tolist()


def test_description_is_that_of_explicit_pairs() -> None:
    vectors, labels = clustered(num_clusters=3, per_cluster=7)
    plan = Plan.from_batches([[0, 1, 2, 5], [7, 3], [0, 9, 11]], num_instances=21, batch_size=4)
    pairs = [(int(a), int(b)) for batch in plan for a in batch for b in batch if a != b]
    described = plan.describe(vectors, labels)
    assert described.similarity == pytest.approx(np.mean([float(vectors[a] @ vectors[b]) for a, b in pairs]), abs=1e-6)
    assert described.false_negatives == pytest.approx(np.mean([float(labels[a] == labels[b]) for a, b in pairs]))
    every = [(a, b) for a in range(21) for b in range(21) if a != b]
    assert described.uniform_similarity == pytest.approx(
        np.mean([float(vectors[a] @ vectors[b]) for a, b in every]), abs=1e-6
    )
    assert described.uniform_false_negatives == pytest.approx(
        np.mean([float(labels[a] == labels[b]) for a, b in every])
    )
    assert (described.coverage, described.repeats, described.most_visits, described.left_out) == (8 / 21, 1, 2, 13)


def test_bad_input_is_refused() -> None:
    vectors, _ = clustered()
    with raises(ArgumentError, who="plan", what="300 instances", got="batch_size=301"):
        UniformPlanner().plan(300, 301)
    with pytest.raises(ValueError, match="coverage among"):
        UniformPlanner().plan(300, 10, coverage="twice")
    with raises(ArgumentError, who="UniformPlanner", what="manual_seed(0)", got="generator=0"):
        UniformPlanner().plan(300, 10, 0)  # type: ignore[arg-type]
    with raises(ArgumentError, who="Proximity", got="data='int'"):
        Proximity().plan(300, 10)
    with raises(ArgumentError, who="NearestNeighbours", got="data='ProximityGraph'"):
        NearestNeighbours().plan(ProximityGraph.from_lists([[1], [0]]), 1)
    broken = vectors.clone()
    broken[0, 0] = float("nan")
    for planner in (Proximity(), NearestNeighbours(), Strata()):
        with raises(NotFinite, what="finite vectors", got="NaN or inf"):
            planner.plan(broken, 10)
    with raises(ArgumentError, who="Guard", what="300 instances", got="len(groups)=3"):
        UniformPlanner().plan(300, 10, guard=Guard(groups=torch.arange(3)))
    with raises(ArgumentError, who="Guard", what="10 groups", got="number of groups=5"):
        UniformPlanner().plan(300, 10, guard=Guard(groups=torch.arange(300) % 5))
    with raises(ArgumentError, who="Guard", what="near_duplicate", got="near_duplicate=0.9"):
        Guard(near_duplicate=0.9)
    with raises(ArgumentError, who="Guard", what="10 instances", got="only 1"):
        UniformPlanner().plan(300, 10, guard=Guard(near_duplicate=0.5, vectors=torch.ones(300, 2)))
    with pytest.raises(ValueError, match=r"restart in \[0.0, 1.0\]"):
        Proximity(restart=-0.1)
    with raises(ArgumentError, who="Plan.describe", what="300 instances", got="vectors=5"):
        UniformPlanner().plan(300, 10).describe(vectors[:5])


def test_digits_come_in_the_order_of_the_paper() -> None:
    """The frontier of experiments/plan_frontier.py, its three main points (ProSampler, Fig. 4)."""
    datasets = pytest.importorskip("sklearn.datasets", reason="the extra `eval` is not installed")
    pixels, labels = (torch.from_numpy(part) for part in datasets.load_digits(return_X_y=True))
    vectors = torch.nn.functional.normalize(pixels.float() - pixels.float().mean(0), dim=1)
    found = [
        planner.plan(vectors, 64, seeded(0)).describe(vectors, labels)
        for planner in (UniformPlanner(), Proximity(0.1, num_candidates=500), NearestNeighbours())
    ]
    for name, gap in (("similarity", 0.02), ("false_negatives", 0.01)):
        uniform, proximity, knn = (getattr(description, name) for description in found)
        assert uniform + gap < proximity < knn - gap
    assert all(description.coverage == 1.0 for description in found)


def test_consecutive_batches_are_pieces_of_the_data_in_its_order() -> None:
    plan = Consecutive().plan(100, 8, seeded(0), drop_last=True)
    assert [batch.tolist() for batch in plan] != sorted(batch.tolist() for batch in plan)
    assert all(batch.tolist() == list(range(int(batch[0]), int(batch[0]) + 8)) for batch in plan)
    assert sorted(int(batch[0]) for batch in plan) == list(range(0, 96, 8))
