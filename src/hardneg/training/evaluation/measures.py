"""The measures of encoders: an open set of names, with their titles in pages and tables and a sentence of explanation.

Every measure is better the higher it is and is shown times 100, so that differences are points. The module imports no
torch, so that ``--help`` stays fast. Data kinds add their own by ``register_measure``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

AUTO = "auto"
"""Stands for the first measure that the data supports."""

USUAL = "knn"
"""The headline of a result that does not name one."""


@dataclass(frozen=True)
class Measure:
    """How a measure is displayed.

    Attributes:
        title: Name in tables and pages.
        explained: A clause of explanation in which {split}, {noun} and {k} are filled in.
        unit: "%" or the name of the figure times 100.
    """

    title: str
    explained: str
    unit: str = "%"


MEASURES: dict[str, Measure] = {
    "knn": Measure("kNN accuracy", "each {split} {noun} gets the class that its {k} nearest training {noun}s vote for"),
    "1nn": Measure("1-NN accuracy", "each {split} {noun} gets the class of its nearest training {noun}"),
    "linear": Measure("linear probe", "a logistic regression is fitted to the frozen features"),
    "retrieval": Measure(
        "retrieval of the second view",
        "how often the second view nearest to the first view of a {split} {noun} is its own",
    ),
}


def register_measure(name: str, title: str, explained: str, unit: str = "%") -> None:
    """Add a measure that a data kind's ``evaluate`` may return.

    Args:
        name: Key in the figures of a run.
        title: Name in tables and pages.
        explained: A clause of explanation in which {split}, {noun} and {k} are filled in.
        unit: "%" or the name of the figure times 100.
    """
    MEASURES[name] = Measure(title, explained, unit)


def measure(name: str, k: int | None = None) -> str:
    """Return the title of a measure, with the k of kNN where it is known.

    >>> measure("knn", 5), measure("linear"), measure("mine")
    ('5-NN accuracy', 'linear probe', 'mine')
    """
    if name == "knn" and k:
        return f"{k}-NN accuracy"
    return MEASURES[name].title if name in MEASURES else name


def unit_of(name: str) -> str:
    """Return the unit of a measure; "%" for unknown names."""
    return MEASURES[name].unit if name in MEASURES else "%"


def measures_in(result: Mapping[str, Any]) -> list[str]:
    """Return the measures that a result contains; "1nn" is omitted where kNN itself used k = 1."""
    return [name for name in MEASURES if name in result and not (name == "1nn" and result.get("k") == 1)]


def headline_of(result: Mapping[str, Any]) -> str:
    """Return the measure by which a finished run is judged."""
    return str(result.get("headline", USUAL))


BEFORE = "before_training"
"""Key of a result under which the figures of the encoder before training are."""


def nothing_learnt(result: Mapping[str, Any]) -> str:
    """Return a sentence if a run is not significantly better than its encoder before training, else "".

    Args:
        result: Content of result.json.

    Example:
        >>> before = {"knn": 0.46, "difference": -0.01, "half_width": 0.02}
        >>> nothing_learnt({"knn": 0.45, BEFORE: before})
        'Nothing significant was learnt yet: kNN accuracy is 45.0 and was 46.0 before training (difference -1.0 ± 2.0).'
    """
    before, name = result.get(BEFORE) or {}, headline_of(result)
    gain, half = before.get("difference"), before.get("half_width")
    if gain is None or half is None or gain > half or name not in before:
        return ""
    now, then, gain, half = (f"{100 * value:.1f}" for value in (result[name], before[name], gain, half))
    change = f"is {now} and was {then} before training (difference {gain} ± {half})"
    return f"Nothing significant was learnt yet: {measure(name, result.get('k'))} {change}."
