"""GradCache (Gao et al. 2021): the gradient of a batch that is larger than memory.

The vectors of the batch are computed chunk by chunk without a graph, and the loss from all of them. When its gradient
by the vectors is known, each chunk is encoded again, with a graph and the random numbers of the first time, and takes
its part of the gradient to the weights. Activations of one chunk are held at a time, for a third more computation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from typing import Annotated, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hardneg.core.errors import ArgumentError, check_count, warn_once

Encoded = Annotated[Tensor, "b d"]


@runtime_checkable
class Rows(Protocol):
    """Inputs that are not tensors but can be split by rows, such as packed graphs."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice) -> Any: ...

    def to(self, device: torch.device | str) -> Any: ...


class GradCache:
    """An encoder in chunks: ``GradCache(encoder, 256)(images)`` has the value and the gradient of ``encoder(images)``.

    encode: a module, or a function with the ``module`` whose weights it uses. Its arguments are tensors with one entry
        per row, also in dicts, lists and tuples, without a gradient of their own, or objects with a length, slices and
        ``to``; anything else is passed on. It returns [b, d].
    chunk_size: rows that are encoded at once. A batch that is no larger is encoded once, as usual.

    Any loss, autocast, gradient scaling and DistributedDataParallel (gradients are averaged once, after the last chunk)
    work as without it. The gradients arrive in ``.grad`` by ``loss.backward()``; ``torch.autograd.grad`` by the weights
    raises. torch's random numbers are replayed, on the CPU and on the devices of the weights; those of other
    generators are not.

    Exact for encoders without batch statistics. BatchNorm takes the statistics of each chunk and warns; its running
    statistics are updated the first time that a chunk is encoded.

    >>> encoder = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))
    >>> vectors = GradCache(encoder, chunk_size=2)(torch.randn(5, 3))
    >>> vectors.square().sum().backward()
    >>> vectors.shape, encoder[0].weight.grad.shape
    (torch.Size([5, 4]), torch.Size([4, 3]))
    """

    def __init__(self, encode: Callable[..., Encoded], chunk_size: int, module: nn.Module | None = None) -> None:
        chunk_size = check_count("GradCache", "chunk_size", chunk_size)
        module = encode if module is None and isinstance(encode, nn.Module) else module
        if module is None:
            fix = "pass module=, the module whose weights it uses"
            raise ArgumentError("GradCache", "a module", f"encode={type(encode).__name__}", fix)
        self.encode, self.chunk_size, self.module = encode, chunk_size, module

    def __call__(self, *inputs: Any, **named: Any) -> Encoded:
        rows = _num_rows((inputs, named))
        if rows <= self.chunk_size:
            return self.encode(*inputs, **named)
        if any(part.training for part in self.module.modules() if isinstance(part, _BatchNorm)):
            warn_once(
                "losses.grad_cache",
                f"GradCache encodes chunks of {self.chunk_size} rows, and BatchNorm takes the statistics of each, not "
                f"of the {rows} rows of the batch. Use an encoder without batch statistics (GroupNorm, LayerNorm).",
            )
        chunks = _Chunks(self, (inputs, named), rows)
        if not torch.is_grad_enabled() or not any(weights.requires_grad for weights in self.module.parameters()):
            return chunks.encoded()
        if any(tensor.requires_grad for tensor in _tensors((inputs, named))):
            fix = "detach them, or make what computes them a part of the encoder"
            raise ArgumentError("GradCache", "inputs without a gradient of their own", "requires_grad=True", fix)
        vectors: Tensor = _Twice.apply(chunks, torch.zeros((), requires_grad=True))  # type: ignore[no-untyped-call]
        return vectors


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chunks: _Chunks, differentiable: Tensor) -> Tensor:
        """``differentiable`` has no other use than to make the result so."""
        ctx.chunks = chunks
        return chunks.encoded()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        ctx.chunks.encode_again(gradients[0])
        return None, None


class _Chunks:
    """The chunks of one batch, and how each was encoded."""

    def __init__(self, cache: GradCache, inputs: tuple[Any, Any], rows: int) -> None:
        self.cache, self.inputs = cache, inputs
        self.rows = [slice(low, min(low + cache.chunk_size, rows)) for low in range(0, rows, cache.chunk_size)]
        tensors = [*cache.module.parameters(), *_tensors(inputs)]
        self.devices = list({tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")})
        types = {"cpu", *(device.type for device in self.devices)}
        self.precision = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in types]
        self.random: list[list[Tensor]] = []

    @torch.no_grad()
    def encoded(self) -> Encoded:
        parts = []
        for rows in self.rows:
            self.random.append(_random_states(self.devices))
            parts.append(self._of(rows).clone())  # a CUDA graph writes the next chunk to the same place
        return torch.cat(parts)

    @torch.enable_grad()
    def encode_again(self, gradient: Encoded) -> None:
        with _random_kept(self.devices), _statistics_kept(self.cache.module):
            for rows, states in zip(self.rows, self.random, strict=True):
                _set_random_states(self.devices, states)
                last = rows is self.rows[-1]
                with nullcontext() if last else getattr(self.cache.module, "no_sync", nullcontext)():
                    torch.autograd.backward(self._of(rows), gradient[rows])

    def _of(self, rows: slice) -> Encoded:
        inputs, named = _cut(self.inputs, rows)
        with ExitStack() as precision:
            for kind, enabled, dtype in self.precision:
                precision.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            # Autocast keeps the weights that it has cast, and with them the graph of another chunk, or none.
            torch.clear_autocast_cache()
            vectors = self.cache.encode(*inputs, **named)
            torch.clear_autocast_cache()
        if not isinstance(vectors, Tensor) or len(vectors) != rows.stop - rows.start:
            got = f"{tuple(vectors.shape)}" if isinstance(vectors, Tensor) else type(vectors).__name__
            raise ArgumentError("GradCache", "an encoder that gives a vector for each row", f"{got} for {rows}")
        return vectors


@contextmanager
def _statistics_kept(module: nn.Module) -> Iterator[None]:
    """No running statistics are updated."""
    tracking = [part for part in module.modules() if part.training and getattr(part, "track_running_stats", False)]
    for part in tracking:
        part.track_running_stats = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for part in tracking:
            part.track_running_stats = True  # type: ignore[assignment]


@contextmanager
def _random_kept(devices: list[torch.device]) -> Iterator[None]:
    before = _random_states(devices)
    try:
        yield
    finally:
        _set_random_states(devices, before)


def _random_states(devices: list[torch.device]) -> list[Tensor]:
    there = [torch.get_device_module(device).get_rng_state(*_which(device)) for device in devices]
    return [torch.get_rng_state(), *there]


def _set_random_states(devices: list[torch.device], states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for device, state in zip(devices, states[1:], strict=True):
        torch.get_device_module(device).set_rng_state(state, *_which(device))


def _which(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # of which there is one


def _leaves(value: Any) -> list[Any]:
    """The leaves of nested dicts, lists and tuples."""
    if isinstance(value, Mapping | list | tuple):
        return [leaf for part in (value.values() if isinstance(value, Mapping) else value) for leaf in _leaves(part)]
    return [value]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor)]


def _num_rows(inputs: tuple[Any, Any]) -> int:
    leaves = [leaf for leaf in _leaves(inputs) if isinstance(leaf, Rows)]
    sizes = {len(leaf) for leaf in leaves if not isinstance(leaf, Tensor) or leaf.ndim}
    if len(sizes) != 1:
        raise ArgumentError("GradCache", "tensors with one entry per row", f"sizes={sorted(sizes)}")
    return sizes.pop()


def _cut(value: Any, rows: slice) -> Any:
    if isinstance(value, Tensor):
        return value[rows] if value.ndim else value
    if isinstance(value, MutableMapping):  # of its own type: a BatchEncoding is read by its attributes
        part = copy(value)
        part.update({name: _cut(each, rows) for name, each in value.items()})
        return part
    if isinstance(value, Mapping):
        return {name: _cut(part, rows) for name, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cut(part, rows) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_cut(part, rows) for part in value)
    return value[rows] if isinstance(value, Rows) else value
