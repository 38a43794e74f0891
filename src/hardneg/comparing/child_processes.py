"""Ends the processes of the runs when their comparison ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hardneg.comparing.memory import NotBegun


class ChildPipes:
    """One pipe per run: a run ends when its pipe is closed, so that a failure or Ctrl-C need not wait for it."""

    def __init__(self) -> None:
        self._ends: set[int] = set()
        self._closed = False
        self._lock = threading.Lock()

    @contextmanager
    def one(self) -> Iterator[int]:
        """The end of a pipe for the standard input of a run; none is made once the others were closed."""
        with self._lock:
            if self._closed:
                raise NotBegun("the comparison has ended")
            here, there = os.pipe()
            self._ends.add(there)
        try:
            yield here
        finally:
            os.close(here)
            with self._lock:
                if there in self._ends:
                    self._ends.remove(there)
                    os.close(there)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            while self._ends:
                os.close(self._ends.pop())
