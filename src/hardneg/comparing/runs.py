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
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from hardneg.comparing.arms import Arm
from hardneg.comparing.canonical import EXPRESSIONS, plainly
from hardneg.comparing.child_processes import Lifelines
from hardneg.comparing.memory import Machine, NotBegun, num_cores, this_machine
from hardneg.core.errors import warn_once
from hardneg.training.options import RECIPES, TrainOptions
from hardneg.training.runs import DIVERGED, LEAVES_WITH_STDIN, Run

RUNS_ON_A_GPU = 2
"""At once, unless told otherwise: one compiles, plans and evaluates while the other trains."""


class RunFailed(RuntimeError):
    """A run of a comparison ended without figures; finished ones are kept, others go on from their checkpoints."""

    advice = "Mend this arm or leave it out, and give the command again: finished runs are kept."


class OutOfMemory(RunFailed):
    """One that memory did not hold."""

    advice = "Use a smaller --batch-size, or free memory and give the same command again: finished runs are kept."


class NoRoom(RunFailed):
    """One whose files the disk did not hold; it says itself what to do."""

    advice = "Finished runs are kept."


class Diverged(RunFailed):
    """One whose losses or weights were no longer finite."""


def run_all(
    arms: list[Arm],
    seeds: list[int],
    out: Path,
    jobs: int | None,
    show: Callable[[str], None],
    *,
    may_diverge: bool = False,
    threads: int | None = None,
) -> list[list[dict[str, Any]]]:
    """For every arm the result with every seed, at most ``jobs`` runs at a time; a finished run is only read.

    Each run has so many ``threads``, by default its share of the cores. With ``may_diverge``, a run whose losses are no
    longer finite has an empty result and ends nothing.
    """
    every = [(arm, seed, run_of(arm, seed, out)) for seed in seeds for arm in arms]
    wanted = {run.path.name: (arm, seed) for arm, seed, run in every}
    runs = {run.path.name: run for _, _, run in every}
    on_gpu = _on_gpu(arms)
    machine = this_machine(jobs or _usual_jobs(len(wanted), on_gpu), on_gpu=on_gpu)
    machine.learn(runs.values())
    threads, numbers, lifelines = threads or usual_threads(arms, len(seeds), jobs), count(1), Lifelines()

    def one(name: str) -> dict[str, Any]:
        (arm, seed), run = wanted[name], runs[name]
        try:
            options = _as_begun(arm.complete(seed=seed), run)
            result = run.result() or _where_it_fits(arm.recipe, options, run, machine, threads, lifelines)
        except RunFailed as error:
            if not (may_diverge and isinstance(error, Diverged)):
                machine.close()  # before this thread is free to begin another
                raise type(error)(f"{arm.text}, seed {seed}: {error.args[0].rstrip('.')}. {error.advice}") from None
            result = {}
        show(f"[{next(numbers)}/{len(wanted)}] {arm.text}, seed {seed}{'' if result else ': diverged'}")
        return result

    with ThreadPoolExecutor(machine.jobs) as pool:
        try:
            futures = {name: pool.submit(one, name) for name in wanted}
            ended = wait(futures.values(), return_when=FIRST_EXCEPTION).done
            failed = [run for run in futures.values() if run in ended and run.exception()]
            # Of several that failed, the first one is told; those that were not begun for it are none.
            for run in sorted(failed, key=lambda one: isinstance(one.exception(), NotBegun)):
                run.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            machine.close()
            lifelines.cut()
            raise
    return [[futures[run_of(arm, seed, out).path.name].result() for seed in seeds] for arm in arms]


def usual_threads(arms: list[Arm], seeds: int, jobs: int | None) -> int:
    """As many as OMP_NUM_THREADS says, or the share of the cores that a run has beside the others."""
    told = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if told.isdecimal() and int(told):
        return int(told)
    return max(1, num_cores() // (jobs or _usual_jobs(len(arms) * seeds, _on_gpu(arms))))


def _on_gpu(arms: list[Arm]) -> bool:
    return torch.cuda.is_available() and any(arm.complete().device != "cpu" for arm in arms)


def _usual_jobs(runs: int, on_gpu: bool) -> int:
    """By all runs, finished or not."""
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


def run_of(arm: Arm, seed: int, out: Path) -> Run:
    return Run(out / "runs" / f"{folder_of(arm)}-seed{seed}")


def folder_of(arm: Arm) -> str:
    """A short name that is the same for the same training; options that a later version adds do not change it."""
    usual, chosen = (plainly(options.as_dict()) for options in (RECIPES[arm.recipe](), arm.complete()))
    told = {name: value for name, value in chosen.items() if value != usual[name]}
    digest = hashlib.blake2b(json.dumps([arm.recipe, told], sort_keys=True).encode(), digest_size=4)
    return f"{arm.recipe}-{digest.hexdigest()}"


def _as_begun(options: TrainOptions, run: Run) -> TrainOptions:
    """The options in the words with which the run was begun, of the same training: it goes on with no others."""
    begun = run.config().get("options", {}) if run.config_path.exists() else {}
    return replace(options, **{name: begun[name] for name in EXPRESSIONS if name in begun})


def in_a_process(recipe: str, options: TrainOptions, run: Run, environ: dict[str, str]) -> dict[str, Any]:
    """A run in a process of its own; where the environment names a lifeline, it ends when that is cut."""
    command = [sys.executable, "-m", "hardneg.training.recipes", recipe, str(run.path), json.dumps(options.as_dict())]
    lifeline = int(environ.get(LEAVES_WITH_STDIN, subprocess.DEVNULL))
    answer = subprocess.run(command, env={**os.environ, **environ}, stdin=lifeline, capture_output=True, text=True)
    result = run.result()
    if answer.returncode or result is None:
        lines = (answer.stderr or answer.stdout).strip().splitlines() if answer.returncode >= 0 else []
        said = (lines or ["it said nothing"])[-1]  # a signal leaves no last words: the last line may be of any time
        said = said.replace("use --resume", "give the same command again")  # compare resumes by itself
        raise _failure(answer.returncode, said)(f"{run.path} failed, {_ended(answer.returncode)}: {said}")
    return result


def _failure(code: int, said: str) -> type[RunFailed]:
    """What kind of failure it was. SIGKILL is how the system ends a process that memory does not hold."""
    if code == DIVERGED:
        return Diverged
    if "make room" in said:
        return NoRoom
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
