"""Types, pairings, objectives, schedules, draws and errors: what everything else stands on."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Modules of this room when first used, so that errors and schedules can be had without torch."""
    try:
        return importlib.import_module(f"hardneg.core.{name}")
    except ModuleNotFoundError:
        raise AttributeError(f"module 'hardneg.core' has no attribute {name!r}") from None
