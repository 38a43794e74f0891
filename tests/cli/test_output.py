"""What every verb has in common: short and full help, one line of JSON, silence, and bars in terminals only."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.main import get_command

import hardneg as hn
from hardneg.cli.app import app
from hardneg.io.terminal import progress_bars
from hardneg.mining.options import MineOptions
from hardneg.training.options import RECIPES
from support.command import hardneg, help_of


def verbs(command: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    below = getattr(command, "commands", None)
    return [leaf for name in sorted(below) for leaf in verbs(below[name], (*path, name))] if below else [path]


VERBS = verbs(get_command(app))


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_verb_has_the_general_flags(verb: tuple[str, ...]) -> None:
    shown = help_of(*verb, flag="-h")
    assert shown == help_of(*verb, flag="--help")
    for flag in ("--json", "--quiet", "-q", "--help"):
        assert f"{flag} " in shown, flag
    assert hardneg(*verb, "-V").output.strip() == hn.__version__


def test_the_group_of_recipes_has_a_version() -> None:
    assert hardneg("train", "-V").output.strip() == hn.__version__


def test_the_short_help_shows_the_common_options_and_the_full_one_all() -> None:
    short, full = help_of("mine", flag="-h"), help_of("mine", flag="--help-all")
    names = [f"--{one.name.replace('_', '-')} " for one in fields(MineOptions) if one.name not in ("queries", "k")]
    names = [name for name in names if name not in ("--columns ", "--imports ", "--runs ", "--quotas ")]
    assert all(name in full for name in names)
    assert sum(name in short for name in names) < len(names) / 2
    for flag in ("--corpus ", "--negatives ", "-k ", "--model ", "--out ", "--jobs ", "--help-all "):
        assert flag in short
    assert "--ray-address" not in short
    again = help_of("mine", flag="-h", columns=249)  # the full help has not changed the command
    assert "--ray-address" not in again


@pytest.mark.parametrize(("recipe", "own"), [("moco", "--queue"), ("supervised", "--reduction"), ("emc2", "--burn-in")])
def test_the_short_help_of_a_recipe_has_its_own_options(recipe: str, own: str) -> None:
    short = help_of("train", recipe, flag="-h")
    assert own in short
    assert "--log-every" not in short


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_the_same_thing_has_the_same_flag(verb: tuple[str, ...]) -> None:
    command = get_command(app)
    for name in verb:
        command = command.commands[name]  # type: ignore[attr-defined]
    short = {"negatives": "-n", "out": "-o", "jobs": "-j", "quiet": "-q"}
    for one in command.params:
        if one.name in short:
            assert set(one.opts) == {f"--{one.name}", short[one.name]}
    if verb[0] in ("train", "mine", "compare"):
        (resume,) = [one for one in command.params if one.name == "resume"]
        assert (resume.opts, resume.secondary_opts) == (["--resume"], ["--no-resume"])


def test_the_choices_of_an_option_are_shown() -> None:
    full = help_of("mine", flag="--help-all")
    for choices in ("top, gumbel, categorical", "cosine, dot", "triplet, n-tuple, labeled-pair", "exact, flat, ivf"):
        assert f"One of {choices}" in full


@pytest.fixture
def embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rng = np.random.default_rng(0)
    np.save(tmp_path / "z.npy", rng.standard_normal((40, 8), dtype=np.float32))
    np.save(tmp_path / "d.npy", rng.standard_normal((60, 8), dtype=np.float32))
    np.save(tmp_path / "labels.npy", np.arange(40) % 4)
    (tmp_path / "j.csv").write_text("query,document,score\n" + "".join(f"{i},{i},1\n" for i in range(40)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


MINE = ("mine", "z.npy", "--corpus-embeddings", "d.npy", "--judgements", "j.csv", "--format", "ids", "-o", "m.jsonl")
AUDIT = ("audit", "z.npy", "--labels", "labels.npy", "-n", "Tilt(1.0)", "--no-frontier")
CALLS: dict[str, tuple[tuple[str, ...], str]] = {
    "mine": (MINE, "rows_written"),
    "mine --dry-run": ((*MINE, "--dry-run"), "disk_bytes"),
    "audit": (AUDIT, "rows"),
    "explain": (("explain", "Tilt(1.0)"), "factors"),
    "explain, all": (("explain",), "distributions"),
}


@pytest.mark.parametrize("call", CALLS)
def test_json_is_one_line_on_standard_output(call: str, embeddings: Path) -> None:
    command, key = CALLS[call]
    done = hardneg(*command, "--json")
    assert done.exit_code == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert key in json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.mark.parametrize("call", CALLS)
def test_quiet_prints_nothing_and_still_does_the_work(call: str, embeddings: Path) -> None:
    done = hardneg(*CALLS[call][0], "--quiet")
    assert (done.exit_code, done.stdout) == (0, "")
    assert (embeddings / "m.jsonl").exists() == (call == "mine")
    assert (embeddings / "audit" / "audit.json").exists() == (call == "audit")


def test_quiet_still_prints_errors(embeddings: Path) -> None:
    done = hardneg("mine", "missing.npy", "-o", "m.jsonl", "--quiet")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "missing.npy" in done.stderr


def test_train_report_and_export_as_json(data: str, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    small = ("--epochs", "1", "--batch-size", "32", "--dim", "8", "--device", "cpu")
    trained = hardneg("train", "simclr", "--data", data, *small, "-o", run, "--json")
    assert trained.exit_code == 0, trained.stderr
    found = json.loads(trained.stdout)
    assert (found["run"], found["epochs"]) == (run, 1)
    exported = json.loads(hardneg("export", run, "--json").stdout)
    assert Path(exported["path"]).exists()
    page = json.loads(hardneg("report", run, "--json").stdout)
    assert Path(page["report"]).exists()
    refused = hardneg("train", "simclr", "--data", data, *small, "-o", run, "--no-resume")
    assert refused.exit_code == 2


def test_no_resume_raises_if_there_is_a_run(embeddings: Path) -> None:
    (embeddings / "m.jsonl.work").mkdir()
    refused = hardneg(*MINE, "--no-resume")
    assert (refused.exit_code, "m.jsonl.work" in refused.stderr) == (2, True)
    assert hardneg(*MINE).exit_code == 0
    (embeddings / "c").mkdir()
    (embeddings / "c" / "request.json").write_text("{}")
    compared = hardneg("compare", "--arm", "simclr()", "--arm", "hcl()", "-o", "c", "--no-resume")
    assert (compared.exit_code, "--no-resume" in compared.stderr) == (2, True)


def test_a_bar_names_its_phase_and_moves_while_a_step_lasts() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    with progress_bars(console=console) as bars:
        bars("encode", 10)(3, "note")
        bars("evaluate", None)
        before = len(out.getvalue())
        time.sleep(1.1)
        assert len(out.getvalue()) > before
    assert "encode" in out.getvalue()
    assert "3/10" in out.getvalue()
    assert "note" in out.getvalue()
    assert "0:00:01" in out.getvalue()  # the time elapsed, where the number of steps is unknown


@pytest.mark.parametrize("quiet", [False, True])
def test_bars_are_silent_in_pipes_and_with_quiet(quiet: bool) -> None:
    out = io.StringIO()
    with progress_bars(quiet, Console(file=out, force_terminal=quiet)) as bars:
        bars("train", 2)(2)
    assert out.getvalue() == ""


def test_nothing_of_a_bar_is_in_a_pipe(embeddings: Path) -> None:
    command = [sys.executable, "-m", "hardneg", *AUDIT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "\x1b" not in done.stdout + done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("hardneg ", {"mine", "audit", "train", "compare", "explain"}),
        ("hardneg train ", set(RECIPES)),
        ("hardneg mine q --draw ", {"top", "gumbel", "categorical"}),
        ("hardneg mine q --format n", {"n-tuple"}),
    ],
)
def test_a_shell_completes_verbs_recipes_and_choices(typed: str, completed: set[str]) -> None:
    shell = {"_HARDNEG_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split(" ")) - 1)}
    script = "import sys; from hardneg.cli.app import main; main(); 'torch' in sys.modules and print('torch')"
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, **shell}, capture_output=True, text=True)
    assert completed <= set(done.stdout.split())
    assert "torch" not in done.stdout
