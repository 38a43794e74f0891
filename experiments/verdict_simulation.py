"""Whether the verdicts of a comparison hold what they promise: simulated comparisons of two and of several arms.

An item is right in a run where a normal variable is positive: the arm's level, the item's difficulty, what the arm
makes of the item, the effect of the seed (one part shared by both arms, one part of the run), and noise. Arms of equal
accuracy should be called different in about 5 % of the comparisons; a true difference of three standard errors should
be found. In a family of several equal arms, each compared with the first, at most 5 % of the comparisons should have
any significant difference. The verdicts are those of ``hardneg compare`` itself.

    python experiments/verdict_simulation.py --out experiments/verdict_simulation.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm

from hardneg.comparing.statistics import SIGNIFICANCE, Outcomes, difference_of, holm

SEEDS, ITEMS = (3, 4, 5, 7, 10), (200, 1_000, 10_000)
FAMILIES, FAMILY_SEEDS, FAMILY_ITEMS = (3, 5, 9), (3, 5), 1_000
FAMILY_TIMES = 2_000
ACCURACY = 0.8


@dataclass(frozen=True)
class World:
    """Where the variance comes from, as standard deviations beside a noise of 1."""

    name: str
    difficulty: float = 1.5  # of an item, for both arms
    arm_item: float = 0.0  # what one arm makes of an item beside the other
    shared: float = 0.0  # of a seed, in both arms
    run: float = 0.0  # of a run
    other_run: float | None = None  # of a run of the other arm, where it is not the same

    def spread(self, run: float) -> float:
        """Standard deviation of the variable whose sign decides."""
        parts = (1.0, self.difficulty, self.arm_item, self.shared, run)
        return sqrt(sum(part**2 for part in parts))


WORLDS = (
    World("identical, no effect of the seed"),
    World("identical, seeds decide", run=0.25),
    World("equal, one arm varies twice as much", run=0.2, other_run=0.1),
    World("equal, test items decide", arm_item=0.6, run=0.01),
    World("equal, both decide", arm_item=0.4, run=0.06),
    World("equal, seeds shared in part", arm_item=0.3, shared=0.05, run=0.06),
)


def comparison(
    world: World, seeds: int, items: int, gains: Sequence[float], random: np.random.Generator
) -> list[Outcomes]:
    """One arm for each of ``gains``, by which its accuracy is larger; what is random is drawn anew."""
    difficulty = world.difficulty * random.standard_normal(items, np.float32)
    shared = world.shared * random.standard_normal(seeds)
    arms = []
    other = world.run if world.other_run is None else world.other_run
    for gain, run in zip(gains, (world.run, *[other] * (len(gains) - 1)), strict=True):
        of_item = difficulty + world.arm_item * random.standard_normal(items, np.float32)
        of_run = shared + run * random.standard_normal(seeds) + world.spread(run) * norm.ppf(ACCURACY + gain)
        noise = random.standard_normal((seeds, items), np.float32)
        right = (noise + of_item > -of_run[:, None].astype(np.float32)).astype(float)
        arms.append(Outcomes(right.mean(axis=1), right, items))
    return arms


def called_different(
    world: World, seeds: int, items: int, gain: float, times: int, random: np.random.Generator
) -> tuple[float, float]:
    """The share of comparisons whose interval leaves out 0, and the standard deviation of the differences."""
    estimates = [difference_of(*comparison(world, seeds, items, (gain, 0.0), random)) for _ in range(times)]
    found = [abs(one.value) > one.half_width for one in estimates if one is not None]
    return float(np.mean(found)), float(np.std([one.value for one in estimates if one is not None], ddof=1))


def cell(world: World, seeds: int, items: int, times: int, seed: int = 0) -> dict[str, float]:
    random = np.random.default_rng([seed, seeds, items])
    false, error = called_different(world, seeds, items, 0.0, times, random)
    found, _ = called_different(world, seeds, items, 3.0 * error, times, random)
    return {"seeds": seeds, "items": items, "standard_error": error, "called_different": false, "found": found}


def family(world: World, arms: int, seeds: int, times: int, seed: int = 0, items: int = FAMILY_ITEMS) -> dict[str, Any]:
    """The share of comparisons of equal arms with any significant difference, with Holm's correction and without."""
    random = np.random.default_rng([seed, arms, seeds, items])
    alone, corrected = 0, 0
    for _ in range(times):
        first, *others = comparison(world, seeds, items, (0.0,) * arms, random)
        estimates = [difference_of(one, first) for one in others]
        p_values = [one.p_value for one in estimates if one is not None]
        alone += min(p_values) <= SIGNIFICANCE
        corrected += min(holm(p_values)) <= SIGNIFICANCE
    return {"arms": arms, "seeds": seeds, "alone": alone / times, "corrected": corrected / times}


def family_table(families: list[dict[str, Any]]) -> str:
    """As docs/explanation/verdict.md has it: families with a false verdict, in percent, without and with correction."""
    lines = ["| arms | seeds | " + " | ".join(f"{arms} arms" for arms in FAMILIES) + " |"]
    lines.append("| --- | --- |" + " --- |" * len(FAMILIES))
    for one in families:
        for seeds in FAMILY_SEEDS:
            cells = [cell for cell in one["cells"] if cell["seeds"] == seeds]
            shares = [f"{100 * c['alone']:.1f} / {100 * c['corrected']:.1f}" for c in cells]
            lines.append(f"| {one['world']} | {seeds} | {' | '.join(shares)} |")
    return "\n".join(lines) + "\n"


def table(worlds: list[dict[str, Any]]) -> str:
    """As docs/explanation/verdict.md has it: the range over seeds and items, in percent."""
    lines = ["| arms | equal, called different | different, found |", "| --- | --- | --- |"]
    for one in worlds:
        wrong = [100 * cell["called_different"] for cell in one["cells"]]
        found = [100 * cell["found"] for cell in one["cells"]]
        shares = f"{min(wrong):.1f} to {max(wrong):.1f} % | {min(found):.0f} to {max(found):.0f} %"
        lines.append(f"| {one['world']['name']} | {shares} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("experiments/verdict_simulation.json"))
    parser.add_argument("--times", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1, help="The rules were chosen with seed 0.")
    options, begun, worlds = parser.parse_args(), time.perf_counter(), []
    for world in WORLDS:
        cells = [cell(world, seeds, items, options.times, options.seed) for seeds in SEEDS for items in ITEMS]
        worlds.append({"world": asdict(world), "cells": cells})
        for one in cells:
            print(f"{world.name:45} {one}", flush=True)
    families = []
    for world in WORLDS:
        sizes = [(arms, seeds) for seeds in FAMILY_SEEDS for arms in FAMILIES]
        cells = [family(world, arms, seeds, FAMILY_TIMES, options.seed) for arms, seeds in sizes]
        families.append({"world": world.name, "items": FAMILY_ITEMS, "cells": cells})
        for one in cells:
            print(f"{world.name:45} {one}", flush=True)
    seconds = round(time.perf_counter() - begun, 1)
    found = {"times": options.times, "seed": options.seed, "seconds": seconds, "worlds": worlds}
    found |= {"family_times": FAMILY_TIMES, "families": families}
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(worlds))
    print(family_table(families))


if __name__ == "__main__":
    main()
