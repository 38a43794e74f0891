"""False alarms of the whole procedure of the atlas where nothing differs: tuning, seeds, tests and Holm's correction.

Every arm of a simulated cell is the same method. The pool of a cell has, for each try of the grid, the validation
figures of several tuning seeds, and the outcomes of every test item with several other seeds: real runs of one arm of a
plan. A repetition draws for each arm one tuning seed, takes the try that is best by it, draws the plan's number of runs
of that try, and judges all claims of the plan in all cells by the rules of the atlas.

    python experiments/procedure_simulation.py g5v2 --data build/worlds
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import atlas
import numpy as np

from hardneg.comparing.arms import parse_arm
from hardneg.comparing.progress import Watcher
from hardneg.comparing.request import tried_arm, tries_of
from hardneg.comparing.runs import RunSettings, run_all
from hardneg.comparing.statistics import SIGNIFICANCE, Outcomes, difference_of, holm, outcomes_of
from hardneg.io.provenance import environment

OUT = Path(__file__).with_suffix(".json")
SEEDS = 12
"""Runs of each try: so many that two arms rarely draw the same ones."""


def pool_of(plan: atlas.Plan, world: str, data: str, folder: Path, out: Path) -> list[tuple[list[float], Outcomes]]:
    """Train the first arm of a plan with every try and many seeds.

    Returns:
        For each try the validation figures of its seeds, and the outcomes of its runs on the test items.
    """
    comparison = plan.comparison(world, data, False, folder)
    arms = [parse_arm(text).with_defaults(comparison.common) for text in comparison.arms]
    tries = tries_of(arms, comparison)[0]
    held = [tried_arm(arms[0], values) for values in tries]
    final = [arms[0].tuned(values) for values in tries]
    seeds, watcher, how = list(range(SEEDS)), Watcher(lambda line: None), RunSettings(here=True)
    validation, test = (
        run_all(every, seeds, out / f"{world}-{data}" / name, how, watcher)
        for every, name in ((held, "validation"), (final, "test"))
    )
    return [
        ([one["retrieval"] for one in by_validation], outcomes_of(by_test, "retrieval"))
        for by_validation, by_test in zip(validation, test, strict=True)
    ]


def family(
    plan: atlas.Plan, pools: list[list[tuple[list[float], Outcomes]]], rng: np.random.Generator
) -> dict[str, bool]:
    """Judge one family of equal arms: whether any difference is significant, and any verdict is an effect."""
    estimates, cells = [], []
    for at, pool in enumerate(pools):
        drawn = {name: arm_of(pool, plan.facts["seeds"], rng) for name in plan.facts["arms"]}
        differences = [difference_of(drawn[one["arm"]], drawn[one["against"]]) for one in plan.facts["claims"]]
        estimates += [one for one in differences if one is not None]
        rows = [
            {"claim": i, "retrieval": {"value": one.value, "error": one.error, "freedom": one.freedom}}
            for i, one in enumerate(differences)
            if one is not None
        ]
        cells.append({"world": "null", "data": str(at), "untuned": False, "metric": "retrieval", "differences": rows})
    verdicts = [
        row["verdict"]
        for row in atlas.judged(plan, cells, with_power=False)
        if plan.facts["claims"][row["claim"]].get("kind") != "reaches"
    ]
    p_values = [one.p_value for one in estimates]
    return {
        "significant": min(holm(p_values)) <= SIGNIFICANCE,
        "uncorrected": min(p_values) <= SIGNIFICANCE,
        "effect": any(one in (atlas.HOLDS, atlas.HARMS) for one in verdicts),
    }


def arm_of(pool: list[tuple[list[float], Outcomes]], seeds: int, rng: np.random.Generator) -> Outcomes:
    """Tune one arm by one seed and draw its runs."""
    figures = [validation[rng.integers(len(validation))] for validation, _ in pool]
    best = pool[int(np.argmax(figures))][1]
    rows = rng.choice(len(best.accuracies), seeds, replace=False)
    assert best.correct is not None
    return replace(best, accuracies=best.accuracies[rows], correct=best.correct[rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study")
    parser.add_argument("--data", type=Path, default=atlas.ROOT / "build" / "worlds")
    parser.add_argument("--runs", type=Path, default=atlas.ROOT / "runs" / "simulation")
    parser.add_argument("--sets", nargs="+", default=["vectors/docstrings"], metavar="WORLD/DATA")
    parser.add_argument("--cells", type=int, default=9, help="cells of the family; the sets are taken in turn")
    parser.add_argument("--times", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    begun, plan = time.process_time(), atlas.Plan.read(options.study)
    atlas.one_thread()
    pools = [pool_of(plan, *name.split("/"), options.data, options.runs) for name in options.sets]
    cells = [pools[at % len(pools)] for at in range(options.cells)]
    rng = np.random.default_rng(0)
    found = [family(plan, cells, rng) for _ in range(options.times)]
    shares: dict[str, Any] = {name: float(np.mean([one[name] for one in found])) for name in found[0]}
    facts = {
        "study": plan.name,
        "digest": plan.digest,
        "tests": plan.family(),
        "sets": options.sets,
        "cells": options.cells,
        "seeds": SEEDS,
    }
    facts |= {"times": options.times, "shares": shares, "cpu_seconds": round(time.process_time() - begun, 1)}
    options.out.write_text(json.dumps(facts | environment(), indent=1, default=str) + "\n", encoding="utf-8")
    print(shares)


if __name__ == "__main__":
    main()
