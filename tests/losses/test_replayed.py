"""A step that is replayed as a graph is the step itself: value, gradient, diagnostics and state, bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hardneg as hn
from hardneg.core import tensors
from hardneg.losses import global_softmax
from hardneg.losses.global_softmax import Replayed
from hardneg.state import stateful
from support.recorded import Recorded, recorder
from support.vectors import make_unit_vectors

ROWS, DIM, NUM = 6, 4, 20
LOSSES: dict[str, Callable[[], nn.Module]] = {
    "sogclr": lambda: hn.SogCLR(NUM),
    "emc2": lambda: hn.EMC2(NUM, num_steps=10),
    "emc2 with bank": lambda: hn.EMC2(NUM, num_steps=10, remember=hn.Bank(NUM, DIM, momentum=0.5)),
}


def batch(number: int, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.randperm(NUM, generator=torch.Generator().manual_seed(number))[:rows]
    ids[-1] = -1 if number % 3 == 0 else ids[0]  # no instance, or one that is twice there
    first, second = (
        make_unit_vectors(rows, DIM, seed=2 * number + view, dtype=torch.float32).requires_grad_() for view in (0, 1)
    )
    return first, second, ids


def assert_same_steps(plain: nn.Module, loss: nn.Module, step: Replayed, device: str = "cpu") -> None:
    for number in range(9):
        expected, found = batch(number), batch(number)
        theirs, ours = plain(*(each.to(device) for each in expected)), step(*(each.to(device) for each in found))
        (2.0 * theirs).backward()
        (2.0 * ours).backward()
        assert torch.equal(ours, theirs), number
        for mine, other in zip(found[:2], expected[:2], strict=True):
            assert torch.equal(mine.grad, other.grad), number  # type: ignore[arg-type]
        for key, value in plain.last.items():  # type: ignore[union-attr, operator]
            assert torch.equal(loss.last[key].nan_to_num(-1.0), value.nan_to_num(-1.0)), (number, key)  # type: ignore[index]
        for (key, value), mine in zip(plain.state_dict().items(), loss.state_dict().values(), strict=True):
            assert torch.equal(mine, value), (number, key)


@pytest.mark.parametrize("name", LOSSES)
def test_replays_are_the_steps_themselves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, graphs = LOSSES[name](), list[Recorded]()
    loss = copy.deepcopy(plain)
    monkeypatch.setattr(stateful, "check_ids", lambda who, ids, num_instances: ids)  # on a GPU not in a graph
    monkeypatch.setattr(tensors, "_norm_on_cpu", lambda vectors: None)  # it waits
    monkeypatch.setattr(global_softmax, "DEVICE", "cpu")
    monkeypatch.setattr(global_softmax, "capture", recorder(list(loss.buffers()), graphs))
    assert_same_steps(plain, loss, Replayed(loss))
    (graph,) = graphs
    assert graph.waits == []
    assert graph.replays == 5, "calls 3, 5, 6, 7 and 9"


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_not_replayed_checks_the_ids(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU ``checked`` looks at calls 1, 2, 4, 8 ... only, and a replay is no call: call 16 would be its sixth."""
    loss = LOSSES[name]()
    monkeypatch.setattr(global_softmax, "DEVICE", "cpu")
    monkeypatch.setattr(global_softmax, "capture", recorder(list(loss.buffers()), []))
    step = Replayed(loss)
    for number in range(16):
        step(*batch(number))
    assert all(each._calls <= 2 for each in loss.modules() if isinstance(each, stateful.Stateful))


@pytest.mark.gpu
@pytest.mark.parametrize("name", LOSSES)
def test_replays_of_cuda_graphs_are_the_steps_themselves(name: str) -> None:
    loss = LOSSES[name]().cuda()
    step = Replayed(loss)
    assert_same_steps(copy.deepcopy(loss), loss, step, "cuda")
    (one,) = step._steps.values()
    assert one.graph is not None


def test_batches_of_two_shapes_and_buffers_that_move_have_steps_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_softmax, "DEVICE", "cpu")
    monkeypatch.setattr(global_softmax, "capture", lambda work, device: None)
    loss, plain = hn.SogCLR(NUM), hn.SogCLR(NUM)
    step = Replayed(loss)
    for number, rows in enumerate((6, 4, 6, 4, 6)):
        if number == 4:
            loss.load_state_dict(copy.deepcopy(plain.state_dict()), assign=True)
        assert torch.equal(step(*batch(number, rows)), plain(*batch(number, rows)))
    assert [one.calls for one in step._steps.values()] == [2, 2, 1]


def test_without_a_gradient_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_softmax, "DEVICE", "cpu")
    step = Replayed(hn.SogCLR(NUM))
    with torch.no_grad():
        assert not step(*batch(0)).requires_grad
    assert not step._steps
