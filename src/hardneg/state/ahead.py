"""Random numbers of the next step, made on the host while a GPU works at this one.

They are those of a CPU's generator, so that they are the same on every device; made when they are needed, and copied
from memory that is not pinned, they would cost a step of EMC2 some milliseconds.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hardneg.core.keyed import generator_at

Wanted = tuple[tuple[int, ...], int, int, int]


class Ahead:
    """Uniform numbers by (shape, seed, step, stream). A copy, or one that was pickled, starts without any."""

    def __init__(self) -> None:
        self._next: dict[int, tuple[Wanted, Future[Tensor]]] = {}  # by stream

    def __call__(self, shape: tuple[int, ...], seed: int, step: int, stream: int, device: torch.device) -> Tensor:
        if device.type == "cpu":
            return self._made(shape, seed, step, stream)
        wanted, made = self._next.get(stream, (None, None))
        here = made.result() if made is not None and wanted == (shape, seed, step, stream) else None
        numbers = (self._pinned(shape, seed, step, stream) if here is None else here).to(device, non_blocking=True)
        after = (shape, seed, step + 1, stream)
        self._next[stream] = after, _thread().submit(self._pinned, *after)
        return numbers

    def _made(self, shape: tuple[int, ...], seed: int, step: int, stream: int) -> Tensor:
        return torch.rand(shape, generator=generator_at(seed, step, stream), dtype=torch.float64)

    def _pinned(self, *wanted: Any) -> Tensor:
        numbers = self._made(*wanted)
        return numbers.pin_memory() if torch.cuda.is_available() else numbers

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "hardneg-random")
