"""The loss for lightly against its NTXentLoss: value and gradient, with a memory bank, on one rank and on two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError
from hardneg.integrations.lightly import NegativesLoss
from support.libraries import library
from support.two_ranks import on_two_ranks

losses: Any = library("lightly.loss")


def views(seed: int = 0, rows: int = 6) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    one, other = (torch.randn(rows, 5, generator=random) for _ in range(2))
    return one.requires_grad_(), (one.detach() + other).requires_grad_()


def value_and_gradient(loss: Any, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    out0, out1 = views(seed)
    value = loss(out0, out1)
    (2 * value).backward()
    return value.detach(), [out0.grad, out1.grad]


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_uniform_is_nt_xent_loss(temperature: float) -> None:
    theirs = value_and_gradient(losses.NTXentLoss(temperature))
    torch.testing.assert_close(value_and_gradient(NegativesLoss(temperature=temperature)), theirs)


def test_the_memory_bank_once_it_is_full() -> None:
    """Theirs starts with random vectors, ours empty; two batches of six fill both."""
    ours, theirs = NegativesLoss(memory_bank_size=(12, 5)), losses.NTXentLoss(memory_bank_size=(12, 5))
    for seed in (1, 2):
        value_and_gradient(ours, seed)
        value_and_gradient(theirs, seed)
    for seed in (3, 4):
        torch.testing.assert_close(value_and_gradient(ours, seed), value_and_gradient(theirs, seed))
    before = ours.queue.vectors.clone()
    ours(*(view.detach() for view in views(5)))  # an evaluation
    assert torch.equal(ours.queue.vectors, before)


def test_the_memory_bank_is_resumed() -> None:
    ours, other = (NegativesLoss(memory_bank_size=(8, 5)) for _ in range(2))
    for seed in (1, 2):
        value_and_gradient(ours, seed)
    other.load_state_dict(ours.state_dict())
    torch.testing.assert_close(value_and_gradient(ours, 3), value_and_gradient(other, 3), rtol=0, atol=0)
    assert torch.equal(ours.queue.vectors, other.queue.vectors)


def test_two_ranks_with_gather() -> None:
    def work(rank: int) -> list[Any]:
        bank = NegativesLoss(memory_bank_size=(12, 5), gather_distributed=True)
        value_and_gradient(bank, rank)
        kinds = NegativesLoss(gather_distributed=True), losses.NTXentLoss(gather_distributed=True)
        return [[value_and_gradient(loss, rank) for loss in kinds], bank.queue.vectors]

    (first, bank), (second, other) = on_two_ranks(work)
    for ours, theirs in (first, second):
        torch.testing.assert_close(ours, theirs)
    assert torch.equal(bank, other)
    assert (bank.norm(dim=1) > 0.99).all(), "both ranks' six vectors"
    whole = [torch.cat([views(rank)[side] for rank in range(2)]).detach() for side in range(2)]
    torch.testing.assert_close((first[0][0] + second[0][0]) / 2, losses.NTXentLoss()(*whole))


def test_a_tilt_and_its_schedule() -> None:
    loss = NegativesLoss("Tilt(linear(1.0, 0.0))")
    loss.set_progress(0, 1)
    hard = loss(*views())
    loss.set_progress(1, 1)
    torch.testing.assert_close(loss(*views()), losses.NTXentLoss()(*views()))
    assert hard > loss(*views())


def test_a_memory_bank_needs_its_dimension() -> None:
    with pytest.raises(ArgumentError, match="dimension"):
        NegativesLoss(memory_bank_size=4096)
