"""Rows that were numbered need no count of their negatives: the loss is that of given ids, in fewer operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

import hardneg as hn
from hardneg.core import pairing
from hardneg.core.fused import Unit
from support.operations import Operations

OPTIONS = {
    "uniform": {"negatives": "Uniform()"},
    "tilt": {"negatives": "Tilt(1.0)"},
    "a stronger tilt": {"negatives": "Tilt(2.5, detach=True)"},
    "hcl": {"negatives": "Tilt(1.0)", "tau_plus": 0.1},
    "a mask": {"negatives": "Threshold(0.2) * Tilt(1.0)"},
    "a number": {"negatives": "Tilt(1.0)", "num_negatives": 7.0},
    "mass": {"negatives": "Tilt(1.0)", "num_negatives": "mass"},
    "all positives": {"negatives": "Tilt(1.0)", "positives_in_denominator": "all"},
    "no positive": {"negatives": "Tilt(1.0)", "positives_in_denominator": "none"},
    "jsd": {"negatives": "Tilt(1.0)", "objective": "jsd"},
    "rince": {"negatives": "Uniform()", "objective": "rince(q=0.5)"},
    "sigmoid": {"negatives": "Uniform()", "objective": "sigmoid"},
    "each anchor": {"negatives": "Tilt(1.0)", "reduction": "none"},
}


def views(number: int, rows: int = 6) -> list[Tensor]:
    made = torch.randn(number, rows, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return [view.requires_grad_() for view in made.unbind()]


@pytest.mark.parametrize("kind", ["two", "cross", "three"])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_loss_of_numbered_rows_is_that_of_ids(name: str, kind: str) -> None:
    found = []
    for ids in (None, torch.arange(6)):
        given = views(3 if kind == "three" else 2)
        loss = hn.ContrastiveLoss(**OPTIONS[name], views="cross" if kind == "cross" else "two", impl="dense")
        value = loss(given, ids=ids)
        value.sum().backward()
        found.append((value, [view.grad for view in given]))
    torch.testing.assert_close(*found, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", ["two", "cross"])
def test_one_row_has_no_negatives_and_costs_nothing(kind: str) -> None:
    given = views(2, rows=1)
    loss = hn.ContrastiveLoss("Tilt(1.0)", views=kind, impl="dense")
    loss._calls = 2  # no look at the negatives
    value = loss(*given)
    value.backward()
    assert value == 0
    assert not any(view.grad.any() for view in given)


@pytest.mark.parametrize("reduction", ["anchors", "pairs"])
def test_a_function_may_give_one_loss_for_all_positives_of_an_anchor(reduction: str) -> None:
    found = []
    for ids in (None, torch.arange(6)):
        loss = hn.ContrastiveLoss(objective=lambda positive, row: row.log_mean, reduction=reduction, impl="dense")
        found.append(loss(views(3), ids=ids))
    torch.testing.assert_close(*found)


def plain(z1: Tensor, z2: Tensor) -> Tensor:
    """NT-Xent in three lines, as in benchmarks/losses.py."""
    z = normalize(torch.cat([z1, z2]), dim=-1)
    logits = (z @ z.T / 0.5).fill_diagonal_(float("-inf"))
    return cross_entropy(logits.float(), torch.arange(len(z)).roll(len(z) // 2))


def test_a_hard_loss_issues_few_more_operations_than_nt_xent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, with the unit vectors of a GPU."""
    monkeypatch.setattr(pairing, "unit", Unit.apply)
    issued = []
    for loss in (plain, hn.ContrastiveLoss("Tilt(1.0)", impl="dense")):
        given = [view.detach().bfloat16().requires_grad_() for view in views(2)]
        for _ in range(2):  # calls of which the negatives are looked at, to warn
            loss(*given)
        with Operations() as operations:
            loss(*given).backward()
        issued.append(operations.number)
    assert issued[1] <= 1.1 * issued[0]
