"""The runs of a comparison: each in a process and a directory of its own, so that a killed one goes on."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from hardneg.arms import Arm
from hardneg.comparison_memory import Machine, num_cores, this_machine
from hardneg.notices import warn_once
from hardneg.options import RECIPES, TrainOptions
from hardneg.runs import LEAVES_WITH_STDIN, Run

RUNS_ON_A_GPU = 2
"""At once, unless told otherwise: one compiles, plans and evaluates while the other trains."""


class RunFailed(RuntimeError):  # noqa: N818, what it says
    """A run of a comparison ended without figures; finished ones are kept, others go on from their checkpoints."""


class OutOfMemory(RunFailed):
    """One that memory did not hold."""


def run_all(
    arms: list[Arm], seeds: list[int], out: Path, jobs: int | None, show: Callable[[str], None]
) -> list[list[dict[str, Any]]]:
    """For every arm the result with every seed, at most ``jobs`` runs at a time; a finished run is only read."""
    # Arms may become the same by tuning: they share their runs.
    wanted = {f"{folder_of(arm)}-seed{seed}": (arm, seed) for seed in seeds for arm in arms}
    runs = {name: Run(out / "runs" / name) for name in wanted}
    on_gpu = torch.cuda.is_available() and any(arm.complete().device != "cpu" for arm in arms)
    machine = this_machine(jobs or _usual_jobs(len(wanted), on_gpu), on_gpu=on_gpu)
    machine.learn(runs.values())
    threads, done = max(1, num_cores() // machine.jobs), 0

    def one(name: str) -> dict[str, Any]:
        nonlocal done
        (arm, seed), run = wanted[name], runs[name]
        result = run.result() or _where_it_fits(arm.recipe, arm.complete(seed=seed), run, machine, threads)
        done += 1
        show(f"[{done}/{len(wanted)}] {arm.text}, seed {seed}")
        return result

    with ThreadPoolExecutor(machine.jobs) as pool:
        futures = {name: pool.submit(one, name) for name in wanted}
        try:
            for ended in wait(futures.values(), return_when=FIRST_EXCEPTION).done:
                ended.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            machine.close()
            for lifeline in list(_lifelines):
                _let_go(lifeline)
            raise
    return [[futures[f"{folder_of(arm)}-seed{seed}"].result() for seed in seeds] for arm in arms]


def _usual_jobs(runs: int, on_gpu: bool) -> int:
    """By all runs, finished or not: how many threads each has must not depend on where a comparison was killed."""
    return min(runs, RUNS_ON_A_GPU * torch.cuda.device_count() if on_gpu else num_cores())


def _where_it_fits(recipe: str, options: TrainOptions, run: Run, machine: Machine, threads: int) -> dict[str, Any]:
    while True:
        with machine.beside_others(run) as place:
            at_once = machine.jobs
            try:
                return in_a_process(recipe, options, run, {**place.environ, **_threads(threads)})
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


_lifelines: set[int] = set()
"""The ends of pipes that runs hold on to: one whose pipe is closed leaves, so that Ctrl-C need not wait for it."""


def _let_go(lifeline: int) -> None:
    try:
        _lifelines.remove(lifeline)
    except KeyError:
        return  # another thread was quicker
    os.close(lifeline)


def in_a_process(recipe: str, options: TrainOptions, run: Run, environ: dict[str, str]) -> dict[str, Any]:
    """A run in a process of its own; it ends with this one, however this one ends."""
    command = [sys.executable, "-m", "hardneg.recipes", recipe, str(run.path), json.dumps(options.as_dict())]
    here, there = os.pipe()
    _lifelines.add(there)
    try:
        whole = {**os.environ, **environ, LEAVES_WITH_STDIN: "1"}
        answer = subprocess.run(command, env=whole, stdin=here, capture_output=True, text=True)
    finally:
        os.close(here)
        _let_go(there)
    result = run.result()
    if answer.returncode or result is None:
        said = ((answer.stderr or answer.stdout).strip().splitlines() or ["it said nothing"])[-1]
        no_memory = answer.returncode == -signal.SIGKILL or any(words in said for words in _out_of_memory)
        failure = OutOfMemory if no_memory else RunFailed
        raise failure(f"{run.path} failed, {_ended(answer.returncode)}: {said}")
    return result


_out_of_memory = ("out of memory", "can't allocate memory", "MemoryError")


def _threads(number: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(number), "MKL_NUM_THREADS": str(number)}


def _ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    hint = ", as when memory runs out" if code == -signal.SIGKILL else ""
    return f"killed by {signal.Signals(-code).name}{hint}"
