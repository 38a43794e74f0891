"""What each recipe computes in a step, against the formula of its paper on the vectors of two different views."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

import hardneg as hn
from hardneg.core.errors import ArgumentError
from hardneg.core.types import Keys
from hardneg.training.augmentation.augment import PRESETS
from hardneg.training.data.images import ImageData, load
from hardneg.training.encoders import Encoder, build_encoder
from hardneg.training.loop.method import Batch
from hardneg.training.loop.runs import Run
from hardneg.training.options import RECIPES
from hardneg.training.recipes.emc2 import EMC2Method
from hardneg.training.recipes.moco import MoCoV2, MoCoV3
from hardneg.training.recipes.simclr import SimCLR
from hardneg.training.recipes.sogclr import SogCLRMethod
from hardneg.training.recipes.supervised import Supervised
from support.errors import raises
from support.steps import assert_step, unit
from support.training_runs import few_digits, run, short

SIZE, DIM, TOTAL = 20, 8, 10
IDS = torch.tensor([7, 2, 19, 11, 5, 0])
LABELS = torch.tensor([0, 0, 0, 1, 1, 2])  # unequal numbers, so that means over anchors and over pairs differ
NUM = len(IDS)
OTHERS = 2 * NUM - 2

METHODS: dict[str, tuple[str, Any]] = {
    "simclr": ("simclr", SimCLR),
    "supervised": ("supervised", Supervised),
    "moco v2": ("moco", MoCoV2),
    "moco v3": ("moco", MoCoV3),
    "sogclr": ("sogclr", SogCLRMethod),
    "emc2": ("emc2", EMC2Method),
}


def method_of(name: str, **options: Any) -> Any:
    recipe, build = METHODS[name]
    pixels = torch.zeros(SIZE, 1, 8, 8, dtype=torch.uint8)
    data = ImageData(pixels, torch.arange(SIZE) % 3, torch.arange(SIZE), "noise", ("a", "b", "c"))
    if recipe == "moco":
        options = {"version": name[-2:], "head_norm": "layer"} | options
    with torch.random.fork_rng([]):
        torch.manual_seed(0)  # as the loop does: of v3's predictor
        method = build(RECIPES[recipe](dim=DIM, **options), data, TOTAL)
    if isinstance(method, (MoCoV2, MoCoV3)):  # training has moved the encoder away from its slow copy
        disturb(method.slow.module, seed=8)
    return method


def disturb(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def two_views(seed: int = 0) -> Tensor:
    """Of six images, the first views and then the second: related, and far from equal."""
    generator = torch.Generator().manual_seed(seed)
    image, first, second = torch.randn(3, NUM, 1, 8, 8, generator=generator)
    return torch.cat([image + first, image + second])


def batch_of(views: Tensor, ids: Tensor = IDS) -> Batch:
    return Batch(views, ids, LABELS)


def anchors_of(z1: Tensor, z2: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of the 2b anchors: the scores with all rows, that of the own other view, and who is another image."""
    z = torch.cat([z1, z2])
    s = z @ z.T / temperature
    own = torch.arange(2 * NUM) % NUM
    positive = s[torch.arange(2 * NUM), torch.arange(2 * NUM).roll(NUM)]
    return s, positive, own[:, None] != own


# SimCLR


@pytest.mark.parametrize("batch_seed", [0, 1])
def test_simclr_is_nt_xent(batch_seed: int) -> None:
    method, views = method_of("simclr", temperature=0.3), two_views(batch_seed)
    z = unit(method.encoder, views)
    logits = (z @ z.T / 0.3).fill_diagonal_(-math.inf)
    loss = assert_step(method, batch_of(views), cross_entropy(logits, torch.arange(2 * NUM).roll(NUM)))
    assert method.recorded(loss) is loss


def test_simclr_with_a_tilt_and_tau_plus_is_hcl() -> None:
    method, views = method_of("simclr", temperature=0.5, negatives="Tilt(0.7)", tau_plus=0.03), two_views()
    s, positive, other = anchors_of(*unit(method.encoder, views).chunk(2), temperature=0.5)
    negative, weight = s.exp() * other, (0.7 * s).exp() * other
    mean = (weight * negative).sum(1) / weight.sum(1)
    debiased = ((mean - 0.03 * positive.exp()) / (1.0 - 0.03)).clamp(min=math.exp(-1.0 / 0.5))
    expected = (positive.exp() + OTHERS * debiased).log() - positive
    assert_step(method, batch_of(views), expected.mean())


@pytest.mark.parametrize(("where", "share"), [("own", 1.0), ("none", 0.0)])
def test_simclr_takes_the_options_of_its_objective(where: str, share: float) -> None:
    options = {"negatives": "Tilt(1.0)", "num_negatives": "mass", "positives_in_denominator": where}
    method, views = method_of("simclr", temperature=0.5, **options), two_views()
    s, positive, other = anchors_of(*unit(method.encoder, views).chunk(2), temperature=0.5)
    expected = (share * positive.exp() + ((2.0 * s).exp() * other).sum(1)).log() - positive
    assert_step(method, batch_of(views), expected.mean())


# Supervised


def pairs_of(z1: Tensor, z2: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """The scores of all pairs of rows, who is a positive, and who is of another label."""
    z, labels = torch.cat([z1, z2]), LABELS.repeat(2)
    same = labels[:, None] == labels
    return z @ z.T / temperature, same & ~torch.eye(2 * NUM, dtype=torch.bool), ~same


def test_supervised_is_supcon() -> None:
    method, views = method_of("supervised", temperature=0.3, positives_in_denominator="all"), two_views()
    s, positive, _ = pairs_of(*unit(method.encoder, views).chunk(2), temperature=0.3)
    each = s - s.masked_fill(torch.eye(2 * NUM, dtype=torch.bool), -math.inf).logsumexp(1, keepdim=True)
    expected = -(each * positive).sum(1) / positive.sum(1)
    assert_step(method, batch_of(views), expected.mean())


@pytest.mark.parametrize("reduction", ["pairs", "anchors"])
@pytest.mark.parametrize(("negatives", "beta"), [("OtherLabel()", 0.0), ("OtherLabel() * Tilt(0.8)", 0.8)])
def test_supervised_is_scl_and_hscl(negatives: str, beta: float, reduction: str) -> None:
    options = {"negatives": negatives, "num_negatives": "candidates", "reduction": reduction}
    method, views = method_of("supervised", temperature=0.4, **options), two_views()
    s, positive, other = pairs_of(*unit(method.encoder, views).chunk(2), temperature=0.4)
    weight = (beta * s).exp() * other
    mean = (weight * s.exp()).sum(1, keepdim=True) / weight.sum(1, keepdim=True)
    each = ((s.exp() + OTHERS * mean).log() - s) * positive
    pooled, of_anchors = each.sum() / positive.sum(), (each.sum(1) / positive.sum(1)).mean()
    assert abs(pooled - of_anchors) > 1e-3
    assert_step(method, batch_of(views), pooled if reduction == "pairs" else of_anchors)


@pytest.mark.parametrize("hardening", ["Tilt(linear(0.0, 1.6))", "Threshold(-0.1)", "Uniform()"])
def test_the_four_losses_of_hscl_and_its_assumption(hardening: str) -> None:
    """Fig. 4 and 5: the positives of the label for all; negatives of all labels or of others; hard, or all alike."""
    options = {"negatives": f"OtherLabel() * {hardening}", "four_losses": True}
    method, views = method_of("supervised", temperature=0.4, **options), two_views()
    method.set_progress(TOTAL // 2, TOTAL)  # where the tilt is 0.8
    method.loss_of(method.encoder, batch_of(views))
    s, positive, other = pairs_of(*unit(method.encoder, views).detach().chunk(2), temperature=0.4)
    own = torch.arange(2 * NUM) % NUM
    elsewhere = own[:, None] != own
    hard = {"T": (0.8 * s).exp(), "H": (0.4 * s >= -0.1).float(), "U": torch.ones_like(s)}[
        {"Tilt": "T", "Thre": "H", "Unif": "U"}[hardening[:4]]
    ]

    def mean(weight: Tensor) -> Tensor:
        return (weight * s.exp()).sum(1, keepdim=True) / weight.sum(1, keepdim=True)

    weights = {
        "loss_ucl": elsewhere.float(), "loss_scl": other.float(),
        "loss_h_ucl": elsewhere * hard, "loss_h_scl": other * hard,
    }  # fmt: skip
    found = method.figures()
    assert set(found) == {*weights, "assumption"}
    for name, weight in weights.items():
        each = ((s.exp() + OTHERS * mean(weight)).log() - s)[positive & (weight.sum(1, keepdim=True) > 0)]
        assert found[name] == pytest.approx(float(each.sum() / positive.sum()), rel=1e-5), name
    alike, unlike = mean(elsewhere * ~other * hard)[:, 0], mean(other * hard)[:, 0]
    both = ~(alike.isnan() | unlike.isnan())
    assert 0 < both.sum() < 2 * NUM, "the only image of its label has none alike"
    assert found["assumption"] == pytest.approx(float((alike >= unlike)[both].float().mean()))
    assert method_of("supervised").figures() == {}


# MoCo


def nine_keys() -> Tensor:
    return normalize(torch.randn(9, DIM, generator=torch.Generator().manual_seed(1)), dim=-1)


def test_moco_v2_is_the_loss_against_a_queue_of_momentum_keys() -> None:
    method, views = method_of("moco v2", temperature=0.3, queue=10, momentum=0.9), two_views()
    old, ids = nine_keys(), torch.tensor([3, 7, 4, 0, 12, 13, 7, 14, 1])
    method.queue.push(Keys(old, ids, torch.zeros(9, dtype=torch.long)))
    first, second = views.chunk(2)
    q, k = unit(method.encoder, first), unit(method.slow.module, second).detach()
    against = (q @ old.T / 0.3).masked_fill(IDS[:, None] == ids, -math.inf)
    logits = torch.cat([(q * k).sum(1, keepdim=True) / 0.3, against], dim=1)
    loss = assert_step(method, batch_of(views), cross_entropy(logits, torch.zeros(NUM, dtype=torch.long)))
    assert method.recorded(loss) is loss
    assert len(method.queue) == 9, "the keys of the batch come in after its step"
    hardness = torch.stack([(q[i] @ old[ids != IDS[i]].T).mean() for i in range(NUM)]).mean()
    assert method.diagnose().summary()["hardness"] == pytest.approx(hardness.item(), rel=1e-5)
    torch.testing.assert_close(method.harvest().vectors, k)

    slow, fast = list(method.slow.module.parameters()), list(method.encoder.parameters())
    wanted = [0.9 * old + 0.1 * new for old, new in zip(slow, fast, strict=True)]
    method.after_step()
    torch.testing.assert_close(slow, wanted)
    # A row of ten slots: nine were full, the tenth is the first key's, and the other five take the oldest places.
    kept = method.queue.keys()
    assert kept.ids.tolist() == IDS[1:].tolist() + ids[5:].tolist() + IDS[:1].tolist()
    assert kept.labels.tolist() == LABELS[1:].tolist() + [0] * 4 + LABELS[:1].tolist()
    torch.testing.assert_close(kept.vectors, torch.cat([k[1:], old[5:], k[:1]]))


def test_moco_v3_is_symmetric_and_scaled_by_the_temperature() -> None:
    method, views = method_of("moco v3", temperature=0.3), two_views()
    q1, q2 = (normalize(method.encoder.predictor(method.encoder.encoder(half)), dim=-1) for half in views.chunk(2))
    k1, k2 = (unit(method.slow.module, half).detach() for half in views.chunk(2))
    rows = torch.arange(NUM)
    directions = [cross_entropy(q @ k.T / 0.3, rows) for q, k in ((q1, k2), (q2, k1))]
    assert abs(directions[0] - directions[1]) > 1e-3
    loss = assert_step(method, batch_of(views), 2.0 * 0.3 * (directions[0] + directions[1]))
    nats = (directions[0] + directions[1]) / 2.0
    torch.testing.assert_close(method.recorded(loss), nats.detach(), rtol=1e-5, atol=1e-5)
    by_paper = hn.papers.moco_v3(0.3)
    torch.testing.assert_close(loss, (by_paper(q1, k2, IDS) + by_paper(q2, k1, IDS)).detach(), rtol=1e-5, atol=1e-5)


def test_moco_v3_takes_its_momentum_to_one_by_a_cosine() -> None:
    method = method_of("moco v3", momentum=0.6)
    slow, fast = method.slow.module.parameters(), method.encoder.encoder.parameters()
    slow, fast = next(slow), next(fast)
    for step in range(TOTAL):
        momentum = 1.0 - 0.5 * (1.0 + math.cos(math.pi * step / TOTAL)) * (1.0 - 0.6)
        wanted = momentum * slow + (1.0 - momentum) * fast.detach()
        method.after_step()
        torch.testing.assert_close(slow.data, wanted, rtol=1e-5, atol=1e-6)
        disturb(method.encoder.encoder, seed=step)


def test_moco_v2_keeps_its_momentum() -> None:
    method = method_of("moco v2", momentum=0.6)
    slow, fast = next(method.slow.module.parameters()), next(method.encoder.parameters())
    for step in range(4):
        method.loss_of(method.encoder, batch_of(two_views(step)))
        wanted = 0.6 * slow + 0.4 * fast.detach()
        method.after_step()
        torch.testing.assert_close(slow.data, wanted, rtol=1e-5, atol=1e-6)
        disturb(method.encoder, seed=step)


# Losses over the whole data set


def real_loss(z1: Tensor, z2: Tensor, temperature: float) -> float:
    """Of the batch, in nats, without the positive in the denominator."""
    s, positive, other = anchors_of(z1, z2, temperature)
    return (s.masked_fill(~other, -math.inf).logsumexp(1) - positive).mean().item()


@pytest.mark.parametrize("gamma", [0.9, 0.3])
def test_sogclr_weighs_by_running_normalisers(gamma: float) -> None:
    """L = the sum of the directions of mean_i (-s_i+ + mean_j w_ij s_ij), w_ij = e_ij / u_i without a gradient."""
    method = method_of("sogclr", temperature=0.3, gamma=gamma)
    u = torch.zeros(SIZE, dtype=torch.float64)
    for step, ids in enumerate((IDS, torch.tensor([11, 3, 7, 2, 0, 4]), IDS)):
        views = two_views(step)
        z1, z2 = unit(method.encoder, views).chunk(2)
        s, positive, other = anchors_of(z1, z2, 0.3)
        e = s.detach().double().exp() * other
        g, old = e.sum(1) / OTHERS, u[ids].repeat(2)
        new = torch.where(old == 0.0, g, (1.0 - gamma) * old + gamma * g)
        each = -0.3 * positive + 0.3 * ((e / new[:, None]).float() * s).sum(1) / OTHERS
        loss = assert_step(method, batch_of(views, ids), 2.0 * each.mean(), value=False)
        assert method.recorded(loss).item() == pytest.approx(real_loss(z1, z2, 0.3), rel=1e-5)
        u[ids] = new.reshape(2, NUM).mean(0)
    torch.testing.assert_close(method.loss.partitions[0].log_u.exp(), u, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "burn_in", "num_steps", "seed"),
    [
        ({}, 0.5, None, 0),
        ({"burn_in": 0.1}, 0.1, None, 0),
        ({"num_steps": 3}, 0.5, 3, 0),
        ({"seed": 5}, 0.5, None, 5),
        ({"forget": True, "burn_in": 0.2, "num_steps": 4, "seed": 6}, 0.2, 4, 6),
    ],
)
def test_emc2_is_the_paper_on_two_views(
    options: dict[str, Any], burn_in: float, num_steps: int | None, seed: int
) -> None:
    method, outside = method_of("emc2", temperature=0.1, **options), []
    bank = None if "forget" in options else hn.Bank(SIZE, DIM)
    by_hand = hn.EMC2(SIZE, 0.1, burn_in, remember=bank, num_steps=num_steps, seed=seed)
    for step, ids in enumerate((IDS, torch.tensor([11, 3, 7, 2, 9, 4]), IDS)):  # the chains then stand outside
        views = two_views(step)
        z1, z2 = unit(method.encoder, views).chunk(2)
        loss = assert_step(method, batch_of(views, ids), by_hand(z1, z2, ids=ids))
        assert method.recorded(loss).item() == pytest.approx(real_loss(z1, z2, 0.1), rel=1e-5)
        assert torch.equal(method.loss.chain.state, by_hand.chain.state)
        outside.append(method.loss.last["outside"].item())
    assert (max(outside) > 0.0) == ("forget" in options), "only without embeddings a state outside the batch is mute"


@pytest.mark.parametrize(
    "options", [{"proposals": "data set"}, {"reencode": True}, {"proposals": "data set", "reencode": True}]
)
def test_emc2_proposes_the_data_set_and_encodes_states_again(options: dict[str, Any]) -> None:
    """Yau et al. 2024, eq. 6 and Algorithm 1: -s_i+ + sum_j (visits of j / visits) s_ij, entry by entry."""
    generator = torch.Generator().manual_seed(5)
    pixels = torch.randint(0, 256, (SIZE, 1, 8, 8), dtype=torch.uint8, generator=generator)
    wanted = RECIPES["emc2"](dim=DIM, temperature=0.3, epochs=5, num_steps=6, **options)  # type: ignore[call-arg]
    data = ImageData(pixels, torch.arange(SIZE) % 3, torch.arange(SIZE), "noise", ("a", "b", "c")).prepared(wanted)
    method: Any = EMC2Method(wanted, data, TOTAL)
    outside = 0
    for step, ids in enumerate((IDS, torch.tensor([11, 3, 7, 2, 9, 4]), IDS)):
        method.set_progress(2 * step, TOTAL)
        walks: list[Any] = []
        walk = method.loss.chain.walk

        def watched(scores: Any, *args: Any, walk: Any = walk, walks: Any = walks, **more: Any) -> Any:
            walks.append((scores, walk(scores, *args, **more)))
            return walks[-1][1]

        method.loss.chain.walk = watched
        states = method.loss.chain.state.clone()
        loss = method.loss_of(method.encoder, batch_of(torch.cat(data.views(ids, step, 0)), ids))
        method.loss.chain.walk = walk
        ((scores, found),) = walks
        z1, z2 = unit(method.encoder, torch.cat(data.views(ids, step, 0))).chunk(2)
        anchors, partners = torch.cat([z1, z2]), torch.cat([z2, z1])
        total = torch.zeros((), dtype=torch.float64)
        for i in range(2 * NUM):
            total = total - anchors[i].double() @ partners[i].double() / 0.3
            weights = (found.log_visits[i].double() - found.log_norm[i].double()).exp()
            assert float(weights[scores.valid[i]].sum()) <= 1.0 + 1e-6
            for j in torch.nonzero((weights > 1e-12) & scores.valid[i])[:, 0].tolist():
                total = total + weights[j] * scores.candidates[i, j].double()
        torch.testing.assert_close(loss.double(), (total / (2 * NUM)).detach(), rtol=1e-6, atol=1e-6)
        outside += int((~torch.isin(states[states >= 0], ids)).sum())
    assert outside, "chains stood at images outside the batch"
    again = torch.tensor([3, 8, 3]), torch.tensor([1, 0, 0])
    for row, item, view in zip(method.encoded(*again), *again, strict=True):
        alone = unit(method.encoder, data.views(item[None], method.epoch, 0)[int(view)])
        torch.testing.assert_close(row, alone[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "what"),
    [({"batches": "knn()"}, "--batches to be uniform()"), ({"forget": True}, "embeddings of the data set")],
)
def test_proposals_of_the_data_set_refuse_planners_and_forgetting(
    options: dict[str, Any], what: str, tmp_path: Path
) -> None:
    with raises(ArgumentError, who="emc2", what=what):
        run("emc2", tmp_path / "run", short("npz:nowhere.npz", proposals="data set", **options))
    assert not (tmp_path / "run").exists()


# What all share


@pytest.mark.parametrize("name", [name for name in METHODS if name != "emc2"])  # which draws its negatives itself
def test_schedules_reach_the_loss_and_the_diagnostics(name: str) -> None:
    """Half-way, a tilt that grows from 0 to 1 is a tilt of 0.5."""
    before = "OtherLabel() * " if name == "supervised" else ""
    views, found = two_views(), []
    for tilt in ("Tilt(linear(0.0, 1.0))", "Tilt(0.5)", "Tilt(0.0)"):
        method = method_of(name, temperature=0.3, negatives=before + tilt)
        if name == "moco v2":
            method.queue.push(Keys(nine_keys(), torch.arange(9), torch.arange(9)))
        method.set_progress(TOTAL // 2, TOTAL)
        loss = method.loss_of(method.encoder, batch_of(views))
        gradient = torch.autograd.grad(loss, next(method.encoder.parameters()))[0]
        found.append((gradient, method.recorded(loss), method.diagnose().summary()))
    (gradient, recorded, summary), (same, same_recorded, same_summary), (other, other_recorded, other_summary) = found
    torch.testing.assert_close(gradient, same)
    torch.testing.assert_close(recorded, same_recorded)
    assert summary == pytest.approx(same_summary, nan_ok=True)
    assert summary["effective_temperature"] == pytest.approx(0.3 / 1.5, rel=1e-3)
    assert not torch.allclose(gradient, other)
    assert summary["hardness"] > other_summary["hardness"]
    assert recorded != other_recorded


@pytest.mark.parametrize("name", METHODS)
def test_what_is_harvested_are_the_vectors_by_id(name: str) -> None:
    method, views = method_of(name), two_views()
    method.loss_of(method.encoder, batch_of(views))
    keys = method.harvest()
    assert keys.ids.tolist() == IDS.tolist()
    torch.testing.assert_close(keys.vectors.norm(dim=1), torch.ones(NUM))
    if name.startswith("moco"):
        wanted = unit(method.slow.module, views.chunk(2)[1])
    else:
        wanted = torch.cat(unit(method.encoder, views).chunk(2), dim=1) / 2.0**0.5
    torch.testing.assert_close(keys.vectors, wanted.detach())
    assert not keys.vectors.requires_grad


# What the loop gives to a recipe, and what it evaluates


@dataclass(frozen=True)
class Watched:
    """A run of SimCLR: its figures, the batches it was given with their epochs, and the images it was evaluated on."""

    folder: Path
    result: dict[str, Any]
    batches: list[tuple[int, Batch]]
    evaluated: list[Tensor]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    pytest.importorskip("accelerate", reason="training needs the extra train")
    folder = tmp_path_factory.mktemp("loop")
    batches: list[tuple[int, Batch]] = []
    evaluated: list[Tensor] = []
    loss_of, features = SimCLR.loss_of, Encoder.features

    def watched_loss(self: SimCLR, encode: Any, batch: Batch) -> Tensor:
        batches.append((len(batches) // 3, batch))
        return loss_of(self, encode, batch)

    def watched_features(self: Encoder, images: Tensor) -> Tensor:
        if not self.training:
            evaluated.append(images.clone())
        return features(self, images)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimCLR, "loss_of", watched_loss)
        patch.setattr(Encoder, "features", watched_features)
        result = run("simclr", folder / "run", short(few_digits(folder / "digits.npz", 96), epochs=2, seed=3))
    return Watched(folder, result, batches, evaluated)


def encoder_of(folder: Path) -> nn.Module:
    """The trained encoder, in float64."""
    state = Run(folder / "run").load()
    assert state is not None
    encoder = build_encoder("tiny", 1, projection_dim=32)
    prefix = "encoder."
    encoder.load_state_dict(
        {name.removeprefix(prefix): value for name, value in state["method"].items() if name.startswith(prefix)}
    )
    return encoder.double().eval()


def test_a_recipe_sees_two_views_of_each_image(trained: Watched) -> None:
    data = load(f"npz:{trained.folder / 'digits.npz'}")
    assert [epoch for epoch, _ in trained.batches] == [0, 0, 0, 1, 1, 1]
    for epoch, batch in trained.batches:
        views = PRESETS["tiny"].views(data.images[batch.ids], data.ids[batch.ids], epoch, 3)
        torch.testing.assert_close(batch.views, torch.cat(views))
        assert batch.labels is not None
        assert torch.equal(batch.labels, data.labelled("the test")[batch.ids])
        first, second = batch.views.chunk(2)
        assert (first - second).abs().mean() > 0.01


@pytest.mark.parametrize("recipe", ["simclr", "emc2"])
def test_a_finite_set_of_views_is_repeated_in_turn(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EMC2, Fig. 3: a fixed set of augmentations of each image, here two pairs of views."""
    seen: list[Batch] = []
    loss_of = SimCLR.loss_of
    monkeypatch.setattr(
        SimCLR, "loss_of", lambda self, encode, batch: seen.append(batch) or loss_of(self, encode, batch)
    )
    data = few_digits(tmp_path / "digits.npz", 64)
    run(recipe, tmp_path / "run", short(data, epochs=4, num_views=2))
    images = load(data)
    assert len(seen) == 8
    for number, batch in enumerate(seen):
        views = PRESETS["tiny"].views(images.images[batch.ids], images.ids[batch.ids], number // 2 % 2, 0)
        torch.testing.assert_close(batch.views, torch.cat(views))


def test_what_is_evaluated_are_the_plain_images(trained: Watched) -> None:
    encoder = encoder_of(trained.folder)
    with np.load(trained.folder / "digits.npz") as pixels, np.load(trained.folder / "run" / "embeddings.npz") as found:
        for split, name, seen in zip(
            ("train", "test"), ("images", "test_images"), trained.evaluated[-4:-2], strict=True
        ):
            images = torch.from_numpy(pixels[name]).double()[:, None] / 255.0
            images = (images - 0.5) / 0.25  # as the preset for small grey images has it
            # The normalisation inside the encoder hides a scale of the images, so these are looked at themselves.
            torch.testing.assert_close(seen.double(), images, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(found[f"{split}_x"], encoder.features(images).detach(), rtol=1e-4, atol=1e-5)


def test_alignment_is_of_two_views_of_the_test_images(trained: Watched) -> None:
    encoder, test = encoder_of(trained.folder), load(f"npz:{trained.folder / 'digits.npz'}", "test")
    views = PRESETS["tiny"].views(test.images, test.ids, 2, 3)  # those of the epoch after the last
    torch.testing.assert_close(trained.evaluated[-2:], list(views))
    first, second = (normalize(encoder.features(view.double()), dim=-1) for view in views)
    wanted = (first - second).square().sum(1).mean().item()
    assert trained.result["alignment"] == pytest.approx(wanted, rel=1e-4)
    assert wanted > 0.01
