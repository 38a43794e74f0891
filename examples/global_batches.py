"""Batches of neighbours from a proximity graph (ProSampler), saved in mid-epoch and resumed exactly.

python examples/global_batches.py
"""

import tempfile
from pathlib import Path

import torch
from torch.nn.functional import normalize
from torch.utils.data import DataLoader

import hardneg as hn
from hardneg.batching.plan import Plan

torch.manual_seed(0)
centres = torch.randn(20, 16)
vectors = normalize(centres[torch.arange(1000) % 20] + 0.5 * torch.randn(1000, 16), dim=-1)  # of your encoder


def new_sampler() -> hn.ProximityBatchSampler:
    sampler = hn.ProximityBatchSampler(num_instances=1000, batch_size=50, restart=0.2, seed=0)
    sampler.graph = hn.build_graph(vectors, num_neighbours=20, num_candidates=200)
    return sampler


def similarity(batches: list[list[int]]) -> float:
    return float(torch.stack([(vectors[rows] @ vectors[rows].T).mean() for rows in map(torch.tensor, batches)]).mean())


sampler = new_sampler()
loader = DataLoader(torch.arange(1000), batch_sampler=sampler)
epoch = [batch.tolist() for batch in loader]
random = [rows.tolist() for rows in torch.randperm(1000).split(50)]
print(f"mean similarity within a batch: {similarity(epoch):.3f}, of random batches {similarity(random):.3f}")
assert sorted(row for batch in epoch for row in batch) == list(range(1000))  # every instance once

interrupted = new_sampler()
batches = iter(interrupted)
done = [next(batches) for _ in range(7)]
with tempfile.TemporaryDirectory() as checkpoint:  # save both with your checkpoint
    interrupted.plan.save(Path(checkpoint) / "plan")
    state = batches.state_dict()
    resumed = new_sampler()  # its graph is another one: the saved plan decides
    resumed.plan = Plan.load(Path(checkpoint) / "plan")
rest = iter(resumed)
rest.load_state_dict(state)
assert sorted(row for batch in [*done, *rest] for row in batch) == list(range(1000))
print("resumed after seven batches: every instance still comes once")
