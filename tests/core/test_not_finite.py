"""NaN and infinity are never hidden: they show in the loss, in the weights or in an error."""

import math

import pytest
import torch

import hardneg as hn
from support.cases import all_pairs
from support.corner_cases import EXAMPLES, OBJECTIVES, batch_and_queue
from support.vectors import make_unit_vectors as vectors


@pytest.mark.parametrize(
    ("text", "place", "value"), all_pairs(EXAMPLES, [0, 1, 2], [math.nan, math.inf, -math.inf])
)  # the places are z1, z2 and the pool
def test_what_is_not_finite_is_never_hidden(text, place, value):
    """The loss of every anchor that is, has or could choose the bad vector is NaN in every objective."""
    q = hn.parse(text)
    inputs = [vectors(5, 3), vectors(5, 3, seed=1), vectors(6, 3, seed=2)]
    clean = batch_and_queue(*inputs)
    inputs[place][0, 1] = value
    scores = batch_and_queue(*inputs)
    column = (0, 5, 10)[place]
    concerned = clean.valid[:, column] & might_choose(q, clean)[:, column]
    if place < 2:
        concerned[[0, 5]] = True  # the anchor itself, and the one whose positive it is
    assert concerned.any() or isinstance(q, hn.From)
    log_w = q.log_weights(scores)
    for name, objective in OBJECTIVES.items():
        losses = objective(scores, log_w)
        assert losses[concerned].isnan().all(), name
        if concerned.any():
            assert hn.reduce(losses, scores).isnan(), name


def might_choose(q, scores):
    """Whether labels, clusters and sources let the candidate be chosen; bands and ranks never drop what is NaN."""
    masks = [f for f in q.factors if isinstance(f, (hn.OtherLabel, hn.SameCluster, hn.OtherCluster, hn.From))]
    allowed = scores.valid
    for mask in masks:
        allowed = allowed & (mask.log_weights(scores) == 0)
    return allowed


@pytest.mark.parametrize(
    "text",
    [
        "Uniform()",
        "Tilt(1.0)",
        "ClippedTilt(1.0)",
        "Threshold(0.9)",
        "BelowPositive(0.05)",
        "BelowPositive(absolute=0.1)",
        "BelowPositive(0.05, absolute=0.1, by='guide')",
        "Rank(0, 1)",
        "Rank(1)",
        "Ring(0.0, 0.5)",
        "Ring(0.5, 1.0)",
        'Hardening("exponential")',
        'Hardening("threshold", 5.0)',
        'Hardening("sigmoid")',
        "Threshold(0.9) * Ring(0.0, 1.0) * Tilt(1.0)",
    ],
)
def test_no_band_drops_what_is_not_a_number(text):
    """Of two candidates one is NaN and the other may be outside the band: the anchor is not without a negative."""
    z, q = vectors(3, 4), hn.parse(text)
    for beside in (-z, z):
        pool = torch.stack([torch.full_like(z, math.nan), beside], dim=1)
        scores = hn.score(z, z, hn.Keys(pool), 0.5)
        scores = scores.guided(scores)
        for name, objective in OBJECTIVES.items():
            assert objective(scores, q.log_weights(scores)).isnan().all(), name


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_in_a_positive_or_a_private_candidate_is_never_hidden(value):
    z, own, private = vectors(4, 3), vectors(4, 2, 3, seed=1), vectors(4, 6, 3, seed=2)
    own[0, 1, 0] = value
    private[2, 1, 2] = value
    scores = hn.score(z, own, hn.Keys(private), 0.5)
    for text in EXAMPLES:
        if not any(word in text for word in ("Label", "Cluster", "From")):
            for objective in OBJECTIVES.values():
                losses = objective(scores, hn.parse(text).log_weights(scores))
                assert losses[0, 1].isnan()
                assert losses[2].isnan().all()


@pytest.mark.parametrize("place", [0, 1], ids=["z1", "z2"])
def test_an_anchor_without_a_negative_does_not_hide_it_either(place):
    """A batch of one, and a batch of one class: the pairs that cost nothing cost NaN if they are NaN."""
    for b in (1, 4):
        inputs = [vectors(b, 3), vectors(b, 3, seed=1)]
        inputs[place][0, 0] = math.nan
        scores = hn.two_views(*inputs, 0.5, labels=torch.zeros(b).long())
        log_w = hn.OtherLabel().log_weights(scores)
        for name, objective in OBJECTIVES.items():
            losses = objective(scores, log_w)
            assert losses[[0, b]].isnan().all(), name
            if b > 1 and "all" not in name:
                assert (losses[1:b] == 0).all(), name


def test_contrastive_loss_never_hides_what_is_not_finite():
    for value in (math.nan, math.inf):
        for place in (0, 1, 2):
            inputs = [torch.randn(4, 3), torch.randn(4, 3), torch.randn(6, 3)]
            inputs[place][0, 0] = value
            for loss in (hn.ContrastiveLoss(), hn.ContrastiveLoss("Ring(0.5, 1.0)", tau_plus=0.1)):
                assert loss(*inputs[:2], pool=inputs[2]).isnan()
                if place < 2:
                    assert loss(*inputs[:2]).isnan()
                    assert hn.ContrastiveLoss("Tilt(1.0)", views="cross")(*inputs[:2]).isnan()


@pytest.mark.parametrize("place", [0, 1, 2], ids=["z1", "z2", "pool"])
def test_checks_at_the_door(place):
    good = [vectors(5, 3), vectors(5, 3, seed=1), vectors(6, 3, seed=2)]
    with hn.core.scoring.checks():
        batch_and_queue(*good)
    for value, message in (
        (math.nan, "finite vectors"),
        (math.inf, "finite vectors"),
        (2.0, "unit vectors, got norms"),
    ):
        bad = [z.clone() for z in good]
        bad[place][0] = value
        with hn.core.scoring.checks(), pytest.raises(ValueError, match=f"score needs {message}"):
            batch_and_queue(*bad)
        with hn.core.scoring.checks(), hn.core.scoring.checks(False):
            batch_and_queue(*bad)
        batch_and_queue(*bad)
