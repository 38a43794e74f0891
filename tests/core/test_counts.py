"""A count may be a whole number of numpy or torch, wherever one is taken, and is a plain int afterwards."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

import hardneg as hn
from hardneg.auditing.options import Settings
from hardneg.batching import PlannedBatchSampler, planners
from hardneg.batching.spec import BatchSpec
from hardneg.core.errors import ArgumentError, check_count
from hardneg.core.generators.mochi import MoCHi
from hardneg.core.generators.synco import SynCo
from hardneg.losses import CMC, GradCache, IndividualTemperatures, InstanceDiscrimination
from hardneg.mining import Search
from hardneg.mining.options import MineOptions
from hardneg.mining.select import Rule
from hardneg.state import Cache, Chain, Clusters, Partition
from hardneg.training.options import TrainOptions
from support.errors import raises

vectors = normalize(torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), dim=1)
keys = hn.Keys(vectors, torch.arange(20))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def drawn(number, replace):
    bank = hn.Bank(number(20), number(4))
    bank.push(keys)
    return bank.draw_ids(keys.ids, number(3), replace=replace).tolist()


def sampled(number, folder):
    options = {"segment": number(2), "num_replicas": number(1), "rank": number(0), "seed": number(3)}
    sampler = hn.ProximityBatchSampler(number(20), number(6), plan_file=folder / "plan", **options)
    sampler.graph = hn.build_graph(vectors, number(3), number(10), seeded())
    batches = iter(sampler)
    return list(batches), json.dumps(batches.state_dict())


def rule(seed):
    return repr(Rule(hn.Uniform(), 1, seed=seed))


def planned(planner):
    return repr(planner), list(PlannedBatchSampler(planner, 20, 6, vectors))


cases = {
    "queue": lambda n: repr(hn.Queue(n(8), n(4))),
    "draws of a bank": lambda n: (drawn(n, True), drawn(n, False)),
    "draw": lambda n: hn.draw(torch.zeros(2, 9), n(3), seeded()).tolist(),
    "gumbel": lambda n: hn.draw(torch.zeros(2, 9), n(3), seeded(), method="gumbel").tolist(),
    "states": lambda n: repr([Cache(n(8), n(4)), Chain(n(8), num_views=n(2)), Partition(n(8)), Clusters(n(8), n(2))]),
    "walk": lambda n: hn.walk(hn.build_graph(vectors, n(3), None), n(2), n(5), 0.1, seeded()).tolist(),
    "proximity": lambda n: planned(planners.Proximity(num_neighbours=n(3), num_candidates=n(9), patience=n(50))),
    "strata": lambda n: planned(planners.Strata(n(3))),
    "Cuthill-McKee": lambda n: planned(planners.CuthillMcKee(n(3), n(9))),
    "uniform": lambda n: [batch.tolist() for batch in planners.UniformPlanner().plan(n(20), n(6), seeded())],
    "batches": lambda n: repr(BatchSpec(planners.UniformPlanner(), n(10), n(1))),
    "mine": lambda n: hn.mine(keys, keys, keys.ids, hn.Rank(n(1), n(5)), n(3), search=Search(shards=n(2))).ids.tolist(),
    "window": lambda n: repr(hn.Rank(n(1), n(5)) * hn.Ring(0.1, 0.5, at_least=n(2))),
    "num_negatives": lambda n: float(hn.ContrastiveLoss(num_negatives=n(10))(vectors[:10], vectors[10:])),
    "losses": lambda n: repr([hn.EMC2(n(20), 0.5), hn.SogCLR(n(20), 0.5), InstanceDiscrimination(n(20), n(4), n(5))]),
    "CMC": lambda n: repr(CMC(n(20), n(4), n(5))),
    "temperatures": lambda n: len(IndividualTemperatures(hn.ContrastiveLoss(), n(20)).temperatures),
    "grad cache": lambda n: GradCache(torch.nn.Identity(), n(4)).chunk_size,
    "mochi": lambda n: repr(MoCHi(n(4), n(3), n(2))),
    "synco": lambda n: repr(SynCo(n(4), n(3), n(2))),
    "audit": lambda n: repr(Settings(num_anchors=n(10), seed=n(3))),
    "options of mine": lambda n: json.dumps(asdict(MineOptions("q", "o", k=n(3), seed=n(-3)))),
    "options of train": lambda n: json.dumps(TrainOptions(epochs=n(3), seed=n(2), temperature=n(1)).as_dict()),
    "seeds": lambda n: (rule(n(3)), hn.Bank(8, 4, seed=n(3)).generator().initial_seed()),
}
kinds = {"numpy": np.int64, "torch": torch.tensor}


@pytest.mark.parametrize("case", cases)
@pytest.mark.parametrize("kind", kinds)
def test_counts_of_any_kind(case, kind):
    assert cases[case](kinds[kind]) == cases[case](int)


@pytest.mark.parametrize("kind", kinds)
def test_counts_of_samplers(kind, tmp_path):
    assert sampled(kinds[kind], tmp_path) == sampled(int, tmp_path)


no_counts = [np.float64(3), torch.tensor(3.0), torch.tensor([1, 2]), "3", True, np.True_, torch.tensor(True), None]


@pytest.mark.parametrize("value", no_counts)
def test_other_values_raise(value):
    with raises(ArgumentError, who="mine", what="whole number"):
        check_count("mine", "k", value)


@pytest.mark.parametrize("seed", [1.5, "1", True, 2**63, -(2**63) - 1])
def test_seeds_are_whole_numbers_of_64_bits(seed):
    for make in (rule, lambda seed: MineOptions("q", "o", seed=seed), lambda seed: hn.Bank(8, 4, seed=seed)):
        with pytest.raises(ArgumentError, match=r"needs (a whole number|seed .*), got seed="):
            make(seed)
    with pytest.raises(ArgumentError, match=r"audit needs .* got seed="):
        Settings(seed=seed)


def test_other_numbers_of_options_are_plain():
    options = TrainOptions(temperature=np.float32(0.5), compile=np.True_, learning_rate=torch.tensor(0.25))
    assert [type(value) for value in (options.temperature, options.compile, options.learning_rate)] == [
        float,
        bool,
        float,
    ]
    assert type(MineOptions("q", "o", near_positive=np.float32(0.5)).near_positive) is float
    with raises(ArgumentError, who="train", what="--epochs", got="3.0"):
        TrainOptions(epochs=np.float64(3))
    with raises(ArgumentError, who="train", what="--temperature"):
        TrainOptions(temperature=torch.tensor(0.5, requires_grad=True))
