"""Runs of a comparison: each in its own subprocess and folder, so that a killed comparison resumes.

``run_all`` is the entry point, called by comparing.py for the arms and again for their tuned values. A run whose result
is on disk is only read. memory.py decides when another run may start, progress.py reports how many have ended. The
errors at the top name what ended a run, and say what to do about it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import warnings
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from hardneg.comparing.arms import EXPRESSIONS, Arm, canonical_options
from hardneg.comparing.memory import ChildPipes, Machine, NotStarted, num_cores, this_machine
from hardneg.comparing.progress import Watcher
from hardneg.comparing.request import SHARED
from hardneg.core.errors import HardnegError, HardnegWarning, NotFinite, warn_once
from hardneg.io.processes import python, safe_environment
from hardneg.training.loop.runs import DATA_CHANGED, DIVERGED, LEAVES_WITH_STDIN, NO_DISK_SPACE, NO_MEMORY, Run
from hardneg.training.options import RECIPES, TrainOptions

RUNS_ON_A_GPU = 2
"""Default number of parallel runs on a GPU: one compiles, plans and evaluates while the other trains."""

LONGEST = 80
"""Maximum number of characters of the options in a folder name; a digest after them distinguishes longer ones."""


class RunFailed(HardnegError, OSError):
    """A run of a comparison ended without a result; finished runs are kept, others resume from their checkpoints.

    Attributes:
        run: Folder of the run.
        ended: How its process ended, with the last line that it printed.
        arm: The arm as text, where it is known.
        seed: Seed of the run, where it is known.
    """

    advice = "Fix or remove this arm and give the command again: finished runs are kept"

    def __init__(self, run: Path, ended: str, arm: str = "", seed: int | None = None) -> None:
        super().__init__(str(run), "to finish", ended, self.advice)
        self.run, self.ended, self.arm, self.seed = run, ended, arm, seed
        self.args = (run, ended, arm, seed)

    def of(self, arm: str, seed: int) -> RunFailed:
        """Return the same error with the arm and the seed of the run."""
        return type(self)(self.run, self.ended, arm, seed)

    def __str__(self) -> str:
        whose = f"{self.arm}, seed {self.seed}: " if self.arm else ""
        return f"{whose}{self.run} failed, {self.ended.rstrip('.')}. {self.advice}."


class OutOfMemory(RunFailed):
    """A run ran out of memory."""

    advice = "Use a smaller --batch-size, or free memory and give the same command again: finished runs are kept"


class NoDiskSpace(RunFailed):
    """A run failed because the disk is full."""

    advice = "Free disk space, then give the same command again: finished runs are kept"


class OtherData(RunFailed):
    """A run on disk was started with other data."""

    advice = "Put back the data, use another --out, or --allow-other-data if it is meant to change"


class Diverged(RunFailed):
    """The losses or weights of a run became NaN or infinite."""


_failures = {DIVERGED: Diverged, NO_DISK_SPACE: NoDiskSpace, NO_MEMORY: OutOfMemory, DATA_CHANGED: OtherData}
if hasattr(signal, "SIGKILL"):  # not on Windows; the system ends a process that runs out of memory by it
    _failures[-signal.SIGKILL] = OutOfMemory


@dataclass(frozen=True)
class RunSettings:
    """How the runs of a comparison are started.

    Attributes:
        jobs: Maximum number of runs at a time; by default one for each core, or two for each GPU.
        threads: Number of threads of each run.
        allow_other_data: Resume runs although their data have changed.
        here: Train in this process, one run after the other, and keep no weights: for studies of many short runs, for
            which starting a process takes longer than training.
    """

    jobs: int | None = None
    threads: int = 1
    allow_other_data: bool = False
    here: bool = False


def run_all(
    arms: list[Arm], seeds: list[int], out: Path, how: RunSettings, watcher: Watcher, *, may_diverge: bool = False
) -> list[list[dict[str, Any]]]:
    """Train every arm with every seed, in parallel, and return the results.

    Args:
        arms: Arms to train.
        seeds: Seeds of every arm.
        out: Folder of the comparison; runs are in ``out/runs``.
        how: Number of parallel runs and threads.
        watcher: Is notified of every run that ends.
        may_diverge: Give a run whose losses are not finite an empty result, instead of raising.

    Returns:
        For every arm the results of its seeds, in order.

    Raises:
        RunFailed: If a run ends without a result. The other runs are stopped, and resume at the next call.
    """
    every = [(arm, seed, run_of(arm, seed, out)) for seed in seeds for arm in arms]
    wanted = {run.path.name: (arm, seed, run) for arm, seed, run in every}
    machine = this_machine(1 if how.here else how.jobs or usual_jobs(arms, len(seeds)), on_gpu=_on_gpu(arms))
    machine.learn(run for _, _, run in every)
    numbers, pipes = count(1), ChildPipes()

    def one(name: str) -> dict[str, Any]:
        arm, seed, run = wanted[name]
        try:
            options = _as_started(arm.complete(seed=seed), run)
            kept = run.result()
            result = kept or _train_when_it_fits(arm.recipe, options, run, machine, how, pipes)
        except RunFailed as error:
            if not (may_diverge and isinstance(error, Diverged)):
                machine.close()  # before this thread is free to begin another
                raise error.of(arm.text, seed) from None
            kept, result = None, {}
        ended = ": kept, as it was finished" if kept else "" if result else ": diverged"
        watcher.ended(f"[{next(numbers)}/{len(wanted)}] {arm.text}, seed {seed}{ended}")
        return result

    with watcher.watching(machine.under_way), ThreadPoolExecutor(machine.jobs) as pool:
        try:
            futures = {name: pool.submit(one, name) for name in wanted}
            ended = wait(futures.values(), return_when=FIRST_EXCEPTION).done
            failed = [run for run in futures.values() if run in ended and run.exception()]
            # Of several that failed, the first is raised; those that were not started because of it did not fail.
            for run in sorted(failed, key=lambda one: isinstance(one.exception(), NotStarted)):
                run.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            machine.close()
            pipes.close()
            raise
    return [[futures[run_of(arm, seed, out).path.name].result() for seed in seeds] for arm in arms]


def usual_threads(arms: list[Arm], seeds: int, jobs: int | None) -> int:
    """Return the number of threads per run: OMP_NUM_THREADS, or an equal share of the cores for parallel runs."""
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if threads.isdecimal() and int(threads):
        return int(threads)
    return max(1, num_cores() // (jobs or usual_jobs(arms, seeds)))


def _on_gpu(arms: list[Arm]) -> bool:
    """Return whether an arm trains on a GPU of this machine."""
    return torch.cuda.is_available() and any(arm.complete().device != "cpu" for arm in arms)


def usual_jobs(arms: list[Arm], seeds: int) -> int:
    """Return the default number of parallel runs, based on all runs, finished or not."""
    return min(len(arms) * seeds, RUNS_ON_A_GPU * torch.cuda.device_count() if _on_gpu(arms) else num_cores())


def _train_when_it_fits(
    recipe: str, options: TrainOptions, run: Run, machine: Machine, how: RunSettings, pipes: ChildPipes
) -> dict[str, Any]:
    """Train a run as soon as there is memory for it; retry with fewer parallel runs if memory runs out."""
    while True:
        if how.here:
            return in_this_process(recipe, options, run, allow_other_data=how.allow_other_data)
        with machine.reserve(run) as place, pipes.one() as pipe:
            at_once = machine.jobs
            threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(how.threads))
            environ = {**place.environ, **threads, LEAVES_WITH_STDIN: str(pipe)}
            try:
                return in_a_process(recipe, options, run, environ, allow_other_data=how.allow_other_data)
            except OutOfMemory:
                if not machine.shrink(at_once):
                    raise
                warn_once(
                    "compare.memory",
                    f"Not enough memory for the parallel runs: continuing with {machine.jobs} at a time. "
                    "Set --jobs to start fewer.",
                )


def run_of(arm: Arm, seed: int, out: Path) -> Run:
    """Return the run of an arm with a seed, whether or not it has started."""
    return Run(out / "runs" / f"{folder_of(arm)}-seed{seed}")


def folder_of(arm: Arm) -> str:
    """Return a readable folder name that is equal for equal training.

    The name has the options that differ from the recipe's defaults, and a digest of them. So options that a later
    version adds do not change it.

    >>> from hardneg.comparing.arms import parse_arm
    >>> folder_of(parse_arm("hcl(temperature=0.2) @ knn()"))
    'simclr-batches=knn-negatives=Tilt-1.0-tau_plus=0.1-temperature=0.2-...'
    """
    usual, chosen = (canonical_options(options.as_dict()) for options in (RECIPES[arm.recipe](), arm.complete()))
    changed = {name: value for name, value in chosen.items() if value != usual[name]}
    digest = hashlib.blake2b(json.dumps([arm.recipe, changed], sort_keys=True).encode(), digest_size=4)
    if "batches" in changed:
        changed["batches"] = arm.complete().batches.partition("(")[0].strip()
    written = [f"{name}={value}" for name, value in sorted(changed.items()) if name not in SHARED]
    words = re.sub(r"[^\w.=]+", "-", "-".join(written))[:LONGEST].strip("-")
    return "-".join(part for part in (arm.recipe, words, digest.hexdigest()) if part)


def _as_started(options: TrainOptions, run: Run) -> TrainOptions:
    """Return the options as they were written when the run started; it resumes only with the same text."""
    started = started_options(run)
    return replace(options, **{name: started[name] for name in EXPRESSIONS if name in started})


def started_options(run: Run) -> dict[str, Any]:
    """Return the options with which a run was started; empty if it has not started."""
    return dict(run.whole_config()["options"]) if run.config_path.exists() else {}


def in_a_process(
    recipe: str, options: TrainOptions, run: Run, environ: dict[str, str], *, allow_other_data: bool = False
) -> dict[str, Any]:
    """Train one run in a subprocess and return its result.

    Args:
        recipe: Name of the recipe.
        options: Options of the run.
        run: Folder of the run.
        environ: Environment variables. Where LEAVES_WITH_STDIN names a pipe, the run ends when that pipe is closed.
        allow_other_data: Resume although the data have changed.

    Raises:
        RunFailed: If the process fails, or leaves no result; a subclass where its exit code names the reason.
    """
    command = python("-m", "hardneg.training.recipes", recipe, str(run.path), json.dumps(options.as_dict()))
    command += ["--allow-other-data"] * allow_other_data
    pipe = int(environ.get(LEAVES_WITH_STDIN, subprocess.DEVNULL))
    answer = subprocess.run(command, env=safe_environment(environ), stdin=pipe, capture_output=True, text=True)
    result = run.result()
    if answer.returncode or result is None:
        failure = _failures.get(answer.returncode, RunFailed)
        raise failure(run.path, _ended(answer.returncode, answer.stderr or answer.stdout))
    return result


def in_this_process(recipe: str, options: TrainOptions, run: Run, *, allow_other_data: bool = False) -> dict[str, Any]:
    """Train one run in this process, keep its figures but not its weights, and return its result.

    Args:
        recipe: Name of the recipe.
        options: Options of the run.
        run: Folder of the run.
        allow_other_data: Resume although the data have changed.

    Raises:
        Diverged: If the losses or weights are not finite.
    """
    from hardneg.training.recipes import run_recipe

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HardnegWarning)
        try:
            result = run_recipe(recipe, options, run.path, resume=True, quiet=True, allow_other_data=allow_other_data)
        except NotFinite as error:
            raise Diverged(run.path, str(error)) from None
    for one in caught:
        if isinstance(one.message, HardnegWarning):
            run.warn(str(one.message), one.message.kind)
    for file in (*run.path.glob("checkpoint*"), run.path / "embeddings.npz"):
        file.unlink(missing_ok=True)
    return result


def _ended(code: int, output: str) -> str:
    """Describe how a process ended, with the last line of its output."""
    if code < 0:  # a killed process writes no final error: the last line may be of any time
        hint = ", as when memory runs out" if _failures.get(code) is OutOfMemory else ""
        return f"killed by {signal.Signals(-code).name}{hint}"
    lines = output.strip().splitlines() or ["it printed nothing"]
    return f"exit code {code}: {lines[-1]}"
