"""Triton, 3.4 or newer. Without it the modules of the kernels import all the same, and cannot run."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from hardneg.core.private_apis import Launched

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


def launched(function: Callable[..., Any]) -> Any:
    return Launched(jit(function), interpreted) if installed else function
