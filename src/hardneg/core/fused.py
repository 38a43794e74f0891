"""Functions in few operations, with their gradients: a small batch on a GPU costs as much as its operations.

They are for plain tensors, see ``is_plain``. Derivatives of higher order go through operations that have derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hardneg.core.errors import ArgumentError


def is_plain(tensor: Tensor) -> bool:
    """Whether nothing must see the single operations: no compiler, subclass, transform or derivative forward."""
    if type(tensor) is not Tensor or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    batched = torch._C._functorch.is_legacy_batchedtensor(tensor)  # of torch.autograd.grad(is_grads_batched=True)
    return not batched and forward_ad._current_level < 0


def known_number(value: float | Tensor) -> float | None:
    """A number, or a tensor of one number without gradient on the CPU, such as a schedule's; None for other tensors."""
    if not isinstance(value, Tensor):
        return float(value)
    known = not (value.ndim or value.requires_grad or value.is_cuda or torch.compiler.is_compiling())
    return float(value) if known else None


def by_operations(function: Callable[..., Any], inputs: Sequence[Tensor | None], gradients: Any) -> list[Tensor | None]:
    """The gradients of the inputs by operations that have derivatives themselves; None where none is needed."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        aliases = [None if each is None else each.view_as(each) for each in inputs]  # one input may depend on another
        wanted = [each for each in aliases if each is not None and each.requires_grad]
        found = iter(torch.autograd.grad(function(*aliases), wanted, gradients, create_graph=create_graph))
    return [next(found) if each is not None and each.requires_grad else None for each in inputs]


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass that raises with ``create_graph=True``.

    Torch's ``once_differentiable`` cuts the graph, and raises only where a second backward pass reaches the cut. That
    of ``torch.autograd.grad`` by the inputs does not, and is wrong without an error.
    """

    @wraps(backward)
    def checked(*args: Any) -> Any:
        if torch.is_grad_enabled():
            what = "impl='dense' for derivatives of its gradient"
            raise ArgumentError("ContrastiveLoss", what, "create_graph=True and a streamed loss")
        return backward(*args)

    return checked


def has_unit(vectors: Tensor) -> bool:
    """Whether ``Unit`` serves: on a CPU its float64 takes longer than more operations."""
    return vectors.is_cuda and vectors.dtype != torch.float64 and is_plain(vectors)


def unit_rows(vectors: Annotated[Tensor, "* d"]) -> tuple[Annotated[Tensor, "* d"], Annotated[Tensor, "* 1"]]:
    """Rows of norm 1 in float32, and the norms. In float64 they need no scale; that of a zero row is made infinite."""
    norm = torch.threshold_(_norm(vectors), 0.0, math.inf)
    return torch.div(vectors, norm, out=torch.empty_like(vectors, dtype=torch.float32)), norm


def unit_gradient(grad: Tensor, vectors: Tensor, rows: Tensor, norm: Tensor) -> Tensor:
    across = torch.addcmul(grad, rows, (grad * rows).sum(-1, keepdim=True), value=-1)
    return torch.div(across, norm, out=torch.empty_like(vectors))


class Unit(torch.autograd.Function):
    """``unit`` of float32 or half precision."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor) -> Tensor:
        rows, norm = unit_rows(vectors)
        ctx.save_for_backward(vectors, rows, norm)
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (grad,), (vectors, rows, norm) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled() or not is_plain(grad):  # div(out=) has neither a derivative nor a batch
            norm = _norm(vectors)
            across: Tensor = grad - rows * (grad * rows).sum(-1, keepdim=True)
            return (across / norm.masked_fill(norm == 0, math.inf)).to(vectors.dtype)
        return unit_gradient(grad, vectors, rows, norm)


def _norm(vectors: Tensor) -> Annotated[Tensor, "* 1"]:
    norm: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True, dtype=torch.float64)
    return norm


class LogSumExp(torch.autograd.Function):
    """log of the sum of e^x of each row, of which some x is finite, as [b, 1], and the softmax, which is all it keeps.

    torch.logsumexp takes twice as many operations. The largest share is 1 / sum of e^(x - largest x).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        share = torch.softmax(x, dim=-1)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(share)
        return x.amax(-1, keepdim=True) - share.amax(-1, keepdim=True).log(), share

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Tensor | None:
        total, of_share = gradients
        share: Tensor = ctx.saved_tensors[0]
        if of_share is None:
            return None if total is None else total * share
        along = of_share - (of_share * share).sum(-1, keepdim=True)  # in a second derivative
        return (along if total is None else along + total) * share
