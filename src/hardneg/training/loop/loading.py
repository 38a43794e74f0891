"""The batches of an epoch, prepared in advance by worker processes where the data needs it.

Data in memory makes its views in the training process. Data that ``fetches``, such as image files, goes through torch's
``DataLoader``: the sampler of the run chooses the batches, and workers prepare each as a whole. The sampler runs ahead
of training, but never into a segment whose graph training has not delivered yet, so that batches do not depend on the
number of workers. The position of a run is that of training.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from hardneg.batching.sampler import PlanIterator, PlannedBatchSampler
from hardneg.core.errors import HardnegError
from hardneg.training.data.items import PREFETCHED, Items
from hardneg.training.options import TrainOptions

MOST_WORKERS = 8
"""Largest default number of workers."""

_START = "fork" if sys.platform == "linux" else None
"""Start method of workers: forks share the memory of training, and end if it is killed, unlike those of a server."""


class Loaded(NamedTuple):
    """A batch as the loop receives it.

    Attributes:
        positions: Positions of the items [b].
        fetched: What ``Items.fetch`` returned for them, or None for data that does not fetch.
    """

    positions: Tensor
    fetched: Tensor | None = None


class WorkerEnded(HardnegError, RuntimeError):
    """A worker process of the loader has ended unexpectedly."""


def num_workers(options: TrainOptions) -> int:
    """Return the number of worker processes of each rank."""
    if options.workers is not None:
        return options.workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_WORKERS, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


class Loading:
    """Yields the batches of an epoch in the order of the sampler.

    Args:
        data: The training items on the CPU, prepared.
        sampler: The sampler of the run.
        options: Options of the run.
        may_plan: Whether the segment that begins at a batch of an epoch can be planned already, (epoch, batch) -> bool.
        pin: Whether batches are placed in pinned memory, for transfers to a GPU.
    """

    def __init__(
        self,
        data: Items,
        sampler: PlannedBatchSampler,
        options: TrainOptions,
        may_plan: Callable[[int, int], bool],
        pin: bool,
    ) -> None:
        self.sampler = sampler
        self._ahead = _Ahead(sampler, may_plan)
        self._loader: DataLoader[Any] | None = None
        if data.fetches:
            workers = num_workers(options)
            self._loader = DataLoader(
                _Fetched(data, options),
                batch_size=None,
                sampler=self._ahead,
                num_workers=workers,
                pin_memory=pin,
                persistent_workers=workers > 0,
                multiprocessing_context=_START if workers else None,
                prefetch_factor=PREFETCHED if workers else None,
                generator=torch.Generator(),  # else each pass would draw from the generator of the run
            )

    def epoch(self, epoch: int) -> Iterator[Loaded]:
        """Yield the batches of an epoch, from the position at which the sampler resumes.

        Raises:
            WorkerEnded: If a worker was killed.
        """
        self.sampler.set_epoch(epoch)
        if self._loader is None:
            yield from (Loaded(torch.tensor(batch)) for batch in self.sampler)
            return
        self._ahead.start(epoch)
        while not self._ahead.finished:  # the loader ends early where the next segment cannot be planned yet
            batches = _without_signals(self._loader)
            while (found := _next(batches)) is not None:
                if isinstance(found, HardnegError):
                    raise found
                yield Loaded(*found)

    def close(self) -> None:
        """End the workers at once: left to the garbage collector, each of them may take seconds."""
        batches = getattr(self._loader, "_iterator", None)
        self._loader = None
        if batches is not None:
            batches._shutdown_workers()


def _without_signals(loader: DataLoader[Any]) -> Iterator[Any]:
    """Begin a pass without torch's handler of SIGCHLD.

    The handler raises for a killed worker wherever training is, also within an update, after which nothing can be
    saved. Without it, the loader finds such a worker when it waits for a batch.
    """
    if not hasattr(signal, "SIGCHLD") or threading.current_thread() is not threading.main_thread():
        return iter(loader)
    before = signal.getsignal(signal.SIGCHLD)
    batches = iter(loader)
    signal.signal(signal.SIGCHLD, before)
    return batches


def _next(batches: Iterator[Any]) -> Any:
    """Return the next batch or None; raise ``WorkerEnded`` if a worker was killed."""
    try:
        return next(batches, None)
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        fix = "continue with --resume; use fewer --workers if memory was short"
        raise WorkerEnded("train", "its worker processes to run", str(error).splitlines()[0], fix) from error


class _Ahead(Sampler[tuple[int, list[int]]]):
    """The batches of an epoch with its number, as far as they can be planned."""

    def __init__(self, sampler: PlannedBatchSampler, may_plan: Callable[[int, int], bool]) -> None:
        self._sampler, self._may_plan = sampler, may_plan
        self._batches: PlanIterator
        self._epoch, self._position, self.finished = 0, 0, True

    def start(self, epoch: int) -> None:
        """Begin an epoch."""
        self._batches = iter(self._sampler)
        self._epoch, self._position, self.finished = epoch, self._batches.position, False

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        while self._position % self._sampler.segment or self._may_plan(self._epoch, self._position):
            batch = next(self._batches, None)
            if batch is None:
                self.finished = True
                return
            self._position += 1
            yield self._epoch, batch


class _Fetched(Dataset[Any]):
    """The data set of the loader: a batch with what the items fetch for it."""

    def __init__(self, data: Items, options: TrainOptions) -> None:
        self._data, self._options = data, options

    def __getitem__(self, batch: tuple[int, list[int]]) -> Any:
        epoch, rows = batch
        index = torch.tensor(rows)
        try:
            return index, self._data.fetch(index, self._options.epoch_of_views(epoch), self._options.seed)
        except HardnegError as error:  # raised by the loop: the loader would only keep its text
            return error
