"""The functions in few operations are the plain ones: values and derivatives of every order, at any scale."""

from __future__ import annotations

import math

import pytest
import torch
import torch.autograd.forward_ad as forward
from torch import Tensor

from hardneg.core.private_apis import is_plain
from hardneg.core.tensors import LogSumExp, Unit, unit

SCALES = torch.tensor([1.0, 3e25, 3e-20, 0.0, 3e38, 1e-5])[:, None]


def rows(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).clamp(-1, 1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_and_gradients_are_those_of_plain_operations(dtype: torch.dtype) -> None:
    vectors = rows(dtype)
    vectors[3] = 0.0
    weights, found = torch.randn(6, 5), []
    for function in (Unit.apply, unit):
        given = vectors.clone().requires_grad_()
        made = function(given)
        (made * weights).sum().backward()
        assert given.grad is not None
        assert given.grad.dtype == dtype
        found.append((made, given.grad))
    torch.testing.assert_close(*found)


def test_any_scale_is_brought_to_one_and_a_zero_row_has_no_gradient() -> None:
    given = (rows() * SCALES).requires_grad_()
    made = Unit.apply(given)
    made[:, 0].sum().backward()
    assert given.grad is not None
    torch.testing.assert_close(made.norm(dim=-1), (SCALES[:, 0] > 0).float())
    torch.testing.assert_close(made, unit(given))
    assert given.grad.isfinite().all()
    assert not given.grad[3].any()


def test_an_infinite_or_missing_number_is_not_hidden() -> None:
    for odd in (math.inf, math.nan):
        vectors = torch.tensor([[odd, 1.0]])
        torch.testing.assert_close(Unit.apply(vectors), unit(vectors), equal_nan=True)


def test_second_derivatives_are_those_of_plain_operations() -> None:
    found = []
    for function in (Unit.apply, unit):
        given = rows().requires_grad_()
        first = torch.autograd.grad((function(given) ** 3).sum(), given, create_graph=True)[0]
        found.append(torch.autograd.grad((first**2).sum(), given)[0])
    torch.testing.assert_close(*found)


def test_many_gradients_at_once_are_those_of_plain_operations() -> None:
    given = rows().requires_grad_()
    vectors = torch.randn(4, 6, 5)
    found = [
        torch.autograd.grad(function(given), given, vectors, is_grads_batched=True)[0]
        for function in (Unit.apply, unit)
    ]
    torch.testing.assert_close(*found)


def test_a_derivative_forward_sees_the_single_operations() -> None:
    x, change = rows().requires_grad_(), rows().flip(0)
    made = Unit.apply(x)
    with forward.dual_level():
        assert not is_plain(x)
        found = [
            forward.unpack_dual(torch.autograd.grad(each, x, forward.make_dual(rows(), change))[0]).tangent
            for each in (made, unit(x))
        ]
    torch.testing.assert_close(*found)
    assert is_plain(x)


def test_a_sum_of_exponentials_is_that_of_torch() -> None:
    found = []
    x = rows().double() * 30
    x[0, 1:], x[1] = -math.inf, 300.0
    for function in (lambda each: LogSumExp.apply(each)[0], lambda each: torch.logsumexp(each, dim=-1, keepdim=True)):
        given = x.clone().requires_grad_()
        value = function(given)
        first = torch.autograd.grad(value.sin().sum(), given, create_graph=True)[0]
        found.append((value, first, torch.autograd.grad((first**2).sum(), given)[0]))
    torch.testing.assert_close(*found)
