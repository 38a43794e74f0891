"""Triton where it is installed. Without it the modules of the kernels still import, and ``supports`` names the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

tl: Any = None
try:
    import triton
    import triton.language as tl

    jit: Callable[..., Any] = triton.jit
    interpreted = bool(triton.knobs.runtime.interpret)
    """Whether kernels run in Triton's interpreter, on the CPU (TRITON_INTERPRET=1 before the first import)."""
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise

    def jit(function: Any) -> Any:
        return function

    interpreted = False

installed = tl is not None
