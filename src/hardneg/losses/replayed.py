"""Run a loss with state as one CUDA graph: its value, its gradient and the update of its state in one launch.

SogCLR launches twice and EMC2 five times as many small kernels as SimCLR, which takes a host longer than the GPU needs
to run them. The trainer wraps such losses in ``Replayed``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hardneg.core.tensors import first_derivative_only
from hardneg.kernels.cuda_graphs import capture
from hardneg.state.stateful import Stateful

WARMUP_CALLS = 2
"""Calls before a capture: they compile, and load what cannot be loaded during a capture."""
DEVICE = "cuda"
MAX_SHAPES = 4
"""Largest number of batch shapes that are captured; batches of further shapes run without a graph."""


class Replayed:
    """Calls ``loss(z1, z2, *others)`` through a CUDA graph on a GPU, and directly elsewhere.

    All state of the loss must be in its buffers and its diagnostics in ``last``. Everything else that it depends on,
    such as attributes with numbers, must be the same for all batches of one shape. Calls 1, 2, 4, 8 ... run without the
    graph, to check what a graph cannot check: the ids.

    Args:
        loss: The loss to wrap.
    """

    def __init__(self, loss: nn.Module) -> None:
        self.loss: Any = loss
        self._steps: dict[tuple[Any, ...], _Step] = {}

    def __call__(self, z1: Tensor, z2: Tensor, *others: Tensor | None) -> Tensor:
        """Compute the loss of two views; further tensors, such as ids, are passed on."""
        inputs, buffers = (z1, z2, *others), list(self.loss.buffers())
        learns = z1.requires_grad and z2.requires_grad and torch.is_grad_enabled()
        if not learns or z1.device.type != DEVICE:
            return self._plain(*inputs)
        kinds = [None if each is None else (each.shape, each.dtype, each.device) for each in inputs]
        places = [buffer.data_ptr() for buffer in buffers]  # a buffer that moved (by ``to``) needs another graph
        key = (*kinds, *places, self.loss.training, torch.is_autocast_enabled(z1.device.type))
        step = self._steps.get(key)
        if step is None:
            if len(self._steps) >= MAX_SHAPES:
                return self._plain(*inputs)
            step = self._steps[key] = _Step(self.loss, buffers, inputs)
        value, *last = _Replay.apply(step, *inputs)  # type: ignore[no-untyped-call]
        self.loss.last = dict(zip(step.names, last, strict=True))
        found: Tensor = value
        return found

    def _plain(self, *inputs: Tensor | None) -> Tensor:
        value: Tensor = self.loss(*inputs)
        return value


class _Found(NamedTuple):
    numbers: list[Tensor]
    """The value, and the diagnostics in ``last``."""
    gradients: list[Tensor]
    """Gradients of the value by the two views."""


class _Step:
    """One captured step for batches of one shape, with inputs at a fixed place in memory."""

    def __init__(self, loss: Any, buffers: list[Tensor], inputs: tuple[Tensor | None, ...]) -> None:
        self.loss, self.buffers = loss, buffers
        self.inputs = [None if each is None else torch.empty_like(each) for each in inputs]
        self.names: list[str] = []
        self.calls = 0
        self.graph: Any = None
        self.captured = _Found([], [])

    def __call__(self, inputs: tuple[Tensor | None, ...]) -> _Found:
        for mine, given in zip(self.inputs, inputs, strict=True):
            if mine is not None and given is not None:
                mine.copy_(given)
        self.calls += 1
        if self.calls == WARMUP_CALLS + 1:
            self.graph = capture(self._capture, self.buffers[0].device)
        if self.graph is not None and self.calls & (self.calls - 1):
            self.graph.replay()
            found = _Found(*([each.clone() for each in part] for part in self.captured))
        else:
            for each in self.loss.modules():
                if isinstance(each, Stateful):
                    each.check_next()
            found = self._work()
        if (
            self.calls > WARMUP_CALLS
        ):  # values cached from buffers (see ``Stateful``) must notice that the graph changed them
            torch.autograd.graph.increment_version(self.buffers)
        return found

    def _capture(self) -> None:
        self.captured = self._work()

    def _work(self) -> _Found:
        with torch.enable_grad():
            views = [each.detach().requires_grad_() for each in self.inputs[:2] if each is not None]
            value: Tensor = self.loss(*views, *self.inputs[2:])
            gradients = torch.autograd.grad(value, views)
        self.names = list(self.loss.last)
        return _Found([value.detach(), *self.loss.last.values()], list(gradients))


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: _Step, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        numbers, gradients = step(inputs)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(*numbers[1:])
        return tuple(numbers)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, upstream: Tensor, *rest: None) -> tuple[Tensor | None, ...]:
        gradients = (upstream * gradient for gradient in ctx.saved_tensors)
        return None, *gradients, *(None for _ in range(len(ctx.needs_input_grad) - 3))
