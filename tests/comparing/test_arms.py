"""Arms: what their text means, which of them are alike, and tilts as temperatures."""

from __future__ import annotations

import inspect
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hardneg import papers
from hardneg.comparing.arms import parse_arm
from hardneg.comparing.comparing import check_arms
from hardneg.comparing.request import Comparison
from hardneg.comparing.verdict import temperature_notes
from hardneg.core.errors import ArgumentError, UnknownName
from hardneg.reporting.reading import wanted_arm
from hardneg.training.options import RECIPES, MoCoOptions
from hardneg.training.recipes import run_recipe
from support.errors import raises
from support.training_runs import few_digits, short


@pytest.mark.parametrize(
    ("arm", "common", "expected"),
    [
        ("simclr()", {"temperature": 0.1}, {"temperature": 0.1}),
        ("simclr(temperature=0.3)", {"temperature": 0.1}, {"temperature": 0.3}),
        ("hcl()", {"temperature": 0.1}, {"temperature": 0.1, "tau_plus": 0.1, "negatives": "Tilt(1.0)"}),
        ("hcl(0.3)", {"temperature": 0.1, "tau_plus": 0.2}, {"temperature": 0.3, "tau_plus": 0.2}),
        ("debiased(tau_plus=0.05)", {"tau_plus": 0.2}, {"tau_plus": 0.05, "temperature": 0.5}),
        ("supcon()", {"temperature": 0.1}, {"temperature": 0.1, "positives_in_denominator": "all"}),
        ("supcon()", {}, {"temperature": 0.07}),
        ("moco()", {"temperature": 0.1, "queue": 64}, {"temperature": 0.1, "queue": 64}),
        ("ring()", {"temperature": 0.1}, {"temperature": 0.1}),
        ("simclr()", {"negatives": "Tilt(2.0)"}, {"negatives": "Tilt(2.0)"}),
    ],
)
def test_common_options_stand_between_the_arm_and_its_paper(
    arm: str, common: dict[str, Any], expected: dict[str, Any]
) -> None:
    for options in (parse_arm(arm).complete(**common), parse_arm(arm).with_defaults(common).complete()):
        assert {name: getattr(options, name) for name in expected} == expected


def test_the_effective_temperature_knows_the_common_options() -> None:
    arms = [
        parse_arm(text).with_defaults({"temperature": 0.1}) for text in ("simclr()", "hcl()", "hcl(temperature=0.5)")
    ]
    assert [arm.effective_temperature for arm in arms] == [0.1, 0.05, 0.25]
    facts = {"comparison": {"common": {"temperature": 0.1, "negatives": "Tilt(3.0)"}}}
    read = wanted_arm("simclr()", facts)
    assert read is not None
    assert read.effective_temperature == 0.025


@pytest.mark.parametrize(
    ("first", "second", "common"),
    [
        ("supcon(temperature=0.5)", "supervised(temperature=0.5, positives_in_denominator='all')", {}),
        ("simclr()", "simclr(temperature=0.5)", {}),
        ("simclr()", "simclr(temperature=0.3)", {"temperature": 0.3}),
        ("simclr()", "debiased()", {"tau_plus": 0.1}),
        ("hcl(beta=1)", "simclr(tau_plus=0.1, negatives='Tilt(1.0)')", {}),
        ("simclr() @ knn()", "simclr() @ knn(refresh=100)", {}),
        ("simclr()", "simclr(encoder='tiny')", {}),
        ("simclr()", "simclr(augment='tiny')", {}),
        ("simclr()", "simclr(weight_decay=1e-6)", {}),
        ("moco(temperature=1)", "moco(temperature=1.0, augment='auto')", {"encoder": "tiny"}),
    ],
)
def test_arms_that_train_alike_are_seen(first: str, second: str, common: dict[str, Any], data: str) -> None:
    arms = [parse_arm(text).with_defaults(short(data, **common)) for text in (first, second)]
    with raises(ArgumentError, who="compare", what="distinct arms"):
        check_arms(arms, Comparison((first, second), 2, short(data, **common)))


def test_looking_at_the_arms_is_quick(data: str) -> None:
    texts = ("simclr()", "hcl()", "moco()", "moco_v3()", "sogclr()", "emc2()", "hscl()", "simclr() @ knn()")
    arms = [parse_arm(text).with_defaults(short(data)) for text in texts]
    check_arms(arms[:2], Comparison(texts[:2], 2, short(data)))  # imports
    begun = time.process_time()
    check_arms(arms, Comparison(texts, 2, short(data)))
    assert time.process_time() - begun < 0.2 * len(arms)


def test_what_auto_is_taken_for_depends_on_the_images(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (64, 32, 32, 3), dtype=np.uint8)
    np.savez(tmp_path / "large.npz", images=images, labels=np.arange(64) % 4)
    texts, common = ("simclr()", "simclr(encoder='tiny')"), short(f"npz:{tmp_path / 'large.npz'}")
    record, _ = check_arms([parse_arm(text).with_defaults(common) for text in texts], Comparison(texts, 2, common))
    assert record["train"]["shape"] == [3, 32, 32]


@pytest.mark.parametrize(
    ("beta", "strongest"),
    [
        ("linear(0.0, 1.0)", 1.0),
        ("linear(1.0, 0.0)", 1.0),
        ("linear(0.0, 1.0, steps=100)", 1.0),
        ("steps(0.0, 2.0)", 2.0),
        ("adaptive(0.0, 1.0)", 1.0),
        ("adaptive(1.0, 0.0)", 1.0),
        ("0.0", 0.0),
    ],
)
def test_a_scheduled_tilt_counts_at_its_strongest(beta: str, strongest: float) -> None:
    arm = parse_arm(f"hcl(beta={beta})")
    assert arm.beta == pytest.approx(strongest)
    notes = temperature_notes([parse_arm("simclr(temperature=0.9)"), arm])
    assert len(notes) == (strongest > 0)
    assert all("where its tilt is strongest" in note for note in notes)


TWINS = [
    ("hcl(beta=1)", "simclr(temperature=0.25)", True),
    ("hcl(beta=1)", "simclr(temperature=0.25) @ knn()", False),
    ("hcl(beta=1) @ knn()", "simclr(temperature=0.25) @ knn()", True),
    ("hcl(beta=1)", "simclr(temperature=0.25, negatives='Threshold(0.5)')", False),
    ("simclr(negatives='Threshold(0.5) * Tilt(1.0)')", "simclr(temperature=0.25, negatives='Threshold(0.5)')", True),
    ("hcl(beta=1)", "hcl(temperature=0.25, beta=linear(0.0, 1.0))", False),
    ("hcl(beta=1)", "hcl(temperature=0.25, beta=adaptive(0.0, 1.0))", False),
    ("hcl(beta=1)", "simclr(temperature=0.25, learning_rate=0.01)", False),
    ("hscl(beta=1)", "scl(temperature=0.25)", True),
    ("hscl(beta=1)", "supcon(temperature=0.25)", False),
    ("hcl(beta=1)", "moco(temperature=0.25)", False),
]


@pytest.mark.parametrize(("tilted", "plain", "alike"), TWINS)
def test_an_untilted_twin_differs_in_the_tilt_alone(tilted: str, plain: str, alike: bool) -> None:
    arms = [parse_arm("simclr(temperature=0.9)"), parse_arm(tilted), parse_arm(plain)]
    assert arms[1].has_untilted_twin_in(arms[2]) == alike
    assert not arms[2].has_untilted_twin_in(arms[1])
    noted = any(note.startswith("B repels") for note in temperature_notes(arms))
    assert noted != alike


@pytest.mark.parametrize(
    ("arm", "exact"),
    [
        ("hcl(beta=1)", False),
        ("hscl(beta=1)", False),
        ("hscl(beta=1, detach=True)", True),
        ("simclr(negatives='Tilt(1.0, detach=True) * Tilt(0.5)')", False),
        ("simclr(negatives='Tilt(1.0, detach=True)')", True),
    ],
)
def test_a_note_says_where_a_tilt_is_not_quite_a_temperature(arm: str, exact: bool) -> None:
    (note,) = temperature_notes([parse_arm("simclr(temperature=0.9)"), parse_arm(arm)])
    assert ("before the gradient through its weights is counted; no untilted arm" in note) != exact


@pytest.mark.parametrize("arm", ["hcl(betta=1)", "hcl(beta=1, temprature=0.1)", "moco(queu=9)", "simcrl()"])
def test_the_nearest_name_and_its_arguments(arm: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        parse_arm(arm)
    assert isinstance(refused.value, UnknownName)
    assert refused.value.nearest in ("beta", "temperature", "queue", "simclr")
    if arm.startswith("hcl"):
        assert "hcl(temperature=0.5, tau_plus=0.1, beta=1.0)" in str(refused.value)


@pytest.mark.parametrize("arm", ["moco(queue=-1)", "hcl(beta=-1)", "simclr() @ knn(refresh=0)", "simclr(batches=3)"])
def test_errors_name_the_arm(arm: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        parse_arm(f" {arm} ")
    assert str(refused.value).startswith(f"{arm}: ")


def test_arms_take_schedules_of_temperature_and_tau_plus() -> None:
    arm = parse_arm("simclr(temperature=linear(0.5, 0.1), tau_plus=linear(0, 0.1))")
    options = arm.complete()
    assert (options.temperature, options.tau_plus) == ("linear(0.5, 0.1)", "linear(0, 0.1)")
    assert arm.temperature == pytest.approx(0.1), "the lowest"
    assert arm.trains_like(parse_arm("simclr(tau_plus=linear(0.0,0.1), temperature=linear(0.5,0.1))"))
    assert not parse_arm("hcl(beta=4)").has_untilted_twin_in(arm), "a temperature that moves is no control"


def test_an_arm_and_a_run_of_the_same_text_are_the_same() -> None:
    for version, temperature, momentum in (("v1", 0.07, 0.999), ("v2", 0.2, 0.999), ("v3", 0.2, 0.99)):
        arm, options = parse_arm(f"moco(version='{version}')").complete(), MoCoOptions(version=version)
        assert arm == options
        assert (options.temperature, options.momentum, options.queue) == (temperature, momentum, None)
        assert parse_arm("moco()").complete(version=version) == options
        loss = papers.moco(version=version)
        assert getattr(loss, "inner", loss).temperature == temperature
    assert parse_arm("moco()").complete() == RECIPES["moco"]()
    assert getattr(papers.moco(), "temperature", None) == 0.07
    assert parse_arm("moco_v3()").complete() == MoCoOptions(version="v3")
    assert parse_arm("mochi()").options["version"] == "v2"
    assert parse_arm("moco(temperature=0.1, version='v2')").complete(temperature=0.3).temperature == 0.1


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_have_the_defaults_of_their_papers(recipe: str) -> None:
    """Of the options that a paper of the same name takes, too."""
    named = {"instance": "instance_discrimination"}.get(recipe, recipe.replace("-", "_"))
    make, options = getattr(papers, named, None), RECIPES[recipe]()
    draws = getattr(options, "published_draws", None)
    known = {} if make is None else inspect.signature(make).parameters
    for name, one in known.items():
        if name in ("temperature", "momentum", "gamma", "rho", "burn_in", "num_draws") and one.default is not None:
            mine = getattr(options, name)
            assert one.default == (draws if mine is None else mine), name


def test_what_a_recipe_works_out_is_bounded_by_the_data_and_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = few_digits(tmp_path / "digits.npz")
    for recipe, given, line in (
        ("moco", {}, "Chosen for 320 images: queue 160."),
        ("moco", {"queue": 64}, ""),
        ("moco", {"version": "v3"}, ""),
        ("instance", {}, "Chosen for 320 images: num_draws 320."),
    ):
        out = tmp_path / f"{recipe}-{len(line)}-{len(given)}-{given.get('version')}"
        run_recipe(recipe, RECIPES[recipe](**short(data, epochs=1, log_every=100, **given)), out)
        shown = capsys.readouterr().err
        assert (line in shown) if line else ("Chosen for" not in shown)
