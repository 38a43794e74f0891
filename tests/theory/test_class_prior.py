"""Estimates of tau_plus against exact values, and the coverage of their intervals in simulated samples."""

import math
from itertools import combinations

import pytest
import torch

from hardneg.core.errors import ArgumentError, UnknownName
from hardneg.theory import tau_plus_of_classes, tau_plus_of_labels, tau_plus_of_pairs


def test_the_estimate_counts_pairs_of_equal_labels():
    labels = [0, 0, 1, 2, 2, 2, 3]
    same = [a == b for a, b in combinations(labels, 2)]
    assert tau_plus_of_labels(labels).tau_plus == pytest.approx(sum(same) / len(same))
    assert tau_plus_of_labels(torch.tensor(labels)) == tau_plus_of_labels(labels)


@pytest.mark.parametrize("shares", [[0.25, 0.25, 0.25, 0.25], [0.7, 0.2, 0.1], [0.05] * 20, [0.9, 0.1]])
def test_the_interval_of_labels_covers(shares):
    generator, true = torch.Generator().manual_seed(0), sum(p * p for p in shares)
    hits, estimates = 0, []
    for _ in range(600):
        sample = torch.multinomial(torch.tensor(shares), 300, replacement=True, generator=generator)
        found = tau_plus_of_labels(sample)
        hits += found.low <= true <= found.high
        estimates.append(found.tau_plus)
    assert 0.92 <= hits / 600 <= 1.0
    assert sum(estimates) / 600 == pytest.approx(true, abs=0.004)  # unbiased


def test_a_balanced_sample_keeps_its_own_value_in_the_interval():
    found = tau_plus_of_labels(torch.arange(500) % 10)
    assert found.tau_plus < 0.1 <= found.high


def test_a_higher_confidence_is_wider():
    labels = torch.arange(50) % 7 // 2
    narrow, wide = (tau_plus_of_labels(labels, confidence=level) for level in (0.5, 0.99))
    assert wide.low < narrow.low < narrow.tau_plus < narrow.high < wide.high


def test_pairs_in_every_form_agree():
    table = {(0, 5): True, (1, 8): 0, (2, 3): 2, (3, 9): False}
    rows = [(a, b, answer) for (a, b), answer in table.items()]
    found = tau_plus_of_pairs(table)
    assert found == tau_plus_of_pairs(rows) == tau_plus_of_pairs(list(table.items()))
    assert found.tau_plus == 0.5
    z, p, n = 1.959964, 0.5, 4  # Wilson 1927
    centre = (p + z * z / 2 / n) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / 4 / n / n)
    assert (found.low, found.high) == pytest.approx((centre - half, centre + half), abs=1e-6)


def test_pairs_of_one_anchor_count_less():
    """Anchors of very different share: 20 pairs of each are hardly more than one."""
    same = [(a, c, a < 5) for a in range(20) for c in range(20)]
    apart = [(a * 20 + c, c, a < 5) for a in range(20) for c in range(20)]
    clustered, independent = tau_plus_of_pairs(same), tau_plus_of_pairs(apart)
    assert clustered.tau_plus == independent.tau_plus == 0.25
    assert clustered.high - clustered.low > 3 * (independent.high - independent.low)


def test_the_interval_of_pairs_covers_with_clusters_and_weights():
    generator, hits = torch.Generator().manual_seed(0), 0
    for _ in range(400):
        rates = torch.where(torch.rand(60, generator=generator) < 0.3, 0.4, 0.05)  # mean 0.155
        judged = torch.rand(60, 8, generator=generator) < rates[:, None]
        rows = [(i, j, bool(judged[i, j])) for i in range(60) for j in range(8)]
        found = tau_plus_of_pairs(rows)
        hits += found.low <= 0.155 <= found.high
    assert 0.91 <= hits / 400 <= 0.99


def test_weights_undo_the_selection_of_pairs():
    rows = [(i, i + 1000, i % 10 == 0) for i in range(500)]
    rows += [(i, i + 2000, True) for i in range(500, 600)]  # positives judged twice as often
    weights = [1.0 if i < 500 and i % 10 else 1.0 / 3.0 for i in range(600)]
    found = tau_plus_of_pairs(rows, weights=weights)
    assert found.tau_plus == pytest.approx((150 / 3) / (450 + 50))


def test_no_positive_among_the_pairs_leaves_an_interval():
    found = tau_plus_of_pairs([(i, i + 1, False) for i in range(100)])
    assert found.tau_plus == found.low == 0.0
    assert 0.02 < found.high < 0.05


def test_balanced_classes_by_number_and_name():
    assert tau_plus_of_classes(4) == 0.25
    assert tau_plus_of_classes("cifar100") == 0.01
    with pytest.raises(UnknownName) as raised:
        tau_plus_of_classes("cifar11")
    assert raised.value.nearest == "cifar10"


def test_wrong_input():
    calls = (
        lambda: tau_plus_of_labels([1]),
        lambda: tau_plus_of_labels([3, 3, 3]),
        lambda: tau_plus_of_labels([1, 2], confidence=1.0),
        lambda: tau_plus_of_pairs([]),
        lambda: tau_plus_of_pairs([(1, 2)]),
        lambda: tau_plus_of_pairs([(1, 2, "yes")]),
        lambda: tau_plus_of_pairs([(1, 2, True)], weights=[0.0]),
        lambda: tau_plus_of_pairs([(1, 2, True)], weights=[1.0, 1.0]),
        lambda: tau_plus_of_classes(1),
    )
    for call in calls:
        with pytest.raises(ArgumentError):
            call()
