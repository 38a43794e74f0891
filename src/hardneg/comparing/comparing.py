"""Run a comparison: the same budget, seeds and initial weights for every arm, then the statistics and comparison.json.

``compare`` is the public function. It is ``prepare`` (check everything before training) followed by ``carry_out``
(tune, train, judge, write); the command line calls the two separately, to show errors before its progress bar. Each run
has a folder of its own (runs.py), so a killed comparison resumes and keeps finished runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from hardneg.comparing.arms import Arm, parse_arm
from hardneg.comparing.cautions import cautions, differing_settings, settings_notes, shared_warnings
from hardneg.comparing.checks import check_arms
from hardneg.comparing.progress import Watcher
from hardneg.comparing.request import Comparison, open_folder
from hardneg.comparing.runs import RunSettings, run_all, run_of, started_options, usual_jobs, usual_threads
from hardneg.comparing.verdict import Verdict, answer, rows_of, sentences, temperature_notes, verdicts_of
from hardneg.core.errors import HardnegError
from hardneg.io.files import output_folder, run_again, write_json
from hardneg.io.provenance import environment
from hardneg.training.boards import check_boards
from hardneg.training.data_record import count_in, noun_in
from hardneg.training.evaluation.measures import measure, measures_in

ArmResults = list[list[dict[str, Any]]]
"""For every arm the results of its seeds."""
Tries = list[tuple[float, float | None]]
"""Tuned values of an arm with the metric of each on the validation split; None where training diverged."""


class AllDiverged(HardnegError, OSError):
    """Every tuned value of an arm diverged."""


def compare(
    comparison: Comparison,
    out: str | Path,
    *,
    jobs: int | None = None,
    allow_other_data: bool = False,
    show: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run a comparison and write comparison.json with its table and conclusions.

    Finished runs in the folder are kept, so the same call resumes a comparison that was stopped.

    Args:
        comparison: Arms, seeds, shared options and tuning.
        out: Folder of the comparison.
        jobs: Maximum number of parallel runs; by default one for each core, or two for each GPU. Fewer run where memory
            does not suffice.
        allow_other_data: Continue an earlier comparison although its data have changed; then there is no verdict.
        show: Is called with a line of text for every run that ends.

    Returns:
        Contents of comparison.json.

    Raises:
        ArgumentError: If the arms cannot be compared.
        CannotTrain: If an arm cannot be trained.
        RunFailed: If a run ends without a result.
    """
    prepared = prepare(comparison, out, jobs, allow_other_data)
    return carry_out(prepared, Watcher(show, prepared.steps))


@dataclass(frozen=True)
class Prepared:
    """A checked comparison: its arms can all be trained, and it is settled where and how.

    Attributes:
        comparison: The request, with its metric resolved.
        arms: The arms with the common options.
        out: Folder of the comparison.
        how: Number of parallel runs and threads.
        steps: Number of training steps of every run.
    """

    comparison: Comparison
    arms: list[Arm]
    out: Path
    how: RunSettings
    steps: int

    @property
    def epochs(self) -> int:
        """Number of epochs of every run."""
        return self.arms[0].complete().epochs


def prepare(
    comparison: Comparison, out: str | Path, jobs: int | None = None, allow_other_data: bool = False
) -> Prepared:
    """Check a comparison before anything is trained or shown, and write its request.

    Args:
        comparison: Arms, seeds, shared options and tuning.
        out: Folder of the comparison.
        jobs: Maximum number of parallel runs; None: chosen for the machine.
        allow_other_data: Accept data that differ from those of the runs in the folder.

    Raises:
        ArgumentError: If the arms cannot be compared.
        CannotTrain: If an arm cannot be trained.
        FileError: If the folder has another comparison.
    """
    check_boards()
    arms = [parse_arm(text).with_defaults(comparison.common) for text in comparison.arms]
    out = output_folder(out)
    data, metric = check_arms(arms, comparison)
    comparison = replace(comparison, metric=metric)
    # Results depend on the threads in their last bits, and bits grow: all runs have the same number.
    threads = open_folder(out, comparison, data, usual_threads(arms, comparison.seeds, jobs), allow_other_data)
    if not (allow_other_data or comparison.tune):
        for run in (run_of(arm, seed, out) for arm in arms for seed in range(comparison.seeds)):
            if run.config_path.exists():
                run.check_data(data)
    options = arms[0].complete()
    steps = options.epochs * (count_in(data["train"]) // options.batch_size)
    return Prepared(comparison, arms, out, RunSettings(jobs, threads, allow_other_data), max(1, steps))


def carry_out(prepared: Prepared, watcher: Watcher) -> dict[str, Any]:
    """Tune, train and judge a prepared comparison, and write comparison.json.

    Args:
        prepared: The comparison, as ``prepare`` returns it.
        watcher: Is notified of every run that ends.

    Returns:
        Contents of comparison.json: rows, measures, answer, verdicts, notes, cautions, and the environment.

    Raises:
        AllDiverged: If an arm diverges with every tuned value.
        RunFailed: If a run ends without a result.
    """
    comparison, arms, out = prepared.comparison, prepared.arms, prepared.out
    tries = _tries(prepared, watcher)
    tuned = _best(arms, tries, comparison)
    results = run_all(tuned, list(range(comparison.seeds)), out, prepared.how, watcher)
    rows = rows_of(tuned, results, comparison.metric)
    verdicts = verdicts_of(tuned, results, comparison.metric)
    # As the runs were started: those of an older version may have had other defaults.
    options = [
        arm.complete(seed=seed).as_dict() | started_options(run_of(arm, seed, out))
        for arm in tuned
        for seed in range(comparison.seeds)
    ]
    differing = differing_settings(options, [result.get("trained") for of_arm in results for result in of_arm])
    if "data" in differing:  # only with --allow-other-data
        verdicts = [replace(one, half_width=None, why_open="the runs have different data") for one in verdicts]
        rows = [replace(row, difference_half_width=None) for row in rows]
    option = comparison.tune[0] if comparison.tune else None
    summary = {
        "metric": comparison.metric,
        "k": results[0][0].get("k"),
        "num_test": results[0][0].get("num_test"),
        "noun": noun_in((results[0][0].get("trained") or {}).get("data", {}).get("test", {})),
        "rows": [asdict(row) for row in rows],
        # Every accuracy of an arm with every seed, also those that do not decide.
        "measures": {
            arm.text: {name: [result[name] for result in of_arm] for name in measures_in(of_arm[0])}
            for arm, of_arm in zip(tuned, results, strict=True)
        },
        "answer": answer(verdicts, measure(comparison.metric, results[0][0].get("k"))),
        "verdicts": [_as_json(one) for one in verdicts],
        "sentences": sentences(verdicts),
        "notes": temperature_notes(tuned, tuned=option == "temperature"),
        "cautions": _cautions(tuned, results, out),
        "unlike": settings_notes(differing),
        "tuned": {arm.text: arm.options[option] for arm in tuned} if option else None,
        "tries": {arm.text: tried for arm, tried in zip(arms, tries, strict=True)} if option else None,
        "comparison": asdict(comparison),
        "jobs": prepared.how.jobs or usual_jobs(tuned, comparison.seeds),  # the seconds of a run depend on it
        "threads": prepared.how.threads,
        **environment(),
    }
    write_json(out / "comparison.json", summary, run_again)
    return summary


def _as_json(verdict: Verdict) -> dict[str, Any]:
    """Return the fields of a verdict with its standing and its sentence."""
    return asdict(verdict) | {"standing": verdict.standing, "sentence": verdict.sentence()}


def _cautions(arms: list[Arm], results: ArmResults, out: Path) -> list[str]:
    """Collect the warnings common to all arms, then the cautions of each arm."""
    seeds = range(len(results[0]))
    shared, warned = shared_warnings(
        [[one for seed in seeds for one in run_of(arm, seed, out).warned()] for arm in arms]
    )
    lines = [f"All arms: {one}" for one in shared]
    for arm, of_arm, own in zip(arms, results, warned, strict=True):
        lines += cautions(arm.text, arm.complete().as_dict(), of_arm, own)
    return lines


def _tries(prepared: Prepared, watcher: Watcher) -> list[Tries]:
    """Evaluate the same tuned values for every arm with one seed; a value that diverges loses."""
    arms, comparison = prepared.arms, prepared.comparison
    if comparison.tune is None:
        return [[] for _ in arms]
    every = [comparison.tries(arm) for arm in arms]
    runs = [one for tried in every for one in tried]
    results = iter(run_all(runs, [0], prepared.out / "tuning", prepared.how, watcher, may_diverge=True))
    reached = ((result or {}).get(comparison.metric) for (result,) in results)
    name = comparison.tune[0]
    return [
        [(one.options[name], value) for one, value in zip(tried, islice(reached, len(tried)), strict=True)]
        for tried in every
    ]


def _best(arms: list[Arm], tries: list[Tries], comparison: Comparison) -> list[Arm]:
    """Return the arms with their best tuned value, the first one of several; without tuning, the arms themselves."""
    if comparison.tune is None:
        return arms
    name, best = comparison.tune[0], []
    for arm, tried in zip(arms, tries, strict=True):
        value, reached = max(tried, key=lambda one: -math.inf if one[1] is None else one[1])
        if reached is None:
            values = ", ".join(f"{value:g}" for value, _ in tried)
            raise AllDiverged(arm.text, f"a {name} with which it does not diverge", values, "try others")
        best.append(arm.with_option(name, value))
    return best
