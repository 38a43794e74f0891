"""Advice on data by what happened to similar data in studies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hardneg.cli import advise
from hardneg.cli.advise import Profile, advice_on, profile_of
from hardneg.comparing.arms import parse_arm
from support.command import hardneg
from support.texts import vector_file


def entry(data: str, items: int, rate: float, *gains: tuple[str, float, float]) -> dict[str, Any]:
    arms = [{"arm": arm, "difference": gain, "low": gain - half, "high": gain + half} for arm, gain, half in gains]
    profile = {"kind": "pair", "items": items, "false_negatives": rate, "labelled": False}
    return {"study": "g0", "world": "w", "data": data, "profile": profile, "baseline": "pairs()", "arms": arms}


ENTRIES = [
    entry("near", 1000, 0.01, ("pairs(negatives='Tilt(1.0)')", 1.0, 2.0), ("pairs() @ knn()", -5.0, 1.0)),
    entry("nearer", 900, 0.01, ("pairs(negatives='Tilt(1.0)')", 3.0, 1.0), ("pairs(tau_plus=0.1)", 4.0, 1.0)),
    entry("far", 50_000, 0.01, ("pairs(temperature=9)", 90.0, 1.0)),
]


def test_arms_are_ordered_by_their_mean_gain_in_the_nearest_data() -> None:
    found = advice_on(Profile("pair", 800, 0.012, False), ENTRIES, "pairs:mine.csv")
    assert list(found["nearest"]) == ["w/nearer", "w/near"]
    assert [(one["arm"], one["gain"], one["low"], one["high"]) for one in found["suggestions"]] == [
        ("pairs(tau_plus=0.1)", 4.0, 3.0, 5.0),
        ("pairs(negatives='Tilt(1.0)')", 2.0, -1.0, 4.0),
    ], "what did harm for certain is left out"
    assert "--data pairs:mine.csv" in found["command"]
    assert found["command"].count("--arm") == 3


@pytest.mark.parametrize(
    "profile",
    [
        Profile("pair", 1000, 0.5, False),
        Profile("pair", 20, 0.01, False),
        Profile("pair", 1000, 0.01, True),
        Profile("image", 1000, 0.01, False),
        Profile("vector pair", 1000, 0.01, False),
    ],
)
def test_data_unlike_every_study_get_a_comparison_only(profile: Profile) -> None:
    found = advice_on(profile, ENTRIES, "data")
    assert (found["unlike"], found["suggestions"], found["nearest"]) == (True, [], {})
    assert found["command"].count("--arm") >= 2


def test_a_profile_counts_the_false_negatives_of_every_item(tmp_path: Path) -> None:
    random, documents = np.random.default_rng(0), np.repeat(np.arange(25), 4)
    test = np.arange(100) >= 80
    arrays = {"first": random.normal(size=(100, 4)), "second": random.normal(size=(100, 4)), "test": test}
    np.savez(tmp_path / "some.npz", **arrays, documents=documents)
    kept = documents[~test]
    others = [(kept == one).sum() - 1 for one in kept]
    found = profile_of(f"embeddings:{tmp_path / 'some.npz'}")
    assert (found.kind, found.items, found.labelled) == ("vector pair", 80, False)
    assert found.false_negatives == pytest.approx(np.mean(others) / 79)


def test_the_command_reads_the_atlas_that_is_installed(tmp_path: Path) -> None:
    entries = json.loads(advise.ATLAS.read_text())["entries"]
    assert all(parse_arm(text).recipe == "pairs" for one in entries for text in (one["baseline"], *(a["arm"] for a in one["arms"])))  # fmt: skip  # noqa: E501
    done = hardneg("advise", vector_file(tmp_path / "some.npz"), "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["profile"]["kind"] == "vector pair"
    assert hardneg("advise", "digits").output.count("--arm") >= 2
    assert hardneg("advise", "pairs:none.csv").exit_code == 2
