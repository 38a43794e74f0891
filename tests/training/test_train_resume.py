"""Killed in mid-epoch and resumed, training and comparing end with what they would have ended with, to the last bit."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hardneg.comparing.runs
from hardneg.comparing import Comparison, compare
from hardneg.training.evaluation import logistic
from hardneg.training.loop.runs import Run
from hardneg.training.loop.train import Loop
from support.comparisons import here
from support.forks import CONTEXT
from support.training_runs import BATCH_SIZE, FEW_ROWS, assert_same, everything, few_digits, interrupted, run, short

pytest.importorskip("accelerate", reason="training needs the extra train")

NUM_IMAGES, STEPS = 160, 160 // BATCH_SIZE
EPOCHS = 4
PROXIMITY = "proximity(num_candidates=100, num_neighbours=8, restart=0.3, refresh=3)"
MOCO = {"queue": 100, "momentum": 0.9, "negatives": "Ring(0.1, outer=linear(1.0, 0.5), dynamic_inner=True)"}


def options_of(data: str, **options: Any) -> dict[str, Any]:
    return short(data, **{"epochs": EPOCHS, **options})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return few_digits(tmp_path_factory.mktemp("resume") / "digits.npz", NUM_IMAGES)


def train_slowly(recipe: str, out: Path, options: dict[str, Any]) -> None:
    """Slow enough that a kill lands where it is meant to."""
    torch.set_num_threads(1)
    step = Loop._one_step

    def slow(self: Loop, *arguments: Any) -> None:
        time.sleep(0.03)
        step(self, *arguments)

    Loop._one_step = slow  # type: ignore[method-assign]
    run(recipe, out, options, resume=True)


def kill_when(child: Any, ready: Callable[[], bool], seconds: float = 240.0) -> None:
    until = time.monotonic() + seconds
    while not ready():
        assert child.is_alive(), "it ended before it was killed"
        assert time.monotonic() < until
        time.sleep(0.002)
    child.kill()
    child.join()


def steps_of(path: Path) -> int:
    records = Run(path).metrics()
    return records[-1]["step"] if records else 0


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("simclr", {"negatives": "Tilt(linear(0.5, 2.0))"}),
        ("simclr", {"batches": PROXIMITY}),
        ("moco", {**MOCO, "save_every": 2}),
    ],
    ids=["simclr", "proximity", "moco"],
)
def test_three_kills_change_nothing(recipe: str, options: dict[str, Any], data: str, tmp_path: Path) -> None:
    options = options_of(data, **options)
    run(recipe, tmp_path / "whole", options)
    killed, lost = tmp_path / "killed", []
    for target in (2, STEPS + 2, 2 * STEPS + 3):
        child = CONTEXT.Process(target=train_slowly, args=(recipe, killed, options))
        child.start()
        kill_when(child, lambda target=target: steps_of(killed) >= target)
        saved = Run(killed).load()
        lost.append(steps_of(killed) - (saved["step"] if saved else 0))
        assert Run(killed).result() is None
    assert max(lost) > 0  # in mid-epoch
    assert saved is not None
    (killed / ".checkpoint.pt.1.partial").write_bytes(b"half of")
    run(recipe, killed, options, resume=True)
    assert_same(everything(killed), everything(tmp_path / "whole"))
    assert not list(killed.glob(".*.partial"))


@pytest.mark.parametrize(
    "options",
    [
        {"batches": "knn(refresh=3)"},
        {"batches": "strata(refresh=3)"},
        {"batches": "communities(refresh=3)"},
        {"batches": f"{PROXIMITY[:-1]}, encode=True, warmup=0, coverage='free')"},
        {"negatives": "Tilt(adaptive(0.0, 1.0, rate=0.25))"},
    ],
    ids=["knn", "strata", "communities", "encoded", "adaptive"],
)
def test_batches_of_every_planner_and_adaptive_schedules_go_on(
    options: dict[str, Any], data: str, tmp_path: Path
) -> None:
    options = options_of(data, epochs=3, **options)
    run("simclr", tmp_path / "whole", options)
    with interrupted(2 * STEPS + 2):
        run("simclr", tmp_path / "stopped", options)
    assert steps_of(tmp_path / "stopped") == 2 * STEPS + 2
    run("simclr", tmp_path / "stopped", options, resume=True)
    assert_same(everything(tmp_path / "stopped"), everything(tmp_path / "whole"))
    if "negatives" in options:
        # The mean loss of the second epoch is below that of the first, so the third begins with beta = 0.25.
        found = [record["effective_temperature"] for record in Run(tmp_path / "whole").metrics()]
        assert found == pytest.approx([0.5] * 2 * STEPS + [0.4] * STEPS, rel=1e-4)


def test_a_finished_run_is_not_trained_again(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_of(data, epochs=1)
    first = run("simclr", tmp_path, options)
    monkeypatch.setattr(Loop, "__init__", lambda *_, **__: pytest.fail("trained again"))
    assert run("simclr", tmp_path, options, resume=True) == first


def compare_as_requested(comparison: Comparison, out: Path) -> None:
    torch.set_num_threads(1)
    os.cpu_count = lambda: 1  # one thread for each run, as in this process
    compare(comparison, out, show=lambda line: None)


def working_on(path: Path) -> list[int]:
    """The processes that have this directory in their command."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if str(path).encode() in (place / "cmdline").read_bytes():
                found.append(int(place.name))
        except OSError:  # it ended meanwhile
            continue
    return found


def table_of(out: Path) -> dict[str, Any]:
    facts = json.loads((out / "comparison.json").read_text())
    for row in facts["rows"]:
        del row["seconds"]
    return {name: facts[name] for name in ("rows", "sentences", "notes", "comparison")}


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_a_killed_comparison_ends_with_the_same_table(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = options_of(data, epochs=6)
    comparison = Comparison(("simclr()", f"hcl(beta=1) @ {PROXIMITY}"), 2, common)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    monkeypatch.setattr(logistic, "MAX_CROSS_VALIDATED", FEW_ROWS)  # as in the process of the run that ends
    monkeypatch.setattr(hardneg.comparing.runs, "in_a_process", here)
    compare(comparison, whole, jobs=1, show=lambda line: None)

    runs = killed / "runs"
    child = CONTEXT.Process(target=compare_as_requested, args=(comparison, killed))
    child.start()

    def second_is_under_way() -> bool:
        finished = len(list(runs.glob("*/result.json")))  # first, or the first run may end in between
        under_way = [one.parent for one in runs.glob("*/checkpoint.pt") if not (one.parent / "result.json").exists()]
        return finished == 1 and any(steps_of(one) > STEPS for one in under_way)

    kill_when(child, second_is_under_way)
    until = time.monotonic() + 10.0
    while working_on(killed):  # the run that the comparison had started leaves, too
        assert time.monotonic() < until
        time.sleep(0.02)
    finished = list(runs.glob("*/result.json"))
    assert len(finished) == 1
    before = {file: (file.stat().st_mtime_ns, file.stat().st_ino) for file in finished[0].parent.iterdir()}
    (begun,) = [one.parent for one in runs.glob("*/config.json") if one.parent != finished[0].parent]
    assert 0 < steps_of(begun) < 6 * STEPS

    compare(comparison, killed, jobs=1, show=lambda line: None)
    assert table_of(killed) == table_of(whole)
    for one in (whole / "runs").iterdir():
        assert_same(everything(runs / one.name), everything(one))
    assert before == {file: (file.stat().st_mtime_ns, file.stat().st_ino) for file in before}  # only read
