"""train and compare on the command line: exit codes, Ctrl-C, and who writes to the terminal."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hardneg.cli import tables as table
from hardneg.comparing.runs import RunFailed
from hardneg.training.loop import train as training
from support.command import flags, hardneg


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
    assert (begun.exit_code, "which does not exist; train the run first." in begun.stderr) == (2, True)
    (tmp_path / "result.json").write_text("{}")
    finished = hardneg("evaluate", str(tmp_path))
    assert (finished.exit_code, "train the run first" in finished.stderr) == (2, False)
    assert "the run is finished, but its data has no labels or a single class" in finished.stderr


def test_an_error_of_the_users_own_code_has_its_place(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def encoder(channels):\n    raise ValueError('too few channels')\n")
    mine = f"{tmp_path / 'mine.py'}:encoder"
    trained = hardneg("train", "simclr", "--encoder", mine, "--out", str(tmp_path / "run"))
    said = "".join(trained.stderr.split())
    assert (trained.exit_code, said) == (2, f"toofewchannels(ValueErrorin{tmp_path / 'mine.py'},line2)")
    arms = ["--arm", "simclr()", "--arm", f"simclr(encoder={mine!r})"]
    compared = hardneg("compare", *arms, "--out", str(tmp_path / "compared"))
    assert (compared.exit_code, "cannot be trained: too few channels" in " ".join(compared.stderr.split())) == (2, True)


def test_evaluate_refuses_options_that_would_have_no_effect(tmp_path: Path) -> None:
    split = hardneg("evaluate", str(tmp_path), "--split", "dev")
    assert (split.exit_code, "--sts or --beir for --split" in split.stderr) == (2, True)
    best = hardneg("evaluate", str(tmp_path), "--weights", "best")
    assert (best.exit_code, "encode the data of the run again with --on DATA" in " ".join(best.stderr.split())) == (
        2,
        True,
    )
    both = hardneg("evaluate", str(tmp_path), "--on", "digits", "--sts", "sts.tsv")
    assert (both.exit_code, "either --on or a text benchmark" in both.stderr) == (2, True)


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
    assert {"train": "with --resume", "compare": "run the same command again"}[verb] in reported
    assert any(tmp_path.rglob("checkpoint.pt"))
