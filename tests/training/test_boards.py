"""Boards: TensorBoard where it is installed, W&B where it is wanted, with the same figures as metrics.jsonl."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hardneg.comparing import Comparison, compare
from hardneg.core.errors import MissingExtra, forget_warnings
from hardneg.training.loop import boards
from hardneg.training.loop.runs import Run
from hardneg.training.options import RECIPES
from hardneg.training.recipes import run_recipe
from support.errors import raises, warns

MODULE = "torch.utils.tensorboard"


class FakeWriter:
    made: list[FakeWriter] = []

    def __init__(self, log_dir: str, purge_step: int) -> None:
        self.log_dir, self.purge_step = log_dir, purge_step
        self.seen: list[tuple[str, float, int]] = []
        self.flushed, self.closed = 0, False
        FakeWriter.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        assert not self.closed
        self.seen.append((name, value, step))

    def flush(self) -> None:
        self.flushed += 1

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    FakeWriter.made = []
    forget_warnings()
    boards._writer.cache_clear()
    yield
    boards._open.clear()
    boards._writer.cache_clear()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(MODULE)
    module.SummaryWriter = FakeWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)


@pytest.mark.usefixtures("fake")
def test_records_and_results_are_shown(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.log(step=20, loss=5.0, hardness=0.25, note="not a number")
    run.log(step=40, loss=4.5, hardness=0.5)
    run.finish({"steps": 40, "knn": 0.9, "similarities": {"edges": []}, "final": {}})
    (board,) = FakeWriter.made
    assert (board.log_dir, board.purge_step) == (str(tmp_path), 20)
    assert board.seen == [
        ("loss", 5.0, 20), ("hardness", 0.25, 20), ("loss", 4.5, 40), ("hardness", 0.5, 40), ("knn", 0.9, 40),
    ]  # fmt: skip
    assert board.flushed == 3
    assert board.closed


@pytest.mark.usefixtures("fake")
def test_a_resumed_run_hides_what_it_writes_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.log(step=20, loss=5.0)
    run.log(step=40, loss=4.5)
    run.forget_after(20)  # the checkpoint is of step 20
    run.log(step=40, loss=4.5)
    before, after = FakeWriter.made
    assert before.closed
    assert after.purge_step == 40


def test_without_tensorboard_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)
    run = Run(tmp_path)
    run.log(step=20, loss=5.0)
    run.finish({"steps": 20, "knn": 0.9})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "result.json"]


def test_a_broken_tensorboard_is_named_and_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise TypeError("Descriptors cannot be created directly")

    monkeypatch.setitem(sys.modules, MODULE, Broken(MODULE))
    with warns("tensorboard"):
        Run(tmp_path).log(step=20, loss=5.0)
    assert Run(tmp_path).metrics() == [{"step": 20, "loss": 5.0}]


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = Run(tmp_path)
    for step in (20, 40):
        run.log(step=step, loss=100.0 / step)
    run.forget_after(20)
    run.log(step=40, loss=2.0)
    run.finish({"steps": 40, "knn": 0.75})
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(20, 5.0), (40, 2.0)]
    assert [event.value for event in events.Scalars("knn")] == [0.75]


class FakeRun:
    def __init__(self, how: dict[str, Any]) -> None:
        self.how, self.seen, self.finished = how, [], False

    seen: list[tuple[dict[str, float], int]]

    def log(self, figures: dict[str, float], step: int) -> None:
        self.seen.append((figures, step))

    def finish(self) -> None:
        self.finished = True


def test_wandb_has_the_records_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FakeRun] = []
    module = ModuleType("wandb")
    module.init = lambda **how: made.append(FakeRun(how)) or made[-1]  # type: ignore[attr-defined, func-returns-value]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setitem(sys.modules, MODULE, None)
    run = Run(tmp_path / "simclr-seed0")
    run.path.mkdir()
    run.log(step=20, loss=5.0)
    assert not made, "W&B is not used unless WANDB_PROJECT is set"
    run.forget_after(20)
    monkeypatch.setenv("WANDB_PROJECT", "negatives")
    run.log(step=40, loss=4.5, hardness=0.5)
    run.forget_after(40)
    run.log(step=60, loss=4.0)
    first, resumed = made
    assert (first.how["project"], first.how["name"]) == ("negatives", f"{tmp_path.name}/simclr-seed0")
    assert first.how["id"] == resumed.how["id"]
    assert resumed.how["resume"] == "allow"
    assert first.seen == [({"loss": 4.5, "hardness": 0.5}, 40)]
    assert (first.finished, resumed.finished) == (True, False)


def test_wandb_that_is_wanted_and_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setenv("WANDB_PROJECT", "negatives")
    with raises(MissingExtra, who="WANDB_PROJECT, which is set,", fix="'hardneg[wandb]'"):
        Run(tmp_path).log(step=20, loss=5.0)


def test_wandb_that_is_wanted_and_not_installed_stops_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setenv("WANDB_PROJECT", "negatives")
    out = tmp_path / "out"
    with pytest.raises(MissingExtra, match="WANDB_PROJECT"):
        run_recipe("simclr", RECIPES["simclr"](data="npz:nowhere.npz"), out)
    with pytest.raises(MissingExtra, match="WANDB_PROJECT"):
        compare(Comparison(("simclr()", "hcl()"), 2, {"data": "npz:nowhere.npz"}), out)
    assert not out.exists()
