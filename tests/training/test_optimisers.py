"""Optimisers, learning rates, accumulation, clipping, checkpoints in mid-epoch and monitors; exactly resumed."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hardneg.comparing.arms import parse_arm
from hardneg.core.errors import ArgumentError, FileError, HardnegWarning, forget_warnings
from hardneg.losses.contrastive import ContrastiveLoss
from hardneg.reporting import write_report
from hardneg.state.momentum import AveragedWeights
from hardneg.training.evaluation import monitors
from hardneg.training.loop.optimisers import (
    LAMB,
    LARS,
    SGD,
    Adam,
    AdamW,
    ScaledSteps,
    Updates,
    read_optimiser,
    read_rate,
)
from hardneg.training.loop.parts import accelerator_for
from hardneg.training.loop.runs import Run
from hardneg.training.loop.train import Loop
from hardneg.training.options import RECIPES
from hardneg.training.trained import load_encoder
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
        ("lars(trust=0.01)", LARS(trust=0.01), ScaledSteps),
        ("lamb(beta2=0.98)", LAMB(beta2=0.98), ScaledSteps),
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
        ({"optimizer": "lars(trust=0.0)"}, "trust in"),
        ({"patience": 2}, "--monitor-every with --patience"),
        ({"ema": 1.0}, "--ema between 0 and"),
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
        {"optimizer": "lamb", "ema": 0.9, "save_every_steps": 1},
    ],
    ids=["sgd", "accumulated", "proximity", "adaptive", "knn", "averaged"],
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


def assert_updates(text: str, step: Any, decay: float) -> None:
    """Compare five updates of a matrix, a bias and a matrix of zeros with a plain loop over numbers."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(3, 4, generator=generator).double(), torch.randn(4, generator=generator).double()]
    weights.append(torch.zeros(2, 2, dtype=torch.float64))
    parameters = [torch.nn.Parameter(one.clone()) for one in weights]
    optimizer = read_optimiser(text).build(parameters, lr=0.3, weight_decay=decay, fused=False)
    expected, states = [one.flatten().tolist() for one in weights], [{} for _ in weights]
    for number in range(1, 6):
        for place, parameter in enumerate(parameters):
            parameter.grad = torch.randn(parameter.shape, generator=generator).double()
            gradient = parameter.grad.flatten().tolist()
            expected[place] = step(expected[place], gradient, states[place], number, parameter.ndim > 1)
        optimizer.step()
        for parameter, numbers in zip(parameters, expected, strict=True):
            torch.testing.assert_close(parameter.detach().flatten().tolist(), numbers, rtol=1e-12, atol=1e-14)


def norm(numbers: list[float]) -> float:
    return math.sqrt(sum(one * one for one in numbers))


def test_lars_is_the_update_of_simclr_and_moco_v3() -> None:
    def step(w: list[float], g: list[float], state: dict[str, Any], number: int, matrix: bool) -> list[float]:
        g = [gi + 0.1 * wi * matrix for gi, wi in zip(g, w, strict=True)]
        if matrix and norm(w) > 0:
            g = [gi * 0.02 * norm(w) / norm(g) for gi in g]
        elif matrix:
            g = [gi * 0.02 for gi in g]  # a ratio of 1, times the trust
        before = state.get("v", [0.0] * len(w))
        state["v"] = [0.8 * vi + gi for vi, gi in zip(before, g, strict=True)]
        return [wi - 0.3 * vi for wi, vi in zip(w, state["v"], strict=True)]

    assert_updates("lars(momentum=0.8, trust=0.02)", step, 0.1)


def test_lamb_is_algorithm_2_of_its_paper() -> None:
    def step(w: list[float], g: list[float], state: dict[str, Any], number: int, matrix: bool) -> list[float]:
        m, v = (state.get(name, [0.0] * len(w)) for name in "mv")
        state["m"] = m = [0.9 * mi + 0.1 * gi for mi, gi in zip(m, g, strict=True)]
        state["v"] = v = [0.99 * vi + 0.01 * gi**2 for vi, gi in zip(v, g, strict=True)]
        first, second = 1 - 0.9**number, 1 - 0.99**number
        r = [mi / first / (math.sqrt(vi / second) + 1e-6) for mi, vi in zip(m, v, strict=True)]
        u = [ri + 0.1 * wi * matrix for ri, wi in zip(r, w, strict=True)]
        trust = norm(w) / norm(u) if matrix and norm(w) > 0 else 1.0
        return [wi - 0.3 * trust * ui for wi, ui in zip(w, u, strict=True)]

    assert_updates("lamb(beta1=0.9, beta2=0.99)", step, 0.1)


def test_averaged_weights_have_a_closed_form() -> None:
    encoder = torch.nn.BatchNorm1d(3).double()
    average, states = AveragedWeights(encoder, 0.7), []
    for _ in range(30):
        states.append({name: value.clone() for name, value in encoder.state_dict().items()})
        with torch.no_grad():
            for value in (encoder.weight, encoder.bias, encoder.running_mean, encoder.running_var):
                value.copy_(torch.randn(3).double())
            encoder.num_batches_tracked += 1
        average.update_parameters(encoder)
    states.append(encoder.state_dict())
    decays = [min(0.7, (1 + t) / (10 + t)) for t in range(30)]
    shares = [math.prod(decays)] + [(1 - d) * math.prod(decays[t + 1 :]) for t, d in enumerate(decays)]
    assert sum(shares) == pytest.approx(1.0)
    found = average.module.state_dict()
    for name in ("weight", "bias", "running_mean", "running_var"):
        expected = sum(share * state[name] for share, state in zip(shares, states, strict=True))
        torch.testing.assert_close(found[name], expected, rtol=1e-12, atol=1e-12)
    assert int(found["num_batches_tracked"]) == 30


def test_the_averaged_encoder_is_evaluated_and_loaded(data: str, tmp_path: Path) -> None:
    options = short(data, ema=0.8, monitor_every=1)
    run("simclr", tmp_path / "run", options)
    state = Run(tmp_path / "run").load()
    assert state is not None
    for weights in ("last", "best"):
        encoder = load_encoder(tmp_path / "run", weights, normalise=False)  # type: ignore[arg-type]
        if weights == "last":
            name = "backbone.layers.0.weight"
            assert torch.equal(encoder.state_dict()[name], state["average"][f"module.{name}"])
            assert not torch.equal(encoder.state_dict()[name], state["method"][f"encoder.{name}"])
    with raises(FileError, what="the options of the run", got="ema"):
        run("simclr", tmp_path / "run", {**options, "ema": 0.0}, resume=True)


def test_a_run_stops_when_the_monitor_no_longer_improves(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {1: 0.1, 2: 0.3, 3: 0.2, 4: 0.3, 5: 0.9}
    monkeypatch.setattr(monitors, "knn", lambda items, represent: values[represent.epoch])
    options = short(data, epochs=5, monitor_every=1, patience=2)
    with monkeypatch.context() as patch:
        stop_after(3 * STEPS + 1, patch)
        with pytest.raises(Stopped):
            run("simclr", tmp_path, options)
    result = run("simclr", tmp_path, options, resume=True)
    assert (result["epochs"], result["steps"]) == (4, 4 * STEPS)
    saved = Run(tmp_path).load()
    assert saved is not None
    assert saved["epoch"] == 4
    assert torch.load(tmp_path / "checkpoint.best.pt")["epoch"] == 2


@pytest.mark.parametrize("contrastive", [False, True])
def test_accumulation_is_the_large_batch_where_items_do_not_interact(contrastive: bool) -> None:
    """A loss per item gives the update of the large batch; a contrastive one lacks the negatives between its parts."""
    forget_warnings()
    options = RECIPES["simclr"](accumulate=2, batch_size=4, epochs=1, optimizer="sgd", device="cpu")
    x, y = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(0)).double()
    updated = []
    for parts in (1, 2):
        model = torch.nn.Linear(3, 3).double()
        model.load_state_dict({"weight": torch.eye(3).double(), "bias": torch.zeros(3).double()})
        accelerator = accelerator_for(options)
        optimizer = accelerator.prepare(read_optimiser("sgd").build(model.parameters(), 0.0, lr=0.1, fused=False))
        own = options if parts == 2 else replace(options, accumulate=1)
        with warns("training.accumulate", "4") if parts == 2 else nullcontext():
            update = Updates(accelerator, optimizer, [*model.parameters()], [], own, parts)
        for number, (a, b) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            loss = ContrastiveLoss(temperature=0.5) if contrastive else torch.nn.functional.mse_loss
            assert update(loss(model(a), b), number) is (number == parts - 1)
        updated.append(model.weight.detach())
    assert torch.allclose(*updated, rtol=1e-12) is not contrastive
