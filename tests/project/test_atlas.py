"""The studies of the atlas: rules of the verdicts, plans that may not change, and one small study from start to end."""

from __future__ import annotations

import importlib
import json
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml

from hardneg.comparing.statistics import MeanEstimate, Outcomes, difference_of
from support.texts import vector_file

FOLDER = Path(__file__).parents[2] / "experiments"
PLAN: dict[str, Any] = {
    "title": "G0", "asks": "?", "minutes": 5, "seeds": 3, "tries": 2, "smallest_effect": 2,
    "assumed": {"run": 0.5, "item": 0.04},
    "common": {"epochs": 1, "batch_size": 16, "device": "cpu"},
    "tune": {"temperature": [0.1, 0.2]},
    "untuned": {"temperature": 0.5},
    "worlds": {
        "vectors": {"file": "{data}", "metric": "auto", "options": {"encoder": "linear", "dim": 8}, "data": {"toy": 20}}
    },
    "arms": {"uniform": "pairs()", "tilt": "pairs(negatives='Tilt(1.0)')", "spare": "pairs(tau_plus=0.1)"},
    "claims": [{"claim": "Tilts gain", "arm": "tilt", "against": "uniform"}],
    "remark": "",
}  # fmt: skip


@pytest.fixture
def atlas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script, with a plan g0 in a folder of its own, which is a git repository."""
    pytest.importorskip("accelerate", reason="training needs the extra train")
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("atlas")
    plans = tmp_path / "plans"
    plans.mkdir()
    facts = json.loads(json.dumps(PLAN))
    facts["worlds"]["vectors"]["data"] = {vector_file(tmp_path / "toy.npz"): 20}
    (plans / "g0.yaml").write_text(yaml.safe_dump(facts, sort_keys=False))
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "Plan"]):
        subprocess.run(["git", *words], cwd=plans, check=True)
    for name, value in (("PLANS", plans), ("ROOT", plans), ("RESULTS", tmp_path)):
        monkeypatch.setattr(module, name, value)
    return module


def estimate(value: float, error: float = 0.01) -> MeanEstimate:
    return MeanEstimate(value, error, float("inf"))


@pytest.mark.parametrize(
    ("value", "half", "verdict"),
    [
        (0.05, 0.03, "holds"),
        (0.05, 0.06, "not decided"),
        (-0.05, 0.03, "the opposite holds"),
        (-0.05, 0.06, "does not hold"),
        (0.0, 0.03, "not decided"),
        (-0.005, 0.03, "does not hold"),
    ],
)
def test_a_gain_is_judged_by_the_rules_of_the_plan(atlas: ModuleType, value: float, half: float, verdict: str) -> None:
    assert atlas.exceeds(estimate(value), half, 0.02) == verdict


@pytest.mark.parametrize(
    ("value", "half", "verdict"), [(0.0, 0.01, "holds"), (0.0, 0.03, "not decided"), (-0.05, 0.01, "does not hold")]
)
def test_reaching_is_not_to_be_far_below(atlas: ModuleType, value: float, half: float, verdict: str) -> None:
    assert atlas.reaches(estimate(value), half, 0.02) == verdict


def test_a_gain_that_only_untuned_arms_have_vanishes_when_tuned(atlas: ModuleType) -> None:
    def cell(untuned: bool, value: float) -> dict[str, Any]:
        rows = [{"claim": 0, "knn": {"value": value, "error": 0.005, "freedom": 100.0}}]
        return {"world": "w", "data": "d", "untuned": untuned, "metric": "knn", "differences": rows}

    found = atlas.judged(atlas.Plan.read("g0"), [cell(False, 0.0), cell(True, 0.05)])
    assert [(one["untuned"], one["verdict"]) for one in found] == [(False, "vanishes when tuned"), (True, "holds")]


def test_the_stated_power_is_reached(atlas: ModuleType) -> None:
    """Differences of runs and items with the variances of the plan; the family has one difference."""
    plan, rng, found = atlas.Plan.read("g0"), np.random.default_rng(0), []
    (detectable,) = atlas.power(plan).values()
    for _ in range(300):
        gain, number = detectable / 100.0, 20
        items = rng.normal(0.0, 0.2 / 2**0.5, (2, number))
        runs = rng.normal(0.0, 0.005, (2, 30, 1))
        arms = [Outcomes(one.mean(1), one, number) for one in (runs[i] + items[i] + gain * i for i in range(2))]
        one = difference_of(arms[1], arms[0])
        found.append(one is not None and one.value > one.half_width)
    assert 0.7 < np.mean(found) < 0.95


def test_a_study_is_trained_judged_and_resumed(atlas: ModuleType, tmp_path: Path) -> None:
    plan = atlas.Plan.read("g0")
    cells = list(plan.cells())
    assert plan.num_runs() == 3 * (3 + 2) + 2 * 3
    runs = tmp_path / "runs"
    done = [atlas.run_cell(plan, cell, tmp_path, runs, time.time() + 600.0) for cell in cells]
    assert [atlas.run_cell(plan, cell, tmp_path, runs, 0.0)["arms"] for cell in cells[1:]] == [done[1]["arms"]]
    atlas.write_result(plan, "abc", done)
    found = json.loads((tmp_path / "atlas_g0.json").read_text())
    assert (found["digest"], found["missing"]) == (plan.digest, [])
    assert list(atlas.finished(plan)) == cells, "worlds that run later are added to these"
    assert atlas.finished(replace(plan, digest="other")) == {}
    for cell, verdict in zip(found["cells"], found["verdicts"], strict=True):
        values = {name: arm["measures"][cell["metric"]] for name, arm in cell["arms"].items()}
        assert verdict["difference"] == pytest.approx(np.mean(values["tilt"]) - np.mean(values["uniform"]))
    assert list(found["cells"][1]["arms"]) == ["uniform", "tilt"], "claims alone are run without tuning"
    assert {one["tuned"]["temperature"] for one in found["cells"][0]["arms"].values()} <= {0.1, 0.2}


def test_a_study_that_may_not_run_is_refused_and_loses_nothing(
    atlas: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, runs = atlas.Plan.read("g0"), tmp_path / "runs"
    with pytest.raises(atlas.OutOfTime):
        atlas.run_cell(plan, next(plan.cells()), tmp_path, runs, 0.0)
    assert len([*runs.rglob("result.json")]) >= 1, "what is finished stays"
    monkeypatch.setattr(atlas, "free_memory", lambda: 2**20)
    with pytest.raises(atlas.Refused, match="GiB of free memory"):
        atlas.run(plan, tmp_path, runs, 2, None)
    file = atlas.PLANS / "g0.yaml"
    file.write_text(file.read_text() + "# easier\n")
    with pytest.raises(atlas.Refused, match="a committed plan"):
        atlas.run(atlas.Plan.read("g0"), tmp_path, runs, 2, None)
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=b", "commit", "-qam", "Edit"], cwd=file.parent)
    with pytest.raises(atlas.Refused, match="as it was at its first run"):
        atlas.run(atlas.Plan.read("g0"), tmp_path, runs, 2, None)
    with pytest.raises(atlas.Refused, match="one of g0"):
        atlas.Plan.read("g9")


def test_a_world_may_have_values_to_tune_of_its_own(atlas: ModuleType, tmp_path: Path) -> None:
    plan = atlas.Plan.read("g0")
    plan.facts["worlds"]["vectors"]["tune"] = {"learning_rate": [0.1, 0.2]}
    world, data, _ = next(plan.cells())
    found = plan.comparison(world, data, False, tmp_path)
    assert found.tune == {"temperature": (0.1, 0.2), "learning_rate": (0.1, 0.2)}


def test_a_plan_with_a_second_version_is_replaced(atlas: ModuleType) -> None:
    assert not atlas.replaced("g0")
    (atlas.PLANS / "g0v2.yaml").write_text("")
    assert atlas.replaced("g0")
    assert not atlas.replaced("g0v2")


def test_the_page_names_gains_in_two_data_sets_or_says_that_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER.parent / "tools"))
    page = importlib.import_module("results_atlas")
    rows = [
        {
            "world": "w",
            "data": data,
            "untuned": False,
            "claim": 0,
            "difference": 0.05,
            "corrected_half_width": 0.01,
            "verdict": verdict,
        }
        for data, verdict in (("a-0", "holds"), ("a-30", "holds"), ("b", "not decided"))
    ]
    assert "Nothing gained" in page.what_gained({"g0": (PLAN, {"verdicts": rows})}), "a-0 and a-30 are one data set"
    rows[2]["verdict"] = "holds"
    assert "w/b +5.0" in page.what_gained({"g0": (PLAN, {"verdicts": rows})})
    assert "holds in 3 of 3" in page.summary(rows)
