"""Objectives against loops, value and gradient, in every option."""

import math
from dataclasses import replace

import pytest
import torch

import hardneg as hn
import support.brute_force as loops
from hardneg.core.errors import ArgumentError
from hardneg.core.objectives import InfoNCE
from hardneg.core.objectives.base import registered_objectives
from support.errors import raises

NEGATIVES = ["Uniform()", "Tilt(1.3)", "Tilt(2.0, detach=True)", "Threshold(0.0) * Tilt(0.7)", "Ring(0.2, 0.8)"]
CASES = ["two views", "several pools", "several positives", "positives of the label"]


def both(q, case, ours, loop, **options):
    """The objective on tensors and in loops, of the same negatives."""
    return ours(case.scores, q.log_weights(case.scores), **options), loop(
        case.rows, loops.weights(q, case.rows), **options
    )


@pytest.mark.parametrize("name", loops.CASES)
def test_info_nce_of_every_case(name):
    case = loops.CASES[name]()
    loops.assert_agree(*both(hn.Tilt(1.0), case, hn.info_nce, loops.info_nce), case.leaves)


@pytest.mark.parametrize("positives_in_denominator", ["own", "all", "none"])
@pytest.mark.parametrize("num_negatives", ["support", "candidates", "mass", 37.5])
@pytest.mark.parametrize("name", CASES)
def test_info_nce_in_every_option(name, num_negatives, positives_in_denominator):
    case = loops.CASES[name]()
    options = {"num_negatives": num_negatives, "positives_in_denominator": positives_in_denominator}
    for text in NEGATIVES:
        loops.assert_agree(*both(hn.parse(text), case, hn.info_nce, loops.info_nce, **options), case.leaves)


@pytest.mark.parametrize("positives_in_denominator", ["own", "all", "none"])
@pytest.mark.parametrize("tau_plus", [0.1, 0.3, 0.6])
def test_debiased_info_nce(tau_plus, positives_in_denominator):
    """All pairs are above the floor for tau_plus=0.1, some are at it for more."""
    at_floor = []
    options = {"tau_plus": tau_plus, "positives_in_denominator": positives_in_denominator}
    for name in CASES:
        case = loops.CASES[name]()
        for text in ("Uniform()", "Tilt(1.0)", "Tilt(3.0, detach=True)"):
            q = hn.parse(text)
            loops.assert_agree(*both(q, case, hn.info_nce, loops.info_nce, **options), case.leaves)
            at_floor.append(hn.diagnose(case.scores, q.log_weights(case.scores), tau_plus=tau_plus).clamped.flatten())
    assert torch.cat(at_floor).any() == (tau_plus > 0.1)
    assert torch.cat(at_floor).double().mean() < 0.5


def test_a_floored_pair_has_no_gradient_to_its_negatives():
    z1, pool = loops.random_keys(1, 4, 3), loops.random_keys(3, 4, 3)
    scores = hn.score(z1, 3.0 * z1.detach(), pool, 0.1)
    losses = hn.info_nce(scores, hn.Tilt(1.0).log_weights(scores), tau_plus=0.5)
    assert hn.diagnose(scores, hn.Tilt(1.0).log_weights(scores), tau_plus=0.5).clamped.all()
    (gradient,) = torch.autograd.grad(losses.sum(), pool)
    assert (gradient == 0).all()
    expected = torch.nn.functional.softplus(torch.tensor(4.0, dtype=torch.float64).log() - 10.0 - scores.positives)
    torch.testing.assert_close(losses, expected)


@pytest.mark.parametrize("shape", ["one for all", "one of each pair"])
def test_info_nce_without_sampling_bias(shape):
    for name in ("two views", "several positives"):
        case = loops.CASES[name]()
        b, n = case.scores.candidates.shape
        log_q = (-3 * torch.rand(b, n).double(), -3 * torch.rand(b, case.scores.positives.shape[1]).double())
        if shape == "one for all":
            log_q = (log_q[0][0], log_q[1][:, 0])
        for options in ({}, {"positives_in_denominator": "all"}, {"num_negatives": "mass"}):
            loops.assert_agree(
                *both(hn.Tilt(0.8), case, hn.info_nce, loops.info_nce, log_q=log_q, **options), case.leaves
            )


def test_log_q_and_tau_plus_do_not_meet():
    case = loops.CASES["two views"]()
    log_q = torch.zeros(10).double(), torch.zeros(10).double()
    with raises(ArgumentError, who="info_nce", what="tau_plus=0"):
        hn.info_nce(case.scores, hn.Uniform().log_weights(case.scores), tau_plus=0.1, log_q=log_q)


@pytest.mark.parametrize("tau_plus", [0.0, 0.3])
@pytest.mark.parametrize("name", CASES)
def test_jsd(name, tau_plus):
    case = loops.CASES[name]()
    for text in [*NEGATIVES, "ClippedTilt(1.0)"]:
        loops.assert_agree(*both(hn.parse(text), case, hn.jsd, loops.jsd, tau_plus=tau_plus), case.leaves)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_surrogate(name, given):
    case = loops.CASES[name]()
    log_norm = torch.randn(len(case.rows)).double() if given else None
    for text in NEGATIVES:
        loops.assert_agree(*both(hn.parse(text), case, hn.surrogate, loops.surrogate, log_norm=log_norm), case.leaves)


def test_surrogate_of_the_softmax_has_the_gradient_of_the_contrastive_loss():
    """SogCLR with an exact normaliser is InfoNCE without the positive in its denominator."""
    case = loops.CASES["two views"]()
    surrogate = hn.surrogate(case.scores, hn.Tilt(1.0).log_weights(case.scores))
    loss = hn.info_nce(case.scores, hn.Uniform().log_weights(case.scores), positives_in_denominator="none")
    weights = torch.rand_like(loss)
    ours, expected = (
        torch.autograd.grad((weights * each).sum(), case.leaves, retain_graph=True) for each in (surrogate, loss)
    )
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("num_negatives", ["support", "candidates", "mass", 3.0])
@pytest.mark.parametrize("name", CASES)
def test_sigmoid(name, num_negatives):
    case, bias = loops.CASES[name](), -1.5
    q = hn.parse("Tilt(0.5) * Threshold(-0.3)")
    ours = hn.sigmoid(case.scores, q.log_weights(case.scores), bias=bias, num_negatives=num_negatives)
    table = loops.weights(q, case.rows)
    loop = torch.zeros_like(ours)
    for i, (row, line) in enumerate(zip(case.rows, table, strict=True)):
        support = [j for j, w in enumerate(line) if w is not None]
        if not support:
            continue
        mass = sum(line[j] for j in support)
        others = sum(item.id is None or item.id < 0 or item.id != row.anchor.id for item in row.candidates)
        many = {"support": len(support), "candidates": others, "mass": mass}.get(num_negatives, num_negatives)
        negative = sum(line[j] * -torch.log(1 / (1 + (row.scores[j] + bias).exp())) for j in support) / mass
        for k, a in enumerate(row.positives):
            if a is not None:
                loop[i, k] = -torch.log(1 / (1 + (-a - bias).exp())) + many * negative
    loops.assert_agree(ours, loop, case.leaves)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["anchors", "pairs", "none"])
@pytest.mark.parametrize("name", CASES)
def test_reduce(name, reduction, weighted):
    case = loops.CASES[name]()
    ours, loop = both(hn.Tilt(1.0), case, hn.info_nce, loops.info_nce)
    weights = torch.rand(len(case.rows)).double() if weighted else None
    loops.assert_agree(
        hn.reduce(ours, case.scores, reduction, weights), loops.reduce(loop, case.rows, reduction, weights), case.leaves
    )


def test_anchors_without_a_positive_stay_in_the_mean_of_anchors_and_out_of_the_mean_of_pairs():
    case = loops.CASES["several positives"]()
    assert case.scores.positive_valid.sum(-1).tolist() == [3, 2, 1, 2, 0]
    losses = torch.ones(5, 3).double() * case.scores.positive_valid
    assert hn.reduce(losses, case.scores, "anchors").item() == pytest.approx(4 / 5)
    assert hn.reduce(losses, case.scores, "pairs").item() == pytest.approx(1.0)
    nobody = replace(case.scores, positive_valid=torch.zeros(5, 3).bool())
    assert hn.reduce(torch.zeros(5, 3), nobody, "pairs").item() == 0.0
    assert hn.reduce(losses, case.scores, "anchors", torch.zeros(5).double()).item() == 0.0


def test_learnable_temperature_has_the_gradient_of_the_loop():
    z1, z2 = loops.random_keys(1, 4, 3), loops.random_keys(2, 4, 3)
    temperature = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    scores, rows = hn.two_views(z1, z2, temperature), loops.two_views(z1, z2, temperature)
    for q in (hn.Uniform(), hn.Tilt(1.0), hn.Threshold(0.1) * hn.Tilt(1.0, detach=True)):
        for tau_plus in (0.0, 0.1, 0.6):
            ours = hn.info_nce(scores, q.log_weights(scores), tau_plus=tau_plus)
            loop = loops.info_nce(rows, loops.weights(q, rows), tau_plus=tau_plus)
            loops.assert_agree(ours, loop, [z1, z2, temperature])


def test_a_number_of_negatives_per_anchor():
    case = loops.CASES["two views"]()
    log_w = hn.Tilt(1.0).log_weights(case.scores)
    many = torch.arange(1.0, 11.0).double()
    ours = hn.info_nce(case.scores, log_w, num_negatives=many)
    for i in range(10):
        row = hn.info_nce(case.scores, log_w, num_negatives=float(many[i]))[i]
        torch.testing.assert_close(ours[i], row, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda s, w: hn.info_nce(s, w, num_negatives="all"),
            "info_nce needs num_negatives .* got num_negatives='all'",
        ),
        (lambda s, w: hn.info_nce(s, w, num_negatives=0), "info_nce needs num_negatives .* got num_negatives=0"),
        (lambda s, w: hn.info_nce(s, w, tau_plus=1.0), r"info_nce needs tau_plus in \[0.0, 1.0\), got tau_plus=1.0"),
        (lambda s, w: hn.info_nce(s, w, tau_plus=-0.1), "info_nce needs tau_plus"),
        (lambda s, w: hn.jsd(s, w, tau_plus=1.0), "jsd needs tau_plus"),
        (
            lambda s, w: hn.info_nce(s, w, positives_in_denominator="own positives"),
            "info_nce needs .*'own', 'all' or 'none', got positives_in_denominator='own positives'",
        ),
        (lambda s, w: hn.info_nce(s, None), "info_nce needs log-weights as a tensor, got log_w of type NoneType; use"),
        (lambda s, w: hn.diagnose(s, "Tilt(1.0)"), "diagnose needs log-weights as a tensor, got log_w of type str"),
        (lambda s, w: hn.reduce(s.positives[:, 0], s), r"reduce needs losses of pairs, \[b, p\], got"),
        (lambda s, w: hn.draw(w[0], 1, torch.Generator()), r"draw needs log-weights \[b, n\], got"),
        (lambda s, w: hn.reduce(s.positives, s, "sum"), "reduce needs reduction .* got reduction='sum'"),
    ],
)
def test_wrong_options_are_named(call, message):
    scores = loops.CASES["two views"]().scores
    with pytest.raises(ValueError, match=message):
        call(scores, hn.Uniform().log_weights(scores))


def softplus(x):
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


@pytest.mark.parametrize("far", [-60.0, -20.5, -3.0, 0.0, 3.0, 19.5, 60.0])
@pytest.mark.parametrize("name", ["own", "all", "jsd", "sigmoid"])
def test_no_digit_is_lost_far_from_zero(name, far):
    assert_exact(name, far)


@pytest.mark.parametrize("far", [20.5, 25.0])
@pytest.mark.parametrize("name", ["all", "jsd", "sigmoid"])
def test_no_digit_is_lost_above_the_threshold_of_softplus(name, far):
    assert_exact(name, far)


def assert_exact(name, far):
    """A negative of score ``far`` beside a positive of 0, in float64: value and slope to the last digits."""
    similarity = torch.tensor([[0.0, far]], dtype=torch.float64, requires_grad=True)
    scores = hn.from_matrix(similarity, torch.tensor([[True, False]]))
    log_w = hn.Uniform().log_weights(scores)
    losses, beside = {
        "own": lambda: (hn.info_nce(scores, log_w), 0.0),
        "all": lambda: (hn.info_nce(scores, log_w, positives_in_denominator="all"), 0.0),
        "jsd": lambda: (hn.jsd(scores, log_w), -math.log(2.0)),
        "sigmoid": lambda: (hn.sigmoid(scores, log_w), math.log(2.0)),
    }[name]()
    assert losses[0, 0].item() == pytest.approx(softplus(far) + beside, rel=1e-13)
    slope = torch.autograd.grad(losses[0, 0], similarity)[0][0, 1].item()
    assert slope == pytest.approx(1 / (1 + math.exp(-far)), rel=1e-13)


@pytest.mark.parametrize("method", ["losses", "dense_row", "real_losses"])
def test_an_objective_cannot_replace_what_backends_share(method):
    """A streamed loss would not call the replacement, so that its value would depend on the backend."""
    with raises(ArgumentError, who="Halved", got=f"a {method} of its own"):
        type("Halved", (InfoNCE,), {method: lambda self, *given: None})
    assert "Halved" not in registered_objectives()
