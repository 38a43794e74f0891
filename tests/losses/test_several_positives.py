"""The debiasing correction with several positives, eq. 4 of HCL (Robinson et al. 2021) with M > 1."""

import math

import pytest
import torch
from torch.nn.functional import normalize

import hardneg as hn
from hardneg.core.errors import ArgumentError


def views(number, b=6, d=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [normalize(torch.randn(b, d, generator=generator, dtype=torch.float64), dim=-1) for _ in range(number)]


def loop(z, temperature, beta, tau_plus):
    """Eq. 4, one anchor and positive at a time: N (E_q[e^s] - tau E_q+[e^a]) / (1 - tau), at least N e^(-1/t)."""
    number, b, losses = len(z), len(z[0]), []
    for v in range(number):
        for i in range(b):
            a = [(z[v][i] @ z[w][i] / temperature) for w in range(number) if w != v]
            s = [(z[v][i] @ z[w][j] / temperature) for w in range(number) for j in range(b) if j != i]
            weights, own = [(beta * x).exp() for x in s], [(beta * x).exp() for x in a]
            negative = sum(w * x.exp() for w, x in zip(weights, s, strict=True)) / sum(weights)
            positive = sum(w * x.exp() for w, x in zip(own, a, strict=True)) / sum(own)
            floor = torch.tensor(math.exp(-1 / temperature), dtype=torch.float64)
            rest = torch.maximum((negative - tau_plus * positive) / (1 - tau_plus), floor)
            losses += [-(x.exp() / (x.exp() + len(s) * rest)).log() for x in a]
    return torch.stack(losses).mean()


@pytest.mark.parametrize("impl", ["dense", "streamed"])
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.5])
@pytest.mark.parametrize("number", [2, 3, 4])
def test_all_positives_correct_as_in_equation_4(number, beta, impl):
    z = [each.requires_grad_() for each in views(number)]
    loss = hn.ContrastiveLoss(
        hn.Tilt(beta), 0.5, objective=f"info_nce(tau_plus=0.1, correction_beta={beta})", normalize=False, impl=impl
    )
    ours, expected = loss(z), loop(z, 0.5, beta, 0.1)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=0.0)
    grads = [torch.autograd.grad(value, z) for value in (ours, expected)]
    torch.testing.assert_close(*grads, rtol=1e-7, atol=1e-10)


def test_one_positive_is_hcl():
    z1, z2 = views(2)
    loss = hn.ContrastiveLoss("Tilt(1.0)", objective="info_nce(tau_plus=0.1, correction_beta=1.0)", normalize=False)
    torch.testing.assert_close(loss(z1, z2), hn.papers.hcl()(z1, z2))


@pytest.mark.parametrize("impl", ["dense", "streamed"])
def test_positives_by_label_correct_too(impl):
    z1, z2 = views(2, b=8)
    labels = torch.tensor([0, 0, 1, 1, 2, 2, 2, 3])
    text = "info_nce(tau_plus=0.2, correction_beta=1.0)"
    loss = hn.ContrastiveLoss("Tilt(1.0)", objective=text, positives="label", normalize=False, impl=impl)
    scores = hn.core.scoring.same_label_positives(hn.two_views(z1, z2, 0.5, labels=labels))
    log_w = hn.Tilt(1.0).log_weights(scores)
    losses = hn.info_nce(scores, log_w, tau_plus=0.2, correction_beta=1.0)
    torch.testing.assert_close(loss(z1, z2, labels=labels), hn.reduce(losses, scores))
    for i in range(16):
        a = scores.positives[i][scores.positive_valid[i]]
        s = scores.candidates[i][log_w[i] != hn.NEVER]
        q = torch.softmax(s, 0) @ s.exp() - 0.2 * torch.softmax(a, 0) @ a.exp()
        rest = torch.clamp(q / 0.8, min=math.exp(-2.0))
        expected = -(a.exp() / (a.exp() + len(s) * rest)).log()
        torch.testing.assert_close(losses[i][scores.positive_valid[i]], expected)


def test_without_tau_plus_it_changes_nothing():
    scores = hn.two_views(*views(2), 0.5)
    log_w = hn.Tilt(1.0).log_weights(scores)
    assert torch.equal(hn.info_nce(scores, log_w, correction_beta=1.0), hn.info_nce(scores, log_w))


def test_wrong_input():
    for beta in (-1.0, math.inf, "one"):
        with pytest.raises(ArgumentError) as raised:
            hn.core.objectives.InfoNCE(correction_beta=beta)
        assert raised.value.who == "info_nce"
