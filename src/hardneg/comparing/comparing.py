"""Comparisons: the same budget, seeds and initial weights for every arm, and which differences are beyond noise.

Each run is a directory of its own (runs.py), so a killed comparison resumes and keeps finished runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from hardneg.comparing.arms import Arm, parse_arm
from hardneg.comparing.cautions import cautions, of_all, unlike, unlike_notes
from hardneg.comparing.checks import check_arms
from hardneg.comparing.progress import Watcher
from hardneg.comparing.request import Comparison, open_folder
from hardneg.comparing.runs import How, begun_options, run_all, run_of, usual_jobs, usual_threads
from hardneg.comparing.verdict import Verdict, answer, rows_of, sentences, temperature_notes, verdicts_of
from hardneg.core.errors import HardnegError
from hardneg.io.files import output_folder, run_again, write_json
from hardneg.io.provenance import environment
from hardneg.training.boards import check_boards
from hardneg.training.data_record import count_in, noun_in
from hardneg.training.evaluation.measures import measure, measures_in

ArmResults = list[list[dict[str, Any]]]
"""For every arm the figures of every seed."""


def compare(
    comparison: Comparison,
    out: str | Path,
    *,
    jobs: int | None = None,
    allow_other_data: bool = False,
    show: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Runs what is missing and writes comparison.json with the table and the sentences.

    At most ``jobs`` runs go side by side, by default one for each core or two for each GPU; fewer where memory does not
    allow it. In the folder of an earlier comparison the data must be the same, unless ``allow_other_data``.
    """
    prepared = prepare(comparison, out, jobs, allow_other_data)
    return carry_out(prepared, Watcher(show, prepared.steps))


@dataclass(frozen=True)
class Prepared:
    """A comparison whose arms can all be trained, and where and how they will be."""

    comparison: Comparison
    arms: list[Arm]
    out: Path
    how: How
    steps: int  # of every run

    @property
    def epochs(self) -> int:
        """Of every run."""
        return self.arms[0].complete().epochs


def prepare(
    comparison: Comparison, out: str | Path, jobs: int | None = None, allow_other_data: bool = False
) -> Prepared:
    """Raises for what cannot be compared, before anything is trained or shown."""
    check_boards()
    arms = [parse_arm(text).under(comparison.common) for text in comparison.arms]
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
    return Prepared(comparison, arms, out, How(jobs, threads, allow_other_data), max(1, steps))


def carry_out(prepared: Prepared, watcher: Watcher) -> dict[str, Any]:
    comparison, arms, out = prepared.comparison, prepared.arms, prepared.out
    tries = _tries(prepared, watcher)
    tuned = _best(arms, tries, comparison)
    results = run_all(tuned, list(range(comparison.seeds)), out, prepared.how, watcher)
    rows = rows_of(tuned, results, comparison.metric)
    verdicts = verdicts_of(tuned, results, comparison.metric)
    # As the runs were begun: one of an older version may have had other defaults.
    options = [
        arm.complete(seed=seed).as_dict() | begun_options(run_of(arm, seed, out))
        for arm in tuned
        for seed in range(comparison.seeds)
    ]
    differing = unlike(options, [result.get("trained") for of_arm in results for result in of_arm])
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
        "unlike": unlike_notes(differing),
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
    return asdict(verdict) | {"standing": verdict.standing, "sentence": verdict.sentence()}


def _cautions(arms: list[Arm], results: ArmResults, out: Path) -> list[str]:
    seeds = range(len(results[0]))
    shared, warned = of_all([[one for seed in seeds for one in run_of(arm, seed, out).warned()] for arm in arms])
    lines = [f"All arms: {one}" for one in shared]
    for arm, of_arm, own in zip(arms, results, warned, strict=True):
        lines += cautions(arm.text, arm.complete().as_dict(), of_arm, own)
    return lines


Tries = list[tuple[float, float | None]]
"""The tuned values of an arm and what each reached on the validation split; None where training diverged."""


def _tries(prepared: Prepared, watcher: Watcher) -> list[Tries]:
    """For every arm the same tries, with one seed; a diverging one loses, and does not stop the others."""
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


class AllDiverged(HardnegError, OSError):
    """Every tuned value of an arm diverged."""


def _best(arms: list[Arm], tries: list[Tries], comparison: Comparison) -> list[Arm]:
    """The arms with the best of their tries, the first of them where several are; without tuning, as they are."""
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
