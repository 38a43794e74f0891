"""When graphs are refreshed in training: about every so many steps, and shortly before the segment that they plan."""

from __future__ import annotations

import hashlib
import warnings
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hardneg.batching.planners import base
from hardneg.batching.refresh import Refresh
from hardneg.batching.sampler import PlannedBatchSampler
from hardneg.batching.spec import parse_batches
from hardneg.core.errors import ArgumentError, FileError, HardnegWarning
from hardneg.training.loop.parts import PlanRefresher
from hardneg.training.loop.runs import Run
from hardneg.training.options import RECIPES
from support.errors import raises
from support.training_runs import STEPS, few_digits, interrupted, run, short

pytest.importorskip("accelerate", reason="training needs the extra train")


@pytest.fixture
def refreshed_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps at which training refreshes."""
    seen: list[int] = []
    now = Refresh.now

    def remember(self: Refresh, step: int = 0) -> None:
        seen.append(step)
        now(self, step)

    monkeypatch.setattr(Refresh, "now", remember)
    return seen


class Batches:
    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number


def refreshes(batches: int, every: int, epochs: int) -> list[int]:
    """The steps at which one is due, after a warm-up of one epoch."""
    spec, total = SimpleNamespace(refresh=every), epochs * batches
    fresh: Any = SimpleNamespace(spec=spec, sampler=Batches(batches), total=total, refreshed=batches)
    fresh._lead = partial(PlanRefresher._lead, fresh)
    found = [batches]
    for step in range(batches + 1, total + 1):
        if PlanRefresher.is_due(fresh, step, (step - 1) // batches):
            fresh.refreshed = step
            found.append(step)
    return found


@pytest.mark.parametrize(
    ("batches", "every"), [(195, 100), (195, 195), (1000, 100), (104, 100), (11, 11), (11, 100), (10, 3), (7, 1)]
)
def test_refreshes_come_about_as_often_as_requested_and_are_fresh_when_used(batches: int, every: int) -> None:
    steps = refreshes(batches, every, epochs=60)
    starts = [s for s in range(batches, 60 * batches) if (s % batches) % every == 0]  # of segments
    lead = min(33, (every - 1) // 3, min(every, batches) - 1)
    used = {start: max(step for step in steps if step <= start) for start in starts}
    assert set(steps) == set(used.values()), "each of them is used"
    first_uses = [min(start for start, step in used.items() if step == one) for one in steps]
    assert all(use - step <= lead for use, step in zip(first_uses, steps, strict=True))
    gaps = [after - before for before, after in pairwise(steps)]
    slack = min(every, batches) / 2 + lead
    assert all(every - slack <= gap <= every + slack for gap in gaps), gaps
    assert sum(gaps) / len(gaps) == pytest.approx(every, rel=0.12)


def test_training_refreshes_then(refreshed_at: list[int], tmp_path: Path) -> None:
    batches = "proximity(num_candidates=60, num_neighbours=8, refresh=24, warmup=1)"
    run("simclr", tmp_path / "run", short(few_digits(tmp_path / "digits.npz"), epochs=9, batches=batches))
    assert refreshed_at == refreshes(STEPS, 24, 9)
    assert len(refreshed_at) == 4
    state = Run(tmp_path / "run").load()
    assert state is not None
    assert state["refreshed"] == refreshed_at[-1]


@pytest.mark.parametrize("batches", ["proximity(coverage='free', num_candidates=60, num_neighbours=8, refresh=10)"])
@pytest.mark.parametrize("warmup", [0, 1])
def test_free_batches_train_on_all_items(batches: str, warmup: int, tmp_path: Path) -> None:
    data, batches = few_digits(tmp_path / "digits.npz"), batches.replace(")", f", warmup={warmup})")
    options = short(data, epochs=3, batch_size=36, batches=batches, log_every=100)  # 32 are left out of an epoch
    with warnings.catch_warnings():
        warnings.simplefilter("error", HardnegWarning)
        whole = run("simclr", tmp_path / "whole", options)
    assert whole["share_seen"] > 0.95
    with interrupted(11):
        run("simclr", tmp_path / "stopped", options)
    assert run("simclr", tmp_path / "stopped", options, resume=True)["share_seen"] == whole["share_seen"]


def test_items_that_are_never_in_a_batch_are_warned_of(tmp_path: Path) -> None:
    options = short(few_digits(tmp_path / "digits.npz"), epochs=4, batch_size=120, batches="consecutive()")
    with pytest.warns(HardnegWarning, match=r"75.0% of the 320 images .* in the first 3 epochs"):
        assert run("simclr", tmp_path / "run", options)["share_seen"] == 0.75


def test_an_item_without_a_vector_stands_for_a_random_other(tmp_path: Path) -> None:
    sampler: Any = SimpleNamespace(planner=parse_batches("knn()").planner, num_instances=40)
    fresh = PlanRefresher(sampler, parse_batches("knn()"), 100, lambda: torch.zeros(0), seed=0)
    fresh.harvested = torch.nn.functional.normalize(torch.randn(40, 4), dim=1)
    assert fresh.known(5) is fresh.harvested
    fresh.harvested[:3] = 0.0
    found = fresh.known(5)
    assert torch.equal(found[3:], fresh.harvested[3:])
    assert all((fresh.harvested[3:] == row).all(1).any() for row in found[:3])
    assert torch.equal(found, fresh.known(5))
    assert not torch.equal(found, fresh.known(6))
    assert not fresh.harvested[:3].any()


def test_vectors_are_hashed_once_for_all_pieces_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []
    blake = hashlib.blake2b
    monkeypatch.setattr(hashlib, "blake2b", lambda raw, **how: hashed.append(len(raw)) or blake(raw, **how))
    vectors = torch.nn.functional.normalize(torch.randn(120, 4), dim=1)
    sampler = PlannedBatchSampler(parse_batches("knn()").planner, 120, 10, vectors, seed=0, ahead=2)
    list(sampler)
    assert hashed.count(120 * 4 * 4) == 1
    before = base.digest_of(vectors)
    vectors[0] = -vectors[0]
    assert base.digest_of(vectors) != before
    vectors[0] = -vectors[0]
    assert base.digest_of(vectors) == before


def test_batches_refuse_a_schedule_that_nobody_would_move() -> None:
    with raises(ArgumentError, who="batches", what="linear(0.2, 0.05)", got="restart=adaptive(0.2, 0.05)"):
        parse_batches("proximity(restart=adaptive(0.2, 0.05))")


def test_half_precision_that_a_cpu_does_not_have_is_refused(tmp_path: Path) -> None:
    options = short(few_digits(tmp_path / "digits.npz"), precision="fp16")
    with raises(ArgumentError, who="train", what="--precision", got="precision='fp16'"):
        run("simclr", tmp_path / "run", options)
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_run_of_an_older_version_goes_on(tmp_path: Path) -> None:
    """Options that were added since are at their defaults there; another value for one is another run."""
    now = RECIPES["simclr"](epochs=3).as_dict()
    older = {name: value for name, value in now.items() if name != "save_every"}
    begun = Run.open(tmp_path, "simclr", older, resume=False)
    begun.log(step=1, loss=1.0)
    usual = RECIPES["simclr"]().as_dict()
    assert Run.open(tmp_path, "simclr", now, True, usual) == begun
    with raises(FileError, who="train", got="save_every"):
        Run.open(tmp_path, "simclr", now | {"save_every": 2}, True, usual)
    with raises(FileError, who="train", got="-> 4"):
        Run.open(tmp_path, "simclr", now | {"epochs": 4}, True, usual)


def test_vectors_of_inference_mode_are_planned_from() -> None:
    with torch.inference_mode():
        vectors = torch.nn.functional.normalize(torch.randn(120, 4), dim=1)
    sampler = PlannedBatchSampler(parse_batches("knn()").planner, 120, 10, vectors, seed=0, ahead=2)
    assert sorted(i for batch in sampler for i in batch) == list(range(120))
    assert base.digest_of(vectors) == base.digest_of(vectors.clone())


@pytest.mark.parametrize(("epochs", "expected"), [(1, [6]), (2, [6, 16])])
def test_without_a_warmup_nothing_is_refreshed_twice_or_for_nothing(
    epochs: int, expected: list[int], refreshed_at: list[int], tmp_path: Path
) -> None:
    """Of ten steps an epoch, segments of eight and two: none at the end of the first epoch, or of training."""
    data = few_digits(tmp_path / "digits.npz")
    run("simclr", tmp_path / "run", short(data, epochs=epochs, batches="knn(refresh=8, warmup=0)"))
    assert refreshed_at == expected
