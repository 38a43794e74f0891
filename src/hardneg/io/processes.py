"""Python processes that this one starts: none of them imports from the current folder."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

_NAME = "PYTHONSAFEPATH"


def python(*arguments: str) -> list[str]:
    """Build the command of a Python process that does not import from the current folder.

    ``python -c`` and ``python -m`` look there first, so that an ``accelerate.py`` beside the data would be run.
    PYTHONPATH still counts.

    >>> python("-m", "hardneg")[1:]
    ['-P', '-m', 'hardneg']
    """
    return [sys.executable, "-P", *arguments]


def safe_environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment with ``changes``, in which every Python process leaves the current folder out of its path."""
    return {**os.environ, **(changes or {}), _NAME: "1"}


def make_children_safe() -> None:
    """Leave the current folder out of the path of every Python process that this one starts from now on.

    This includes those of libraries: spawned workers, compilers, raylets.
    """
    os.environ[_NAME] = "1"


@contextmanager
def safe_children() -> Iterator[None]:
    """Do what ``make_children_safe`` does for the processes that are started inside the block."""
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
