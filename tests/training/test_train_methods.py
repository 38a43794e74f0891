"""A method of the user's and schedules of temperature and tau_plus train and resume."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hardneg.core.errors import ArgumentError, FileError
from hardneg.core.options import option
from hardneg.core.schedules import adaptive, linear
from hardneg.io.embeddings import load_embeddings
from hardneg.training.data.images import load
from hardneg.training.encoders import Encoder
from hardneg.training.loop.checks import with_estimate
from hardneg.training.loop.parts import splits
from hardneg.training.loop.runs import Run
from hardneg.training.loop.train import train
from hardneg.training.options import SimCLROptions, TrainOptions
from hardneg.training.recipes.simclr import SimCLR
from hardneg.training.trained import load_encoder
from support.errors import raises
from support.training_runs import assert_same, everything, interrupted, options_of, run, short, stop_after

pytest.importorskip("accelerate", reason="training needs the extra train")


# A user's own method.


@dataclass(frozen=True)
class MyOptions(TrainOptions):
    margin: float = option(0.1, "Mine.", "Mine", low=0.0)


class MyMethod(SimCLR):
    def loss_for(self, options: Any) -> Any:
        return super().loss_for(SimCLROptions(temperature=options.temperature))


def test_a_method_of_the_user_is_resumed(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = MyOptions(**options_of(data, epochs=2))
    expected = train("mine", MyMethod, options, tmp_path / "whole", quiet=True)
    with monkeypatch.context() as patch:
        stop_after(1, patch)
        with pytest.raises(KeyboardInterrupt):
            train("mine", MyMethod, options, tmp_path / "stopped", quiet=True)
    resumed = train("mine", MyMethod, options, tmp_path / "stopped", quiet=True, resume=True)
    assert resumed["final"] == expected["final"]
    assert_same(everything(tmp_path / "stopped"), everything(tmp_path / "whole"))
    other = MyOptions(**options_of(data, epochs=2), margin=0.2)
    with raises(FileError, who="train", got="-> 0.2"):
        train("mine", MyMethod, other, tmp_path / "stopped", quiet=True, resume=True)


class WithOwnEncoder(MyMethod):
    def __init__(self, options: Any, data: Any, total: int) -> None:
        super().__init__(options, data, total)
        self.encoder = own_encoder()


def own_encoder() -> torch.nn.Module:
    torch.manual_seed(3)
    return Encoder(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 16)), 16)


@pytest.mark.parametrize("method", [MyMethod, WithOwnEncoder])
def test_a_run_of_a_method_of_the_user_loads_again(method: Any, data: str, tmp_path: Path) -> None:
    train("mine", method, MyOptions(**options_of(data, epochs=1)), tmp_path, quiet=True)
    expected = load_embeddings(tmp_path / "embeddings.npz")[2]
    if method is WithOwnEncoder:
        with raises(FileError, who="load_encoder", fix="encoder="):
            load_encoder(tmp_path)
        encoder: Any = load_encoder(tmp_path, encoder=own_encoder())
    else:
        encoder = load_encoder(tmp_path)
    torch.testing.assert_close(encoder.features(load(data, "test").images), expected, rtol=0, atol=1e-6)


# Schedules of the temperature and tau_plus.


@pytest.mark.parametrize(
    ("recipe", "options"), [("simclr", {}), ("moco", {"queue": 64}), ("moco", {"version": "v3"}), ("supervised", {})]
)
def test_schedules_of_temperature_and_tau_plus_train_and_go_on(
    recipe: str, options: dict[str, Any], data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_of(data, temperature="linear(0.5, 0.2)", tau_plus="linear(0.0, 0.05)", **options)
    run(recipe, tmp_path / "whole", options)
    found = [record["effective_temperature"] for record in Run(tmp_path / "whole").metrics()]
    expected = np.linspace(0.5, 0.2, len(found), endpoint=False)
    known = [i for i, value in enumerate(found) if value is not None]  # the queue of MoCo is empty at first
    assert len(known) >= len(found) - 1
    np.testing.assert_allclose([found[i] for i in known], expected[known], rtol=1e-3)
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        with pytest.raises(KeyboardInterrupt):
            run(recipe, tmp_path / "stopped", options)
    run(recipe, tmp_path / "stopped", options, resume=True)
    assert_same(everything(tmp_path / "stopped"), everything(tmp_path / "whole"))
    config = Run(tmp_path / "stopped").config()
    assert config["options"]["temperature"] == "linear(0.5, 0.2)"
    with pytest.raises(ValueError, match="other options"):
        run(recipe, tmp_path / "stopped", options | {"temperature": "linear(0.5, 0.1)"}, resume=True)


def test_an_adaptive_temperature_moves_after_each_epoch(data: str, tmp_path: Path) -> None:
    run("simclr", tmp_path, options_of(data, temperature="adaptive(0.5, 0.1, rate=0.1)"))
    found = [record["effective_temperature"] for record in Run(tmp_path).metrics()]
    # The first mean loss is remembered; after the second epoch, whose loss is lower, the third begins at 0.4.
    assert found == pytest.approx([0.5] * 6 + [0.4] * 3, rel=1e-4)


@pytest.mark.parametrize("on", ["step", "monitor"])
def test_an_adaptive_temperature_observes_steps_or_the_monitor(on: str, data: str, tmp_path: Path) -> None:
    """Ring, appendix E: towards the end after an improvement of the loss of a step, or of a validation accuracy."""
    temperature = f"adaptive(0.5, 0.1, rate=0.02, on='{on}')"
    options = options_of(data, temperature=temperature, monitor_every=1, epochs=3 if on == "step" else 6)
    run("simclr", tmp_path / "run", options | {"save_every_steps": 1})
    schedule, expected, found = adaptive(0.5, 0.1, rate=0.02), [], []
    for record in Run(tmp_path / "run").metrics():
        if "loss" in record:
            expected.append(schedule(0))
            found.append(record["effective_temperature"])
        if on == "step" and "loss" in record:
            schedule.observe(-record["loss"])
        elif on == "monitor" and record.get("monitor") is not None:
            schedule.observe(record["monitor"])
    assert found == pytest.approx(expected, rel=1e-5)
    assert len(set(found)) > 1
    with interrupted(5):
        run("simclr", tmp_path / "cut", options | {"save_every_steps": 1})
    run("simclr", tmp_path / "cut", options | {"save_every_steps": 1}, resume=True)
    assert_same(everything(tmp_path / "run"), everything(tmp_path / "cut"))


def test_a_schedule_that_adapts_to_the_monitor_needs_one(tmp_path: Path) -> None:
    with raises(ArgumentError, what="--monitor-every", fix="--monitor-every 1"):
        run("simclr", tmp_path / "run", short("npz:nowhere.npz", negatives="Tilt(adaptive(0, 1, on='monitor'))"))
    with raises(ArgumentError, who="adaptive", what="on='loss'"):
        adaptive(1.0, 0.1, on="validation")


def test_options_take_schedules_of_python() -> None:
    options = SimCLROptions(temperature=linear(0.5, 0.1))  # type: ignore[arg-type]
    assert options.temperature == SimCLROptions(temperature=" linear(0.5,0.1)").temperature == "linear(0.5, 0.1)"
    assert SimCLROptions().as_dict()["temperature"] == 0.5


# An estimate of tau_plus.


def test_tau_plus_is_estimated_from_the_labels_and_recorded(data: str, tmp_path: Path) -> None:
    options = options_of(data, negatives="Tilt(1.0)", tau_plus="estimate", epochs=1)
    run("simclr", tmp_path / "estimated", options)
    config = Run(tmp_path / "estimated").whole_config()
    found = config["trained"]["data"]["tau_plus"]
    assert config["options"]["tau_plus"] == "estimate"
    assert found["low"] <= found["tau_plus"] <= found["high"]
    run("simclr", tmp_path / "given", options | {"tau_plus": found["tau_plus"]})
    losses = [[one["loss"] for one in Run(tmp_path / name).metrics()] for name in ("estimated", "given")]
    assert losses[0] == losses[1]


def test_only_tau_plus_can_be_estimated(data: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError):
        run("simclr", tmp_path, options_of(data, temperature="estimate"))
    with pytest.raises(ArgumentError):
        run("sogclr", tmp_path, options_of(data, tau_plus="estimate"))


def test_an_estimate_needs_labels_of_several_classes(data: str) -> None:
    options = SimCLROptions(**options_of(data, tau_plus="estimate"))
    for labels in (None, torch.zeros(len(splits(options).train), dtype=torch.long)):
        with pytest.raises(ArgumentError) as raised:
            with_estimate(options, SimpleNamespace(labels=labels, has="vectors"), {})
        assert raised.value.where == "--tau-plus estimate"
