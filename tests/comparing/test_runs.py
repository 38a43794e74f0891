"""The runs of a comparison: processes, threads, progress, failures and their data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hardneg.comparing import compare
from hardneg.comparing import runs as comparison_runs
from hardneg.comparing.arms import parse_arm
from hardneg.comparing.comparing import prepare
from hardneg.comparing.memory import ChildPipes, Machine, NotStarted, RunPlace, num_cores
from hardneg.comparing.progress import Watcher
from hardneg.comparing.request import Comparison
from hardneg.comparing.runs import Diverged, RunFailed, RunSettings, folder_of, in_a_process, run_all
from hardneg.core.errors import Damaged, DataChanged, FileError, MissingExtra, forget_warnings
from hardneg.io.files import write_json
from hardneg.reporting import write_report
from hardneg.training.loop.data_record import data_record
from hardneg.training.loop.parts import splits
from hardneg.training.loop.runs import Run
from hardneg.training.options import RECIPES, TrainOptions
from support.command import hardneg
from support.comparisons import Started, finish, nothing, result
from support.errors import raises, warns
from support.training_runs import few_digits, short


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
    compare(
        Comparison(("simclr(negatives='Uniform( )')", "hcl()"), 2, common), tmp_path, jobs=1, show=(lines := []).append
    )
    assert trained[4:] == [trained[3]]
    assert [": kept, as it was finished" in line for line in lines] == [True, True, True, False]
    assert len(list((tmp_path / "runs").iterdir())) == 4
    assert "no run directory with these options" not in write_report(tmp_path).read_text()


@pytest.mark.parametrize("batches", ["uniform()", "knn(warmup=1, refresh=1)"])
def test_a_process_says_that_its_training_diverged(batches: str, data: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="training needs the extra train")
    # Records are rare: without a graph the weights are found out at the end of the epoch, with one the graph is.
    wild = RECIPES["simclr"](**short(data, learning_rate=1e30, batches=batches, log_every=1000, epochs=3, save_every=3))
    with raises(Diverged, what="to finish"):
        in_a_process("simclr", wild, Run(tmp_path / "run"), {})


@pytest.mark.parametrize(
    ("environ", "jobs", "expected"), [("3", 1, 3), ("3,1", None, 3), (None, 2, 8), (None, None, 4), ("no", 16, 1)]
)
def test_a_run_has_the_threads_that_are_requested_or_its_share_of_the_cores(
    environ: str | None, jobs: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison_runs, "num_cores", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if environ is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", environ)
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
    tune = {"temperature": (0.1, 0.2)}
    first = compare(Comparison(("simclr()", "hcl()"), 2, short(data), tune), tmp_path, jobs=2, show=nothing)
    more = Comparison(("simclr()", "hcl()", "debiased()"), 3, short(data), tune)
    compare(more, tmp_path, jobs=1, show=nothing)
    assert (first["threads"], set(seen), len(seen)) == (4, {"4"}, 4 + 4 + 2 + 5)
    forget_warnings()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with warns("compare.threads"):
        compare(more, tmp_path, jobs=1, show=nothing)
    forget_warnings()
    other = replace(more, common=short(data, epochs=7), tune={})
    with raises(FileError, who="compare", got="'temperature'"):
        compare(other, tmp_path, show=nothing)
    (tmp_path / "request.json").write_text('{"common": ')
    with raises(Damaged, who="compare", path="request.json", got="column 12"):
        compare(more, tmp_path, show=nothing)


def child(code: int, reported: str) -> Callable[..., Any]:
    return lambda command, **how: subprocess.CompletedProcess(command, code, "", reported)


@pytest.mark.parametrize(
    ("code", "reported", "message"),
    [
        (3, "Traceback\n  ...\nValueError: too warm\n", "run failed, exit code 3: ValueError: too warm"),
        (-9, "", "run failed, killed by SIGKILL, as when memory runs out"),
        (0, "", "run failed, exit code 0: it printed nothing"),
    ],
)
def test_a_failed_run_says_how_it_ended(
    code: int, reported: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", child(code, reported))
    with pytest.raises(RunFailed) as failed:
        in_a_process("simclr", RECIPES["simclr"](), Run(tmp_path / "run"), {})
    assert f"{message}. " in str(failed.value)
    assert failed.value.run == tmp_path / "run"


@pytest.mark.parametrize(
    ("code", "reported", "advice"),
    [
        (1, "ValueError: too warm.", "too warm. Fix or remove this arm and give the command again: finished"),
        (-9, "", "as when memory runs out. Use a smaller --batch-size, or free memory"),
        (
            4,
            "metrics.jsonl could not be written (No space left on device)",
            "(No space left on device). Free disk space, then give the same command again: finished runs are kept.",
        ),
    ],
)
def test_a_failed_run_says_whose_it_was_and_what_to_do(
    code: int, reported: str, advice: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", child(code, reported))
    monkeypatch.setattr(comparison_runs, "this_machine", lambda jobs, on_gpu: Machine(1, 1, [RunPlace()]))
    monkeypatch.setattr("hardneg.io.provenance._commit", lambda: None)  # asks a process, too
    common = ("--data", data, "--batch-size", "32", "--out", str(tmp_path))
    done = hardneg("compare", "--arm", "simclr()", "--arm", "hcl()", *common)
    assert done.exit_code == 1, done.output
    assert done.stderr.startswith("simclr(), seed 0: ")
    assert advice in done.stderr
    assert "--resume" not in done.stderr


def test_a_failure_is_reported_at_once_and_finished_runs_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []

    def fail(recipe: str, options: TrainOptions, run: Run, environ: dict[str, str], **how: bool) -> dict[str, Any]:
        begun.append(options.seed)
        if options.seed == 1:
            raise RunFailed(run.path, "seed 1")
        finish(run, {"knn": 0.5})
        return {"knn": 0.5}

    monkeypatch.setattr(comparison_runs, "in_a_process", fail)
    with pytest.raises(RunFailed, match="seed 1"):
        run_all([parse_arm("simclr()")], list(range(50)), tmp_path, RunSettings(1), Watcher(nothing))
    assert {0, 1} <= set(begun)
    assert len(begun) < 50, "no more are begun"
    assert (tmp_path / "runs" / f"{folder_of(parse_arm('simclr()'))}-seed0" / "result.json").exists()


def test_a_comparison_has_every_measure_its_jobs_and_the_commit_of_a_copy(
    data: str, started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARDNEG_COMMIT", "abc1234")
    summary = compare(Comparison(("simclr()", "hcl()"), 2, short(data)), tmp_path, jobs=1, show=nothing)
    assert (summary["jobs"], summary["commit"]) == (1, "abc1234")
    assert summary["measures"] == {row["arm"]: {"knn": row["values"]} for row in summary["rows"]}


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
        def reserve(self, run: Run) -> Iterator[RunPlace]:
            if run.path.name.endswith("seed0"):
                first.append(threading.current_thread())
            inside.wait(20.0)
            yield self.places[0]

    monkeypatch.setattr(comparison_runs, "in_a_process", fail)
    monkeypatch.setattr(comparison_runs, "ChildPipes", Slow)
    monkeypatch.setattr(comparison_runs, "this_machine", lambda jobs, on_gpu: Crowd(2, 1, [RunPlace()]))
    with pytest.raises(RunFailed, match="seed 0"):
        run_all([parse_arm("simclr()")], [0, 1], tmp_path, RunSettings(2), Watcher(nothing))
    assert begun == [0]


def test_a_pipe_ends_when_all_are_closed() -> None:
    pipes = ChildPipes()
    with pipes.one() as held, pipes.one() as other:
        os.set_blocking(held, False)
        with pytest.raises(BlockingIOError):
            os.read(held, 1)
        pipes.close()
        assert (os.read(held, 1), os.read(other, 1)) == (b"", b"")
        with pytest.raises(NotStarted), pipes.one():
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
    """Not even by the thread of the one that failed, before the others are stopped."""
    begun: list[int] = []

    def fail(recipe: str, options: TrainOptions, run: Run, environ: dict[str, str], **how: bool) -> dict[str, Any]:
        begun.append(options.seed)
        raise RunFailed(run.path, "at once")

    monkeypatch.setattr(comparison_runs, "in_a_process", fail)
    monkeypatch.setattr(comparison_runs, "this_machine", lambda jobs, on_gpu: Machine(1, 1, [RunPlace()]))
    for attempt in range(10):
        begun.clear()
        with raises(RunFailed, got="at once"):
            run_all([parse_arm("simclr()")], list(range(30)), tmp_path / str(attempt), RunSettings(1), Watcher(nothing))
        assert begun == [0]


def test_a_killed_run_has_no_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it wrote before, such as a warning of somebody else's, is not why it was killed."""
    monkeypatch.setattr(subprocess, "run", child(-9, "a.py:3: UserWarning: odd\n  warn_once("))
    with raises(RunFailed, got="killed by SIGKILL, as when memory runs out", fix="Use"):
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
    ((_, reported),) = run.warned()
    assert "of the anchors have no negative under" in reported
    run.warn(reported)
    run.warn("another")
    assert [one.text for one in run.warned()] == [reported, "another"]


def test_the_bar_moves_within_a_run(tmp_path: Path) -> None:
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


def other_digits(path: str) -> None:
    """The same file with one pixel of one image changed."""
    file = Path(path.partition(":")[2])
    with np.load(file) as arrays:
        parts = dict(arrays)
    parts["images"] = parts["images"].copy()
    parts["images"][0, 0, 0] ^= 1
    np.savez(file, **parts)


def test_other_data_in_an_old_folder_is_refused(started: Started, tmp_path: Path) -> None:
    data = few_digits(tmp_path / "digits.npz", 96)
    common = ("--data", data, "--batch-size", "32", "--out", str(tmp_path / "out"))
    assert hardneg("compare", "--arm", "simclr()", "--arm", "hcl()", *common).exit_code == 0
    before = json.loads((tmp_path / "out" / "request.json").read_text())["data"]
    other_digits(data)
    done, begun = hardneg("compare", "--arm", "simclr()", "--arm", "hcl()", *common), len(started)
    assert done.exit_code == 2
    now = data_record(splits(RECIPES["simclr"](data=data)))
    for record in (before, now):
        assert record["train"]["fingerprint"] in done.stderr
    assert "--allow-other-data" in done.stderr
    assert len(started) == begun, "nothing is trained"
    again = hardneg("compare", "--arm", "simclr()", "--arm", "hcl()", *common, "--allow-other-data")
    assert again.exit_code == 0, again.output


def test_runs_of_other_data_are_refused_and_have_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = few_digits(tmp_path / "digits.npz", 96)

    def train(recipe: str, options: TrainOptions, run: Run, environ: dict[str, str], **how: bool) -> dict[str, Any]:
        encoder = {"name": "tiny", "class": "Tiny", "parameters": 1, "initial_weights": "00"}
        write_json(run.config_path, {"recipe": recipe, "options": options.as_dict()})
        run.record_trained(encoder, "views", 0.0, data_record(splits(options)))
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
    assert summary["headline"].endswith(": the runs have different data.")
    assert summary["unlike"][0].startswith("data differs: 96 train images (")


def test_a_long_comparison_is_estimated_once_an_epoch_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    now = iter([100.0, 105.0, 110.0, 120.0])
    monkeypatch.setattr("hardneg.comparing.progress.time.monotonic", lambda: next(now))
    watcher = Watcher(lines.append, total=6, epochs=10)
    for done in (0.02, 0.07, 0.125, 0.2):  # 0.105 of a run in 10 seconds
        watcher._estimate(done)
    assert lines == ["6 runs: about 9 minutes to go, judging by the first epochs"]


def test_names_of_runs_can_be_read() -> None:
    assert folder_of(parse_arm("simclr(temperature=0.25)").with_defaults({"epochs": 3})).startswith(
        "simclr-temperature=0.25-"
    )
    long = parse_arm(f'simclr(negatives="{" * ".join(["Tilt(1.0)"] * 20)}")')
    assert len(folder_of(long)) < 120


def test_a_system_without_sigkill_can_compare() -> None:
    """Windows has no such signal."""
    code = "import signal; del signal.SIGKILL; import hardneg.comparing.runs"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_runs_in_this_process_keep_figures_and_no_weights(data: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="training needs the extra train")
    arm = parse_arm("simclr(dim=8)").with_defaults(short(data, epochs=1, encoder="tiny", device="cpu"))
    lines: list[str] = []
    first, again = (run_all([arm], [0, 1], tmp_path, RunSettings(here=True), Watcher(lines.append)) for _ in range(2))
    assert first == again
    assert [line.endswith("kept, as it was finished") for line in lines] == [False, False, True, True]
    assert not [*tmp_path.rglob("checkpoint*"), *tmp_path.rglob("embeddings.npz")]
    wild = arm.with_option("learning_rate", 1e30)
    with pytest.raises(Diverged):
        run_all([wild], [0], tmp_path, RunSettings(here=True), Watcher(nothing))
    assert run_all([wild], [0], tmp_path, RunSettings(here=True), Watcher(nothing), may_diverge=True) == [[{}]]


def test_a_comparison_in_which_nothing_was_trained_may_start_with_other_options(data: str, tmp_path: Path) -> None:
    first = Comparison(("simclr()", "hcl()"), 2, short(data))
    prepare(first, tmp_path)
    other = replace(first, common=short(data, epochs=7))
    prepare(other, tmp_path)
    (tmp_path / "runs").mkdir()
    with raises(FileError, who="compare", got="epochs"):
        prepare(first, tmp_path)


def test_a_missing_extra_is_reported_before_anything_is_written(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(MissingExtra):
        prepare(Comparison(("simclr()", "hcl()"), 2, short(data)), tmp_path / "out")
    assert not (tmp_path / "out").exists()
