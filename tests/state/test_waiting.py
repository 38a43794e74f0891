"""A step of training with state never waits for the GPU: no number and no count of rows is brought to the host.

Seen on a CPU by the operations that would wait. Ids are checked on a CPU always, and on a GPU now and then.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import hardneg as hn
from hardneg.core import tensors
from hardneg.core.keyed import generator_at, uniforms_at
from hardneg.core.types import Keys
from hardneg.kernels.backends import cpu
from hardneg.state import stateful
from hardneg.state.stateful import Stateful, Writes
from support.vectors import make_unit_vectors

ROWS, NUM = 8, 40
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal"}


class Waits(TorchDispatchMode):
    """Which of the operations would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        masks = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in WAITS or masks:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def against_queue(queue: hn.Queue, labels: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    loss = hn.ContrastiveLoss("Tilt(1.0)", views="pool", impl="dense")

    def step(z1: Tensor, z2: Tensor, ids: Tensor) -> Tensor:
        value: Tensor = loss(z1, z2, ids, pool=queue)
        queue.push(Keys(z2, ids, ids % 3 if labels else None))
        return value

    return step


STEPS: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "sogclr": lambda: hn.SogCLR(NUM),
    "emc2": lambda: hn.EMC2(NUM, num_steps=6),
    "emc2 with bank": lambda: hn.EMC2(NUM, num_steps=6, remember=hn.Bank(NUM, 4, momentum=0.5)),
    "queue": lambda: against_queue(hn.Queue(2 * ROWS, 4), labels=False),
    "queue with labels": lambda: against_queue(hn.Queue(2 * ROWS, 4), labels=True),
}


@pytest.mark.parametrize("name", STEPS)
def test_no_step_waits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stateful, "check_ids", lambda who, ids, num_instances: ids)
    monkeypatch.setattr(cpu, "rows", lambda *args, **kwargs: None)  # as on a GPU
    monkeypatch.setattr(tensors, "_norm_on_cpu", lambda vectors: None)
    step, waits = STEPS[name](), Waits()
    for number in range(7):  # at powers of two a ContrastiveLoss looks for what to warn of; at first all is looked up
        generator = torch.Generator().manual_seed(number)
        ids = torch.randperm(NUM, generator=generator)[:ROWS]
        z1, z2 = (make_unit_vectors(ROWS, 4, seed=2 * number + view).requires_grad_() for view in range(2))
        if number < 6:
            step(z1, z2, ids=ids).backward()
        else:
            with waits:
                step(z1, z2, ids=ids).backward()
    assert waits.found == []


def test_a_number_is_looked_up_again_when_something_else_changed_it() -> None:
    state = Stateful(seed=3)
    state.advance()
    assert state.number("step") == 1
    state.step += 4
    assert state.number("step") == int(state.step) == 5
    state.load_state_dict({"seed": torch.tensor(8), "step": torch.tensor(9)})
    assert (state.number("seed"), state.number("step")) == (8, 9)
    other = copy.deepcopy(state)
    other.advance()
    assert (other.number("step"), state.number("step"), int(other.step), int(state.step)) == (10, 9, 10, 9)
    state.to(torch.float64)
    assert pickle.loads(pickle.dumps(state)).number("step") == 9


@pytest.mark.parametrize("slots", [[2, 0, 2, -1], [-1, -1], [], [1, 1, 1], [-1, 0, -1, 2]])
def test_writes_are_those_of_a_loop(slots: list[int]) -> None:
    values = torch.arange(1.0, 1.0 + 2 * len(slots)).view(len(slots), 2)
    expected = torch.zeros(3, 2)
    for slot, value in zip(slots, values, strict=True):
        if slot >= 0:
            expected[slot] = value
    buffer = torch.zeros(3, 2)
    Writes(torch.tensor(slots, dtype=torch.long)).into(buffer, values)
    assert torch.equal(buffer, expected)


def test_numbers_of_a_step_are_uniform_and_differ_by_seed_step_and_stream() -> None:
    numbers = [
        uniforms_at(torch.tensor(seed), torch.tensor(step), stream, (200, 100))
        for seed, step, stream in ((7, 4, 1), (8, 4, 1), (7, 5, 1), (7, 4, 0))
    ]
    for each in numbers:
        assert each.dtype == torch.float64
        assert 0.0 <= each.min() < 1e-3 < 0.999 < each.max() < 1.0
        shares = torch.histc(each, 10, 0.0, 1.0) / each.numel()
        assert (shares - 0.1).abs().max() < 0.01
    both = torch.corrcoef(torch.stack([each.flatten() for each in numbers]))
    assert (both - torch.eye(4)).abs().max() < 0.03
    assert torch.equal(numbers[0], uniforms_at(torch.tensor(7), torch.tensor(4), 1, (200, 100)))


def test_the_numbers_of_a_step_stay_what_they_were() -> None:
    """Runs resume with the numbers of earlier versions."""
    assert generator_at(7, 4, 1).initial_seed() == 3256092245380512898
    assert uniforms_at(torch.tensor(7), torch.tensor(4), 1, (3,)).tolist() == [
        0.8827520126775991,
        0.7482944703147372,
        0.7021355758151877,
    ]
