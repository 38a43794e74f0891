"""Queues and banks: who is in them, since when, and who is drawn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hardneg as hn
from hardneg import papers
from hardneg.core.errors import ArgumentError
from hardneg.core.types import Keys
from hardneg.state.pools import Bank, Queue
from support.errors import raises
from support.vectors import make_unit_vectors


def rows(*ids: int, dim: int = 3) -> Keys:
    """Vectors that tell their id: all features equal to it."""
    known = torch.tensor(ids, dtype=torch.long)
    return Keys(known[:, None].float().expand(-1, dim).contiguous(), known)


@settings(max_examples=60, deadline=None)
@given(capacity=st.integers(1, 9), batches=st.lists(st.integers(0, 12), max_size=6))
def test_queue_holds_the_last_rows_whatever_the_batch_sizes(capacity: int, batches: list[int]) -> None:
    queue, everything, since = Queue(capacity, 3), [], []
    for step, size in enumerate(batches):
        new = list(range(len(everything), len(everything) + size))
        queue.push(rows(*new))
        everything += new
        since += [step] * size
    kept = queue.keys()
    assert kept.ids is not None
    order = kept.ids.argsort()
    assert kept.ids[order].tolist() == everything[-capacity:]
    assert kept.vectors[order, 0].tolist() == everything[-capacity:]
    assert (len(batches) - 1 - queue.age()[order]).tolist() == since[-capacity:]


def test_empty_queue_is_empty_and_costs_nothing() -> None:
    queue = Queue(16, 4)
    q = make_unit_vectors(3, 4, dtype=torch.float32).requires_grad_()
    loss = papers.moco()(q, q.detach(), pool=queue)  # without a warning: a queue that fills is nobody's mistake
    loss.backward()
    assert len(queue.keys()) == 0
    assert loss.item() == 0.0
    assert q.grad is not None
    assert q.grad.abs().sum() == 0


def test_rows_without_ids_match_nothing() -> None:
    queue = Queue(4, 3)
    queue.push(torch.ones(2, 3))
    scores = hn.score(Keys(torch.ones(1, 3), torch.tensor([0])), torch.ones(1, 3), queue, 1.0)
    assert queue.keys().ids.tolist() == [-1, -1]
    assert scores.num_valid().tolist() == [2]


def test_labels_come_back_when_every_row_has_one() -> None:
    queue = Queue(3, 2)
    queue.push(Keys(torch.ones(2, 2), torch.tensor([0, 1])))
    assert queue.keys().labels is None
    queue.push(Keys(torch.ones(2, 2), torch.tensor([2, 3]), labels=torch.tensor([5, 6])))
    assert queue.keys().labels is None
    queue.push(Keys(torch.ones(1, 2), torch.tensor([4]), labels=torch.tensor([7])))
    assert sorted(queue.keys().labels.tolist()) == [5, 6, 7]


def test_own_older_view_in_the_queue_is_never_a_negative() -> None:
    """The same image may still be in the queue: its rows get no weight and no gradient."""
    queue, key = Queue(8, 4), make_unit_vectors(8, 4, seed=1, dtype=torch.float32)
    queue.push(Keys(key, torch.tensor([0, 1, 2, 3, 0, 1, 4, 5])))
    q = make_unit_vectors(2, 4, dtype=torch.float32)
    scores = hn.score(Keys(q, torch.tensor([0, 4])), q, queue, 0.07)
    log_w = hn.Tilt(1.0).log_weights(scores)
    assert (log_w[0] == hn.NEVER).nonzero().squeeze(1).tolist() == [0, 4]
    assert (log_w[1] == hn.NEVER).nonzero().squeeze(1).tolist() == [6]
    loss = papers.moco()
    others = torch.tensor([1, 2, 3, 5, 6, 7])
    expected = loss(q[:1], q[:1], pool=key[others])
    assert loss(q[:1], q[:1], pool=queue, ids=torch.tensor([0])).item() == pytest.approx(expected.item(), rel=1e-6)


def test_pushing_between_loss_and_backward_changes_no_gradient() -> None:
    queue = Queue(6, 4)
    queue.push(make_unit_vectors(6, 4, seed=1))
    gradients = []
    for push_first in (False, True):
        q = make_unit_vectors(3, 4, seed=2).requires_grad_()
        loss = papers.moco()(q, make_unit_vectors(3, 4, seed=3), pool=queue.keys())
        if push_first:
            queue.push(make_unit_vectors(3, 4, seed=4))
        loss.backward()
        gradients.append(q.grad)
    assert torch.equal(*gradients)


def test_queue_keeps_double_precision_and_has_none_to_lose_in_half() -> None:
    queue = Queue(4, 3)
    queue.push(make_unit_vectors(2, 3))
    assert torch.equal(queue.keys().vectors, make_unit_vectors(2, 3))
    small = Queue(4, 3, dtype=torch.bfloat16)
    small.push(make_unit_vectors(2, 3))
    assert small.keys().vectors.dtype == torch.bfloat16
    queue.push(make_unit_vectors(2, 3).half())
    assert queue.keys().vectors.dtype == torch.float64


def test_bank_first_visit_then_momentum_by_item() -> None:
    bank = Bank(5, 4, momentum=0.5)
    first, second = make_unit_vectors(2, 4, seed=1), make_unit_vectors(2, 4, seed=2)
    bank.push(Keys(first, torch.tensor([3, 1])))
    bank.push(Keys(second, torch.tensor([1, 0])))
    expected = torch.nn.functional.normalize(0.5 * first[1] + 0.5 * second[0], dim=-1)
    kept = bank.keys()
    assert kept.ids.tolist() == [0, 1, 3]
    torch.testing.assert_close(kept.vectors, torch.stack([second[1], expected, first[0]]))
    assert bank.age().tolist() == [0, 0, 1]


def test_bank_of_unvisited_instances_is_marked() -> None:
    bank = Bank(5, 3)
    bank.push(rows(2))
    keys = bank.of(torch.tensor([[2, 0], [-1, 2]]))
    assert keys.ids.tolist() == [[2, -1], [-1, 2]]
    assert keys.vectors[0, 1].abs().sum() == keys.vectors[1, 0].abs().sum() == 0


def test_last_of_equal_ids_in_a_push_counts() -> None:
    bank = Bank(5, 2, normalize=False)
    bank.push(Keys(torch.tensor([[1.0, 0], [2, 0], [3, 0], [9, 9]]), torch.tensor([4, 2, 4, -1])))
    assert bank.keys().vectors[:, 0].tolist() == [2.0, 3.0]


def test_bank_draws_others_uniformly_with_replacement() -> None:
    bank = Bank(8, 3)
    bank.push(rows(1, 3, 4, 6))
    anchors = torch.tensor([3, 0])  # one in the bank, one not
    counts = torch.zeros(2, 8)
    for _ in range(20):
        drawn = bank.draw(anchors, k=500).ids
        counts += torch.stack([row.bincount(minlength=8) for row in drawn])
    share = counts / counts.sum(1, keepdim=True)
    torch.testing.assert_close(share[0], torch.tensor([0, 1, 0, 0, 1, 0, 1, 0]) / 3, atol=0.02, rtol=0)
    torch.testing.assert_close(share[1], torch.tensor([0, 1, 0, 1, 1, 0, 1, 0]) / 4, atol=0.02, rtol=0)


def test_bank_draws_without_replacement() -> None:
    bank = Bank(8, 3)
    bank.push(rows(1, 3, 4, 6))
    drawn = bank.draw(torch.tensor([3, 0]), k=5, replace=False).ids  # the first has three others only
    assert sorted(drawn[0].tolist()) == [1, 4, 6]
    assert len(set(drawn[1].tolist())) == 3
    assert set(drawn[1].tolist()) <= {1, 3, 4, 6}
    first = torch.stack([bank.draw(torch.tensor([3]), k=2, replace=False).ids[0] for _ in range(3000)])
    assert (first[:, 0] != first[:, 1]).all()
    share = first.flatten().bincount(minlength=8) / first.numel()
    torch.testing.assert_close(share, torch.tensor([0, 1, 0, 0, 1, 0, 1, 0]) / 3, atol=0.03, rtol=0)


def test_nobody_to_draw_gives_no_candidates() -> None:
    bank = Bank(8, 3)
    for replace in (True, False):
        assert bank.draw(torch.tensor([3, 0]), k=4, replace=replace).vectors.shape == (2, 0, 3)
    bank.push(rows(3))
    assert bank.draw(torch.tensor([3, 0]), k=4).vectors.shape == (2, 0, 3)
    assert bank.draw(torch.tensor([0]), k=4).ids.tolist() == [[3, 3, 3, 3]]


def test_draws_come_from_seed_and_step() -> None:
    banks = [Bank(50, 3, seed=seed) for seed in (1, 1, 2)]
    for bank in banks:
        bank.push(rows(*range(50)))
    draws = [[bank.draw(torch.tensor([0]), k=20).ids for _ in range(2)] for bank in banks]
    assert torch.equal(draws[0][0], draws[1][0])
    assert torch.equal(draws[0][1], draws[1][1])
    assert not torch.equal(draws[0][0], draws[0][1])
    assert not torch.equal(draws[0][0], draws[2][0])


@pytest.mark.parametrize("ids", [None, [0, 1, 2]])
def test_ids_that_are_no_tensor_are_refused(ids: Any) -> None:
    bank = Bank(5, 4)
    bank.push(Keys(torch.eye(4), torch.arange(4)))
    with raises(ArgumentError, who="Bank.draw", what="a tensor"):
        bank.draw(ids, k=2)


def test_errors_name_the_fix() -> None:
    with raises(ArgumentError, who="Bank.push", what="num_instances=5", got="ids.max()=5"):
        Bank(5, 3).push(rows(5))
    with raises(ArgumentError, who="Bank.push", got="ids=None"):
        Bank(5, 3).push(Keys(torch.ones(2, 3)))
    with pytest.raises(ValueError, match=r"vectors \[n, 3\]"):
        Queue(5, 3).push(torch.ones(2, 4))
    with raises(ArgumentError, who="Queue", got="capacity=0"):
        Queue(0, 3)


@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1e19, 1e25])
def test_a_bank_holds_unit_vectors_at_any_scale(scale: float) -> None:
    vectors = make_unit_vectors(4, 3, dtype=torch.float32)
    bank = Bank(5, 3)
    bank.push(Keys(torch.cat([vectors * scale, torch.zeros(1, 3)]), torch.arange(5)))
    torch.testing.assert_close(bank.vectors[:4], vectors)
    assert bank.vectors[4].tolist() == [0.0, 0.0, 0.0]
