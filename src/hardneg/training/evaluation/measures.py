"""What encoders are measured by: an open set of names, how pages and tables call them, and how they are explained.

Every measure is better the higher it is and is shown times 100, so that differences are points. Light, for ``--help``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

AUTO = "auto"
"""The first measure that the data allows."""

USUAL = "knn"
"""The measure of a result that names none."""


@dataclass(frozen=True)
class Measure:
    """How a measure is called, and a sentence on it in which {split}, {noun} and {k} are filled in."""

    title: str
    explained: str
    unit: str = "%"


MEASURES: dict[str, Measure] = {
    "knn": Measure(
        "kNN accuracy", "each {split} {noun} takes the class that its {k} nearest training {noun}s vote for"
    ),
    "1nn": Measure("1-NN accuracy", "each {split} {noun} takes the class of its nearest training {noun}"),
    "linear": Measure("linear probe", "a logistic regression is fitted to the features, which stay as they are"),
    "retrieval": Measure(
        "retrieval of the second view",
        "how often the second view that is nearest to the first view of a {split} {noun} is its own",
    ),
}


def register_measure(name: str, title: str, explained: str, unit: str = "%") -> None:
    """Adds a measure that a data kind may give; ``unit`` is "%" or how the figure times 100 is called."""
    MEASURES[name] = Measure(title, explained, unit)


def measure(name: str, k: int | None = None) -> str:
    """How a measure is called: kNN by its k, where that is known."""
    if name == "knn" and k:
        return f"{k}-NN accuracy"
    return MEASURES[name].title if name in MEASURES else name


def unit_of(name: str) -> str:
    return MEASURES[name].unit if name in MEASURES else "%"


def measures_in(result: Mapping[str, Any]) -> list[str]:
    """The measures that are there; that of one neighbour once where the vote is of one, too."""
    return [name for name in MEASURES if name in result and not (name == "1nn" and result.get("k") == 1)]


def headline_of(result: Mapping[str, Any]) -> str:
    """What a finished run is judged by."""
    return str(result.get("headline", USUAL))
