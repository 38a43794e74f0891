"""The bounds of Ring (Wu et al. 2021) against loops over its formulas, exact sums over a small table, appendix A.1."""

import itertools
import math

import pytest
import torch
from torch.nn.functional import normalize

import hardneg as hn
from hardneg.core.errors import ArgumentError

JOINT = torch.tensor(
    [[0.20, 0.05, 0.02, 0.03, 0.01], [0.02, 0.18, 0.06, 0.02, 0.04], [0.03, 0.04, 0.05, 0.15, 0.10]],
    dtype=torch.float64,
)


def unit_views(b, d, seed=0):
    return tuple(normalize(torch.randn(b, d, generator=_seeded(seed + i), dtype=torch.float64), dim=-1) for i in (0, 1))


def _seeded(seed):
    return torch.Generator().manual_seed(seed)


def loop_bound(scores, keep, number=None):
    """Mean over the anchors of log(e^a / (1/k sum of the k e^f)), Theorem 3.1, one scalar at a time."""
    values = []
    for i in range(len(scores.candidates)):
        kept = [scores.candidates[i, j].item() for j in range(scores.candidates.shape[1]) if keep[i, j]]
        many = len(kept) if number is None else number
        a = scores.positives[i, 0].item()
        mean = sum(math.exp(f) for f in kept) / len(kept) if kept else 0.0
        values.append(math.log(math.exp(a) * (1 + many) / (math.exp(a) + many * mean)) if kept else 0.0)
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("number", [None, 1, 40])
@pytest.mark.parametrize("build", [hn.two_views, hn.cross_views])
def test_bounds_are_those_of_a_loop(build, number):
    scores = build(*unit_views(9, 4), 0.5)
    log_w = hn.Ring(0.1, 0.5).log_weights(scores)
    found = hn.mutual_information(scores, log_w, num_negatives="support" if number is None else number)
    for name, keep in (("nce", scores.valid), ("cnce", log_w == 0)):
        expected = loop_bound(scores, keep, number)
        assert getattr(found, name).item() == pytest.approx(expected.mean().item(), rel=1e-12)
        assert getattr(found, f"{name}_variance").item() == pytest.approx(expected.var().item(), rel=1e-10)
        error = (expected.var() / len(expected)).sqrt()
        assert getattr(found, f"{name}_error").item() == pytest.approx(error.item(), rel=1e-10)


def test_the_nce_bound_is_the_formula_of_the_design():
    scores = hn.cross_views(*unit_views(7, 3), 0.2)
    negatives = scores.candidates.masked_fill(~scores.valid, -math.inf)
    a = scores.positives[:, 0]
    expected = (a - torch.logaddexp(a, negatives.logsumexp(-1))).mean() + math.log(1 + 6)
    found = hn.mutual_information(scores)
    torch.testing.assert_close(found.nce, expected)
    assert torch.equal(found.cnce, found.nce)


def test_weights_of_q_are_those_of_info_nce():
    scores = hn.two_views(*unit_views(5, 3), 0.5)
    log_w = hn.Tilt(2.0).log_weights(scores)
    loss = hn.reduce(hn.info_nce(scores, log_w), scores)
    found = hn.mutual_information(scores, log_w)
    torch.testing.assert_close(found.cnce, math.log(1 + 8) - loss)
    assert found.premise == 0  # a tilt is not the marginal restricted to a set


def test_the_premise_is_that_of_a_loop():
    scores = hn.two_views(*unit_views(12, 3), 0.5)
    for outer in (0.05, 0.2, 0.5, 0.9):
        log_w = hn.Ring(0.0, outer).log_weights(scores)
        holds = []
        for i in range(24):
            f = [scores.candidates[i, j].exp().item() for j in range(24) if scores.valid[i, j]]
            kept = [scores.candidates[i, j].exp().item() for j in range(24) if log_w[i, j] == 0]
            holds.append(bool(kept) and min(kept) > sum(f) / len(f))
        found = hn.mutual_information(scores, log_w)
        share = sum(holds) / 24
        assert found.premise.item() == pytest.approx(share)
        assert found.premise_error.item() == pytest.approx(math.sqrt(share * (1 - share) / 24))
        assert hn.theory.theorem_3_1_premise(scores, log_w).tolist() == holds


def test_where_the_premise_holds_the_conditional_bound_is_lower_at_the_same_number():
    scores = hn.cross_views(*unit_views(40, 3), 0.5)
    found = hn.mutual_information(scores, hn.Ring(0.0, 0.1).log_weights(scores), num_negatives=39)
    assert found.premise == 1
    assert found.cnce < found.nce


def counterexample(eps, k):
    """Independent U and V; e^f is 1 for nine values of V and eps for the tenth, which is the only negative under q."""
    ratio = torch.tensor([1.0] * 9 + [eps], dtype=torch.float64).log()
    everyone = torch.zeros(10, 10, dtype=torch.bool)
    scores = hn.from_matrix(ratio.expand(10, 10), everyone)  # one anchor for each value of the positive
    scores = scores.changed(positives=ratio[:, None], positive_valid=~everyone[:, :1])
    log_w = torch.full((10, 10), hn.NEVER, dtype=torch.float64)
    log_w[:, 9] = 0.0
    return hn.mutual_information(scores, log_w, num_negatives=k - 1)


@pytest.mark.parametrize("k", [2, 10, 1000, 10**6])
def test_counterexample_of_appendix_a_1(k):
    """An unrestricted q gives no bound: the information is 0, and as eps -> 0 the estimate tends to 0.9 log k.

    The paper writes that the estimate tends to infinity; with k samples it cannot exceed log k.
    """
    previous = 0.0
    for eps in (0.5, 1e-2, 1e-4, 1e-8, 1e-14):
        found = counterexample(eps, k)
        assert found.cnce.item() == pytest.approx(0.9 * math.log(k / (1.0 + (k - 1) * eps)), rel=1e-9)
        assert found.nce <= 1e-12
        assert found.premise == 0
        assert found.cnce.item() > previous
        previous = found.cnce.item()
    assert previous == pytest.approx(0.9 * math.log(k), abs=1e-6)


def exact_moments(f, u, v, weights, draws):
    """Mean and variance of Z of Theorem 3.2 over all tuples of negatives with these probabilities."""
    mean = square = 0.0
    for index in itertools.product(range(5), repeat=draws):
        probability = math.prod(weights[j] for j in index)
        total = math.exp(f[u][v]) + sum(math.exp(f[u][j]) for j in index)
        z = f[u][v] - math.log(total / (1 + draws))
        mean, square = mean + probability * z, square + probability * z * z
    return mean, square - mean * mean


def closest(f, u, count):
    """Marginal of V restricted to the closest values, and to the others."""
    order = sorted(range(5), key=lambda j: -f[u][j])[:count]
    marginal = JOINT.sum(0).tolist()
    inside = [marginal[j] if j in order else 0.0 for j in range(5)]
    outside = [0.0 if j in order else marginal[j] for j in range(5)]
    return [w / sum(inside) for w in inside], [w / sum(outside) for w in outside]


@pytest.mark.parametrize("draws", [1, 3])
def test_variance_over_draws_is_that_of_all_tuples(draws):
    f = (JOINT / (JOINT.sum(1, keepdim=True) * JOINT.sum(0))).log()
    scores = hn.from_matrix(f[:1], torch.zeros(1, 5, dtype=torch.bool))
    scores = scores.changed(positives=f[:1, :1], positive_valid=torch.ones(1, 1, dtype=torch.bool))
    log_w = torch.tensor(closest(f.tolist(), 0, 3)[0], dtype=torch.float64).log()[None]
    expected = exact_moments(f.tolist(), 0, 0, log_w[0].exp().tolist(), draws)[1]
    found = hn.theory.variance_over_draws(scores, log_w, draws, _seeded(0), rounds=40_000)
    assert found.item() == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("draws", [1, 2])
def test_theorem_3_2_trades_bias_for_variance(draws):
    """Bias_p <= Bias_q under the premise of Theorem 3.1; Var_p >= Var_q where Var_q <= Var_q~ is assumed."""
    marginal, biases, variances = JOINT.sum(0).tolist(), 0, 0
    for seed in range(10):
        f = (torch.randn(3, 5, generator=_seeded(seed), dtype=torch.float64) * 1.5).tolist()
        for u, v, count in itertools.product(range(3), range(5), (1, 2, 3, 4)):
            inside, outside = closest(f, u, count)
            (mean_q, q), (_, rest) = (exact_moments(f, u, v, each, draws) for each in (inside, outside))
            mean_p, p = exact_moments(f, u, v, marginal, draws)
            c = sum(w * math.exp(x) for w, x in zip(marginal, f[u], strict=True))
            if min(math.exp(x) for x, w in zip(f[u], inside, strict=True) if w) > c:
                biases += 1
                assert mean_q <= mean_p + 1e-12
            if q <= rest:
                variances += 1
                assert p >= q - 1e-12
    assert min(biases, variances) > 100


def test_anchors_without_negatives_or_positives():
    similarity = torch.tensor([[0.9, 0.1, 0.2], [0.3, 0.8, 0.5], [0.1, 0.2, 0.7]], dtype=torch.float64)
    positives = torch.tensor([[True, False, False], [False, True, False], [False, False, False]])
    scores = hn.from_matrix(similarity, positives)
    log_w = torch.tensor([[hn.NEVER, hn.NEVER, 0.0], [hn.NEVER] * 3, [0.0, 0.0, 0.0]])
    found = hn.mutual_information(scores, log_w.double())
    first = 0.9 - math.log(math.exp(0.9) + math.exp(0.2)) + math.log(2)
    assert found.cnce.item() == pytest.approx(first / 2)  # the second anchor counts 0, the third has no positive
    assert hn.theory.variance_over_draws(scores, log_w, 2, _seeded(0)).tolist()[1] == 0.0


def test_gradients_of_the_bound_are_those_of_the_loss():
    z1, z2 = (z.requires_grad_() for z in unit_views(6, 3))
    scores = hn.cross_views(z1, z2, 0.5)
    log_w = hn.Ring(0.0, 0.5).log_weights(scores)
    ours = torch.autograd.grad(hn.mutual_information(scores, log_w).cnce, [z1, z2], retain_graph=True)
    loss = hn.reduce(hn.info_nce(scores, log_w), scores)
    torch.testing.assert_close(ours, torch.autograd.grad(-loss, [z1, z2]))


def test_wrong_input():
    scores = hn.cross_views(*unit_views(4, 3), 0.5)
    with pytest.raises(ArgumentError) as raised:
        hn.mutual_information(scores, torch.zeros(4, 3))
    assert raised.value.who == "mutual_information"
    with pytest.raises(ArgumentError):
        hn.mutual_information(scores.changed(positive_valid=torch.zeros(4, 1, dtype=torch.bool)))
    with pytest.raises(ArgumentError):
        hn.theory.variance_over_draws(scores, hn.Uniform().log_weights(scores), 0, _seeded(0))
    with pytest.raises(ArgumentError):
        hn.theory.variance_over_draws(scores, hn.Uniform().log_weights(scores), 3, _seeded(0), rounds=1)
