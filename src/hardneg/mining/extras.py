"""Optional packages, imported where they are needed; a missing one says what to install."""

from __future__ import annotations

import importlib
from typing import Any


def needed(module: str, extra: str, who: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ImportError(f"{who} needs {module.split('.')[0]}: pip install 'hardneg[{extra}]'.") from None
