"""What a comparison asks of its arms before it trains them, how it tunes them, and what its statistics are."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from hardneg.cli.app import app
from hardneg.cli.tables import show_comparison, show_evaluation
from hardneg.comparing import compare
from hardneg.comparing import runs as comparison_runs
from hardneg.comparing.arms import parse_arm
from hardneg.comparing.cautions import cautions
from hardneg.comparing.checks import check_arms
from hardneg.comparing.comparing import AllDiverged
from hardneg.comparing.memory import ChildPipes, Machine, NotBegun, Place, num_cores
from hardneg.comparing.progress import Watcher
from hardneg.comparing.request import Comparison
from hardneg.comparing.runs import Diverged, How, RunFailed, folder_of, in_a_process, run_all
from hardneg.comparing.statistics import Outcomes, detectable_errors, difference_of, mean_of
from hardneg.comparing.verdict import answer, chance_of_one, rows_of, sentences, temperature_notes, verdicts_of
from hardneg.core.errors import ArgumentError, DataChanged, HardnegWarning, UnknownName, forget_warnings
from hardneg.io.embeddings import pack_bits
from hardneg.io.files import write_json
from hardneg.reporting import write_report
from hardneg.reporting.reading import wanted_arm
from hardneg.training.options import RECIPES, TrainOptions
from hardneg.training.runs import Run, Warned
from hardneg.training.setup import splits
from hardneg.training.trained import data_record
from support.html_page import Page
from support.training_runs import few_digits, short

Started = list[tuple[str, TrainOptions, Path]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return few_digits(tmp_path_factory.mktemp("comparison") / "digits.npz", 96)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """The runs that are asked for; each ends at once, the better the closer its temperature is to 0.2."""
    seen: Started = []

    def pretend(recipe: str, options: TrainOptions, run: Run, environ: dict[str, str], **how: bool) -> dict[str, Any]:
        seen.append((recipe, options, run.path))
        found = {"false_negatives": 0.1, "hardness": 0.2, "clamped": 0.0}
        accuracy = round(0.9 - abs(options.temperature - 0.2) - 0.01 * options.seed, 3)
        return {"knn": accuracy, "num_test": 100, "final": found, "steps": 3, "seconds": 1.0, "k": 5}

    monkeypatch.setattr(comparison_runs, "in_a_process", pretend)
    return seen


def hardneg(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "250", "NO_COLOR": "1"})


def finish(run: Run, figures: dict[str, Any]) -> None:
    """As a process of a run does."""
    write_json(run.config_path, {"recipe": "simclr", "options": {}})
    run.finish(figures)


def nothing(line: str) -> None:
    """Shows no progress."""


# Options: what an arm writes wins over --option, and that over the paper's values.


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
    for options in (parse_arm(arm).complete(**common), parse_arm(arm).under(common).complete()):
        assert {name: getattr(options, name) for name in expected} == expected


def test_the_effective_temperature_knows_the_common_options() -> None:
    arms = [parse_arm(text).under({"temperature": 0.1}) for text in ("simclr()", "hcl()", "hcl(temperature=0.5)")]
    assert [arm.effective_temperature for arm in arms] == [0.1, 0.05, 0.25]
    facts = {"comparison": {"common": {"temperature": 0.1, "negatives": "Tilt(3.0)"}}}
    read = wanted_arm("simclr()", facts)
    assert read is not None
    assert read.effective_temperature == 0.025


# Files


@pytest.mark.parametrize(
    "tune",
    ["temperature=0.25,1e-1", "'temperature=0.25, 0.1'", "{temperature: [0.25, 1e-1]}", "\n  temperature: [0.25, 0.1]"],
)
def test_a_file_may_tune_in_its_own_way(tune: str, data: str, started: Started, tmp_path: Path) -> None:
    file = tmp_path / "comparison.yaml"
    file.write_text(f"arms: [simclr(), hcl()]\ndata: {data}\nbatch-size: 32\ntune: {tune}\nout: {tmp_path / 'out'}\n")
    done = hardneg("compare", "--config", str(file))
    assert done.exit_code == 0, done.output
    facts = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert facts["comparison"]["tune"] == ["temperature", [0.25, 0.1]]
    assert facts["tuned"] == {"simclr()": 0.25, "hcl()": 0.25}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("arms: [1, 2]", "a list of arms, each as text, got arm=[1, 2] in"),
        ("arms: simclr()", "a list of arms, each as text, got arm='simclr()' in"),
        ("arms:", "a list of arms, each as text, got arm=None in"),
        ("out: 5", "the path of a directory, got out=5 in"),
        ("out:", "the path of a directory, got out=None in"),
        ("seeds: two", "a whole number, got seeds='two' in"),
        ("seeds: true", "a whole number, got seeds=True in"),
        ("jobs: 0", "a whole number of at least 1, got jobs=0 in"),
        ("metric: 3", "text, got metric=3 in"),
        ("tune: [0.1]", "like {temperature: [0.1, 0.2]}, got tune=[0.1] in"),
        ("tune: 3", "like {temperature: [0.1, 0.2]}, got tune=3 in"),
        ("tune: {temperature: 0.1}", "like {temperature: [0.1, 0.2]}, got tune={'temperature': 0.1} in"),
        ("tune: {temperature: []}", "like {temperature: [0.1, 0.2]}, got tune={'temperature': []} in"),
        ("tune: {dim: [8], temperature: [0.1]}", "like {temperature: [0.1, 0.2]}, got tune={'dim'"),
        ("tune: {temperature: [warm]}", "--tune like temperature=0.1,0.2, got tune='temperature=warm'"),
        ("tune: {temperature: [true]}", "--tune like temperature=0.1,0.2, got tune='temperature=True'"),
        ("data: 5", "--data to be text, got data=5"),
        ("epochs: many", "--epochs to be a whole number, got epochs='many'"),
    ],
)
def test_wrong_kinds_in_a_file_are_named(line: str, said: str, started: Started, tmp_path: Path) -> None:
    file, name = tmp_path / "comparison.yaml", line.partition(":")[0]
    usual = {"arms": "[simclr(), hcl()]", "out": tmp_path / "out"}
    lines = [f"{key}: {value}" for key, value in usual.items() if key != name]
    file.write_text("\n".join([*lines, line]))
    done = hardneg("compare", "--config", str(file))
    assert (done.exit_code, started) == (2, []), done.output
    assert said in done.stderr, done.stderr


# Refused before anything is trained


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--arm", "hcl(seed=7)"), "the same seed for every arm, got seed=7 in 'hcl(seed=7)'"),
        (("--arm", "simclr(seed=7)"), "the same seed for every arm, got seed=7 in 'simclr(seed=7)'"),
        (("--arm", "simclr(epochs=3)"), "compare needs the same epochs for every arm"),
        (("--arm", "moco(batch_size=8)"), "got batch_size=8 in 'moco(batch_size=8)'"),
        (("--arm", "simclr(evaluate_on='validation')"), "the same evaluate_on for every arm"),
        (("--arm", "simclr(data='digits')"), "the same data for every arm"),
        (("--arm", "hcl()", "--tune", "epochs=1,3"), "arms may differ in, not one of seed, data"),
        (("--arm", "hcl()", "--tune", "temperature=0.5,-1"), "--temperature of at least 0.0001, got temperature=-1.0"),
        (("--arm", "hcl()", "--tune", "dim=8.5"), "--dim to be a whole number, got dim=8.5"),
        (("--arm", "hcl()", "--option", "seed=5"), "compare needs --seeds, how many, and no seed of its own"),
        (("--arm", "hcl()", "--option", "encoder=resnet19"), "an encoder among tiny, resnet18"),
        (("--arm", "hcl()", "--option", "batches=proximty()"), "Did you mean proximity?"),
        (("--arm", "hcl()", "--option", "negatives=Tilt(2.0)"), "hcl() needs its own negatives, Tilt(1.0), got"),
        (("--arm", "hcl()", "--option", "queue=64"), "--option that one of the arms takes, got option='queue'"),
        (("--arm", "hcl()", "--batch-size", "100000"), "--batch-size of at most the 96 images"),
        # Of 96 images a validation split leaves 76.
        (("--arm", "hcl()", "--batch-size", "90", "--tune", "temperature=0.2"), "--batch-size of at most the 76"),
        (
            ("--arm", "hcl(temprature=1)"),
            "Did you mean temperature? It is called as hcl(temperature=0.5, tau_plus=0.1, beta=1",
        ),
        (("--arm", "simclr(temprature=1)"), "Did you mean temperature?"),
        (("--arm", "ring(foo=1)"), "'foo' is not known. Known in ring: temperature, inner, outer, dynamic_inner"),
        (("--arm", "moco(momentum=linear(0.1, 0.2))"), "only temperature and tau_plus may be schedules"),
        # What only a step of training would find
        (
            ("--arm", "emc2(negatives='Tilt(1.0)')"),
            "emc2(negatives='Tilt(1.0)') cannot be trained: emc2 needs --negatives to be",
        ),
        (("--arm", "sogclr(tau_plus=0.1)"), "sogclr(tau_plus=0.1) cannot be trained: sogclr needs --tau-plus of 0"),
        (("--arm", "simclr(negatives='SameCluster()')"), "cannot be trained: train needs --negatives for candidates"),
        (("--arm", "simclr(negatives=\"From('queue')\")"), "cannot be trained: train needs --negatives for candidates"),
        (("--arm", "simclr(negatives=\"BelowPositive(0.1, by='guide')\")"), "cannot be trained: train needs"),
        (("--arm", "hcl(beta=linear(1.0, -1.0))"), "cannot be trained: Tilt needs beta in [0.0, inf), got beta=-1.0"),
        (("--arm", "hcl() @ proximity(restart=linear(0.1, 2.0), warmup=0)"), "Proximity needs restart in [0.0, 1.0]"),
        (("--arm", "simclr(augment='cifar')"), "simclr(augment='cifar') cannot be trained: "),
        (("--arm", "simclr(encoder='torchvision:resnet19')"), "cannot be trained: "),
        (("--arm", "simclr(device='cpu', precision='fp16')"), "on a CPU, which has no fp16, got precision='fp16'"),
        (("--arm", "sogclr()", "--tune", "tau_plus=0,0.1"), "arms that leave tau_plus to --tune, got tau_plus=0.2 in"),
        (("--arm", "simclr(temperature=0.1)", "--tune", "temperature=0.1,0.2"), "got temperature=0.1 in 'simclr(temp"),
        (("--arm", "hcl()", "--tune", "dim=8,8"), "--tune with values that differ"),
        (("--arm", "hcl()", "--tune", "dim=8,16", "--option", "dim=8"), "dim to be either tuned or given for all arms"),
        (("--arm", "hcl()", "--epochs", "9", "--option", "epochs=3"), "--epochs or --option epochs=..., not both"),
        (("--arm", "hcl()", "--batch-size", "8", "--option", "batch-size=3"), "--batch-size or --option batch_size"),
        (("--arm", "hcl()", "--option", "dim=8", "--option", "dim=16"), "one --option for dim"),
    ],
)
def test_what_cannot_be_compared_is_2_and_nothing_is_started(
    arguments: tuple[str, ...], said: str, data: str, started: Started, tmp_path: Path
) -> None:
    usual = ("--arm", "simclr(tau_plus=0.2)", "--data", data, "--out", str(tmp_path / "out"))
    batch = () if "--batch-size" in arguments else ("--batch-size", "32")
    done = hardneg("compare", *usual, *arguments, *batch)
    assert done.exit_code == 2, done.output
    assert said in done.stderr, done.stderr
    assert started == []
    assert "runs" not in done.stdout, "no bar before a refusal"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("common", [{}, {"evaluate_on": "validation"}], ids=["test", "validation"])
def test_a_test_split_without_labels_is_refused_where_it_is_needed(
    common: dict[str, str], started: Started, tmp_path: Path
) -> None:
    images = np.random.default_rng(0).integers(0, 256, (64, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "half.npz", images=images, labels=np.arange(64) % 4, test_images=images[:20])
    comparison = Comparison(("simclr()", "hcl()"), 2, short(f"npz:{tmp_path / 'half.npz'}", **common))
    if common:
        compare(comparison, tmp_path / "out", show=nothing)
        assert len(started) == 4
        return
    with pytest.raises(ValueError, match="compare, of its test images, needs labels, got none"):
        compare(comparison, tmp_path / "out")
    assert started == []


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
        ("moco(temperature=1)", "moco(temperature=1.0, augment='auto')", {"encoder": "tiny"}),
    ],
)
def test_arms_that_train_alike_are_seen(first: str, second: str, common: dict[str, Any], data: str) -> None:
    arms = [parse_arm(text).under(short(data, **common)) for text in (first, second)]
    with pytest.raises(ValueError, match="arms that differ, got the same options in"):
        check_arms(arms, Comparison((first, second), 2, short(data, **common)))


@pytest.mark.parametrize(
    ("first", "second", "tune"),
    [
        ("simclr()", "debiased()", ("tau_plus", (0.0, 0.1))),
        ("supcon()", "supervised(positives_in_denominator='all')", ("temperature", (0.1, 0.2))),
        ("hcl()", "simclr(negatives='Tilt(1.0)')", ("tau_plus", (0.0, 0.05))),
    ],
)
def test_arms_that_tuning_would_make_alike_are_seen(
    first: str, second: str, tune: tuple[str, tuple[float, ...]], data: str
) -> None:
    arms = [parse_arm(text).under(short(data)) for text in (first, second)]
    check_arms(arms, Comparison((first, second), 2, short(data)))
    with pytest.raises(ValueError, match=f"differ in more than the {tune[0]} that --tune gives them, got the same"):
        check_arms(arms, Comparison((first, second), 2, short(data), tune))


def test_a_tuned_value_that_an_arm_cannot_train_with_is_seen(data: str, started: Started, tmp_path: Path) -> None:
    comparison = Comparison(("simclr()", "sogclr()"), 2, short(data), ("tau_plus", (0.0, 0.1)))
    with pytest.raises(ValueError, match=r"sogclr\(\) tau_plus=0.1 cannot be trained: sogclr needs --tau-plus of 0"):
        compare(comparison, tmp_path, show=nothing)
    assert started == []


def test_looking_at_the_arms_is_quick(data: str) -> None:
    texts = ("simclr()", "hcl()", "moco()", "moco_v3()", "sogclr()", "emc2()", "hscl()", "simclr() @ knn()")
    arms = [parse_arm(text).under(short(data)) for text in texts]
    check_arms(arms[:2], Comparison(texts[:2], 2, short(data)))  # imports
    begun = time.process_time()
    check_arms(arms, Comparison(texts, 2, short(data)))
    assert time.process_time() - begun < 0.2 * len(arms)


def test_what_auto_is_taken_for_depends_on_the_images(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (64, 32, 32, 3), dtype=np.uint8)
    np.savez(tmp_path / "large.npz", images=images, labels=np.arange(64) % 4)
    texts, common = ("simclr()", "simclr(encoder='tiny')"), short(f"npz:{tmp_path / 'large.npz'}")
    check_arms([parse_arm(text).under(common) for text in texts], Comparison(texts, 2, common))


def test_a_try_may_be_as_the_arm_is(data: str) -> None:
    texts, common = ("simclr()", "hcl()"), short(data, evaluate_on="validation")
    tune = ("temperature", (0.5, 0.25))
    check_arms([parse_arm(text).under(common) for text in texts], Comparison(texts, 2, common, tune))


@pytest.mark.parametrize(
    "same",
    [
        ("supcon(temperature=0.5)", "supervised(temperature=0.5, positives_in_denominator='all')"),
        ("hcl(beta=1, tau_plus=0.1)", "hcl()", "simclr(tau_plus=0.1, negatives='Tilt(beta=1)')"),
        ("simclr(negatives='Rank(10, 20)')", "simclr(negatives='Rank(stop=20, start=10)')"),
        ("simclr(negatives='Uniform( )')", "simclr()", "simclr(temperature=0.5) @ uniform()"),
        ("moco(temperature=1) @ proximity(500)", "moco(temperature=1.0) @ proximity(num_candidates=500)"),
    ],
)
def test_one_folder_for_one_training(same: tuple[str, ...]) -> None:
    assert len({folder_of(parse_arm(text)) for text in same}) == 1


def test_a_folder_for_each_training() -> None:
    same = ("supcon(temperature=0.5)",)
    others = ("supcon()", "scl()", "simclr()", "simclr() @ knn()", "hcl()", "moco()")
    assert len({folder_of(parse_arm(text)) for text in (*same, *others)}) == 1 + len(others)


def test_arms_written_otherwise_find_their_runs(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished ones are only read, one that was killed goes on, and the page knows them all."""
    pytest.importorskip("accelerate", reason="training needs the extra train")
    from hardneg.training.recipes import run_recipe

    trained: list[str] = []

    def here(recipe: str, options: TrainOptions, run: Run, environ: dict[str, str], **how: bool) -> dict[str, Any]:
        trained.append(run.path.name)
        return run_recipe(recipe, options, run.path, resume=True, quiet=True)

    monkeypatch.setattr(comparison_runs, "in_a_process", here)
    common = short(data, epochs=1)
    compare(Comparison(("simclr()", "hcl(beta=1, tau_plus=0.1)"), 2, common), tmp_path, jobs=1, show=nothing)
    assert len(trained) == 4
    (tmp_path / "runs" / trained[-1] / "result.json").unlink()
    compare(Comparison(("simclr(negatives='Uniform( )')", "hcl()"), 2, common), tmp_path, jobs=1, show=nothing)
    assert trained[4:] == [trained[3]]
    assert len(list((tmp_path / "runs").iterdir())) == 4
    assert "no run directory with these options" not in write_report(tmp_path).read_text()


# Tuning


def test_every_arm_is_tuned_on_the_validation_split_and_then_trained_on_all(
    data: str, started: Started, tmp_path: Path
) -> None:
    arms = ("simclr()", "hcl(beta=3)", "simclr(tau_plus=0.2)")
    comparison = Comparison(arms, 2, short(data), ("temperature", (0.5, 0.25, 0.1)))
    summary = compare(comparison, tmp_path, jobs=1, show=nothing)
    tried = [options for _, options, path in started if "tuning" in path.parts]
    trained = [options for _, options, path in started if "tuning" not in path.parts]
    assert [(one.temperature, one.evaluate_on, one.seed) for one in tried] == 3 * [
        (0.5, "validation", 0),
        (0.25, "validation", 0),
        (0.1, "validation", 0),
    ]
    assert sorted((one.tau_plus, one.seed) for one in trained) == sorted((t, s) for t in (0, 0.1, 0.2) for s in (0, 1))
    assert {(one.temperature, one.evaluate_on) for one in trained} == {(0.25, "test")}, "0.25 was the best"
    assert summary["tuned"] == dict.fromkeys(arms, 0.25)
    assert summary["tries"] == {arm: [(0.5, 0.6), (0.25, 0.85), (0.1, 0.8)] for arm in arms}
    assert [row["effective_temperature"] for row in summary["rows"]] == [0.25, 0.0625, 0.25]


def test_a_try_that_diverges_has_lost_and_ends_nothing(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverge(recipe: str, options: TrainOptions, run: Run, environ: dict[str, str], **how: bool) -> dict[str, Any]:
        if options.learning_rate > 1.0 or (options.tau_plus and options.learning_rate > 0.1):
            raise Diverged(run.path, "not finite")
        finish(run, found := result(1.0 - options.learning_rate, 100))
        return found

    monkeypatch.setattr(comparison_runs, "in_a_process", diverge)
    lines: list[str] = []
    arms, tries = ("simclr()", "debiased()"), ("learning_rate", (1e30, 0.2, 0.05))
    summary = compare(Comparison(arms, 2, short(data), tries), tmp_path / "some", jobs=1, show=lines.append)
    assert summary["tuned"] == dict.fromkeys(arms, 0.05)
    assert summary["tries"]["debiased()"] == [(1e30, None), (0.2, None), (0.05, 0.95)]
    assert [line for line in lines if "diverged" in line] == [
        "[1/6] simclr() learning_rate=1e+30, seed 0: diverged",
        "[4/6] debiased() learning_rate=1e+30, seed 0: diverged",
        "[5/6] debiased() learning_rate=0.2, seed 0: diverged",
    ]
    page = write_report(tmp_path / "some").read_text()
    assert "Diverged: simclr() with 1e+30, debiased() with 1e+30, debiased() with 0.2." in page
    all_of_them = Comparison(arms, 2, short(data), ("learning_rate", (0.3, 0.2)))
    with pytest.raises(
        AllDiverged, match=r"debiased\(\) needs a learning_rate with which it does not diverge, got 0.3, 0.2"
    ):
        compare(all_of_them, tmp_path / "all", jobs=1, show=nothing)
    fixed = Comparison(arms, 2, short(data, learning_rate=0.5))
    with pytest.raises(Diverged):  # what is compared must not
        compare(fixed, tmp_path / "fixed", jobs=1, show=nothing)


@pytest.mark.parametrize("batches", ["uniform()", "knn(warmup=1, refresh=1)"])
def test_a_process_says_that_its_training_diverged(batches: str, data: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="training needs the extra train")
    # Records are rare: without a graph the weights are found out at the end of the epoch, with one the graph is.
    wild = RECIPES["simclr"](**short(data, learning_rate=1e30, batches=batches, log_every=1000, epochs=3, save_every=3))
    with pytest.raises(Diverged, match=r"failed, exit code 3: \w+ needs finite "):
        in_a_process("simclr", wild, Run(tmp_path / "run"), {})


def test_the_terminal_says_what_was_taken_and_who_knows_the_classes(
    data: str, started: Started, tmp_path: Path
) -> None:
    arms = ("--arm", "simclr()", "--arm", "simclr(negatives='OtherLabel()')", "--arm", "supcon()", "--arm", "hcl()")
    common = ("--data", data, "--batch-size", "32", "--tune", "temperature=0.5,0.25", "--out", str(tmp_path))
    done = hardneg("compare", *arms, *common)
    assert done.exit_code == 0, done.output
    taken, told = "tuned to temperature=0.25", "sees the labels of the training images"
    for line in (
        f"A  simclr()  ({taken})",
        f"B  simclr(negatives='OtherLabel()')  ({taken}; {told})",
        f"C  supcon()  ({taken}; {told})",
        f"D  hcl()  ({taken})",
    ):
        assert line in done.output
    assert "Each of the 4 differences is judged by itself" in done.output, "the second with labels against the first"
    assert "--tune" not in done.output, "what was tuned need not be tuned"
    facts = json.loads((tmp_path / "comparison.json").read_text())
    assert [row["uses_labels"] for row in facts["rows"]] == [False, True, True, False]
    assert (facts["notes"], facts["unlike"]) == ([], [])


def test_the_terminal_names_the_validation_split(data: str, started: Started, tmp_path: Path) -> None:
    common = ("--arm", "simclr()", "--arm", "hcl()", "--data", data, "--batch-size", "32")
    for split, told in (("test", False), ("validation", True)):
        done = hardneg("compare", *common, "--option", f"evaluate_on={split}", "--out", str(tmp_path / split))
        assert done.exit_code == 0, done.output
        assert ("5-NN accuracy on the validation split, %" in done.output) == told


def test_what_differs_beside_the_negatives_is_said(data: str, started: Started, tmp_path: Path) -> None:
    arms = ("simclr()", "hcl(beta=1)", "simclr(dim=16, learning_rate=0.1)")
    compared = ("--option", "dim=32", "--data", data, "--batch-size", "32", "--out", str(tmp_path))
    done = hardneg("compare", *(word for arm in arms for word in ("--arm", arm)), *compared)
    assert done.exit_code == 0, done.output
    assert "More than the negatives differs: dim differs: 32, 16." in done.output
    assert "More than the negatives differs: learning_rate differs: 0.001, 0.1." in done.output
    facts = json.loads((tmp_path / "comparison.json").read_text())
    assert facts["unlike"] == ["dim differs: 32, 16.", "learning_rate differs: 0.001, 0.1."]


def test_a_tuned_comparison_on_digits(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, with real training: every figure is found again in the runs."""
    pytest.importorskip("accelerate", reason="training needs the extra train")
    from hardneg.training.recipes import run_recipe

    def here(recipe: str, options: TrainOptions, run: Run, environ: dict[str, str], **how: bool) -> dict[str, Any]:
        return run_recipe(recipe, options, run.path, resume=True, quiet=True)

    monkeypatch.setattr(comparison_runs, "in_a_process", here)
    common = ("--data", data, "--epochs", "1", "--batch-size", "32", "--option", "dim=16", "--option", "device=cpu")
    arms = ("--arm", "simclr()", "--arm", "hcl()", "--tune", "temperature=0.2,1.0", "--seeds", "2")
    done = hardneg("compare", *arms, *common, "--out", str(tmp_path), "--jobs", "1")
    assert done.exit_code == 0, done.output
    summary = json.loads((tmp_path / "comparison.json").read_text())
    tries: dict[str, list[tuple[float, float]]] = {"Uniform()": [], "Tilt(1.0)": []}
    for config in (tmp_path / "tuning").glob("runs/*/config.json"):
        options = json.loads(config.read_text())["options"]
        result = json.loads((config.parent / "result.json").read_text())
        assert (result["num_train"], result["num_test"]) == (76, 20)
        tries[options["negatives"]].append((result["knn"], options["temperature"]))
    for row, found in zip(summary["rows"], tries.values(), strict=True):
        assert sorted(temperature for _, temperature in found) == [0.2, 1.0]
        assert (max(found)[0], summary["tuned"][row["arm"]]) in found
    assert (len(list((tmp_path / "runs").iterdir())), summary["num_test"]) == (4, 120)
    assert "means over the last records" in done.output
    page = (tmp_path / "report.html").read_text()
    assert "no run directory with these options" not in page
    assert "Tuned on a validation split" in page


# Statistics

FIRST = [0.812, 0.835, 0.790, 0.841, 0.828]
OTHERS = [[0.829, 0.847, 0.818, 0.848, 0.851], [0.80, 0.85, 0.77, 0.86, 0.83], [0.81, 0.83, 0.78, 0.82, 0.81]]


def outcomes(accuracies: list[float], num_test: int = 10**9) -> Outcomes:
    return Outcomes(np.array(accuracies), None, num_test)


@pytest.mark.parametrize("values", OTHERS)
def test_intervals_of_many_test_items_are_those_of_scipy(values: list[float]) -> None:
    """With 10^9 test items only the seeds count; the variance of five has a quarter of the weight unpaired."""
    stats = pytest.importorskip("scipy.stats", reason="intervals need the extra eval")
    found = difference_of(outcomes(values), outcomes(FIRST))
    assert found is not None
    apart, one, other = (np.var(x, ddof=1) for x in (np.subtract(values, FIRST), values, FIRST))
    error = ((0.75 * apart + 0.25 * (one + other)) / 5) ** 0.5
    assert found.half_width == pytest.approx(1.05 * stats.t.ppf(0.975, 4 / (0.875**2 + 0.125**2)) * error, rel=1e-4)
    assert found.value == pytest.approx(np.mean(values) - np.mean(FIRST))


def test_the_variance_of_test_items_is_found() -> None:
    """A table with known effects of runs and items, 300 times over: the mean estimate is the true variance."""
    random, seeds, items = np.random.default_rng(0), 4, 50
    errors, values = [], []
    for _ in range(300):
        table = 0.1 * random.standard_normal((seeds, 1)) + random.standard_normal(items) * 0.7
        table = table + 0.5 * random.standard_normal((seeds, items))
        found = mean_of(Outcomes(table.mean(1), table, items))
        assert found is not None
        errors.append(found.error)
        values.append(found.value)
    expected = 0.1**2 / seeds + 0.7**2 / items + 0.5**2 / (seeds * items)
    assert np.mean(np.square(errors)) == pytest.approx(expected, rel=0.1)
    assert np.var(values) == pytest.approx(expected, rel=0.25)


@pytest.mark.parametrize("freedom", [2, 4, 29])
def test_four_fifths_of_the_comparisons_find_the_detectable_difference(freedom: int) -> None:
    """Of 200,000 simulated tests 80 % see such a difference, to four errors."""
    stats = pytest.importorskip("scipy.stats", reason="intervals need the extra eval")
    n, factor = freedom + 1, detectable_errors(freedom)
    draws = np.random.default_rng(n).normal(factor / n**0.5, 1.0, (200_000, n))
    seen = np.abs(draws.mean(1)) > 1.05 * stats.t.ppf(0.975, freedom) * draws.std(1, ddof=1) / n**0.5
    assert seen.mean() == pytest.approx(0.8, abs=4 * (0.8 * 0.2 / len(draws)) ** 0.5)


def test_detectable_differences_are_continuous_in_the_degrees_of_freedom() -> None:
    assert detectable_errors(999.0) == pytest.approx(detectable_errors(1001.0), rel=2e-3)


def test_seeds_that_agree_by_rounding_are_not_certain() -> None:
    found = difference_of(outcomes([0.81, 0.82, 0.83], 100), outcomes([0.80, 0.81, 0.82], 100))
    assert found is not None
    assert found.half_width > 0.05, "100 items decide, of which nobody knows which were right"


def result(knn: float, num_test: int, correct: Any = None) -> dict[str, Any]:
    final = {"false_negatives": 0.1, "hardness": None, "clamped": 0.0}
    right = {} if correct is None else {"correct": {"knn": pack_bits(np.asarray(correct))}}
    return {"knn": knn, "num_test": num_test, "final": final, "steps": 3, "seconds": 1.0, **right}


def test_verdicts_of_the_table_are_those_of_the_intervals() -> None:
    arms = [parse_arm(text) for text in ("simclr()", "hcl()", "debiased()", "simclr(temperature=0.1)")]
    results = [[result(v, 10**8) for v in values] for values in (FIRST, *OTHERS)]
    rows, verdicts = rows_of(arms, results, "knn"), verdicts_of(arms, results, "knn")
    *said, last = sentences(verdicts)
    for row, values, verdict, sentence in zip(rows[1:], OTHERS, verdicts, said, strict=True):
        assert row.difference == verdict.difference == pytest.approx(np.mean(values) - np.mean(FIRST))
        assert row.difference_half_width == verdict.half_width
        assert verdict.standing == ("alike" if abs(verdict.difference) <= (verdict.half_width or 0.0) else "above")
        assert ("not beyond noise (95 % interval" in sentence) == (verdict.standing == "alike")
    assert "is 1.74 points above simclr(): beyond noise (95 % interval +0." in said[0]
    assert "with 5 seeds and 100,000,000 test items, less than" in said[1]
    assert last == (
        "Each of the 3 differences is judged by itself: were there none at all, one or more would look beyond noise in "
        "up to 15 % of such comparisons."
    )
    assert len(sentences(verdicts[:1])) == 1, "one difference is not several"
    assert np.isnan(rows[0].hardness)


def test_point_10_the_test_items_count() -> None:
    """Seeds that agree on six points: 200 test items, of which the arms disagree on 24, do not carry that."""
    first = np.arange(200) < 160
    better = first ^ (np.arange(200) % 200 >= 182) ^ (np.arange(200) < 6)  # 18 gained, 6 lost: six points
    results = [[result(float(x.mean()), 200, x)] * 3 for x in (first, better)]
    arms = [parse_arm("simclr()"), parse_arm("hcl()")]
    (verdict,) = verdicts_of(arms, results, "knn")
    expected = (np.var(better * 1.0 - first, ddof=1) / 200) ** 0.5  # McNemar's, as seeds add nothing
    assert verdict.difference == pytest.approx(0.06)
    assert verdict.half_width == pytest.approx(1.05 * 1.97196 * expected, rel=1e-3)
    little = first ^ (np.arange(200) >= 194) ^ (np.arange(200) < 2)
    few = [[result(float(x.mean()), 200, x)] * 3 for x in (first, little)]
    (verdict,) = verdicts_of(arms, few, "knn")
    assert verdict.standing == "alike", "six gained and two lost: two points in every seed are not beyond noise"


def test_point_10_two_seeds_have_no_verdict(data: str, started: Started, tmp_path: Path) -> None:
    common = ("--arm", "simclr()", "--arm", "hcl()", "--data", data, "--batch-size", "32", "--out", str(tmp_path))
    done = hardneg("compare", *common, "--seeds", "2")
    assert done.exit_code == 0, done.output
    facts = json.loads((tmp_path / "comparison.json").read_text())
    assert [one["standing"] for one in facts["verdicts"]] == ["open"]
    assert "beyond noise" not in json.dumps(facts)
    assert facts["rows"][1]["difference_half_width"] is None
    assert "no verdict" in " ".join(facts["sentences"])


def test_point_10_terminal_json_and_page_have_the_same_sentences(data: str, started: Started, tmp_path: Path) -> None:
    arms = ("--arm", "simclr()", "--arm", "simclr(temperature=0.25)", "--arm", "hcl()", "--arm", "supcon()")
    done = hardneg("compare", *arms, "--data", data, "--batch-size", "32", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    facts = json.loads((tmp_path / "comparison.json").read_text())
    said = [*facts["answer"], *facts["sentences"]]
    assert len(said) > 5
    page = " ".join(Page((tmp_path / "report.html").read_text()).words.split())
    for sentence in said:
        assert sentence in " ".join(done.output.split())
        assert sentence in page


@pytest.mark.parametrize(("seeds", "items"), [(3, 200), (3, 2000), (6, 500)])
@pytest.mark.parametrize("world", [0, 1, 3])
def test_point_10_verdicts_hold_in_simulated_comparisons(seeds: int, items: int, world: int) -> None:
    """A small version of experiments/verdict_simulation.py; 200 comparisons, so with more slack than its 400."""
    from verdict_simulation import WORLDS, cell

    found = cell(WORLDS[world], seeds, items, 200)
    assert found["called_different"] <= 0.08
    assert found["found"] >= 0.5


def test_point_10_the_docs_have_the_table_of_the_simulation() -> None:
    from verdict_simulation import table

    root = Path(__file__).parents[2]
    found = json.loads((root / "experiments" / "verdict_simulation.json").read_text())
    assert found["times"] == 400
    assert table(found["worlds"]) in (root / "docs" / "explanation" / "verdict.md").read_text()
    cells = [cell for world in found["worlds"] for cell in world["cells"]]
    assert max(cell["called_different"] for cell in cells) <= 0.07
    assert sum(cell["found"] < 0.5 for cell in cells) == 1, "the one that the page names"


def test_several_differences_mislead_no_more_often_than_is_said() -> None:
    assert [chance_of_one(differences) for differences in (1, 4, 30)] == [5, 20, 100]


# Tilts and temperatures


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


@pytest.mark.parametrize(
    ("arms", "noted"),
    [
        (("simclr()", "hcl(beta=3)"), []),
        (("simclr() @ knn()", "hcl(beta=3)"), ["hcl(beta=3)"]),
        (("hcl()", "hcl(beta=3)"), ["hcl()", "hcl(beta=3)"]),
    ],
)
def test_where_temperature_is_tuned_any_untilted_arm_is_a_twin(arms: tuple[str, ...], noted: list[str]) -> None:
    tuned = [parse_arm(text).with_option("temperature", 0.1 * (i + 1)) for i, text in enumerate(arms)]
    notes = temperature_notes(tuned, tuned=True)
    assert [note.partition(" repels")[0] for note in notes] == noted
    assert all(note.endswith("Add one.") for note in notes), "nobody is told to tune what was tuned"
    assert all("--tune temperature" in note for note in temperature_notes(tuned))


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


@pytest.mark.parametrize(("arm", "told"), LABELS)
def test_who_is_told_the_classes(arm: str, told: bool) -> None:
    assert parse_arm(arm).uses_labels == told


@pytest.mark.parametrize(("tilted", "plain", "alike"), TWINS)
def test_an_untilted_twin_differs_in_the_tilt_alone(tilted: str, plain: str, alike: bool) -> None:
    arms = [parse_arm("simclr(temperature=0.9)"), parse_arm(tilted), parse_arm(plain)]
    assert arms[1].has_untilted_twin_in(arms[2]) == alike
    assert not arms[2].has_untilted_twin_in(arms[1])
    noted = any(note.startswith(arms[1].text) for note in temperature_notes(arms))
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


def test_a_difference_of_nothing_has_no_minus(capsys: pytest.CaptureFixture[str]) -> None:
    arms = [parse_arm("simclr()"), parse_arm("hcl()")]
    results = [[result(v, 10**6) for v in (0.80004, 0.80004, 0.8)], [result(v, 10**6) for v in (0.80003, 0.80004, 0.8)]]
    rows, verdicts = rows_of(arms, results, "knn"), verdicts_of(arms, results, "knn")
    assert rows[1].difference is not None
    assert rows[1].difference < 0.0
    summary = {"metric": "knn", "rows": [asdict(row) for row in rows], "sentences": sentences(verdicts), "notes": []}
    summary["answer"] = answer(verdicts, "kNN accuracy")
    show_comparison(summary, Console(width=120))
    said = capsys.readouterr().out
    assert "+0.0 ± " in said
    assert "-0.00" not in said
    assert " n/a " in said, "a hardness that nobody knows"


# Without accuracies


@pytest.mark.parametrize(
    ("labels", "test_labels", "said"),
    [
        (None, None, "There is no accuracy: its training images have no labels."),
        (0, 0, "There is no accuracy: its training images are of one class."),
        (4, None, "There is no accuracy: the images to evaluate it on have no labels."),
    ],
)
def test_the_terminal_and_the_page_say_why_there_is_no_accuracy(
    labels: int | None, test_labels: int | None, said: str, tmp_path: Path
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
    assert said in done.output
    page = Page(write_report(tmp_path / "run").read_text()).words
    assert said in page
    assert "Measured by" not in page


def test_one_neighbour_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    show_evaluation({"knn": 0.75, "1nn": 0.75, "linear": 0.5, "k": 1, "steps": 3})
    said = capsys.readouterr().out
    assert said.count("1-NN accuracy") == 1
    show_evaluation({"knn": 0.75, "1nn": 0.75, "k": 5})
    assert [name in capsys.readouterr().out for name in ("5-NN accuracy",)] == [True]


# What an arm must be believed with caution for


def test_negatives_that_were_not_there_are_said(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert empty.startswith(
        "simclr(negatives='Ring(0.4, 0.5)'): 96% of the anchors had no negative in the last records"
    )
    assert clamped.startswith("debiased(tau_plus=0.35): 70% of its pairs were clamped")
    page = " ".join(Page((tmp_path / "report.html").read_text()).words.split())
    for said in (empty, clamped):
        assert said in done.output
        assert said in page


@pytest.mark.parametrize(("denominator", "said"), [("own", 1), ("all", 0)])
def test_supcon_needs_no_negatives(denominator: str, said: int) -> None:
    options = parse_arm(f"supervised(positives_in_denominator={denominator!r})").complete().as_dict()
    assert len(cautions("it", options, [{"empty": 1.0, "clamped": None}])) == said


def test_what_the_figures_say_is_not_said_again_by_the_warnings() -> None:
    """A loss warns by its first batches, the caution is of the last one; what only the former saw is still said."""
    no_negative, at_floor = (
        "97% of the anchors have no negative under Ring(inner=0.5, outer=0.1) and cost nothing.",
        "92% of the debiased terms are at their floor, where negatives have no gradient.",
    )
    last = [{"empty": 0.9, "clamped": 0.1}]
    kinds = [Warned("empty", no_negative), Warned("clamped", at_floor), Warned("clamped", at_floor.replace("92", "93"))]
    (figures, warned) = cautions("it", {}, last, kinds)
    assert figures.startswith("it: 90% of the anchors had no negative")
    assert warned == f"it: {at_floor}"


def test_warnings_of_the_runs_are_told_once_for_each_arm(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a run leaves beside its files, also when the comparison goes on with runs that are there."""

    def process(command: list[str], **how: Any) -> Any:
        if command[0] == "git":
            return subprocess.CompletedProcess(command, 0, "", "")
        path, options = command[4:]
        run, told = Run(Path(path)), json.loads(options)
        finish(run, result(0.5, 100))
        run.warn(f"{told['seed'] + 7} classes are unseen.", "unseen")
        if told["negatives"] == "Tilt(1.0)":
            run.warn(f"{told['seed'] + 1} images are odd.", "odd")
        return subprocess.CompletedProcess(command, 0, "", "")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", process)
        patch.setattr(comparison_runs, "this_machine", lambda jobs, on_gpu: Machine(1, 1, [Place()]))
        summary = compare(Comparison(("simclr()", "hcl()"), 3, short(data)), tmp_path, show=nothing)
    assert summary["cautions"] == ["All arms: 7 classes are unseen.", "hcl(): 1 images are odd."]
    again = compare(Comparison(("hcl()", "simclr()"), 3, short(data)), tmp_path, show=nothing)
    assert again["cautions"] == summary["cautions"]


# Threads


@pytest.mark.parametrize(
    ("told", "jobs", "expected"), [("3", 1, 3), ("3,1", None, 3), (None, 2, 8), (None, None, 4), ("no", 16, 1)]
)
def test_a_run_has_the_threads_that_are_told_or_its_share_of_the_cores(
    told: str | None, jobs: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison_runs, "num_cores", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if told is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", told)
    assert comparison_runs.usual_threads([parse_arm("simclr(device='cpu')")] * 2, 2, jobs) == expected


def test_all_runs_of_a_comparison_have_the_same_threads(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def remember(recipe: str, options: TrainOptions, run: Run, environ: dict[str, str], **how: bool) -> dict[str, Any]:
        seen.append(environ["OMP_NUM_THREADS"])
        finish(run, found := result(0.5, 100))
        return found

    monkeypatch.setattr(comparison_runs, "in_a_process", remember)
    monkeypatch.setattr(comparison_runs, "num_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    tune = ("temperature", (0.1, 0.2))
    first = compare(Comparison(("simclr()", "hcl()"), 2, short(data), tune), tmp_path, jobs=2, show=nothing)
    more = Comparison(("simclr()", "hcl()", "debiased()"), 3, short(data), tune)
    compare(more, tmp_path, jobs=1, show=nothing)
    assert (first["threads"], set(seen), len(seen)) == (4, {"4"}, 4 + 4 + 2 + 5)
    forget_warnings()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.warns(HardnegWarning, match="OMP_NUM_THREADS=1 has no effect: this comparison was begun with 4"):
        compare(more, tmp_path, jobs=1, show=nothing)
    forget_warnings()
    (tmp_path / "request.json").write_text('{"common": ')
    with pytest.raises(ValueError, match=r"request.json is damaged .*; delete it if"):
        compare(more, tmp_path, show=nothing)


# Processes


def child(code: int, said: str) -> Callable[..., Any]:
    return lambda command, **how: subprocess.CompletedProcess(command, code, "", said)


@pytest.mark.parametrize(
    ("code", "said", "message"),
    [
        (3, "Traceback\n  ...\nValueError: too warm\n", "run failed, exit code 3: ValueError: too warm"),
        (-9, "", "run failed, killed by SIGKILL, as when memory runs out"),
        (0, "", "run failed, exit code 0: it printed nothing"),
    ],
)
def test_a_failed_run_says_how_it_ended(
    code: int, said: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", child(code, said))
    with pytest.raises(RunFailed) as failed:
        in_a_process("simclr", RECIPES["simclr"](), Run(tmp_path / "run"), {})
    assert f"{message}. " in str(failed.value)
    assert failed.value.run == tmp_path / "run"


@pytest.mark.parametrize(
    ("code", "said", "advice"),
    [
        (1, "ValueError: too warm.", "too warm. Fix or remove this arm and give the command again: finished"),
        (-9, "", "as when memory runs out. Use a smaller --batch-size, or free memory"),
        (
            4,
            "metrics.jsonl could not be written (No space left on device)",
            "(No space left on device). Make room, then give the same command again: finished runs are kept.",
        ),
    ],
)
def test_a_failed_run_says_whose_it_was_and_what_to_do(
    code: int, said: str, advice: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", child(code, said))
    monkeypatch.setattr(comparison_runs, "this_machine", lambda jobs, on_gpu: Machine(1, 1, [Place()]))
    monkeypatch.setattr("hardneg.io.provenance._commit", lambda: None)  # asks a process, too
    common = ("--data", data, "--batch-size", "32", "--out", str(tmp_path))
    done = hardneg("compare", "--arm", "simclr()", "--arm", "hcl()", *common)
    assert done.exit_code == 1, done.output
    assert done.stderr.startswith("simclr(), seed 0: ")
    assert advice in done.stderr
    assert "--resume" not in done.stderr


def test_a_failure_is_said_at_once_and_finished_runs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    def fail(recipe: str, options: TrainOptions, run: Run, environ: dict[str, str], **how: bool) -> dict[str, Any]:
        begun.append(options.seed)
        if options.seed == 1:
            raise RunFailed(run.path, "seed 1")
        finish(run, {"knn": 0.5})
        return {"knn": 0.5}

    monkeypatch.setattr(comparison_runs, "in_a_process", fail)
    with pytest.raises(RunFailed, match="seed 1"):
        run_all([parse_arm("simclr()")], list(range(50)), tmp_path, How(1), Watcher(nothing))
    assert {0, 1} <= set(begun)
    assert len(begun) < 50, "no more are begun"
    assert (tmp_path / "runs" / f"{folder_of(parse_arm('simclr()'))}-seed0" / "result.json").exists()


def test_no_run_begins_after_another_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one is let in by the machine, and has no pipe yet when the first one fails."""
    failed, begun = threading.Event(), []

    def fail(recipe: str, options: TrainOptions, run: Run, environ: dict[str, str], **how: bool) -> dict[str, Any]:
        begun.append(options.seed)
        if options.seed:
            return {}
        raise RunFailed(run.path, "seed 0")

    class Slow(ChildPipes):
        """Those after the first are made when all that there are have been closed."""

        def one(self) -> Any:
            if threading.current_thread() is not first[0]:
                assert failed.wait(20.0)
            return super().one()

        def close(self) -> None:
            super().close()
            failed.set()

    first: list[threading.Thread] = []
    inside = threading.Barrier(2)

    class Crowd(Machine):
        """Both are in before either goes on."""

        @contextmanager
        def beside_others(self, run: Run) -> Iterator[Place]:
            if run.path.name.endswith("seed0"):
                first.append(threading.current_thread())
            inside.wait(20.0)
            yield self.places[0]

    monkeypatch.setattr(comparison_runs, "in_a_process", fail)
    monkeypatch.setattr(comparison_runs, "ChildPipes", Slow)
    monkeypatch.setattr(comparison_runs, "this_machine", lambda jobs, on_gpu: Crowd(2, 1, [Place()]))
    with pytest.raises(RunFailed, match="seed 0"):
        run_all([parse_arm("simclr()")], [0, 1], tmp_path, How(2), Watcher(nothing))
    assert begun == [0]


def test_a_pipe_ends_when_all_are_closed() -> None:
    pipes = ChildPipes()
    with pipes.one() as held, pipes.one() as other:
        os.set_blocking(held, False)
        with pytest.raises(BlockingIOError):
            os.read(held, 1)
        pipes.close()
        assert (os.read(held, 1), os.read(other, 1)) == (b"", b"")
        with pytest.raises(NotBegun), pipes.one():
            pytest.fail("made after the others were closed")
    for descriptor in (held, other):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="affinities of Linux")
def test_the_share_of_the_cores_is_of_those_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 7, 8})
    assert num_cores() == 3


def test_the_thread_of_a_failed_run_begins_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even by the thread of the one that failed, before the others are told."""
    begun: list[int] = []

    def fail(recipe: str, options: TrainOptions, run: Run, environ: dict[str, str], **how: bool) -> dict[str, Any]:
        begun.append(options.seed)
        raise RunFailed(run.path, "at once")

    monkeypatch.setattr(comparison_runs, "in_a_process", fail)
    monkeypatch.setattr(comparison_runs, "this_machine", lambda jobs, on_gpu: Machine(1, 1, [Place()]))
    for attempt in range(10):
        begun.clear()
        with pytest.raises(RunFailed, match=r"simclr\(\), seed 0: .* at once"):
            run_all([parse_arm("simclr()")], list(range(30)), tmp_path / str(attempt), How(1), Watcher(nothing))
        assert begun == [0]


def test_a_killed_run_has_no_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it wrote before, such as a warning of somebody else's, is not why it was killed."""
    monkeypatch.setattr(subprocess, "run", child(-9, "a.py:3: UserWarning: odd\n  warn_once("))
    with pytest.raises(RunFailed, match=r"as when memory runs out[.] Use"):
        in_a_process("simclr", RECIPES["simclr"](), Run(tmp_path / "run"), {})


def test_a_file_in_the_place_of_the_folder_is_named(data: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    done = hardneg("compare", "--arm", "simclr()", "--arm", "hcl()", "--data", data, "--out", str(tmp_path / "file"))
    assert done.exit_code == 2
    assert "--out needs a folder, got" in done.stderr
    assert (tmp_path / "file").read_text() == "mine"


def test_a_run_of_a_comparison_keeps_what_it_warns_of(tmp_path: Path) -> None:
    """In its own process, and also if that is killed or runs again."""
    pytest.importorskip("accelerate", reason="training needs the extra train")
    data = few_digits(tmp_path / "digits.npz", 96)
    # Of 32 anchors in a batch, a ring of the closest twentieth leaves one candidate or none.
    options = short(data, epochs=1, negatives="Ring(0.05, 0.051)")
    run = Run(tmp_path / "run")
    comparison_runs.in_a_process("simclr", RECIPES["simclr"](**options), run, {"OMP_NUM_THREADS": "1"})
    ((_, said),) = run.warned()
    assert "of the anchors have no negative under" in said
    run.warn(said)
    run.warn("another")
    assert [one.text for one in run.warned()] == [said, "another"]


# Labels, collapsed runs, data: what may not be concluded


def test_point_11_an_arm_with_labels_is_not_the_answer(data: str, started: Started, tmp_path: Path) -> None:
    arms = ("simclr()", "supcon(temperature=0.2)", "simclr(temperature=0.2)", "hscl(temperature=0.4)")
    common = ("--data", data, "--batch-size", "32", "--out", str(tmp_path))
    done = hardneg("compare", *(word for arm in arms for word in ("--arm", arm)), *common)
    assert done.exit_code == 0, done.output
    facts = json.loads((tmp_path / "comparison.json").read_text())
    kinds = {(one["arm"], one["against"]): one["kind"] for one in facts["verdicts"]}
    assert kinds[arms[1], arms[0]] == kinds[arms[3], arms[0]] == "labels"
    assert kinds[arms[2], arms[0]] == "first"
    assert kinds[arms[3], arms[1]] == "peers", "arms with labels against each other"
    better = [line for line in facts["answer"] if "etter beyond noise" in line]
    assert len(better) == 1
    assert arms[2] in better[0]
    assert arms[1] not in better[0], "though it is the best of all"
    assert f"Shown apart, as only one of the two sees labels: {arms[1]}, {arms[3]} beside simclr()." in facts["answer"]


def test_point_11_the_temperature_control_is_in_terminal_and_json(data: str, started: Started, tmp_path: Path) -> None:
    arms = ("simclr(temperature=0.9)", "simclr(temperature=0.25)", "hcl(beta=1)")
    common = ("--data", data, "--batch-size", "32", "--out", str(tmp_path))
    done = hardneg("compare", *(word for arm in arms for word in ("--arm", arm)), *common)
    facts = json.loads((tmp_path / "comparison.json").read_text())
    (control,) = [one for one in facts["verdicts"] if one["kind"] == "temperature"]
    assert (control["arm"], control["against"]) == (arms[2], arms[1])
    assert "Both repel alike (effective temperature 0.25" in control["sentence"]
    but = f"But {arms[2]} is not better beyond noise than {arms[1]}, which has its effective temperature"
    output = " ".join(done.output.split())
    assert control["sentence"] in output
    assert but in output
    assert any(one.startswith(but) for one in facts["answer"])


def test_point_12_collapsed_runs_are_marked(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def collapse(recipe: str, options: TrainOptions, run: Run, environ: dict[str, str], **how: bool) -> dict[str, Any]:
        last = {"hardness": 0.3, "false_negatives": 0.2, "clamped": 0.0}
        return result(0.5, 100) | {"collapsed": options.tau_plus > 0 and options.seed > 0, "last": last}

    monkeypatch.setattr(comparison_runs, "in_a_process", collapse)
    common = ("--data", data, "--batch-size", "32", "--out", str(tmp_path))
    done = hardneg("compare", "--arm", "simclr()", "--arm", "hcl()", *common)
    assert "B  hcl()  (collapsed in 2 of 3 runs)" in done.output
    facts = json.loads((tmp_path / "comparison.json").read_text())
    assert [row["collapsed"] for row in facts["rows"]] == [0, 2]
    assert [row["hardness"] for row in facts["rows"]] == [0.3, 0.3], "the mean over the last records"
    assert facts["cautions"][0].startswith("hcl(): 2 of 3 runs collapsed")
    assert "collapsed in 2 of 3 runs" in " ".join(Page((tmp_path / "report.html").read_text()).words.split())


@pytest.mark.parametrize("arm", ["hcl(betta=1)", "hcl(beta=1, temprature=0.1)", "moco(queu=9)", "simcrl()"])
def test_point_12_the_nearest_name_and_its_arguments(arm: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        parse_arm(arm)
    assert isinstance(refused.value, UnknownName)
    assert refused.value.nearest in ("beta", "temperature", "queue", "simclr")
    if arm.startswith("hcl"):
        assert "hcl(temperature=0.5, tau_plus=0.1, beta=1.0)" in str(refused.value)


def test_point_12_the_bar_moves_within_a_run(tmp_path: Path) -> None:
    run, seen = Run(tmp_path), []
    watcher = Watcher(nothing, 100, seen.append)
    with watcher.watching([run]):
        for step in (10, 20, 30):
            with run.metrics_path.open("a") as file:
                file.write(json.dumps({"step": step, "loss": 1.0}) + "\n" + '{"step": 9')
            until = time.monotonic() + 10.0
            while (not seen or seen[-1] != step / 100) and time.monotonic() < until:
                time.sleep(0.02)
            run.metrics_path.write_text(run.metrics_path.read_text().removesuffix('{"step": 9'))
    assert seen[-1] == 0.3
    watcher.ended("one")
    assert seen[-1] == 1


def test_point_12_nothing_is_cut_at_80_columns(data: str, started: Started, tmp_path: Path) -> None:
    arms = ("simclr()", "simclr(temperature=0.25)", "hcl(beta=1)", "supcon()")
    common = ("--data", data, "--batch-size", "32", "--out", str(tmp_path), "--seeds", "10")
    words = [word for arm in arms for word in ("--arm", arm)]
    for arguments in (["compare", *words, *common], ["compare", "--help"], ["report", "--help"], ["--help"]):
        done = CliRunner().invoke(app, arguments, env={"COLUMNS": "80", "NO_COLOR": "1"})
        assert done.exit_code == 0
        assert "\N{HORIZONTAL ELLIPSIS}" not in done.output
        lines = [line for line in done.output.splitlines() if not line.startswith("report: ")]  # a path stays whole
        assert max(map(len, lines)) <= 80


def other_digits(path: str) -> None:
    """The same file with one pixel of one image changed."""
    file = Path(path.partition(":")[2])
    with np.load(file) as arrays:
        parts = dict(arrays)
    parts["images"] = parts["images"].copy()
    parts["images"][0, 0, 0] ^= 1
    np.savez(file, **parts)


def test_point_17_other_data_in_an_old_folder_is_refused(started: Started, tmp_path: Path) -> None:
    data = few_digits(tmp_path / "digits.npz", 96)
    common = ("--data", data, "--batch-size", "32", "--out", str(tmp_path / "out"))
    assert hardneg("compare", "--arm", "simclr()", "--arm", "hcl()", *common).exit_code == 0
    before = json.loads((tmp_path / "out" / "request.json").read_text())["data"]
    other_digits(data)
    done, begun = hardneg("compare", "--arm", "simclr()", "--arm", "hcl()", *common), len(started)
    assert done.exit_code == 2
    now = data_record(*splits(RECIPES["simclr"](data=data)))
    for record in (before, now):
        assert record["train"]["fingerprint"] in done.stderr
    assert "--allow-other-data" in done.stderr
    assert len(started) == begun, "nothing is trained"
    again = hardneg("compare", "--arm", "simclr()", "--arm", "hcl()", *common, "--allow-other-data")
    assert again.exit_code == 0, again.output


def test_point_17_runs_of_other_data_are_refused_and_have_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = few_digits(tmp_path / "digits.npz", 96)

    def train(recipe: str, options: TrainOptions, run: Run, environ: dict[str, str], **how: bool) -> dict[str, Any]:
        encoder = {"name": "tiny", "class": "Tiny", "parameters": 1, "initial_weights": "00"}
        write_json(run.config_path, {"recipe": recipe, "options": options.as_dict()})
        run.record_trained(encoder, "views", data_record(*splits(options)))
        run.finish(result(0.5 + 0.1 * bool(options.tau_plus), 120))
        return run.result() or {}

    monkeypatch.setattr(comparison_runs, "in_a_process", train)
    comparison = Comparison(("simclr()", "hcl()"), 3, short(data))
    compare(Comparison(("simclr()", "debiased()"), 3, short(data)), tmp_path / "out", show=nothing)
    (tmp_path / "out" / "request.json").unlink()  # as an older version left it
    other_digits(data)
    with pytest.raises(DataChanged):
        compare(comparison, tmp_path / "out", show=nothing)
    summary = compare(comparison, tmp_path / "out", allow_other_data=True, show=nothing)
    assert [one["standing"] for one in summary["verdicts"]] == ["open"]
    assert summary["answer"] == ["There is no verdict, as the runs have different data."]
    assert summary["unlike"][0].startswith("data differs: 96 train images (")


def test_point_4_arms_take_schedules_of_temperature_and_tau_plus() -> None:
    arm = parse_arm("simclr(temperature=linear(0.5, 0.1), tau_plus=linear(0, 0.1))")
    options = arm.complete()
    assert (options.temperature, options.tau_plus) == ("linear(0.5, 0.1)", "linear(0, 0.1)")
    assert arm.temperature == pytest.approx(0.1), "the lowest"
    assert arm.trains_like(parse_arm("simclr(tau_plus=linear(0.0,0.1), temperature=linear(0.5,0.1))"))
    assert not parse_arm("hcl(beta=4)").has_untilted_twin_in(arm), "a temperature that moves is no control"
