"""Noise-contrastive estimation against banks: its formula, its Z, its first visits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hardneg as hn
from hardneg import papers
from hardneg.core.errors import ArgumentError
from hardneg.core.types import Keys
from hardneg.losses import bank as bank_module
from hardneg.losses.bank import CMC, BankContrast, InstanceDiscrimination, RunningZ, binary_nce
from hardneg.state.pools import Bank
from support.errors import raises
from support.vectors import make_unit_vectors


def filled(size: int = 30, dim: int = 5) -> Bank:
    bank = Bank(size, dim)
    bank.push(Keys(make_unit_vectors(size, dim, seed=9), torch.arange(size)))
    return bank


def test_binary_nce_against_probabilities() -> None:
    bank, ids = filled(), torch.tensor([0, 4, 7])
    draws = torch.tensor([[1, 2, 3, 0], [5, 5, 6, 8], [1, 2, 7, 7]])  # own ids among them
    z = make_unit_vectors(3, 5).requires_grad_()
    scores = hn.score(Keys(z, ids), bank.of(ids).vectors, bank.of(draws), 0.3)
    big_z = 41.0
    losses = binary_nce(
        scores, hn.Uniform().log_weights(scores), log_z=torch.tensor(big_z, dtype=torch.float64).log(), num_instances=30
    )
    for row in range(3):
        noise = [j for j in draws[row].tolist() if j != ids[row]]
        c = len(noise) / 30
        p = (z[row] @ bank.vectors.T / 0.3).exp() / big_z
        expected = -(p[ids[row]] / (p[ids[row]] + c)).log() - sum((c / (p[j] + c)).log() for j in noise)
        assert losses[row, 0].item() == pytest.approx(expected.item(), rel=1e-9)


def test_binary_nce_does_not_overflow() -> None:
    z = make_unit_vectors(3, 5, dtype=torch.float32).requires_grad_()
    scores = hn.score(z, z.detach(), z.detach().repeat(2, 1), 0.005)
    losses = binary_nce(scores, hn.Uniform().log_weights(scores), log_z=torch.tensor(0.0), num_instances=10)
    losses.sum().backward()
    assert torch.isfinite(losses).all()
    assert torch.isfinite(z.grad).all()


def test_running_z_is_set_by_the_first_batch_and_then_averaged() -> None:
    running, fixed = RunningZ(100, momentum=0.9), RunningZ(100, momentum=1.0)
    means = []
    for seed in (1, 2):
        scores = hn.score(make_unit_vectors(4, 5, seed=seed), make_unit_vectors(4, 5, seed=seed + 9), filled(), 0.3)
        means.append(torch.cat([scores.positives, scores.candidates], 1).exp().mean().item() * 100)
        running(scores)
        fixed(scores)
    assert running.log_z.exp().item() == pytest.approx(0.9 * means[0] + 0.1 * means[1])
    assert fixed.log_z.exp().item() == pytest.approx(means[0])
    before = running.log_z.clone()
    running.eval()(scores)
    assert torch.equal(running.log_z, before)


def test_first_visits_cost_nothing_and_the_bank_is_updated_without_backward() -> None:
    loss = InstanceDiscrimination(30, 5, num_draws=6)
    z = make_unit_vectors(4, 5)
    assert loss(z, torch.arange(4)).item() == 0.0
    assert loss.bank.keys().ids.tolist() == [0, 1, 2, 3]
    with hn.core.scoring.checks():
        assert loss(z, torch.tensor([0, 1, 20, 21])).item() > 0.0  # two of four are known


@pytest.mark.parametrize("objective", ["nce", "softmax"])
def test_training_with_nce_brings_instances_to_their_own_entries(objective: str) -> None:
    """Free vectors that start far from their entries end nearest to them."""
    bank, ids = filled(), torch.arange(30)
    z = make_unit_vectors(30, 5, seed=3, dtype=torch.float32).requires_grad_()
    contrast = BankContrast(30, 16, 0.1, objective)
    optimizer = torch.optim.SGD([z], lr=0.3)
    for _ in range(80):
        optimizer.zero_grad()
        contrast(torch.nn.functional.normalize(z, dim=-1), ids, bank).backward()
        optimizer.step()
    nearest = (z @ bank.vectors.T.float()).argmax(1)
    assert (nearest == ids).float().mean() > 0.9


@pytest.mark.parametrize("objective", ["nce", "softmax"])
@pytest.mark.parametrize(("size", "few"), [(30, 16), (30, 0), (500, 0)])  # all products; a copied bank; copied draws
def test_draws_are_compared_without_a_vector_for_each(
    objective: str, size: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Value and gradient are those of gathered vectors, also where the bank is pushed to before the backward pass."""
    b, k, dim = 7, 20, 64
    monkeypatch.setattr(bank_module, "_whole_bank_factor", few)
    monkeypatch.setattr(bank_module, "_max_gathered", 2 * k * dim)
    bank = Bank(size, dim)
    bank.push(Keys(make_unit_vectors(size - 3, dim, seed=1, dtype=torch.float32), torch.arange(size - 3)))
    ids = torch.tensor([0, 5, 9, 2, size - 1, 7, 7])  # one that the bank does not know
    draws = torch.randint(-1, size, (b, k), generator=torch.Generator().manual_seed(2))
    z = make_unit_vectors(b, dim, seed=3, dtype=torch.float32).requires_grad_()
    with Largest() as largest:
        found = BankContrast(size, k, 0.2, objective)(z, ids, bank, draws)
    others = bank.of(draws)
    known = bank.visited[ids][:, None]
    scores = hn.score(Keys(z, ids), bank.of(ids).vectors, others, 0.2, positive_mask=known).narrowed(others.ids >= 0)
    bank.push(Keys(make_unit_vectors(size, dim, seed=4, dtype=torch.float32), torch.arange(size)))
    mine = torch.autograd.grad(found, z)[0]
    log_w = hn.Uniform().log_weights(scores)
    losses = hn.info_nce(scores, log_w)
    if objective == "nce":
        losses = binary_nce(scores, log_w, log_z=RunningZ(size)(scores), num_instances=size)
    expected = hn.reduce(losses, scores)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(mine, torch.autograd.grad(expected, z)[0])
    assert largest.numbers <= max(size * dim if size < b * k else b * k * dim, 2 * k * dim)


class Largest(TorchDispatchMode):
    """The numbers of the largest tensor that is made."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.numbers = max(self.numbers, made.numel())
        return made


def test_cmc_contrasts_crosswise() -> None:
    """With the first bank empty of a view, moving that bank changes only the other view's gradient."""
    loss = CMC(30, 5, num_draws=8, objective="softmax")
    ids, entries = torch.arange(6), make_unit_vectors(2, 30, 5, seed=4)
    for bank, vectors in zip(loss.banks, entries, strict=True):
        bank.push(Keys(vectors, torch.arange(30)))
    draws = torch.randint(10, 30, (6, 8), generator=torch.Generator().manual_seed(0))
    z1, z2 = (make_unit_vectors(6, 5, seed=seed).requires_grad_() for seed in (5, 6))
    loss.eval()(z1, z2, ids, draws).backward()
    for z, other in ((z1, entries[1]), (z2, entries[0])):
        mine = z.detach().clone().requires_grad_()
        logits = torch.cat([(mine * other[ids]).sum(1, keepdim=True), (mine[:, None] * other[draws]).sum(-1)], 1)
        torch.nn.functional.cross_entropy(logits / 0.07, torch.zeros(6, dtype=torch.long)).backward()
        torch.testing.assert_close(z.grad, mine.grad)


def test_papers_are_these() -> None:
    z1, z2 = make_unit_vectors(2, 6, 5, dtype=torch.float32)
    one = papers.instance_discrimination(30, 5, num_draws=4)
    two = papers.cmc(30, 5, num_draws=4)
    for _ in range(2):
        values = [one(z1, torch.arange(6)), two(z1, z2, torch.arange(6))]
    assert all(value.item() > 0 for value in values)
    assert math.isfinite(one.contrast.running_z.log_z.item())


def test_instance_discrimination_has_a_name_for_nce_and_for_rings_softmax() -> None:
    z, ids = make_unit_vectors(6, 5, dtype=torch.float32), torch.arange(6)
    draws = torch.tensor([[6, 7, 8, 9]]).repeat(6, 1)
    nce, softmax = (make(10, 5, 4) for make in (papers.instance_discrimination, papers.instance_discrimination_softmax))
    assert (nce.contrast.objective, softmax.contrast.objective) == ("nce", "softmax")
    softmax.bank.push(Keys(make_unit_vectors(10, 5, seed=3, dtype=torch.float32), torch.arange(10)))
    entries = softmax.bank.vectors.clone()
    logits = torch.cat([(z * entries[ids]).sum(1, keepdim=True), z @ entries[6:].T], dim=1) / 0.07
    expected = torch.nn.functional.cross_entropy(logits, torch.zeros(6, dtype=torch.long))
    torch.testing.assert_close(softmax(z, ids, draws), expected)


def test_unknown_objective() -> None:
    with raises(ArgumentError, who="BankContrast", what="'softmax'", got="objective='triplet'"):
        BankContrast(4, 2, 0.1, "triplet")
