"""The help and the guide of train and compare: examples that work, and nothing is cut at 80 columns."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import fields
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hardneg.comparing.arms import parse_arm
from hardneg.training.loop import parts as training_setup
from hardneg.training.loop.checks import check_words
from hardneg.training.options import RECIPES
from support.command import hardneg, help_of

pytest.importorskip("yaml", reason="configuration files need the extra train")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("recipe", "noun"), [("simcse", "texts"), ("pairs", "texts"), ("graphcl", "graphs")])
def test_the_help_speaks_of_the_items_of_the_recipe(recipe: str, noun: str) -> None:
    shown = help_of("train", recipe)
    assert "image" not in re.sub("--(cache|bad)-images", "", shown)
    assert noun in shown


def examples(*verb: str) -> list[list[str]]:
    """The commands that the help offers, without the remark behind them."""
    lines = re.findall(r"^\s*(hardneg .*?)\s*$", help_of(*verb), re.MULTILINE)
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
    lines = [line.strip() for line in help_of(*verb, columns=80).splitlines()]
    for command in re.findall(r"^\s*(hardneg .*?)\s*$", help_of(*verb), re.MULTILINE):
        assert command in lines


@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_of_the_help_is_cut_at_80_columns(recipe: str) -> None:
    shown = help_of("train", recipe, columns=80)
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    words = " ".join(shown.replace("│", " ").split())
    for one in fields(RECIPES[recipe]):
        assert f"--{one.name.replace('_', '-')} " in words
        assert all(choice in words for choice in one.metadata["among"] or ())


def test_nothing_of_the_bar_is_cut_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0128])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    out = StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    with training_setup.progress_bar(False, 100_000, 99_998, 256, console) as show:
        show({"step": 99_999, "epoch": 998, "loss": 4.1234, "hardness": -0.123})
    assert "…" not in out.getvalue()
    assert re.search(r"train \S+ +99999/100000 epoch 999 loss 4.123 hardness -0.12 20000/s", out.getvalue())


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


def test_the_figures_of_the_page_are_those_of_the_benchmark() -> None:
    page = " ".join((ROOT / "docs" / "guides" / "training.md").read_text().split())
    figures = json.loads((ROOT / "benchmarks" / "results" / "training_gpu.json").read_text())["figures"]
    seconds = [pair["uniform"]["mean"] for pair in figures["pairs"]]
    assert f"takes {min(seconds):.1f} to {max(seconds):.1f} s" in page
    assert f"Hard batches add {100 * (figures['mean'] - 1):.1f} % on average in six pairs" in page
    assert len(seconds) == 6
