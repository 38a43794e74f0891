"""Uniform and tilted negatives of views, by the backend for CPUs and by the shortcut of a GPU: the loss of matrices."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

import hardneg as hn
from hardneg.core.errors import ArgumentError, forget_warnings
from hardneg.core.pairing import Pairing
from hardneg.core.schedules import linear
from hardneg.kernels.backends import cpu, cpu_tiles, tilted
from support.kernel_inputs import DEVICE
from support.operations import Largest, Operations

IMPLS = ["dense", "streamed", "tilted"] if DEVICE == "cpu" else ["tilted"]
"""The backend for CPUs with and without tiles that are kept, and the shortcut that a GPU takes."""

OPTIONS: dict[str, dict[str, Any]] = {
    "uniform": {"negatives": "Uniform()"},
    "tilt": {"negatives": "Tilt(1.0)"},
    "another tilt": {"negatives": "Tilt(0.3)"},
    "a detached tilt": {"negatives": "Tilt(2.5, detach=True)"},
    "two tilts": {"negatives": "Tilt(0.5) * Tilt(0.7)"},
    "dcl": {"negatives": "Uniform()", "tau_plus": 0.1},
    "hcl": {"negatives": "Tilt(1.0)", "tau_plus": 0.1},
    "hcl at its floor": {"negatives": "Tilt(1.0)", "tau_plus": 0.7, "temperature": 1.5},
    "cold": {"negatives": "Tilt(1.0)", "temperature": 0.01},
    "a number": {"negatives": "Tilt(1.0)", "num_negatives": 7.0},
    "no positive": {"negatives": "Tilt(1.0)", "positives_in_denominator": "none"},
    "rince": {"negatives": "Uniform()", "objective": "rince(q=0.5)"},
    "a function": {"objective": lambda positive, row: row.log_mean - positive + row.support.log()},
    "a function of all statistics": {"objective": lambda positive, row: sum(row.statistics.values()) - positive},
    "one loss for all positives": {"objective": lambda positive, row: row.log_mean},
    "each anchor": {"negatives": "Tilt(1.0)", "reduction": "none"},
    "pairs": {"negatives": "Tilt(1.0)", "reduction": "pairs"},
    "as given": {"negatives": "Tilt(1.0)", "normalize": False},
    "detached keys": {"negatives": "Tilt(1.0)", "detach_keys": True},
}
IDS = {
    "numbered": None,
    "ids": torch.arange(6),
    "instances that are there twice": torch.tensor([3, 4, 3, 5, -1, -1]),
    "one instance": torch.zeros(6, dtype=torch.long),
}


def views(number: int = 2, rows: int = 6, seed: int = 3) -> list[Tensor]:
    made = torch.randn(number, rows, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return [view.to(DEVICE).requires_grad_() for view in made.unbind()]


def value_and_gradients(loss: hn.ContrastiveLoss, given: list[Tensor], ids: Tensor | None = None) -> list[Any]:
    loss._calls = 2  # no look at the negatives, which warns of those that are missing
    value = loss(given, ids=None if ids is None else ids.to(DEVICE))
    return [value, *torch.autograd.grad(value.sum(), given, allow_unused=True)]


@pytest.fixture(params=IMPLS)
def impl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The ``impl`` of a loss, with only one of the shortcuts."""
    if request.param != "tilted":
        return str(request.param)
    monkeypatch.setattr(cpu, "rows", lambda *_, **__: None)
    return "dense"


@pytest.fixture
def only_tilted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the way of a GPU."""
    monkeypatch.setattr(cpu, "rows", lambda *_, **__: None)


@pytest.fixture
def by_matrices(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    def compute(*args: Any) -> list[Any]:
        with monkeypatch.context() as patch:
            patch.setattr(tilted, "rows", lambda *_: None)
            patch.setattr(cpu, "rows", lambda *_, **__: None)
            return value_and_gradients(*args)

    return compute


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 5 rows."""
    for name, value in {"TILE": 0, "MIN_ROWS": 5}.items():
        monkeypatch.setattr(cpu_tiles, name, value)


@pytest.fixture
def shortcuts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the name of each shortcut that computes a loss."""
    used: list[str] = []
    for module in (tilted, cpu):
        monkeypatch.setattr(module, "rows", partial(recorded, used, module.rows))
    return used


def recorded(used: list[str], shortcut: Any, *args: Any, **options: Any) -> Any:
    found = shortcut(*args, **options)
    used += [] if found is None else [shortcut.__module__.rpartition(".")[2]]
    return found


@pytest.mark.parametrize("kind", ["two", "cross", "three"])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_loss_is_that_of_matrices(name: str, kind: str, impl: str, by_matrices: Any, shortcuts: list[str]) -> None:
    for which, ids in IDS.items():
        given = views(3 if kind == "three" else 2)
        loss = hn.ContrastiveLoss(**OPTIONS[name], views="cross" if kind == "cross" else "two", impl=impl)
        found = value_and_gradients(loss, given, ids)
        assert shortcuts, which
        shortcuts.clear()
        loss.impl = "dense"
        wanted = by_matrices(loss, given, ids)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "options",
    [
        {"negatives": "Threshold(0.2) * Tilt(1.0)"},
        {"negatives": "Ring(0.1, outer=0.9)"},
        {"num_negatives": "mass"},
        {"num_negatives": "candidates"},
        {"positives_in_denominator": "all"},
        {"objective": "jsd"},
        {"temperature": torch.nn.Parameter(torch.tensor(0.5, device=DEVICE))},
    ],
    ids=str,
)
@pytest.mark.usefixtures("only_tilted")
def test_other_losses_need_matrices(options: dict[str, Any], shortcuts: list[str]) -> None:
    hn.ContrastiveLoss(**options, impl="dense")(*views())
    assert not shortcuts


def loss_of_pairing(**changes: Any) -> Callable[[hn.ContrastiveLoss, list[Tensor]], Tensor]:
    def compute(loss: hn.ContrastiveLoss, given: list[Tensor]) -> Tensor:
        return loss.of(loss.pairing(*given).changed(**changes))

    return compute


ODD_PAIRINGS: dict[str, Callable[[hn.ContrastiveLoss, list[Tensor]], Tensor]] = {
    "a positive is missing": loss_of_pairing(positive_mask=torch.arange(6, device=DEVICE)[:, None] > 1),
    "positives have ids": lambda loss, given: loss_of_pairing(
        positives=hn.Keys(given[1][:, None], torch.arange(6, device=DEVICE)[:, None].flip(0))
    )(loss, given),
    "no ids": lambda loss, given: loss.of(
        Pairing(hn.Keys(given[0]), hn.Keys(given[1][:, None]), (hn.Keys(given[1]),), 0.5, num_views=1)
    ),
    "ids of nobody": lambda loss, given: loss_of_pairing(
        anchors=hn.Keys(given[0], torch.tensor([-1, -1, 2, 3, 4, 4], device=DEVICE)),
        candidates=(hn.Keys(given[1], torch.tensor([-1, -1, 2, 3, 4, 4], device=DEVICE)),),
        ids_given=True,
    )(loss, given),
    "of two precisions": lambda loss, given: loss(given[0], given[1].float()),
}


@pytest.mark.parametrize("name", ODD_PAIRINGS)
@pytest.mark.usefixtures("few_rows")
def test_pairings_that_were_made_elsewhere(name: str, impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = views()
    loss = hn.ContrastiveLoss("Tilt(1.0)", views="cross", impl=impl, reduction="none")
    loss._calls = 2
    found = ODD_PAIRINGS[name](loss, given)
    monkeypatch.setattr(tilted, "rows", lambda *_: None)
    monkeypatch.setattr(cpu, "rows", lambda *_, **__: None)
    wanted = ODD_PAIRINGS[name](loss, given)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-12)
    gradients = [torch.autograd.grad(each.sum(), given, allow_unused=True) for each in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-12)


def test_one_side_may_depend_on_the_other() -> None:
    z = views()[0]
    loss = hn.ContrastiveLoss("Tilt(1.0)", tau_plus=0.1, views="cross", normalize=False, impl="dense")
    loss._calls = 2
    value = loss.of(loss.pairing(z, z.flip(1)).changed(ready=True))
    once, twice = (torch.autograd.grad(value, z, create_graph=graph, retain_graph=True) for graph in (False, True))
    torch.testing.assert_close(once, twice)


@pytest.mark.usefixtures("few_rows")
def test_a_backward_pass_inside_autocast_is_as_exact(impl: str) -> None:
    given = [view.detach().float().requires_grad_() for view in views(rows=30)]
    for create_graph in (False, True) if impl == "dense" else (False,):
        found = []
        for enabled in (False, True):
            with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
                value = hn.ContrastiveLoss("Tilt(1.0)", 0.05, impl=impl)(*given)
                found.append(torch.autograd.grad(value, given, create_graph=create_graph))
        torch.testing.assert_close(*found, rtol=0.0, atol=0.0)


def test_pairs_at_the_floor_are_counted_once() -> None:
    base, *noise = torch.randn(5, 64, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    given = [base + each for each in noise]
    loss = hn.ContrastiveLoss("Uniform()", temperature=0.2, tau_plus=0.1, impl="dense")
    share = loss.diagnose(given).clamped_share()
    assert 0.05 < share < 0.5, share
    forget_warnings()
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        loss(given)
    assert not [each for each in raised if "floor" in str(each.message)]


def test_whole_numbers_are_refused_with_the_shape_that_was_given() -> None:
    with pytest.raises(ArgumentError, match=r"\(3, 2\)"):
        hn.ContrastiveLoss()(torch.ones(3, 2, dtype=torch.long), torch.ones(3, 2, dtype=torch.long))


@pytest.mark.parametrize("kind", ["two", "cross"])
def test_one_row_has_no_negatives_and_costs_nothing(kind: str) -> None:
    loss = hn.ContrastiveLoss("Tilt(1.0)", views=kind, impl="dense")
    value, *gradients = value_and_gradients(loss, views(rows=1))
    assert value == 0
    assert not any(each.any() for each in gradients)


def test_schedules_are_numbers_here(by_matrices: Any) -> None:
    loss = hn.ContrastiveLoss("Tilt(1.0)", linear(1.0, 0.5), linear(0.0, 0.2), impl="dense")
    for step in (0, 3, 10):
        loss.set_progress(step, 10)
        given = views()
        torch.testing.assert_close(value_and_gradients(loss, given), by_matrices(loss, given), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("text", ["Uniform()", "Tilt(1.0)", "Tilt(0.3, detach=True)"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("only_tilted")
def test_vectors_that_are_brought_to_unit_norm_on_the_way(
    text: str, dtype: torch.dtype, by_matrices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU; one row has no direction, and others have norms whose squares leave the range of float32."""
    scales = torch.tensor([1.0, 1e25, 1e-25, 0.0, 1.0, 1.0], device=DEVICE)[:, None]
    given = [(view.detach() * scales).to(dtype).requires_grad_() for view in views(3)]
    loss = hn.ContrastiveLoss(text, tau_plus=0.1, impl="dense")
    wanted = by_matrices(loss, given)
    monkeypatch.setattr(tilted, "has_unit", lambda vectors: True)
    torch.testing.assert_close(
        value_and_gradients(loss, given), wanted, rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=1e-6
    )
    losses = hn.ContrastiveLoss(text, impl="dense")(given)
    first = torch.autograd.grad(losses, given, create_graph=True)
    torch.testing.assert_close(
        first, torch.autograd.grad(losses, given), rtol=1e-3 if dtype == torch.float32 else 2e-2, atol=1e-6
    )


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e18])
def test_vectors_of_any_norm_as_they_are_given(scale: float, by_matrices: Any) -> None:
    given = [(view * scale).float().detach().requires_grad_() for view in views()]
    loss = hn.ContrastiveLoss("Tilt(1.0)", normalize=False, impl="dense")
    torch.testing.assert_close(value_and_gradients(loss, given), by_matrices(loss, given))


@pytest.mark.parametrize("odd", [math.nan, math.inf])
@pytest.mark.parametrize("tau_plus", [0.0, 0.1])
@pytest.mark.usefixtures("few_rows")
def test_an_infinite_or_missing_number_is_not_hidden(odd: float, impl: str, tau_plus: float) -> None:
    given = views()
    with torch.no_grad():
        given[0][2, 1] = odd
    assert value_and_gradients(hn.ContrastiveLoss("Tilt(1.0)", tau_plus=tau_plus, impl=impl), given)[0].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("text", ["Uniform()", "Tilt(1.0)", "Tilt(5.0)", "Tilt(30.0)"])
def test_single_precision_is_close_to_double(text: str, dtype: torch.dtype) -> None:
    loss = hn.ContrastiveLoss(text, 0.05, tau_plus=0.1, impl="dense")
    rounded = [view.detach().to(dtype).requires_grad_() for view in views(rows=40)]
    exact = [view.detach().double().requires_grad_() for view in rounded]
    found, wanted = value_and_gradients(loss, rounded), value_and_gradients(loss, exact)
    assert found[0].dtype == torch.float32
    assert found[1].dtype == dtype
    coarse = 0.0 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=3e-6, atol=0.0)
    for mine, theirs in zip(found[1:], wanted[1:], strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4 + coarse, atol=1e-6)


@pytest.mark.parametrize("text", ["Uniform()", "Tilt(1.0)", "Tilt(0.3, detach=True)"])
@pytest.mark.parametrize("tau_plus", [0.0, 0.1])
def test_derivatives_of_derivatives_are_those_of_matrices(
    text: str, tau_plus: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, found = hn.ContrastiveLoss(text, tau_plus=tau_plus, impl="dense"), []
    for module in (None, cpu, tilted):
        if module is not None:
            monkeypatch.setattr(module, "rows", lambda *_, **__: None)
        given = views()
        first = torch.autograd.grad(loss(*given), given, create_graph=True)
        second = torch.autograd.grad(sum((each**2).sum() for each in first), given)
        losses = hn.ContrastiveLoss(text, tau_plus=tau_plus, impl="dense", reduction="none")(*given)
        at_once = torch.autograd.grad(
            losses, given, torch.eye(12, dtype=torch.float64, device=DEVICE), is_grads_batched=True
        )
        found.append((*first, *second, *at_once))
    for each in found[:-1]:
        torch.testing.assert_close(each, found[-1], rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("text", ["Tilt(1.0)", "Threshold(-0.9) * Tilt(1.0)"])
def test_a_streamed_loss_has_no_second_derivative(text: str) -> None:
    given = views()
    value = hn.ContrastiveLoss(text, impl="streamed")(*given)
    with pytest.raises(ArgumentError) as raised:
        torch.autograd.grad(value, given, create_graph=True)
    assert raised.value.got == "create_graph=True with a streamed loss"
    assert all(each.isfinite().all() for each in torch.autograd.grad(value, given))


@pytest.mark.usefixtures("few_rows")
def test_gradients_are_those_of_differences(impl: str) -> None:
    loss = hn.ContrastiveLoss("Tilt(0.7)", tau_plus=0.05, impl=impl)
    assert torch.autograd.gradcheck(loss, tuple(views()))


def test_a_backward_pass_may_be_repeated(impl: str) -> None:
    given = views()
    value = hn.ContrastiveLoss("Tilt(1.0)", tau_plus=0.1, impl=impl)(*given)
    once, twice = (torch.autograd.grad(value, given, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, once, twice))


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU, Triton or tiles stream")
def test_a_streamed_loss_never_holds_all_pairs() -> None:
    given = views(rows=100)
    loss = hn.ContrastiveLoss("Tilt(1.0)", impl="streamed")
    loss._calls = 2
    with Largest() as largest:
        loss(*given).backward()
    assert largest.most <= 200 * 100


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("ids", [None, torch.arange(50) // 2])
@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU, Triton or tiles stream")
def test_blocks_are_all_that_is_allocated(ids: Tensor | None) -> None:
    given = views(rows=50)
    loss = hn.ContrastiveLoss("Tilt(1.0)", tau_plus=0.1, impl="streamed")
    loss._calls = 2
    with Largest() as largest:
        loss(*given, ids=ids).backward()
    assert largest.most <= 100 * 5  # rows of a block x candidates, and candidates x features


def plain(z1: Tensor, z2: Tensor) -> Tensor:
    """NT-Xent in three lines, as in benchmarks/losses.py."""
    z = normalize(torch.cat([z1, z2]), dim=-1)
    logits = (z @ z.T / 0.5).fill_diagonal_(float("-inf"))
    return cross_entropy(logits.float(), torch.arange(len(z), device=z.device).roll(len(z) // 2))


@pytest.mark.usefixtures("only_tilted")
def test_a_hard_loss_issues_fewer_operations_than_nt_xent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, with the unit vectors of a GPU."""
    monkeypatch.setattr(tilted, "has_unit", lambda vectors: True)
    issued = []
    for loss in (plain, hn.ContrastiveLoss("Tilt(1.0)", impl="dense")):
        given = [view.detach().bfloat16().requires_grad_() for view in views()]
        for _ in range(2):  # calls of which the negatives are looked at, to warn
            loss(*given)
        with Operations() as operations:
            loss(*given).backward()
        issued.append(operations.number)
    assert issued[1] < issued[0]
