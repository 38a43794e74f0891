"""Runs side by side on a machine: as many as memory allows, and none that outlives its comparison."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hardneg.core.errors import optional
from hardneg.io.processes import python
from hardneg.training.runs import PeakMemory, Run

FILLED = 0.9
"""The share of what was free that runs may take together."""
POLL_SECONDS = 0.5


class NotBegun(RuntimeError):
    """A waiting run is not started, since another failed or the comparison was stopped."""


@dataclass
class RunPlace:
    """Where runs go: the CPU, or a GPU by the name that CUDA_VISIBLE_DEVICES knows it by."""

    gpu: str | None = None
    free: int = 0
    """Bytes of the GPU, before any of these runs."""
    running: int = 0

    @property
    def environ(self) -> dict[str, str]:
        return {} if self.gpu is None else {"CUDA_VISIBLE_DEVICES": self.gpu}


@dataclass
class Machine:
    """Starts a run beside others once one has recorded its memory use (after its first epoch) and that much is free."""

    jobs: int
    host: int
    """Bytes of memory that were free before any of these runs."""
    places: list[RunPlace]
    under_way: list[Run] = field(default_factory=list)
    largest: PeakMemory = field(default_factory=lambda: PeakMemory(0, 0))
    closed: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def beside_others(self, run: Run) -> Iterator[RunPlace]:
        """Waits until there is enough memory; the place is reserved until the run ends."""
        with self._changed:
            while (place := self._place()) is None:
                self._changed.wait(POLL_SECONDS)
            place.running += 1
            self.under_way.append(run)
        try:
            yield place
        finally:
            with self._changed:
                self.learn([run])
                place.running -= 1
                self.under_way.remove(run)
                self._changed.notify_all()

    def learn(self, runs: Iterable[Run]) -> None:
        """Updates the largest memory use from those runs that have recorded theirs."""
        known = [memory for run in runs if (memory := run.memory())]
        self.largest = PeakMemory(*(max(sizes) for sizes in zip(self.largest, *known, strict=True)))

    def shrink(self, begun_with: int) -> bool:
        """Allows fewer at once after a run, started with this ``jobs``, ran out of memory; False if it was 1."""
        with self._changed:
            if self.jobs == begun_with:
                self.jobs = max(1, min(self.jobs, len(self.under_way)) - 1)
            return self.jobs < begun_with

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def _place(self) -> RunPlace | None:
        if self.closed:
            raise NotBegun("the comparison has ended")
        place = min(self.places, key=lambda one: one.running)
        if not self.under_way:
            return place
        self.learn(self.under_way)
        after = len(self.under_way) + 1
        fits = after * self.largest.host <= FILLED * self.host
        fits &= (place.running + 1) * self.largest.device <= FILLED * place.free
        return place if self.largest.host and fits and after <= self.jobs else None


def this_machine(jobs: int, *, on_gpu: bool) -> Machine:
    """This machine and what it has free now."""
    return Machine(jobs, free_memory(), _gpus() if on_gpu else [RunPlace()])


def free_memory() -> int:
    """Bytes that processes here may still take: those of the machine, or of the container if it has fewer."""
    free: int = optional("psutil", "compare", extra="train").virtual_memory().available
    limits = Path("/sys/fs/cgroup")
    try:
        most, held = (int((limits / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no such files, or "max"
        return free
    return min(free, most - held + _cached(limits))


def _cached(limits: Path) -> int:
    """Bytes of the inactive page cache, which count as used and are freed on demand."""
    try:
        lines = (limits / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


def num_cores() -> int:
    """The cores that this process may use, which in a container are often fewer than the machine has."""
    have = os.cpu_count() or 1
    return min(have, len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else have


def _gpus() -> list[RunPlace]:
    """Queried in a separate process, since CUDA keeps some memory in the process that queries it."""
    query = "import torch; print(*(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())))"
    answer = subprocess.run(python("-c", query), capture_output=True, text=True)
    if answer.returncode:
        why = (answer.stderr.strip().splitlines() or ["no output"])[-1]
        raise OSError(f"compare needs GPUs that say what they have free, got {why!r}; use --option device=cpu.")
    free_sizes = answer.stdout.split()
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(len(free_sizes))))
    return [RunPlace(name.strip(), int(free)) for name, free in zip(names.split(","), free_sizes, strict=False)]


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
