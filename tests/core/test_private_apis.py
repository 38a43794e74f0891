"""The public fallback of each private API of torch: what happens where a version of torch does not have it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import hardneg as hn
from hardneg.core.private_apis import guards_checked_once, is_compiler_error, is_plain, lerp_all


def loss_and_gradient() -> tuple[torch.Tensor, torch.Tensor]:
    z = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = hn.ContrastiveLoss("Tilt(1.0)", tau_plus=0.1)(z[0], z[1])
    return loss.detach(), torch.autograd.grad(loss, z)[0]


@pytest.mark.parametrize("name", ["_are_functorch_transforms_active", "_functorch"])
def test_without_the_flags_of_functorch_no_tensor_is_plain(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = loss_and_gradient()
    assert is_plain(torch.ones(2))
    monkeypatch.delattr(torch._C, name)
    assert not is_plain(torch.ones(2))
    torch.testing.assert_close(loss_and_gradient(), wanted)


def test_guards_are_checked_at_each_call_where_they_cannot_be_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def set_stance(stance: str) -> Any:
        raise AssertionError("called without skip_guard_eval_unsafe")

    monkeypatch.setattr(torch.compiler, "set_stance", set_stance)  # no such argument: TypeError
    assert isinstance(guards_checked_once(True), nullcontext)
    monkeypatch.delattr(torch.compiler, "set_stance")
    assert isinstance(guards_checked_once(True), nullcontext)


def test_errors_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = torch._dynamo.exc.Unsupported("a graph break")
    assert is_compiler_error(refused)
    assert not is_compiler_error(RuntimeError("shapes do not match"))
    monkeypatch.delattr(torch._dynamo.exc, "TorchDynamoException")
    assert is_compiler_error(refused)
    assert not is_compiler_error(ValueError("no error of the compiler"))


def test_parameters_move_as_far_one_by_one_as_together(monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(0)
    start = [torch.randn(3, 2, generator=random), torch.randn(5, generator=random)]
    targets = [torch.randn_like(each) for each in start]
    together, single = ([each.clone() for each in start] for _ in range(2))
    lerp_all(together, targets, 0.1)
    monkeypatch.delattr(torch, "_foreach_lerp_")
    lerp_all(single, targets, 0.1)
    for one, other, before, target in zip(together, single, start, targets, strict=True):
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(one, before + 0.1 * (target - before))
