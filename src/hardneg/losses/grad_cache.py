"""GradCache (Gao et al. 2021): the gradient of a batch that is larger than memory.

The vectors of the batch are computed chunk by chunk without a graph, and the loss from all of them. Once the gradient
by the vectors is known, each chunk is encoded again, with a graph and with the random numbers of the first time, and
propagates its part of the gradient to the weights. Only the activations of one chunk are held at a time, for a third
more computation.

``GradCache`` is the public class; ``_Twice`` is its autograd function, ``_Chunks`` encodes the chunks, and
``_FirstPass`` checks that nothing changed between the two passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from typing import Annotated, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from hardneg.core.errors import ArgumentError, DataChanged, check_count, warn_once

Encoded = Annotated[Tensor, "b d"]


@runtime_checkable
class SplitByRows(Protocol):
    """Inputs that are not tensors but can be split by rows, such as batches of graphs."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice) -> Any: ...

    def to(self, device: torch.device | str) -> Any:
        """Return the same rows on a device."""
        ...


class GradCache:
    """An encoder in chunks: ``GradCache(encoder, 256)(images)`` has the value and the gradient of ``encoder(images)``.

    Works with any loss, autocast, gradient scaling, hooks of the weights (which get the gradient of all chunks at once)
    and DistributedDataParallel (gradients are averaged once, after the last chunk). With DistributedDataParallel and
    FSDP, hooks get the gradient of each chunk, and ``torch.autograd.grad`` by the weights raises.

    Each chunk is encoded again in the mode (train or eval) of the first time, with the same random numbers of torch, on
    the CPU and on the devices of the weights; those of other generators are not replayed. Weights, inputs and buffers
    must not change before the backward pass.

    Exact for encoders without batch statistics. BatchNorm uses the statistics of each chunk, with a warning; its
    running statistics are updated the first time that a chunk is encoded.

    Args:
        encode: A module, or a function that uses the weights of ``module``. Its arguments are tensors with one entry
            per row, also in dicts, lists and tuples, that need no gradient themselves, or objects with a length, slices
            and ``to``; anything else is passed on unchanged. It returns [b, d].
        chunk_size: Number of rows that are encoded at once. A batch that is no larger is encoded once, as usual.
        module: The module whose weights ``encode`` uses, if ``encode`` is a function.

    Raises:
        ArgumentError: If there is no module, or inputs require a gradient.
        DataChanged: In the backward pass, if weights, inputs or buffers changed since the forward pass.

    Example:
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
        """Encode the rows of the inputs chunk by chunk; the arguments are those of ``encode``.

        Returns:
            Vectors of all rows, [b, d], whose gradient flows to the weights of the module.
        """
        rows = _num_rows((inputs, named))
        if rows <= self.chunk_size:
            return self.encode(*inputs, **named)
        if any(part.training for part in self.module.modules() if isinstance(part, _BatchNorm)):
            warn_once(
                "losses.grad_cache",
                f"GradCache encodes chunks of {self.chunk_size} rows, and BatchNorm uses the statistics of each, not "
                f"of the {rows} rows of the batch. Use an encoder without batch statistics (GroupNorm, LayerNorm).",
            )
        chunks = _Chunks(self, (inputs, named), rows)
        if not torch.is_grad_enabled() or not any(weights.requires_grad for weights in self.module.parameters()):
            return chunks.encoded()
        if any(tensor.requires_grad for tensor in _tensors((inputs, named))):
            fix = "detach them, or compute them inside the encoder"
            raise ArgumentError("GradCache", "inputs that need no gradient", "requires_grad=True", fix)
        weights = [] if chunks.first.collects else [each for each in chunks.first.weights if each.requires_grad]
        differentiable: list[Tensor] = [*weights] or [torch.zeros((), requires_grad=True)]
        vectors: Tensor = _Twice.apply(chunks, *differentiable)  # type: ignore[no-untyped-call]
        return vectors


class _Twice(torch.autograd.Function):
    """Encode without a graph; in the backward pass, encode again and return the gradients of the weights.

    The weights are arguments, so that autograd adds the gradients of all calls and hands them over once. Modules that
    collect gradients themselves have a placeholder instead, and their gradients arrive chunk by chunk.
    """

    @staticmethod
    def forward(ctx: Any, chunks: _Chunks, *weights: Tensor) -> Tensor:
        ctx.chunks, ctx.weights = chunks, [each for each in weights if isinstance(each, nn.Parameter)]
        vectors = chunks.encoded()
        chunks.first.ended()
        return vectors

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with _set_aside(ctx.weights) as collected:
            ctx.chunks.encode_again(gradients[0])
        return (None, *(collected or [None]))


def _collects_gradients(module: nn.Module) -> bool:
    """True for DistributedDataParallel, FSDP and DeepSpeed, which collect the gradients in their own hooks."""
    names = ("no_sync", "set_requires_gradient_sync")
    return any(hasattr(part, name) for part in module.modules() for name in names)


@contextmanager
def _set_aside(weights: list[nn.Parameter]) -> Iterator[list[Tensor | None]]:
    """Collect the gradients of the block in the list, without hooks; ``.grad`` is as before afterwards."""
    collected: list[Tensor | None] = []
    before = [weight.grad for weight in weights]
    every = [each for weight in weights for each in (weight._backward_hooks, weight._post_accumulate_grad_hooks)]
    hooks = [(each, dict(each)) for each in every if each]
    for weight in weights:
        weight.grad = None
    for each, _ in hooks:
        each.clear()  # in place, since handles and the engine hold this dict
    try:
        yield collected
        collected += [weight.grad for weight in weights]
    finally:
        for weight, gradient in zip(weights, before, strict=True):
            weight.grad = gradient
        for each, kept in hooks:
            each.update(kept)


class _Chunks:
    """The chunks of one batch, and the conditions under which each was encoded."""

    def __init__(self, cache: GradCache, inputs: tuple[Any, Any], rows: int) -> None:
        self.cache, self.inputs = (
            cache,
            _mapped(inputs, lambda leaf: leaf),
        )  # a copy of the containers, which the caller may refill
        self.rows = [slice(low, min(low + cache.chunk_size, rows)) for low in range(0, rows, cache.chunk_size)]
        self.first = _FirstPass(cache.module, _tensors(self.inputs))
        tensors = [*cache.module.parameters(), *self.first.inputs]
        self.devices = list({tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")})
        types = {"cpu", *(device.type for device in self.devices)}
        self.precision = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in types]
        self.random: list[list[Tensor]] = []

    @torch.no_grad()
    def encoded(self) -> Encoded:
        """Encode all chunks without a graph, and record their random states."""
        parts = []
        for rows in self.rows:
            self.random.append(_random_states(self.devices))
            parts.append(self._of(rows).clone())  # a CUDA graph writes the next chunk to the same place
        return torch.cat(parts)

    @torch.enable_grad()
    def encode_again(self, gradient: Encoded) -> None:
        """Encode each chunk again, with a graph, and propagate its part of the gradient."""
        with self.first.modes(), _random_kept(self.devices), _statistics_kept(self.cache.module):
            for rows, states in zip(self.rows, self.random, strict=True):
                self.first.check()
                _set_random_states(self.devices, states)
                last = rows is self.rows[-1]
                with nullcontext() if last else getattr(self.cache.module, "no_sync", nullcontext)():
                    torch.autograd.backward(self._of(rows), gradient[rows])

    def _of(self, rows: slice) -> Encoded:
        inputs, named = _mapped(self.inputs, lambda leaf: _cut(leaf, rows))
        with ExitStack() as precision:
            for kind, enabled, dtype in self.precision:
                precision.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            # Autocast caches the weights that it has cast, together with the graph (or none) of another chunk.
            torch.clear_autocast_cache()
            vectors = self.cache.encode(*inputs, **named)
            torch.clear_autocast_cache()
        if not isinstance(vectors, Tensor) or len(vectors) != rows.stop - rows.start:
            got = f"{tuple(vectors.shape)}" if isinstance(vectors, Tensor) else type(vectors).__name__
            raise ArgumentError("GradCache", "an encoder that returns one vector per row", f"{got} for {rows}")
        return vectors


class _FirstPass:
    """State of the encoder and its inputs in the first pass, to be the same in the second."""

    def __init__(self, module: nn.Module, inputs: list[Tensor]) -> None:
        self.module, self.inputs = module, inputs
        self.collects = _collects_gradients(module)  # FSDP replaces the weights while it encodes
        self.weights = list(module.parameters())
        self.versions = [*map(_version, inputs)], [*map(_version, self.weights)]
        self.training = {part: part.training for part in module.modules()}
        self.buffers = {name: (buffer, _version(buffer)) for name, buffer in module.named_buffers()}
        self.copies: dict[str, Tensor] = {}
        self.places: list[tuple[Tensor, int]] = []

    def ended(self) -> None:
        """Keep the buffers, except those that the encoder writes itself, such as running statistics and counters."""
        unchanged = [name for name, (buffer, version) in self.buffers.items() if _version(buffer) == version]
        self.copies = {name: self.buffers[name][0].clone() for name in unchanged}
        trained = [] if self.collects else [each for each in self.weights if each.requires_grad]  # FSDP moves weights
        plain = [each for each in (*trained, *self.inputs) if type(each) in (Tensor, nn.Parameter)]
        self.places = [(each, each.data_ptr()) for each in plain]

    def check(self) -> None:
        """Raise if inputs, weights or buffers have changed since the first pass."""
        inputs, weights = self.versions
        if inputs != [*map(_version, self.inputs)]:
            raise _changed(
                "inputs",
                "overwritten inputs",
                "call backward() first, and do not overwrite them in the encoder",
            )
        replaced = [*map(id, self.module.parameters())] != [*map(id, self.weights)]
        if (replaced and not self.collects) or weights != [*map(_version, self.weights)]:
            raise _changed("weights", "changed weights", "call backward() before optimizer.step()")
        if any(each.data_ptr() != place for each, place in self.places):  # no write, so that the version is the same
            raise _changed("weights and inputs", "another tensor as .data", "call backward() before you assign it")
        for name, now in self.module.named_buffers():
            before, version = self.buffers.get(name, (now, None))
            untouched = now is before and _version(now) == version
            if name in self.copies and not untouched and not torch.equal(now, self.copies[name]):
                raise _changed("buffers", f"new values in {name!r}", "call backward() before you change them")

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Set all modules to the mode, train or eval, of the first pass."""
        now = {part: part.training for part in self.training}
        _set_modes(self.training)
        try:
            yield
        finally:
            _set_modes(now)


def _set_modes(training: dict[nn.Module, bool]) -> None:
    for part, mode in training.items():
        if part.training != mode:
            part.training = mode


def _changed(name: str, got: str, fix: str) -> DataChanged:
    return DataChanged("GradCache", f"the same {name} in the forward and the backward pass", got, fix)


def _version(tensor: Tensor) -> int | None:
    """Return how many times a tensor was written to; None for tensors of the inference mode, which do not count."""
    return None if tensor.is_inference() else tensor._version


@contextmanager
def _statistics_kept(module: nn.Module) -> Iterator[None]:
    """Suspend the update of running statistics."""
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
    """Restore the random states after the block."""
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
    return () if device.type == "mps" else (device,)  # there is only one


def _leaves(value: Any) -> list[Any]:
    """Return the leaves of nested dicts, lists and tuples."""
    if isinstance(value, Mapping | list | tuple):
        return [leaf for part in (value.values() if isinstance(value, Mapping) else value) for leaf in _leaves(part)]
    return [value]


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors among the leaves, and those in objects with rows, such as batches of graphs."""
    leaves = _leaves(value)
    inside = [
        _leaves(getattr(leaf, "__dict__", {}))
        for leaf in leaves
        if isinstance(leaf, SplitByRows) and not isinstance(leaf, Tensor)
    ]
    return [leaf for part in (leaves, *inside) for leaf in part if isinstance(leaf, Tensor)]


def _num_rows(inputs: tuple[Any, Any]) -> int:
    """Return the number of rows of the inputs; raise if they differ."""
    leaves = [leaf for leaf in _leaves(inputs) if isinstance(leaf, SplitByRows)]
    sizes = {len(leaf) for leaf in leaves if not isinstance(leaf, Tensor) or leaf.ndim}
    if len(sizes) != 1:
        raise ArgumentError("GradCache", "tensors with one entry per row", f"sizes={sorted(sizes)}")
    return sizes.pop()


def _cut(leaf: Any, rows: slice) -> Any:
    """Return these rows of a leaf; leaves without rows are unchanged."""
    if isinstance(leaf, Tensor):
        return leaf[rows] if leaf.ndim else leaf
    return leaf[rows] if isinstance(leaf, SplitByRows) else leaf


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to the leaves of nested dicts, lists and tuples."""
    if isinstance(value, MutableMapping):  # keep the type: a BatchEncoding is read by its attributes
        part = copy(value)
        part.update({name: _mapped(each, change) for name, each in value.items()})
        return part
    if isinstance(value, Mapping):
        return {name: _mapped(part, change) for name, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(part, change) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(part, change) for part in value)
    return change(value)
