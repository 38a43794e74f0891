"""Triton, 3.4 or newer. Without it the modules of the kernels import all the same, and cannot run."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

try:
    _triton: Any = importlib.import_module("triton")
    tl: Any = importlib.import_module("triton.language")
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    _triton = tl = None

installed = tl is not None and hasattr(_triton, "knobs")
"""Triton 3.4 or newer: in the interpreter of 3.2 the kernels count wrong numbers of positives."""
interpreted = installed and bool(_triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on the CPU (TRITON_INTERPRET=1 before the first import)."""


def jit(function: Callable[..., Any]) -> Any:
    return _triton.jit(function) if installed else function


class Launched:
    """A kernel that the host launches, ``kernel[grid](*arguments, **constants)``, in a shorter time than Triton's own.

    What Triton looks at before each launch of small batches takes longer than the kernels. A kernel that was launched
    with the same constants and with arguments of the same kinds, those that Triton distinguishes, is launched at once.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._known: dict[tuple[Any, ...], Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if interpreted:
            self.kernel[grid](*args, **constants)
            return
        device = _device(args)
        if device != torch.cuda.current_device():  # Triton launches on the current one
            with torch.cuda.device(device):
                self._launch(grid, *args, **constants)
            return
        key = _key(device, args, constants)
        known = self._known.get(key)
        if known is None:
            self._known[key] = self.kernel[grid](*args, **constants)
        else:
            known[(*grid, 1, 1)[:3]](*args, *self._values(args, constants))

    def _values(self, args: tuple[Any, ...], constants: dict[str, Any]) -> list[Any]:
        return [constants[name] for name in self.kernel.arg_names[len(args) :]]

    def bind(self, *args: Any, **constants: Any) -> Callable[[tuple[int, ...], int], None]:
        """``launch(grid, base)`` is ``kernel[grid](base, *args, **constants)``, for bases that are multiples of 16.

        For many launches whose arguments are the same but for the base: they are looked at once.
        """
        known, every = None, (0, *args)

        def launch(grid: tuple[int, ...], base: int) -> None:
            nonlocal known
            if known is None or _device(args) != torch.cuda.current_device():
                self._launch(grid, base, *args, **constants)
                known = self._known.get(_key(_device(args), every, constants))
            else:
                known[(*grid, 1, 1)[:3]](base, *args, *values)

        values = [] if interpreted else self._values(every, constants)
        return launch


def launched(function: Callable[..., Any]) -> Any:
    return Launched(jit(function)) if installed else function


def _device(args: tuple[Any, ...]) -> int:
    return next(each.device.index for each in args if isinstance(each, torch.Tensor))


def _key(device: int, args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
    """What Triton distinguishes."""
    kinds = [
        None if each is None
        else (each.dtype, each.data_ptr() % 16) if isinstance(each, torch.Tensor)
        else (each == 1, each % 16 == 0, each < 2**31) if isinstance(each, int)
        else type(each)
        for each in args
    ]  # fmt: skip
    return (device, *constants.values(), *kinds)
