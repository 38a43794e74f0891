"""Two gloo processes: the union of their batches is the single-process plan."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.nn.functional import normalize
from torch.utils.data import DataLoader, TensorDataset

from hardneg.batching.graph import ProximityGraph, build_graph
from hardneg.batching.planners import Strata
from hardneg.batching.sampler import PlannedBatchSampler, ProximityBatchSampler
from hardneg.core.errors import ArgumentError
from support.ranks import leave

N = 211


def graph() -> ProximityGraph:
    vectors = normalize(torch.randn(N, 6, generator=torch.Generator().manual_seed(0)), dim=1)
    return build_graph(vectors, 8, 40, torch.Generator().manual_seed(0))


def run_rank(rank: int, world: int, folder: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    sampler = ProximityBatchSampler(N, 10, restart=0.2, seed=5)  # ranks from torch.distributed
    sampler.graph = graph()
    loader = DataLoader(TensorDataset(torch.arange(N)), batch_sampler=sampler)
    mine: list[Any] = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        mine.append([batch[0].tolist() for batch in loader])
        gathered: list[Any] = [None] * world
        distributed.all_gather_object(gathered, (len(sampler), [len(batch) for batch in mine[-1]]))
        assert gathered[0] == gathered[1]
    torch.save(mine, folder / f"rank{rank}.pt")
    leave()


def test_union_of_the_ranks_is_the_single_process_plan(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")  # a fork would inherit Accelerate's state from other tests
    processes = [context.Process(target=run_rank, args=(rank, 2, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    single = ProximityBatchSampler(N, 20, restart=0.2, seed=5, graph=graph())
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    for epoch in range(2):
        single.set_epoch(epoch)
        plan = list(single)
        assert len(ranks[0][epoch]) == len(ranks[1][epoch]) == len(plan) == 11
        joined = [left + right for left, right in zip(ranks[0][epoch], ranks[1][epoch], strict=True)]
        assert joined[:-1] == plan[:-1]
        # 211 = 10 x 20 + 11: the last batch is cut to a multiple of the ranks, so that both have five.
        assert joined[-1] == plan[-1][:10]
        seen = [i for batch in joined for i in batch]
        assert len(seen) == len(set(seen)) == 210


def test_spread_later_is_as_if_made_for_the_ranks() -> None:
    vectors = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    for rank in range(2):
        made = PlannedBatchSampler(Strata(), 40, 5, vectors, num_replicas=2, rank=rank)
        later = PlannedBatchSampler(Strata(), 40, 5, vectors)
        list(later)  # planned for one rank, with clusters for its batches
        later.spread(2, rank)
        later.set_epoch(0)
        assert len(later) == 4
        assert list(later) == list(made)


def test_a_sampler_in_place_of_the_number_names_the_option_of_lightning() -> None:
    other = torch.utils.data.SequentialSampler(range(8))
    with pytest.raises(ArgumentError, match="use_distributed_sampler=False"):
        ProximityBatchSampler(other, batch_size=4, drop_last=False)
