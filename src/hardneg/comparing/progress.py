"""How far the runs of a comparison are: lines as they end, and the share of those under way."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from hardneg.training.runs import Run

TAIL = 4096  # bytes of metrics.jsonl that hold its last record
EVERY = 0.5  # seconds


@dataclass
class Watcher:
    """Calls ``show`` with a line for each run that ended, and ``moved`` with the runs done, in fractions too."""

    show: Callable[[str], None]
    steps: int = 1  # of a run
    moved: Callable[[float], None] = lambda done: None
    done: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ended(self, line: str) -> None:
        with self._lock:
            self.done += 1
            self.show(line)
            self.moved(self.done)

    @contextmanager
    def watching(self, under_way: Sequence[Run]) -> Iterator[None]:
        """Looks at the records of these runs until the block ends; the list may change meanwhile."""
        stop = threading.Event()

        def look() -> None:
            while not stop.wait(EVERY):
                part = sum(min(1.0, step_of(run) / self.steps) for run in list(under_way))
                with self._lock:
                    self.moved(self.done + part)

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


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
