"""Engines: where the pieces of a job are computed.

An engine is a map over tasks, each of which may be killed or run twice: ``Local`` uses processes of
this machine, ``Ranks`` those that torchrun or accelerate launch started, ``Ray`` a Ray cluster whose
machines share the files of the job. ``JobPart`` is one of several independent commands. Results
always travel in files.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import chdir
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch

from hardneg.core.errors import HardnegError, argument_error, optional, warn_once
from hardneg.io.processes import safe_children
from hardneg.mining.options import MineOptions

TRIES = 3
"""Number of times a task whose worker is killed is run: a machine may fail once, a task that kills always does."""


class Work(NamedTuple):
    """A function and the tasks to call it with; both can be pickled, and a task leaves its result in a file.

    Attributes:
        function: Computes a task.
        tasks: The tasks.
        is_done: Whether the result of a task is there.
        done: Called once for each task that is done.
        name: Description of a task in errors.
    """

    function: Callable[[Any], None]
    tasks: Sequence[Any]
    is_done: Callable[[Any], bool]
    done: Callable[[Any], None]
    name: Callable[[Any], str] = str

    def pending(self) -> list[Any]:
        """Return the tasks that are not done, after calling ``done`` for the others."""
        left: list[Any] = []
        for task in self.tasks:
            (self.done if self.is_done(task) else left.append)(task)
        return left


class Engine(ABC):
    """A map over tasks.

    Attributes:
        alone: Whether no other process works on the same output.
    """

    alone = True

    @property
    def first(self) -> bool:
        """True if this process writes the output."""
        return True

    @abstractmethod
    def map(self, work: Work) -> None:
        """Run the tasks that are not done, call ``done`` for each of all, and return when every task is done."""

    def wait(self) -> None:  # noqa: B027 - most engines share nothing
        """Wait for the other processes that share this engine, if there are any."""

    def agree(self, value: str) -> str:
        """Return the value of the first process that shares this engine, the same in all of them."""
        return value

    def leave(self) -> None:  # noqa: B027 - most engines start nothing
        """Stop what the engine started and what would outlive this process."""


class WorkerLost(HardnegError, OSError):
    """A worker process was killed in each of ``tries`` attempts at ``piece``."""

    def __init__(self, piece: str, tries: int, why: str = "") -> None:
        self.piece, self.tries, self.why = piece, tries, why
        fix = "find out what kills it, often too little memory, and run the command again: finished pieces are kept"
        super().__init__("mine", "workers that finish their pieces", piece, fix)
        self.args = (piece, tries, why)

    def _sentence(self) -> str:
        why = f" ({self.why})" if self.why else ""
        return f"mine: the worker process of {self.piece} was killed {self.tries} times{why}{self._then()}."


class ClusterLost(HardnegError, OSError):
    """The Ray cluster cannot be reached, or stopped before all pieces were done."""


class PartDone(Exception):
    """Raised by a part that has done its share of a stage while other parts have not done theirs."""


@dataclass(frozen=True)
class JobPart(Engine):
    """Part ``number`` of ``of``, counted from 0: every ``of``-th task of each stage.

    After its share of a stage it continues if the other parts have done theirs; otherwise it raises ``PartDone``.
    """

    number: int
    of: int
    first = alone = False

    @classmethod
    def parse(cls, text: str) -> JobPart:
        """Read a part written as i/n.

        Raises:
            ArgumentError: If the text is not i/n with i from 0 to n - 1.

        Example:
            >>> JobPart.parse("0/4")
            JobPart(number=0, of=4)
        """
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        if found is None or int(found[1]) >= int(found[2]):
            raise argument_error("mine", "a part as i/n, with i from 0 to n - 1", "part", text)
        return cls(int(found[1]), int(found[2]))

    def map(self, work: Work) -> None:
        """Run this part's share of the tasks; raise ``PartDone`` if others are missing."""
        for task in work.tasks[self.number :: self.of]:
            if not work.is_done(task):
                work.function(task)
            work.done(task)
        for i, task in enumerate(work.tasks):
            if i % self.of != self.number:
                if not work.is_done(task):
                    raise PartDone
                work.done(task)


@dataclass(frozen=True)
class Local(Engine):
    """Worker processes of this machine.

    They are forks of this process where the system supports it, so that nothing is loaded twice.

    Attributes:
        workers: Number of processes; 0 means one per core that torch uses, or one if there is a GPU.
        device: Device of the search.
    """

    workers: int = 1
    device: str | None = None

    @property
    def number(self) -> int:
        """Number of processes to use."""
        on_gpu = self.device.startswith("cuda") if self.device else torch.cuda.is_available()
        return self.workers or (1 if on_gpu else torch.get_num_threads())

    def map(self, work: Work) -> None:
        """Run the tasks in worker processes, or here if one process is enough.

        A task whose worker is killed runs again, ``TRIES`` times at most.
        """
        left = work.pending()
        if min(self.number, len(left)) <= 1:
            for task in left:
                work.function(task)
                work.done(task)
            return
        for again in range(TRIES):
            left = self._in_processes(work, left, last=again == TRIES - 1)
            if not left:
                return

    def _in_processes(self, work: Work, tasks: list[Any], last: bool) -> list[Any]:
        """Run tasks in a pool and return those that are not done because a worker was killed."""
        can_fork = "fork" in multiprocessing.get_all_start_methods() and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        method = "fork" if can_fork and os.name == "posix" else "spawn"
        number = min(self.number, len(tasks))
        finished: set[int] = set()
        context = multiprocessing.get_context(method)
        stopped, stop = context.Pipe(duplex=False)
        with safe_children(), ProcessPoolExecutor(number, context, initializer=_begin, initargs=(stopped,)) as pool:
            try:
                futures = {pool.submit(work.function, task): i for i, task in enumerate(tasks)}
                for future in as_completed(futures):
                    future.result()
                    finished.add(futures[future])
                    work.done(tasks[futures[future]])
            except BrokenProcessPool:
                left = [task for i, task in enumerate(tasks) if i not in finished]
                if last:
                    raise WorkerLost(f"{work.name(left[0])}, or of another piece at that time,", TRIES) from None
                warn_once("worker killed", "A worker process was killed; its task is run again.")
            except BaseException:
                stop.send(None)  # no worker receives it: its presence wakes all of them
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [task for i, task in enumerate(tasks) if i not in finished]


def _begin(stopped: Connection) -> None:
    """Start a worker, which ends when its pool is stopped or its parent is gone, even in the middle of a task.

    Ctrl-C reaches all processes of a terminal; only the parent handles it.
    """
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel, stopped])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@dataclass(frozen=True)
class Ranks(Engine):
    """This process among the processes of the job, which must see the same folders.

    Attributes:
        rank: Number of this process.
        size: Number of processes.
    """

    rank: int = 0
    size: int = 1

    def map(self, work: Work) -> None:
        """Run this rank's share of the tasks and wait for the other ranks."""
        for number, task in enumerate(work.tasks):
            if number % self.size == self.rank and not work.is_done(task):
                work.function(task)
            work.done(task)
        self.wait()

    def wait(self) -> None:
        """Wait until every rank has called this."""
        if self.size > 1:
            torch.distributed.barrier()

    def agree(self, value: str) -> str:
        """Return the value of rank 0."""
        if self.size == 1:
            return value
        values = [value]
        torch.distributed.broadcast_object_list(values, src=0)
        return values[0]

    def leave(self) -> None:
        """Close the process group."""
        if self.size > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    @property
    def first(self) -> bool:
        """True on rank 0."""
        return self.rank == 0


def join_ranks() -> Ranks:
    """Join the ranks that torchrun announces in the environment; without it, return a single rank."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Ranks()
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", timeout=timedelta(days=7))
    return Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size())


def device_of_rank() -> str | None:
    """Return the GPU of this process, such as ``"cuda:1"``; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"


PATIENCE = 10.0
"""Seconds without a finished task until the cluster is checked: Ray waits forever for a raylet that is gone."""

_fix = "start the cluster again, then run the same command again: finished pieces are kept"


@dataclass(frozen=True)
class Ray(Engine):
    """A Ray cluster: at ``address``, the one this process has joined, or one that is started here.

    A task that is lost with its worker or machine runs again, ``TRIES`` times at most; one that
    raises ends the job. A cluster that was started here ends with this process.

    Attributes:
        address: Address of the cluster; None uses ``RAY_ADDRESS`` or starts one.
        workers: Number of processes of a cluster started here; 0 means one per core.
    """

    address: str | None = None
    workers: int = 0

    def map(self, work: Work) -> None:
        """Run the tasks that are not done on the cluster.

        Raises:
            WorkerLost: If the workers of a task were killed ``TRIES`` times.
            ClusterLost: If the cluster cannot be reached or stops.
        """
        ray = optional("ray", "--engine ray", extra="ray")
        if not (left := work.pending()):
            return
        if not ray.is_initialized():
            self._join(ray)
        # Ray's own retries would be silent, and endless for a task that runs out of memory.
        call = ray.remote(max_retries=0, num_cpus=1)(_call)
        # As bytes, so that the function is imported only after the worker has set its path.
        job = pickle.dumps(work.function), os.getcwd(), os.getcwd() in sys.path
        tries: Counter[int] = Counter()
        running = {call.remote(*job, task): number for number, task in enumerate(left)}
        while running:
            ended, _ = ray.wait(list(running), num_returns=1, timeout=PATIENCE)
            if not ended:
                _check_raylet(ray)
                continue
            ready = ended[0]
            number = running.pop(ready)
            tries[number] += 1
            if (why := _lost(ray, ready)) is None:
                work.done(left[number])
                continue
            if tries[number] == TRIES:
                raise WorkerLost(work.name(left[number]), TRIES, why)
            warn_once("worker killed", f"A worker process was lost ({why}); its task is run again.")
            running[call.remote(*job, left[number])] = number

    def _join(self, ray: Any) -> None:
        address = self.address or os.environ.get("RAY_ADDRESS")
        here = {} if address else {"num_cpus": self.workers or None, "include_dashboard": False}
        try:
            # Workers of Ray import from the current folder of this process first, so it must contain no modules.
            with chdir(os.path.abspath(os.sep)), safe_children():
                ray.init(address=address, log_to_driver=False, **here)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            where = f"at {address}" if address else "that is started here"
            raise ClusterLost(
                "mine", f"a Ray cluster {where}", _first_line(error), "check that it runs (ray status)"
            ) from error


def _call(function: bytes, folder: str, imports_from_it: bool, task: Any) -> None:
    """Run a task in the working directory of the process that submitted it, if this machine has that folder."""
    import torch

    torch.set_num_threads(1)
    if os.path.isdir(folder):
        os.chdir(folder)
    if imports_from_it and folder not in sys.path:
        sys.path.append(folder)
    pickle.loads(function)(task)


def _lost(ray: Any, ready: Any) -> str | None:
    """Return how the worker of a task was lost, None if the task ended; raise any error of the task itself."""
    errors = ray.exceptions
    try:
        ray.get(ready)
    except errors.RayTaskError as error:
        raise error.cause from error
    except (errors.LocalRayletDiedError, errors.RaySystemError, errors.RuntimeEnvSetupError) as error:
        raise ClusterLost("mine", "a Ray cluster that keeps running", _first_line(error), _fix) from error
    except errors.RayError as error:
        return _first_line(error)
    return None


def _check_raylet(ray: Any) -> None:
    """Raise if the raylet of this machine, which schedules the tasks, is gone."""
    own = ray.get_runtime_context().get_node_id()
    if any(node["NodeID"] == own and not node["Alive"] for node in ray.nodes()):
        raise ClusterLost("mine", "a Ray cluster that keeps running", "one whose local raylet died", _fix)


def _first_line(error: Exception) -> str:
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return line.rstrip(".")


def engine_of(options: MineOptions) -> Engine:
    """Return the engine that the options name; under torchrun, its ranks.

    Raises:
        ArgumentError: If ``--part``, ``--merge``, ``--engine`` and ``--jobs`` contradict each other.
    """
    if options.part is not None and options.merge:
        raise argument_error("mine", "a part or the merge after all parts", "part", options.part)
    if options.part is not None:
        if options.engine != "local" or options.jobs > 1:
            fix = "leave --engine and --jobs out"
            raise argument_error("mine", "one process for a part", "part", options.part, fix)
        return JobPart.parse(options.part)
    if options.engine == "ray":
        return Ray(options.ray_address, options.jobs)
    ranks = join_ranks()
    if ranks.size > 1:
        if options.jobs > 1:
            raise argument_error("mine", "one process for each rank of torchrun", "jobs", options.jobs)
        return ranks
    return Local(options.jobs, options.device)
