"""Recipes with a predictor or prototypes: BYOL and SwAV, which have no negatives, NNCLR, and the heads of MoCo v3.

Losses of real steps against loops in float64, the state between steps, runs that are cut, options that are refused.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from hardneg.core.errors import ArgumentError
from hardneg.training.data.images import ImageData
from hardneg.training.encoders import Encoder, Predicted, build_encoder
from hardneg.training.loop.method import Batch
from hardneg.training.loop.runs import Run
from hardneg.training.options import RECIPES, BYOLOptions, HeadShape, MoCoOptions
from hardneg.training.recipes.byol import BYOL
from hardneg.training.recipes.fnc import FNC
from hardneg.training.recipes.moco import MoCoV3
from hardneg.training.recipes.nnclr import NNCLR
from hardneg.training.recipes.swav import SwAV, sinkhorn
from support.errors import raises
from support.training_runs import assert_same, everything, few_digits, interrupted, run, short

SIZE, DIM, TOTAL = 20, 8, 10
IDS = torch.tensor([7, 2, 19, 11, 5, 0])
NUM = len(IDS)
MAKERS: dict[str, Any] = {"byol": BYOL, "swav": SwAV, "nnclr": NNCLR, "fnc": FNC}


def made(recipe: str, size: int = 8, **options: Any) -> tuple[Any, Batch]:
    """A method after one step, with weights moved away from its slow copy, and a batch."""
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randint(0, 256, (SIZE, 1, size, size), dtype=torch.uint8, generator=generator)
    heads = {} if recipe == "fnc" else {"hidden_dim": 12}
    wanted = RECIPES[recipe](**{"dim": DIM, "epochs": 5, "batch_size": 6, **heads, **options})
    data = ImageData(pixels, torch.arange(SIZE) % 3, torch.arange(SIZE), "noise", ("a", "b", "c")).prepared(wanted)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        method = MAKERS[recipe](wanted, data, TOTAL)
    for step, ids in enumerate((torch.arange(6), torch.arange(6, 12))):
        method.set_progress(step, TOTAL)
        method.loss_of(method.encoder, batch_of(data, ids, step))
        method.after_step()
    method.set_progress(2, TOTAL)
    with torch.no_grad():
        for weights in method.encoder.parameters():
            weights += 0.1 * torch.randn(weights.shape, generator=generator)
    return method, batch_of(data, IDS, 1)


def batch_of(data: ImageData, ids: Tensor, epoch: int) -> Batch:
    assert data.labels is not None
    return Batch(torch.cat(data.views(ids, epoch, 0)), ids, data.labels[ids])


def check_step(method: Any, batch: Batch, expected: Tensor) -> None:
    """Value to 1e-6 of the loop in float64, and the gradient by every weight."""
    weights = [p for p in method.parameters() if p.requires_grad]
    loss = method.loss_of(method.encoder, batch)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=1e-6)
    found, wanted = (torch.autograd.grad(one, weights) for one in (loss, expected))
    scale = max(float(gradient.abs().max()) for gradient in wanted)
    assert scale > 1e-4
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * scale)


def unit(vectors: Tensor) -> Tensor:
    return normalize(vectors.double(), dim=-1)


# BYOL.


def test_byol_is_the_squared_distance_to_the_target_in_both_directions() -> None:
    """Grill et al. 2020, eq. 2: |q(z) / |q(z)| - z' / |z'||^2, plus the same with the views exchanged."""
    method, batch = made("byol")
    q = unit(method.encoder(batch.views)).chunk(2)  # together, since batch normalisation sees both views
    z = unit(method.slow.module(batch.views)).detach().chunk(2)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(NUM):
        for one, other in ((q[0], z[1]), (q[1], z[0])):
            total = total + sum(((one[i] - other[i]) ** 2).unbind())
    check_step(method, batch, total / NUM)
    assert method.figures() == {"guess_loss": 0.0}
    torch.testing.assert_close(method.harvest().vectors, z[1].float())


def test_the_momentum_of_byol_rises_to_one_by_a_cosine() -> None:
    """Grill et al. 2020, sec. 3.2: 1 - (1 - base) (cos(pi k / K) + 1) / 2."""
    method, _ = made("byol", momentum=0.6)
    slow, fast = next(method.slow.module.parameters()), next(method.encoder.encoder.parameters())
    for step in range(2, TOTAL):
        momentum = 1.0 - (1.0 - 0.6) * (math.cos(math.pi * step / TOTAL) + 1.0) / 2.0
        wanted = momentum * slow + (1.0 - momentum) * fast.detach()
        method.after_step()
        torch.testing.assert_close(slow.data, wanted, rtol=1e-6, atol=1e-6)
        with torch.no_grad():
            fast += 0.1


# SwAV.


def codes(scores: Tensor, epsilon: float, steps: int) -> Tensor:
    """Caron et al. 2020, Algorithm 1: Sinkhorn-Knopp on exp(scores / epsilon), entry by entry."""
    q = (scores.double() / epsilon).exp()
    q = q / q.sum()
    n, k = q.shape
    for _ in range(steps):
        for j in range(k):
            q[:, j] /= q[:, j].sum() * k
        for i in range(n):
            q[i] /= q[i].sum() * n
    return q * n


@pytest.mark.parametrize("options", [{}, {"queue": 9}, {"num_crops": 3, "sinkhorn_steps": 2, "epsilon": 0.2}])
def test_swav_predicts_the_codes_of_the_other_views(options: dict[str, Any]) -> None:
    """Caron et al. 2020, eq. 1 and 2: cross-entropy of softmax(z c / temperature) with the codes of another view."""
    method, batch = made("swav", size=16, num_prototypes=5, temperature=0.2, **options)
    z = [*unit(method.encoder(batch.views)).chunk(2)]
    if crops := method._crops(IDS):
        z += unit(method.encoder(torch.cat(crops))).split(NUM)
    assert len(z) == 2 + options.get("num_crops", 0)
    c = method.prototypes.double()
    losses = []
    for i in range(2):
        scores = z[i] @ c.T
        if options.get("queue"):
            past = method.queues[i].keys().vectors.double()
            assert len(past) == 9
            scores = torch.cat([past @ c.T, scores])
        q = codes(scores.detach(), options.get("epsilon", 0.05), options.get("sinkhorn_steps", 3))[-NUM:]
        for v in range(len(z)):
            for row in range(NUM) if v != i else ():
                logits = z[v][row] @ c.T / 0.2
                losses.append(-(q[row] * (logits - logits.logsumexp(0))).sum())
    check_step(method, batch, torch.stack(losses).mean())
    assert method.figures() == {"guess_loss": math.log(5)}


def test_codes_are_balanced_over_the_prototypes() -> None:
    scores = torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = sinkhorn(scores, 100)
    torch.testing.assert_close(found.sum(1), torch.ones(12, dtype=torch.float64))
    torch.testing.assert_close(found.sum(0), torch.full((4,), 3.0, dtype=torch.float64), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sinkhorn(scores / 0.2, 3), codes(scores, 0.2, 3))


def test_prototypes_are_unit_vectors_that_wait_for_an_epoch() -> None:
    method, batch = made("swav", num_prototypes=5, frozen_epochs=2)  # an epoch is two steps here
    for step, frozen in ((3, True), (4, False)):
        method.set_progress(step, TOTAL)
        loss = method.loss_of(method.encoder, batch)
        (gradient,) = torch.autograd.grad(loss, [method.prototypes], allow_unused=True)
        assert (gradient is None) == frozen
    with torch.no_grad():
        method.prototypes *= 3.0
    method.after_step()
    torch.testing.assert_close(method.prototypes.norm(dim=1), torch.ones(5))


def test_small_crops_show_a_part_of_the_image_at_half_its_size() -> None:
    method, _ = made("swav", size=16, num_crops=3, augment="grey")
    crops = method._crops(IDS)
    assert [tuple(crop.shape) for crop in crops] == [(NUM, 1, 8, 8)] * 3
    assert not torch.equal(crops[0], crops[1])
    assert not torch.equal(crops[0], crops[2])
    assert torch.equal(crops[2], method._crops(IDS)[2])
    assert method.small.augment.crop_scale == (0.05, 0.14)


# NNCLR.


def test_nnclr_compares_neighbours_with_predictions() -> None:
    """Dwibedi et al. 2021, eq. 2: -log e^(nn(z_i) p_i / t) / sum_k e^(nn(z_i) p_k / t), in both directions."""
    method, batch = made("nnclr", temperature=0.3, queue=9)
    past = method.queue.keys().vectors.double()
    assert len(past) == 9
    z, p = (unit(part).chunk(2) for part in method.encoder(batch.views).chunk(2, dim=1))
    z = [one.detach() for one in z]
    losses = []
    for one, other in ((z[0], p[1]), (z[1], p[0])):
        for i in range(NUM):
            nearest = past[max(range(9), key=lambda j, i=i, one=one: float(past[j] @ one[i]))]
            logits = torch.stack([nearest @ other[k] / 0.3 for k in range(NUM)])
            losses.append(logits.logsumexp(0) - logits[i])
    check_step(method, batch, torch.stack(losses).mean())
    method.after_step()
    kept = method.queue.keys()
    for row, own in zip(z[0].float(), IDS.tolist(), strict=True):
        torch.testing.assert_close(kept.vectors[kept.ids == own][-1], row)


def test_without_a_queue_a_view_is_its_own_neighbour() -> None:
    method, _ = made("nnclr")
    method.queue.set_number("count", 0)
    z = normalize(torch.randn(4, DIM), dim=-1)
    assert torch.equal(method.nearest(z), z)


# FNC.


@pytest.mark.parametrize("found", ["attract", "remove"])
def test_fnc_cancels_what_resembles_any_view_of_the_image(found: str) -> None:
    """Huynh et al. 2022, eq. 3 and 4: the two closest views of other images, if their cosine is above a threshold."""
    method, batch = made("fnc", temperature=0.3, num_support=3, num_found=2, threshold=0.97, found=found)
    support = method._support(IDS)
    assert [len(one) for one in support] == [NUM] * 3
    assert not torch.equal(support[0], support[2])
    z = unit(method.encoder(torch.cat([batch.views, *support])))
    rows, number = range(5 * NUM), 5 * NUM
    cosine = [[float(one @ other) for other in z.detach()] for one in z.detach()]
    losses, counts = [], []
    for i in rows:
        own = [j for j in rows if j % NUM == i % NUM]
        others = [j for j in rows if j % NUM != i % NUM]
        closeness = {j: max(cosine[view][j] for view in own) for j in others}
        false = [j for j in sorted(others, key=closeness.__getitem__)[-2:] if closeness[j] > 0.97]
        counts.append(len(false))
        logits = z[i] @ z.T / 0.3
        own.remove(i)
        if found == "attract":
            log_all = logits[[j for j in rows if j != i]].logsumexp(0)
            losses.append(torch.stack([log_all - logits[j] for j in own + false]).mean())
        else:
            kept = [j for j in others if j not in false]
            losses.append(torch.stack([logits[[j, *kept]].logsumexp(0) - logits[j] for j in own]).mean())
    assert 0 < sum(counts) < 2 * number, "some images have false negatives, and some have fewer than two"
    check_step(method, batch, torch.stack(losses).mean())
    assert method.figures() == {"found": sum(counts) / number}
    torch.testing.assert_close(method.harvest().vectors[:, :DIM] * 2**0.5, z[:NUM].float())


# Heads.


def test_moco_v3_has_the_heads_of_the_paper() -> None:
    """Chen et al. 2021, sec. 4: a head of 3 layers and a predictor of 2, 4096 wide, BatchNorm on every layer."""
    options = MoCoOptions(version="v3", dim=256, encoder="resnet18")
    with torch.device("meta"):
        encoder: Any = build_encoder("resnet18", 3, projection_dim=256, head=options.projector)
        whole: Any = Predicted(encoder, 256, options.predictor)

    def shape(head: nn.Module) -> list[Any]:
        layers = [part for part in head.modules() if not isinstance(part, (nn.Sequential, nn.ReLU))]
        return [part.out_features if isinstance(part, nn.Linear) else type(part).__name__ for part in layers]

    assert shape(encoder.head) == [4096, "BatchNorm1d", 4096, "BatchNorm1d", 256, "BatchNorm1d"]
    assert shape(whole.predictor) == [4096, "BatchNorm1d", 256, "BatchNorm1d"]
    assert [part.affine for part in encoder.head if isinstance(part, nn.BatchNorm1d)] == [True, True, False]
    byol = BYOLOptions(encoder="resnet18")
    assert (byol.projector, byol.predictor) == (HeadShape(2, 4096, 8, norm="batch"),) * 2
    assert byol.projector.width_for(2048) == 4096
    assert BYOLOptions(hidden_dim=5000).projector.width_for(16) == 5000


def test_heads_are_those_of_the_option() -> None:
    pixels = torch.zeros(SIZE, 1, 8, 8, dtype=torch.uint8)
    data = ImageData(pixels, None, torch.arange(SIZE), "noise")
    for recipe, head, linear in (
        ("simclr", "auto", 2),
        ("simclr", "linear", 1),
        ("moco", "mlp", 2),
        ("moco", "auto", 3),
    ):
        more = {"version": "v3", "hidden_dim": 16} if recipe == "moco" else {}
        encoder: Any = data.encoder(RECIPES[recipe](head=head, dim=12, **more))
        parts = [part for part in encoder.head.modules() if isinstance(part, nn.Linear)]
        assert len(parts) == linear
        assert parts[-1].out_features == 12
    method = MoCoV3(MoCoOptions(version="v3", hidden_dim=16), data, 10)
    assert isinstance(method.encoder.encoder, Encoder)
    assert [part.out_features for part in method.encoder.predictor if isinstance(part, nn.Linear)] == [16, 128]
    layer = MoCoV3(MoCoOptions(version="v3", hidden_dim=16, head_norm="layer"), data, 10)
    assert any(isinstance(part, nn.BatchNorm1d) for part in method.modules())
    assert not any(isinstance(part, nn.BatchNorm1d) for part in layer.modules())


# Runs.


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return few_digits(tmp_path_factory.mktemp("predictive") / "digits.npz", 96)


RUNS: dict[str, dict[str, Any]] = {
    "byol": {"hidden_dim": 16, "save_every_steps": 2},
    "swav": {"hidden_dim": 16, "num_prototypes": 8, "queue": 40, "num_crops": 1, "save_every_steps": 2},
    "nnclr": {"hidden_dim": 16, "queue": 40},
    "fnc": {"num_support": 2, "threshold": 0.5, "save_every_steps": 2},
}


@pytest.mark.parametrize("recipe", RUNS)
def test_a_run_that_is_cut_ends_with_the_same_bits(recipe: str, data: str, tmp_path: Path) -> None:
    options = short(data, epochs=3, **RUNS[recipe])
    run(recipe, tmp_path / "whole", options)
    with interrupted(5):
        run(recipe, tmp_path / "cut", options)
    run(recipe, tmp_path / "cut", options, resume=True)
    assert_same(everything(tmp_path / "whole"), everything(tmp_path / "cut"))
    losses = [record["loss"] for record in Run(tmp_path / "whole").metrics()]
    assert len(set(losses)) == 9
    assert not everything(tmp_path / "whole")["result"]["collapsed"]


@pytest.mark.parametrize(
    ("recipe", "options", "flag"),
    [
        ("byol", {"negatives": "Tilt(1.0)"}, "--negatives"),
        ("byol", {"tau_plus": 0.1}, "--tau-plus"),
        ("byol", {"tau_plus": "estimate"}, "--tau-plus"),
        ("byol", {"temperature": 0.1}, "--temperature"),
        ("byol", {"record": "global_loss"}, "--record similarities"),
        ("swav", {"negatives": "OtherLabel()"}, "--negatives"),
        ("swav", {"tau_plus": "linear(0.0, 0.1)"}, "--tau-plus"),
        ("fnc", {"negatives": "Tilt(1.0)"}, "--negatives"),
        ("fnc", {"temperature": "linear(0.5, 0.1)"}, "--temperature"),
    ],
)
def test_options_of_negatives_are_refused_before_training(
    recipe: str, options: dict[str, Any], flag: str, tmp_path: Path
) -> None:
    with raises(ArgumentError, what=flag):
        run(recipe, tmp_path / "run", short("npz:nowhere.npz", **options))
    assert not (tmp_path / "run").exists()
