"""How far the runs of a comparison are: lines as they end, the share of those under way, and how long all will take."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from hardneg.training.runs import Run

TAIL = 4096  # bytes of metrics.jsonl that hold its last record
EVERY = 0.5  # seconds
LONG = 60.0
"""Seconds from which an estimate is worth a line."""


@dataclass
class Watcher:
    """Calls ``show`` with a line for each run that ended, and ``moved`` with the runs done, in fractions too."""

    show: Callable[[str], None]
    steps: int = 1  # of a run
    moved: Callable[[float], None] = lambda done: None
    done: int = 0
    total: int = 0  # runs in all; 0: no estimate
    epochs: int = 1
    _first: tuple[float, float] | None = None  # when, and how many runs were done, in fractions
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ended(self, line: str) -> None:
        with self._lock:
            self.done += 1
            self.show(line)
            self.moved(self.done)

    def _estimate(self, done: float) -> None:
        """Once an epoch has been watched, says how long the rest takes; what starts a run is not counted."""
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
                self.show(f"{self.total} runs: about {in_words(left)} to go, by what the first epochs took")
            self.total = 0

    @contextmanager
    def watching(self, under_way: Sequence[Run]) -> Iterator[None]:
        """Looks at the records of these runs until the block ends; the list may change meanwhile."""
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
    """>>> in_words(95), in_words(4000), in_words(200_000)
    ('2 minutes', '1.1 hours', '2.3 days')
    """
    if seconds < 3600:
        minutes = max(1, round(seconds / 60))
        return f"{minutes} minute{'s' * (minutes > 1)}"
    return f"{seconds / 3600:.1f} hours" if seconds < 86_400 else f"{seconds / 86_400:.1f} days"


def step_of(run: Run) -> int:
    """The step of its last record, without reading the others; 0 before the first."""
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
