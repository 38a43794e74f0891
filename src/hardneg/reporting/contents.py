"""The contents of the page: the arms of a run or a comparison, their seeds, what is missing, and figures as text."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from hardneg.comparing.arms import uses_labels
from hardneg.comparing.cautions import cautions, same_weights, unlike, unlike_notes
from hardneg.comparing.request import letter_of
from hardneg.training.data_record import noun_in
from hardneg.training.evaluation.measures import measure
from hardneg.training.runs import Run

ABSENT = "n/a"

ContentsTable = dict[str, Any]
"""One line of the table, as comparison.json has it."""


@dataclass(frozen=True)
class SeedRun:
    """What is on disk of one arm with one seed."""

    seed: int
    run: Run
    config: dict[str, Any]
    result: dict[str, Any] | None
    metrics: list[dict[str, Any]]

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.config.get("options", {}))

    @property
    def trained(self) -> dict[str, Any] | None:
        """The record of what was trained; None before training begins."""
        return self.config.get("trained")


@dataclass
class ArmRuns:
    """One arm: its letter on the page, its line of the table, and its runs."""

    number: int
    text: str
    row: ContentsTable
    seeds: list[SeedRun] = field(default_factory=list)
    alone: bool = False  # a single run has no letter

    @property
    def letter(self) -> str:
        return "" if self.alone else letter_of(self.number)

    @property
    def uses_labels(self) -> bool:
        """As the table says; without one, by the options of the runs."""
        return bool(self.row.get("uses_labels")) or any(
            uses_labels(one.config.get("recipe", ""), one.options) for one in self.seeds
        )

    def cautions(self) -> list[str]:
        options = self.seeds[0].options if self.seeds else {}
        warned = [warning for one in self.seeds for warning in one.run.warned()]
        return cautions(self.text, options, self.finished(), warned)

    def finished(self) -> list[dict[str, Any]]:
        return [one.result for one in self.seeds if one.result is not None]


@dataclass(frozen=True)
class PageContents:
    """The contents of the page."""

    path: Path
    kind: str  # "run", "comparison", "unfinished" (a comparison without comparison.json) or "several"
    metric: str
    arms: list[ArmRuns]
    missing: list[str]
    facts: dict[str, Any]  # comparison.json, or config.json of a single run
    parts: list[PageContents] = field(default_factory=list)  # of several paths, each by itself

    @property
    def runs(self) -> list[SeedRun]:
        """Of all arms."""
        return [one for arm in self.arms for one in arm.seeds]

    @property
    def options(self) -> dict[str, Any]:
        """Those that all runs share."""
        every = [one.options for one in self.runs]
        if not every:
            return dict(self.facts.get("comparison", {}).get("common", {}))
        return {k: v for k, v in every[0].items() if all(k in other and other[k] == v for other in every)}

    @property
    def noun(self) -> str:
        """What one item of the data is called; an item where runs that were made apart have several kinds."""
        found = {noun_in((one.trained or {}).get("data", {}).get("test", {})) for one in self.runs} or {"image"}
        return found.pop() if len(found) == 1 else "item"

    @property
    def unlike(self) -> list[str]:
        """What differs between the arms beside their negatives."""
        return unlike_notes(self.differing)

    @property
    def differing(self) -> dict[str, list[str]]:
        return unlike([one.options for one in self.runs], [one.trained for one in self.runs])

    @property
    def cautions(self) -> list[str]:
        """As comparison.json says; without it, by the last records and the warnings of the runs."""
        if "cautions" in self.facts:
            return list(self.facts["cautions"])
        return [one for arm in self.arms for one in arm.cautions()]

    @property
    def same_weights(self) -> bool:
        """Whether runs with the same seed began with the same weights, by the digests that they recorded."""
        return same_weights([(one.seed, one.trained) for one in self.runs])


def known(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)


def missing_parts(arms: list[ArmRuns], seeds: int | None) -> list[str]:
    """Which runs are not there or not finished, and which have lost a part that the page would show."""
    problems = []
    for arm in arms:
        there = {one.seed: one for one in arm.seeds}
        for seed in range(seeds) if seeds is not None else there:
            name = f"{arm.text}, seed {seed}"
            if seed not in there:
                problems.append(f"{name}: no run directory with these options")
            elif there[seed].result is None:
                steps = there[seed].metrics[-1].get("step", 0) if there[seed].metrics else 0
                problems.append(f"{name}: not finished (last record at step {steps})")
            elif not there[seed].metrics:
                problems.append(f"{name}: no records over training (metrics.jsonl)")
    return problems


def two_digits(value: float) -> str:
    return f"{value:.2f}"


def percent(value: Any, digits: int = 2, unit: str = " %") -> str:
    return f"{100 * value:.{digits}f}{unit}" if known(value) else ABSENT


def signed(value: float) -> str:
    """In points; what rounds to nothing has no minus."""
    return f"{100 * value:+z.2f}"


def number(value: Any, form: str) -> str:
    return format(value, form) if known(value) else ABSENT


def evaluated_in(story: PageContents) -> str:
    """The split whose items are evaluated; both where runs that were made apart differ in it."""
    every = [one.options for one in story.runs] or [story.facts.get("comparison", {}).get("common", {})]
    return " or ".join(sorted({str(one.get("evaluate_on", "test")) for one in every}))


def measure_in(story: PageContents, name: str) -> str:
    """How a measure is called on the page; kNN by its k where that is the same in all runs."""
    known_k = {result.get("k") for arm in story.arms for result in arm.finished()}
    return measure(name, known_k.pop() if len(known_k) == 1 else None)


def listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
