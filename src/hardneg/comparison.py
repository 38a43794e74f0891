"""Comparisons: the same budget, seeds and initial weights for every arm, and what the difference is worth.

Each run is a directory of its own (runs.py), so a killed comparison goes on with what is finished.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from hardneg.arms import Arm, parse_arm
from hardneg.comparison_asked import Comparison
from hardneg.comparison_checks import check_arms
from hardneg.comparison_runs import RunFailed, run_all
from hardneg.comparison_verdict import rows_of, sentences, temperature_notes, unlike_notes
from hardneg.runs import environment, go_on, write_json


def compare(
    comparison: Comparison, out: Path, *, jobs: int | None = None, show: Callable[[str], None] = print
) -> dict[str, Any]:
    """Runs what is missing and writes comparison.json with the table and the sentences.

    At most ``jobs`` runs go side by side, by default one for each core or two for each GPU; fewer where memory does not
    allow it.
    """
    arms = [parse_arm(text).under(comparison.common) for text in comparison.arms]
    check_arms(arms, comparison)
    _check_same_comparison(comparison, out)
    tries = _tries(arms, comparison, out, jobs, show)
    tuned = _best(arms, tries, comparison)
    results = run_all(tuned, list(range(comparison.seeds)), out, jobs, show)
    rows = rows_of(tuned, results, comparison.metric)
    option = comparison.tune[0] if comparison.tune else None
    summary = {
        "metric": comparison.metric,
        "k": results[0][0].get("k"),
        "num_test": results[0][0].get("num_test"),
        "rows": [asdict(row) for row in rows],
        "sentences": sentences(rows),
        "notes": temperature_notes(tuned, tuned=option == "temperature"),
        "unlike": unlike_notes([arm.complete().as_dict() for arm in tuned]),
        "tuned": {arm.text: arm.options[option] for arm in tuned} if option else None,
        "tries": {arm.text: tried for arm, tried in zip(arms, tries, strict=True)} if option else None,
        "comparison": asdict(comparison),
        **environment(),
    }
    write_json(out / "comparison.json", summary, go_on)
    return summary


def _check_same_comparison(comparison: Comparison, out: Path) -> None:
    """A directory holds one comparison; the same one goes on where it stopped, with arms or seeds added at will."""
    path = out / "request.json"
    asked = json.loads(json.dumps({"common": comparison.common, "tune": comparison.tune, "metric": comparison.metric}))
    if path.exists() and json.loads(path.read_text()) != asked:
        raise ValueError(f"{out} holds a comparison with other options ({path}); use another --out.")
    write_json(path, asked, go_on)


Tries = list[tuple[float, float | None]]
"""The tuned values of an arm and what each reached on the validation split; None where training diverged."""


def _tries(
    arms: list[Arm], comparison: Comparison, out: Path, jobs: int | None, show: Callable[[str], None]
) -> list[Tries]:
    """For every arm the same tries, with one seed; one that diverges has lost, and ends nothing."""
    if comparison.tune is None:
        return [[] for _ in arms]
    every = [comparison.tries(arm) for arm in arms]
    runs = [one for tried in every for one in tried]
    results = iter(run_all(runs, [0], out / "tuning", jobs, show, may_diverge=True))
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
