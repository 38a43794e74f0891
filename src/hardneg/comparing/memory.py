"""Parallel runs on one machine: as many as memory allows, and none that outlives its comparison.

``Machine`` decides when another run may start, from the peak memory that earlier runs recorded. ``ChildPipes`` ends the
runs when the comparison fails or is stopped. The caller is runs.py; the free functions measure memory, cores and GPUs.
"""

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
from hardneg.training.loop.runs import PeakMemory, Run

FILLED = 0.9
"""Share of the free memory that all runs together may use."""
POLL_SECONDS = 0.5
"""Seconds between two looks at the memory that runs have recorded."""


class NotStarted(RuntimeError):
    """A waiting run is not started, because another one failed or the comparison was stopped."""


@dataclass
class RunPlace:
    """A device for runs: the CPU, or one GPU.

    Attributes:
        gpu: Name of the GPU in CUDA_VISIBLE_DEVICES; None for the CPU.
        free: Bytes of GPU memory that were free before any of these runs.
        running: Number of runs on the device now.
    """

    gpu: str | None = None
    free: int = 0
    running: int = 0

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables that make a subprocess use this device."""
        return {} if self.gpu is None else {"CUDA_VISIBLE_DEVICES": self.gpu}


@dataclass
class Machine:
    """Starts a run next to others once one has recorded its memory use (after its first epoch) and that much is free.

    Attributes:
        jobs: Maximum number of parallel runs.
        host: Bytes of main memory that were free before any of these runs.
        places: Devices for runs.
        under_way: Runs that have started and not ended.
        largest: Largest memory use recorded so far, of the host and of the device.
        closed: True when no further run may start.
    """

    jobs: int
    host: int
    places: list[RunPlace]
    under_way: list[Run] = field(default_factory=list)
    largest: PeakMemory = field(default_factory=lambda: PeakMemory(0, 0))
    closed: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def reserve(self, run: Run) -> Iterator[RunPlace]:
        """Wait for enough memory, and yield a device that is reserved until the block ends.

        Raises:
            NotStarted: If the comparison has ended.
        """
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
        """Update the largest memory use from the runs that have recorded theirs."""
        known = [memory for run in runs if (memory := run.memory())]
        self.largest = PeakMemory(*(max(sizes) for sizes in zip(self.largest, *known, strict=True)))

    def shrink(self, started_with: int) -> bool:
        """Allow fewer parallel runs after one ran out of memory.

        Args:
            started_with: Value of ``jobs`` when that run started.

        Returns:
            False if there was only one run at a time, so that fewer are impossible.
        """
        with self._changed:
            if self.jobs == started_with:
                self.jobs = max(1, min(self.jobs, len(self.under_way)) - 1)
            return self.jobs < started_with

    def close(self) -> None:
        """Start no further runs; those that wait raise ``NotStarted``."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def _place(self) -> RunPlace | None:
        """Return the least used device if the memory suffices for one more run, else None."""
        if self.closed:
            raise NotStarted("the comparison has ended")
        place = min(self.places, key=lambda one: one.running)
        if not self.under_way:
            return place
        self.learn(self.under_way)
        after = len(self.under_way) + 1
        fits = after * self.largest.host <= FILLED * self.host
        fits &= (place.running + 1) * self.largest.device <= FILLED * place.free
        return place if self.largest.host and fits and after <= self.jobs else None


def this_machine(jobs: int, *, on_gpu: bool) -> Machine:
    """Return a machine with the memory that is free now."""
    return Machine(jobs, free_memory(), _gpus() if on_gpu else [RunPlace()])


def free_memory() -> int:
    """Return the bytes that new processes may use: those of the machine, or of the container if it has fewer."""
    free: int = optional("psutil", "compare", extra="train").virtual_memory().available
    limits = Path("/sys/fs/cgroup")
    try:
        most, held = (int((limits / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no such files, or "max"
        return free
    return min(free, most - held + _cached(limits))


def _cached(limits: Path) -> int:
    """Return the bytes of the inactive page cache, which count as used but are freed on demand."""
    try:
        lines = (limits / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


def num_cores() -> int:
    """Return the number of cores that this process may use; in a container often fewer than the machine has."""
    have = os.cpu_count() or 1
    return min(have, len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else have


def _gpus() -> list[RunPlace]:
    """Query the free memory of all GPUs in a subprocess, since CUDA keeps some memory of the process that asks."""
    query = "import torch; print(*(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())))"
    answer = subprocess.run(python("-c", query), capture_output=True, text=True)
    if answer.returncode:
        why = (answer.stderr.strip().splitlines() or ["no output"])[-1]
        raise OSError(f"compare cannot read the free memory of the GPUs: {why!r}; use --option device=cpu.")
    free_sizes = answer.stdout.split()
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(len(free_sizes))))
    return [RunPlace(name.strip(), int(free)) for name, free in zip(names.split(","), free_sizes, strict=False)]


class ChildPipes:
    """One pipe per run: a run ends when its pipe is closed.

    So a failure or Ctrl-C need not wait for runs to end by themselves, and runs do not outlive a killed comparison.
    """

    def __init__(self) -> None:
        self._ends: set[int] = set()
        self._closed = False
        self._lock = threading.Lock()

    @contextmanager
    def one(self) -> Iterator[int]:
        """Yield the read end of a new pipe, for the standard input of a run.

        Raises:
            NotStarted: If the pipes were closed.
        """
        with self._lock:
            if self._closed:
                raise NotStarted("the comparison has ended")
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
        """Close all pipes, which ends all runs."""
        with self._lock:
            self._closed = True
            while self._ends:
                os.close(self._ends.pop())
