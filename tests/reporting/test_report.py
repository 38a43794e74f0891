"""The report: its figures are those of the files, nothing is fetched, and what is missing is said."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
import shutil
import struct
import subprocess
from dataclasses import asdict
from functools import cache
from html import escape
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from hardneg.cli.tables import show_comparison
from hardneg.comparing.arms import parse_arm
from hardneg.comparing.comparing import _as_json
from hardneg.comparing.request import Comparison
from hardneg.comparing.verdict import answer, rows_of, sentences, temperature_notes, verdicts_of
from hardneg.core.errors import FileError
from hardneg.pages.charts.axes import ticks
from hardneg.pages.charts.lines import Line, line_chart, thinned
from hardneg.pages.thumbnails import thumbnail
from hardneg.reporting import separation as separation_module
from hardneg.reporting import write_report
from hardneg.reporting.histograms import separation
from hardneg.training.data.images import load
from hardneg.training.trained import fingerprint
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


@cache
def images_of(data: str) -> str:
    return fingerprint(load(data, "test"))


def make_run(
    path: Path, arm: str, seed: int, data: str, *, accuracy: float = 0.8, common: Any = None
) -> dict[str, Any]:
    parsed = parse_arm(arm)
    options = parsed.complete(**{"data": data, "epochs": 2, **(common or {})}, seed=seed).as_dict()
    path.mkdir(parents=True)
    config = {"recipe": parsed.recipe, "options": options, "command": "hardneg train", "python": "3.11", "versions": {}}
    encoder = {
        "name": options["encoder"],
        "parameters": options["dim"],
        "class": "Encoder",
        "initial_weights": f"{options['encoder']} {options['dim']} {seed}",
    }
    train = hashlib.sha256(data.encode()).hexdigest()
    images = {"train": {"images": 40, "fingerprint": train}, "test": {"images": 40, "fingerprint": images_of(data)}}
    config["trained"] = {"encoder": encoder, "views": options["augment"], "data": images}
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
        "alignment": 0.25, "uniformity": -1.5, "steps": 50, "num_test": NUM_TEST, "seconds": 12.0 + seed, "epochs": 2,
        "similarities": histogram | {"same_mean": 0.6, "other_mean": 0.05},
    }  # fmt: skip
    (path / "result.json").write_text(json.dumps(result))
    return result


def make_comparison(path: Path, arms: tuple[str, ...] = ARMS, seeds: int = 3) -> dict[str, Any]:
    path.mkdir(parents=True, exist_ok=True)
    common = {"data": make_data(path), "epochs": 2, "batch_size": 16}
    results = [
        [
            make_run(path / "runs" / f"arm{number}-seed{seed}", arm, seed, common["data"], accuracy=v, common=common)
            for seed, v in enumerate(ACCURACY[arm][:seeds])
        ]
        for number, arm in enumerate(arms)
    ]
    parsed = [parse_arm(arm) for arm in arms]
    rows, verdicts = rows_of(parsed, results, "knn"), verdicts_of(parsed, results, "knn")
    summary = {
        "metric": "knn", "num_test": NUM_TEST, "rows": [asdict(row) for row in rows],
        "answer": answer(verdicts, "10-NN accuracy"), "verdicts": [_as_json(one) for one in verdicts],
        "sentences": sentences(verdicts), "notes": temperature_notes(parsed), "tuned": None,
        "comparison": asdict(Comparison(arms, seeds, common)),
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


def test_the_answer_has_the_sentences_of_the_json(comparison: tuple[Path, dict[str, Any]], compared: Page) -> None:
    words = " ".join(compared.words.split())
    for said in [*comparison[1]["answer"], *comparison[1]["sentences"], *comparison[1]["notes"]]:
        assert said in words
    assert words.count(comparison[1]["answer"][0]) == 1, "the answer stands once"
    assert len(comparison[1]["notes"]) == 1, "only the arm without an untilted control is noted"
    assert any("Both repel alike" in one for one in comparison[1]["sentences"])


TOLD = "(sees the labels of the training images)"


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
        (
            "moco(encoder='resnet18', augment='grey')",
            ["encoder differs: auto of 128 parameters, resnet18 of 128", "augment differs:"],
            False,
        ),
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
    words = " ".join(compared.words.split())
    assert "90 % in A and 90 % in C are of its own class (false negatives, in a red frame with a cross); among" in words
    assert "random ones 23 %. So the hardest negatives are false more often than random ones." in words


def test_nothing_is_fetched_and_everything_has_a_text(comparison: tuple[Path, dict[str, Any]], compared: Page) -> None:
    text = re.sub(r"base64,[A-Za-z0-9+/=]+", "", (comparison[0] / "report.html").read_text())
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<script|<link", text)
    assert "default-src 'none'" in text
    for tag, attributes in compared.tags:
        assert not any(name in attributes for name in ("srcset", "onclick", "onload"))
        assert "href" not in attributes or (attributes["href"] or "").startswith("data:text/csv;")
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
        ("other images", "report needs the images that run was evaluated on"),
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
    assert "+0.00 ±" in words
    assert "-0.00" not in words


def test_a_run_without_negatives_and_its_warnings_are_told(tmp_path: Path) -> None:
    result = make_run(tmp_path / "run", ARMS[0], 0, make_data(tmp_path))
    result["final"]["empty"] = 1.0
    (tmp_path / "run" / "result.json").write_text(json.dumps(result))
    (tmp_path / "run" / "warnings.json").write_text('["2 images are odd."]')
    words = read(write_report(tmp_path / "run")).words
    assert "What to know about these runs" in words
    assert f"{ARMS[0]}: 100% of the anchors had no negative in the last records" in words
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
        record["false_negatives"] = None
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
    with pytest.raises(ValueError, match=r"report: .*comparison.json is damaged"):
        write_report(tmp_path)
    (tmp_path / "comparison.json").write_text('{"rows": []}')
    with pytest.raises(ValueError, match="report needs a comparison with rows and values"):
        write_report(tmp_path)


@pytest.mark.parametrize("channels", [1, 3])
def test_thumbnails_hold_every_pixel(channels: int) -> None:
    image = pytest.importorskip("PIL.Image", reason="pictures need the extra report")
    pixels = torch.randint(0, 256, (channels, 5, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data = base64.b64decode(thumbnail(pixels).partition("base64,")[2])
    read = np.asarray(image.open(BytesIO(data)))
    assert (read.reshape(5, 7, channels) == pixels.permute(1, 2, 0).numpy()).all()


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
    places = sorted(float(y) for y in re.findall(r'class="end" x="[\d.]+" y="([\d.]+)"', chart))
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


def test_the_same_arm_of_two_comparisons_is_told_apart(tmp_path: Path) -> None:
    for name in ("monday", "tuesday"):
        make_comparison(tmp_path / name, ARMS[:2])
    lines = read(write_report([tmp_path / "monday", tmp_path / "tuesday"])).cells["results"][1:]
    assert [line[0].split(" in ")[-1] for line in lines] == ["monday", "monday", "tuesday", "tuesday"]


def test_paths_that_are_no_runs_are_named(tmp_path: Path) -> None:
    make_run(tmp_path / "run", ARMS[0], 0, make_data(tmp_path))
    with pytest.raises(ValueError, match=r"got .*nowhere, which is not there"):
        write_report([tmp_path / "run", tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="paths that differ"):
        write_report([tmp_path / "run", tmp_path / "." / "run"])
    with pytest.raises(ValueError, match="at least one run"):
        write_report([])


# Points of issue 6


def test_point_8_copies_of_one_seed_count_once(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    make_run(tmp_path / "one", ARMS[0], 0, data, accuracy=0.8)
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    make_run(tmp_path / "two", ARMS[0], 1, data, accuracy=0.9)
    page = read(write_report([tmp_path / name for name in ("one", "copy", "two")], tmp_path / "page.html"))
    head, line = page.cells["results"]
    assert line[head.index("10-NN accuracy of every seed, %")].split() == ["80.00", "90.00"]
    assert "seed 0 is there 2 times (one, copy); it counts once." in page.words


def test_point_8_copies_in_a_stopped_comparison_count_once(tmp_path: Path) -> None:
    make_comparison(tmp_path, ARMS[:2])
    (tmp_path / "comparison.json").unlink()
    shutil.copytree(tmp_path / "runs" / "arm0-seed1", tmp_path / "runs" / "arm0-seed1copy")
    head, first, _ = read(write_report(tmp_path)).cells["results"]
    assert len(first[head.index("10-NN accuracy of every seed, %")].split()) == 3


def retrain(run: Path, **encoder: Any) -> None:
    config = json.loads((run / "config.json").read_text())
    config["trained"]["encoder"] |= encoder
    (run / "config.json").write_text(json.dumps(config))


def test_point_9_two_networks_called_auto_are_not_one(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    for name in ("small", "large"):
        make_run(tmp_path / name, ARMS[0], 0, data)
    retrain(tmp_path / "large", name="resnet18", parameters=11_000_000, initial_weights="other")
    page = read(write_report([tmp_path / "small", tmp_path / "large"], tmp_path / "page.html"))
    assert len(page.cells["results"]) == 3, "two arms"
    assert "began with the same weights" not in page.words
    assert "encoder differs: auto of 128 parameters, resnet18 of 11000000 parameters." in page.words


@pytest.mark.parametrize("weights", ["other", None])
def test_point_9_weights_are_the_same_by_their_digests(weights: str | None, tmp_path: Path) -> None:
    """Options say that both are alike; one began elsewhere, or nobody knows where."""
    make_comparison(tmp_path, ARMS[:2])
    assert "began with the same weights" in read(write_report(tmp_path)).words
    retrain(tmp_path / "runs" / "arm1-seed2", initial_weights=weights)
    assert "began with the same weights" not in read(write_report(tmp_path)).words


@pytest.mark.parametrize(("arm", "kind"), [("supcon(temperature=0.1)", "positive"), (ARMS[0], "false")])
def test_point_11_positives_of_an_arm_with_labels_are_not_framed_as_false(arm: str, kind: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run", arm, 0, make_data(tmp_path))
    page = read(write_report(tmp_path / "run"))
    kinds = {(one["class"] or "").split()[0] for tag, one in page.tags if tag == "img"}
    assert kinds == {"shown", "true", kind}
    assert ("false negative" in json.dumps([one["alt"] for tag, one in page.tags if tag == "img"])) == (kind == "false")


def test_point_11_the_sentence_under_the_pictures_follows_the_numbers(tmp_path: Path) -> None:
    make_run(tmp_path / "run", ARMS[0], 0, make_data(tmp_path))
    labels = torch.arange(NUM_TEST) % 4
    x = torch.randn(NUM_TEST, 16, generator=torch.Generator().manual_seed(3))  # features that know no classes
    np.savez(tmp_path / "run" / "embeddings.npz", train_x=x, train_y=labels, test_x=x, test_y=labels)
    words = " ".join(read(write_report(tmp_path / "run")).words.split())
    assert "So the hardest negatives are not clearly false more often than random ones." in words


EVIL = "<script>alert('x')</script><img src=x onerror=y>"


def places(value: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every part of a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [before, *(place for key, one in inside for place in places(one, (*before, key)))]


def with_value(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[place[0]] = with_value(value[place[0]], place[1:], new)
    return copy


def without_pictures(path: Path) -> None:
    make_comparison(path, ARMS[:2], seeds=2)
    for file in path.glob("runs/*/embeddings.npz"):
        file.unlink()


FILES = ("comparison.json", "runs/arm0-seed0/config.json", "runs/arm0-seed0/result.json")


@pytest.mark.parametrize("name", FILES)
def test_point_21_every_field_is_escaped_or_refused(name: str, tmp_path: Path) -> None:
    without_pictures(tmp_path)
    whole, of, shown = json.loads((tmp_path / name).read_text()), (tmp_path / name).parent, 0
    for place in places(whole):
        (tmp_path / name).write_text(json.dumps(with_value(whole, place, EVIL)))
        try:
            text = write_report(of, tmp_path / "page.html").read_text()
        except FileError:
            continue
        assert "<script" not in text, place
        assert "<img src=x" not in text, place
        shown += "alert(" in text
    assert shown > 5 or "result" in name, "of a result only numbers are shown"


@pytest.mark.parametrize("name", [*FILES, "runs/arm0-seed0/metrics.jsonl"])
def test_point_21_malformed_runs_are_refused_by_name(name: str, tmp_path: Path) -> None:
    """Whatever stands where something else should be, there is a page or an error that names the file."""
    without_pictures(tmp_path)
    text = (tmp_path / name).read_text()
    whole = json.loads(text.splitlines()[0] if name.endswith("l") else text)
    odd = (None, True, -1, 10**400, 1e300, "x", [], {}, [[1]], {"a": {"b": []}})
    every = places(whole)
    random = np.random.default_rng(0)
    for _ in range(60):
        place, new = every[random.integers(len(every))], odd[random.integers(len(odd))]
        (tmp_path / name).write_text(json.dumps(with_value(whole, place, new)) + "\n")
        try:
            write_report(tmp_path, tmp_path / "page.html")
        except FileError as error:
            named = error.path.name
        else:
            named = Path(name).name
        assert named == Path(name).name, place


def test_point_21_the_policy_allows_no_forms_and_no_base(compared: Page) -> None:
    (policy,) = [one["content"] or "" for tag, one in compared.tags if tag == "meta" and "http-equiv" in one]
    assert {"default-src 'none'", "form-action 'none'", "base-uri 'none'"} <= set(policy.split("; "))


def test_point_21_control_characters_are_shown_as_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = make_comparison(tmp_path, ARMS[:2])
    summary["rows"][1]["arm"] = "clear\x1b[2J\u202escreen"
    (tmp_path / "comparison.json").write_text(json.dumps(summary))
    text = write_report(tmp_path).read_text()
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "clear\\x1b[2J" in text
    show_comparison(summary, Console(width=200, no_color=True))
    assert "\x1b" not in capsys.readouterr().out


def test_a_file_that_is_no_page_is_not_overwritten(tmp_path: Path) -> None:
    make_run(tmp_path / "run", ARMS[0], 0, make_data(tmp_path))
    config = tmp_path / "run" / "config.json"
    before = config.read_text()
    with pytest.raises(FileError, match="--overwrite"):
        write_report(tmp_path / "run", config)
    assert config.read_text() == before
    write_report(tmp_path / "run")
    write_report(tmp_path / "run")  # its own page it replaces


def test_the_table_is_there_as_csv(comparison: tuple[Path, dict[str, Any]], compared: Page) -> None:
    (link,) = [one["href"] or "" for tag, one in compared.tags if tag == "a"]
    head, *rows = csv.reader(StringIO(base64.b64decode(link.partition("base64,")[2]).decode()))
    for row, wanted in zip(rows, comparison[1]["rows"], strict=True):
        found = dict(zip(head, row, strict=True))
        assert found["arm"] == wanted["arm"]
        assert float(found["mean"]) == wanted["mean"]
        assert [float(found[f"knn of run {i}"]) for i in range(3)] == wanted["values"]


def test_arms_are_hidden_by_their_boxes_alone(compared: Page) -> None:
    boxes = [one["id"] for tag, one in compared.tags if tag == "input"]
    assert boxes == [f"show-{number}" for number in range(len(ARMS))]
    for number in range(len(ARMS)):
        tags = {tag for tag, one in compared.tags if f"arm-{number}" in (one.get("class") or "").split()}
        assert {"tr", "g", "figure"} <= tags, "in the tables, the charts and the histograms"


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
