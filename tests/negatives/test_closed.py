"""What distributions declare to the fused kernels is what they weigh."""

from __future__ import annotations

import math

import pytest
import torch

import hardneg as hn
from hardneg.negatives import parse

CLOSED = [
    "Uniform()",
    "Tilt(1.5)",
    "Tilt(0.5, detach=True)",
    "Tilt(0.5) * Tilt(0.25)",
    "OtherLabel()",
    "Threshold(0.1)",
    "BelowPositive(0.05)",
    "BelowPositive(absolute=0.1)",
    "BelowPositive(0.5, absolute=-0.1)",
    "OtherLabel() * Threshold(-0.2) * BelowPositive(0.05) * Tilt(1.0)",
]
OTHERS = [
    "Ring(0.1, 0.5, by='guide')",
    "Ring(linear(0.1, 0.2), 0.5)",
    "OtherLabel() * Ring(0.1, 0.5)",
    "Ring(0.1, 0.5) * Rank(0, 3)",
    "Tilt(1.0, by='guide')",
    "Tilt(1.0, source='batch')",
    "Threshold(0.1, by='guide')",
    "BelowPositive(0.05, by='guide')",
    "Tilt(linear(0.0, 1.0))",
    "Tilt(1.0) * Tilt(1.0, detach=True)",
]


@pytest.mark.parametrize("text", CLOSED)
def test_the_closed_form_gives_the_log_weights(text: str) -> None:
    z1, z2 = torch.nn.functional.normalize(torch.randn(2, 12, 5), dim=-1)
    scores = hn.two_views(z1, z2, 0.3, labels=torch.arange(12) % 3)
    negatives = parse(text)
    form = negatives.closed_form()
    assert form is not None
    similarity, lowest = scores.candidates * 0.3, scores.positives.amin(-1) * 0.3
    ceiling = form.ceiling(lowest)
    allowed = scores.valid & (similarity >= form.floor)
    if ceiling is not None:
        allowed &= similarity <= ceiling[:, None]
    if form.other_labels:
        allowed &= ~scores.same_label("test")
    expected = torch.where(allowed, form.beta * scores.candidates, -math.inf)
    torch.testing.assert_close(negatives.log_weights(scores), expected)


@pytest.mark.parametrize("text", OTHERS)
@pytest.mark.filterwarnings("ignore::hardneg.core.errors.HardnegWarning")
def test_what_is_not_of_the_closed_family_says_so(text: str) -> None:
    assert parse(text).closed_form() is None


@pytest.mark.parametrize(
    ("text", "ranks"), [("Rank(2, 4) * Tilt(1.5)", (2, 4)), ("Tilt(1.5) * Ring(0.1, 0.5)", (1, 5))]
)
def test_a_window_is_closed_beside_tilts(text: str, ranks: tuple[int, int]) -> None:
    form = parse(text).closed_form()
    assert form is not None
    assert form.window is not None
    assert form.beta == 1.5
    assert tuple(int(place) for place in form.window.places({"count": torch.tensor([[10]])})) == ranks


def test_a_schedule_is_closed_at_a_step() -> None:
    form = parse("Tilt(linear(0.0, 1.0))").at(5, 10).closed_form()
    assert form is not None
    assert 0.0 < form.beta < 1.0


def test_detached_tilts_stay_detached() -> None:
    form = parse("Tilt(0.5, detach=True) * OtherLabel() * Tilt(1.0, detach=True)").closed_form()
    assert form is not None
    assert form.detach
    assert form.beta == 1.5
