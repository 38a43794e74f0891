"""How figures are written on the page."""

from __future__ import annotations

from typing import Any

from hardneg.comparing.request import measure
from hardneg.reporting.story import Story, known

ABSENT = "n/a"


def two_digits(value: float) -> str:
    return f"{value:.2f}"


def percent(value: Any, digits: int = 2, unit: str = " %") -> str:
    return f"{100 * value:.{digits}f}{unit}" if known(value) else ABSENT


def signed(value: float) -> str:
    """In points; what rounds to nothing has no minus."""
    return f"{100 * value:+z.2f}"


def number(value: Any, form: str) -> str:
    return format(value, form) if known(value) else ABSENT


def evaluated_in(story: Story) -> str:
    """The split whose images are evaluated; both where runs that were made apart differ in it."""
    runs = [one.options for arm in story.arms for one in arm.seeds]
    every = runs or [story.facts.get("comparison", {}).get("common", {})]
    return " or ".join(sorted({str(one.get("evaluate_on", "test")) for one in every}))


def measure_in(story: Story, name: str) -> str:
    """How a measure is called on the page; kNN by its k where that is the same in all runs."""
    known_k = {result.get("k") for arm in story.arms for result in arm.finished()}
    return measure(name, known_k.pop() if len(known_k) == 1 else None)


def listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
