"""The runs of a comparison: each in a process and a directory of its own, so that a killed one goes on."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hardneg.arms import Arm
from hardneg.comparison_memory import Machine, NotBegun, num_cores, this_machine
from hardneg.notices import warn_once
from hardneg.options import RECIPES, TrainOptions
from hardneg.runs import LEAVES_WITH_STDIN, Run

RUNS_ON_A_GPU = 2
"""At once, unless told otherwise: one compiles, plans and evaluates while the other trains."""
DIVERGED = 3
"""The exit code of a run whose losses or weights were no longer finite."""


class RunFailed(RuntimeError):  # noqa: N818, what it says
    """A run of a comparison ended without figures; finished ones are kept, others go on from their checkpoints."""


class OutOfMemory(RunFailed):
    """One that memory did not hold."""


class Diverged(RunFailed):
    """One whose losses or weights were no longer finite."""


class Lifelines:
    """Pipes that runs hold on to: one whose pipe is closed leaves, so that a failure or Ctrl-C need not wait for it."""

    def __init__(self) -> None:
        self._ends: set[int] = set()
        self._cut = False
        self._lock = threading.Lock()

    @contextmanager
    def one(self) -> Iterator[int]:
        """The end of a pipe for the standard input of a run; none is made once the others were cut."""
        with self._lock:
            if self._cut:
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

    def cut(self) -> None:
        with self._lock:
            self._cut = True
            while self._ends:
                os.close(self._ends.pop())


def run_all(
    arms: list[Arm],
    seeds: list[int],
    out: Path,
    jobs: int | None,
    show: Callable[[str], None],
    *,
    may_diverge: bool = False,
) -> list[list[dict[str, Any]]]:
    """For every arm the result with every seed, at most ``jobs`` runs at a time; a finished run is only read.

    With ``may_diverge``, a run whose losses are no longer finite has an empty result and ends nothing.
    """
    wanted = {f"{folder_of(arm)}-seed{seed}": (arm, seed) for seed in seeds for arm in arms}
    runs = {name: Run(out / "runs" / name) for name in wanted}
    on_gpu = torch.cuda.is_available() and any(arm.complete().device != "cpu" for arm in arms)
    machine = this_machine(jobs or _usual_jobs(len(wanted), on_gpu), on_gpu=on_gpu)
    machine.learn(runs.values())
    threads, done, lifelines = max(1, num_cores() // machine.jobs), 0, Lifelines()

    def one(name: str) -> dict[str, Any]:
        nonlocal done
        (arm, seed), run = wanted[name], runs[name]
        try:
            result = run.result() or _where_it_fits(
                arm.recipe, arm.complete(seed=seed), run, machine, threads, lifelines
            )
        except Diverged:
            if not may_diverge:
                raise
            result = {}
        done += 1
        show(f"[{done}/{len(wanted)}] {arm.text}, seed {seed}{'' if result else ': diverged'}")
        return result

    with ThreadPoolExecutor(machine.jobs) as pool:
        futures = {name: pool.submit(one, name) for name in wanted}
        try:
            for ended in wait(futures.values(), return_when=FIRST_EXCEPTION).done:
                ended.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            machine.close()
            lifelines.cut()
            raise
    return [[futures[f"{folder_of(arm)}-seed{seed}"].result() for seed in seeds] for arm in arms]


def _usual_jobs(runs: int, on_gpu: bool) -> int:
    """By all runs, finished or not: how many threads each has must not depend on where a comparison was killed."""
    return min(runs, RUNS_ON_A_GPU * torch.cuda.device_count() if on_gpu else num_cores())


def _where_it_fits(
    recipe: str, options: TrainOptions, run: Run, machine: Machine, threads: int, lifelines: Lifelines
) -> dict[str, Any]:
    while True:
        with machine.beside_others(run) as place, lifelines.one() as lifeline:
            at_once = machine.jobs
            environ = {**place.environ, **_threads(threads), LEAVES_WITH_STDIN: str(lifeline)}
            try:
                return in_a_process(recipe, options, run, environ)
            except OutOfMemory:
                if not machine.shrink(at_once):
                    raise
                warn_once(
                    "compare.memory",
                    f"Memory did not hold the runs side by side: they go on with {machine.jobs} at a time. "
                    "Use --jobs to begin with fewer.",
                )


def folder_of(arm: Arm) -> str:
    """A short name that is the same for the same training; options that a later version adds do not change it."""
    usual = RECIPES[arm.recipe]().as_dict()
    told = {name: value for name, value in arm.complete().as_dict().items() if value != usual[name]}
    digest = hashlib.blake2b(json.dumps([arm.recipe, told], sort_keys=True).encode(), digest_size=4)
    return f"{arm.recipe}-{digest.hexdigest()}"


def in_a_process(recipe: str, options: TrainOptions, run: Run, environ: dict[str, str]) -> dict[str, Any]:
    """A run in a process of its own; where the environment names a lifeline, it ends when that is cut."""
    command = [sys.executable, "-m", "hardneg.recipes", recipe, str(run.path), json.dumps(options.as_dict())]
    lifeline = int(environ.get(LEAVES_WITH_STDIN, subprocess.DEVNULL))
    answer = subprocess.run(command, env={**os.environ, **environ}, stdin=lifeline, capture_output=True, text=True)
    result = run.result()
    if answer.returncode or result is None:
        said = ((answer.stderr or answer.stdout).strip().splitlines() or ["it said nothing"])[-1]
        raise _failure(answer.returncode, said)(f"{run.path} failed, {_ended(answer.returncode)}: {said}")
    return result


def _failure(code: int, said: str) -> type[RunFailed]:
    """What kind of failure it was. SIGKILL is how the system ends a process that memory does not hold."""
    if code == DIVERGED:
        return Diverged
    no_memory = code == -signal.SIGKILL or any(words in said for words in _out_of_memory)
    return OutOfMemory if no_memory else RunFailed


_out_of_memory = ("out of memory", "can't allocate memory", "MemoryError")


def _threads(number: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(number), "MKL_NUM_THREADS": str(number)}


def _ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    hint = ", as when memory runs out" if code == -signal.SIGKILL else ""
    return f"killed by {signal.Signals(-code).name}{hint}"
