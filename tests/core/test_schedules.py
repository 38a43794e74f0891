"""Schedules against the formulas of the papers and of their code, and what happens to one that is not evaluated."""

import itertools
import math
from dataclasses import dataclass, fields

import numpy as np
import pytest
import torch

import hardneg as hn
from hardneg.core.errors import ArgumentError
from hardneg.core.schedules import (
    Schedule,
    adaptive,
    constant,
    cosine,
    exponential,
    linear,
    registered_schedules,
    steps,
)
from support.errors import raises


def test_formulas():
    for total in (1, 7, 100):
        for step in (0, 1, total // 2, total - 1, total, total + 5):
            x = min(step / total, 1.0)
            assert constant(0.3)(step, total) == 0.3
            assert linear(2.0, -1.0)(step, total) == pytest.approx(2.0 - 3.0 * x)
            assert cosine(0.99, 1.0)(step, total) == pytest.approx(1.0 - 0.01 * (1 + math.cos(math.pi * x)) / 2)
            assert exponential(1.0, 0.1, decay=3.0)(step, total) == pytest.approx(
                0.1 + 0.9 * math.exp(-3 * step / total)
            )


@pytest.mark.parametrize(
    "schedule", [linear(1.0, 0.25), cosine(1.0, 0.25), steps(1.0, 0.25), linear(1.0, 0.25, None, True)]
)
def test_start_and_end_are_exact_and_the_end_stays(schedule):
    assert schedule(0, 40) == 1.0
    assert schedule(40, 40) == schedule(400, 40) == 0.25
    values = [schedule(step, 40) for step in range(60)]
    assert all(later <= earlier for earlier, later in itertools.pairwise(values))


def test_steps_says_how_long_it_takes():
    for make in (linear, cosine, exponential, steps):
        long, short = make(1.0, 0.0), make(1.0, 0.0, steps=10)
        for step in (0, 3, 10, 30):
            assert short(step, 1000) == short(step) == long(step, 10)


def test_the_steps_of_a_schedule_of_one_s_own_are_its_own(monkeypatch):
    monkeypatch.setattr("hardneg.core.schedules._registry", {})

    @dataclass(frozen=True, repr=False)
    class warm(Schedule):  # noqa: N801
        steps: int = 0

        def __call__(self, step: int, total: int | None = None) -> float:
            return 1.0 if step >= self.steps else 0.0

    assert [warm()(0), warm(2)(1), warm(2)(2)] == [1.0, 0.0, 1.0]


def test_a_schedule_without_the_length_of_the_run_raises():
    for schedule in (linear(1.0, 0.0), cosine(1.0, 0.0), exponential(1.0, 0.0), steps(1.0, 0.0)):
        with pytest.raises(ValueError, match=f"{type(schedule).__name__} needs the length of the run, got total=None"):
            schedule(3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: linear(1.0, 0.0, steps=0), "linear needs at least one step, got steps=0"),
        (lambda: cosine(1.0, 0.0, steps=-1), "cosine needs at least one step"),
        (lambda: hn.parse("Tilt(linear(1.0, 0.0, steps='ten'))"), "linear needs valid arguments"),
        (lambda: steps(1.0, 0.0, num_changes=0), "steps needs at least one change, got num_changes=0"),
        (lambda: steps(1.0, 0.0, variant="codes"), "steps needs variant 'paper' or 'code', got variant='codes'"),
        (lambda: exponential(1.0, 0.0, decay=-1.0), "exponential needs decay"),
        (lambda: adaptive(1.0, 0.0, rate=-0.1), "adaptive needs rate"),
    ],
)
def test_wrong_options_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_hscl_threshold_over_200_epochs():
    """l(start, end, epoch) = start + (epoch - 1) / 199 * (end - start), epoch = 1 ... 200 (H-SCL, eq. 4)."""
    for start in (-0.5, -0.3, -0.1):
        for end in (-0.1, 0.0, 0.1):
            schedule = linear(start, end, inclusive=True)
            for epoch in range(1, 201):
                expected = start + (epoch - 1) / 199 * (end - start)
                assert schedule(epoch - 1, 200) == pytest.approx(expected, abs=1e-15)
    assert linear(0.0, 1.0, inclusive=True)(0, 1) == 0.0


@pytest.mark.parametrize("epochs", [400, 50, 20, 5])
@pytest.mark.parametrize(("start", "end"), [(1.0, 0.0), (0.0, 1.0), (2.0, 0.5)])
def test_hcl_annealing_of_the_paper(epochs, start, end):
    """beta_{i+1} = beta_i - beta / l every e / l epochs (HCL, appendix D.1); the opposite for annealing up."""
    for changes in (2, 5, 8):
        value, values = start, []
        due = [math.ceil((i + 1) * epochs / changes) for i in range(changes)]
        for epoch in range(epochs + 1):
            value += due.count(epoch) * (end - start) / changes
            values.append(value)
        schedule = steps(start, end, num_changes=changes)
        assert [schedule(epoch, epochs) for epoch in range(epochs + 1)] == pytest.approx(values)


@pytest.mark.parametrize("epochs", [400, 50, 20, 5])
@pytest.mark.parametrize(("start", "end"), [(1.0, 0.0), (0.0, 1.0)])
def test_hcl_annealing_of_the_code(epochs, start, end):
    """Nine values, the next one after each epoch that int(epochs / 9) divides; the script stops where this goes on."""
    waiting = list(np.linspace(start, end, 9))
    every, current, used = max(epochs // 9, 1), start, []
    for epoch in range(1, epochs + 1):
        used.append(current)
        if epoch % every == 0 and waiting:
            current = waiting.pop(0)
    schedule = steps(start, end, variant="code")
    assert [schedule(epoch - 1, epochs) for epoch in range(1, epochs + 1)] == pytest.approx(used)
    if epochs == 400:
        assert [epoch for epoch in range(1, 401) if schedule(epoch - 1, 400) == end] == [397, 398, 399, 400]
        assert schedule(87, 400) == start != schedule(88, 400)


def test_ring_of_the_paper_and_of_the_code():
    paper = hn.Ring(0.1, linear(1.0, 0.1, steps=100), dynamic_inner=True)
    assert [paper.at(epoch).outer for epoch in (0, 50, 100, 250)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    array = np.linspace(0.1, 1.0, 30)[::-1]  # the code indexes it by step, then stays at its end
    code = linear(1.0, 0.1, steps=30, inclusive=True)
    assert [code(step) for step in range(30)] == pytest.approx(array)
    assert code(30) == code(300) == 0.1
    decay = exponential(1.0, 0.1, decay=0.1, steps=1)
    assert [decay(step) for step in (0, 1, 10, 50)] == pytest.approx(
        [0.1 + 0.9 * math.exp(-0.1 * step) for step in (0, 1, 10, 50)]
    )
    assert decay(50) < 0.11


def test_moco_momentum():
    for epoch in (0, 10, 99):
        assert cosine(0.99, 1.0)(epoch, 100) == pytest.approx(1 - 0.5 * (1 + math.cos(math.pi * epoch / 100)) * 0.01)


@pytest.mark.parametrize(("start", "end"), [(1.0, 0.1), (0.1, 1.0), (0.5, 0.5)])
def test_adaptive_moves_on_while_the_metric_improves_and_back_when_it_does_not(start, end):
    schedule, value, last = adaptive(start, end, rate=0.07), start, None
    for metric in np.random.default_rng(0).normal(size=200):
        schedule.observe(metric)
        if last is not None:
            towards_end = 0.07 if end >= start else -0.07
            value += towards_end if metric > last else -towards_end
            value = min(max(value, min(start, end)), max(start, end))
        last = metric
        assert schedule(0) == schedule(17, 3) == pytest.approx(value, abs=1e-12)


def test_adaptive_reaches_its_ends_and_its_first_metric_is_only_remembered():
    schedule = adaptive(1.0, 0.1, rate=0.4)
    schedule.observe(0.5)
    assert schedule(0) == 1.0
    for metric, expected in ((0.6, 0.6), (0.7, 0.2), (0.8, 0.1), (0.8, 0.5), (0.1, 0.9), (0.0, 1.0)):
        schedule.observe(metric)
        assert schedule(0) == pytest.approx(expected)


def test_adaptive_saves_its_state():
    first, second = adaptive(1.0, 0.1, rate=0.2), adaptive(1.0, 0.1, rate=0.2)
    for metric in (0.1, 0.2, 0.3):
        first.observe(metric)
    saved = first.state_dict()
    first.observe(0.4)
    second.load_state_dict(saved)
    assert second(0) == pytest.approx(0.6)  # the copy did not follow the first one
    second.observe(0.25)  # below the remembered 0.3
    assert second(0) == pytest.approx(0.8)
    assert adaptive(1.0, 0.1)(0) == 1.0  # a new one starts anew


SCHEDULED = [
    "Gaussian({0}, sigma={0})",
    "Tilt({})",
    "Tilt({}, detach=True)",
    "ClippedTilt({})",
    "ClippedTilt(1.0, bound={})",
    "Threshold({})",
    "Ring({})",
    "Ring(0.0, {})",
    "Ring({}, 0.5, dynamic_inner=True)",
    "AtMost({})",
    "BelowPositive({})",
    "BelowPositive(absolute={})",
    "BelowPositive(0.1, absolute={})",
    'Hardening("exponential", {})',
    'Hardening("threshold", {})',
    'Hardening("sigmoid", {})',
    "Uniform() * Tilt({})",
]


@pytest.mark.parametrize("text", SCHEDULED)
@pytest.mark.parametrize("schedule", ["linear(0.2, 0.4)", "adaptive(0.2, 0.4)", "constant(0.2)"])
def test_a_schedule_that_is_not_evaluated_says_so(text, schedule):
    q = hn.parse(text.format(schedule))
    z = torch.randn(4, 3)
    scores = hn.two_views(z, z, 0.5)
    with raises(ArgumentError, what="a number", got="a schedule"):
        q.log_weights(scores)
    torch.testing.assert_close(q.at(0, 10).log_weights(scores), hn.parse(text.format(0.2)).log_weights(scores))


def test_every_number_of_every_distribution_is_in_the_list_above():
    numbers = {
        (cls.__name__, field.name)
        for cls in hn.registered_negatives().values()
        if cls.__module__.startswith("hardneg.negatives")
        for field in fields(cls)
        if "Number" in str(field.type)
    }
    seen = {
        (type(factor).__name__, field.name)
        for text in SCHEDULED
        for factor in hn.parse(text.format("constant(0.2)")).factors
        for field in fields(factor)
        if getattr(factor, field.name) == constant(0.2)
    }
    assert numbers <= seen


def test_products_are_evaluated_factor_by_factor():
    q = hn.parse("OtherLabel() * Tilt(linear(1.0, 0.0)) * Ring(0.0, linear(1.0, 0.5))")
    assert q.at(5, 10) == hn.parse("OtherLabel() * Tilt(0.5) * Ring(0.0, 0.75)")
    assert [type(schedule) for schedule in q.schedules()] == [linear, linear]
    assert q.at(5, 10).schedules() == []
    assert hn.Tilt(1.0).at(3) == hn.Tilt(1.0)


def test_numbers_of_a_schedule_are_checked_when_they_come():
    with raises(ArgumentError, who="Tilt", got="beta=-1.0"):
        hn.Tilt(linear(1.0, -1.0)).at(10, 10)


def test_schedules_are_written_and_read():
    for cls in registered_schedules().values():
        for text in cls.examples:
            q = hn.parse(f"Tilt({text})")
            assert type(q.beta) is cls
            assert hn.parse(repr(q)) == q
