"""The limits of HCL (Robinson et al. 2021) against loops, known packings and sampled distributions."""

import math
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import normalize

import hardneg as hn
from hardneg.core.errors import ArgumentError
from hardneg.theory import (
    ball_packing,
    nearest_neighbour_risk,
    positive_variance,
    tilt_gap_bound,
    worst_case_loss,
)


def unit_views(b, d, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(normalize(torch.randn(b, d, generator=generator, dtype=torch.float64), dim=-1) for _ in range(2))


@pytest.mark.parametrize("number", ["support", 1.0, 64.0, math.inf])
def test_the_worst_case_is_that_of_a_loop(number):
    """Eq. 5 with all mass on the closest candidate of another label; eq. 6 for the limit."""
    z1, z2 = unit_views(7, 3)
    labels = torch.tensor([0, 0, 1, 1, 2, 2, 2])
    scores = hn.two_views(z1, z2, 0.5, labels=labels)
    kept = hn.OtherLabel().log_weights(scores)
    found = worst_case_loss(scores, kept, num_negatives=number)
    for i in range(14):
        others = [scores.candidates[i, j].item() for j in range(14) if kept[i, j] == 0]
        a, q = scores.positives[i, 0].item(), len(others) if number == "support" else number
        expected = max(others) - a if q == math.inf else math.log(1 + q * math.exp(max(others) - a))
        assert found[i, 0].item() == pytest.approx(expected, abs=1e-12)


def test_no_distribution_is_worse():
    scores = hn.two_views(*unit_views(6, 3), 0.5)
    worst = worst_case_loss(scores, num_negatives=10)
    for seed in range(20):
        log_w = 3 * torch.randn(12, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        losses = hn.info_nce(scores, log_w.masked_fill(~scores.valid, hn.NEVER), num_negatives=10)
        assert (losses <= worst + 1e-12).all()


def test_proposition_3_with_its_rate():
    scores = hn.two_views(*unit_views(20, 4), 0.3)
    worst = worst_case_loss(scores, num_negatives=38)
    gaps = []
    for beta in (0.5, 1.0, 4.0, 16.0, 64.0, 1000.0):
        gap = worst - hn.info_nce(scores, hn.Tilt(beta).log_weights(scores), num_negatives=38)
        assert (gap >= -1e-12).all()
        assert (gap <= tilt_gap_bound(38, beta)).all()
        gaps.append(gap.max().item())
    assert all(later < earlier for earlier, later in pairwise(gaps))
    assert gaps[-1] < 1e-3


def test_anchors_without_a_negative_cost_nothing():
    scores = hn.two_views(*unit_views(3, 3), 0.5, labels=torch.zeros(3).long())
    kept = hn.OtherLabel().log_weights(scores)
    for number in ("support", 5, math.inf):
        assert worst_case_loss(scores, kept, num_negatives=number).tolist() == [[0.0]] * 6


@pytest.mark.parametrize(("classes", "dim"), [(2, 2), (3, 2), (4, 3), (5, 4), (8, 12)])
def test_few_classes_are_a_simplex(classes, dim):
    """At most d + 1 vectors: squared distances 2 c / (c - 1), the best for the mean and the smallest distance alike."""
    for objective in ("mean", "smallest"):
        found = ball_packing(classes, dim, objective=objective, starts=3, radius=2.0)
        squared = 4.0 * 2.0 * classes / (classes - 1)
        assert found.value == pytest.approx(squared, rel=2e-3)
        assert found.separation == pytest.approx(math.sqrt(squared), rel=2e-3)
        torch.testing.assert_close(found.vectors.norm(dim=-1), torch.full((classes,), 2.0, dtype=torch.float64))


@pytest.mark.parametrize(("points", "degrees"), [(5, 90.0), (6, 90.0), (7, 77.8695), (8, 74.8585), (12, 63.4349)])
def test_tammes_problem_on_the_sphere(points, degrees):
    """The optima of Schuette and Van der Waerden (1951) in three dimensions, as angles."""
    found = ball_packing(points, 3, objective="smallest", starts=10)
    assert found.separation == pytest.approx(2 * math.sin(math.radians(degrees) / 2), rel=4e-3)


def test_regular_polygons():
    found = ball_packing(5, 2, objective="smallest", starts=4)
    assert found.separation == pytest.approx(2 * math.sin(math.pi / 5), rel=2e-3)


def test_equation_7_is_not_tammes_problem_with_many_classes():
    """Ten classes on a circle: three alone and seven in one place have a larger mean than the regular polygon."""
    polygon = 4 * math.sin(math.pi / 10) ** 2
    square = 0.3 * 2.0
    assert square > polygon
    found = ball_packing(10, 2, starts=8)
    assert found.value >= 0.98 * square
    assert found.separation < 0.1
    tammes = ball_packing(10, 2, objective="smallest", starts=8)
    assert tammes.value == pytest.approx(polygon, rel=5e-3)


def test_weights_favour_likely_classes():
    weights = torch.tensor([0.7, 0.1, 0.1, 0.1])
    found = ball_packing(4, 2, weights, starts=8)
    nearest = (torch.cdist(found.vectors, found.vectors) + 9 * torch.eye(4)).amin(1)
    assert nearest[0] > 1.5 * nearest[1:].min()
    assert found.value == pytest.approx(float((weights * nearest.square()).sum()), rel=1e-6)


def test_theorem_5_is_the_minimum_of_its_proof():
    for excess, separation, classes, temperature in ((1e-4, 1.4, 3, 1.0), (1e-6, 2.0, 10, 0.5), (1e-3, 1.9, 2, 0.25)):
        square = separation**2 - 2 * classes * (1 + 1 / math.sqrt(temperature)) * math.sqrt(excess)
        assert square > 0
        grid = [math.sqrt(square) * k / 2000 for k in range(1, 2000)]
        lowest = min(2 * excess / d**2 + 2 * excess / (math.sqrt(square) - d) ** 2 for d in grid)
        found = nearest_neighbour_risk(excess, separation, classes, temperature)
        assert found == pytest.approx(min(1.0, lowest), rel=1e-5)
    assert nearest_neighbour_risk(0.0, 1.0, 5, 1.0) == 0.0
    assert nearest_neighbour_risk(0.5, 1.0, 5, 1.0) == 1.0
    assert nearest_neighbour_risk(1e-6, 1.4, 4, 1.0, smallest_class=0.25) == nearest_neighbour_risk(1e-6, 1.4, 4, 1.0)


@pytest.mark.parametrize("beta", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("noise", [0.01, 0.3, 3.0])
def test_lemma_11_bounds_the_variance(noise, beta):
    z1, z2 = unit_views(30, 4)
    others = torch.stack([normalize(z1 + noise * each, dim=-1) for each in (z2, z2.flip(0), z2.roll(3, 0))], dim=1)
    scores = hn.score(z1, others, z2, 0.5)
    found = positive_variance(scores, beta)
    assert found.variance <= found.bound
    values = []
    for i in range(30):
        s = [scores.positives[i, j].item() for j in range(3)]
        total = sum(math.exp(beta * each) for each in s)
        values += [(math.exp(beta * each) / total / 30, math.exp(each)) for each in s]
    mean = sum(w * x for w, x in values)
    assert found.variance == pytest.approx(sum(w * (x - mean) ** 2 for w, x in values), rel=1e-9)
    halves = (z1[:, None] - others).square().sum(-1) / 2 / 0.5
    assert found.alignment == pytest.approx(halves.mean().item(), rel=1e-9)


def test_wrong_input():
    scores = hn.cross_views(*unit_views(4, 3), 0.5)
    calls = (
        lambda: worst_case_loss(scores, torch.zeros(4, 3)),
        lambda: worst_case_loss(scores, num_negatives=0.0),
        lambda: ball_packing(1, 3),
        lambda: ball_packing(3, 3, torch.tensor([1.0, 1.0, 1.0])),
        lambda: ball_packing(3, 3, objective="largest"),
        lambda: nearest_neighbour_risk(2.0, 1.0, 3, 1.0),
        lambda: nearest_neighbour_risk(0.1, 1.0, 3, 1.0, smallest_class=0.5),
        lambda: tilt_gap_bound(0, 1.0),
        lambda: positive_variance(scores, -1.0),
        lambda: positive_variance(scores.changed(positive_valid=torch.zeros(4, 1).bool())),
    )
    for call in calls:
        with pytest.raises(ArgumentError):
            call()
