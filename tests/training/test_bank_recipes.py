"""Recipes that remember the data set: instance discrimination, CMC, Local Aggregation, the negative cache.

Loss and gradient of a step against plain loops, what is drawn, when clusters are made, runs that are cut, wrong input.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import hardneg as hn
from hardneg.comparing.arms import parse_arm
from hardneg.core.errors import ArgumentError, DataChanged, HardnegError
from hardneg.core.keyed import generator_at
from hardneg.state.clusters import Clusters
from hardneg.training.augmentation.augment import PRESETS
from hardneg.training.data.images import ImageData
from hardneg.training.data.inputs import joined
from hardneg.training.data.pairs import TextPairs
from hardneg.training.loop.method import Batch
from hardneg.training.loop.records import final_of, has_collapsed
from hardneg.training.loop.runs import Run
from hardneg.training.options import RECIPES
from hardneg.training.recipes.cmc import CMCRecipe, aspects_of, lab_of
from hardneg.training.recipes.instance import Instance
from hardneg.training.recipes.local_aggregation import LocalAggregation
from hardneg.training.recipes.negative_cache import NegativeCache
from support.errors import raises
from support.steps import assert_step, unit
from support.texts import pair_table, text_file
from support.training_runs import assert_same, everything, few_digits, interrupted, run, short

SIZE, DIM, STEPS = 20, 8, 4
IDS = torch.tensor([7, 2, 19, 11, 5, 0])
NUM_IDS = len(IDS)
MAKERS: dict[str, Any] = {
    "instance": Instance, "cmc": CMCRecipe, "local-aggregation": LocalAggregation, "negative-cache": NegativeCache
}  # fmt: skip


def made(recipe: str, channels: int = 1, **options: Any) -> tuple[Any, Batch]:
    """A method whose bank or cache has the first step behind it, and a batch of other views."""
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randint(0, 256, (SIZE, channels, 8, 8), dtype=torch.uint8, generator=generator)
    wanted = RECIPES[recipe](
        **{"dim": DIM, "temperature": 0.3, "encoder": "tiny", "epochs": 5, "batch_size": 6, **options}
    )
    data = ImageData(pixels, torch.arange(SIZE) % 3, torch.arange(SIZE), "noise", ("a", "b", "c")).prepared(wanted)
    method = MAKERS[recipe](wanted, data, 5 * STEPS)
    method.set_progress(0, 5 * STEPS)
    method.loss_of(method.encoder, batch_of(data, torch.arange(6), 0))
    method.after_step()
    method.set_progress(1, 5 * STEPS)
    with torch.no_grad():  # training has moved the encoder away from what it remembers
        for weights in method.encoder.parameters():
            weights += 0.05 * torch.randn(weights.shape, generator=generator)
    return method, batch_of(data, IDS, 1)


def batch_of(data: ImageData, ids: Tensor, epoch: int) -> Batch:
    assert data.labels is not None
    return Batch(torch.cat(data.views(ids, epoch, 0)), ids, data.labels[ids])


def nce(z: Tensor, entries: Tensor, own: Tensor, draws: Tensor, log_z: float | None) -> tuple[Tensor, float]:
    """Binary NCE, pair by pair, and log Z as it is afterwards."""
    share, k = draws.shape[1] / SIZE, draws.shape[1]
    real = [z[i] @ entries[own[i]] / 0.3 for i in range(len(z))]
    noise = [z[i] @ entries[j] / 0.3 for i in range(len(z)) for j in draws[i]]
    new = SIZE * torch.stack(real + noise).detach().double().exp().mean()
    now = float((new if log_z is None else 0.99 * math.exp(log_z) + 0.01 * new).log())
    losses = [-(s.exp() / (s.exp() + share * math.exp(now))).log() for s in real]
    losses += [-(share * math.exp(now) / (s.exp() + share * math.exp(now))).log() for s in noise]
    assert len(noise) == k * len(z)
    return torch.stack(losses).sum() / len(z), now


def softmax(z: Tensor, entries: Tensor, own: Tensor, draws: Tensor) -> Tensor:
    losses = []
    for i in range(len(z)):
        scores = torch.stack([z[i] @ entries[j] / 0.3 for j in (own[i], *draws[i])])
        losses.append(-scores.log_softmax(0)[0])
    return torch.stack(losses).mean()


def drawn_by(method: Any, z: Tensor, bank: Any, num_draws: int) -> Tensor:
    """What the next step draws, of copies: nothing advances."""
    bank = copy.deepcopy(bank)
    if method.uniform:
        ids: Tensor = bank.draw(IDS, num_draws).ids
        return ids
    method.keys = hn.Keys(z.detach(), IDS, IDS % 3)
    found: Tensor = method.drawn(z, bank)
    return found


# Instance discrimination.


def test_instance_is_nce_against_uniform_draws() -> None:
    method, batch = made("instance", num_draws=5)
    z, bank = unit(method.encoder, batch.first), method.banks[0]
    before = float(method.contrasts[0].running_z.log_z)
    draws, entries = drawn_by(method, z, bank, 5), bank.vectors.clone()
    assert not bool((draws == IDS[:, None]).any())
    expected, log_z = nce(z, entries, IDS, draws, before)
    loss = assert_step(method, batch, expected)
    assert method.recorded(loss) == loss
    assert float(method.contrasts[0].running_z.log_z) == pytest.approx(log_z, rel=1e-6)
    torch.testing.assert_close(bank.vectors, entries)
    method.after_step()
    torch.testing.assert_close(bank.vectors[IDS], normalize(0.5 * entries[IDS] + 0.5 * z.detach(), dim=-1))
    torch.testing.assert_close(method.harvest().vectors, z.detach())
    assert bank.labels.tolist() == [i % 3 for i in range(SIZE)]


@pytest.mark.parametrize("negatives", ["Uniform()", "Ring(0.0, 0.3)", "OtherLabel() * Tilt(2.0)"])
def test_instance_is_rings_softmax_over_draws(negatives: str) -> None:
    method, batch = made("instance", negatives=negatives, loss="softmax", num_draws=7)
    z, bank = unit(method.encoder, batch.first), method.banks[0]
    draws, entries = drawn_by(method, z, bank, 7), bank.vectors.clone()
    assert_step(method, batch, softmax(z, entries, IDS, draws))
    for i, own in enumerate(IDS.tolist()):
        others = sorted((j for j in range(SIZE) if j != own), key=lambda j: -float(entries[j] @ z[i].detach()))
        if negatives.startswith("Ring"):
            assert set(draws[i].tolist()) <= set(others[: int(0.3 * len(others))])
        elif negatives.startswith("Other"):
            assert all(j % 3 != own % 3 for j in draws[i].tolist())
    method.loss_of(method.encoder, batch)
    assert not torch.equal(drawn_by(method, z, bank, 7), draws), "the next step draws others"


@pytest.mark.parametrize("negatives", ["Uniform()", "Ring(0.0, 0.5)"])
def test_algorithm_1_of_ring_has_no_positive_in_the_denominator(negatives: str) -> None:
    """Wu et al. 2021, Algorithm 1: loss = -dps + logsumexp(ring_dps)."""
    options = {"negatives": negatives, "loss": "softmax", "num_draws": 7, "positives_in_denominator": "none"}
    method, batch = made("instance", **options)
    z, bank = unit(method.encoder, batch.first), method.banks[0]
    draws, entries = drawn_by(method, z, bank, 7), bank.vectors.clone()
    losses = []
    for i, own in enumerate(IDS.tolist()):
        drawn = [z[i].double() @ entries[j].double() / 0.3 for j in draws[i] if j >= 0]
        losses.append(torch.logsumexp(torch.stack(drawn), 0) - z[i].double() @ entries[own].double() / 0.3)
    expected = torch.stack(losses).mean()
    loss = assert_step(method, batch, expected.float())
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("recipe", ["instance", "cmc"])
def test_ring_with_c_i_has_the_cluster_among_its_positives(recipe: str) -> None:
    """Wu et al. 2021, appendix F: -log (sum over C_i of e^s / (e^a + sum over the drawn ring of e^s))."""
    options = {
        "negatives": "Ring(0.1, 0.6)",
        "num_draws": 6,
        "clusters": 4,
        "cluster_runs": 2,
        "cluster_positives": True,
    }
    method, batch = made(recipe, **options)
    views = method.split(method.encoder(batch.first))
    drawn = [drawn_by(method, z, bank, 6) for z, bank in zip(views, reversed(method.banks), strict=True)]
    groups, total = method.clusters.assignments, torch.zeros((), dtype=torch.float64)
    for z, bank, draws in zip(views, reversed(method.banks), drawn, strict=True):
        entries = bank.vectors.double()
        for i, own in enumerate(IDS.tolist()):
            s = z[i].double() @ entries.T / 0.3
            close = [j for j in range(SIZE) if bool((groups[j] == groups[own]).any())]
            assert own in close
            below = s[own].exp() + sum(s[j].exp() for j in draws[i] if j >= 0)
            total = total + below.log() - torch.stack([s[j] for j in close]).logsumexp(0)
    loss = assert_step(method, batch, (total / NUM_IDS).float())
    torch.testing.assert_close(loss.double(), (total / NUM_IDS).detach(), rtol=1e-6, atol=1e-6)


def test_before_its_first_clusters_ring_with_c_i_is_ring() -> None:
    method, batch = made(
        "instance", negatives="Ring(0.0, 0.5)", clusters=3, num_draws=5, cluster_positives=True, warmup=1
    )
    z, bank = unit(method.encoder, batch.first), method.banks[0]
    draws, entries = drawn_by(method, z, bank, 5), bank.vectors.clone()
    assert_step(method, batch, softmax(z, entries, IDS, draws))


def test_draws_have_the_weights_of_the_expression() -> None:
    method, batch = made("instance", negatives="Tilt(1.5)", num_draws=4000)
    z, bank = unit(method.encoder, batch.first), method.banks[0]
    draws = drawn_by(method, z, bank, 4000)
    for i, own in enumerate(IDS.tolist()):
        logits = (1.5 * bank.vectors @ z[i] / 0.3).detach()
        logits[own] = -math.inf
        shares = torch.bincount(draws[i], minlength=SIZE) / 4000
        torch.testing.assert_close(shares, logits.softmax(0), atol=0.03, rtol=0)


def test_draws_follow_schedules() -> None:
    """Half-way, a tilt that grows from 0 to 3 is a tilt of 1.5."""
    found = []
    for tilt in ("Tilt(linear(0.0, 3.0))", "Tilt(1.5)", "Tilt(0.0)"):
        method, batch = made("instance", negatives=tilt, num_draws=50)
        method.set_progress(10, 20)
        found.append(drawn_by(method, unit(method.encoder, batch.first), method.banks[0], 50))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_diagnostics_are_of_the_whole_bank_and_of_draws_without_a_gradient() -> None:
    method, batch = made("instance", negatives="Tilt(1.5)", num_draws=6)
    method.loss_of(method.encoder, batch)
    z, bank = unit(method.encoder, batch.first).detach(), method.banks[0]
    hardness, false = [], []
    for i, own in enumerate(IDS.tolist()):
        others = torch.tensor([j for j in range(SIZE) if j != own])
        similarity = bank.vectors[others] @ z[i]
        weights = (1.5 * similarity / 0.3).softmax(0)
        hardness.append(weights @ similarity)
        false.append(weights[others % 3 == own % 3].sum())
    found = method.diagnose().summary()
    assert found["hardness"] == pytest.approx(float(torch.stack(hardness).mean()), rel=1e-5)
    assert found["false_negatives"] == pytest.approx(float(torch.stack(false).mean()), rel=1e-5)
    assert found["effective_temperature"] == pytest.approx(0.3 / 2.5, rel=1e-4)
    assert found["effective_number"] <= 6.0
    assert found["attracted"] == 0.0


@pytest.mark.parametrize("recipe", ["instance", "local-aggregation", "cmc"])
def test_the_bank_is_filled_with_unseen_first_views_before_the_first_step(recipe: str) -> None:
    method, _ = made(recipe, momentum=0.0)
    torch.manual_seed(0)
    fresh = type(method)(method.options, method.data, 5 * STEPS)
    fresh.set_progress(0, 5 * STEPS)
    fresh.loss_of(fresh.encoder, batch_of(method.data, IDS, 0))
    first = fresh.encoder(method.data.views(torch.arange(SIZE), method.options.epochs, 0)[0])
    for bank, view in zip(fresh.banks, first.chunk(len(fresh.banks), dim=1), strict=True):
        torch.testing.assert_close(bank.vectors, normalize(view, dim=-1).detach(), rtol=1e-4, atol=1e-5)


def test_a_bank_of_pairs_never_sees_their_second_texts(tmp_path: Path) -> None:
    """One view of each item (Wu et al. 2018): what is paired with it is another item's or another encoder's."""
    wanted = RECIPES["instance"](data=pair_table(tmp_path / "a.jsonl", SIZE), dim=DIM, epochs=5, batch_size=6)
    pairs = TextPairs.read(wanted.data.partition(":")[2], wanted).prepared(wanted)
    method = Instance(wanted, pairs, 5 * STEPS)
    method.set_progress(0, 5 * STEPS)
    method.loss_of(method.encoder, Batch(joined(pairs.views(IDS, 0, 0)), IDS, None))
    first, second = (unit(method.encoder, view).detach() for view in pairs.views(torch.arange(SIZE), 5, 0))
    torch.testing.assert_close(method.banks[0].vectors, first, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(first, second, atol=1e-2)


# CMC.


@pytest.mark.parametrize("channels", [1, 3])
def test_cmc_compares_each_aspect_with_the_past_of_the_other(channels: int) -> None:
    method, batch = made("cmc", channels, negatives="Ring(0.0, 0.5)", num_draws=5)
    preset = PRESETS["tiny" if channels == 1 else "cifar"]
    mean, std = (torch.tensor(one)[:, None, None] for one in (preset.mean, preset.std))
    black, white = (0.0 - mean) / std, (1.0 - mean) / std
    one, two = aspects_of((batch.first - black) / (white - black))
    z1, z2 = unit(method.encoder.first, one), unit(method.encoder.second, two)
    past1, past2 = (bank.vectors.clone() for bank in method.banks)
    draws1, draws2 = (drawn_by(method, z, bank, 5) for z, bank in ((z1, method.banks[1]), (z2, method.banks[0])))
    expected = softmax(z1, past2, IDS, draws1) + softmax(z2, past1, IDS, draws2)
    loss = assert_step(method, batch, expected)
    assert method.recorded(loss) == loss / 2
    method.after_step()
    for bank, past, z in zip(method.banks, (past1, past2), (z1, z2), strict=True):
        torch.testing.assert_close(bank.vectors[IDS], normalize(past[IDS] + z.detach(), dim=-1), rtol=1e-4, atol=1e-5)
    now = method.banks[1].vectors  # with this batch
    others = [(now @ z1[i])[torch.arange(SIZE) != own].mean() for i, own in enumerate(IDS)]
    found = method.diagnose().summary()["uniform_hardness"]
    assert found == pytest.approx(torch.stack(others).mean().item(), rel=1e-4)
    torch.testing.assert_close(method.harvest().vectors, (torch.cat([z1, z2], dim=1) / 2**0.5).detach())
    features = method.encoder.features(batch.first)
    torch.testing.assert_close(features.square().sum(1), torch.full((6,), 2.0))


def test_cmc_is_nce_with_a_normaliser_for_each_direction() -> None:
    method, batch = made("cmc", num_draws=4)
    z1, z2 = method.split(method.encoder(batch.first))
    total = 0.0
    for z, bank, contrast in ((z1, method.banks[1], method.contrasts[0]), (z2, method.banks[0], method.contrasts[1])):
        before = float(contrast.running_z.log_z)
        total = total + nce(z, bank.vectors.clone(), IDS, drawn_by(method, z, bank, 4), before)[0]
    assert_step(method, batch, total)


def test_aspects_of_an_image() -> None:
    colours = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.5, 0.5, 0.5]])
    known = torch.tensor(
        [[100.0, 0.0, 0.0], [0.0, 0.0, 0.0], [53.24, 80.09, 67.20], [32.30, 79.19, -107.86], [53.39, 0.0, 0.0]]
    )
    torch.testing.assert_close(lab_of(colours[:, :, None, None])[:, :, 0, 0], known, atol=0.05, rtol=0)
    lightness, colour = aspects_of(colours[:, :, None, None].expand(-1, -1, 8, 8))
    assert (lightness.shape, colour.shape) == ((5, 1, 8, 8), (5, 2, 8, 8))
    _, gradients = aspects_of((torch.arange(8.0) / 8).expand(1, 1, 8, 8))
    torch.testing.assert_close(gradients[0, 0, :, 1:-1], torch.full((8, 6), 0.5))  # 2 * (2 / 8)
    torch.testing.assert_close(gradients[0, 1], torch.zeros(8, 8))


# Clusters.


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_local_aggregation_is_the_share_of_the_close_in_the_background(pooling: str) -> None:
    """With "mean" both sums are divided by their sizes: eq. 5 of Wu et al. 2021."""
    options = {"negatives": "Rank(0, 9)", "clusters": 4, "cluster_runs": 2, "warmup": 0, "pooling": pooling}
    method, batch = made("local-aggregation", **options)
    z, entries = unit(method.encoder, batch.first), method.banks[0].vectors.clone()
    groups, losses, sizes = method.clusters.assignments, [], []
    for i, own in enumerate(IDS.tolist()):
        around = sorted(range(SIZE), key=lambda j: -float(entries[j] @ z[i].detach()))[:9]
        close = [j for j in around if bool((groups[j] == groups[own]).any())]
        sums = [torch.stack([(z[i] @ entries[j] / 0.3).exp() for j in part]).sum() for part in (close, around)]
        share = sums[0] / sums[1] if pooling == "sum" else (sums[0] / len(close)) / (sums[1] / len(around))
        losses.append(-share.log())
        sizes.append(len(close))
    assert 1 < max(sizes) < 9
    assert_step(method, batch, torch.stack(losses).mean())


def test_until_the_first_clusters_it_is_instance_discrimination() -> None:
    method, batch = made("local-aggregation", negatives="Rank(0, 20)", warmup=2)
    z, entries = unit(method.encoder, batch.first), method.banks[0].vectors.clone()
    scores = z @ entries.T / 0.3
    assert_step(method, batch, torch.nn.functional.cross_entropy(scores, IDS))


@pytest.mark.parametrize("warmup", [0, 2])
def test_a_collapsed_local_aggregation_is_seen(warmup: int) -> None:
    """Its loss is then that of a guess: the close ones are as many times in the background as they are fewer."""
    method, batch = made("local-aggregation", clusters=4, cluster_runs=2, warmup=warmup)
    records = []
    for collapsed in (False, True):
        if collapsed:
            with torch.no_grad():
                method.banks[0].vectors.copy_(normalize(torch.ones(SIZE, DIM) + 1e-3 * torch.rand(SIZE, DIM), dim=1))
                method.encoder.head[-1].weight.mul_(1e-6)
                method.encoder.head[-1].bias.fill_(1.0)
        with torch.no_grad():
            loss = float(method.loss_of(method.encoder, batch))
            found = method.diagnose().summary() | method.figures() | {"loss": loss}
        records.append(final_of([{"step": 1} | found]))
    assert [has_collapsed(one) for one in records] == [False, True]
    assert records[1]["loss"] == pytest.approx(records[1]["guess_loss"], rel=1e-3)
    if warmup == 0:
        assert records[1]["guess_loss"] < 0.9 * math.log1p(records[1]["effective_number"]), "one that ln(1 + n) misses"


@pytest.mark.parametrize(
    ("recipe", "options", "expected"),
    [
        ("cmc", {"clusters": 3, "warmup": 3, "negatives": "SameCluster()"}, [3, 4]),
        ("local-aggregation", {"warmup": 1, "cluster_every": 2}, [1, 3]),
        ("local-aggregation", {"warmup": 0}, [0, 1, 2, 3, 4]),
        ("instance", {"clusters": 3, "cluster_every": 3, "negatives": "SameCluster()"}, [0, 3]),
        ("instance", {}, []),
    ],
)
def test_when_clusters_are_made(
    recipe: str, options: dict[str, Any], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    method, batch = made(recipe, **options)
    steps, refresh = [], Clusters.refresh

    def watched(self: Clusters, store: Any, number: int) -> None:
        steps.append(method.step)
        refresh(self, store, number)

    monkeypatch.setattr(Clusters, "refresh", watched)
    for step in range(5 * STEPS):
        method.set_progress(step, 5 * STEPS)
        method.loss_of(method.encoder, batch)
    assert steps == [STEPS * epoch for epoch in expected]


@pytest.mark.parametrize("recipe", ["instance", "cmc"])
def test_cave_draws_from_the_cluster(recipe: str) -> None:
    method, batch = made(recipe, negatives="SameCluster()", clusters=3, num_draws=50)
    method.keys = hn.Keys(method.encoder(batch.first).detach(), IDS)
    drawn = method.drawn(method.split(method.keys.vectors)[0], copy.deepcopy(method.banks[-1]))
    groups = method.clusters.assignments[:, 0]
    assert bool((drawn >= 0).any())
    for row, own in zip(drawn.tolist(), IDS.tolist(), strict=True):
        same = {j for j in range(SIZE) if groups[j] == groups[own] and j != own}
        assert set(row) == (same or {-1})


def test_before_its_first_clusters_cave_draws_from_all() -> None:
    method, batch = made("instance", negatives="SameCluster()", clusters=3, num_draws=300, warmup=1)
    drawn = drawn_by(method, unit(method.encoder, batch.first), method.banks[0], 300)
    assert all(set(row) == set(range(SIZE)) - {own} for row, own in zip(drawn.tolist(), IDS.tolist(), strict=True))


# The negative cache.


@pytest.mark.parametrize("num_draws", [1, 3])
def test_the_negative_cache_pushes_from_what_it_draws_and_encodes_afresh(num_draws: int) -> None:
    method, batch = made("negative-cache", cache=9, num_draws=num_draws, cache_refresh=0.0)
    method.set_progress(STEPS + 1, 5 * STEPS)  # the second epoch
    z1, z2 = unit(method.encoder, batch.views).chunk(2)
    held = copy.deepcopy(method.cache).keys()
    stale = (z1 @ held.vectors.T / 0.3).masked_fill(IDS[:, None] == held.ids, -math.inf).detach()
    positive = (z1 * z2).sum(1) / 0.3
    drawn = hn.draw(stale, num_draws, method.cache.generator())
    fresh = unit(method.encoder, method.data.views(held.ids[drawn].flatten(), 1, 0)[1]).view(6, num_draws, DIM)
    p = torch.cat([positive[:, None].detach(), stale], dim=1).softmax(1)[:, 0]
    each = (1 - p) * ((z1[:, None] * fresh).sum(2).mean(1) / 0.3 - positive)
    loss = assert_step(method, batch, each.mean(), value=False)
    torch.testing.assert_close(method.recorded(loss), -p.log().mean(), rtol=1e-4, atol=1e-5)
    kept = dict(zip(method.cache.ids.tolist(), method.cache.vectors, strict=True))
    for row, item in enumerate(held.ids[drawn].flatten().tolist()):
        torch.testing.assert_close(kept[item], fresh.detach().view(-1, DIM)[row], rtol=1e-4, atol=1e-5)


def test_the_cache_takes_the_second_views_and_encodes_its_oldest_again() -> None:
    method, batch = made("negative-cache", cache=12, cache_refresh=0.25)
    method.set_progress(STEPS, 5 * STEPS)
    method.loss_of(method.encoder, batch)
    before = copy.deepcopy(method.cache)
    method.after_step()
    before.push(hn.Keys(unit(method.encoder, batch.second), IDS))
    oldest = before.ids[before.computed_at.argsort(stable=True)[:3]]
    before.push(hn.Keys(unit(method.encoder, method.data.views(oldest, 1, 0)[1]), oldest))
    assert torch.equal(method.cache.ids, before.ids)
    torch.testing.assert_close(method.cache.vectors, before.vectors, rtol=1e-4, atol=1e-5)
    assert torch.equal(method.cache.computed_at, before.computed_at)
    some = torch.randperm(SIZE, generator=generator_at(0, 0))[:12]
    assert len(set(some.tolist()) & set(method.cache.ids.tolist())) >= 4
    assert method.diagnose().summary()["false_negatives"] > 0


def test_a_cache_of_items_that_are_gone_is_refused() -> None:
    method, batch = made("negative-cache", cache=9)
    method.cache.ids[0] = SIZE
    method.begun = False  # as after a resume
    with raises(DataChanged, who="train", what="20 images", got="position 20"):
        method.loss_of(method.encoder, batch)


# Runs.


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return few_digits(tmp_path_factory.mktemp("banks") / "digits.npz", 96)


RUNS: dict[str, dict[str, Any]] = {
    "instance": {"negatives": "Ring(0.1, outer=linear(1.0, 0.5), dynamic_inner=True)", "num_draws": 20},
    "cmc": {"num_draws": 20},
    "local-aggregation": {"clusters": 8, "save_every_steps": 2},
    "negative-cache": {"cache": 60, "num_draws": 2, "save_every_steps": 2},
}


@pytest.mark.parametrize("recipe", RUNS)
def test_a_run_that_is_cut_ends_with_the_same_bits(recipe: str, data: str, tmp_path: Path) -> None:
    options = short(data, epochs=3, **RUNS[recipe])
    run(recipe, tmp_path / "whole", options)
    with interrupted(5):  # of nine steps, in the second epoch
        run(recipe, tmp_path / "cut", options)
    run(recipe, tmp_path / "cut", options, resume=True)
    assert_same(everything(tmp_path / "whole"), everything(tmp_path / "cut"))
    losses = [record["loss"] for record in Run(tmp_path / "whole").metrics()]
    assert len(losses) == 9
    assert len(set(losses)) == 9


def test_texts_are_trained_against_a_bank_and_a_cache(tmp_path: Path) -> None:
    for recipe in ("instance", "negative-cache"):
        result = run(recipe, tmp_path / recipe, short(text_file(tmp_path / "a.txt"), epochs=1))
        assert result["headline"] == "retrieval"


@pytest.mark.parametrize("recipe", MAKERS)
def test_what_is_remembered_of_images_is_out_of_reach_of_the_optimiser(recipe: str) -> None:
    """No weight decay, and no momentum, moves the state of an image that no batch has visited."""
    method, _ = made(recipe)
    assert any(SIZE in each.shape for each in method.buffers()) or recipe == "negative-cache"
    assert not any(SIZE in each.shape for each in method.parameters())


@pytest.mark.parametrize("recipe", MAKERS)
def test_each_is_an_arm_of_its_name(recipe: str) -> None:
    arm = parse_arm(f"{recipe}(temperature=0.1)")
    assert (arm.recipe, arm.complete().temperature) == (recipe, 0.1)


@pytest.mark.parametrize(
    ("recipe", "options", "match"),
    [
        ("instance", {"loss": "nce", "negatives": "Ring(0.0, 0.5)"}, r"--negatives to be Uniform\(\) for --loss nce"),
        ("cmc", {"loss": "nce", "negatives": "Tilt(1)"}, r"cmc needs .*--loss nce.*use --loss softmax"),
        ("instance", {"loss": "mse"}, "--loss"),
        ("instance", {"positives_in_denominator": "none"}, "--loss softmax with --positives-in-denominator none"),
        ("cmc", {"negatives": "Ring(0, 0.5)", "cluster_positives": True}, "cmc needs --clusters with --cluster-posit"),
        ("instance", {"clusters": 5, "cluster_positives": True}, "use --loss softmax"),
        ("instance", {"negatives": "SameCluster()"}, "instance needs --clusters of at least 1"),
        ("instance", {"negatives": "From('queue')"}, "--negatives for candidates of the bank"),
        ("instance", {"negatives": "Rung(0.1)"}, "'Rung' is not known. Did you mean Ring"),
        ("instance", {"clusters": 97}, "--clusters of at most the 96 images, got 97"),
        ("instance", {"num_draws": 0}, "--num-draws of at least 1"),
        ("instance", {"temperature": "linear(0.5, 0.1)"}, "a number as --temperature"),
        ("local-aggregation", {"clusters": 97}, "--clusters of at most the 96 images"),
        ("local-aggregation", {"temperature": "linear(0.5, 0.1)"}, "a number as --temperature"),
        ("local-aggregation", {"negatives": "OtherLabel()"}, "a background that does not depend on labels"),
        ("local-aggregation", {"epochs": 1}, "more --epochs than --warmup, .* got 1 and 1"),
        ("cmc", {"negatives": "SameCluster()", "clusters": 5, "warmup": 2}, "cmc needs more --epochs than --warmup"),
        ("negative-cache", {"cache": 0}, "--cache of at least 1"),
        ("negative-cache", {"cache_refresh": 1.5}, "--cache-refresh between 0 and 1"),
        ("negative-cache", {"batches": "knn(warmup=2)"}, "more epochs than the warm-up"),
    ],
)
def test_wrong_options_are_reported(
    recipe: str, options: dict[str, Any], match: str, data: str, tmp_path: Path
) -> None:
    with pytest.raises(HardnegError, match=match):
        run(recipe, tmp_path / "run", short(data, **options))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_cmc_is_for_images(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="images") as raised:
        run("cmc", tmp_path / "run", short(text_file(tmp_path / "a.txt")))
    assert (raised.value.who, raised.value.fix) == ("cmc", "use hardneg train instance")
    assert not (tmp_path / "run").exists()
