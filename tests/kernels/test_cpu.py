"""Losses of the closed family on a CPU: what matrices of scores and plain operations give, value and gradient."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import hardneg as hn
from hardneg.core.objectives import Objective, Row
from hardneg.core.statistics import LogMass, LogPositives, Statistic, Support
from hardneg.core.views import NUMBERED
from hardneg.kernels.backends import cpu, cpu_tiles
from support.operations import Largest

pytestmark = pytest.mark.filterwarnings("ignore::hardneg.core.errors.HardnegWarning")

B = 9
NEGATIVES = [
    "Uniform()",
    "Tilt(1.0)",
    "Tilt(0.7)",
    "Tilt(2.5, detach=True)",
    "OtherLabel() * Tilt(0.7)",
    "Threshold(0.1)",
    "OtherLabel() * Threshold(-0.2) * Tilt(1.0)",
    "Ring(0.1, 0.5)",
    "Ring(0.2, 0.7, at_least=2) * Tilt(1.0)",
    "Rank(0, 5)",
    "Rank(3)",
]
LABEL: dict[str, Any] = {"positives": "label"}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "debiased": {"tau_plus": 0.1},
    "labels": LABEL,
    "supcon": {**LABEL, "positives_in_denominator": "all"},
    "hscl": {**LABEL, "num_negatives": "candidates", "reduction": "pairs"},
    "graphcl": {**LABEL, "positives_in_denominator": "none", "num_negatives": 7.0},
    "true positives": {**LABEL, "same_label_negatives": True},
    "mass": {"num_negatives": "mass"},
    "as given": {"normalize": False},
    "each anchor": {"reduction": "none"},
    "cold": {"temperature": 0.01},
    "learnt temperature": {"temperature": "learnt"},
    "temperature of each anchor": {"temperature": "each"},
    "rince": {"objective": "rince(q=0.5)"},
}
IDS = {
    "numbered": None,
    "twice": torch.tensor([3, 4, 3, 5, -1, -1, 7, 8, 4]),
    "large": torch.tensor([3, 4, 3, 5, -1, -1, 7, 8, 4]) + NUMBERED // 2,
}
TILES = {"whole": {}, "small": {"TILE": 0, "MIN_ROWS": 5, "COLUMNS": 7}}

KINDS = ["two", "three", "cross", "queue", "pools"]
WAYS = [
    ("dense", "numbered", "whole"),
    ("streamed", "twice", "small"),
    ("dense", "twice", "small"),
    ("streamed", "numbered", "small"),
    ("streamed", "large", "small"),
    ("streamed", "numbered", "whole"),
]
"""impl, ids and tiles."""


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "rows", lambda *_, **__: None)


def value_and_gradients(loss: hn.ContrastiveLoss, leaves: list[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
    loss._calls = 2  # no look at the negatives
    value = loss(*args, **kwargs)
    upstream = torch.linspace(0.5, 2.0, value.numel(), dtype=value.dtype).view(value.shape)
    gradients = torch.autograd.grad(value, leaves, upstream, materialize_grads=True, allow_unused=True)
    return [value.detach(), *gradients]


def inputs(kind: str, ids: str, exact: bool = False) -> tuple[list[Tensor], tuple[Any, ...], dict[str, Any]]:
    """Leaves, arguments and options of a call; with ``exact``, vectors of small whole numbers."""

    def made(*shape: int, seed: int) -> Tensor:
        found = vectors(*shape, seed=seed)
        return found.detach().round().requires_grad_() if exact else found

    views = [made(B, seed=seed) for seed in range(3 if kind == "three" else 2)]
    leaves, options = list(views), {"labels": torch.arange(B) % 3, "ids": IDS[ids]}
    if kind in ("queue", "pools"):
        pools = [made(11, seed=4), made(6, seed=5)]
        parts = [hn.Keys(pools[0], torch.arange(11) if ids == "twice" else None, torch.arange(11) % 4)]
        if kind == "queue":
            parts = [parts[0].changed(vectors=pools[0].detach())]
        else:
            leaves += pools
            parts.append(hn.Keys(pools[1], labels=torch.arange(6) % 3))
        options["pool"] = parts
    return leaves, ((views,) if kind == "three" else tuple(views)), options


def both(
    monkeypatch: pytest.MonkeyPatch, impl: str, options: dict[str, Any], kind: str, ids: str, exact: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Value and gradients through the backend for CPUs, and through matrices."""
    leaves, args, given = inputs(kind, ids, exact)
    options = {"temperature": 0.4, **options}
    if options["temperature"] == "learnt":
        options["temperature"] = torch.nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
        leaves.append(options["temperature"])
    if options["temperature"] == "each":
        given["temperature"] = torch.linspace(0.2, 1.0, B, dtype=torch.float64).requires_grad_()
        options["temperature"] = 0.5
        leaves.append(given["temperature"])
    if kind == "cross":
        options["views"] = "cross"
    used, rows = [], cpu.rows

    def recorded(*args: Any, **kwargs: Any) -> Any:
        used.append(rows(*args, **kwargs))
        return used[-1]

    monkeypatch.setattr(cpu, "rows", recorded)
    found = value_and_gradients(hn.ContrastiveLoss(**options, impl=impl), leaves, *args, **given)
    assert used[0] is not None
    without(monkeypatch)
    return found, value_and_gradients(hn.ContrastiveLoss(**options, impl="dense"), leaves, *args, **given)


@pytest.mark.parametrize("j", range(len(OPTIONS)), ids=[*OPTIONS])
@pytest.mark.parametrize("i", range(len(NEGATIVES)), ids=NEGATIVES)
def test_the_loss_is_that_of_matrices(i: int, j: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every distribution with every option; each of them with every kind of pairing and most ways to compute it."""
    kind, (impl, ids, tiles) = KINDS[(i + j) % len(KINDS)], WAYS[(3 * i + j) % len(WAYS)]
    for constant, value in TILES[tiles].items():
        monkeypatch.setattr(cpu_tiles, constant, value)
    options = {"negatives": NEGATIVES[i], **list(OPTIONS.values())[j]}
    found, wanted = both(monkeypatch, impl, options, kind, ids)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    "text", ["Ring(0.1, 0.5)", "Ring(0.25, outer=0.6, dynamic_inner=True)", "Rank(1, 4)", "Rank(2)"]
)
@pytest.mark.parametrize("kind", ["two", "cross", "pools"])
@pytest.mark.parametrize("impl", ["dense", "streamed"])
def test_ties_at_the_edges_of_a_window_are_broken_by_column(
    text: str, kind: str, impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for constant, value in TILES["small"].items():
        monkeypatch.setattr(cpu_tiles, constant, value)
    options = {"negatives": text, "normalize": False, "temperature": 2.0}
    found, wanted = both(monkeypatch, impl, options, kind, "twice", exact=True)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_collapsed_vectors_leave_a_ring_its_number_of_candidates() -> None:
    z = torch.ones(40, 16)
    loss = hn.ContrastiveLoss("Ring(0.1, 0.5)", 0.2)
    pairing = loss.pairing(z, z)
    row = cpu.rows(pairing, loss.negatives, loss.objective, keep=False).row
    assert row.support.unique().tolist() == [39 - 7]


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "a limit for each anchor": {"negatives": "BelowPositive(0.1)"},
    "a weight outside the family": {"negatives": "Hardening('sigmoid', 2.0)"},
    "another statistic": {"objective": "jsd"},
    "losses that differ by pair": {**LABEL, "tau_plus": 0.1},
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_other_losses_are_left_to_the_other_backends(name: str) -> None:
    z1, z2 = vectors(2, 6).unbind()
    loss = hn.ContrastiveLoss(**UNSUPPORTED[name])
    pairing = loss.pairing(z1, z2, labels=torch.arange(6) % 2)
    assert cpu.rows(pairing, loss.negatives, loss.objective, keep=True) is None


@pytest.mark.parametrize("odd", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["OtherLabel()", "Ring(0.1, 0.5)"])
def test_a_candidate_that_is_not_finite_shows_where_it_does_in_matrices(
    odd: float, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    z1, z2, pool = vectors(6), vectors(6, seed=1), vectors(8, seed=2).detach()
    pool[3, 1] = odd
    parts = hn.Keys(pool, labels=torch.arange(8) % 3)
    loss = hn.ContrastiveLoss(name, reduction="none", impl="streamed")
    found = loss(z1, z2, labels=torch.arange(6) % 3, pool=parts)
    without(monkeypatch)
    wanted = loss(z1, z2, labels=torch.arange(6) % 3, pool=parts)
    torch.testing.assert_close(found, wanted, equal_nan=True)
    assert found.isnan().any()


@pytest.mark.parametrize("text", ["Uniform()", "Tilt(1.0)", "Tilt(1.0, detach=True)"])
def test_a_queue_may_be_changed_between_the_loss_and_its_gradient(text: str) -> None:
    z1, z2, found = vectors(6), vectors(6, seed=1), []
    for changes in (False, True):
        queue = vectors(20, seed=2).detach()
        value = hn.ContrastiveLoss(text, impl="streamed")(z1, z2, pool=queue)
        if changes:
            queue.zero_()
        found.append(torch.autograd.grad(value, [z1, z2]))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("text", ["Uniform()", "Tilt(1.0)", "Tilt(1.0, detach=True)", "OtherLabel()", "Ring(0.1, 0.5)"])
@pytest.mark.parametrize("impl", ["dense", "streamed"])
def test_positives_without_a_gradient_are_normalised(text: str, impl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    z1, z2, labels = vectors(12), 3.0 * vectors(12, seed=1), torch.arange(12) % 3
    loss, found = hn.ContrastiveLoss(text, views="cross", detach_keys=True, impl=impl), []
    for _ in range(2):
        value = loss(z1, z2, labels=labels)
        found.append((value, *torch.autograd.grad(value, [z1])))
        without(monkeypatch)
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", ["plain", "supcon", "hscl"])
@pytest.mark.parametrize("text", ["Uniform()", "Tilt(1.0)", "Threshold(0.1)", "Ring(0.1, 0.5)"])
def test_single_precision_is_close_to_double(text: str, name: str) -> None:
    base = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    views = [normalize(base + 0.3 * vectors(64, seed=seed).float().detach()[:, :1], dim=-1) for seed in (1, 2)]
    loss, found = hn.ContrastiveLoss(text, 0.1, **OPTIONS[name]), []
    for dtype in (torch.float32, torch.float64):
        given = [view.to(dtype).requires_grad_() for view in views]
        found.append(value_and_gradients(loss, given, *given, labels=torch.arange(64) % 7))
    for single, double in zip(*found, strict=True):
        assert single.dtype == torch.float32
        assert (single.double() - double).norm() <= 2e-6 * double.norm()


def test_products_without_onednn_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    z1, z2 = (vectors(30, seed=seed).detach().float().requires_grad_() for seed in (0, 1))
    loss, found = hn.ContrastiveLoss("Tilt(1.0)", 0.1), []
    for op in (torch.ops.mkldnn, object()):
        monkeypatch.setattr(torch.ops, "mkldnn", op)
        found.append(value_and_gradients(loss, [z1, z2], z1, z2))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["supcon", "hscl"])
@pytest.mark.parametrize("text", ["OtherLabel()", "Ring(0.1, 0.5)"])
def test_a_streamed_loss_allocates_blocks_only(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_tiles, "TILE", 0)
    monkeypatch.setattr(cpu_tiles, "MIN_ROWS", 5)
    loss = hn.ContrastiveLoss(text, impl="streamed", **OPTIONS[name])
    loss._calls = 2
    z1, z2 = vectors(50), vectors(50, seed=1)
    with Largest() as largest:
        loss(z1, z2, labels=torch.arange(50) % 7).backward()
    assert largest.most <= 100 * 5  # rows of a block x candidates, and candidates x features


@pytest.mark.parametrize("impl", ["dense", "streamed"])
@pytest.mark.parametrize(("negatives", "options"), [("Uniform()", {}), ("Ring(0.1, 0.5)", {}), ("Uniform()", LABEL),
                                                    ("OtherLabel()", OPTIONS["supcon"])])  # fmt: skip
@pytest.mark.parametrize("differentiated", [False, True])
def test_a_loss_is_freed_without_the_garbage_collector(
    negatives: str, options: dict[str, Any], impl: Any, differentiated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tiles are large, and a cycle through autograd is never collected."""
    made: list[weakref.ref[Any]] = []
    init = cpu._ClosedFormRows.__init__

    def noted(loss: Any, *given: Any) -> None:
        made.append(weakref.ref(loss))
        init(loss, *given)

    monkeypatch.setattr(cpu._ClosedFormRows, "__init__", noted)
    gc.disable()
    try:
        views = [torch.randn(8, 4, requires_grad=True) for _ in range(2)]
        value = hn.ContrastiveLoss(negatives, impl=impl, **options)(*views, labels=torch.arange(8) % 3)
        if differentiated:
            value.backward()
        del value
        assert made
        assert not any(each() for each in made)
    finally:
        gc.enable()


@dataclass(frozen=True, repr=False)
class OfOneStatistic(Objective):
    """An objective that declares one statistic, and nothing of the others."""

    name: ClassVar = "of_one_statistic"
    statistic: Statistic

    def statistics(self) -> dict[str, Statistic]:
        return {"value": self.statistic}

    def __call__(self, positive: Tensor, row: Row) -> Tensor:
        return row.value - positive


@pytest.mark.parametrize("statistic", [LogMass(), LogPositives(), Support()])
@pytest.mark.parametrize("negatives", ["Uniform()", "Tilt(1.0, detach=True)", "Tilt(1.0)"])
@pytest.mark.parametrize("impl", ["dense", "streamed"])
def test_an_objective_without_log_mean_has_the_gradient_of_matrices(
    statistic: Statistic, negatives: str, impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"negatives": negatives, "objective": OfOneStatistic(statistic=statistic)}
    for kind in ("queue", "two"):
        found, wanted = both(monkeypatch, impl, options, kind, "numbered")
        monkeypatch.undo()
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)
