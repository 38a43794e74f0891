"""train and compare on the command line: files and flags agree."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from hardneg.training import recipes
from hardneg.training.loop.checks import check_words
from hardneg.training.options import RECIPES
from support.command import flags, hardneg

yaml = pytest.importorskip("yaml", reason="configuration files need the extra train")


OTHER = {
    "data": "npz:other.npz", "data_root": "there", "encoder": "resnet18", "dim": 64, "negatives": "Ring(0.1, 0.5)",
    "temperature": 0.06, "tau_plus": 0.05, "batches": "knn()", "epochs": 3, "batch_size": 32, "learning_rate": 3e-4,
    "weight_decay": 1e-5, "augment": "tiny", "seed": 7, "precision": "bf16", "device": "cpu", "compile": True,
    "log_every": 5, "evaluate_on": "validation", "save_every": 2, "positives_in_denominator": "all",
    "num_negatives": "mass", "reduction": "pairs", "version": "v3", "queue": 128, "momentum": 0.9,
    "gamma": 0.5, "burn_in": 0.25, "num_steps": 100, "forget": True, "ids": False,
    "objective": "rince(q=0.1)", "rho": 0.1,
    "generate": "mochi(num_hardest=8)", "encode_chunk": 64, "optimizer": "sgd", "schedule": "cosine(warmup=1)",
    "clip": 1.0, "accumulate": 2, "ema": 0.5, "patience": 3, "save_every_steps": 10, "monitor": "svm",
    "monitor_every": 2, "record": "similarities", "record_at": "1,5",
    "init": "runs/other", "max_steps": 9, "workers": 3, "cache_images": "none", "bad_images": "skip",
    "splits": "train=val,test=train",
    "validation_share": 0.1, "evaluate_with": "sts:there", "head": "mlp", "encoders": "one", "directions": "both",
    "context_size": 2, "loss": "softmax", "num_draws": 8, "clusters": 5, "cluster_runs": 2, "cluster_every": 3,
    "warmup": 2, "cache": 100, "cache_refresh": 0.1, "four_losses": True, "text_encoder": "hashed", "pooling": "mean",
    "token_pooling": "cls", "same_label_negatives": True, "hidden_dim": 64, "head_norm": "layer", "num_prototypes": 20,
    "epsilon": 0.1, "sinkhorn_steps": 5, "num_crops": 2, "frozen_epochs": 2, "cluster_positives": True,
    "items_per_epoch": 64, "proposals": "data set", "reencode": True, "num_views": 4, "num_support": 2, "num_found": 5,
    "threshold": 0.5, "found": "remove", "denominator": "emc2",
}  # fmt: skip
"""A value for every option that is not its default."""


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
    for path, what in ((tmp_path / "nope.yaml", "does not exist"), (tmp_path, "is a folder")):
        done = hardneg(*verb, "--config", str(path))
        assert done.exit_code == 2
        assert f"--config needs a YAML file, got {path}, which {what}." in " ".join(done.stderr.split())


def test_the_file_is_read_as_flags_are(requested: list[Any], tmp_path: Path) -> None:
    """YAML takes 1e-3 for a word, and no for False."""
    (tmp_path / "run.yaml").write_text("learning-rate: 1e-4\nweight-decay: 1e-5\nprecision: no\ntemperature: 1\n")
    done = hardneg("train", "simclr", "--config", str(tmp_path / "run.yaml"))
    assert done.exit_code == 0, done.stderr
    [(_, options, _, _)] = requested
    assert (options.learning_rate, options.weight_decay) == (1e-4, 1e-5)
    assert (options.precision, options.temperature) == ("no", 1)


def test_a_comparison_from_a_file(compared: list[Any], tmp_path: Path) -> None:
    arms = ["simclr(temperature=0.5)", "hcl() @ knn()"]
    text = {"arms": arms, "seeds": 4, "epochs": 2, "encoder": "tiny", "learning_rate": "1e-4", "tune": "dim=8,16"}
    (tmp_path / "both.yaml").write_text(yaml.safe_dump(text))
    by_flags = ["--arm", arms[0], "--arm", arms[1], "--seeds", "4", "--epochs", "2", "--option", "encoder=tiny"]
    for arguments in (["--config", str(tmp_path / "both.yaml")], [*by_flags, "--option", "learning_rate=1e-4"]):
        done = hardneg("compare", *arguments, "--tune", "dim=8,16")
        assert done.exit_code == 0, done.stderr
    (by_file, where, jobs, other_data, *_), (by_flag, *_) = compared
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


@pytest.mark.parametrize("recipe", ["simclr", "moco", "supervised"])
def test_temperature_and_tau_plus_may_be_schedules(recipe: str, requested: list[Any], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text('temperature: linear(0.5, 0.1)\ntau-plus: "linear(0, 0.1)"\n')
    by_flags = ("--temperature", "linear(0.5, 0.1)", "--tau-plus", "linear(0, 0.1)")
    for arguments in (by_flags, ("--config", str(tmp_path / "run.yaml"))):
        done = hardneg("train", recipe, *arguments)
        assert done.exit_code == 0, done.output
        assert (requested[-1][1].temperature, requested[-1][1].tau_plus) == ("linear(0.5, 0.1)", "linear(0, 0.1)")
        check_words(requested[-1][1])
    hardneg("train", recipe, "--temperature", "0.25")
    assert requested[-1][1].temperature == 0.25  # a number in files, too


def test_other_data_is_allowed_by_a_flag(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    allowed: list[bool] = []
    monkeypatch.setattr(recipes, "run_recipe", lambda *what, **how: allowed.append(how["allow_other_data"]) or {})
    (tmp_path / "run.yaml").write_text("allow-other-data: true\n")
    hardneg("train", "simclr", "--resume")
    hardneg("train", "simclr", "--resume", "--allow-other-data")
    hardneg("train", "simclr", "--resume", "--config", str(tmp_path / "run.yaml"))
    assert allowed == [False, True, True]
