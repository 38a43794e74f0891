"""Draws against the exact distribution: frequencies by chi-square, seeds, short rows, and unbiased estimates."""

import itertools
import math
import sys

import pytest
import torch

import hardneg as hn
from hardneg.core.errors import ArgumentError
from support.errors import raises

LOG_W = torch.tensor([0.3, hn.NEVER, -1.2, 1.5, 0.0, hn.NEVER, -2.0, 0.7], dtype=torch.float64)
SUPPORT = [0, 2, 3, 4, 6, 7]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def chi_square(counts, probabilities):
    total = sum(counts.values())
    return sum((counts.get(key, 0) - total * p) ** 2 / (total * p) for key, p in probabilities.items())


def critical(degrees, z=3.09):
    """The quantile 0.999 of chi-square (Wilson and Hilferty)."""
    return degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3


def tally(keys):
    counts = {}
    for key in keys:
        counts[key] = counts.get(key, 0) + 1
    return counts


def test_the_test_can_fail():
    """A tilt off by a fifth is found at these numbers of draws."""
    wrong = torch.softmax(1.2 * LOG_W, -1)
    drawn = hn.draw(LOG_W.expand(2000, 8), 10, seeded())
    assert chi_square(tally(drawn.flatten().tolist()), {j: wrong[j].item() for j in SUPPORT}) > critical(5)


def test_categorical_draws_follow_the_weights_and_are_independent():
    q = torch.softmax(LOG_W, -1)
    drawn = hn.draw(LOG_W.expand(2000, 8) + torch.randn(2000, 1, dtype=torch.float64), 10, seeded())
    assert drawn.shape == (2000, 10)
    assert chi_square(tally(drawn.flatten().tolist()), {j: q[j].item() for j in SUPPORT}) < critical(5)
    pairs = tally(map(tuple, drawn[:, :2].tolist()))
    expected = {(i, j): (q[i] * q[j]).item() for i, j in itertools.product(SUPPORT, SUPPORT)}
    assert chi_square(pairs, expected) < critical(35)


def test_gumbel_draws_follow_the_weights_without_replacement():
    """P(first i, then j) = q_i q_j / (1 - q_i)."""
    q = torch.softmax(LOG_W, -1)
    drawn = hn.draw(LOG_W.expand(20000, 8), 2, seeded(), method="gumbel")
    expected = {(i, j): (q[i] * q[j] / (1 - q[i])).item() for i, j in itertools.permutations(SUPPORT, 2)}
    assert sum(expected.values()) == pytest.approx(1.0)
    assert chi_square(tally(map(tuple, drawn.tolist())), expected) < critical(29)
    with_replacement = {(i, j): (q[i] * q[j]).item() for i, j in itertools.permutations(SUPPORT, 2)}
    assert chi_square(tally(map(tuple, drawn.tolist())), with_replacement) > critical(29)


@pytest.mark.parametrize("method", ["categorical", "gumbel"])
def test_the_same_seed_gives_the_same_draws(method):
    log_w = torch.randn(20, 30)
    first = hn.draw(log_w, 7, seeded(3), method)
    assert torch.equal(first, hn.draw(log_w, 7, seeded(3), method))
    assert not torch.equal(first, hn.draw(log_w, 7, seeded(4), method))
    generator = seeded(3)
    assert torch.equal(first, hn.draw(log_w, 7, generator, method))
    assert not torch.equal(first, hn.draw(log_w, 7, generator, method))  # the generator has moved on


def test_short_rows_end_in_minus_one():
    log_w = torch.tensor([[0.0, hn.NEVER, -1.0, hn.NEVER], [hn.NEVER] * 4, [hn.NEVER, 5.0, hn.NEVER, hn.NEVER]])
    gumbel = hn.draw(log_w, 6, seeded(), method="gumbel").tolist()
    assert sorted(gumbel[0][:2]) == [0, 2]
    assert gumbel[0][2:] == [-1] * 4
    assert gumbel[1] == [-1] * 6
    assert gumbel[2] == [1, -1, -1, -1, -1, -1]
    categorical = hn.draw(log_w, 6, seeded()).tolist()
    assert set(categorical[0]) <= {0, 2}
    assert categorical[1] == [-1] * 6
    assert categorical[2] == [1] * 6


@pytest.mark.parametrize("method", ["categorical", "gumbel"])
def test_weights_far_apart(method):
    """Log-weights of a tilt at low temperature: no overflow, the largest is drawn first."""
    log_w = torch.tensor([[1e4, -1e4, 0.0], [-3e38, -1e38, -2e38]])
    drawn = hn.draw(log_w.expand(2, 3), 1, seeded(), method)
    assert drawn[:, 0].tolist() == [0, 1]


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2.0**-53])
def test_the_ends_of_the_unit_interval_stay_in_the_support(uniform, monkeypatch):
    """Random numbers on the edge between two candidates, where one in 2^53 draws falls."""
    module = sys.modules["hardneg.search.draws"]
    monkeypatch.setattr(module, "_uniform", lambda shape, _: torch.full(shape, uniform, dtype=torch.float64))
    log_w = torch.tensor([[hn.NEVER, 0.0, hn.NEVER, 0.0, hn.NEVER]])
    assert hn.draw(log_w, 1, seeded()).tolist() == [[1 if uniform == 0.0 else 3]]
    assert sorted(hn.draw(log_w, 3, seeded(), "gumbel")[0].tolist()) == [-1, 1, 3]


def test_wrong_options_are_named():
    with raises(ArgumentError, who="draw", got="k=0"):
        hn.draw(LOG_W[None], 0, seeded())
    with raises(ArgumentError, who="draw", what="'categorical'", got="method='top'"):
        hn.draw(LOG_W[None], 1, seeded(), method="top")
    with raises(ArgumentError, who="draw", what="manual_seed(0)", got="generator=0"):
        hn.draw(LOG_W[None], 1, 0)


def anchors_and_pool():
    z = torch.nn.functional.normalize(torch.randn(9, 4, generator=seeded(1), dtype=torch.float64), dim=-1)
    return hn.score(z[:1].expand(20000, 4), z[1:2].expand(20000, 4), z[2:], 0.5)


@pytest.mark.parametrize("text", ["Uniform()", "Tilt(1.5)", "Ring(0.0, 0.5)"])
def test_draws_estimate_the_mean_of_exp_without_bias(text):
    """The log-free quantity: M E_q[e^s] = e^a (e^loss - 1), recovered from the loss over k draws."""
    scores, k = anchors_and_pool(), 5
    log_w = hn.parse(text).log_weights(scores)
    exact = hn.core.objectives.log_expect_exp(scores.candidates[:1], log_w[:1]).exp().item()
    drawn = scores.take(hn.draw(log_w, k, seeded(2)))
    losses = hn.info_nce(drawn, hn.Uniform().log_weights(drawn), num_negatives=k)
    estimates = (scores.positives.exp() * torch.expm1(losses)).flatten() / k
    torch.testing.assert_close(estimates, drawn.candidates.exp().mean(-1))
    error = (estimates.mean().item() - exact) / (estimates.std().item() / math.sqrt(len(estimates)))
    assert abs(error) < 4
    biased = (torch.log(estimates).mean().item() - math.log(exact)) / (torch.log(estimates).std().item() / 141)
    assert biased < -4  # the mean of the logs is not: Jensen


def test_take_keeps_what_was_drawn_with_its_tags():
    ids, labels, clusters = torch.arange(10, 16), torch.arange(6) % 2, torch.arange(12).view(6, 2)
    pool = hn.Keys(torch.randn(6, 4), ids, labels, clusters, source="queue")
    anchors = hn.Keys(torch.randn(3, 4), torch.tensor([10, 1, 2]), torch.tensor([0, 1, 0]), clusters[:3])
    scores = hn.score(anchors, torch.randn(3, 4), pool, 0.5)
    index = torch.tensor([[0, 5, -1, 5], [3, 3, 3, 3], [-1, -1, -1, -1]])
    taken = scores.take(index)
    assert taken.valid.tolist() == [[False, True, False, True], [True] * 4, [False] * 4]
    for i, j in itertools.product(range(3), range(4)):
        if index[i, j] >= 0:
            assert taken.candidates[i, j] == scores.candidates[i, index[i, j]]
            assert taken.candidate_tags.ids[i, j] == ids[index[i, j]]
            assert taken.candidate_tags.labels[i, j] == labels[index[i, j]]
            assert torch.equal(taken.candidate_tags.clusters[i, j], clusters[index[i, j]])
    losses = hn.info_nce(taken, hn.Uniform().log_weights(taken))[:, 0]
    own = scores.positives[:, 0]
    twice, alone = 2 * scores.candidates[0, 5].exp(), 4 * scores.candidates[1, 3].exp()
    torch.testing.assert_close(losses[:2], torch.log1p(torch.stack([twice, alone]) / own[:2].exp()))
    assert losses[2] == 0
    assert (hn.OtherLabel().log_weights(taken) == 0).tolist() == [[False, True, False, True], [False] * 4, [False] * 4]
