"""Contents of a report: the arms of a run or a comparison, their seeds, and what is missing.

``PageContents`` has ``ArmRuns``, which have ``SeedRun``; reading.py constructs them, and the modules of the sections
(write.py, charts.py, embeddings.py, pictures.py) read them. The functions at the end format numbers and names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from hardneg.comparing.arms import uses_labels
from hardneg.comparing.cautions import cautions, differing_settings, same_weights, settings_notes
from hardneg.comparing.request import letter_of
from hardneg.training.evaluation.measures import measure
from hardneg.training.loop.data_record import noun_in
from hardneg.training.loop.runs import Run

ABSENT = "n/a"
"""Text for a value that is missing or not finite."""

ContentsTable = dict[str, Any]
"""One line of the table, as it is in comparison.json."""


@dataclass(frozen=True)
class SeedRun:
    """One arm with one seed, as it is on disk.

    Attributes:
        seed: Seed of the run.
        run: Folder of the run.
        config: Contents of config.json.
        result: Contents of result.json; None before the run is finished.
        metrics: Records over training, from metrics.jsonl.
    """

    seed: int
    run: Run
    config: dict[str, Any]
    result: dict[str, Any] | None
    metrics: list[dict[str, Any]]

    @property
    def options(self) -> dict[str, Any]:
        """Options of the run."""
        return dict(self.config.get("options", {}))

    @property
    def trained(self) -> dict[str, Any] | None:
        """Record of what was trained (training/loop/data_record.py); None before training starts."""
        return self.config.get("trained")


@dataclass
class ArmRuns:
    """One arm with its runs.

    Attributes:
        number: Position on the page, from 0.
        text: The arm as text.
        row: The arm's line of the table.
        seeds: Runs of the arm, by seed.
        alone: True for the arm of a single run, which has no letter.
    """

    number: int
    text: str
    row: ContentsTable
    seeds: list[SeedRun] = field(default_factory=list)
    alone: bool = False

    @property
    def letter(self) -> str:
        """Short name of the arm on the page; empty for a single run."""
        return "" if self.alone else letter_of(self.number)

    @property
    def uses_labels(self) -> bool:
        """True if training uses labels, as the table records it or else by the options of the runs."""
        return bool(self.row.get("uses_labels")) or any(
            uses_labels(one.config.get("recipe", ""), one.options) for one in self.seeds
        )

    def cautions(self) -> list[str]:
        """Return the cautions of the arm, by the results and warnings of its runs."""
        options = self.seeds[0].options if self.seeds else {}
        warned = [warning for one in self.seeds for warning in one.run.warned()]
        return cautions(self.letter or self.text, options, self.finished(), warned)

    def finished(self) -> list[dict[str, Any]]:
        """Return the results of the finished runs."""
        return [one.result for one in self.seeds if one.result is not None]


@dataclass(frozen=True)
class PageContents:
    """Everything that a page shows.

    Attributes:
        path: Folder of the run or comparison.
        kind: "run", "comparison", "unfinished" (a comparison without comparison.json) or "several".
        metric: Name of the metric that decides.
        arms: Arms of the page; the first is the reference of a comparison.
        missing: Sentences on runs and files that are missing.
        facts: Contents of comparison.json, or of config.json for a single run.
        parts: Contents of each path, if there are several.
    """

    path: Path
    kind: str
    metric: str
    arms: list[ArmRuns]
    missing: list[str]
    facts: dict[str, Any]
    parts: list[PageContents] = field(default_factory=list)

    @property
    def runs(self) -> list[SeedRun]:
        """Runs of all arms."""
        return [one for arm in self.arms for one in arm.seeds]

    @property
    def options(self) -> dict[str, Any]:
        """Options that are equal in all runs."""
        every = [one.options for one in self.runs]
        if not every:
            return dict(self.facts.get("comparison", {}).get("common", {}))
        return {k: v for k, v in every[0].items() if all(k in other and other[k] == v for other in every)}

    @property
    def noun(self) -> str:
        """Word for one item of the data, such as "image"; "item" if the runs have several kinds of data."""
        found = {noun_in((one.trained or {}).get("data", {}).get("test", {})) for one in self.runs} or {"image"}
        return found.pop() if len(found) == 1 else "item"

    @property
    def differences(self) -> list[str]:
        """Sentences on settings, other than the negatives, that differ between arms."""
        return settings_notes(self.differing)

    @property
    def differing(self) -> dict[str, list[str]]:
        """Settings, other than the negatives, that differ between runs, with their values."""
        return differing_settings([one.options for one in self.runs], [one.trained for one in self.runs])

    @property
    def cautions(self) -> list[str]:
        """Cautions from comparison.json; without it, from the last records and warnings of the runs."""
        if "cautions" in self.facts:
            return list(self.facts["cautions"])
        return [one for arm in self.arms for one in arm.cautions()]

    @property
    def same_weights(self) -> bool:
        """True if runs with the same seed are known to have started with the same weights."""
        return same_weights([(one.seed, one.trained) for one in self.runs])


def known(value: Any) -> TypeGuard[float]:
    """Return whether the value is a finite number."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def missing_parts(arms: list[ArmRuns], seeds: int | None) -> list[str]:
    """Return a sentence for each run that is missing or unfinished, or has lost a file that the page would show.

    Args:
        arms: Arms of the page.
        seeds: Number of seeds that each arm should have; None: those that it has.
    """
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
    """Format a number with two decimals."""
    return f"{value:.2f}"


def percent(value: Any, digits: int = 2, unit: str = " %") -> str:
    """Format a share as a percentage, or "n/a" if it is not a number.

    >>> percent(0.12345), percent(None)
    ('12.35 %', 'n/a')
    """
    return f"{100 * value:.{digits}f}{unit}" if known(value) else ABSENT


def signed(value: float) -> str:
    """Format a difference of shares in points, with its sign; a value that rounds to zero has no minus sign.

    >>> signed(0.0123), signed(-0.00001)
    ('+1.23', '+0.00')
    """
    return f"{100 * value:+z.2f}"


def number(value: Any, form: str) -> str:
    """Format a number, or "n/a" if the value is not a finite number."""
    return format(value, form) if known(value) else ABSENT


def evaluated_in(page: PageContents) -> str:
    """Return the name of the split that is evaluated; both names if the runs differ in it."""
    every = [one.options for one in page.runs] or [page.facts.get("comparison", {}).get("common", {})]
    return " or ".join(sorted({str(one.get("evaluate_on", "test")) for one in every}))


def measure_in(page: PageContents, name: str) -> str:
    """Return the name of a measure on the page; kNN with its k, if that is equal in all runs."""
    known_k = {result.get("k") for arm in page.arms for result in arm.finished()}
    return measure(name, known_k.pop() if len(known_k) == 1 else None)


def class_name(label: int, names: tuple[str, ...]) -> str:
    """Return the name of a class, or its number where the names are not known.

    >>> class_name(1, ("cat", "dog")), class_name(1, ())
    ('dog', '1')
    """
    return names[label] if 0 <= label < len(names) else str(label)


def listed(parts: list[str]) -> str:
    """Join texts with commas and "and".

    >>> listed(["A", "B", "C"])
    'A, B and C'
    """
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
