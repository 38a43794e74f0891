"""Tensor helpers: constants, unit vectors, fused functions with their own gradients, tensors in fields of dataclasses.

For small batches on a GPU the number of operations determines the time. ``constant`` therefore creates a constant once,
and ``Unit`` and ``LogSumExp`` are single autograd functions where torch would issue several operations. They apply to
plain tensors only (``private_apis.is_plain``); second derivatives go through ordinary operations. ``tensor_fields``
and the functions below it read and replace tensors in the fields of a distribution or objective, such as a learnable
beta.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache, wraps
from typing import Annotated, Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, argument_error, written
from hardneg.core.private_apis import is_plain

P = ParamSpec("P")
R = TypeVar("R")
Holder = TypeVar("Holder")
AnyCall = TypeVar("AnyCall", bound=Callable[..., Any])
_bits: dict[torch.dtype, tuple[torch.dtype, int, int]] = {
    torch.float32: (torch.int32, 0x7F800000, 0x00800000),
    torch.float64: (torch.int64, 0x7FF0000000000000, 0x0010000000000000),
}
"""For each dtype: the integer dtype of the same width, the mask of the exponent bits, the smallest normal number."""


def typed_as(function: AnyCall) -> Callable[[Callable[..., Any]], AnyCall]:
    """Return a decorator that gives a method the signature of another, for type checkers.

    Modules declare ``__call__`` with it, because torch declares that modules return Any. A plain assignment,
    ``__call__ = forward``, is enough for mypy but not for pyright.
    """
    return lambda _: function


def constant(make: Callable[..., Tensor], *arguments: Any, device: torch.device, **options: Any) -> Tensor:
    """Return ``make(*arguments, device=device, **options)`` from a cache.

    The constant is created anew if someone has modified the cached tensor, and inside compiled or captured graphs.

    Args:
        make: Function that creates the tensor, such as torch.arange.
        arguments: Hashable positional arguments.
        device: Device of the constant.
        options: Hashable keyword arguments.

    Example:
        >>> constant(torch.arange, 3, device=torch.device("cpu"))
        tensor([0, 1, 2])
    """
    if torch.compiler.is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return make(*arguments, device=device, **options)
    found, version = _cached(make, *arguments, device=device, **options)
    if type(found) is Tensor and found._version == version:
        return found
    return make(*arguments, device=device, **options)  # modified, or created in another mode, such as FakeTensorMode


@lru_cache(maxsize=64)
def _cached(make: Callable[..., Tensor], *arguments: Any, **options: Any) -> tuple[Tensor, int]:
    with torch.inference_mode(False):  # inference tensors cannot be saved for a backward pass
        found = make(*arguments, **options)
    return found, found._version


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Exclude a function from compiled graphs, like ``torch.compiler.disable``.

    That decorator would import the compiler together with this package, which takes about a second.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        disabled: Callable[P, R] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled(*args, **kwargs)

    return call


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Disable autocast inside the block if it is on; the check saves the time of switching it off for small batches."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def check_device(who: str, device: str) -> torch.device:
    """Return the torch device; raise ArgumentError for an unknown name, or for a GPU if none is visible."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise argument_error(who, "a torch device, such as cpu or cuda:0", "device", device) from None
    if found.type == "cuda" and not torch.cuda.is_available():
        what = "an available device"
        raise argument_error(who, what, "device", device, f"no GPU is visible: use {written(who, 'device', 'cpu')}")
    return found


def widened(vectors: Tensor) -> Tensor:
    """Return the tensor in float32, or unchanged if it is float64."""
    return vectors if vectors.dtype == torch.float64 else vectors.float()


def unit(vectors: Annotated[Tensor, "* d"]) -> Annotated[Tensor, "* d"]:
    """Scale rows to norm 1, in float32 or wider. A zero row stays zero and gets no gradient.

    Rows are first divided by a power of two, which is exact: the squares of norms above 1e19 or below 1e-19 would
    leave the range of float32. NaN and infinity give NaN.

    Args:
        vectors: Vectors, [..., d].

    Example:
        >>> unit(torch.tensor([[3e25, 4e25], [3e-20, 4e-20], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    norm = _norm_on_cpu(vectors)
    if norm is not None or has_unit(vectors):
        rows: Tensor = Unit.apply(vectors, norm)  # type: ignore[no-untyped-call]
        return rows
    near_one = scaled(vectors)
    norm = torch.linalg.vector_norm(near_one, dim=-1, keepdim=True)
    return torch.div(near_one, norm + (norm.detach() == 0))


def scaled(vectors: Annotated[Tensor, "* d"]) -> Annotated[Tensor, "* d"]:
    """Divide rows by a power of two so that the largest number of each is near 1; float32 or wider."""
    wide = widened(vectors)
    if not wide.numel():  # torch.compile cannot reduce an empty tensor
        return wide
    return wide / power_of_two(wide)


def power_of_two(wide: Annotated[Tensor, "* d"]) -> Annotated[Tensor, "* 1"]:
    """Return the power of two below the largest number of each row; infinity for a zero row.

    It is computed from the bits of the largest number, which takes fewer operations than a logarithm.

    Args:
        wide: Vectors in float32 or float64, [..., d], not empty.
    """
    whole, exponent, lowest = _bits[wide.dtype]
    bits = torch.linalg.vector_norm(wide.detach(), math.inf, dim=-1, keepdim=True).view(whole)
    # Clearing the mantissa rounds down to a power of two. bits - 1 makes that of 0 infinite: no gradient for zero rows.
    power: Tensor = ((bits - 1) & exponent).clamp(min=lowest).view(wide.dtype)
    return power


def is_zero(vectors: Annotated[Tensor, "* d"]) -> Annotated[Tensor, "*"]:
    """Return True for rows that are zero and so have no direction."""
    return (vectors == 0).all(-1)


def known_number(value: float | Tensor) -> float | None:
    """Return the value as a float if it is known on the host without a gradient; otherwise None.

    A Python number is, and so is a scalar tensor on the CPU, such as the value of a schedule.
    """
    if not isinstance(value, Tensor):
        return float(value)
    known = not (value.ndim or value.requires_grad or value.is_cuda or torch.compiler.is_compiling())
    return float(value) if known else None


def by_operations(function: Callable[..., Any], inputs: Sequence[Tensor | None], gradients: Any) -> list[Tensor | None]:
    """Compute the gradients of a function through ordinary operations, which can be differentiated again.

    Args:
        function: Function of the inputs.
        inputs: Its inputs.
        gradients: Gradients by its outputs.

    Returns:
        The gradient by each input; None where none is needed.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, because one input may depend on another.
        aliases = [None if each is None else each.view_as(each) for each in inputs]
        wanted = [each for each in aliases if each is not None and each.requires_grad]
        found = iter(torch.autograd.grad(function(*aliases), wanted, gradients, create_graph=create_graph))
    return [next(found) if each is not None and each.requires_grad else None for each in inputs]


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a backward pass so that it raises ArgumentError with ``create_graph=True``.

    Torch's ``once_differentiable`` raises only if a second backward pass reaches the cut in the graph.
    ``torch.autograd.grad`` by the inputs does not reach it and would be wrong without an error.
    """

    @wraps(backward)
    def checked(*args: Any) -> Any:
        if torch.is_grad_enabled():
            what = "impl='dense' for second derivatives"
            raise ArgumentError("ContrastiveLoss", what, "create_graph=True with a streamed loss")
        return backward(*args)

    return checked


def has_unit(vectors: Tensor) -> bool:
    """Return True if fused normalisation is faster than separate operations, for vectors of any norm (CUDA only)."""
    return vectors.is_cuda and vectors.dtype != torch.float64 and is_plain(vectors)


def unit_rows(
    vectors: Annotated[Tensor, "* d"], norm: Annotated[Tensor, "* 1"] | None = None
) -> tuple[Annotated[Tensor, "* d"], Annotated[Tensor, "* 1"]]:
    """Return rows of norm 1 in float32 or wider, and their norms, [..., 1], where the norm of a zero row is infinite.

    Args:
        vectors: The vectors, [..., d].
        norm: Their norms, if known; otherwise they are computed in float64, so no scaling is needed.
    """
    norm = torch.threshold_(_norm(vectors), 0.0, math.inf) if norm is None else norm
    dtype = torch.promote_types(vectors.dtype, torch.float32)
    return torch.div(vectors, norm, out=torch.empty_like(vectors, dtype=dtype)), norm


def unit_gradient(grad: Tensor, vectors: Tensor, rows: Tensor, norm: Tensor) -> Tensor:
    """Return the gradient by the vectors, given the gradient by their unit rows.

    Args:
        grad: Gradient by the unit rows, [..., d].
        vectors: The vectors, [..., d].
        rows: Their unit rows, from ``unit_rows``.
        norm: Their norms, from ``unit_rows``.
    """
    across = torch.addcmul(grad, rows, (grad * rows).sum(-1, keepdim=True), value=-1)
    return torch.div(across, norm, out=torch.empty_like(vectors))


class Unit(torch.autograd.Function):
    """``unit`` as one autograd function, on a GPU and for usual norms on a CPU."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, norm: Tensor | None = None) -> Tensor:
        """Return the unit rows; see ``unit_rows`` for the norm."""
        rows, norm = unit_rows(vectors, norm)
        ctx.save_for_backward(vectors, rows, norm)
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient by the vectors."""
        (grad,), (vectors, rows, norm) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled() or not is_plain(grad):  # div(out=) supports neither derivatives nor vmap
            norm = _norm(vectors)
            across: Tensor = grad - rows * (grad * rows).sum(-1, keepdim=True)
            return (across / norm.masked_fill(norm == 0, math.inf)).to(vectors.dtype), None
        return unit_gradient(grad, vectors, rows, norm), None


def _norm(vectors: Tensor) -> Annotated[Tensor, "* 1"]:
    norm: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True, dtype=torch.float64)
    return norm


def _norm_on_cpu(vectors: Tensor) -> Annotated[Tensor, "* 1"] | None:
    """Return the norms of vectors on a CPU in a tenth of the time of vector_norm; None if their squares might overflow.

    None as well for vectors that a custom autograd function cannot replace.
    """
    if vectors.device.type != "cpu" or not vectors.numel() or not is_plain(vectors):
        return None
    wide = widened(vectors.detach())
    squares = torch.mul(wide, wide).sum(-1, keepdim=True)
    return squares.sqrt_() if in_range(squares) else None


def in_range(squares: Tensor) -> bool:
    """Return True if sums of squares are finite and far from overflow and from the loss of digits by underflow."""
    low, high = torch.aminmax(squares)
    return float(low) > 1e-25 and float(high) < 1e25


class LogSumExp(torch.autograd.Function):
    """Log-sum-exp of each row, [b, 1], and its softmax, [b, n]; every row must have a finite number.

    It needs half the operations of torch.logsumexp and stores only the softmax, whose largest entry is
    1 / sum of e^(x - largest x).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-sum-exp and the softmax."""
        share = torch.softmax(x, dim=-1)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(share)
        return x.amax(-1, keepdim=True) - share.amax(-1, keepdim=True).log(), share

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Tensor | None:
        """Return the gradient by x."""
        total, of_share = gradients
        share: Tensor = ctx.saved_tensors[0]
        if of_share is None:
            return None if total is None else total * share
        along = of_share - (of_share * share).sum(-1, keepdim=True)  # only for second derivatives
        return (along if total is None else along + total) * share


_field_names: dict[type, tuple[str, ...]] = {}
PER_ANCHOR = ("num_negatives", "log_norm")
"""Fields that hold one number per anchor as [b]; any other field has the shape [b, 1] for that."""


def tensor_fields(holder: Any) -> dict[str, Tensor]:
    """Return the fields of a distribution or objective that are tensors."""
    kind = holder.__class__
    if kind not in _field_names:
        _field_names[kind] = tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()
    values = {name: getattr(holder, name) for name in _field_names[kind]}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def is_per_anchor(tensor: Tensor, name: str, rows: int) -> bool:
    """True if a field holds one number per anchor, and is not a table that happens to have as many entries.

    Args:
        tensor: The field.
        name: Its name, which decides about the shape: see ``PER_ANCHOR``.
        rows: Number of anchors.
    """
    return tensor.shape == ((rows,) if name in PER_ANCHOR else (rows, 1))


def with_fields(holder: Holder, tensors: dict[str, Tensor]) -> Holder:
    """Return the holder with these tensors in its fields."""
    return replace(holder, **tensors) if tensors else holder  # type: ignore[type-var]


def fields_of_rows(holder: Holder, rows: slice, number: int) -> Holder:
    """Return the holder with its per-anchor fields cut to some rows.

    Args:
        holder: A distribution, objective or mask.
        rows: The rows.
        number: Number of anchors.
    """
    tensors = tensor_fields(holder).items()
    return with_fields(holder, {name: each[rows] for name, each in tensors if is_per_anchor(each, name, number)})
