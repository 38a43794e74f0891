"""Python processes started by this one, and the memory of this one and of the machine.

Child processes must not import from the current folder, where an ``accelerate.py`` with the data would be run.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

_NAME = "PYTHONSAFEPATH"  # the environment variable behind python -P


def python(*arguments: str) -> list[str]:
    """Return the command of a Python process that does not import from the current folder.

    ``python -c`` and ``python -m`` look there first. PYTHONPATH still counts.

    >>> python("-m", "hardneg")[1:]
    ['-P', '-m', 'hardneg']
    """
    return [sys.executable, "-P", *arguments]


def safe_environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment with ``changes``, in which no Python process imports from the current folder."""
    return {**os.environ, **(changes or {}), _NAME: "1"}


def make_children_safe() -> None:
    """Keep the current folder out of the import path of every Python process that this one starts from now on.

    This includes those of libraries: spawned workers, compilers, raylets.
    """
    os.environ[_NAME] = "1"


@contextmanager
def safe_children() -> Iterator[None]:
    """Apply ``make_children_safe`` to the processes that are started inside the block."""
    before = os.environ.get(_NAME)
    make_children_safe()
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NAME]
        else:
            os.environ[_NAME] = before


def memory_bytes() -> int:
    """Return the memory of this machine in bytes, or 1 TiB if the system does not report it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 1 << 40


def peak_bytes() -> int | None:
    """Return the peak memory of this process in bytes; None if neither the system nor psutil reports it."""
    with suppress(ImportError):
        resource = importlib.import_module("resource")
        peak: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak
    with suppress(ImportError):
        used = importlib.import_module("psutil").Process().memory_info()
        return getattr(used, "peak_wset", None)
    return None
