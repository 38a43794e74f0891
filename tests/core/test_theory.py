"""What the papers prove, on cases small enough to be exact."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import normalize

import hardneg as hn
import support.brute_force as loops

HARDENINGS = ["Tilt(1.0)", "Tilt(3.0)", "Threshold(-0.2)", 'Hardening("threshold", 0.7)', 'Hardening("sigmoid", 2.0)']


def unit_views(b, d, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(normalize(torch.randn(b, d, generator=generator, dtype=torch.float64), dim=-1) for _ in range(2))


def loss_of(q, scores, **options):
    return hn.info_nce(scores, q.log_weights(scores), **options)


# HCL, Proposition 3


@pytest.mark.parametrize("tau_plus", [0.0, 0.1])
def test_hcl_proposition_3_tilting_tends_to_the_worst_case(tau_plus):
    """L(f, q_beta) grows with beta to sup_q L(f, q), which the closest candidate attains; two may share that place."""
    z1, z2 = unit_views(6, 3)
    z1[3] = z1[4]
    scores = hn.two_views(z1, z2, 0.5)
    options = {"num_negatives": 10, "tau_plus": tau_plus}
    losses = [loss_of(hn.Tilt(beta), scores, **options) for beta in (0.0, 0.1, 0.5, 1.0, 2.0, 5.0, 20.0, 100.0, 1e4)]
    for softer, harder in itertools.pairwise(losses):
        assert (harder >= softer - 1e-12).all()
    assert (losses[3] > losses[0] + 0.05).all()
    closest = scores.candidates.masked_fill(~scores.valid, hn.NEVER).amax(-1, keepdim=True)
    worst = closest.exp() if not tau_plus else ((closest.exp() - tau_plus * scores.positives.exp()) / (1 - tau_plus))
    worst_loss = -(scores.positives.exp() / (scores.positives.exp() + 10 * worst.clamp(min=math.exp(-2.0)))).log()
    torch.testing.assert_close(losses[-1], worst_loss, rtol=1e-9, atol=0.0)
    assert (losses[-2] - worst_loss).abs().max() > 0  # beta = 100 is not there yet
    for _ in range(20):
        any_q = torch.randn(12, 12, dtype=torch.float64).mul(3).masked_fill(~scores.valid, hn.NEVER)
        assert (hn.info_nce(scores, any_q, **options) <= worst_loss + 1e-12).all()


@pytest.mark.parametrize("tau_plus", [0.0, 0.1])
def test_hcl_without_tilt_is_the_debiased_loss(tau_plus):
    z1, z2 = (z.requires_grad_() for z in unit_views(5, 4))
    tilted, plain = hn.papers.hcl(0.5, tau_plus, beta=0.0)(z1, z2), hn.papers.debiased(0.5, tau_plus)(z1, z2)
    torch.testing.assert_close(tilted, plain, rtol=1e-12, atol=0.0)
    ours, expected = (torch.autograd.grad(loss, [z1, z2]) for loss in (tilted, plain))
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-13)


# Ring, Theorem 3.1: CNCE <= NCE <= I(U; V)

JOINT = torch.tensor(
    [[0.20, 0.05, 0.02, 0.03, 0.01], [0.02, 0.18, 0.06, 0.02, 0.04], [0.03, 0.04, 0.05, 0.15, 0.10]],
    dtype=torch.float64,
)


def bound_on_mutual_information(f, support, k):
    """E over (u, v1) ~ p(u, v1) and k - 1 negatives of log(e^f(u, v1) / mean of the k e^f), every tuple enumerated.

    ``support(scores)`` gives log-weights over the values of V for each pair (u, v1); p(v) multiplies them.
    """
    u, v = (index.flatten() for index in torch.meshgrid(torch.arange(3), torch.arange(5), indexing="ij"))
    every = torch.zeros(len(u), 5, dtype=torch.bool)
    scores = replace(hn.from_matrix(f[u], every), positives=f[u, v][:, None], positive_valid=every[:, :1] | True)
    log_q = torch.log_softmax(support(scores) + JOINT.sum(0).log(), dim=-1)
    total = 0.0
    for negatives in itertools.product(range(5), repeat=k - 1):
        index = torch.tensor(negatives).expand(len(u), k - 1)
        drawn = scores.take(index)
        estimate = math.log(k) - loss_of(hn.Uniform(), drawn, num_negatives=k - 1)[:, 0]
        probability = log_q.gather(1, index).sum(-1).exp()
        total += (JOINT[u, v] * probability * estimate).sum().item()
    return total


def mutual_information():
    independent = JOINT.sum(1, keepdim=True) * JOINT.sum(0)
    return (JOINT * (JOINT / independent).log()).sum().item()


def mean_exp(f):
    """c(u) = E_p(v)[e^f(u, v)]."""
    return (f.exp() * JOINT.sum(0)).sum(-1)


@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_ring_theorem_3_1_conditional_nce_is_below_nce(seed, k):
    noise = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    f = (JOINT / (JOINT.sum(1, keepdim=True) * JOINT.sum(0))).log() + 0.5 * noise
    nce = bound_on_mutual_information(f, hn.Uniform().log_weights, k)
    assert nce <= mutual_information() + 1e-12
    for count in (1, 2):
        ring = hn.Ring(0.0, count / 5)
        kept = ring.log_weights(hn.from_matrix(f, torch.zeros(3, 5, dtype=torch.bool))) == 0
        assert kept.sum(-1).tolist() == [count] * 3
        if (f.exp() > mean_exp(f)[:, None])[kept].all():  # strictly above the row's mean
            assert bound_on_mutual_information(f, ring.log_weights, k) <= nce + 1e-12
        else:
            assert count == 2


def test_ring_theorem_3_1_with_the_largest_set_that_it_allows():
    f = (JOINT / (JOINT.sum(1, keepdim=True) * JOINT.sum(0))).log()

    def above_the_mean(scores):
        limit = mean_exp(scores.candidates).log()[:, None]
        return torch.zeros_like(scores.candidates).masked_fill(scores.candidates <= limit, hn.NEVER)

    def below_the_mean(scores):
        return torch.zeros_like(scores.candidates).masked_fill(above_the_mean(scores) == 0, hn.NEVER)

    nce = bound_on_mutual_information(f, hn.Uniform().log_weights, 3)
    assert bound_on_mutual_information(f, above_the_mean, 3) < nce <= mutual_information()
    assert bound_on_mutual_information(f, below_the_mean, 3) > nce  # without the condition there is no theorem


def test_ring_compares_with_uniform_only_at_the_same_number_of_negatives():
    """With M = the size of its own support a ring has fewer negatives and a lower loss: another quantity."""
    z1, z2 = unit_views(8, 4)
    scores, ring = hn.cross_views(z1, z2, 0.5), hn.Ring(0.0, 0.3)
    mean = hn.core.objectives.log_expect_exp(scores.candidates, hn.Uniform().log_weights(scores))
    assert (scores.candidates[ring.log_weights(scores) == 0] > mean.repeat_interleave(2)).all()
    for many in (1, 7, 100):
        assert (loss_of(ring, scores, num_negatives=many) > loss_of(hn.Uniform(), scores, num_negatives=many)).all()
    assert (loss_of(ring, scores) < loss_of(hn.Uniform(), scores)).all()


# H-SCL, Proposition 2 and Lemma 1


def labelled(seed, pull=0.0):
    """Two views of eight instances of three classes; ``pull`` moves each class to a place of its own."""
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
    places = 4.0 * torch.eye(3, 4, dtype=torch.float64)
    z1, z2 = (normalize(z + pull * places[labels], dim=-1) for z in unit_views(8, 4, seed))
    return z1, z2, labels


@pytest.mark.parametrize("text", HARDENINGS)
def test_hscl_proposition_2_the_masses_add(text):
    z1, z2, labels = labelled(0)
    scores = hn.two_views(z1, z2, 0.5, labels=labels)
    hard, same = hn.parse(text), scores.same_label("test")
    total = hard.log_weights(scores).exp().sum(-1)
    true_negative = (hn.OtherLabel() * hard).log_weights(scores).exp().sum(-1)
    collision = hard.log_weights(scores.narrowed(same)).exp().sum(-1)
    assert (true_negative > 0).all()
    assert (collision > 0).any()
    torch.testing.assert_close(total, true_negative + collision, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("text", HARDENINGS)
@pytest.mark.parametrize("pull", [0.0, 0.1, 0.3, 1.0])
def test_assumption_1_is_the_share_that_a_loop_counts(text, pull):
    for seed in range(3):
        z1, z2, labels = labelled(seed, pull)
        hard = hn.parse(text)
        rows = loops.two_views(z1, z2, 0.5, labels=labels)
        expected = loops.assumption_1(rows, loops.weights(hard, rows))
        assert hn.negatives.assumption_1(hn.two_views(z1, z2, 0.5, labels=labels), hard).item() == pytest.approx(
            expected
        )


def test_assumption_1_has_no_answer_without_both_kinds_of_candidates():
    z1, z2 = unit_views(4, 3)
    for labels in (torch.arange(4), torch.zeros(4).long()):
        assert hn.negatives.assumption_1(hn.cross_views(z1, z2, 0.5, labels=labels), hn.Tilt(1.0)).isnan()


@pytest.mark.parametrize("text", HARDENINGS)
def test_hscl_lemma_1_labels_lower_the_loss_wherever_assumption_1_holds(text):
    """L_HUCL >= L_HSCL; per anchor it is an equivalence, so violations of the assumption reverse it."""
    hard, shares, kept, reversed_ = hn.parse(text), [], 0, 0
    for seed, pull in itertools.product(range(4), (0.0, 0.1, 1.0)):
        z1, z2, labels = labelled(seed, pull)
        scores = hn.two_views(z1, z2, 0.5, labels=labels)
        shares.append(hn.negatives.assumption_1(scores, hard).item())
        options = {"num_negatives": 1}
        without, with_labels = loss_of(hard, scores, **options), loss_of(hn.OtherLabel() * hard, scores, **options)
        for i in range(16):
            alone = hn.score(scores_row_keys(z1, z2, labels, i), z1[:1], other_keys(z1, z2, labels, i), 0.5)
            share = hn.negatives.assumption_1(alone, hard).item()
            if share == 1.0:
                kept += 1
                assert without[i] >= with_labels[i] - 1e-12
            elif share == 0.0 and with_labels[i] > 0:
                reversed_ += 1
                assert without[i] < with_labels[i]
        if shares[-1] == 1.0:
            assert without.mean() >= with_labels.mean()
    assert 1.0 in shares
    assert min(shares) < 1.0
    assert kept > 0
    assert reversed_ > 0


def scores_row_keys(z1, z2, labels, i):
    return hn.Keys(torch.cat([z1, z2])[i : i + 1], labels=torch.cat([labels, labels])[i : i + 1])


def other_keys(z1, z2, labels, i):
    others = [j for j in range(16) if j % 8 != i % 8]
    return hn.Keys(torch.cat([z1, z2])[others], labels=torch.cat([labels, labels])[others])


# Special cases of one another


@pytest.mark.parametrize(
    "text", ["Tilt(0.0)", "Ring(0.0, 1.0)", "Threshold(-1.0)", "Rank(0)", "Tilt(0.0, detach=True)"]
)
def test_distributions_that_are_uniform(text):
    z1, z2 = unit_views(6, 3)
    z1[1], z2[0] = torch.eye(3, dtype=torch.float64)[0], -torch.eye(3, dtype=torch.float64)[0]  # similarity -1
    for scores in (hn.two_views(z1, z2, 0.07, ids=torch.tensor([0, 1, 2, 2, 3, 4])), hn.score(z1, z2, z2.flip(0), 0.5)):
        uniform, q = hn.Uniform().log_weights(scores), hn.parse(text)
        assert torch.equal(q.log_weights(scores), uniform)
        for options in ({}, {"tau_plus": 0.1}, {"num_negatives": "mass"}, {"positives_in_denominator": "none"}):
            assert torch.equal(loss_of(q, scores, **options), hn.info_nce(scores, uniform, **options))


def test_hardenings_are_tilts_and_thresholds():
    scores = hn.two_views(*unit_views(6, 3), 0.5)
    tilt = hn.Tilt(1.7).log_weights(scores)
    assert torch.equal(hn.Hardening("exponential", 1.7).log_weights(scores), tilt)
    threshold = hn.Threshold(0.2).log_weights(scores)
    assert torch.equal(hn.Hardening("threshold", math.exp(0.2 / 0.5)).log_weights(scores), threshold)


# A tilt is a temperature in disguise


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0, 4.0, 9.0])
def test_a_detached_tilt_repels_like_a_lower_temperature(beta):
    z1, z2 = (z.requires_grad_() for z in unit_views(6, 4))
    scores = hn.two_views(z1, z2, 0.5)
    sharper = torch.softmax((1 + beta) * scores.candidates.masked_fill(~scores.valid, hn.NEVER), dim=-1)
    log_w = hn.Tilt(beta, detach=True).log_weights(scores)
    log_mean = hn.core.objectives.log_expect_exp(scores.candidates, log_w)
    repulsion = torch.autograd.grad(log_mean.sum(), scores.candidates, retain_graph=True)[0]
    torch.testing.assert_close(repulsion, sharper, rtol=1e-10, atol=1e-14)

    lower = hn.two_views(z1, z2, 0.5 / (1 + beta))
    untilted = hn.core.objectives.log_expect_exp(lower.candidates, hn.Uniform().log_weights(lower))
    ours, theirs = (torch.autograd.grad(t.sum(), [z1, z2], retain_graph=True) for t in (log_mean, untilted))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other / (1 + beta), rtol=1e-10, atol=1e-13)
    assert torch.isclose(
        hn.diagnose(scores, log_w).effective_temperature, torch.tensor(0.5 / (1 + beta), dtype=torch.float64)
    ).all()
    assert (hn.diagnose(scores, log_w).attracted == 0).all()


@pytest.mark.parametrize("beta", [0.5, 1.0, 4.0])
def test_hcl_itself_also_attracts_easy_negatives(beta):
    """The gradient through the weights is (1 + beta) p_{1+beta} - beta p_beta; diagnose counts where it is below 0."""
    scores = hn.two_views(*(z.requires_grad_() for z in unit_views(8, 4)), 0.5)
    log_w = hn.Tilt(beta).log_weights(scores)
    masked = scores.candidates.masked_fill(~scores.valid, hn.NEVER)
    expected = (1 + beta) * torch.softmax((1 + beta) * masked, -1) - beta * torch.softmax(beta * masked, -1)
    log_mean = hn.core.objectives.log_expect_exp(scores.candidates, log_w)
    repulsion = torch.autograd.grad(log_mean.sum(), scores.candidates, retain_graph=True)[0]
    torch.testing.assert_close(repulsion, expected, rtol=1e-9, atol=1e-14)
    share = ((expected < 0) & scores.valid).sum(-1) / 14
    assert 0.1 < share.mean() < 0.9
    torch.testing.assert_close(hn.diagnose(scores, log_w).attracted.double(), share.double(), rtol=1e-6, atol=0.0)
