"""The report: its figures are those of the files, nothing is fetched, and what is missing is said."""

from __future__ import annotations

import base64
import json
import re
import shutil
import struct
import subprocess
import zlib
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hardneg.comparing.arms import parse_arm
from hardneg.comparing.request import Comparison
from hardneg.comparing.verdict import Row, half_width, paired, sentences, temperature_notes
from hardneg.pages.axes import ticks
from hardneg.pages.line_chart import Line, line_chart, thinned
from hardneg.pages.png import encode_png, thumbnail
from hardneg.reporting import separation as separation_module
from hardneg.reporting import write_report
from hardneg.reporting.separation import separation
from support.html_page import Page

ARMS = (
    "simclr(temperature=0.5)",
    "simclr(temperature=0.25)",
    "hcl(beta=1, tau_plus=0.1)",
    "hcl(beta=3) @ proximity(num_candidates=500)",
)
ACCURACY = {ARMS[0]: [0.80, 0.82, 0.81], ARMS[1]: [0.85, 0.86, 0.865], ARMS[2]: [0.855, 0.859, 0.864]}
ACCURACY[ARMS[3]] = [0.79, 0.83, 0.815]
NUM_TEST = 40


def read(path: Path) -> Page:
    return Page(path.read_text())


def make_data(folder: Path) -> str:
    rng = np.random.default_rng(0)
    labels = np.arange(NUM_TEST) % 4
    images = rng.integers(0, 255, (NUM_TEST, 8, 8), dtype=np.uint8)
    np.savez(folder / "data.npz", images=images, labels=labels, test_images=images, test_labels=labels)
    return f"npz:{folder / 'data.npz'}"


def make_run(
    path: Path, arm: str, seed: int, data: str, *, accuracy: float = 0.8, common: Any = None
) -> dict[str, Any]:
    parsed = parse_arm(arm)
    options = parsed.complete(**{"data": data, "epochs": 2, **(common or {})}, seed=seed).as_dict()
    path.mkdir(parents=True)
    config = {"recipe": parsed.recipe, "options": options, "command": "hardneg train", "python": "3.11", "versions": {}}
    (path / "config.json").write_text(json.dumps(config))
    shift = ARMS.index(arm) if arm in ARMS else 0
    records = [
        {
            "step": 10 * i, "epoch": 0, "loss": 5.0 - 0.1 * i + 0.01 * seed, "hardness": 0.1 + 0.05 * shift,
            "uniform_hardness": 0.1, "effective_number": 510.0 - 100.0 * shift - i,
            "false_negatives": 0.1 + 0.02 * shift, "attracted": 0.0, "clamped": 0.03 * shift,
            "effective_temperature": parsed.effective_temperature, "empty": 0.0,
        }
        for i in range(1, 6)
    ]  # fmt: skip
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    labels = torch.arange(NUM_TEST) % 4
    features = torch.eye(4)[labels] + 0.1 * torch.randn(NUM_TEST, 4, generator=torch.Generator().manual_seed(seed))
    np.savez(path / "embeddings.npz", train_x=features, train_y=labels, test_x=features, test_y=labels)
    histogram = {"edges": [-1.0, -0.5, 0.0, 0.5, 1.0], "same": [0, 0, 10, 30], "other": [0, 30, 30, 0]}
    result = {
        "final": records[-1], "knn": accuracy, "1nn": accuracy + 0.01, "linear": accuracy + 0.02, "k": 10,
        "alignment": 0.25, "uniformity": -1.5, "steps": 50, "seconds": 12.0 + seed, "epochs": 2,
        "similarities": histogram | {"same_mean": 0.6, "other_mean": 0.05},
    }  # fmt: skip
    (path / "result.json").write_text(json.dumps(result))
    return result


def make_comparison(path: Path, arms: tuple[str, ...] = ARMS, seeds: int = 3) -> dict[str, Any]:
    path.mkdir(parents=True, exist_ok=True)
    common = {"data": make_data(path), "epochs": 2, "batch_size": 16}
    rows: list[Row] = []
    for number, arm in enumerate(arms):
        values = ACCURACY[arm][:seeds]
        results = [
            make_run(path / "runs" / f"arm{number}-seed{seed}", arm, seed, common["data"], accuracy=v, common=common)
            for seed, v in enumerate(values)
        ]
        final = results[0]["final"]
        against = paired(values, rows[0].values, 1 / NUM_TEST) if rows else (None, None, None)
        half = half_width(values, 1 / NUM_TEST)
        effective = parse_arm(arm).effective_temperature
        shown = final["false_negatives"], final["hardness"], final["clamped"]
        rows.append(Row(arm, values, float(np.mean(values)), half, *against, effective, *shown, 50, 13.0))
    comparison = Comparison(arms, seeds, common)
    summary = {
        "metric": "knn", "num_test": NUM_TEST, "rows": [asdict(row) for row in rows], "sentences": sentences(rows),
        "notes": temperature_notes([parse_arm(arm) for arm in arms]), "tuned": None, "comparison": asdict(comparison),
        "command": 'hardneg compare --arm "simclr()" --epochs 2', "python": "3.11.7", "versions": {"torch": "2.99"},
        "machine": "a machine", "device": "cpu", "commit": "abc1234",
    }  # fmt: skip
    (path / "comparison.json").write_text(json.dumps(summary))
    return summary


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("comparison")
    return path, make_comparison(path)


@pytest.fixture(scope="module")
def compared(comparison: tuple[Path, dict[str, Any]]) -> Page:
    written = write_report(comparison[0])
    assert written == comparison[0] / "report.html"
    return read(written)


def test_every_figure_of_the_table_is_that_of_the_json(comparison: tuple[Path, dict[str, Any]], compared: Page) -> None:
    head, *lines = compared.cells["results"]
    assert len(lines) == len(ARMS)
    for row, line in zip(comparison[1]["rows"], lines, strict=True):
        cell = dict(zip(head, line, strict=True))
        assert row["arm"] in cell["arm"]
        assert cell["10-NN accuracy of every seed, %"].split() == [f"{100 * value:.2f}" for value in row["values"]]
        assert cell["mean, %"] == f"{100 * row['mean']:.2f} ± {100 * row['half_width']:.2f}"
        assert cell["effective temperature"] == f"{row['effective_temperature']:.3g}"
        assert cell["false negatives"] == f"{100 * row['false_negatives']:.1f} %"
        assert cell["hardness"] == f"{row['hardness']:.3f}"
        assert cell["clamped"] == f"{100 * row['clamped']:.1f} %"
        assert (cell["steps"], cell["seconds"]) == (str(row["steps"]), f"{row['seconds']:.0f}")
        if row["difference"] is None:
            assert cell["against the first, points"] == ""
            continue
        beyond = abs(row["difference"]) > row["difference_half_width"]
        points = f"{100 * row['difference']:+.2f} ± {100 * row['difference_half_width']:.2f}"
        assert cell["against the first, points"] == f"{points} {'beyond' if beyond else 'within'} noise"


def test_the_other_measures_are_means_over_the_seeds(compared: Page) -> None:
    head, *lines = compared.cells["measures"]
    assert head == ["arm", "10-NN accuracy, %", "1-NN accuracy, %", "linear probe, %", "alignment", "uniformity"]
    for arm, line in zip(ARMS, lines, strict=True):
        mean = 100 * float(np.mean(ACCURACY[arm]))
        assert line[1:] == [f"{mean:.2f}", f"{mean + 1:.2f}", f"{mean + 2:.2f}", "0.25", "-1.50"]


def test_the_answer_says_the_sentences_the_notes_and_the_twin(
    comparison: tuple[Path, dict[str, Any]], compared: Page
) -> None:
    for said in [*comparison[1]["sentences"], *comparison[1]["notes"]]:
        assert said in compared.words
    assert len(comparison[1]["notes"]) == 1, "only the arm without an untilted twin is noted"
    difference, half, _ = paired(ACCURACY[ARMS[2]], ACCURACY[ARMS[1]], 1 / NUM_TEST)
    assert f"C is {100 * difference:+.2f} ± {100 * half:.2f} points from B, not beyond noise" in compared.words
    assert "But C gains nothing clear over B" in compared.words
    assert "Better beyond noise: B simclr(temperature=0.25) (+4.83 points)" in compared.words
    assert "No difference beyond noise: D" in compared.words


def test_several_differences_are_not_taken_for_one(
    comparison: tuple[Path, dict[str, Any]], compared: Page, tmp_path: Path
) -> None:
    assert "With those of arms that repel alike, in up to 20 %." in compared.words, "three arms and a twin"
    old = comparison[1] | {"sentences": comparison[1]["sentences"][:3]}  # of a version that did not say it
    (tmp_path / "comparison.json").write_text(json.dumps(old))
    assert comparison[1]["sentences"][3] in read(write_report(tmp_path)).words
    make_comparison(tmp_path / "two", ARMS[:2])
    assert "judged by itself" not in read(write_report(tmp_path / "two")).words


TOLD = "(it is told the class of every training image)"


@pytest.mark.parametrize(
    ("arm", "told"),
    [
        ("supcon(temperature=0.1)", True),
        ("simclr(negatives='OtherLabel()')", True),
        ("moco(negatives='OtherLabel() * Tilt(1.0)')", True),
        ("sogclr(negatives='Tilt(1.0) * OtherLabel()')", True),
        ("moco(negatives='Ring(0.0, 0.5)')", False),
    ],
)
def test_who_is_told_the_classes_is_said(arm: str, told: bool, tmp_path: Path) -> None:
    make_run(tmp_path / "run", arm, 0, make_data(tmp_path))
    assert (TOLD in read(write_report(tmp_path / "run")).words) == told


def test_who_is_told_the_classes_is_known_without_the_runs(tmp_path: Path) -> None:
    summary = make_comparison(tmp_path, ARMS[:2])
    summary["rows"][1] |= {"arm": "from_another_version()", "uses_labels": True}
    (tmp_path / "comparison.json").write_text(json.dumps(summary))
    words = " ".join(read(write_report(tmp_path)).words.split())
    assert f"B from_another_version() {TOLD}" in words
    assert words.count(TOLD) == 1


@pytest.mark.parametrize(
    ("second", "unlike", "same_weights"),
    [
        ("hcl(beta=1)", [], True),
        ("simclr(temperature=0.5, learning_rate=0.1)", ["learning_rate differs: 0.001, 0.1."], True),
        ("simclr(temperature=0.5, dim=16)", ["dim differs: 128, 16."], False),
        ("moco(encoder='resnet18', augment='grey')", ["encoder differs: auto, resnet18.", "augment differs:"], False),
    ],
)
def test_only_what_is_so_is_said_to_be_the_same(
    second: str, unlike: list[str], same_weights: bool, tmp_path: Path
) -> None:
    """Without comparison.json, by the options of the runs alone."""
    data = make_data(tmp_path)
    for number, arm in enumerate((ARMS[0], second)):
        make_run(tmp_path / "compare" / "runs" / f"arm{number}-seed0", arm, 0, data)
    words = read(write_report(tmp_path / "compare")).words
    assert ("Data, budget, seeds and initial weights are the same for all." in words) == same_weights
    assert ("Data, budget and seeds are the same for all." in words) != same_weights
    assert ("which began with the same weights" in words) == same_weights
    assert ("More than the negatives differs" in words) == bool(unlike)
    for said in unlike:
        assert said in words


def page_of_twins(path: Path, tilted: str, plain: str, accuracies: tuple[list[float], list[float]]) -> str:
    """What the page says of an arm and of its plain twin, behind a first arm that they are not held against."""
    arms = (ARMS[0], plain, tilted)
    summary = make_comparison(path, ARMS[:3])
    for row, arm, values in zip(summary["rows"], arms, (ACCURACY[ARMS[0]], *accuracies), strict=True):
        row |= {"arm": arm, "values": values}
    (path / "comparison.json").write_text(json.dumps(summary))
    return read(write_report(path)).words


def test_twins_whose_seeds_agree_by_rounding_are_not_beyond_noise(tmp_path: Path) -> None:
    one_image = [0.825, 0.85, 0.875], [0.85, 0.875, 0.9]  # of 40, in every seed
    half = 4.302653 * 2.5 / 18**0.5  # t of 2 degrees, and the sd of rounding, 2.5 / sqrt(6) points, over sqrt(3)
    said = f"C is +2.50 ± {half:.2f} points from B, not beyond noise"
    assert said in page_of_twins(tmp_path, ARMS[2], ARMS[1], one_image)


@pytest.mark.parametrize(
    ("tilted", "plain", "said"),
    [
        (
            ARMS[2],
            ARMS[1],
            "repel alike (effective temperature 0.25, before the gradient through its weights is counted):",
        ),
        (
            "hcl(beta=linear(0.0, 1.0))",
            ARMS[1],
            "repel alike (effective temperature 0.25, where the tilt is strongest, before the gradient through",
        ),
        ("simclr(negatives='Tilt(1.0, detach=True)')", ARMS[1], "repel alike (effective temperature 0.25):"),
        (ARMS[2], "simclr(temperature=0.25) @ knn()", ""),
        (ARMS[2], "simclr(temperature=0.25, negatives='Threshold(0.5)')", ""),
        (ARMS[2], "hcl(temperature=0.25, beta=linear(0.0, 1.0))", ""),
    ],
)
def test_only_arms_that_differ_in_the_tilt_are_held_against_each_other(
    tilted: str, plain: str, said: str, tmp_path: Path
) -> None:
    words = page_of_twins(tmp_path, tilted, plain, (ACCURACY[ARMS[1]], ACCURACY[ARMS[2]]))
    assert said in words
    assert ("repel alike" in words) == bool(said)


def test_the_question_names_the_data_without_its_folder(compared: Page) -> None:
    assert "Which negatives are best for data.npz?" in compared.words


def test_the_command_and_the_versions_are_there(comparison: tuple[Path, dict[str, Any]], compared: Page) -> None:
    assert comparison[1]["command"] in compared.words
    assert ["torch", "2.99"] in compared.cells["versions"]
    assert ["commit", "abc1234"] in compared.cells["versions"]


def test_the_dots_are_every_seed_in_order_of_their_values(compared: Page) -> None:
    dots = [float((dot["cx"] or "").rstrip("%")) for dot in compared.with_class("dot")]
    values = [value for arm in ARMS for value in ACCURACY[arm]]
    assert len(dots) == len(values)
    slope, offset = np.polyfit(values, dots, 1)
    assert slope > 0
    assert np.allclose(np.polyval([slope, offset], values), dots, atol=0.02), "the axis is linear"


def test_curves_that_never_change_are_named_and_not_drawn(compared: Page) -> None:
    names = [attributes.get("aria-label") or "" for tag, attributes in compared.tags if tag == "svg"]
    drawn = [name.partition(" over training")[0] for name in names if "over training" in name]
    assert drawn == [
        "Loss", "Hardness of the negatives", "False negatives in the batch", "Effective number of negatives", "Clamped",
    ]  # fmt: skip
    assert "attracted negatives (0 %), anchors without a negative (0 %)" in compared.words
    loss = next(name for name in names if name.startswith("Loss"))
    assert f"{ARMS[0]} ends at 4.51" in loss, "the mean over seeds of 4.50, 4.51 and 4.52"
    dashed = compared.with_class("dashed")
    assert len(dashed) == 3, "uniform hardness is drawn for the arms whose hardness differs from it"


def share_by_loops(x: torch.Tensor, y: torch.Tensor) -> float:
    x = torch.nn.functional.normalize(x.double(), dim=1)
    pairs = [(float(x[i] @ x[j]), bool(y[i] == y[j])) for i in range(len(x)) for j in range(i)]
    same, other = ([cosine for cosine, alike in pairs if alike == kind] for kind in (True, False))
    wins = [(a > b) + 0.5 * (a == b) for a in same for b in other]
    return sum(wins) / len(wins)


def test_pairs_of_one_class_are_counted_against_those_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0)) + torch.eye(3)[torch.arange(24) % 3]
    y = torch.arange(24) % 3
    found = separation(x, y)
    assert found == pytest.approx(share_by_loops(x, y), abs=1e-9)
    assert separation(torch.eye(4), torch.tensor([0, 0, 1, 1])) == 0.5, "all are as unlike"
    assert separation(x, torch.zeros(24)) is None
    assert separation(x, torch.arange(24)) is None
    monkeypatch.setattr(separation_module, "MOST_IMAGES", 20)
    some = separation(x, y)
    assert some != found
    assert some == separation(x, y), "the same are drawn"


def test_histograms_say_how_well_classes_are_apart_in_each_seed(tmp_path: Path) -> None:
    """Cosines of one seed are far above those of the other: pairs of both together would say something else."""
    make_comparison(tmp_path, ARMS[:2], seeds=2)
    labels, shares = torch.arange(NUM_TEST) % 4, []
    for seed in (0, 1):
        noise = torch.randn(NUM_TEST, 4, generator=torch.Generator().manual_seed(seed))
        features = torch.eye(4)[labels] + (0.3 + 0.5 * seed) * noise + 6.0 * seed
        split = {"train_x": features, "train_y": labels, "test_x": features, "test_y": labels}
        np.savez(tmp_path / "runs" / f"arm0-seed{seed}" / "embeddings.npz", **split)
        shares.append(share_by_loops(features, labels))
    (tmp_path / "runs" / "arm1-seed1" / "embeddings.npz").unlink()
    (tmp_path / "runs" / "arm1-seed0" / "embeddings.npz").write_text("damaged")
    words = read(write_report(tmp_path)).words
    assert 0.5 < shares[1] + 0.1 < shares[0] < 0.98
    assert f"than an other-class pair {50 * sum(shares):.1f} % of the time." in words
    assert words.count("than an other-class pair") == 1, "what has no embeddings has no such figure"


def test_pictures_mark_the_false_negatives_and_only_those(compared: Page) -> None:
    pictures = [attributes for tag, attributes in compared.tags if tag == "img"]
    anchors = [one for one in pictures if "shown" in (one["class"] or "")]
    assert len(anchors) == 4, "one of each class"
    assert len(pictures) == 4 + 4 * (2 * (8 + 4) + 8), (
        "nearest and nearest of other classes of two arms, and random ones"
    )
    # The features are tight clusters, one a class: all that are nearest are false.
    nearest = [one for one in pictures if "similarity" in (one["alt"] or "")]
    false = [one for one in nearest if "false negative" in (one["alt"] or "")]
    assert len(false) == 4 * 2 * 8
    assert all(
        ("false negative" in (one["alt"] or "")) == ((one["class"] or "").split()[0] == "false") for one in nearest
    )
    assert "90 % in A and 90 % in C are of its own class; among random ones 23 %" in compared.words, "9 of 10"


def test_nothing_is_fetched_and_everything_has_a_text(comparison: tuple[Path, dict[str, Any]], compared: Page) -> None:
    text = (comparison[0] / "report.html").read_text()
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<script|<link", text)
    assert "default-src 'none'" in text
    for tag, attributes in compared.tags:
        assert not any(name in attributes for name in ("href", "srcset", "onclick", "onload"))
        if tag == "img":
            assert (attributes["src"] or "").startswith("data:image/png;base64,")
            assert attributes["alt"]
        if tag == "svg":
            assert attributes["role"] == "img"
            assert attributes["aria-label"]
    assert compared.open == [], "every element is closed"


def test_text_is_escaped(tmp_path: Path) -> None:
    summary = make_comparison(tmp_path, ARMS[:2])
    evil = "<script>alert('x')</script> & \"quoted\""
    summary["rows"][0]["arm"] = evil
    summary |= {"sentences": [evil], "notes": [evil], "command": evil, "machine": evil, "versions": {evil: evil}}
    (tmp_path / "comparison.json").write_text(json.dumps(summary))
    written = write_report(tmp_path)
    page = read(written)
    assert "<script" not in written.read_text()
    assert not any(tag == "script" for tag, _ in page.tags)
    assert page.words.count(evil) >= 5
    assert [evil, evil] in page.cells["versions"]


def test_a_single_run(tmp_path: Path) -> None:
    result = make_run(tmp_path / "run", ARMS[2], 0, make_data(tmp_path), accuracy=0.8125)
    written = write_report(tmp_path / "run", tmp_path / "pages" / "one.html")
    assert written == tmp_path / "pages" / "one.html"
    page = read(written)
    head, line = page.cells["results"]
    cell = dict(zip(head, line, strict=True))
    assert "against the first, points" not in cell
    assert (cell["10-NN accuracy, %"], cell["effective temperature"], cell["steps"]) == ("81.25", "0.25", "50")
    assert cell["false negatives"] == f"{100 * result['final']['false_negatives']:.1f} %"
    assert "Not complete" not in page.words
    assert not page.with_class("dot")
    assert not page.with_class("badge"), "a run alone needs no letter"
    assert sum(tag == "img" for tag, _ in page.tags) == 4 + 4 * (8 + 4 + 8)


def test_missing_and_unfinished_runs_are_named(tmp_path: Path) -> None:
    make_comparison(tmp_path, ARMS[:3])
    for name in ("config.json", "result.json", "metrics.jsonl", "embeddings.npz"):
        (tmp_path / "runs" / "arm0-seed1" / name).unlink()
    (tmp_path / "runs" / "arm1-seed2" / "result.json").unlink()
    (tmp_path / "runs" / "arm2-seed0" / "metrics.jsonl").unlink()
    page = read(write_report(tmp_path))
    assert f"{ARMS[0]}, seed 1: no run directory with these options" in page.words
    assert f"{ARMS[1]}, seed 2: not finished (last record at step 50)" in page.words
    assert f"{ARMS[2]}, seed 0: no records over training (metrics.jsonl)" in page.words
    assert len(page.cells["results"]) == 1 + 3, "the table is that of comparison.json all the same"


def test_a_comparison_that_was_stopped_shows_what_is_finished(tmp_path: Path) -> None:
    make_comparison(tmp_path, ARMS[:2])
    (tmp_path / "comparison.json").unlink()
    (tmp_path / "runs" / "arm1-seed1" / "result.json").unlink()
    page = read(write_report(tmp_path))
    assert "not finished, so there is no answer yet" in page.words
    head, first, second = page.cells["results"]
    column = head.index("10-NN accuracy of every seed, %")
    assert first[column].split() == ["80.00", "82.00", "81.00"]
    assert second[column].split() == ["85.00", "86.50"]
    assert "simclr(temperature=0.25), seed 1: not finished" in page.words
    titles = re.findall(r"<title>(simclr\(temperature=0.25\), seed \d): ", (tmp_path / "report.html").read_text())
    assert titles == ["simclr(temperature=0.25), seed 0", "simclr(temperature=0.25), seed 2"]


def test_tuned_arms_find_their_runs_and_say_what_was_taken(tmp_path: Path) -> None:
    summary = make_comparison(tmp_path, ARMS[:2])
    # The second arm took 0.1, so that the runs at 0.25 are not its own.
    summary["tuned"] = {ARMS[0]: 0.5, ARMS[1]: 0.1}
    summary["comparison"]["tune"] = ["temperature", [0.1, 0.5]]
    (tmp_path / "comparison.json").write_text(json.dumps(summary))
    words = read(write_report(tmp_path)).words
    assert f"temperature of 0.1, 0.5; taken: {ARMS[0]}: 0.5, {ARMS[1]}: 0.1" in words
    assert f"{ARMS[1]}, seed 0: no run directory with these options" in words
    assert f"{ARMS[0]}, seed 0: no run" not in words


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("embeddings", "no finished run has saved its embeddings"),
        ("images", "No images are shown"),
        ("other images", "are not of the images of"),
    ],
)
def test_without_embeddings_or_images_the_section_says_so(tmp_path: Path, lost: str, said: str) -> None:
    make_run(tmp_path / "run", ARMS[0], 0, make_data(tmp_path))
    if lost == "embeddings":
        (tmp_path / "run" / "embeddings.npz").unlink()
    elif lost == "images":
        (tmp_path / "data.npz").unlink()
    else:
        images = np.zeros((8, 8, 8), np.uint8)
        labels = np.arange(8) % 2
        np.savez(tmp_path / "data.npz", images=images, labels=labels, test_images=images, test_labels=labels)
    page = read(write_report(tmp_path / "run"))
    assert said in page.words
    assert not any(tag == "img" for tag, _ in page.tags)


def test_a_run_that_has_only_begun_or_has_no_labels(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = make_run(run, ARMS[0], 0, make_data(tmp_path))
    (run / "result.json").write_text(json.dumps({key: result[key] for key in ("final", "steps", "seconds", "epochs")}))
    assert "There is no accuracy" in read(write_report(run)).words
    for name in ("result.json", "metrics.jsonl", "embeddings.npz"):
        (run / name).unlink()
    page = read(write_report(run))
    assert "not finished (last record at step 0)" in page.words
    assert "No run has records over training" in page.words
    assert "No finished run has similarities of labelled pairs" in page.words


def test_an_unfinished_run_shows_what_it_has(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run(run, ARMS[2], 0, make_data(tmp_path))
    (run / "result.json").unlink()
    page = read(write_report(run))
    head, line = page.cells["results"]
    cell = dict(zip(head, line, strict=True))
    figures = (cell["effective temperature"], cell["false negatives"], cell["hardness"], cell["clamped"], cell["steps"])
    assert figures == ("0.25", "14.0 %", "0.200", "6.0 %", "50")
    assert cell["kNN accuracy, %"] == cell["seconds"] == "n/a"
    assert "This run is not finished, so there is no accuracy yet." in page.words
    assert "Measured by" not in page.words


def test_a_finished_seed_is_not_mixed_with_one_that_is_under_way(tmp_path: Path) -> None:
    make_comparison(tmp_path, ARMS[:2])
    (tmp_path / "comparison.json").unlink()
    for seed in (0, 1):
        (tmp_path / "runs" / f"arm0-seed{seed}" / "result.json").unlink()
        (tmp_path / "runs" / f"arm0-seed{seed}" / "metrics.jsonl").write_text('{"step": 20, "hardness": 0.9}\n')
    head, first, _ = read(write_report(tmp_path)).cells["results"]
    assert (first[head.index("hardness")], first[head.index("steps")]) == ("0.100", "50")


def with_records(run: Path, number: int) -> None:
    """The run as if it had recorded so often."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[-number:]) + "\n")


def test_one_record_is_no_curve(tmp_path: Path) -> None:
    make_comparison(tmp_path, ARMS[:2], seeds=2)
    for run in (tmp_path / "runs").iterdir():
        with_records(run, 1)
    page = read(write_report(tmp_path))
    assert "Every run has one record only, of step 50, so there is no curve to draw. --option log_every=1" in page.words
    assert "never changes" not in page.words
    assert not any("over training" in (a.get("aria-label") or "") for tag, a in page.tags if tag == "svg")
    alone = read(write_report(tmp_path / "runs" / "arm0-seed0"))
    assert "The run has one record only, of step 50" in alone.words
    make_run(tmp_path / "longer", ARMS[0], 0, make_data(tmp_path))
    assert "one record only" not in read(write_report(tmp_path / "longer")).words


@pytest.mark.parametrize("split", ["test", "validation"])
def test_the_split_that_is_evaluated_is_named(split: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run", ARMS[0], 0, make_data(tmp_path), common={"evaluate_on": split})
    words = read(write_report(tmp_path / "run")).words
    assert f"each {split} image takes the class that its 10 nearest training images vote for" in words
    assert f"How alike pairs of {split} images are" in words
    assert ("The validation images are a fifth of the training images" in words) == (split == "validation")
    other = {"test": "validation", "validation": "test"}[split]
    assert f"{other} image takes" not in words
    assert f"pairs of {other} images" not in words


def test_it_is_said_which_arms_are_shown(compared: Page, tmp_path: Path) -> None:
    assert "Shown are A, the first arm (seed 0) and C, the best of the others (seed 0)." in compared.words
    make_run(tmp_path / "run", ARMS[0], 0, make_data(tmp_path))
    assert "the first arm" not in read(write_report(tmp_path / "run")).words


def test_measures_are_not_called_better_than_they_are(compared: Page) -> None:
    assert "lower is better" not in compared.words
    assert "lower is closer" in compared.words
    assert "lower is more even" in compared.words


def test_one_neighbour_and_one_pass(tmp_path: Path) -> None:
    result = make_run(tmp_path / "run", ARMS[0], 0, make_data(tmp_path), common={"epochs": 1})
    (tmp_path / "run" / "result.json").write_text(json.dumps(result | {"k": 1, "1nn": result["knn"]}))
    page = read(write_report(tmp_path / "run"))
    assert page.cells["measures"][0].count("1-NN accuracy, %") == 1
    assert "Training: 1 pass over the training images" in page.words


def test_the_words_say_where_a_tilt_is_not_quite_a_temperature(compared: Page) -> None:
    assert "(1 + beta), before the gradient through its weights is counted" in compared.words


def test_a_difference_that_rounds_to_nothing_has_no_minus(tmp_path: Path) -> None:
    summary = make_comparison(tmp_path, ARMS[:2])
    summary["rows"][1]["difference"] = -1e-6
    (tmp_path / "comparison.json").write_text(json.dumps(summary))
    words = read(write_report(tmp_path)).words
    assert "(+0.00 points)" in words
    assert "-0.00" not in words


def test_a_run_without_negatives_and_its_warnings_are_told(tmp_path: Path) -> None:
    result = make_run(tmp_path / "run", ARMS[0], 0, make_data(tmp_path))
    result["final"]["empty"] = 1.0
    (tmp_path / "run" / "result.json").write_text(json.dumps(result))
    (tmp_path / "run" / "warnings.json").write_text('["2 images are odd."]')
    words = read(write_report(tmp_path / "run")).words
    assert "Mind what was trained" in words
    assert f"{ARMS[0]}: 100% of the anchors had no negative in the last batch" in words
    assert f"{ARMS[0]}: 2 images are odd." in words


def test_the_threads_of_the_runs_are_there(tmp_path: Path) -> None:
    summary = make_comparison(tmp_path, ARMS[:2]) | {"threads": 3}
    (tmp_path / "comparison.json").write_text(json.dumps(summary))
    assert ["threads of a run", "3"] in read(write_report(tmp_path)).cells["versions"]


def test_not_a_number_is_left_out(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = make_run(run, ARMS[0], 0, make_data(tmp_path))
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        record["false_negatives"] = float("nan")
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (run / "result.json").write_text(json.dumps(result | {"final": records[-1]}))
    written = write_report(run)
    head, line = read(written).cells["results"]
    assert line[head.index("false negatives")] == "n/a"
    assert "nan" not in written.read_text().lower().replace("base64", "").split('<h2 class="h">the hardest')[0]


def test_what_is_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"report needs a run .* or a comparison"):
        write_report(tmp_path)
    with pytest.raises(ValueError, match=r"report needs a run .* or a comparison"):
        write_report(tmp_path / "nowhere")
    (tmp_path / "comparison.json").write_text('{"rows": [')
    with pytest.raises(ValueError, match=r"report needs JSON in .*comparison.json"):
        write_report(tmp_path)
    (tmp_path / "comparison.json").write_text('{"rows": []}')
    with pytest.raises(ValueError, match=r"comparison\.json with rows"):
        write_report(tmp_path)


@pytest.mark.parametrize("channels", [1, 3])
def test_png_holds_every_pixel(channels: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, channels), dtype=np.uint8)
    data = encode_png(pixels)
    at, chunks = 8, {}
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, content = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length]) == (zlib.crc32(kind + content),)
        chunks[kind] = content
        at += 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    assert struct.unpack(">IIBB", chunks[b"IHDR"][:10]) == (7, 5, 8, {1: 0, 3: 2}[channels])
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(5, 1 + 7 * channels)
    assert (rows[:, 0] == 0).all()
    assert (rows[:, 1:].reshape(5, 7, channels) == pixels).all()
    with pytest.raises(ValueError, match="encode_png needs uint8"):
        encode_png(pixels[..., :1].repeat(2, axis=2))


def test_large_images_are_shrunk_and_small_ones_kept() -> None:
    def size(uri: str) -> tuple[int, int]:
        data = base64.b64decode(uri.partition("base64,")[2])
        width, height = struct.unpack(">II", data[16:24])
        return width, height

    assert size(thumbnail(torch.zeros(3, 96, 192, dtype=torch.uint8))) == (48, 24)
    assert size(thumbnail(torch.zeros(1, 8, 8, dtype=torch.uint8))) == (8, 8)


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0.03, 0.27) == [0.05, 0.1, 0.15, 0.2, 0.25]
    assert ticks(89.3, 92.9, 5) == [90.0, 91.0, 92.0]
    assert ticks(0, 9750) == [0, 2000, 4000, 6000, 8000]


def test_long_lines_are_thinned_and_keep_their_end_and_their_mean() -> None:
    points = [(float(i), float(i % 2)) for i in range(1001)]
    thin = thinned(points, 100)
    assert len(thin) <= 100
    assert thin[-1] == points[-1]
    assert all(abs(value - 0.5) < 0.06 for _, value in thin[:-1])
    assert thinned(points[:50], 100) == points[:50]


def test_labels_at_the_ends_of_lines_do_not_cover_each_other() -> None:
    lines = [Line(letter, letter, i, [(0.0, 1.0), (1.0, 0.001 * i)]) for i, letter in enumerate("ABCDE")]
    chart = line_chart("loss", lines, "nats", str)
    places = sorted(float(y) for y in re.findall(r'class="end c\d" x="[\d.]+" y="([\d.]+)"', chart))
    assert len(places) == 5
    assert min(np.diff(places)) >= 12.9
    assert places[-1] <= 216 - 30


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
    assert first[0].endswith("simclr(temperature=0.5)"), "what is as usual is not said"
    assert second[0].endswith("simclr(temperature=0.5, negatives='Tilt(1)', tau_plus=0.1)")
    assert "The seeds are not the same in all arms." in page.words
    assert "held against" not in page.words
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


def test_the_same_arm_of_two_comparisons_is_told_apart(tmp_path: Path) -> None:
    for name in ("monday", "tuesday"):
        make_comparison(tmp_path / name, ARMS[:2])
    lines = read(write_report([tmp_path / "monday", tmp_path / "tuesday"])).cells["results"][1:]
    assert [line[0].split(" in ")[-1] for line in lines] == ["monday", "monday", "tuesday", "tuesday"]


def test_paths_that_are_no_runs_are_named(tmp_path: Path) -> None:
    make_run(tmp_path / "run", ARMS[0], 0, make_data(tmp_path))
    with pytest.raises(ValueError, match=r"got path='.*nowhere', which is not there"):
        write_report([tmp_path / "run", tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="paths that differ"):
        write_report([tmp_path / "run", tmp_path / "." / "run"])
    with pytest.raises(ValueError, match="at least one run"):
        write_report([])


# In a browser

WIDTHS = (390, 860, 900, 1280, 1600)
MEASURE = """
const found = [];
for (const frame of document.querySelectorAll("iframe")) {
  const page = frame.contentDocument, boxes = [...page.querySelectorAll(".scroll, .sideways")], cells = [];
  for (const cell of page.querySelectorAll("#measures td, #results td.mean, #results td.seconds")) {
    const words = page.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    while (words.nextNode()) {
      const text = page.createRange();
      text.selectNodeContents(words.currentNode);
      cells.push(text.getClientRects().length);
    }
  }
  const table = Math.max(...boxes.map((box) => box.scrollWidth - box.clientWidth));
  found.push({table, page: page.documentElement.scrollWidth - frame.clientWidth,
              lines: Math.max(...cells)});
}
document.body.textContent = JSON.stringify(found);
"""


def seen_at(path: Path, widths: tuple[int, ...]) -> list[dict[str, int]]:
    """By how many pixels the table and the page are too wide at these widths, and over how many lines a number goes."""
    page = escape(path.read_text(), quote=True)
    frames = "".join(
        f'<iframe style="border:0;width:{width}px;height:900px" srcdoc="{page}"></iframe>' for width in widths
    )
    seen = path.with_suffix(".seen.html")
    seen.write_text(f"<!doctype html><body>{frames}<script>onload = () => {{{MEASURE}}}</script></body>")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser is not None
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--virtual-time-budget=5000"]
    profile = f"--user-data-dir={path.parent / 'profile'}"
    answer = subprocess.run([*command, profile, seen.as_uri()], capture_output=True, text=True, timeout=120)
    (found,) = re.findall(r"<body>(\[.*\])</body>", answer.stdout, re.DOTALL)
    return list(json.loads(found))


@pytest.mark.skipif(not (shutil.which("chromium") or shutil.which("google-chrome")), reason="no browser to look with")
@pytest.mark.parametrize("seeds", [2, 3])
def test_nothing_is_cut_and_no_number_is_broken(seeds: int, tmp_path: Path) -> None:
    """With what makes a table widest: intervals of two seeds, a long arm, and thousands of steps and seconds."""
    summary = make_comparison(tmp_path, ARMS, seeds)
    for row in summary["rows"]:
        row |= {"half_width": 0.1412, "seconds": 1234.0, "steps": 19500}
        if row["difference"] is not None:
            row["difference_half_width"] = 0.1059
    (tmp_path / "comparison.json").write_text(json.dumps(summary))
    for width, found in zip(WIDTHS, seen_at(write_report(tmp_path), WIDTHS), strict=True):
        assert found["table"] <= 0, f"the table is cut at {width} px"
        assert found["page"] <= 0, f"the page is wider than {width} px"
        assert found["lines"] == 1, f"a number is broken at {width} px"
