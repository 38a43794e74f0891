"""The committed simulation keeps its promises, the page shows its figures, and the script runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("sentence_transformers", reason="the simulation encodes texts")

import judge_simulation

ROOT = Path(__file__).parents[2]


def test_the_committed_figures() -> None:
    found = json.loads((ROOT / "experiments" / "judge_simulation.json").read_text(encoding="utf-8"))
    assert found["times"] == 500
    assert {world["name"] for world in found["worlds"]} == {
        "synthetic", "at the level", "nfcorpus", "scifact", "digits"
    }  # fmt: skip
    for world in found["worlds"]:
        assert [one["budget"] for one in world["budgets"]] == [100, 300, 1000]
        for one in world["budgets"]:
            assert one["most_missed"] < 45
            assert one["chosen_above_the_level"] <= 0.05
        assert world["cost"] is None or world["cost"]["share"] <= 0.6
    assert all(one["chosen"] >= 0.5 for one in found["single"])
    assert all(one["least_coverage"] >= 0.95 for one in found["erring"])
    weaker = {(one["world"], one["num_mined"]): one for one in found["weaker"]}
    assert len(weaker) == 6
    for (_, num_mined), one in weaker.items():
        assert (one["least_coverage"] >= 0.95) == (num_mined > 0)
        assert num_mined == 0 or one["chosen_above_the_level"] <= 0.05
    page = (ROOT / "docs" / "explanation" / "judging.md").read_text(encoding="utf-8").splitlines()
    assert set(judge_simulation.tables(found).splitlines()) <= {*page, ""}


def test_a_few_repetitions() -> None:
    world = judge_simulation.synthetic("small", (0.01, 0.08), 0.05, size=300)
    assert [round(count / 300, 3) for count in world.counts()] == [0.01, 0.08]
    found = judge_simulation.coverage(world, 150, 5)
    assert found["most_missed"] <= 2
    assert found["mean_judgements"] <= 150
    assert 0 < judge_simulation.exact_sample(300, 3, 0.05) < 300
    errs = judge_simulation.erring(world, 0.1, 100, 3)
    assert errs["confirmations"] > 0
    checked = judge_simulation.erring(world, 0.1, 100, 3, found=0.5, num_mined=40)
    assert checked["confirmations"] >= 40
    assert checked["least_coverage"] == 1.0
