"""float32, bfloat16 and float16 against float64 on the same rounded inputs, down to temperature 0.01 and up to beta 50.

Whatever the dtype of the vectors, scores and losses are float32, so one bound holds for all: with u = 2^-24, a score
carries an error of about u |s| <= u / temperature and a log-weight one of u |log w|. To first order the loss then
carries u times its condition,

    sum_j |dL/ds_j| |s_j| + sum_j |dL/dlog w_j| |log w_j| + |L| + log n

(log n for the sums of n terms). A gradient has the relative error of the probabilities in it, which is
u (max |s| + max |log w| + log n), and is rounded to the dtype of the vectors. The bounds below are small multiples of
these; the multiples that were seen stand beside them, and formulas that are right on paper but not in floating point
break them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

import hardneg as hn
from hardneg import papers
from hardneg.core.objectives.base import softplus as own_softplus
from hardneg.core.tensors import unit
from support.cases import all_pairs

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TEMPERATURES = [0.01, 0.02, 0.05, 0.07, 0.1, 0.2, 0.5, 1.0]
BETAS = [0.0, 0.5, 1.0, 5.0, 10.0, 50.0]
FEW_TEMPERATURES, FEW_BETAS = [0.01, 0.07, 0.5], [0.0, 1.0, 50.0]
LABELS = torch.arange(12) % 4
UNIT_ROUNDOFF = 2.0**-24  # of float32, in which scores and losses are computed

MOST_OF_VALUE = 6.0  # seen in the tests below: 3.3
MOST_OF_GRADIENT = 5.0  # seen in the tests below: 2.0; over six seeds of the inputs: 3.0

Objective = Callable[[hn.Scores, Tensor], Tensor]


def views(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two views of 12 instances, rounded to the dtype. Rows 0 and 1 are duplicates under distinct ids, rows 2 and 3
    are duplicates whose views are equal too: a similarity of 1 for positives and negatives alike."""
    noise = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    z1, z2 = normalize(noise[0], dim=-1), normalize(0.8 * noise[0] + 0.6 * noise[1], dim=-1)
    z2[2] = z1[2]
    for z in (z1, z2):
        z[1], z[3] = z[0], z[2]
    return z1.to(dtype), z2.to(dtype)


def evaluate(
    objective: Objective, negatives: hn.negatives.Negatives, temperature: float, z1: Tensor, z2: Tensor
) -> tuple[Tensor, Tensor]:
    """The losses of all pairs, and the gradient of a weighted mean of them by the vectors of both views."""
    z1, z2 = z1.clone().requires_grad_(), z2.clone().requires_grad_()
    scores = hn.two_views(z1, z2, temperature, labels=LABELS)
    losses = objective(scores, negatives.log_weights(scores))
    anchors = torch.arange(1.0, len(losses) + 1.0, dtype=losses.dtype)[:, None]
    (losses * anchors / anchors.sum()).sum().backward()
    assert z1.grad is not None
    assert z2.grad is not None
    assert z1.grad.dtype == z1.dtype
    return losses.detach(), torch.cat([z1.grad, z2.grad])


def condition(objective: Objective, scores: hn.Scores, log_w: Tensor) -> Tensor:
    """How many roundings of the scores and log-weights the loss of each anchor carries, to first order; [b]."""
    leaves = [value.detach().clone().requires_grad_() for value in (scores.positives, scores.candidates, log_w)]
    positives, candidates, weights = leaves
    losses = objective(replace(scores, positives=positives, candidates=candidates), weights)
    losses.sum().backward()
    total = losses.detach().abs().sum(-1) + math.log(candidates.shape[1])
    for leaf in leaves:
        if leaf.grad is not None:
            total = total + torch.where(leaf == hn.NEVER, 0.0, leaf.grad * leaf.detach()).abs().sum(-1)
    if weights.grad is None:  # a surrogate, whose value follows the weights and whose gradient does not
        assert candidates.grad is not None
        total = total + largest_of(log_w) * (candidates.grad * candidates.detach()).abs().sum(-1)
    return total


def largest_of(log_w: Tensor) -> Tensor:
    return torch.where(log_w == hn.NEVER, 0.0, log_w).detach().abs().max()


def ratios(
    dtype: torch.dtype,
    objective: Objective,
    negatives: hn.negatives.Negatives,
    temperature: float,
    *,
    whole_scores: float = 0.0,
    seed: int = 0,
) -> tuple[float, float]:
    """Error of the losses and of the gradient, in units of what the dtype explains.

    ``whole_scores`` is the number of scores that the formula adds or subtracts as they are.
    """
    z1, z2 = views(dtype, seed)
    losses, gradient = evaluate(objective, negatives, temperature, z1, z2)
    assert losses.dtype == torch.float32
    assert losses.isfinite().all()
    assert gradient.isfinite().all()
    exact, exact_gradient = evaluate(objective, negatives, temperature, z1.double(), z2.double())
    scores = hn.two_views(z1.double(), z2.double(), temperature, labels=LABELS)
    log_w = negatives.log_weights(scores)
    whole = whole_scores * scores.candidates.abs().max()
    explained = UNIT_ROUNDOFF * (condition(objective, scores, log_w) + whole)[:, None]
    value_ratio = ((losses.double() - exact).abs() / explained).max().item()

    largest = scores.candidates.abs().max() + largest_of(log_w) + math.log(log_w.shape[1])
    limits = torch.finfo(dtype)
    relative = UNIT_ROUNDOFF * largest + (0.0 if dtype == torch.float32 else limits.eps / 2.0)
    smallest = limits.tiny * limits.eps + torch.finfo(torch.float32).tiny  # spacing of subnormal numbers
    explained = relative * exact_gradient.abs().max() + smallest
    return value_ratio, ((gradient.double() - exact_gradient).abs().max() / explained).item()


def assert_precise(
    dtype: torch.dtype,
    objective: Objective,
    negatives: hn.negatives.Negatives,
    temperature: float,
    *,
    whole_scores: float = 0.0,
) -> None:
    value_ratio, gradient_ratio = ratios(dtype, objective, negatives, temperature, whole_scores=whole_scores)
    assert value_ratio < MOST_OF_VALUE
    assert gradient_ratio < MOST_OF_GRADIENT


def info_nce(tau_plus: float) -> Objective:
    return partial(hn.info_nce, tau_plus=tau_plus)


EXTREMES = list(product(DTYPES, [0.01], [50.0], [0.0, 0.1]))


@pytest.mark.parametrize(
    ("dtype", "temperature", "beta", "tau_plus"), EXTREMES + all_pairs(DTYPES, TEMPERATURES, BETAS, [0.0, 0.1])
)
def test_tilted_info_nce(dtype: torch.dtype, temperature: float, beta: float, tau_plus: float) -> None:
    assert_precise(dtype, info_nce(tau_plus), hn.Tilt(beta), temperature)


# ClippedTilt is detached here: it divides by the largest score, several of which are 1 in this batch, and a maximum
# has no gradient where it is reached twice.
OTHERS = [
    "Ring(0.1, 0.5)",
    "Ring(0.25, outer=0.6, dynamic_inner=True)",
    "Rank(2, 9)",
    "Threshold(0.2)",
    "BelowPositive(0.05)",
    "OtherLabel() * Tilt(1.0)",
    "OtherLabel() * Tilt(50.0, detach=True)",
    "OtherLabel() * Ring(0.1, 0.5)",
    "ClippedTilt(10.0, detach=True)",
    'Hardening("sigmoid", 3.0)',
]


@pytest.mark.parametrize(("dtype", "temperature", "text"), all_pairs(DTYPES, FEW_TEMPERATURES, OTHERS))
def test_other_negatives(dtype: torch.dtype, temperature: float, text: str) -> None:
    assert_precise(dtype, info_nce(0.0), hn.parse(text), temperature)


OBJECTIVES: dict[str, Objective] = {
    "jsd": hn.jsd,
    "jsd debiased": partial(hn.jsd, tau_plus=0.1),
    "sigmoid": hn.sigmoid,
    "surrogate": hn.surrogate,
    "no positive": partial(hn.info_nce, positives_in_denominator="none"),
    "all positives": partial(hn.info_nce, positives_in_denominator="all"),
    "mass": partial(hn.info_nce, num_negatives="mass"),
}


@pytest.mark.parametrize(
    ("dtype", "temperature", "beta", "name"), all_pairs(DTYPES, FEW_TEMPERATURES, FEW_BETAS, list(OBJECTIVES))
)
def test_other_objectives(dtype: torch.dtype, temperature: float, beta: float, name: str) -> None:
    assert_precise(dtype, OBJECTIVES[name], hn.Tilt(beta), temperature)


def test_weights_normalised_last_are_caught() -> None:
    """LSE(s + log w) - LSE(log w) is the same on paper, and loses the digits of s under a large tilt."""

    def normalised_last(scores: hn.Scores, log_w: Tensor) -> Tensor:
        log_mean = torch.logsumexp(scores.candidates + log_w, -1) - torch.logsumexp(log_w, -1)
        return softplus(log_mean[:, None] + math.log(22.0) - scores.positives)

    tilt = hn.Tilt(50.0)
    exact = evaluate(info_nce(0.0), tilt, 0.05, *views(torch.float64))[0]
    torch.testing.assert_close(evaluate(normalised_last, tilt, 0.05, *views(torch.float64))[0], exact)
    assert ratios(torch.float32, normalised_last, tilt, 0.05)[0] > 2.0 * MOST_OF_VALUE


def test_scores_in_bfloat16_are_caught() -> None:
    def rounded(scores: hn.Scores, log_w: Tensor) -> Tensor:
        if scores.candidates.dtype == torch.float32:
            scores = replace(scores, candidates=scores.candidates.bfloat16().float())
        return hn.info_nce(scores, log_w)

    value_ratio, gradient_ratio = ratios(torch.float32, rounded, hn.Tilt(1.0), 0.05)
    assert value_ratio > 1000.0 * MOST_OF_VALUE
    assert gradient_ratio > 100.0 * MOST_OF_GRADIENT


@pytest.mark.parametrize(("dtype", "temperature", "beta"), all_pairs(DTYPES[:2], FEW_TEMPERATURES, FEW_BETAS))
def test_autocast_changes_no_bit_of_the_loss(dtype: torch.dtype, temperature: float, beta: float) -> None:
    loss = hn.ContrastiveLoss(hn.Tilt(beta), temperature)
    z1, z2 = (z.requires_grad_() for z in views(dtype))
    value = loss(z1, z2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (z1 @ z2.T).dtype == torch.bfloat16
        value_inside = loss(z1, z2)
    assert value_inside.dtype == torch.float32
    assert torch.equal(value_inside, value)
    gradient, gradient_inside = (torch.autograd.grad(each, z1)[0] for each in (value, value_inside))
    assert torch.equal(gradient_inside, gradient)


LOSSES_OF_PAPERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "simclr": papers.simclr(0.05),
    "hcl": papers.hcl(0.5, 0.1, 1.0),
    "supcon": lambda z1, z2: papers.supcon(0.05)(z1, z2, labels=LABELS),
    "hscl": lambda z1, z2: papers.hscl(0.05)(z1, z2, labels=LABELS),
    "moco": lambda z1, z2: papers.moco(0.05)(z1, z2, pool=z2.detach().flip(0)),
    "ring": lambda z1, z2: papers.ring(0.05)(z1, z2, pool=z2.detach().flip(0)),
    "moco_v3": papers.moco_v3(0.05),
    "simcse": lambda z1, z2: papers.simcse(0.05, 1.0)(z1, z2, hard=z2.detach().flip(0)),
    "graphcl": papers.graphcl(0.05),
    "infograph": lambda z1, z2: papers.infograph()(4.0 * z1, 4.0 * z2[:4], LABELS),
    "quick_thoughts": lambda z1, z2: papers.quick_thoughts()(4.0 * z1, 4.0 * z2),
}


MOST_OF_RINCE = 8.0  # seen over six seeds, two sizes, five distances of the views and three q: 4.1


@pytest.mark.parametrize("impl", ["dense", "streamed"])
@pytest.mark.parametrize("q", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("distance", [0.0, 1e-4, 0.5])
def test_rince_in_float32_at_low_temperature(distance: float, q: float, impl: str) -> None:
    """The error is that of the pulls that the normalisation cancels, u (1 + q / t) sum_j |dL/ds_j| / |z|, even where
    little or, at equal views, nothing of the positive's pull is left."""
    temperature, b = 0.05, 32
    noise = torch.randn(2, b, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    z1, z2 = noise[0].float(), (noise[0] + distance * noise[1]).float()
    gradients = []
    for dtype in (torch.float32, torch.float64):
        leaves = [z.detach().clone().to(dtype).requires_grad_() for z in (z1, z2)]
        hn.ContrastiveLoss(temperature=temperature, objective=f"rince(q={q})", impl=impl)(*leaves).backward()
        gradients.append(torch.cat([leaf.grad for leaf in leaves if leaf.grad is not None]).double())
    z, own = torch.cat([z1, z2]).double(), torch.arange(2 * b).roll(b)
    s = (normalize(z, dim=-1) @ normalize(z, dim=-1).T).requires_grad_()
    others = (own[:, None] - own) % b != 0
    positive = (s[torch.arange(2 * b), own] / temperature).exp()
    total = positive + ((s / temperature).exp() * others).sum(1)
    (((0.01 * total) ** q - positive**q) / q).mean().backward()
    assert s.grad is not None
    pulls = (s.grad.abs().sum(0) + s.grad.abs().sum(1)) / z.norm(dim=1)
    error = (gradients[0] - gradients[1]).norm(dim=1)
    assert bool((error <= MOST_OF_RINCE * UNIT_ROUNDOFF * (1.0 + q / temperature) * pulls).all())
    if distance >= 0.5:  # views of cosine 0.9, of which the positive's pull leaves a good part
        torch.testing.assert_close(*gradients, rtol=0.0, atol=1e-5 * float(gradients[1].abs().max()))


@pytest.mark.parametrize("name", LOSSES_OF_PAPERS)
def test_every_paper_computes_its_scores_in_float32(name: str) -> None:
    """bfloat16 vectors give the loss of the same vectors in float32, also under autocast."""
    loss, (z1, z2) = LOSSES_OF_PAPERS[name], views(torch.bfloat16)
    wide = loss(z1.float(), z2.float())
    assert loss(z1, z2).dtype == torch.float32
    torch.testing.assert_close(loss(z1, z2), wide, rtol=1e-6, atol=0.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(loss(z1, z2), wide, rtol=1e-6, atol=0.0)
        torch.testing.assert_close(loss(z1.float(), z2.float()), wide, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_unit_vectors_do_not_depend_on_a_power_of_two(dtype: torch.dtype) -> None:
    """To the last bit, from subnormal numbers to the largest; a zero row stays zero and gets no gradient."""
    limits = torch.finfo(dtype)
    rows = torch.tensor([[0.5, -0.25, 0.75], [0.5, -0.5, 0.125]], dtype=dtype)
    for power in (
        limits.max / (2.0 - limits.eps),
        limits.smallest_normal,
        limits.smallest_normal * limits.eps * 8,
        1.0,
        0.5,
    ):
        assert torch.equal(unit(rows * power), unit(rows))
    zero = torch.zeros(1, 3, dtype=dtype, requires_grad=True)
    unit(zero).sum().backward()
    assert zero.grad is not None
    assert torch.equal(zero.grad, torch.zeros(1, 3, dtype=dtype))


def test_softplus_keeps_its_small_digits() -> None:
    x = torch.tensor([-60.0, 25.0, 79.0, 300.0], dtype=torch.float64)
    expected = [math.log1p(math.exp(-60.0)), 25.0 + math.log1p(math.exp(-25.0)), 79.0, 300.0]
    torch.testing.assert_close(own_softplus(x), torch.tensor(expected, dtype=torch.float64), rtol=1e-15, atol=0.0)
    assert own_softplus(x.float()).isfinite().all()
