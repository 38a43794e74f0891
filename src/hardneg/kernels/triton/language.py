"""The import of Triton, 3.4 or newer; without it the modules of the kernels can be imported but not run."""

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
"""True with Triton 3.4 or newer: in the interpreter of 3.2 the kernels return wrong numbers of positives."""
interpreted = installed and bool(_triton.knobs.runtime.interpret)
"""True if kernels run in Triton's interpreter, on the CPU (TRITON_INTERPRET=1 before the first import)."""


def jit(function: Callable[..., Any]) -> Any:
    """Compile a kernel function with Triton; return it unchanged if Triton is not installed."""
    return _triton.jit(function) if installed else function


def launched(function: Callable[..., Any]) -> Any:
    """Compile a kernel that the host launches; return it unchanged if Triton is not installed."""
    return Launched(jit(function), interpreted) if installed else function
