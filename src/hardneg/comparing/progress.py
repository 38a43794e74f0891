"""Progress of a comparison: a line for each run that ends, the share done, and an estimate of the remaining time.

``Watcher`` reads the last record of every run under way, from a thread; runs.py notifies it of those that end.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from hardneg.training.loop.runs import Run

TAIL = 4096
"""Bytes read from the end of metrics.jsonl, which hold its last record."""
EVERY = 0.5
"""Seconds between two looks at the runs."""
LONG = 60.0
"""Seconds from which an estimate is worth a line."""


@dataclass
class Watcher:
    """Reports the progress of a comparison.

    Attributes:
        show: Called with a line of text for each run that ended, and once with the estimated time.
        steps: Number of training steps of a run.
        moved: Called with the number of runs done, fractions of those under way included.
        done: Number of runs that have ended.
        total: Number of all runs; 0: no estimate is shown.
        epochs: Number of epochs of a run.
    """

    show: Callable[[str], None]
    steps: int = 1
    moved: Callable[[float], None] = lambda done: None
    done: int = 0
    total: int = 0
    epochs: int = 1
    _first: tuple[float, float] | None = None  # time, and number of runs done
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ended(self, line: str) -> None:
        """Count a run that ended, and show its line."""
        with self._lock:
            self.done += 1
            self.show(line)
            self.moved(self.done)

    def _estimate(self, done: float) -> None:
        """Show how long the rest takes, once the runs together have advanced by one epoch.

        The time before the first record is not counted, since it is the start of a process and not training.
        """
        now = time.monotonic()
        if self.total == 0 or done <= 0.0:
            return
        if self._first is None:
            self._first = now, done
            return
        since, before = self._first
        if done - before >= 1.0 / self.epochs:
            left = (self.total - done) * (now - since) / (done - before)
            if left >= LONG:
                self.show(f"{self.total} runs: about {in_words(left)} to go, judging by the first epochs")
            self.total = 0

    @contextmanager
    def watching(self, under_way: Sequence[Run]) -> Iterator[None]:
        """Read the progress of these runs until the block ends; the list may change meanwhile."""
        stop = threading.Event()

        def look() -> None:
            while not stop.wait(EVERY):
                part = sum(min(1.0, step_of(run) / self.steps) for run in list(under_way))
                with self._lock:
                    self.moved(self.done + part)
                    self._estimate(self.done + part)

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def in_words(seconds: float) -> str:
    """Return a duration in words.

    >>> in_words(95), in_words(4000), in_words(200_000)
    ('2 minutes', '1.1 hours', '2.3 days')
    """
    if seconds < 3600:
        minutes = max(1, round(seconds / 60))
        return f"{minutes} minute{'s' * (minutes > 1)}"
    return f"{seconds / 3600:.1f} hours" if seconds < 86_400 else f"{seconds / 86_400:.1f} days"


def step_of(run: Run) -> int:
    """Return the step of the last record of a run, read from the end of its file; 0 before the first record."""
    try:
        with run.metrics_path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL))
            lines = file.read().split(b"\n")[:-1]  # the last one may be half written
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, TypeError, KeyError):
            continue
    return 0
