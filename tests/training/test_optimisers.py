"""Optimisers, learning rates, accumulation, clipping, checkpoints in mid-epoch and monitors; exactly resumed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hardneg.comparing.arms import parse_arm
from hardneg.core.errors import ArgumentError, HardnegWarning, forget_warnings
from hardneg.reporting import write_report
from hardneg.training.loop.optimisers import SGD, Adam, AdamW, read_optimiser, read_rate
from hardneg.training.loop.runs import Run
from hardneg.training.loop.train import Loop
from support.errors import raises, warns
from support.training_runs import BATCH_SIZE, assert_same, everything, few_digits, run, short

pytest.importorskip("accelerate", reason="training needs the extra train")
NUM_IMAGES, STEPS = 160, 160 // BATCH_SIZE
PROXIMITY = "proximity(num_candidates=100, num_neighbours=8, restart=0.3, refresh=3)"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return few_digits(tmp_path_factory.mktemp("optimisers") / "digits.npz", NUM_IMAGES)


@pytest.mark.parametrize(
    ("text", "expected", "kind"),
    [
        ("adam", Adam(), torch.optim.Adam),
        ("adamw(beta2=0.98)", AdamW(beta2=0.98), torch.optim.AdamW),
        ("sgd(nesterov=True)", SGD(nesterov=True), torch.optim.SGD),
    ],
)
def test_optimisers_by_name(text: str, expected: Any, kind: type) -> None:
    found = read_optimiser(text)
    assert found == expected
    assert read_optimiser(repr(found)) == found
    made = found.build([torch.nn.Parameter(torch.ones(2))], lr=0.1, weight_decay=0.01)
    assert type(made) is kind
    assert made.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("constant", [1.0] * 8),
        ("constant(warmup=1)", [0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0, 1.0]),
        ("cosine", [0.5 + 0.5 * math.cos(math.pi * i / 8) for i in range(8)]),
        ("cosine(warmup=1, end=0.5)", [0.2, 0.4, 0.6, 0.8, 1.0, 0.75 + 0.125 * 2**0.5, 0.75, 0.75 - 0.125 * 2**0.5]),
        ("steps(0.5, 1, factor=0.5)", [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25]),
    ],
)  # fmt: skip
def test_learning_rates_over_two_epochs_of_four_batches(text: str, expected: list[float]) -> None:
    rate = read_rate(text)
    assert [rate.factor(step, 8, 4) for step in range(8)] == pytest.approx(expected)
    assert read_rate(repr(rate)) == rate


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "lion"}, "--optimizer: 'lion'|--optimizer"),
        ({"optimizer": "sgd(momentum=1.5)"}, r"momentum in \[0.0, 1.0\), got momentum=1.5"),
        ({"schedule": "cosine(warmup=-1)"}, "warmup in"),
        ({"schedule": "cosine(warmup=10)"}, r"warmup=10 and epochs=2"),
        ({"schedule": "constant(warmup=2)"}, r"warmup=2 and epochs=2"),
        ({"schedule": "steps()"}, r"as in steps\(30, 40\)"),
        ({"schedule": "linear(1, 0)"}, "--schedule: 'linear' is not known"),
        ({"monitor": "sts('no-such-file.tsv')"}, "an STS file or folder that exists"),
        ({"accumulate": 0}, "--accumulate of at least 1"),
    ],
)
def test_wrong_words_are_named_before_training(
    options: dict[str, Any], message: str, data: str, tmp_path: Path
) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run("simclr", tmp_path / "run", short(data, **options))
    assert not (tmp_path / "run").exists()


class Stopped(Exception):
    pass


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    one_step = Loop._one_step

    def stopped(self: Loop, *arguments: Any) -> None:
        if self.step == step:
            raise Stopped
        one_step(self, *arguments)

    monkeypatch.setattr(Loop, "_one_step", stopped)


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "sgd(nesterov=True)", "schedule": "cosine(warmup=1)", "learning_rate": 0.05, "clip": 0.5},
        {"optimizer": "adamw", "schedule": "steps(1, 2)", "accumulate": 2, "save_every_steps": 1},
        {"batches": PROXIMITY, "save_every_steps": 2, "monitor_every": 1},
        {"negatives": "Tilt(adaptive(0.0, 1.0, rate=0.25))", "save_every_steps": 2},
        {"batches": "knn(refresh=4)", "save_every_steps": 1},
    ],
    ids=["sgd", "accumulated", "proximity", "adaptive", "knn"],
)
def test_stopped_in_mid_epoch_and_resumed_to_the_last_bit(
    options: dict[str, Any], data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_warnings()
    options = short(data, epochs=3, **options)
    accumulated = warns("training.accumulate", "32")
    with accumulated if "accumulate" in options else pytest.MonkeyPatch.context():
        run("simclr", tmp_path / "whole", options)
    for stop in (2, STEPS + 3, 2 * STEPS + 4):
        with monkeypatch.context() as patch:
            stop_after(stop, patch)
            with pytest.raises(Stopped):
                run("simclr", tmp_path / "stopped", options, resume=True)
        if options.get("save_every_steps"):
            saved = Run(tmp_path / "stopped").load()
            assert saved is not None
            assert saved["step"] >= stop - 2
    run("simclr", tmp_path / "stopped", options, resume=True)
    assert_same(everything(tmp_path / "stopped"), everything(tmp_path / "whole"))
    if "monitor_every" in options:
        best = [torch.load(tmp_path / name / "checkpoint.best.pt") for name in ("whole", "stopped")]
        assert best[0]["step"] == best[1]["step"]
        assert all(torch.equal(value, best[1]["method"][name]) for name, value in best[0]["method"].items())


def test_a_save_in_mid_epoch_changes_nothing(data: str, tmp_path: Path) -> None:
    run("simclr", tmp_path / "plain", short(data, batches=PROXIMITY))
    run("simclr", tmp_path / "saved", short(data, batches=PROXIMITY, save_every_steps=2))
    plain, saved = (everything(tmp_path / name) for name in ("plain", "saved"))
    assert plain["metrics"] == saved["metrics"]
    assert all((plain["embeddings"][name] == saved["embeddings"][name]).all() for name in plain["embeddings"])


def test_accumulated_gradients_are_the_mean_of_those_of_the_batches(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_warnings()
    seen: list[tuple[int, list[torch.Tensor]]] = []
    step = torch.optim.SGD.step

    def watched(self: torch.optim.SGD, *arguments: Any) -> Any:
        seen.append((len(seen), [p.grad.clone() for p in self.param_groups[0]["params"] if p.grad is not None]))
        return step(self, *arguments)

    monkeypatch.setattr(torch.optim.SGD, "step", watched)
    # At a learning rate of 0 the weights stay, so that the gradients of all batches are of the same ones.
    options = short(data, epochs=1, optimizer="sgd(momentum=0.0)", learning_rate=0.0)
    run("simclr", tmp_path / "each", options)
    each, seen = [gradients for _, gradients in seen], []
    with pytest.warns(HardnegWarning, match="--encode-chunk"):
        run("simclr", tmp_path / "two", {**options, "accumulate": 2})
    groups = [each[0:2], each[2:4], each[4:5]]  # five batches: the last update is of one
    assert len(seen) == 3
    for (_, found), group in zip(seen, groups, strict=True):
        for gradient, *parts in zip(found, *group, strict=True):
            torch.testing.assert_close(gradient, sum(parts) / len(group), rtol=1e-5, atol=1e-8)


def test_clipping_bounds_the_norm(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norms: list[float] = []
    step = torch.optim.SGD.step

    def watched(self: torch.optim.SGD, *arguments: Any) -> Any:
        trained = [p for group in self.param_groups for p in group["params"]]
        gradients = [p.grad.flatten() for p in trained if p.grad is not None]
        norms.append(float(torch.cat(gradients).norm()))
        return step(self, *arguments)

    monkeypatch.setattr(torch.optim.SGD, "step", watched)
    for name, clip in (("free", 0.0), ("clipped", 0.01)):
        run("simclr", tmp_path / name, short(data, epochs=1, optimizer="sgd", clip=clip))
    free, clipped = norms[:STEPS], norms[STEPS:]
    assert min(free) > 0.011
    assert clipped == pytest.approx([0.01] * STEPS, rel=1e-3)


def test_the_monitor_is_recorded_and_keeps_the_best(data: str, tmp_path: Path) -> None:
    options = short(data, epochs=3, monitor_every=1, schedule="cosine(warmup=1)")
    result = run("simclr", tmp_path, options)
    records = Run(tmp_path).metrics()
    looks = [(one["step"], one["monitor"]) for one in records if "monitor" in one]
    assert [step for step, _ in looks] == [STEPS, 2 * STEPS, 3 * STEPS]
    best = torch.load(tmp_path / "checkpoint.best.pt")
    assert (best["step"], best["monitor"]) == max(looks, key=lambda one: (one[1], -one[0]))
    assert "loss" in result["final"]
    page = write_report(tmp_path).read_text()
    assert "Monitor" in page
    assert "Learning rate" in page
    rates = [one["learning_rate"] for one in records if "loss" in one]
    assert max(rates) == rates[STEPS] == pytest.approx(1e-3)


def test_a_monitor_that_cannot_look_is_named_before_training(data: str, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("\n".join(f"line {i}" for i in range(64)))
    options = {"data": f"text:{tmp_path / 'lines.txt'}", "batch_size": 16, "epochs": 1, "device": "cpu"}
    with raises(ArgumentError, who="--monitor knn", what="labels"):
        run("simcse", tmp_path / "run", {**options, "monitor_every": 1})
    (tmp_path / "sts.tsv").write_text("split\tscore\tsentence1\tsentence2\ndev\t1\ta\tb\n")
    with raises(ArgumentError, who="--monitor sts", what="of texts", got="images"):
        run("simclr", tmp_path / "run", short(data, monitor=f"sts('{tmp_path / 'sts.tsv'}')", monitor_every=1))


def test_arms_and_their_names() -> None:
    arm = parse_arm('simclr(optimizer="sgd", schedule="cosine(warmup=5)", learning_rate=0.06)')
    same = parse_arm('simclr(schedule="cosine( warmup=5.0 )", optimizer="sgd(momentum=0.9)", learning_rate=0.06)')
    assert arm.trains_like(same)
    assert not arm.trains_like(parse_arm('simclr(optimizer="sgd", learning_rate=0.06)'))


def test_weight_decay_leaves_biases_norms_and_numbers_per_item_alone() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 2))
    per_item = torch.nn.Parameter(torch.full((10,), 0.7))
    made = read_optimiser("sgd(momentum=0)").build([*model.parameters(), per_item], lr=0.1, weight_decay=0.5)
    decayed = {id(p): group["weight_decay"] for group in made.param_groups for p in group["params"]}
    expected = {id(p): 0.0 for p in [*model.parameters(), per_item]}
    assert decayed == expected | {id(model[0].weight): 0.5, id(model[2].weight): 0.5}


def test_the_temperature_of_an_image_that_was_never_visited_keeps_its_value(tmp_path: Path) -> None:
    data = few_digits(tmp_path / "digits.npz", BATCH_SIZE + 3)  # three are left out of the only batch of the epoch
    run("isogclr", tmp_path / "run", short(data, epochs=1, weight_decay=0.1, learning_rate=0.1))
    temperatures = Run(tmp_path / "run").load()["method"]["individual.temperatures"]
    assert int((temperatures == torch.tensor(0.7)).sum()) == 3
