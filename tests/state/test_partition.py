"""SogCLR's running normalisers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import hardneg as hn
from hardneg import papers
from hardneg.core.errors import ArgumentError
from hardneg.losses.global_softmax import SogCLR
from hardneg.state.partition import Partition
from support.errors import raises
from support.vectors import make_unit_vectors


def views(b: int, d: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    first = make_unit_vectors(b, d, seed=seed)
    return first, torch.nn.functional.normalize(0.8 * first + 0.6 * make_unit_vectors(b, d, seed=seed + 100), dim=-1)


def test_first_visit_has_the_gradient_of_the_batch_loss() -> None:
    """u = g at the first visit, so the surrogate's gradient is that of -a + log sum e^s over the batch."""
    gradients = []
    for surrogate in (True, False):
        z1, z2 = (z.requires_grad_() for z in views(8))
        if surrogate:
            SogCLR(8, 0.1, divide_by_temperature=True)(z1, z2, ids=torch.arange(8)).backward()
        else:
            scores = hn.two_views(z1, z2, 0.1)
            log_w = hn.Uniform().log_weights(scores)
            hn.info_nce(scores, log_w, positives_in_denominator="none").mean().backward()
        gradients.append(torch.cat([z1.grad, z2.grad]))
    torch.testing.assert_close(*gradients)


def test_running_normaliser_comes_close_to_the_global_one() -> None:
    """Frozen vectors, many small batches, small gamma: u approaches the mean over the whole data set."""
    size, temperature = 64, 0.2
    z1, z2 = views(size)
    loss = SogCLR(size, temperature, gamma=0.02)
    for step in range(500):
        ids = torch.randperm(size, generator=torch.Generator().manual_seed(step))[:16]
        loss(z1[ids], z2[ids], ids=ids)
    scores = hn.two_views(z1, z2, temperature)
    exact = (
        hn.core.objectives.log_expect_exp(scores.candidates, hn.Uniform().log_weights(scores))
        .view(2, size)
        .exp()
        .mean(0)
    )
    ratio = loss.partitions[0].log_u.exp() / exact
    assert ratio.mean().item() == pytest.approx(1.0, abs=0.02)
    assert (ratio - 1.0).abs().max() < 0.25


@pytest.mark.parametrize("temperature", [0.01, 0.005])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_temperature_stays_finite(temperature: float, dtype: torch.dtype) -> None:
    """e^(1 / 0.005) is far beyond float32."""
    z = make_unit_vectors(4, 8, dtype=torch.float32)
    z1 = torch.cat([z, z]).to(dtype).requires_grad_()  # duplicates: similarity 1 among the negatives
    loss = papers.sogclr(8, temperature)
    for _ in range(3):
        value = loss(z1, z1.detach(), ids=torch.arange(8))
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(z1.grad).all()
    assert torch.isfinite(loss.partitions[0].log_u).all()


def test_twins_in_a_batch_share_the_mean_whatever_their_order() -> None:
    z1, z2 = views(6)
    ids = torch.tensor([3, 1, 3, 0, 1, 3])
    stored = []
    for order in (torch.arange(6), torch.tensor([5, 2, 0, 4, 1, 3])):
        loss = papers.sogclr(5, 0.1)
        loss(z1[order], z2[order], ids=ids[order])
        stored.append(loss.partitions[0].log_u)
    torch.testing.assert_close(*stored)
    scores = hn.two_views(z1, z2, 0.1, ids=ids)
    g = hn.core.objectives.log_expect_exp(scores.candidates, hn.Uniform().log_weights(scores)).exp()
    rows = torch.cat([ids, ids]) == 3
    assert stored[0][3].exp().item() == pytest.approx(g[rows].mean().item())
    assert stored[0][2] == -math.inf


def test_eval_mode_remembers_nothing() -> None:
    loss = papers.sogclr(8).eval()
    loss(*views(8), ids=torch.arange(8))
    assert not loss.partitions[0].visited.any()


def test_real_loss_is_reported_beside() -> None:
    z1, z2 = views(8)
    loss = papers.sogclr(8, 0.1)
    loss(z1, z2, ids=torch.arange(8))
    scores = hn.two_views(z1, z2, 0.1)
    real = hn.info_nce(scores, hn.Uniform().log_weights(scores), positives_in_denominator="none").mean()
    assert loss.last["real_loss"].item() == pytest.approx(real.item())
    assert loss.last["running_loss"].item() == pytest.approx(real.item())  # at the first visit u is the batch's


def test_a_mask_and_a_tilt_are_averaged_as_they_weigh() -> None:
    """With weights q the normaliser is of E_q[e^s], and shares sum to 1 at the first visit."""
    z1, z2 = (z.requires_grad_() for z in views(8))
    labels = torch.arange(8) % 3
    negatives = hn.OtherLabel() * hn.Tilt(1.0, detach=True)
    loss = SogCLR(8, 0.5, divide_by_temperature=True, negatives=negatives)
    loss(z1, z2, ids=torch.arange(8), labels=labels).backward()
    found = z1.grad.clone()
    z1.grad = None
    scores = hn.two_views(z1, z2, 0.5, labels=labels)
    (
        hn.core.objectives.log_expect_exp(scores.candidates, negatives.log_weights(scores)) - scores.positives[:, 0]
    ).mean().backward()
    torch.testing.assert_close(found, z1.grad)


def test_an_anchor_without_negatives_says_nothing() -> None:
    partition = Partition(4)
    scores = hn.two_views(*views(1), 0.1, ids=torch.tensor([2]))
    log_norm = partition(scores, hn.Uniform().log_weights(scores))
    assert not partition.visited.any()
    losses = hn.surrogate(scores, hn.Tilt(1.0).log_weights(scores), log_norm=log_norm)
    assert losses.abs().sum() == 0


def test_half_precision_keeps_the_normalisers() -> None:
    loss = papers.sogclr(8, 0.1)
    loss(*views(8), ids=torch.arange(8))
    before = loss.partitions[0].log_u.clone()
    loss.to(torch.bfloat16)
    assert torch.equal(loss.partitions[0].log_u, before)
    assert loss.partitions[0].log_u.dtype == torch.float64


def test_ids_are_needed_and_in_range() -> None:
    with raises(ArgumentError, who="SogCLR", got="ids=None"):
        papers.sogclr(4)(*views(4))
    with raises(ArgumentError, who="Partition", what="num_instances=4", got="ids.max()=4"):
        papers.sogclr(4)(*views(4), ids=torch.arange(1, 5))
