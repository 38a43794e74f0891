"""Runs side by side only where memory allows, shared over GPUs, and fewer after one that memory did not hold."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hardneg.comparing import memory as comparison_memory
from hardneg.comparing import runs as comparison_runs
from hardneg.comparing.arms import parse_arm
from hardneg.comparing.memory import Machine, NotStarted, RunPlace, free_memory, this_machine
from hardneg.comparing.progress import Watcher
from hardneg.comparing.runs import (
    NoDiskSpace,
    OtherData,
    OutOfMemory,
    RunFailed,
    RunSettings,
    folder_of,
    in_a_process,
    run_all,
    usual_threads,
)
from hardneg.core.errors import HardnegWarning, forget_warnings
from hardneg.io.files import write_json
from hardneg.training.loop.runs import DATA_CHANGED, NO_DISK_SPACE, NO_MEMORY, PeakMemory, Run
from hardneg.training.options import RECIPES
from support.errors import warns
from support.training_runs import few_digits, run, short

psutil = pytest.importorskip("psutil", reason="comparisons need the extra train")

GB = 2**30


@pytest.fixture(autouse=True)
def _requested_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison_memory, "POLL_SECONDS", 0.01)


def runs_that_hold(memory: PeakMemory | None, number: int, path: Path) -> list[Run]:
    runs = [Run(path / str(i)) for i in range(number)]
    for one in runs:
        one.path.mkdir(parents=True)
        if memory is not None:
            one.record_memory(memory)
    return runs


def most_at_once(machine: Machine, runs: list[Run], expected: int) -> tuple[int, dict[str | None, int]]:
    """How many of these were under way at once, altogether and in each place; all must have been.

    They stay until as many as expected have been there, and then for long enough that one too many would be seen.
    """
    lock, inside, full = threading.Lock(), [], threading.Event()
    most, places = 0, dict.fromkeys((place.gpu for place in machine.places), 0)

    def stay(one: Run) -> None:
        nonlocal most
        with machine.reserve(one) as place:
            with lock:
                inside.append(place.gpu)
                most = max(most, len(inside))
                places[place.gpu] = max(places[place.gpu], inside.count(place.gpu))
                if most >= expected:
                    full.set()
            full.wait(10.0)
            time.sleep(0.05)
            with lock:
                inside.remove(place.gpu)

    threads = [threading.Thread(target=stay, args=(one,), daemon=True) for one in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive()
    assert not machine.under_way
    return most, places


@pytest.mark.parametrize(
    ("jobs", "free", "holds", "expected"),
    [
        (4, 100 * GB, PeakMemory(GB, 0), 4),
        (2, 100 * GB, PeakMemory(GB, 0), 2),
        (4, 4 * GB, PeakMemory(GB, 0), 3),  # a tenth is spared
        (4, GB, PeakMemory(GB, 0), 1),
        (4, GB // 2, PeakMemory(GB, 0), 1),  # alone it is tried all the same
        (4, 100 * GB, None, 1),  # nobody says what it holds
    ],
)
def test_as_many_as_memory_holds(jobs: int, free: int, holds: PeakMemory | None, expected: int, tmp_path: Path) -> None:
    machine = Machine(jobs, free, [RunPlace()])
    assert most_at_once(machine, runs_that_hold(holds, 6, tmp_path), expected)[0] == expected


def test_runs_are_shared_over_gpus_and_each_holds_what_fits(tmp_path: Path) -> None:
    machine = Machine(8, 100 * GB, [RunPlace("0", 8 * GB), RunPlace("GPU-3f", 8 * GB)])
    runs = runs_that_hold(PeakMemory(GB, 3 * GB), 8, tmp_path)
    assert most_at_once(machine, runs, 4) == (4, {"0": 2, "GPU-3f": 2})
    assert [place.environ for place in machine.places] == [
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "GPU-3f"},
    ]


def test_a_run_begins_beside_another_once_that_has_recorded_its_memory(tmp_path: Path) -> None:
    machine = Machine(2, 100 * GB, [RunPlace()])
    first, second = runs_that_hold(None, 2, tmp_path)
    begun = threading.Event()

    def follow() -> None:
        with machine.reserve(second):
            begun.set()

    with machine.reserve(first):
        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        assert not begun.wait(0.2)
        first.record_memory(PeakMemory(GB, 0))
        assert begun.wait(10.0)
    thread.join(10.0)


def test_finished_runs_of_an_earlier_attempt_tell_what_a_run_holds(tmp_path: Path) -> None:
    machine = Machine(3, 100 * GB, [RunPlace("0", GB)])
    machine.learn(
        runs_that_hold(PeakMemory(GB, 2), 1, tmp_path / "before") + runs_that_hold(PeakMemory(3, 4), 1, tmp_path / "b")
    )
    assert machine.largest == PeakMemory(GB, 4)
    assert most_at_once(machine, runs_that_hold(None, 3, tmp_path / "now"), 3)[0] == 3


def test_who_waits_leaves_when_no_more_are_begun(tmp_path: Path) -> None:
    machine = Machine(1, GB, [RunPlace()])
    first, second = runs_that_hold(None, 2, tmp_path)
    left = threading.Event()

    def wait() -> None:
        with pytest.raises(NotStarted), machine.reserve(second):
            pytest.fail("there was no room")
        left.set()

    with machine.reserve(first):
        threading.Thread(target=wait, daemon=True).start()
        time.sleep(0.05)
        machine.close()
        assert left.wait(10.0)


# Out of memory


def pretending(machine: Machine, monkeypatch: pytest.MonkeyPatch, limit: int) -> list[int]:
    """Runs that die of memory where more than ``limit`` are under way; how many were, for each attempt."""
    seen: list[int] = []

    def crowded(recipe: str, options: Any, run: Run, environ: dict[str, str], **how: bool) -> dict[str, Any]:
        run.path.mkdir(parents=True, exist_ok=True)
        run.record_memory(PeakMemory(1, 0))
        until = time.monotonic() + 10.0
        while not seen and len(machine.under_way) <= limit and time.monotonic() < until:
            time.sleep(0.01)  # the first ones are there together
        seen.append(len(machine.under_way))
        if len(machine.under_way) > limit:
            time.sleep(0.1)
            raise OutOfMemory(run.path, "did not fit")
        write_json(run.config_path, {})
        run.finish({"knn": 0.5})
        return {"knn": 0.5}

    monkeypatch.setattr(comparison_runs, "in_a_process", crowded)
    monkeypatch.setattr(comparison_runs, "this_machine", lambda jobs, on_gpu: machine)
    return seen


def test_runs_that_memory_did_not_hold_go_on_with_fewer_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_warnings()
    machine = Machine(3, 100 * GB, [RunPlace()])
    seen = pretending(machine, monkeypatch, limit=1)
    with warns("compare.memory"):
        results = run_all([parse_arm("simclr()")], list(range(5)), tmp_path, RunSettings(3), Watcher(print))
    assert results == [5 * [{"knn": 0.5}]]
    assert machine.jobs == 1
    assert max(seen) > 1
    forget_warnings()


def test_a_run_that_does_not_fit_alone_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_warnings()
    seen = pretending(machine := Machine(2, 100 * GB, [RunPlace()]), monkeypatch, limit=0)
    with pytest.warns(HardnegWarning, match="Not enough memory"), pytest.raises(RunFailed, match="did not fit"):
        run_all([parse_arm("simclr()")], [0], tmp_path, RunSettings(2), Watcher(print))
    assert (seen, machine.jobs) == ([1, 1], 1)
    forget_warnings()


@pytest.mark.parametrize(
    ("code", "reported", "failure"),
    [
        (-9, "", OutOfMemory),
        (NO_MEMORY, "CUDA out of memory. Tried to allocate 2.00 GiB.", OutOfMemory),
        (NO_DISK_SPACE, "metrics.jsonl could not be written", NoDiskSpace),
        (DATA_CHANGED, "train needs the data", OtherData),
        (1, "RuntimeError: out of memory, free disk space", RunFailed),  # sentences decide nothing
        (1, "ValueError: too warm", RunFailed),
        (-15, "", RunFailed),
    ],
)
def test_how_a_run_ended_tells_whether_memory_ran_out(
    code: int, reported: str, failure: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: Callable[..., Any] = lambda command, **how: subprocess.CompletedProcess(command, code, "", reported)  # noqa: E731
    monkeypatch.setattr(subprocess, "run", ended)
    with pytest.raises(RunFailed) as failed:
        in_a_process("simclr", RECIPES["simclr"](), Run(tmp_path / "run"), {})
    assert type(failed.value) is failure


# What is free, and what a run holds


def test_free_memory_is_that_of_the_container_where_it_has_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = psutil.virtual_memory().total
    assert 0 < free_memory() <= machine
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10 * GB))
    monkeypatch.setattr(comparison_memory, "Path", lambda path: tmp_path)
    assert free_memory() == 10 * GB, "no limits to be seen"
    (tmp_path / "memory.current").write_text(f"{3 * GB}\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory() == 10 * GB
    (tmp_path / "memory.max").write_text(f"{4 * GB}\n")
    assert free_memory() == GB
    (tmp_path / "memory.stat").write_text(f"anon {GB}\nfile {2 * GB}\nactive_file 7\ninactive_file {GB + 5}\nslab 3\n")
    assert free_memory() == 2 * GB + 5, "what was read and lies idle is given up"
    (tmp_path / "memory.stat").write_text(f"anon {GB}\n")
    assert free_memory() == GB


@pytest.mark.parametrize(("visible", "names"), [(None, ["0", "1"]), ("GPU-3f, 2", ["GPU-3f", "2"])])
def test_gpus_are_queried_by_a_process_of_its_own(
    visible: str | None, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, "10 20\n", ""))
    assert this_machine(2, on_gpu=True).places == [RunPlace(names[0], 10), RunPlace(names[1], 20)]


def test_gpus_that_cannot_be_queried_are_an_error_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = "Traceback\nRuntimeError: CUDA unknown error\n"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1, "", reported))
    with pytest.raises(OSError, match="free memory of the GPUs: 'RuntimeError: CUDA unknown error'; use"):
        this_machine(2, on_gpu=True)


def test_a_run_says_what_it_holds(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="training needs the extra train")
    run("simclr", tmp_path / "run", short(few_digits(tmp_path / "digits.npz", 64), epochs=1))
    memory = Run(tmp_path / "run").memory()
    assert memory is not None
    here = psutil.Process().memory_info().rss
    assert here / 2 < memory.host < 2 * here
    assert memory.device == 0


def test_jobs_are_those_of_the_cores_or_two_for_each_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many threads a run has depends on the comparison as a whole, so a resumed one has as many."""
    requested: list[tuple[int, bool]] = []

    def remember(jobs: int, on_gpu: bool) -> Machine:
        requested.append((jobs, on_gpu))
        return Machine(jobs, 100 * GB, [RunPlace()])

    threads: list[str] = []

    def ended(recipe: str, options: Any, run: Run, environ: dict[str, str], **how: bool) -> dict[str, Any]:
        threads.append(environ["OMP_NUM_THREADS"])
        write_json(run.config_path, {})
        run.finish({})
        return {"knn": 1.0}

    monkeypatch.setattr(comparison_runs, "this_machine", remember)
    monkeypatch.setattr(comparison_runs, "in_a_process", ended)
    monkeypatch.setattr(comparison_runs, "num_cores", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    on_cpu, anywhere = parse_arm("simclr(device='cpu')"), parse_arm("simclr()")
    for arms, seeds, jobs in (([on_cpu], 4, None), ([on_cpu], 20, None), ([anywhere], 9, None), ([anywhere], 2, 5)):
        how = RunSettings(jobs, usual_threads(arms, seeds, jobs))
        run_all(arms, list(range(seeds)), tmp_path / folder_of(arms[0]) / str(seeds), how, Watcher(print))
    assert requested == [(4, False), (16, False), (6, True), (5, True)]
    assert threads == 4 * ["4"] + 20 * ["1"] + 9 * ["2"] + 2 * ["3"]
