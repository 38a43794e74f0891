"""The page of results is what the studies and their JSON files say, by the rule that was written down before."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml

import hardneg as hn
from hardneg.comparing.arms import parse_arm

pytest.importorskip("scipy", reason="the intervals of the toys")

ROOT = Path(__file__).parents[2]
STUDIES = ROOT / "experiments" / "studies"
NO_REQUESTS = {"studies", "obstacles"}


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    spec = importlib.util.spec_from_file_location("results", ROOT / "tools" / "results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(results: ModuleType) -> None:
    assert results.PAGE.read_text(encoding="utf-8") == results.page(), "out of date: run `make results`"


def test_every_study_has_its_request_and_its_arms_can_be_read() -> None:
    studies = {one["name"]: one for one in yaml.safe_load((STUDIES / "studies.yaml").read_text()) if "claims" in one}
    plans = {path.stem: yaml.safe_load(path.read_text()) for path in STUDIES.glob("g*.yaml")}
    assert set(studies) == {path.stem for path in STUDIES.glob("*.yaml")} - NO_REQUESTS - set(plans)
    for plan in plans.values():
        assert all(parse_arm(arm).complete().batch_size > 0 for arm in plan["arms"].values())
        assert all({one["arm"], one["against"]} <= set(plan["arms"]) for one in plan["claims"])
    for name, study in studies.items():
        arms = yaml.safe_load((STUDIES / f"{name}.yaml").read_text())["arms"]
        for arm in arms:
            assert parse_arm(arm).complete().batch_size > 0
        for claim in study["claims"]:
            assert {claim["arm"], claim["against"], claim.get("control", arms[0])} <= set(arms)


ARM, BASELINE, CONTROL = "hcl()", "simclr()", "simclr(temperature=0.25)"


def verdict(against: str, points: float, half_width: float | None) -> dict[str, Any]:
    width = None if half_width is None else half_width / 100.0
    return {"arm": ARM, "against": against, "difference": points / 100.0, "half_width": width}


KNN = ([0.30, 0.31, 0.30], [0.32, 0.33, 0.32], [0.305, 0.34, 0.35])
"""Of the control; 2 points above it in every seed; above it by 3 points on average, but 0.5 in one seed."""


@pytest.mark.parametrize(
    ("gain", "over_control", "tuned", "knn", "expected"),
    [
        ((3.0, 1.0), (2.5, 1.0), True, KNN[0], "holds"),
        ((3.0, 1.0), (0.2, 0.5), True, KNN[0], "vanishes when tuned"),
        ((3.0, 1.0), (0.2, 0.5), False, KNN[0], "vanishes at the matched temperature"),
        ((3.0, 1.0), (0.2, 0.5), False, KNN[1], "depends on the measure"),
        ((3.0, 1.0), (0.2, 0.5), False, KNN[2], "vanishes at the matched temperature"),
        ((3.0, 1.0), (0.8, 0.9), True, KNN[1], "not decided at this budget"),
        ((0.4, 0.5), (0.2, 0.5), True, KNN[0], "does not hold"),  # below what matters with its whole interval
        ((0.7, 0.2), (0.2, 0.5), True, KNN[0], "does not hold"),  # beyond noise, and too small to matter
        ((1.5, 1.6), (0.2, 0.5), True, KNN[0], "not decided at this budget"),
        ((3.0, None), (0.2, 0.5), True, KNN[0], "not decided at this budget"),  # too few seeds
    ],
)
def test_claims_are_judged_by_the_rule(
    gain: tuple[float, float | None],
    over_control: tuple[float, float],
    tuned: bool,
    knn: list[float],
    expected: str,
    results: ModuleType,
) -> None:
    found = {
        "verdicts": [verdict(BASELINE, *gain), verdict(CONTROL, *over_control)],
        "tries": {ARM: [[{"temperature": 0.5}, 0.4]]} if tuned else None,
        "metric": "linear",
        "measures": {ARM: {"linear": [0.5] * 3, "knn": knn}, CONTROL: {"linear": [0.4] * 3, "knn": KNN[0]}},
    }
    claim = {"claim": "HCL gains", "paper": "+3", "arm": ARM, "against": BASELINE, "control": CONTROL}
    judged = results.judged(claim, 1.0, found)
    assert judged.verdict == expected
    assert ("200-NN +2.00 in every seed" in judged.here) == (expected == "depends on the measure")


def test_nothing_vanishes_when_tuned_where_nothing_was_tuned(results: ModuleType) -> None:
    for study in yaml.safe_load((STUDIES / "studies.yaml").read_text()):
        result = results.read(study["name"])
        if "claims" in study and result is not None and not result.get("tries"):
            verdicts = [results.judged(claim, study["smallest_effect"], result).verdict for claim in study["claims"]]
            assert "vanishes when tuned" not in verdicts


def test_squared_gradients_are_judged_by_their_interval(results: ModuleType) -> None:
    measured = sys.modules["results_measured"]
    same = np.array([200.0, 200.0, 200.0, 200.0, 200.0])
    found = {
        spread: measured._lower_gradient({"open": "open"}, measured._times(same * spread, np.ones(5))).verdict
        for spread in (1.0, 0.1)
    }
    assert found == {1.0: "holds", 0.1: "does not hold"}
    wide = np.array([1.0, 1e5, 10.0, 1e4, 100.0])
    assert measured._lower_gradient({"open": "open"}, measured._times(wide, np.ones(5))).verdict == "open"


def test_the_premise_of_the_ring_is_that_of_its_experiment(results: ModuleType) -> None:
    pytest.importorskip("matplotlib", reason="the experiment plots")
    import ring_mutual_information  # of experiments

    result = results.read("ring_mutual_information")
    assert result["premise"] == pytest.approx(ring_mutual_information.premises(result["options"]["points"]), abs=0.005)
    assert {result["premise"][w] for w in ("0", "10", "25")} == {0.0}


def test_a_loss_is_the_gain_of_the_other_arm(results: ModuleType) -> None:
    claim = {"claim": "HCL loses", "paper": "+3", "arm": BASELINE, "against": ARM}
    found = results.judged(claim, 1.0, {"verdicts": [verdict(BASELINE, -2.0, 0.5)]})
    assert found.here == "+2.00 points (+1.50 to +2.50)"
    assert found.verdict == "holds"


def test_what_was_not_run_is_not_decided(results: ModuleType) -> None:
    found = results.judged({"claim": "HCL gains", "paper": "+3", "arm": ARM, "against": BASELINE}, 1.0, None)
    assert (found.here, found.verdict) == ("not run", "not decided at this budget")


def difference(found: dict[str, Any], arm: str, against: str) -> tuple[float, float, float]:
    """In points, with the ends of its interval."""
    one = next(one for one in found["verdicts"] if (one["arm"], one["against"]) == (arm, against))
    return tuple(100 * (one["difference"] + side * one["half_width"]) for side in (0, -1, 1))  # type: ignore[return-value]


def test_the_readme_has_the_findings_of_the_studies(results: ModuleType) -> None:
    """Every line of its table but those of the demo, which test_demo.py has."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    shown = {name: line for name, *line in cells[2:] if "make demo" not in name and "digits" not in name}

    def means(one: float, other: float) -> str:
        return f"{one:.1f} against {other:.1f}"

    def apart(points: float, low: float, high: float) -> str:
        return f"{points:+.1f} ({low:+.1f} to {high:+.1f})"

    expected = {}
    found, arms = results.read("temperature_defaults"), ("hcl(temperature=0.5, beta=1, tau_plus=0.05)", CONTROL_OF_HCL)
    by = {name: [100 * np.array(found["measures"][arm][name]) for arm in arms] for name in ("linear", "knn", "1nn")}
    name = "HCL against SimCLR at half the temperature, CIFAR-100"
    expected[name] = ["linear probe", means(*(one.mean() for one in by["linear"])), apart(*difference(found, *arms))]
    near = [by[each] for each in ("knn", "1nn")]
    assert all((tilted > matched).all() for tilted, matched in near)
    both = ", ".join(means(tilted.mean(), matched.mean()) for tilted, matched in near)
    gains = ", ".join(f"{(tilted - matched).mean():+.1f}" for tilted, matched in near)
    expected["the same runs"] = ["200-NN, 1-NN", both, f"{gains}, in every seed"]
    found, arms = results.read("supervised"), ("hscl(temperature=0.5, beta=5)", "scl(temperature=0.083)")
    reached = (100 * np.mean(found["measures"][arm]["linear"]) for arm in arms)
    name = "H-SCL against SCL at a sixth of the temperature, CIFAR-100"
    expected[name] = ["linear probe", means(*reached), apart(*difference(found, *arms))]
    for name, kind in (
        ("`Tilt(1.0)` against half the temperature, SimCSE, new static encoder", "static"),
        ("the same, pretrained encoder", "pretrained"),
    ):
        after = results.read("../simcse")["encoders"][kind]["after"]
        one, other = (100 * np.mean(after[each]["sts"]["seeds"]) for each in ("tilt alone", "temperature 0.025"))
        expected[name] = ["STS", means(one, other), f"{one - other:+.1f}"]
    mined = results.read("../mined_training")
    pair = (100 * np.mean(mined["arms"][arm]["test"]) for arm in ("mined", "random"))
    points = (100 * mined["against random"]["mined"][part] for part in ("difference", "low", "high"))
    expected["mined against random negatives, scifact, static model"] = ["nDCG@10", means(*pair), apart(*points)]
    assert shown == expected


CONTROL_OF_HCL = "simclr(temperature=0.25)"


def test_the_one_idea_has_the_tilts_against_their_matched_temperatures(results: ModuleType) -> None:
    text = (ROOT / "docs" / "explanation" / "the-one-idea.md").read_text(encoding="utf-8")

    text = " ".join(text.split())
    hcl = "hcl(temperature=0.5, beta=1, tau_plus=0.05)"
    points, low, high = difference(results.read("temperature_defaults"), hcl, CONTROL_OF_HCL)
    assert f"linear probe by {points:+.2f} points ({low:+.2f} to {high:+.2f})" in text
    measures = results.read("temperature_defaults")["measures"]
    gains = 100 * (np.array(measures[hcl]["knn"]) - np.array(measures[CONTROL_OF_HCL]["knn"]))
    assert (gains > 0).all()
    assert f"200-NN by {gains.mean():+.2f}, in every seed" in text
    for kind in ("static", "pretrained"):
        after = results.read("../simcse")["encoders"][kind]["after"]
        tilted, matched = (after[name]["sts"]["mean"] for name in ("tilt alone", "temperature 0.025"))
        assert f"{tilted:.1f} against {matched:.1f}" in text


def test_the_chooser_has_the_figures_of_the_json_files(results: ModuleType) -> None:
    text = (ROOT / "docs" / "choose.md").read_text(encoding="utf-8")
    shares = {
        (name, row["choice"]): f"{100 * row['judged_relevant']:.2f} %"
        for name in ("scifact", "nfcorpus")
        for row in results.read("../mining_judged")[name]["rows"]
    }
    scifact = [shares["scifact", choice] for choice in ("5% below the positive", "the most similar")]
    assert (
        "scifact: {} of the negatives are judged relevant, against {} of the most similar ones".format(*scifact) in text
    )
    choices = ("ring, 1% to 10%", "ranks 50 to 200", "the most similar", "5% below the positive")
    nfcorpus = [shares["nfcorpus", choice] for choice in choices]
    sentence = "nfcorpus: {} and {}, against {} of the most similar ones; 5 % below the positive still has {}"
    assert sentence.format(*nfcorpus) in text
    ring = difference(results.read("queue"), QUEUE_RING, "moco(temperature=0.07)")
    for name, arm, against in (
        ("../demo", "hcl(beta=1, tau_plus=0.1)", "simclr()"),
        ("../demo_text", TILTED_PAIRS, "pairs()"),
        ("supervised", "hscl(temperature=0.5, beta=5)", "scl(temperature=0.083)"),
    ):
        points, low, high = difference(results.read(name), arm, against)
        assert re.search(
            rf"{re.escape(f'{points:+.1f}')}( points)?[ ,(]+{re.escape(f'{low:+.1f} to {high:+.1f}')}\)", text
        )
    assert f"{ring[0]:+.1f} points ({ring[1]:+.1f} to {ring[2]:+.1f})" in text
    mined = results.read("../mined_training")["against random"]["mined"]
    points, low, high = (100 * mined[part] for part in ("difference", "low", "high"))
    assert f"nDCG@10 {points:+.1f} ({low:+.1f} to {high:+.1f})" in text
    for expression in re.findall(r"`([A-Z]\w+\([^`]*\))`", text):
        assert expression == "Known(pairs)" or hn.parse(expression), expression


QUEUE_RING = "ring(temperature=0.07, inner=0.1, outer=linear(1.0, 0.1, steps=3250))"
TILTED_PAIRS = "pairs(negatives='Tilt(1.0)')"


def test_the_frontier_has_rules_and_planners_in_one_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import frontier  # of experiments

    random = np.random.default_rng(0)
    labels = random.integers(0, 4, 600)
    features = random.normal(size=(600, 8)) + 2.0 * np.eye(8)[labels]
    np.savez(tmp_path / "train_0.npz", x=features.astype(np.float16), y=labels.astype(np.uint8))
    arguments = ["frontier.py", "toy", "--features", str(tmp_path), "--num-anchors", "100", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    frontier.main()
    found = json.loads((tmp_path / "benchmarks/results/studies/frontier_toy.json").read_text())
    rows = {row["expression"]: row for row in found["rows"]}
    same = float((labels[:, None] == labels).sum() - 600) / (600 * 599)
    assert rows["uniform batches"]["false_negatives"] == pytest.approx(same, abs=0.02)
    for name in ("false_negatives", "similarity"):
        assert rows["uniform batches"][name] < rows["ProSampler 0.7"][name] < rows["kNN batches"][name]
    assert rows["OtherLabel() * Tilt(2.0)"]["reads_judge"]
    assert (tmp_path / "docs/figures/frontier_toy.svg").read_text().startswith("<svg")
