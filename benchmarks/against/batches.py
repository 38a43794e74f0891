"""Batch samplers beside torch's: one epoch of batches as lists."""

from __future__ import annotations

from typing import Any

from cases import Work, case

TORCH = "RandomSampler and BatchSampler of torch"
PLANS = (12_500, 50_000, 200_000, 500_000, 1_000_000)
WALKS = (6_250, 12_500, 25_000, 50_000, 100_000)


def epochs(sampler: Any, n: int, size: int) -> tuple[Work, Work]:
    """Return an epoch of our sampler and one of torch's, which both return the number of instances."""
    from torch.utils.data import BatchSampler, RandomSampler

    def ours() -> float:
        sampler.set_epoch(sampler.epoch + 1)
        return float(sum(map(len, sampler)))

    return ours, lambda: float(sum(map(len, BatchSampler(RandomSampler(range(n)), size, False))))


def walks(n: int, size: int) -> tuple[Work, Work]:
    """Return epochs of batches that are walks over a graph of 100 neighbours, each instance once."""
    import hardneg as hn
    from hardneg.batching.planners import Proximity
    from hardneg.batching.sampler import PlannedBatchSampler
    from search import vectors

    sampler = PlannedBatchSampler(Proximity(), n, size, coverage="once")
    sampler.data = hn.build_graph(vectors(n, 64, 5), 100, 1000)
    return epochs(sampler, n, size)


@case("uniform plan, batch 16", TORCH, goal=2.0, sizes=PLANS, unit="instances", growth=1.0)
def uniform_plan(n: int) -> tuple[Work, Work]:
    from hardneg.batching.planners import UniformPlanner
    from hardneg.batching.sampler import PlannedBatchSampler

    return epochs(PlannedBatchSampler(UniformPlanner(), n, 16), n, 16)


@case("proximity once, batch 16", TORCH, goal=20.0, sizes=WALKS, unit="instances", growth=1.0)
def proximity(n: int) -> tuple[Work, Work]:
    return walks(n, 16)


@case("HardBatches, batch 256", TORCH, goal=5.0, sizes=WALKS, unit="instances", growth=1.0)
def hard_batches(n: int) -> tuple[Work, Work]:
    """The sampler that HardBatches gives to the trainer of sentence-transformers."""
    return walks(n, 256)
