"""The batch sampler: drop-in, exact length, order from (graphs, seed, epoch) alone, segments, warm-up, refresh."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from hardneg.batching.graph import ProximityGraph, build_graph
from hardneg.batching.planners import Guard, Plan, Proximity, Strata, falling
from hardneg.batching.refresh import Refresh, encode, harvested
from hardneg.batching.sampler import PlannedBatchSampler, ProximityBatchSampler
from hardneg.core.errors import ArgumentError
from hardneg.core.schedules import linear
from hardneg.core.types import Keys
from hardneg.state.pools import Bank
from support.errors import raises, warns

UnitVectors = Callable[..., Tensor]
N = 130


@pytest.fixture
def graph(unit_vectors: UnitVectors) -> ProximityGraph:
    return graph_of(unit_vectors(N, 6), seed=0)


def graph_of(vectors: Tensor, seed: int) -> ProximityGraph:
    return build_graph(vectors, 8, 40, torch.Generator().manual_seed(seed))


def sampler_of(graph: ProximityGraph | None, **options: object) -> ProximityBatchSampler:
    sampler = ProximityBatchSampler(N, 16, restart=0.2, seed=3, **options)
    sampler.graph = graph
    return sampler


@pytest.mark.parametrize("workers", [0, 2])
def test_drops_into_a_loader(graph: ProximityGraph, workers: int) -> None:
    sampler = sampler_of(graph)
    loader = DataLoader(TensorDataset(torch.arange(N)), batch_sampler=sampler, num_workers=workers)
    assert isinstance(sampler, BatchSampler)
    assert len(loader) == 9
    expected = list(sampler_of(graph))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = [batch[0].tolist() for batch in loader]
        assert len(batches) == 9
        assert sorted(i for batch in batches for i in batch) == list(range(N))
        assert (batches == expected) == (epoch == 0)


def test_order_is_a_function_of_graph_seed_and_epoch(graph: ProximityGraph) -> None:
    sampler = sampler_of(graph)
    first = {}
    for epoch in (0, 1, 2):
        sampler.set_epoch(epoch)
        first[epoch] = list(sampler)
    assert first[0] != first[1] != first[2]
    other = sampler_of(graph)
    for epoch in (2, 0, 1):
        for _ in range(2):  # the HF Trainer calls it twice
            other.set_epoch(epoch)
        assert list(other) == first[epoch]
    another_seed = ProximityBatchSampler(N, 16, restart=0.2, seed=4, graph=graph)
    assert list(another_seed) != first[0]


def test_epochs_advance_without_set_epoch(graph: ProximityGraph) -> None:
    sampler, other = sampler_of(graph), sampler_of(graph)
    next(iter(sampler))  # a look at one batch is not an epoch
    for epoch in range(3):
        other.set_epoch(epoch)
        assert list(sampler) == list(other)


def test_new_graph_takes_effect_with_the_next_segment(graph: ProximityGraph, unit_vectors: UnitVectors) -> None:
    later = graph_of(unit_vectors(N, 6, seed=9), seed=0)
    untouched = list(sampler_of(graph, segment=3))
    sampler = sampler_of(graph, segment=3)
    batches = []
    for number, batch in enumerate(sampler):
        batches.append(batch)
        if number == 3:  # in the middle of the second segment
            sampler.graph = later
    assert batches[:6] == untouched[:6]
    assert batches[6:] != untouched[6:]
    assert sorted(i for batch in batches for i in batch) == list(range(N))
    assert [segment.graph for segment in sampler.plan.segments] == [graph.digest, graph.digest, later.digest]
    assert [(segment.first, segment.count) for segment in sampler.plan.segments] == [(0, 3), (3, 3), (6, 3)]


def test_warm_up_epochs_are_uniform(graph: ProximityGraph, unit_vectors: UnitVectors) -> None:
    sampler = sampler_of(graph, warmup_epochs=1)
    plans = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        list(sampler)
        plans.append(sampler.plan)
    assert plans[0].segments[0].planner == "Uniform()"
    assert plans[0].segments[0].graph == ""
    assert plans[1].segments[0].planner.startswith("Proximity(restart=0.2")
    vectors = unit_vectors(N, 6)
    assert plans[1].describe(vectors).similarity > plans[0].describe(vectors).similarity + 0.02


def test_without_a_graph_batches_are_uniform_with_a_warning() -> None:
    sampler = sampler_of(None)
    assert sorted(i for batch in sampler for i in batch) == list(range(N))
    sampler.set_epoch(1)
    with warns("sampler.no_data"):
        list(sampler)


def test_restart_follows_its_schedule(graph: ProximityGraph) -> None:
    for restart, expected in ((linear(0.2, 0.05), [0.2, 0.125, 0.0515]), (falling(0.2), [0.2, 0.05, 0.05])):
        sampler = ProximityBatchSampler(N, 16, restart=restart, seed=0, graph=graph, total_epochs=100)
        for epoch, value in zip((0, 50, 99), expected, strict=True):
            sampler.set_epoch(epoch)
            list(sampler)
            assert f"restart={value}" in sampler.plan.segments[0].planner.replace("0.12500000000000003", "0.125")


@pytest.mark.parametrize("coverage", ["once", "free"])
def test_a_limit_makes_epochs_of_different_batch_sizes_equally_long(graph: ProximityGraph, coverage: str) -> None:
    for size in (8, 16, 32):
        sampler = ProximityBatchSampler(N, size, limit=96, coverage=coverage, drop_last=True, graph=graph)
        assert [len(batch) for batch in sampler] == [size] * (96 // size)


@pytest.mark.parametrize(("drop_last", "length"), [(True, 8), (False, 9)])
@pytest.mark.parametrize("coverage", ["once", "free"])
def test_length_is_that_of_a_plain_epoch(graph: ProximityGraph, drop_last: bool, length: int, coverage: str) -> None:
    sampler = sampler_of(graph, drop_last=drop_last, coverage=coverage)
    plain = BatchSampler(range(N), 16, drop_last)
    assert len(sampler) == len(plain) == length
    assert [len(batch) for batch in sampler] == [len(batch) for batch in plain]


@pytest.mark.parametrize("warmup", [0, 2])
def test_free_batches_come_after_epochs_that_cover_everything(graph: ProximityGraph, warmup: int) -> None:
    sampler = sampler_of(graph, coverage="free", warmup_epochs=warmup)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        seen = {i for batch in sampler for i in batch}
        assert (len(seen) == N) is (epoch < max(1, warmup))


def test_guard_holds_in_the_sampler(graph: ProximityGraph) -> None:
    groups = torch.arange(N) // 5
    for batch in sampler_of(graph, guard=Guard(groups=groups), segment=4):
        assert len(groups[batch].unique()) == len(batch)


def test_base_takes_any_planner(unit_vectors: UnitVectors) -> None:
    sampler = PlannedBatchSampler(Strata(num_strata=4), N, 16, unit_vectors(N, 6), seed=0, segment=2)
    assert sorted(i for batch in sampler for i in batch) == list(range(N))
    assert sampler.plan.segments[0].planner == "Strata(num_strata=4)"


def test_plan_file_holds_all_that_was_given_out(graph: ProximityGraph, tmp_path: Path) -> None:
    sampler = sampler_of(graph, segment=4, plan_file=tmp_path / "plan.npz")
    given = []
    for batch in sampler:
        given.append(batch)
        saved = Plan.load(tmp_path / "plan.npz")
        assert [b.tolist() for b in saved][: len(given)] == given
        assert len(saved) in (4, 8, 9)


def test_resumes_from_the_plan_without_its_graph(graph: ProximityGraph, tmp_path: Path) -> None:
    expected = list(sampler_of(graph))
    sampler = sampler_of(graph, plan_file=tmp_path / "plan.npz")
    next(iter(sampler))
    resumed = sampler_of(None)
    resumed.resume(tmp_path / "plan.npz", position=5)
    assert list(resumed) == expected[5:]
    with raises(ArgumentError, who="ProximityBatchSampler", got="position=10"):
        resumed.resume(tmp_path / "plan.npz", position=10)


def test_state_of_the_iterator_is_small_and_exact(graph: ProximityGraph) -> None:
    expected = list(sampler_of(graph))
    iterator = iter(sampler_of(graph))
    for _ in range(4):
        next(iterator)
    state = iterator.state_dict()
    assert len(json.dumps(state)) < 200
    assert not hasattr(ProximityBatchSampler, "state_dict"), "the sampler runs ahead: only its iterators have a place"
    again = iter(sampler_of(graph))
    again.load_state_dict(state)
    assert list(again) == expected[4:]


def test_another_graph_cannot_resume_unnoticed(graph: ProximityGraph, unit_vectors: UnitVectors) -> None:
    iterator = iter(sampler_of(graph))
    for _ in range(4):
        next(iterator)
    other = iter(sampler_of(graph_of(unit_vectors(N, 6, seed=8), seed=0)))
    with raises(ArgumentError, who="ProximityBatchSampler", got="other batches"):
        other.load_state_dict(iterator.state_dict())
    with raises(ArgumentError, who="ProximityBatchSampler", got="seed=0"):
        iter(ProximityBatchSampler(N, 16, seed=0, graph=graph)).load_state_dict(iterator.state_dict())


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_each_batch(graph: ProximityGraph, world: int) -> None:
    whole = ProximityBatchSampler(N, 8 * world, restart=0.2, seed=3, graph=graph)
    ranks = [sampler_of_rank(graph, world, rank) for rank in range(world)]
    assert {len(sampler) for sampler in ranks} == {len(whole)}
    for global_batch, *parts in zip(whole, *ranks, strict=True):
        assert len({len(part) for part in parts}) == 1
        joined = [i for part in parts for i in part]
        assert joined == global_batch[: len(joined)]
        assert len(global_batch) - len(joined) < world


def sampler_of_rank(graph: ProximityGraph, world: int, rank: int) -> ProximityBatchSampler:
    return ProximityBatchSampler(N, 8, restart=0.2, seed=3, graph=graph, num_replicas=world, rank=rank)


def test_bad_input_is_refused(graph: ProximityGraph) -> None:
    with raises(ArgumentError, who="plan", what="130 instances", got="batch_size=131"):
        ProximityBatchSampler(N, 131)
    with raises(ArgumentError, who="plan", got="batch_size=160"):
        ProximityBatchSampler(N, 40, num_replicas=4, rank=0)
    sampler = ProximityBatchSampler(N + 1, 16)
    with raises(ArgumentError, who="ProximityBatchSampler", what="131 instances", got="len(data)=130"):
        sampler.graph = graph
    with raises(ArgumentError, who="ProximityBatchSampler", what="build_graph", got="graph='Tensor'"):
        sampler.graph = torch.zeros(N + 1, 2)  # type: ignore[assignment]
    with raises(ArgumentError, who="ProximityBatchSampler", got="rank=2"):
        ProximityBatchSampler(N, 16, num_replicas=2, rank=2)
    with raises(ArgumentError, who="ProximityBatchSampler", what="num_instances=131", got="num_instances=130"):
        sampler.plan = sampler_of(graph).plan
    with raises(ArgumentError, who="Proximity", got="restart=2.0"):
        ProximityBatchSampler(N, 16, restart=2)
    with raises(ArgumentError, who="ProximityBatchSampler", got="segment=0"):
        ProximityBatchSampler(N, 16, segment=0)
    with raises(ArgumentError, who="ProximityBatchSampler", got="warmup_epochs=0.5"):
        ProximityBatchSampler(N, 16, warmup_epochs=0.5)  # type: ignore[arg-type]


# Refreshing -----------------------------------------------------------------------------------------------------------


def test_encode_is_in_eval_mode_and_leaves_modes_alone(unit_vectors: UnitVectors) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).double()
    model[1].eval()  # a frozen part stays frozen
    data = unit_vectors(50, 6)
    loader = DataLoader(TensorDataset(data, torch.arange(50)), batch_size=16)
    vectors = encode(model, loader, progress=False)
    assert [module.training for module in model] == [True, False, True]
    model.eval()
    torch.testing.assert_close(vectors, nn.functional.normalize(model(data), dim=1).float(), rtol=1e-5, atol=1e-6)
    assert not vectors.requires_grad
    with raises(ArgumentError, who="encode", got="loader=[]"):
        encode(model, [], progress=True)


def test_refresh_from_a_harvested_bank(unit_vectors: UnitVectors) -> None:
    vectors = unit_vectors(N, 6, dtype=torch.float32)
    bank = Bank(N, 6)
    bank.push(Keys(vectors[:100], ids=torch.arange(100)))
    taken = harvested(bank, N)
    torch.testing.assert_close(taken[:100], vectors[:100])
    assert not taken[100:].any()
    sampler = ProximityBatchSampler(N, 16, seed=0)
    refresh = Refresh(sampler, 5, lambda: harvested(bank, N), num_neighbours=8, num_candidates=40)
    assert [refresh(step) for step in range(1, 11)] == [False] * 4 + [True] + [False] * 4 + [True]
    first = sampler.graph
    refresh(10)
    assert sampler.graph is not None
    assert first is not None
    assert sampler.graph.digest == first.digest, "the same step and vectors give the same graph"
    with raises(ArgumentError, who="harvested", what="below 50", got="largest id=99"):
        harvested(bank, 50)


def test_refresh_gives_vectors_where_vectors_are_needed(unit_vectors: UnitVectors) -> None:
    vectors = unit_vectors(N, 6)
    sampler = PlannedBatchSampler(Strata(), N, 16, seed=0)
    Refresh(sampler, 1, lambda: vectors).now()
    assert torch.equal(sampler.data, vectors)
    vectors.zero_()  # training goes on in the same buffer
    assert sampler.data.any()
    array = unit_vectors(N, 6, seed=1).numpy()
    Refresh(sampler, 1, lambda: array).now()
    assert torch.equal(sampler.data, torch.from_numpy(array))
    assert Proximity.needs == "graph"


def test_a_segment_planned_in_pieces_keeps_its_graph(graph: ProximityGraph, unit_vectors: UnitVectors) -> None:
    other = graph_of(unit_vectors(N, 6, seed=8), seed=0)
    sampler = ProximityBatchSampler(N, 8, restart=0.2, seed=3, graph=graph, segment=6, ahead=2)
    batches = []
    for batch in sampler:
        batches.append(batch)
        if len(batches) == 3:
            sampler.graph = other
    assert sorted(i for batch in batches for i in batch) == list(range(N))
    made_by = [(s.first, s.count, s.graph) for s in sampler.plan.segments]
    assert made_by[:4] == [(0, 2, graph.digest), (2, 2, graph.digest), (4, 2, graph.digest), (6, 2, other.digest)]
    again = ProximityBatchSampler(N, 8, restart=0.2, seed=3, graph=graph, segment=6, ahead=2)
    assert list(again)[:6] == batches[:6], "what is planned depends on the graph at the segment's begin only"
    assert list(again)[6:] != batches[6:]
    with raises(ArgumentError, who="ProximityBatchSampler", what="plan_file", got="ahead=2"):
        ProximityBatchSampler(N, 8, ahead=2, plan_file="plan.npz")


def test_a_graph_to_come_is_waited_for_by_the_next_segment(graph: ProximityGraph, unit_vectors: UnitVectors) -> None:
    sampler = ProximityBatchSampler(N, 8, restart=0.2, seed=3, graph=graph, segment=6)
    expected = list(sampler)
    with ThreadPoolExecutor(1) as thread:
        sampler.data = thread.submit(lambda: graph)
        sampler.set_epoch(0)
        assert list(sampler) == expected
        assert sampler.graph is graph
        sampler.data = thread.submit(lambda: graph_of(unit_vectors(N + 1, 6), seed=0))
        sampler.set_epoch(1)
        with raises(ArgumentError, who="ProximityBatchSampler", what="130 instances", got="len(data)=131"):
            next(iter(sampler))
