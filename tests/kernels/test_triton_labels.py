"""Positives by label in Triton against the whole matrix of pairs, and the losses of the papers made of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hardneg as hn
from hardneg.core.errors import ArgumentError
from hardneg.kernels.triton.labels import pair_losses, positive_statistics
from hardneg.kernels.triton.statistics import row_statistics
from support import dense_pairs
from support.errors import raises
from support.grids import grid
from support.kernel_inputs import DEVICE, DTYPES, SORTED_FROM, TOLERANCE, assert_close_in_norm, numbers, twice, vectors

pytestmark = pytest.mark.usefixtures("triton_can_run")

CASES = {
    "self": {"b": 100, "n": None, "ids": True},
    "self, no ids": {"b": 100, "n": None},
    "norms": {"b": 70, "n": None, "ids": True, "normalize": True, "length": 3.0},
    "pool": {"b": 70, "n": 130, "ids": True},
    "one": {"b": 1, "n": 3},
}


def run(
    function: Any, anchors: Tensor, candidates: Tensor | None, upstream: Tensor, offset: Tensor | None, **rest: Any
) -> Any:
    leaves = [side.detach().clone().requires_grad_() for side in (anchors, candidates) if side is not None]
    learned = torch.tensor(0.2, dtype=torch.float64, device=DEVICE, requires_grad=True)
    inputs = [*leaves, learned]
    if offset is not None:
        rest["log_negative"] = offset.detach().clone().requires_grad_()
        inputs.append(rest["log_negative"])
    found = function(*leaves, temperature=learned, **rest)
    some = found[-1] > 0
    objective = sum((value[some] * up[some]).sum() for value, up in zip(found[:-1], upstream, strict=False))
    return found, torch.autograd.grad(objective, inputs)


@grid("name, pairs, dtype, sorted_from", [*CASES], [False, True], DTYPES, [*SORTED_FROM], indirect=["sorted_from"])
@pytest.mark.usefixtures("sorted_from")
def test_positives_agree_with_the_whole_matrix(name: str, pairs: bool, dtype: torch.dtype) -> None:
    case = dict(CASES[name])
    b, n, length = case.pop("b"), case.pop("n"), case.pop("length", 1.0)
    anchors = vectors(b, 24, dtype, length)
    candidates = None if n is None else vectors(n, 24, dtype, seed=1)
    rest: dict[str, Any] = dict(case, anchor_labels=torch.arange(b, device=DEVICE) * 31 % 5)
    if n is not None:
        rest["candidate_labels"] = torch.arange(n, device=DEVICE) % 6
    if rest.pop("ids", False):
        rest["anchor_ids"] = twice(b) - 1
        rest["candidate_ids"] = None if n is None else torch.arange(n, device=DEVICE) - 1
    upstream, offset = torch.randn(2, b, device=DEVICE), 3 * torch.randn(b, device=DEVICE) if pairs else None
    ours, reference = (
        (pair_losses, dense_pairs.pair_losses) if pairs else (positive_statistics, dense_pairs.positive_statistics)
    )
    found, gradients = run(ours, anchors, candidates, upstream, offset, **rest)
    wide = [None if side is None else side.double() for side in (anchors, candidates, upstream, offset)]
    expected, expected_gradients = run(reference, *wide, **rest)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=2e-5, atol=2e-5)
    for mine, theirs in zip(gradients, expected_gradients, strict=True):
        assert_close_in_norm(mine, theirs, TOLERANCE[dtype])


def two_labelled_views() -> tuple[Tensor, Tensor, Tensor]:
    labels = torch.arange(20, device=DEVICE) % 4
    return vectors(20, 16).requires_grad_(), vectors(20, 16, seed=1).requires_grad_(), labels


@pytest.mark.usefixtures("sorted_from")
def test_it_is_supcon() -> None:
    z1, z2, labels = two_labelled_views()
    expected = hn.papers.supcon(0.1)(z1, z2, labels=labels)
    z, both = (
        torch.cat([z1, z2]),
        {"anchor_ids": torch.arange(20, device=DEVICE).repeat(2), "anchor_labels": labels.repeat(2)},
    )
    mean, _, support = row_statistics(z, temperature=0.1, **both)
    log_sum, total, count = positive_statistics(z, temperature=0.1, **both)
    own = (z1 * z2).sum(-1).repeat(2) / 0.1
    everybody = torch.logaddexp(mean + support.log(), torch.logaddexp(log_sum, own))
    assert_same_loss((everybody - (total + own) / (count + 1)).mean(), expected, [z1, z2])


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.usefixtures("sorted_from")
def test_it_is_hscl(beta: float) -> None:
    z1, z2, labels = two_labelled_views()
    expected = hn.papers.hscl(0.5, beta)(z1, z2, labels=labels)
    z, both = (
        torch.cat([z1, z2]),
        {"anchor_ids": torch.arange(20, device=DEVICE).repeat(2), "anchor_labels": labels.repeat(2)},
    )
    mean = row_statistics(z, temperature=0.5, beta=beta, **both).log_mean
    log_negative = mean + torch.tensor(38.0).log()
    total, count = pair_losses(z, log_negative=log_negative, temperature=0.5, **both)
    own = -torch.nn.functional.logsigmoid((z1 * z2).sum(-1).repeat(2) / 0.5 - log_negative)
    assert_same_loss((total + own).sum() / (count + 1).sum(), expected, [z1, z2])


def assert_same_loss(loss: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(loss, expected)
    ours, theirs = torch.autograd.grad(2 * loss, inputs), torch.autograd.grad(2 * expected, inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_pair_without_negatives_costs_nothing() -> None:
    nothing = torch.full((4,), -torch.inf, device=DEVICE)
    labels = numbers(0, 0, 1, 1)
    z = vectors(4, 8).requires_grad_()
    total, count = pair_losses(z, log_negative=nothing, temperature=0.5, anchor_labels=labels)
    assert total.tolist() == [0.0] * 4
    assert count.tolist() == [1] * 4
    assert (torch.autograd.grad(total.sum(), z)[0] == 0).all()


def test_labels_of_one_side_only_are_refused() -> None:
    with raises(ArgumentError, who="positive_statistics", got="candidate_labels=None"):
        positive_statistics(vectors(4, 8), vectors(3, 8), temperature=0.5, anchor_labels=numbers(0, 0, 1, 1))
