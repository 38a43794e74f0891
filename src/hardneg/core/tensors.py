"""Tensor helpers: cached constants, unit vectors, and functions with gradients of their own.

A small batch on a GPU costs as much as the operations it issues. ``constant`` makes a constant once, and ``Unit`` and
``LogSumExp`` are single autograd functions where torch would issue several operations. They are for plain tensors
(``private_apis.is_plain``); second derivatives go through ordinary operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, wraps
from typing import Annotated, Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, argument_error, written
from hardneg.core.private_apis import is_plain

P = ParamSpec("P")
R = TypeVar("R")
_bits: dict[torch.dtype, tuple[torch.dtype, int, int]] = {
    torch.float32: (torch.int32, 0x7F800000, 0x00800000),
    torch.float64: (torch.int64, 0x7FF0000000000000, 0x0010000000000000),
}
"""The whole numbers of as many bits, the bits of the exponent, and those of the smallest normal number."""


def constant(make: Callable[..., Tensor], *arguments: Any, device: torch.device, **options: Any) -> Tensor:
    """Return ``make(*arguments, device=device, **options)`` from a cache; make it anew if someone has written to it.

    A small batch on a GPU costs as much as the operations it issues, so constants are made once.

    >>> constant(torch.arange, 3, device=torch.device("cpu"))
    tensor([0, 1, 2])
    """
    if torch.compiler.is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return make(*arguments, device=device, **options)
    found, version = _cached(make, *arguments, device=device, **options)
    if type(found) is Tensor and found._version == version:
        return found
    return make(*arguments, device=device, **options)  # written to, or made in another mode, such as FakeTensorMode


@lru_cache(maxsize=64)
def _cached(make: Callable[..., Tensor], *arguments: Any, **options: Any) -> tuple[Tensor, int]:
    with torch.inference_mode(False):  # a tensor of inference could not be saved for a backward pass
        found = make(*arguments, **options)
    return found, found._version


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """``torch.compiler.disable``, which would import the compiler, a second of time, with this package."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        disabled: Callable[P, R] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled(*args, **kwargs)

    return call


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Leaves autocast where it is on: to leave it takes as long as the operations of a small batch."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def check_device(who: str, device: str) -> torch.device:
    """Return the device; raise for a name that torch does not know, and for a GPU if none is visible."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise argument_error(who, "a device of torch, such as cpu or cuda:0", "device", device) from None
    if found.type == "cuda" and not torch.cuda.is_available():
        what = "a device that is there"
        raise argument_error(who, what, "device", device, f"no GPU is visible: use {written(who, 'device', 'cpu')}")
    return found


def widened(vectors: Tensor) -> Tensor:
    """As float32 at least."""
    return vectors if vectors.dtype == torch.float64 else vectors.float()


def unit(vectors: Annotated[Tensor, "* d"]) -> Annotated[Tensor, "* d"]:
    """Rows of norm 1 in float32 or wider. A zero row stays zero and gets no gradient.

    Rows are first divided by a power of two, which is exact: squares of a norm above 1e19 or below 1e-19 would leave
    the range of float32. NaN and infinity give NaN.

    >>> unit(torch.tensor([[3e25, 4e25], [3e-20, 4e-20], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    if has_unit(vectors):
        rows: Tensor = Unit.apply(vectors)  # type: ignore[no-untyped-call]
        return rows
    near_one = scaled(vectors)
    norm = torch.linalg.vector_norm(near_one, dim=-1, keepdim=True)
    return torch.div(near_one, norm + (norm.detach() == 0))


def scaled(vectors: Annotated[Tensor, "* d"]) -> Annotated[Tensor, "* d"]:
    """Rows divided by a power of two, so that the largest number of each is near 1; float32 or wider.

    The power is made of the bits of the largest number, which takes fewer operations than its logarithm.
    """
    wide = widened(vectors)
    if not wide.numel():  # torch.compile has no largest of no rows
        return wide
    whole, exponent, lowest = _bits[wide.dtype]
    bits = torch.linalg.vector_norm(wide.detach(), math.inf, dim=-1, keepdim=True).view(whole)
    # The power below the number. Minus 1: of 0 it is infinite, so that a zero row gets no gradient.
    power: Tensor = ((bits - 1) & exponent).clamp(min=lowest).view(wide.dtype)
    return wide / power


def is_zero(vectors: Annotated[Tensor, "* d"]) -> Annotated[Tensor, "*"]:
    """Rows that have no direction."""
    return (vectors == 0).all(-1)


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
    """Return True if fused normalisation is faster than separate operations (CUDA only)."""
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
