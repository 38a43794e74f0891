"""A segment planned in a process of its own is the segment that the sampler would have planned."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
import torch

import hardneg as hn
from hardneg.batching import ProximityGraph
from hardneg.batching.background import PlanningProcess
from hardneg.batching.sampler import ProximityBatchSampler

N, SEGMENT = 200, 5


def graph_of(seed: int) -> ProximityGraph:
    vectors = torch.nn.functional.normalize(torch.randn(N, 8, generator=torch.Generator().manual_seed(seed)), dim=1)
    return hn.build_graph(vectors, num_neighbours=10, num_candidates=50, generator=torch.Generator().manual_seed(seed))


def batches(process: PlanningProcess | None, epochs: int = 3, warmup: int = 1) -> list[list[int]]:
    """Passes with a new graph two batches before each segment, planned aside if there is a process."""
    sampler = ProximityBatchSampler(N, 10, restart=0.2, seed=1, segment=SEGMENT, warmup_epochs=warmup)
    found, step = [], 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch in sampler:
            found.append(batch)
            step += 1
            if step % SEGMENT == SEGMENT - 2:
                ready: Future[ProximityGraph] = Future()
                graph = graph_of(step)
                if process is not None:
                    sampler.plan_next(graph, process)
                ready.set_result(graph)
                sampler.data = ready
    return found


@pytest.fixture(scope="module")
def process() -> PlanningProcess:
    return PlanningProcess()


@pytest.mark.parametrize("warmup", [0, 1])
def test_planned_aside_is_planned_alike(process: PlanningProcess, warmup: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = batches(None, warmup=warmup)
    planned = []
    kept = ProximityBatchSampler._from_process
    monkeypatch.setattr(
        ProximityBatchSampler, "_from_process", lambda self, plan: planned.append(kept(self, plan)) or planned[-1]
    )
    assert batches(process, warmup=warmup) == expected
    assert sum(plan is not None for plan in planned) >= 3 * N // 10 // SEGMENT - 2 - warmup * N // 10 // SEGMENT


def test_a_plan_of_another_graph_is_not_taken(process: PlanningProcess) -> None:
    sampler = ProximityBatchSampler(N, 10, restart=0.2, seed=1, segment=SEGMENT, graph=graph_of(0))
    sampler.plan_next(graph_of(1), process)
    other = ProximityBatchSampler(N, 10, restart=0.2, seed=1, segment=SEGMENT, graph=graph_of(0))
    assert list(sampler) == list(other)


def test_a_process_that_is_gone_raises(process: PlanningProcess) -> None:
    gone = PlanningProcess()
    gone._process.kill()
    gone._process.wait()
    sampler = ProximityBatchSampler(N, 10, restart=0.2, seed=1, segment=SEGMENT)
    with pytest.raises((EOFError, OSError)):
        sampler.plan_next(graph_of(0), gone)
