"""What the system says of this machine and this process. Not every system does: Windows has neither call."""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import suppress


def memory_bytes() -> int:
    """The memory of this machine."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 1 << 40


def peak_bytes() -> int | None:
    """The most memory that this process has held; None where the system does not say, nor psutil (extra ``train``)."""
    with suppress(ImportError):
        resource = importlib.import_module("resource")
        peak: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak
    with suppress(ImportError):
        used = importlib.import_module("psutil").Process().memory_info()
        return getattr(used, "peak_wset", None)
    return None
