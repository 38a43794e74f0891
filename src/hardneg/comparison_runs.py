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

from hardneg.arms import Arm
from hardneg.options import RECIPES, TrainOptions
from hardneg.runs import LEAVES_WITH_STDIN, Run


class RunFailed(RuntimeError):  # noqa: N818, what it says
    """A run of a comparison ended without figures; finished ones are kept, others go on from their checkpoints."""


def run_all(
    arms: list[Arm], seeds: list[int], out: Path, jobs: int, show: Callable[[str], None]
) -> list[list[dict[str, Any]]]:
    """For every arm the result with every seed, ``jobs`` runs at a time; a finished run is only read."""
    # Arms may become the same by tuning: they share their runs.
    wanted = {(folder_of(arm), seed): arm for seed in seeds for arm in arms}
    done = {"n": 0}

    def one(arm: Arm, seed: int) -> dict[str, Any]:
        run = Run(out / "runs" / f"{folder_of(arm)}-seed{seed}")
        result = run.result() or in_a_process(arm.recipe, arm.complete(seed=seed), run, jobs)
        done["n"] += 1
        show(f"[{done['n']}/{len(wanted)}] {arm.text}, seed {seed}")
        return result

    with ThreadPoolExecutor(jobs) as pool:
        futures = {key: pool.submit(one, arm, key[1]) for key, arm in wanted.items()}
        try:
            for ended in wait(futures.values(), return_when=FIRST_EXCEPTION).done:
                ended.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for lifeline in list(_lifelines):
                _let_go(lifeline)
            raise
    return [[futures[folder_of(arm), seed].result() for seed in seeds] for arm in arms]


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


def in_a_process(recipe: str, options: TrainOptions, run: Run, jobs: int) -> dict[str, Any]:
    """A run in a process of its own, with its share of the cores; it ends with this one, however this one ends."""
    threads = str(max(1, num_cores() // jobs))
    command = [sys.executable, "-m", "hardneg.recipes", recipe, str(run.path), json.dumps(options.as_dict())]
    environ = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, LEAVES_WITH_STDIN: "1"}
    here, there = os.pipe()
    _lifelines.add(there)
    try:
        answer = subprocess.run(command, env=environ, stdin=here, capture_output=True, text=True)
    finally:
        os.close(here)
        _let_go(there)
    result = run.result()
    if answer.returncode or result is None:
        said = (answer.stderr or answer.stdout).strip().splitlines() or ["it said nothing"]
        raise RunFailed(f"{run.path} failed, {_ended(answer.returncode)}: {said[-1]}")
    return result


def num_cores() -> int:
    """The cores that this process may use, which in a container are often fewer than the machine has."""
    have = os.cpu_count() or 1
    return min(have, len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else have


def _ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    hint = ", as when memory runs out" if code == -9 else ""
    return f"killed by {signal.Signals(-code).name}{hint}"
