"""What must be known before figures are believed: labels, collapse, warnings, missing accuracies."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hardneg.cli.tables import show_evaluation
from hardneg.comparing import compare
from hardneg.comparing import runs as comparison_runs
from hardneg.comparing.arms import parse_arm
from hardneg.comparing.cautions import cautions, differing_settings
from hardneg.comparing.memory import Machine, RunPlace
from hardneg.comparing.request import Comparison
from hardneg.comparing.runs import run_of
from hardneg.reporting import write_report
from hardneg.training.data.images import ImageData
from hardneg.training.loop.runs import Run, Warned
from hardneg.training.options import TrainOptions
from support.command import hardneg
from support.comparisons import Started, finish, nothing, result
from support.html_page import Page
from support.training_runs import short


def test_the_terminal_says_what_was_taken_and_who_knows_the_classes(
    data: str, started: Started, tmp_path: Path
) -> None:
    arms = ("--arm", "simclr()", "--arm", "simclr(negatives='OtherLabel()')", "--arm", "supcon()", "--arm", "hcl()")
    common = ("--data", data, "--batch-size", "32", "--tune", "temperature=0.5,0.25", "--out", str(tmp_path))
    done = hardneg("compare", *arms, *common)
    assert done.exit_code == 0, done.output
    taken, sees = "tuned to temperature=0.25", "sees the labels of the training images"
    for line in (
        f"A  simclr()  ({taken})",
        f"B  simclr(negatives='OtherLabel()')  ({taken}; {sees})",
        f"C  supcon()  ({taken}; {sees})",
        f"D  hcl()  ({taken})",
    ):
        assert line in done.output
    assert "corrected for the 4 differences" in done.output, "the second with labels against the first"
    assert "--tune" not in done.output, "what was tuned need not be tuned"
    facts = json.loads((tmp_path / "comparison.json").read_text())
    assert [row["uses_labels"] for row in facts["rows"]] == [False, True, True, False]
    assert (facts["notes"], facts["unlike"]) == ([], [])


def test_the_terminal_names_the_validation_split(data: str, started: Started, tmp_path: Path) -> None:
    common = ("--arm", "simclr()", "--arm", "hcl()", "--data", data, "--batch-size", "32")
    for split, reported in (("test", False), ("validation", True)):
        done = hardneg("compare", *common, "--option", f"evaluate_on={split}", "--out", str(tmp_path / split))
        assert done.exit_code == 0, done.output
        assert ("5-NN accuracy on the validation split, %" in done.output) == reported


def test_what_differs_beside_the_negatives_is_reported(data: str, started: Started, tmp_path: Path) -> None:
    arms = ("simclr()", "hcl(beta=1)", "simclr(dim=16, learning_rate=0.1)")
    compared = ("--option", "dim=32", "--data", data, "--batch-size", "32", "--out", str(tmp_path))
    done = hardneg("compare", *(word for arm in arms for word in ("--arm", arm)), *compared)
    assert done.exit_code == 0, done.output
    assert "More than the negatives differs: dim differs: 32, 16." in done.output
    assert "More than the negatives differs: learning_rate differs: 0.001, 0.1." in done.output
    facts = json.loads((tmp_path / "comparison.json").read_text())
    assert facts["unlike"] == ["dim differs: 32, 16.", "learning_rate differs: 0.001, 0.1."]


@pytest.mark.parametrize(("kind", "expected"), [("texts", ["1e-06", "0"]), ("images", None)])
def test_weight_decay_is_compared_as_trained(kind: str, expected: list[str] | None) -> None:
    """A run of an older version had 1e-6 for all data, and no record of it."""
    record = {"encoder": {}, "data": {}}
    decay = {"texts": 0.0, "images": 1e-6}[kind]
    found = differing_settings(
        [{"weight_decay": 1e-6}, {"weight_decay": None}], [record, record | {"weight_decay": decay}]
    )
    assert found.get("weight_decay") == expected


def test_a_comparison_that_an_older_version_began_reports_its_weight_decay(
    data: str, runs_here: None, tmp_path: Path
) -> None:
    comparison = Comparison(("simclr()", "hcl()"), 2, short(data, epochs=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageData, "weight_decay", 1e-3)  # as of another version
        compare(comparison, tmp_path, jobs=1, show=nothing)
    shutil.rmtree(run_of(parse_arm("hcl()").with_defaults(comparison.common), 1, tmp_path).path)
    assert compare(comparison, tmp_path, jobs=1, show=nothing)["unlike"] == ["weight_decay differs: 0.001, 1e-06."]


LABELS = [
    ("simclr()", False),
    ("supcon()", True),
    ("supervised(negatives='Uniform()')", True),
    ("simclr(negatives='OtherLabel()')", True),
    ("moco(negatives='OtherLabel() * Tilt(1.0)')", True),
    ("sogclr(negatives='Tilt(1.0) * OtherLabel()')", True),
    ("moco(negatives='Ring(0.0, 0.5)')", False),
    ("emc2()", False),
]


@pytest.mark.parametrize(("arm", "uses_labels"), LABELS)
def test_which_arms_use_labels(arm: str, uses_labels: bool) -> None:
    assert parse_arm(arm).uses_labels == uses_labels


@pytest.mark.parametrize(
    ("labels", "test_labels", "reported"),
    [
        (None, None, "There is no accuracy: its training images have no labels."),
        (0, 0, "There is no accuracy: its training images are of one class."),
        (4, None, "There is no accuracy: the images to evaluate it on have no labels."),
    ],
)
def test_the_terminal_and_the_page_say_why_there_is_no_accuracy(
    labels: int | None, test_labels: int | None, reported: str, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate", reason="training needs the extra train")
    arrays: dict[str, Any] = {"images": np.random.default_rng(0).integers(0, 256, (48, 8, 8), dtype=np.uint8)}
    arrays["test_images"] = arrays["images"][:16]
    if labels is not None:
        arrays["labels"] = np.arange(48) % max(1, labels)
    if test_labels is not None:
        arrays["test_labels"] = np.zeros(16, int)
    np.savez(tmp_path / "data.npz", **arrays)
    options = ("--data", f"npz:{tmp_path / 'data.npz'}", "--epochs", "1", "--batch-size", "16", "--device", "cpu")
    done = hardneg("train", "simclr", *options, "--out", str(tmp_path / "run"))
    assert done.exit_code == 0, done.output
    assert reported in done.output
    page = Page(write_report(tmp_path / "run").read_text()).words
    assert reported in page
    assert "retrieval of the second view" in page
    assert "retrieval of the second view" in done.output
    result = Run(tmp_path / "run").result()
    assert result is not None
    assert 0.0 <= result["retrieval"] <= 1.0
    assert result["before_training"]["retrieval"] <= 1.0


def test_one_neighbour_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    show_evaluation({"knn": 0.75, "1nn": 0.75, "linear": 0.5, "k": 1, "steps": 3})
    reported = capsys.readouterr().out
    assert reported.count("1-NN accuracy") == 1
    show_evaluation({"knn": 0.75, "1nn": 0.75, "k": 5})
    assert [name in capsys.readouterr().out for name in ("5-NN accuracy",)] == [True]


def test_negatives_that_were_not_there_are_reported(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bare(recipe: str, options: TrainOptions, run: Run, environ: dict[str, str], **how: bool) -> dict[str, Any]:
        found = result(0.5, 100)
        found["final"] |= {"empty": 0.96 if "Ring" in options.negatives else 0.1, "clamped": 2.0 * options.tau_plus}
        if "Ring" in options.negatives:
            found["final"] |= {"hardness": None, "false_negatives": None}
        return found

    monkeypatch.setattr(comparison_runs, "in_a_process", bare)
    arms = ("simclr()", "simclr(negatives='Ring(0.4, 0.5)')", "debiased(tau_plus=0.35)", "debiased(tau_plus=0.2)")
    common = ("--data", data, "--batch-size", "32", "--out", str(tmp_path))
    done = hardneg("compare", *(word for arm in arms for word in ("--arm", arm)), *common)
    assert done.exit_code == 0, done.output
    empty, clamped = json.loads((tmp_path / "comparison.json").read_text())["cautions"]
    assert empty.startswith("B: 96% of the anchors had no negative in the last records")
    assert clamped.startswith("C: 70% of its pairs were clamped")
    page = " ".join(Page((tmp_path / "report.html").read_text()).words.split())
    for reported in (empty, clamped):
        assert reported in done.output
        assert reported in page


@pytest.mark.parametrize(("denominator", "number"), [("own", 1), ("all", 0)])
def test_supcon_needs_no_negatives(denominator: str, number: int) -> None:
    options = parse_arm(f"supervised(positives_in_denominator={denominator!r})").complete().as_dict()
    assert len(cautions("it", options, [{"final": {"empty": 1.0, "clamped": None}}])) == number


def test_what_the_figures_say_is_not_repeated_by_the_warnings() -> None:
    """A loss warns by its first batches, the caution is of the last one; what only the former saw is still reported."""
    no_negative, at_floor = (
        "97% of the anchors have no negative under Ring(inner=0.5, outer=0.1) and a loss of 0.",
        "92% of the debiased terms are at their floor, where negatives have no gradient.",
    )
    last = [{"final": {"empty": 0.9, "clamped": 0.1}}]
    kinds = [Warned("empty", no_negative), Warned("clamped", at_floor), Warned("clamped", at_floor.replace("92", "93"))]
    (figures, warned) = cautions("it", {}, last, kinds)
    assert figures.startswith("it: 90% of the anchors had no negative")
    assert warned == f"it: {at_floor}"


def test_warnings_of_the_runs_are_reported_once_for_each_arm(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a run leaves beside its files, also when the comparison goes on with runs that are there."""

    def process(command: list[str], **how: Any) -> Any:
        if command[0] == "git":
            return subprocess.CompletedProcess(command, 0, "", "")
        path, options = command[-2:]
        run, wanted = Run(Path(path)), json.loads(options)
        finish(run, result(0.5, 100))
        run.warn(f"{wanted['seed'] + 7} classes are unseen.", "unseen")
        if wanted["negatives"] == "Tilt(1.0)":
            run.warn(f"{wanted['seed'] + 1} images are odd.", "odd")
        return subprocess.CompletedProcess(command, 0, "", "")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", process)
        patch.setattr(comparison_runs, "this_machine", lambda jobs, on_gpu: Machine(1, 1, [RunPlace()]))
        summary = compare(Comparison(("simclr()", "hcl()"), 3, short(data)), tmp_path, show=nothing)
    assert summary["cautions"] == ["All arms: 7 classes are unseen.", "B: 1 images are odd."]
    again = compare(Comparison(("hcl()", "simclr()"), 3, short(data)), tmp_path, show=nothing)
    assert again["cautions"] == ["All arms: 7 classes are unseen.", "A: 1 images are odd."]


def test_an_arm_with_labels_is_not_the_answer(data: str, started: Started, tmp_path: Path) -> None:
    arms = ("simclr()", "supcon(temperature=0.2)", "simclr(temperature=0.2)", "hscl(temperature=0.4)")
    common = ("--data", data, "--batch-size", "32", "--out", str(tmp_path))
    done = hardneg("compare", *(word for arm in arms for word in ("--arm", arm)), *common)
    assert done.exit_code == 0, done.output
    facts = json.loads((tmp_path / "comparison.json").read_text())
    kinds = {(one["arm"], one["against"]): one["kind"] for one in facts["verdicts"]}
    assert kinds[arms[1], arms[0]] == kinds[arms[3], arms[0]] == "labels"
    assert kinds[arms[2], arms[0]] == "first"
    assert kinds[arms[3], arms[1]] == "peers", "arms with labels against each other"
    better = [line for line in facts["answer"] if "ignificantly better" in line]
    assert len(better) == 1
    assert "C (" in better[0]
    assert "B (" not in better[0], "though it is the best of all"
    assert "Reported separately, as only one of the two uses labels: B and D against A." in facts["answer"]


def test_the_temperature_control_is_in_terminal_and_json(data: str, started: Started, tmp_path: Path) -> None:
    arms = ("simclr(temperature=0.9)", "simclr(temperature=0.25)", "hcl(beta=1)")
    common = ("--data", data, "--batch-size", "32", "--out", str(tmp_path))
    done = hardneg("compare", *(word for arm in arms for word in ("--arm", arm)), *common)
    facts = json.loads((tmp_path / "comparison.json").read_text())
    (control,) = [one for one in facts["verdicts"] if one["kind"] == "temperature"]
    assert (control["arm"], control["against"]) == (arms[2], arms[1])
    assert "Both repel alike (effective temperature 0.25" in control["sentence"]
    but = "But C is not significantly better than B, which has its effective temperature"
    output = " ".join(done.output.split())
    assert control["sentence"] in output
    assert but in output
    assert any(one.startswith(but) for one in facts["answer"])


def test_collapsed_runs_are_marked(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def collapse(recipe: str, options: TrainOptions, run: Run, environ: dict[str, str], **how: bool) -> dict[str, Any]:
        last = {"hardness": 0.3, "false_negatives": 0.2, "clamped": 0.0}
        return result(0.5, 100) | {"collapsed": options.tau_plus > 0 and options.seed > 0, "final": last}

    monkeypatch.setattr(comparison_runs, "in_a_process", collapse)
    common = ("--data", data, "--batch-size", "32", "--out", str(tmp_path))
    done = hardneg("compare", "--arm", "simclr()", "--arm", "hcl()", *common)
    assert "B  hcl()  (collapsed in 2 of 3 runs)" in done.output
    facts = json.loads((tmp_path / "comparison.json").read_text())
    assert [row["collapsed"] for row in facts["rows"]] == [0, 2]
    assert [row["hardness"] for row in facts["rows"]] == [0.3, 0.3], "the mean over the last records"
    assert facts["cautions"][0].startswith("B: 2 of 3 runs collapsed")
    assert "collapsed in 2 of 3 runs" in " ".join(Page((tmp_path / "report.html").read_text()).words.split())
