"""The page of a comparison: its figures are those of the files, and its sentences are true."""

from __future__ import annotations

import base64
import csv
import json
import sys
import types
from importlib.machinery import ModuleSpec
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hardneg.core.errors import HardnegWarning
from hardneg.io.embeddings import pack_bits
from hardneg.io.outputs import sealed_page
from hardneg.reporting import charts as charts_module
from hardneg.reporting import embeddings as embeddings_module
from hardneg.reporting import write_report
from hardneg.reporting.charts import separation
from hardneg.reporting.embeddings import NUM_EDGES, NUM_MAP_ANCHORS
from hardneg.training.loop.records import text_of
from hardneg.training.loop.runs import Run
from support.html_page import Page
from support.reports import ACCURACY, ARMS, NUM_TEST, make_comparison, make_data, make_run, read


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
        (verdict,) = [
            one for one in comparison[1]["verdicts"] if one["arm"] == row["arm"] and one["against"] == ARMS[0]
        ]
        beyond = verdict["standing"] in ("above", "below")
        points = f"{100 * row['difference']:+.2f} ± {100 * row['difference_half_width']:.2f}"
        assert cell["against the first, points"] == f"{points} {'' if beyond else 'not '}significant"


def test_moments_and_seconds_of_a_run_are_drawn(tmp_path: Path) -> None:
    """ProSampler, Fig. 7 and Table 11; EMC2, Fig. 1: the monitor at 2 and 5 seconds."""
    result = make_run(tmp_path / "run", ARMS[0], 0, make_data(tmp_path))
    parts = {"training": 3.0, "views": 1.25, "sampling": 0.5, "graph": 0.25, "encoding": 0.0, "recording": 0.0}
    changed = result | {"epoch_seconds": [2.0, 3.0], "seconds_of": parts}
    (tmp_path / "run" / "result.json").write_text(json.dumps(changed))
    records = Run(tmp_path / "run").metrics()
    pairs = {"positives": [0, 0, 1, 3], "negatives": [1, 6, 1, 0], "false_negatives": [0, 0, 1, 0]}
    records += [{"step": 10 * (1 + i), "epoch": i, "monitor": 0.5 + 0.25 * i} for i in range(2)]
    records.append({"step": 20, "epoch": 1, "similarities": pairs, "global_loss": 5.5})
    (tmp_path / "run" / "metrics.jsonl").write_text(text_of(records))
    page = read(write_report(tmp_path / "run"))
    head, line = page.cells["seconds"]
    assert dict(zip(head, line, strict=True)) == {"arm": "this run"} | {k: f"{v:.3g}" for k, v in parts.items()}
    html = (tmp_path / "run" / "report.html").read_text()
    assert "second 2: 50 %" in html
    assert "second 5: 75 %" in html
    means = "positives have mean similarity 0.625, negatives -0.250"
    assert means in html
    assert "false negatives: mean similarity 0.250" in html


def test_the_other_measures_are_means_over_the_seeds(compared: Page) -> None:
    head, *lines = compared.cells["measures"]
    assert head == ["arm", "10-NN accuracy, %", "1-NN accuracy, %", "linear probe, %", "alignment", "uniformity"]
    for arm, line in zip(ARMS, lines, strict=True):
        mean = 100 * float(np.mean(ACCURACY[arm]))
        assert line[1:] == [f"{mean:.2f}", f"{mean + 1:.2f}", f"{mean + 2:.2f}", "0.25", "-1.50"]


def test_the_answer_has_the_sentences_of_the_json(comparison: tuple[Path, dict[str, Any]], compared: Page) -> None:
    words = " ".join(compared.words.split())
    for reported in [
        comparison[1]["headline"],
        *comparison[1]["answer"],
        *comparison[1]["sentences"],
        *comparison[1]["notes"],
    ]:
        assert reported in words
    assert words.count(comparison[1]["answer"][0]) == 1, "the answer stands once"
    assert len(comparison[1]["notes"]) == 1, "only the arm without an untilted control is noted"
    assert any("Both repel alike" in one for one in comparison[1]["sentences"])


USES_LABELS = "(sees the labels of the training images)"


@pytest.mark.parametrize(
    ("arm", "marked"),
    [
        ("supcon(temperature=0.1)", True),
        ("simclr(negatives='OtherLabel()')", True),
        ("moco(negatives='OtherLabel() * Tilt(1.0)')", True),
        ("sogclr(negatives='Tilt(1.0) * OtherLabel()')", True),
        ("moco(negatives='Ring(0.0, 0.5)')", False),
    ],
)
def test_arms_that_use_labels_are_marked(arm: str, marked: bool, tmp_path: Path) -> None:
    make_run(tmp_path / "run", arm, 0, make_data(tmp_path))
    assert (USES_LABELS in read(write_report(tmp_path / "run")).words) == marked


def test_arms_that_use_labels_are_known_without_the_runs(tmp_path: Path) -> None:
    summary = make_comparison(tmp_path, ARMS[:2])
    summary["rows"][1] |= {"arm": "from_another_version()", "uses_labels": True}
    (tmp_path / "comparison.json").write_text(json.dumps(summary))
    words = " ".join(read(write_report(tmp_path)).words.split())
    assert f"B from_another_version() {USES_LABELS}" in words
    assert words.count(USES_LABELS) == 1


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
def test_only_what_is_equal_is_called_the_same(
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
    for reported in unlike:
        assert reported in words


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


def test_the_four_losses_of_hscl_are_drawn_where_a_run_has_them(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "hscl()", 0, make_data(tmp_path))
    records = Run(tmp_path / "run").metrics()
    for i, record in enumerate(records):
        record |= {"loss_ucl": 4.2 - 0.1 * i, "loss_scl": 3.8 - 0.1 * i, "loss_h_ucl": 5.0, "loss_h_scl": 3.9 - 0.1 * i}
        record["assumption"] = 0.9 + 0.02 * i
    (tmp_path / "run" / "metrics.jsonl").write_text(text_of(records))
    page = read(write_report(tmp_path / "run"))
    names = [attributes.get("aria-label") or "" for tag, attributes in page.tags if tag == "svg"]
    drawn = [name.partition(" over training")[0] for name in names if "over training" in name]
    assert {"H-SCL and its bound", "SCL and UCL", "Assumption 1 of H-SCL"} <= set(drawn)
    assert len(page.with_class("dashed")) == 2, "H-UCL beside H-SCL, UCL beside SCL"
    assert any("ends at 98 %" in name for name in names)


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
    monkeypatch.setattr(charts_module, "MAX_ITEMS", 20)
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
    with pytest.warns(HardnegWarning, match=r"arm1-seed0.embeddings\.npz.* damaged"):
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
    assert "90 % in A and 90 % in C are of its own class (false negatives, marked in red); among" in words
    assert "random ones 23 %. So the hardest negatives are false more often than random ones." in words


@pytest.mark.parametrize("split", ["test", "validation"])
def test_the_split_that_is_evaluated_is_named(split: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run", ARMS[0], 0, make_data(tmp_path), common={"evaluate_on": split})
    words = read(write_report(tmp_path / "run")).words
    assert f"each {split} image gets the class that its 10 nearest training images vote for" in words
    assert f"Similarity of pairs of {split} images" in words
    assert ("The validation images are training images that were held out" in words) == (split == "validation")
    other = {"test": "validation", "validation": "test"}[split]
    assert f"{other} image gets" not in words
    assert f"pairs of {other} images" not in words


def test_the_page_names_which_arms_are_shown(compared: Page, tmp_path: Path) -> None:
    assert "Shown are A, the first arm (seed 0) and C, the best of the others (seed 0)." in compared.words
    make_run(tmp_path / "run", ARMS[0], 0, make_data(tmp_path))
    assert "the first arm" not in read(write_report(tmp_path / "run")).words


def test_arms_that_are_left_out_for_their_labels_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ACCURACY, "supcon()", [0.95, 0.96, 0.97])
    make_comparison(tmp_path, (*ARMS[:2], "supcon()"))
    words = read(write_report(tmp_path)).words
    assert "B, the best of the others (seed 0). Arms that use labels are left out: C." in words


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
    assert "exactly like the temperature divided by (1 + beta) if the gradient" in compared.words


def test_a_difference_that_rounds_to_nothing_has_no_minus(tmp_path: Path) -> None:
    summary = make_comparison(tmp_path, ARMS[:2])
    summary["rows"][1]["difference"] = -1e-6
    (tmp_path / "comparison.json").write_text(json.dumps(summary))
    words = read(write_report(tmp_path)).words
    assert "+0.00 ±" in words
    assert "-0.00" not in words


def test_the_threads_of_the_runs_are_there(tmp_path: Path) -> None:
    summary = make_comparison(tmp_path, ARMS[:2]) | {"threads": 3}
    (tmp_path / "comparison.json").write_text(json.dumps(summary))
    assert ["threads of a run", "3"] in read(write_report(tmp_path)).cells["versions"]


@pytest.mark.parametrize(("arm", "kind"), [("supcon(temperature=0.1)", "positive"), (ARMS[0], "false")])
def test_positives_of_an_arm_with_labels_are_not_framed_as_false(arm: str, kind: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run", arm, 0, make_data(tmp_path))
    page = read(write_report(tmp_path / "run"))
    kinds = {(one["class"] or "").split()[0] for tag, one in page.tags if tag == "img"}
    assert kinds == {"shown", "true", kind}
    assert ("false negative" in json.dumps([one["alt"] for tag, one in page.tags if tag == "img"])) == (kind == "false")


def test_the_sentence_under_the_pictures_follows_the_numbers(tmp_path: Path) -> None:
    make_run(tmp_path / "run", ARMS[0], 0, make_data(tmp_path))
    labels = torch.arange(NUM_TEST) % 4
    x = torch.randn(NUM_TEST, 16, generator=torch.Generator().manual_seed(3))  # features that know no classes
    np.savez(tmp_path / "run" / "embeddings.npz", train_x=x, train_y=labels, test_x=x, test_y=labels)
    words = " ".join(read(write_report(tmp_path / "run")).words.split())
    assert "So the hardest negatives are not clearly false more often than random ones." in words


def test_an_audit_beside_the_report_is_linked(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run(run, ARMS[0], 0, make_data(tmp_path))
    (run / "audit.html").write_text("a page of someone else")
    assert "audit.html" not in write_report(run).read_text()
    (run / "audit.html").write_text(sealed_page("an audit"))
    assert ("a", {"href": "audit.html"}) in read(write_report(run)).tags


def test_the_table_is_there_as_csv(comparison: tuple[Path, dict[str, Any]], compared: Page) -> None:
    (link,) = [one["href"] or "" for tag, one in compared.tags if tag == "a" and "text/csv" in (one["href"] or "")]
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


def test_all_figures_are_there_as_json(comparison: tuple[Path, dict[str, Any]], compared: Page, tmp_path: Path) -> None:
    assert json_of(compared)["rows"][2]["values"] == comparison[1]["rows"][2]["values"]
    assert json_of(compared)["headline"] == comparison[1]["headline"]
    result = make_run(tmp_path / "run", ARMS[0], 0, make_data(tmp_path))
    found = json_of(read(write_report(tmp_path / "run")))
    assert found["runs"][0]["result"]["knn"] == result["knn"]
    assert found["runs"][0]["config"]["options"]["temperature"] == 0.5


def json_of(page: Page) -> dict[str, Any]:
    links = [one["href"] or "" for tag, one in page.tags if tag == "a"]
    (link,) = [one for one in links if one.startswith("data:application/json;")]
    return dict(json.loads(base64.b64decode(link.partition("base64,")[2])))


def test_the_headline_is_the_heading_and_the_contents_lead_to_sections(
    comparison: tuple[Path, dict[str, Any]], compared: Page
) -> None:
    text = (comparison[0] / "report.html").read_text()
    assert f"<h1>{comparison[1]['headline']}</h1>" in text
    links = [
        (one["href"] or "")[1:] for tag, one in compared.tags if tag == "a" and (one["href"] or "").startswith("#")
    ]
    sections = [one["id"] for tag, one in compared.tags if tag == "section"]
    assert links == sections
    assert len(links) == 8


def test_the_forest_plot_has_the_difference_and_both_intervals_of_each_verdict(
    comparison: tuple[Path, dict[str, Any]], compared: Page
) -> None:
    verdicts = comparison[1]["verdicts"]
    marks = [float((one["cx"] or "").rstrip("%")) for one in compared.with_class("mark")]
    values = [one["difference"] for one in verdicts]
    assert len(marks) == len(values) == 4
    slope, offset = np.polyfit(values, marks, 1)
    assert np.allclose(np.polyval([slope, offset], values), marks, atol=0.02), "the axis is linear"
    alone = [[float((one[end] or "").rstrip("%")) for end in ("x1", "x2")] for one in compared.with_class("alone")]
    for one, ends, mark in zip(verdicts, alone, marks, strict=True):
        assert ends[1] - mark == pytest.approx(slope * one["half_width"], abs=0.02)
        assert mark - ends[0] == pytest.approx(slope * one["half_width"], abs=0.02)
    is_open = ["open" in (one["class"] or "").split() for one in compared.with_class("mark")]
    assert is_open == [one["standing"] == "alike" for one in verdicts]
    (zero,) = {float((one["x1"] or "").rstrip("%")) for one in compared.with_class("zero")}
    assert zero == pytest.approx(offset, abs=0.02)


def test_a_verdict_is_the_corrected_one_and_not_that_of_the_interval(tmp_path: Path) -> None:
    summary = make_comparison(tmp_path, ARMS[:2])
    summary["rows"][1]["difference_half_width"] = 0.5 * summary["rows"][1]["difference"]
    summary["verdicts"][0] |= {"standing": "alike"}
    (tmp_path / "comparison.json").write_text(json.dumps(summary))
    head, _, line = read(write_report(tmp_path)).cells["results"]
    assert line[head.index("against the first, points")].endswith(" not significant")


def test_a_comparison_from_before_the_correction_has_a_page(tmp_path: Path) -> None:
    summary = make_comparison(tmp_path, ARMS[:2])
    del summary["headline"]
    for name in ("corrected_half_width", "p_value", "family", "letter", "against_letter"):
        del summary["verdicts"][0][name]
    (tmp_path / "comparison.json").write_text(json.dumps(summary))
    page = read(write_report(tmp_path))
    assert "<h1>Which negatives are best for data.npz?</h1>" in (tmp_path / "report.html").read_text()
    assert len(page.with_class("mark")) == 1


def test_the_accuracy_of_each_class_is_that_of_its_items(tmp_path: Path) -> None:
    labels = np.arange(NUM_TEST) % 4
    right = np.stack([(np.arange(NUM_TEST) + seed) % (3 + labels) != 0 for seed in range(2)])
    make_comparison(tmp_path, ARMS[:2], seeds=2)
    for seed in range(2):
        file = tmp_path / "runs" / f"arm1-seed{seed}" / "result.json"
        found = json.loads(file.read_text()) | {"correct": {"knn": pack_bits(right[seed])}}
        file.write_text(json.dumps(found))
    head, *rows = read(write_report(tmp_path)).cells["classes"]
    assert head == ["class", "images", "B"], "the runs of A have not recorded which items were right"
    for label, row in enumerate(rows):
        assert row == [str(label), "10", f"{100 * right[:, labels == label].mean():.1f}"]


def test_the_map_joins_anchors_with_their_nearest_items(tmp_path: Path) -> None:
    make_run(tmp_path / "run", ARMS[0], 0, make_data(tmp_path))
    page = read(write_report(tmp_path / "run"))
    anchors = [one for one in page.with_class("anchor") if "cx" in one]
    items = page.with_class("item")
    assert (len(anchors), len(anchors) + len(items)) == (NUM_MAP_ANCHORS, NUM_TEST)
    marks = [(one["cx"], one["cy"]) for one in anchors]
    edges = page.with_class("edge")
    assert len(edges) == NUM_MAP_ANCHORS * NUM_EDGES
    assert {(one["x1"], one["y1"]) for one in edges} == set(marks)
    assert all("false" in (one["class"] or "").split() for one in edges), "the classes are tight clusters"
    assert f"{len(edges)} of {len(edges)} lines lead to a false negative" in page.words
    words = read(write_report(tmp_path / "run")).words
    assert words == page.words, "the same map in every report"


def test_negatives_of_an_arm_with_labels_are_of_other_classes_on_the_map(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "supcon()", 0, make_data(tmp_path))
    page = read(write_report(tmp_path / "run"))
    assert len(page.with_class("edge")) == NUM_MAP_ANCHORS * NUM_EDGES
    assert not any("false" in (one["class"] or "").split() for one in page.with_class("edge"))
    assert "Training uses labels, so negatives are of other classes." in page.words


def test_principal_components_are_those_of_numpy() -> None:
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(1)) * torch.tensor([5.0, 1, 1, 3, 1, 1])
    plane, about = embeddings_module._pca(x)
    centred = x.double().numpy() - x.double().numpy().mean(0)
    _, values, vectors = np.linalg.svd(centred, full_matrices=False)
    assert np.allclose(np.abs(plane.numpy()), np.abs(centred @ vectors[:2].T), atol=1e-8)
    assert (
        about == f"Both axes together show {100 * (values[:2] ** 2).sum() / (values**2).sum():.0f} % of the variance."
    )


def test_umap_draws_the_map_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    class Reducer:
        def __init__(self, **options: Any) -> None:
            asked.append(options)

        def fit_transform(self, x: Any) -> Any:
            return x[:, :2]

    installed = types.ModuleType("umap")
    installed.UMAP = Reducer  # type: ignore[attr-defined]
    installed.__spec__ = ModuleSpec("umap", None)
    monkeypatch.setitem(sys.modules, "umap", installed)
    make_run(tmp_path / "run", ARMS[0], 0, make_data(tmp_path))
    page = read(write_report(tmp_path / "run"))
    assert "in two dimensions (UMAP)" in " ".join(page.words.split())
    assert asked[0]["random_state"] == 0
    assert len(page.with_class("edge")) == NUM_MAP_ANCHORS * NUM_EDGES
