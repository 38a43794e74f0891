"""Several runs and comparisons on one page, and what is not the same in them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hardneg.reporting import write_report
from support.reports import ARMS, make_comparison, make_data, make_run, read


def test_several_paths_are_arms_of_one_page(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    for seed, accuracy in enumerate((0.80, 0.82)):
        make_run(tmp_path / "runs" / f"plain{seed}", ARMS[0], seed, data, accuracy=accuracy)
    make_run(tmp_path / "runs" / "tilted", ARMS[2], 0, data, accuracy=0.84)
    paths = [tmp_path / "runs" / name for name in ("plain0", "tilted", "plain1")]
    written = write_report(paths)
    assert written == tmp_path / "runs" / "report.html"
    page = read(written)
    assert "Runs on data.npz, side by side" in page.words
    assert "2 arms from 3 directories" in page.words
    head, first, second = page.cells["results"]
    column = head.index("10-NN accuracy of every seed, %")
    assert "against the first, points" not in head
    assert first[column].split() == ["80.00", "82.00"], "runs that differ in the seed only are one arm"
    assert second[column].split() == ["84.00"]
    assert first[0].endswith("simclr(temperature=0.5)"), "defaults are not shown"
    assert second[0].endswith("simclr(temperature=0.5, negatives='Tilt(1)', tau_plus=0.1)")
    assert "The seeds are not the same in all arms." in page.words
    assert "the reference of the others" not in page.words
    assert "Data, budget, seeds and initial weights are the same" not in page.words
    loss = next(a["aria-label"] or "" for tag, a in page.tags if tag == "svg" and "Loss" in (a["aria-label"] or ""))
    assert loss.count("ends at") == 2


def test_a_comparison_and_a_run_on_one_page(tmp_path: Path) -> None:
    summary = make_comparison(tmp_path / "compare", ARMS[:2])
    make_run(tmp_path / "long", ARMS[0], 0, make_data(tmp_path), accuracy=0.9, common={"epochs": 9})
    page = read(write_report([tmp_path / "compare", tmp_path / "long"], tmp_path / "both.html"))
    _, *lines = page.cells["results"]
    column = page.cells["results"][0].index("mean, %")
    means = [f"{100 * row['mean']:.2f} ± {100 * row['half_width']:.2f}" for row in summary["rows"]]
    assert [line[column] for line in lines] == [*means, "90.00"]
    assert [ARMS[0] in lines[0][0], ARMS[1] in lines[1][0]] == [True, True]
    assert "epochs differs: 2, 9." in page.words
    assert "data differs: " in page.words
    for command in (summary["command"], "hardneg train"):
        assert command in page.words
    assert "3.11.7, 3.11" in dict(map(tuple, page.cells["versions"]))["python"]


def test_the_same_arm_of_two_comparisons_is_distinguished(tmp_path: Path) -> None:
    for name in ("monday", "tuesday"):
        make_comparison(tmp_path / name, ARMS[:2])
    lines = read(write_report([tmp_path / "monday", tmp_path / "tuesday"])).cells["results"][1:]
    assert [line[0].split(" in ")[-1] for line in lines] == ["monday", "monday", "tuesday", "tuesday"]


def test_copies_of_one_seed_count_once(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    make_run(tmp_path / "one", ARMS[0], 0, data, accuracy=0.8)
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    make_run(tmp_path / "two", ARMS[0], 1, data, accuracy=0.9)
    page = read(write_report([tmp_path / name for name in ("one", "copy", "two")], tmp_path / "page.html"))
    head, line = page.cells["results"]
    assert line[head.index("10-NN accuracy of every seed, %")].split() == ["80.00", "90.00"]
    assert "seed 0 appears 2 times (one, copy); it counts once." in page.words


def test_copies_in_a_stopped_comparison_count_once(tmp_path: Path) -> None:
    make_comparison(tmp_path, ARMS[:2])
    (tmp_path / "comparison.json").unlink()
    shutil.copytree(tmp_path / "runs" / "arm0-seed1", tmp_path / "runs" / "arm0-seed1copy")
    head, first, _ = read(write_report(tmp_path)).cells["results"]
    assert len(first[head.index("10-NN accuracy of every seed, %")].split()) == 3


def retrain(run: Path, **encoder: Any) -> None:
    config = json.loads((run / "config.json").read_text())
    config["trained"]["encoder"] |= encoder
    (run / "config.json").write_text(json.dumps(config))


def test_two_networks_called_auto_are_not_one(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    for name in ("small", "large"):
        make_run(tmp_path / name, ARMS[0], 0, data)
    retrain(tmp_path / "large", name="resnet18", parameters=11_000_000, initial_weights="other")
    page = read(write_report([tmp_path / "small", tmp_path / "large"], tmp_path / "page.html"))
    assert len(page.cells["results"]) == 3, "two arms"
    assert "began with the same weights" not in page.words
    assert "encoder differs: auto of 128 parameters, resnet18 of 11000000 parameters." in page.words


@pytest.mark.parametrize("weights", ["other", None])
def test_weights_are_the_same_by_their_digests(weights: str | None, tmp_path: Path) -> None:
    """Options say that both are alike; one began elsewhere, or nobody knows where."""
    make_comparison(tmp_path, ARMS[:2])
    assert "began with the same weights" in read(write_report(tmp_path)).words
    retrain(tmp_path / "runs" / "arm1-seed2", initial_weights=weights)
    assert "began with the same weights" not in read(write_report(tmp_path)).words
