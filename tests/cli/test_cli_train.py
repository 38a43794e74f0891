"""train and compare on the command line: files and flags agree, wrong values are named, exit codes, examples."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import fields
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from hardneg.cli import tables as table
from hardneg.cli.app import app
from hardneg.comparing import Comparison
from hardneg.comparing.arms import parse_arm
from hardneg.comparing.runs import RunFailed
from hardneg.training import loop as training
from hardneg.training import recipes
from hardneg.training import setup as training_setup
from hardneg.training.checks import check_words
from hardneg.training.options import RECIPES, TrainOptions

ROOT = Path(__file__).resolve().parents[2]
yaml = pytest.importorskip("yaml", reason="configuration files need the extra train")
OTHER = {
    "data": "npz:other.npz", "data_root": "there", "encoder": "resnet18", "dim": 64, "negatives": "Ring(0.1, 0.5)",
    "temperature": 0.06, "tau_plus": 0.05, "batches": "knn()", "epochs": 3, "batch_size": 32, "learning_rate": 3e-4,
    "weight_decay": 1e-5, "augment": "tiny", "seed": 7, "precision": "bf16", "device": "cpu", "compile": True,
    "log_every": 5, "evaluate_on": "validation", "save_every": 2, "positives_in_denominator": "all",
    "num_negatives": "mass", "reduction": "pairs", "version": "v3", "queue": 128, "momentum": 0.9,
    "gamma": 0.5, "burn_in": 0.25, "num_steps": 100, "forget": True, "objective": "rince(q=0.1)", "rho": 0.1,
    "generate": "mochi(num_hardest=8)", "encode_chunk": 64, "optimizer": "sgd", "schedule": "cosine(warmup=1)",
    "clip": 1.0, "accumulate": 2, "save_every_steps": 10, "monitor": "svm", "monitor_every": 2,
    "validation_share": 0.1, "evaluate_with": "sts:there", "head": "mlp", "encoders": "one", "directions": "both",
    "context_size": 2, "loss": "softmax", "num_draws": 8, "clusters": 5, "cluster_runs": 2, "cluster_every": 3,
    "warmup": 2, "cache": 100, "cache_refresh": 0.1, "four_losses": True, "text_encoder": "hashed",
}  # fmt: skip
"""A value for every option that is not its default."""


def hardneg(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), prog_name="hardneg", env={"COLUMNS": "250", "NO_COLOR": "1"})


allowed: list[bool] = []
"""Of the calls of ``run_recipe``: whether other data is allowed."""


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, TrainOptions, Path, bool]]:
    """What the verb hands over to the recipe, which is not run."""
    seen: list[tuple[str, TrainOptions, Path, bool]] = []

    def note(recipe: str, options: TrainOptions, out: Path, resume: bool, allow_other_data: bool) -> dict[str, Any]:
        seen.append((recipe, options, out, resume))
        allowed.append(allow_other_data)
        return {}

    monkeypatch.setattr(recipes, "run_recipe", note)
    return seen


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Comparison, Path, int]]:
    seen: list[tuple[Comparison, Path, int]] = []
    monkeypatch.setattr(table, "compare_and_show", lambda *what: seen.append(what))
    return seen


@pytest.fixture
def data(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    arrays = {"images": rng.integers(0, 255, (64, 8, 8), dtype=np.uint8), "labels": np.arange(64) % 4}
    np.savez(tmp_path / "data.npz", **arrays)
    return f"npz:{tmp_path / 'data.npz'}"


def flags(values: dict[str, Any]) -> list[str]:
    lines = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        lines += ([flag] if value else []) if isinstance(value, bool) else [flag, str(value)]
    return lines


# A file and flags


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_file_and_flags_say_the_same(recipe: str, requested: list[Any], tmp_path: Path) -> None:
    values = {one.name: OTHER[one.name] for one in fields(RECIPES[recipe])}
    assert all(getattr(RECIPES[recipe], name) != value for name, value in values.items())
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    for arguments in (flags(values), ["--config", str(tmp_path / "run.yaml")]):
        done = hardneg("train", recipe, *arguments)
        assert done.exit_code == 0, done.output
    (_, by_flags, _, _), (_, by_file, _, _) = requested
    assert by_flags == by_file == RECIPES[recipe](**values)


def test_flags_win_over_the_file(requested: list[Any], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("temperature: 0.1\nseed: 3\n")
    # The flag counts even where it says the default.
    hardneg("train", "simclr", "--config", str(tmp_path / "run.yaml"), "--temperature", "0.5", "--resume")
    [(recipe, options, out, resume)] = requested
    assert (recipe, options.temperature, options.seed, out, resume) == ("simclr", 0.5, 3, "runs/simclr", True)


def test_the_file_may_say_where_and_whether_to_go_on(requested: list[Any], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("out: runs/mine\nresume: true\n")
    hardneg("train", "simclr", "--config", str(tmp_path / "run.yaml"))
    hardneg("train", "simclr", "--config", str(tmp_path / "run.yaml"), "--out", "runs/other")
    assert [(out, resume) for _, _, out, resume in requested] == [("runs/mine", True), ("runs/other", True)]


@pytest.mark.parametrize("verb", [("train", "simclr"), ("compare",)])
def test_a_file_that_is_not_there_is_named(verb: tuple[str, ...], tmp_path: Path) -> None:
    for path, what in ((tmp_path / "nope.yaml", "none"), (tmp_path, "a folder")):
        done = hardneg(*verb, "--config", str(path))
        assert done.exit_code == 2
        assert f"--config needs a YAML file, got {path}, where there is {what}." in " ".join(done.stderr.split())


def test_the_file_is_read_as_flags_are(requested: list[Any], tmp_path: Path) -> None:
    """YAML takes 1e-3 for a word, and no for False."""
    (tmp_path / "run.yaml").write_text("learning-rate: 1e-4\nprecision: no\ntemperature: 1\n")
    done = hardneg("train", "simclr", "--config", str(tmp_path / "run.yaml"))
    assert done.exit_code == 0, done.stderr
    [(_, options, _, _)] = requested
    assert (options.learning_rate, options.precision, options.temperature) == (1e-4, "no", 1)


def test_a_comparison_from_a_file(compared: list[Any], tmp_path: Path) -> None:
    arms = ["simclr(temperature=0.5)", "hcl() @ knn()"]
    text = {"arms": arms, "seeds": 4, "epochs": 2, "encoder": "tiny", "learning_rate": "1e-4", "tune": "dim=8,16"}
    (tmp_path / "both.yaml").write_text(yaml.safe_dump(text))
    by_flags = ["--arm", arms[0], "--arm", arms[1], "--seeds", "4", "--epochs", "2", "--option", "encoder=tiny"]
    for arguments in (["--config", str(tmp_path / "both.yaml")], [*by_flags, "--option", "learning_rate=1e-4"]):
        done = hardneg("compare", *arguments, "--tune", "dim=8,16")
        assert done.exit_code == 0, done.stderr
    (by_file, where, jobs, other_data), (by_flag, *_) = compared
    assert by_file == by_flag
    assert (where, jobs, other_data) == ("runs/compare", None, False)
    hardneg("compare", "--config", str(tmp_path / "both.yaml"), "--seeds", "2", "--option", "encoder=resnet18")
    assert (compared[-1][0].seeds, compared[-1][0].common["encoder"]) == (2, "resnet18")


def test_the_benchmark_of_a_comparison_has_a_flag(compared: list[Any], tmp_path: Path) -> None:
    arms = ("--arm", "simcse()", "--arm", "simcse(temperature=0.1)", "--out", str(tmp_path))
    hardneg("compare", "--data", "text:a.txt", "--evaluate-with", "sts:b.tsv", *arms)
    assert compared[0][0].common["evaluate_with"] == "sts:b.tsv"
    hardneg("compare", "--data", "text:a.txt", *arms)
    assert "evaluate_with" not in compared[1][0].common, "folders of earlier versions have none"


@pytest.mark.parametrize(("recipe", "noun"), [("simcse", "texts"), ("pairs", "texts"), ("graphcl", "graphs")])
def test_the_help_speaks_of_the_items_of_the_recipe(recipe: str, noun: str) -> None:
    shown = hardneg("train", recipe, "--help").output
    assert "image" not in shown
    assert noun in shown


@pytest.mark.parametrize("recipe", ["simclr", "moco", "supervised"])
def test_point_4_temperature_and_tau_plus_may_be_schedules(recipe: str, requested: list[Any], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text('temperature: linear(0.5, 0.1)\ntau-plus: "linear(0, 0.1)"\n')
    by_flags = ("--temperature", "linear(0.5, 0.1)", "--tau-plus", "linear(0, 0.1)")
    for arguments in (by_flags, ("--config", str(tmp_path / "run.yaml"))):
        done = hardneg("train", recipe, *arguments)
        assert done.exit_code == 0, done.output
        assert (requested[-1][1].temperature, requested[-1][1].tau_plus) == ("linear(0.5, 0.1)", "linear(0, 0.1)")
        check_words(requested[-1][1])
    hardneg("train", recipe, "--temperature", "0.25")
    assert requested[-1][1].temperature == 0.25  # a number in files, too


@pytest.mark.parametrize(
    ("recipe", "flag", "text", "message"),
    [
        ("simclr", "--temperature", "linear(0.5, 0)", "of at least 0.0001, got linear(0.5, 0), which ends"),
        (
            "simclr",
            "--tau-plus",
            "linear(2, 0.1)",
            "between 0 and 0.999, got linear(2, 0.1), which begins at 2",
        ),
        ("simclr", "--temperature", "liner(0.5, 0.1)", "Did you mean linear?"),
        ("simclr", "--temperature", "linear(0.5)", "it takes start, end"),
        ("simclr", "--temperature", "linear", "a number or a schedule"),
        ("sogclr", "--temperature", "linear(0.5, 0.1)", "a number as --temperature"),
        ("emc2", "--tau-plus", "linear(0, 0.1)", "--tau-plus of 0"),
    ],
)
def test_wrong_schedules_are_named_before_data_is_loaded(
    recipe: str, flag: str, text: str, message: str, tmp_path: Path
) -> None:
    done = hardneg("train", recipe, flag, text, "--data", "npz:nowhere.npz", "--out", str(tmp_path / "run"))
    assert done.exit_code == 2
    assert message in done.stderr
    assert not (tmp_path / "run").exists()


def test_other_data_is_allowed_by_a_flag(requested: list[Any], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("allow-other-data: true\n")
    hardneg("train", "simclr", "--resume")
    hardneg("train", "simclr", "--resume", "--allow-other-data")
    hardneg("train", "simclr", "--resume", "--config", str(tmp_path / "run.yaml"))
    assert allowed[-3:] == [False, True, True]


# Wrong values


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("epocs: 3", "'epocs' is not known. Did you mean epochs? It is a whole number of at least 1, by default 50."),
        ("tempratur: 0.1", "Did you mean temperature? It is a number or a schedule"),
        ("precison: no", "Did you mean precision? It is one of no, bf16, fp16, by default no."),
        ("resum: true", "Did you mean resume? It is true or false, by default False."),
        ("zzz: 1", "FILE: 'zzz' is not known. Known: data, "),
    ],
)
def test_point_12_an_unknown_name_in_a_file_gets_the_nearest(text: str, answer: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    done = hardneg("train", "simclr", "--config", str(file))
    assert done.exit_code == 2
    assert answer.replace("FILE", str(file)) in done.stderr


def test_point_12_an_unknown_argument_gets_the_nearest(tmp_path: Path) -> None:
    done = hardneg("train", "simclr", "--negatives", "Tilt(betta=1)", "--out", str(tmp_path / "run"))
    assert done.exit_code == 2
    assert "did you mean beta? It takes beta, detach=False, source=None" in done.stderr


WRONG = [
    ("--epochs 0", "--epochs", "of at least 1"),
    ("--epochs many", "--epochs", "integer"),
    ("--temperature 0", "--temperature", "of at least 0.0001"),
    ("--temperature nan", "--temperature", "of at least 0.0001"),
    ("--learning-rate inf", "--learning-rate", "of at least 0"),
    ("--tau-plus 1", "--tau-plus", "between 0 and 0.999"),
    ("--precision half", "--precision", "no, bf16, fp16"),
    ("--num-negatives some", "--num-negatives", "support, candidates, mass"),
    ("--tempratur 1", "--tempratur", "--temperature"),
]


def test_wrong_values_are_named_before_anything_is_loaded() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from hardneg.cli.app import app\n"
        f"for words in {[words for words, *_ in WRONG]!r}:\n"
        "    done = CliRunner().invoke(app, ['train', 'simclr', *words.split()], env={'COLUMNS': '250'})\n"
        "    print(repr((words, done.exit_code, done.stderr, done.stdout)))\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *lines, loaded = done.stdout.splitlines()
    assert loaded == "False"
    for (words, option, allowed), line in zip(WRONG, lines, strict=True):
        words_of, exit_code, reported, printed = eval(line)
        assert (words_of, exit_code, printed) == (words, 2, "")
        assert option in reported
        assert allowed in reported, reported


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("augment", "cifr", "Did you mean cifar?"),
        ("augment", "cifar(blur=1)", "blur_probability"),
        ("negatives", "SameCluster()", "candidates of the batch"),
        ("batches", "near()", "proximity"),
        ("encoder", "resnet19", "Did you mean resnet18?"),
    ],
)
def test_wrong_words_are_named_before_data_is_loaded(option: str, value: str, allowed: str, tmp_path: Path) -> None:
    """The data is not there, and is not read."""
    done = hardneg("train", "simclr", f"--{option}", value, "--data", "npz:nowhere.npz", "--out", str(tmp_path / "run"))
    reported = " ".join(done.stderr.split())
    assert done.exit_code == 2
    assert value.partition("(")[0] in reported
    assert allowed in reported
    assert "nowhere" not in reported
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("epochs: 0", "train needs --epochs of at least 1, got 0."),
        ("epochs: 2.5", "train needs --epochs to be a whole number, got 2.5."),
        ("epochs: many", "train needs --epochs to be a whole number, got 'many'."),
        ("epochs: true", "train needs --epochs to be a whole number, got True."),
        (
            "temperature: warm",
            """train needs --temperature to be a number or a schedule such as "linear(0.5, 0.1)", got""",
        ),
        ("negatves: Tilt(1.0)", "Did you mean negatives?"),
        ("temperature: .nan", "train needs --temperature of at least 0.0001, got nan."),
        ("tau_plus: 1.0", "train needs --tau-plus between 0 and 0.999, got 1.0."),
        ("compile: sometimes", "train needs --compile to be true or false, got 'sometimes'."),
        ("negatives: [Uniform()]", "train needs --negatives to be text, got ['Uniform()']."),
        ("device: tpu", "train needs --device to be one of auto, cpu, cuda, got 'tpu'."),
        ("epoch: 1", "Did you mean epochs?"),
        ("- epochs", "--config needs lines like 'temperature: 0.5', got "),
        ("epochs: [", "which is no YAML in line 1: expected the node content, but found"),
    ],
)
def test_wrong_files_are_named(text: str, reported: str, requested: list[Any], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    done = hardneg("train", "simclr", "--config", str(tmp_path / "run.yaml"))
    assert done.exit_code == 2
    assert reported in done.stderr
    assert requested == []


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        ((), "at least two arms"),
        (("--arm", "simclr()"), "at least two arms"),
        (("--arm", "simclr()", "--arm", "simclr()"), "arms that differ"),
        (
            ("--arm", "simclr()", "--arm", "hcl()", "--metric", "f1"),
            "--metric to be one of auto, knn, 1nn, linear, retrieval",
        ),
        (("--arm", "simclr()", "--arm", "hcl()", "--seeds", "1"), "--seeds"),
        (("--arm", "simclr()", "--arm", "hcl()", "--tune", "temperature"), "temperature=0.1,0.2"),
        (
            ("--arm", "simclr()", "--arm", "hcl()", "--option", "epoch=3"),
            "--option: 'epoch' is not known. Did you mean",
        ),
        (("--arm", "simclr()", "--arm", "hcl()", "--tune", "temprature=1,2"), "--tune: 'temprature' is not known. Did"),
        (
            ("--arm", "simclr()", "--arm", "hcl()", "--data", "digit"),
            "--data: 'digit' is not known. Did you mean digits?",
        ),
        (("--arm", "simclr()", "--arm", "hcl(beta=-1)"), "beta in [0.0, inf), got beta=-1"),
        (("--arm", "simclr()", "--arm", "simclr(temperature=0)"), "a temperature above 0, got temperature=0"),
        (("--arm", "simclr()", "--arm", "smclr()"), "Did you mean simclr?"),
        (("--arm", "simclr()", "--arm", "simclr() @ proximty()"), "Did you mean proximity?"),
        (("--config", "no-such-file.yaml", "--arm", "hcl()"), "no-such-file.yaml"),
    ],
)
def test_a_wrong_comparison_is_named_before_anything_runs(
    arguments: tuple[str, ...], reported: str, tmp_path: Path
) -> None:
    done = hardneg("compare", *arguments, "--out", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert reported in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()


# Exit codes


def short(data: str, out: Path, **options: Any) -> list[str]:
    usual = {"data": data, "epochs": 3, "batch_size": 32, "dim": 8, "log_every": 1, "device": "cpu", "out": out}
    return ["train", "simclr", *flags(usual | options)]


def test_what_the_disk_refuses_is_1_and_what_is_wrong_is_2(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, **how: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        refused = hardneg(*short(data, tmp_path / "mine" / "run"))
    assert (refused.exit_code, "mine" in refused.stderr) == (1, True), refused.output
    missing = hardneg(*short("npz:nowhere.npz", tmp_path / "run"))
    assert (missing.exit_code, "nowhere.npz" in missing.stderr) == (2, True)
    for verb in ("evaluate", "report"):
        nothing = hardneg(verb, str(tmp_path / "nowhere"))
        assert (nothing.exit_code, "nowhere" in nothing.stderr) == (2, True)


def test_a_failed_run_of_a_comparison_is_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise RunFailed(Path("runs/simclr-0"), "exit code 1: MemoryError")

    monkeypatch.setattr(table, "compare_and_show", fail)
    done = hardneg("compare", "--arm", "simclr()", "--arm", "hcl()", "--out", str(tmp_path))
    assert done.exit_code == 1
    assert " ".join(done.stderr.split()).startswith("runs/simclr-0 failed, exit code 1: MemoryError. Fix or remove")


def test_ctrl_c_leaves_a_run_that_goes_on(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = hardneg(*short(data, tmp_path / "whole"))
    assert whole.exit_code == 0, whole.output
    with monkeypatch.context() as patch:
        patch.setattr(training.Loop, "_one_step", interrupted_after(2, training.Loop._one_step))
        stopped = hardneg(*short(data, tmp_path / "run"))
    assert stopped.exit_code == 130
    assert "run the same command with --resume" in stopped.stderr
    refused = hardneg(*short(data, tmp_path / "run"))
    assert (refused.exit_code, "--resume" in refused.stderr) == (2, True)
    resumed = hardneg(*short(data, tmp_path / "run"), "--resume")
    assert resumed.exit_code == 0, resumed.output
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "run")]
    assert results[0]["final"] == results[1]["final"]
    assert results[0]["knn"] == results[1]["knn"]


@pytest.mark.parametrize(("rank", "printed"), [("0", "run: runs/simclr"), ("1", "")])
def test_of_several_ranks_the_first_speaks(
    rank: str, printed: str, requested: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    done = hardneg("train", "simclr")
    assert len(requested) == 1
    assert done.stdout.strip().endswith(printed)
    assert bool(done.stdout.strip()) == bool(printed)


def test_evaluate_says_why_a_finished_run_has_no_embeddings(tmp_path: Path) -> None:
    begun = hardneg("evaluate", str(tmp_path))
    assert (begun.exit_code, "which is not there; train first." in begun.stderr) == (2, True)
    (tmp_path / "result.json").write_text("{}")
    finished = hardneg("evaluate", str(tmp_path))
    assert (finished.exit_code, "train first" in finished.stderr) == (2, False)
    assert "the run is finished, but its data has no labels, or one class only" in finished.stderr


def interrupted_after(steps: int, step: Any) -> Any:
    done: list[None] = []

    def one(self: Any, *arguments: Any) -> None:
        if len(done) == steps:
            raise KeyboardInterrupt
        done.append(None)
        step(self, *arguments)

    return one


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("verb", ["train", "compare"])
def test_a_real_sigint_ends_the_process_with_130(verb: str, data: str, tmp_path: Path) -> None:
    endless = {"data": data, "epochs": 100_000, "batch_size": 32, "out": tmp_path}
    arms = {"train": ["simclr"], "compare": ["--arm", "simclr()", "--arm", "hcl()", "--jobs", "1"]}
    command = [sys.executable, "-m", "hardneg", verb, *arms[verb], *flags(endless)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background of a shell ignores Ctrl-C, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        deadline = time.monotonic() + 120
        while not any(tmp_path.rglob("checkpoint.pt")) and time.monotonic() < deadline:
            assert process.poll() is None, process.stderr
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)  # to this process alone: the runs of a comparison are stopped by it
        _, reported = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in reported
    assert {"train": "with --resume", "compare": "give the same command again"}[verb] in reported
    assert any(tmp_path.rglob("checkpoint.pt"))


# The help


def examples(*verb: str) -> list[list[str]]:
    """The commands that the help offers, without the remark behind them."""
    lines = re.findall(r"^\s*(hardneg .*?)\s*$", hardneg(*verb, "--help").output, re.MULTILINE)
    return [shlex.split(re.sub(r"\s{3}\(.*\)$", "", line))[1:] for line in lines]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_examples_of_train_are_understood(recipe: str, requested: list[Any], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("epochs: 3\n")
    (tmp_path / "sts.tsv").write_text("sentence1\tsentence2\tscore\na\tb\t1.0\na\tc\t2.0\n")
    commands = examples("train", recipe)
    assert commands
    for command in commands:
        command = [str(tmp_path / word) if word == "run.yaml" else word for word in command]
        command = [word.replace("sts:", f"sts:{tmp_path}/") for word in command]
        done = hardneg(*command)
        assert done.exit_code == 0, (command, done.stderr)
        check_words(requested[-1][1])
    assert {one[0] for one in requested} == {recipe}
    assert len({str(one[1:]) for one in requested}) == len(requested), "no two examples are the same"


def test_the_examples_of_compare_are_understood(compared: list[Any], tmp_path: Path) -> None:
    (tmp_path / "comparison.yaml").write_text("arms: [simclr(), hcl()]\n")
    commands = examples("compare")
    assert len(commands) >= 4
    for command in commands:
        done = hardneg(*[str(tmp_path / word) if word == "comparison.yaml" else word for word in command])
        assert done.exit_code == 0, (command, done.stderr)
        for arm in compared[-1][0].arms:
            parse_arm(arm)


@pytest.mark.parametrize("verb", [*(("train", recipe) for recipe in RECIPES), ("compare",), ("report",), ("explain",)])
def test_every_example_stands_on_one_line_of_80_columns(verb: tuple[str, ...]) -> None:
    narrow = CliRunner().invoke(app, [*verb, "--help"], env={"COLUMNS": "80", "NO_COLOR": "1"}).output
    lines = [line.strip() for line in narrow.splitlines()]
    for command in re.findall(r"^\s*(hardneg .*?)\s*$", hardneg(*verb, "--help").output, re.MULTILINE):
        assert command in lines


@pytest.mark.parametrize("recipe", RECIPES)
def test_point_12_nothing_of_the_help_is_cut_at_80_columns(recipe: str) -> None:
    shown = CliRunner().invoke(app, ["train", recipe, "--help"], env={"COLUMNS": "80", "NO_COLOR": "1"}).output
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    words = " ".join(shown.replace("│", " ").split())
    for one in fields(RECIPES[recipe]):
        assert f"--{one.name.replace('_', '-')} " in words
        assert all(choice in words for choice in one.metadata["among"] or ())


def test_point_12_nothing_of_the_bar_is_cut_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1280.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    out = StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    with training_setup.progress_bar(False, 100_000, 0, 256, console) as show:
        show({"step": 99_999, "epoch": 998, "loss": 4.1234, "hardness": -0.123})
    assert "…" not in out.getvalue()
    assert re.search(r"99999/100000 epoch 999 loss 4.123 hardness -0.12 20000 images/s", out.getvalue())


@pytest.mark.skipif(os.name == "nt", reason="processor time of POSIX")
def test_help_takes_less_than_half_a_second() -> None:
    """Of processor time on an idle machine; on a busy one, where all takes longer, as compared with typer alone."""
    alone = min(processor_seconds("-c", "import typer.rich_utils") for _ in range(3))
    ours = min(processor_seconds("-m", "hardneg", "--help") for _ in range(3))
    assert ours < max(0.5, 3.5 * alone)


def processor_seconds(*arguments: str) -> float:
    before = os.times()
    subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


# The page


def test_the_arms_and_lines_of_the_page_are_understood(requested: list[Any]) -> None:
    page = (ROOT / "docs" / "guides" / "training.md").read_text()
    arms = [
        arm for row in re.findall(r"^\| (`.*?) \| .* \|$", page, re.MULTILINE) for arm in re.findall("`(.*?)`", row)
    ]
    arms = [arm for arm in arms if re.match(r"[a-z_0-9]+\(", arm) and not arm.startswith(("proximity", "evaluate"))]
    assert len(arms) >= 12
    for arm in arms:
        parse_arm(arm).complete()
    lines = re.findall(r"^\| [^|`]+ \| `((?:simclr|supervised|moco|sogclr|emc2)\b.*?)`", page, re.MULTILINE)
    assert len(lines) >= 11
    for line in lines:
        done = hardneg("train", *shlex.split(line))
        assert done.exit_code == 0, done.stderr
        check_words(requested[-1][1])


def test_the_figures_of_the_page_are_those_of_the_benchmarks() -> None:
    page = (ROOT / "docs" / "guides" / "training.md").read_text()
    results = ROOT / "benchmarks" / "results"
    figures = json.loads((results / "training_gpu.json").read_text())["figures"]
    for name, row in (("uniform", "uniform"), ("harvested", "proximity")):
        (shown,) = re.findall(rf"^\| {row}, seconds an epoch \| (.*) \|$", page, re.MULTILINE)
        assert shown.split(" | ") == [f"{pair[name]['mean']:.2f}" for pair in figures["pairs"]]
    (shown,) = re.findall(r"^\| difference \| (.*) \|$", page, re.MULTILINE)
    assert shown.split(" | ") == [f"{100 * (ratio - 1):+.1f} %" for ratio in figures["ratios"]]
    fifty = json.loads((results / "cifar10_fifty.json").read_text())["runs"]
    rows = {f"simclr-{t}": f"SimCLR, temperature {t}" for t in (0.5, 0.25, 0.1)} | {"hcl": "HCL, temperature 0.5.*"}
    for name, row in rows.items():
        (shown,) = re.findall(rf"^\| {row} \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
        assert shown == (f"{100 * fifty[name]['linear']:.1f}", f"{100 * fifty[name]['knn']:.1f}")
