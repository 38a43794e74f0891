"""Comparisons: the same budget, seeds and initial weights for every arm, and what the difference is worth.

Each run is a directory of its own (runs.py), so a killed comparison goes on with what is finished.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hardneg.comparing.arms import Arm, parse_arm
from hardneg.comparing.cautions import cautions, of_all
from hardneg.comparing.checks import check_arms
from hardneg.comparing.request import Comparison, measure
from hardneg.comparing.runs import RunFailed, run_all, run_of, usual_threads
from hardneg.comparing.verdict import (
    Verdict,
    answer,
    last_of,
    rows_of,
    sentences,
    temperature_notes,
    unlike_notes,
    verdicts_of,
)
from hardneg.core.errors import warn_once
from hardneg.io.files import check_folder, go_on, write_json
from hardneg.io.provenance import environment

Results = list[list[dict[str, Any]]]
"""For every arm the figures of every seed."""


def compare(
    comparison: Comparison, out: Path, *, jobs: int | None = None, show: Callable[[str], None] = print
) -> dict[str, Any]:
    """Runs what is missing and writes comparison.json with the table and the sentences.

    At most ``jobs`` runs go side by side, by default one for each core or two for each GPU; fewer where memory does not
    allow it.
    """
    return carry_out(prepare(comparison, out, jobs), show)


@dataclass(frozen=True)
class Prepared:
    """A comparison whose arms can all be trained, and where and how they will be."""

    comparison: Comparison
    arms: list[Arm]
    out: Path
    jobs: int | None
    threads: int  # of every run: results depend on it in their last bits, and bits grow

    def run(self, arms: list[Arm], seeds: int, out: Path, show: Callable[[str], None], **how: bool) -> Results:
        return run_all(arms, list(range(seeds)), out, self.jobs, show, threads=self.threads, **how)


def prepare(comparison: Comparison, out: Path, jobs: int | None = None) -> Prepared:
    """Raises for what cannot be compared, before anything is trained or shown."""
    arms = [parse_arm(text).under(comparison.common) for text in comparison.arms]
    check_folder(out)
    check_arms(arms, comparison)
    return Prepared(comparison, arms, out, jobs, _threads(arms, comparison, out, jobs))


def carry_out(prepared: Prepared, show: Callable[[str], None]) -> dict[str, Any]:
    comparison, arms, out = prepared.comparison, prepared.arms, prepared.out
    tries = _tries(prepared, show)
    tuned = _best(arms, tries, comparison)
    results = prepared.run(tuned, comparison.seeds, out, show)
    rows = rows_of(tuned, results, comparison.metric)
    verdicts = verdicts_of(tuned, results, comparison.metric)
    option = comparison.tune[0] if comparison.tune else None
    summary = {
        "metric": comparison.metric,
        "k": results[0][0].get("k"),
        "num_test": results[0][0].get("num_test"),
        "rows": [asdict(row) for row in rows],
        "answer": answer(verdicts, measure(comparison.metric, results[0][0].get("k"))),
        "verdicts": [_as_json(one) for one in verdicts],
        "sentences": sentences(verdicts),
        "notes": temperature_notes(tuned, tuned=option == "temperature"),
        "cautions": _cautions(tuned, results, out),
        "unlike": unlike_notes([arm.complete().as_dict() for arm in tuned]),
        "tuned": {arm.text: arm.options[option] for arm in tuned} if option else None,
        "tries": {arm.text: tried for arm, tried in zip(arms, tries, strict=True)} if option else None,
        "comparison": asdict(comparison),
        "threads": prepared.threads,
        **environment(),
    }
    write_json(out / "comparison.json", summary, go_on)
    return summary


def _as_json(verdict: Verdict) -> dict[str, Any]:
    return asdict(verdict) | {"standing": verdict.standing, "sentence": verdict.sentence()}


def _threads(arms: list[Arm], comparison: Comparison, out: Path, jobs: int | None) -> int:
    """Those of every run: the number with which the comparison was begun, also where it goes on with other ``jobs``.

    A directory holds one comparison; the same one goes on where it stopped, with arms or seeds added at will.
    """
    path, threads = out / "request.json", usual_threads(arms, comparison.seeds, jobs)
    asked = json.loads(json.dumps({"common": comparison.common, "tune": comparison.tune, "metric": comparison.metric}))
    before = _read_request(path) if path.exists() else asked
    begun_with = before.get("threads")
    if before | asked != before:
        raise ValueError(f"{out} holds a comparison with other options ({path}); use another --out.")
    if begun_with not in (None, threads) and "OMP_NUM_THREADS" in os.environ:
        warn_once(
            "compare.threads",
            f"OMP_NUM_THREADS={threads} is not followed: this comparison was begun with {begun_with} for each run, on "
            "which its figures depend. Use another --out to begin anew.",
        )
    threads = begun_with or threads
    write_json(path, asked | {"threads": threads}, go_on)
    return threads


def _read_request(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (TypeError, ValueError):
        raise ValueError(f"{path} is damaged; delete it if the comparison is the same, or use another --out.") from None


def _cautions(arms: list[Arm], results: Results, out: Path) -> list[str]:
    seeds = range(len(results[0]))
    shared, warned = of_all([[one for seed in seeds for one in run_of(arm, seed, out).warnings()] for arm in arms])
    said = [f"All arms: {one}" for one in shared]
    for arm, of_arm, own in zip(arms, results, warned, strict=True):
        said += cautions(arm.text, arm.complete().as_dict(), [last_of(one) for one in of_arm], own)
    return said


Tries = list[tuple[float, float | None]]
"""The tuned values of an arm and what each reached on the validation split; None where training diverged."""


def _tries(prepared: Prepared, show: Callable[[str], None]) -> list[Tries]:
    """For every arm the same tries, with one seed; one that diverges has lost, and ends nothing."""
    arms, comparison = prepared.arms, prepared.comparison
    if comparison.tune is None:
        return [[] for _ in arms]
    every = [comparison.tries(arm) for arm in arms]
    runs = [one for tried in every for one in tried]
    results = iter(prepared.run(runs, 1, prepared.out / "tuning", show, may_diverge=True))
    reached = ((result or {}).get(comparison.metric) for (result,) in results)
    name = comparison.tune[0]
    return [
        [(one.options[name], value) for one, value in zip(tried, islice(reached, len(tried)), strict=True)]
        for tried in every
    ]


def _best(arms: list[Arm], tries: list[Tries], comparison: Comparison) -> list[Arm]:
    """The arms with the best of their tries, the first of them where several are; without tuning, as they are."""
    if comparison.tune is None:
        return arms
    name, best = comparison.tune[0], []
    for arm, tried in zip(arms, tries, strict=True):
        value, reached = max(tried, key=lambda one: -math.inf if one[1] is None else one[1])
        if reached is None:
            values = ", ".join(f"{value:g}" for value, _ in tried)
            raise RunFailed(f"{arm.text} diverged with every {name} that was tried ({values}); try others.")
        best.append(arm.with_option(name, value))
    return best
