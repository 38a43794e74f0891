"""What the figures of a comparison are worth: intervals over the seeds, the smallest difference seen, and sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import erfc
from typing import Any

import numpy as np

from hardneg.comparing.arms import Arm
from hardneg.comparing.request import SHARED

BESIDE = ("encoder", "dim", "augment", "learning_rate", "weight_decay", "precision")
"""What arms may write, and what makes a difference tell of more than their negatives."""
BUT = ", before the gradient through its weights is counted"
"""A tilt repels like a lower temperature exactly where its weights carry no gradient: Tilt(..., detach=True)."""


@dataclass(frozen=True)
class Row:
    """One arm's line of the table."""

    arm: str
    values: list[float]
    mean: float
    half_width: float  # of the 95 % interval of the mean
    difference: float | None  # paired, against the first arm
    difference_half_width: float | None
    detectable: float | None  # the smallest difference seen four times in five with so many seeds
    effective_temperature: float  # at the strongest tilt of its schedule
    false_negatives: float  # this and the next two: of the last recorded batch
    hardness: float
    clamped: float
    steps: int
    seconds: float
    uses_labels: bool = False  # it is told the class of every training image


def rows_of(arms: list[Arm], results: list[list[dict[str, Any]]], metric: str) -> list[Row]:
    """The table: for each arm the results of all seeds, held against those of the first arm, seed by seed."""
    rows: list[Row] = []
    for arm, of_arm in zip(arms, results, strict=True):
        values = [float(result[metric]) for result in of_arm]
        resolution = resolution_of(of_arm[0].get("num_test"))
        against = paired(values, rows[0].values, resolution) if rows else (None, None, None)
        rows.append(
            Row(
                arm=arm.text,
                values=values,
                mean=float(np.mean(values)),
                half_width=half_width(values, resolution),
                difference=against[0],
                difference_half_width=against[1],
                detectable=against[2],
                effective_temperature=arm.effective_temperature,
                false_negatives=_mean_of_final(of_arm, "false_negatives"),
                hardness=_mean_of_final(of_arm, "hardness"),
                clamped=_mean_of_final(of_arm, "clamped"),
                steps=of_arm[0]["steps"],
                seconds=float(np.mean([result["seconds"] for result in of_arm])),
                uses_labels=arm.uses_labels,
            )
        )
    return rows


def _mean_of_final(results: list[dict[str, Any]], name: str) -> float:
    found = [result["final"][name] for result in results]
    return float(np.mean([np.nan if value is None else value for value in found]))


def resolution_of(num_test: int | None) -> float:
    """The step in which an accuracy on so many images moves; 0 where their number is not known."""
    return 1.0 / num_test if num_test else 0.0


def paired(values: list[float], against: list[float], resolution: float = 0.0) -> tuple[float, float, float]:
    """Mean of the paired differences, half its 95 % interval, and the difference seen with a power of 80 %.

    Accuracies are rounded to ``resolution``, which alone gives one the standard deviation resolution / sqrt(12), and a
    difference of two resolution / sqrt(6). Seeds that happen to agree do not say less than that.
    """
    differences = np.asarray(values) - np.asarray(against)
    n = len(differences)
    error = _error(differences, resolution / 6.0**0.5)
    return float(differences.mean()), _t(n) * error, detectable_errors(n) * error


def half_width(values: list[float], resolution: float = 0.0) -> float:
    """Half the 95 % interval of the mean of accuracies, of which each is rounded to ``resolution``."""
    return _t(len(values)) * _error(np.asarray(values), resolution / 12.0**0.5)


def _error(values: np.ndarray[Any, Any], least: float) -> float:
    """The standard error of the mean, from a standard deviation of at least so much."""
    return max(float(values.std(ddof=1)), least) / float(len(values) ** 0.5)


def _t(n: int) -> float:
    from scipy.stats import t

    return float(t.ppf(0.975, n - 1))


@cache
def detectable_errors(n: int, power: float = 0.8) -> float:
    """The true difference, in standard errors, that a paired t-test of n pairs at 5 % sees with this power.

    With d the difference and s the estimated standard deviation over the true one, it is seen where
    |d + z| > t s, z standard normal: the normal probabilities are integrated over the chi distribution of s.
    """
    from scipy.integrate import quad
    from scipy.optimize import brentq
    from scipy.stats import chi, t

    freedom = n - 1
    least = float(t.ppf(0.975, freedom)) / freedom**0.5  # times a chi variable

    def seen(difference: float) -> float:
        def at(s: float) -> float:
            beyond = _upper_tail(least * s - difference) + _upper_tail(least * s + difference)
            return float(chi.pdf(s, freedom)) * beyond

        return float(quad(at, 0.0, float(chi.isf(1e-12, freedom)), limit=200)[0])

    return float(brentq(lambda difference: seen(difference) - power, 0.0, 100.0))


def _upper_tail(z: float) -> float:
    """P(Z > z) of a standard normal variable."""
    return 0.5 * erfc(z / 2.0**0.5)


def sentences(rows: list[Row]) -> list[str]:
    """What each difference is worth, in plain words; and what several of them are worth together."""
    first, said = rows[0], []
    for row in rows[1:]:
        assert row.difference is not None
        assert row.difference_half_width is not None
        assert row.detectable is not None
        points, width, seen = (100.0 * value for value in (row.difference, row.difference_half_width, row.detectable))
        side = "above" if points > 0 else "below"
        verdict = (
            f"beyond noise (95 % interval {points - width:+z.2f} to {points + width:+z.2f})"
            if abs(points) > width
            else f"not beyond noise (with {len(row.values)} seeds, less than {seen:.2f} points is not seen reliably)"
        )
        where = f"{abs(points):.2f} points {side}" if abs(points) >= 0.005 else "level with"
        said.append(f"{row.arm} is {where} {first.arm}: {verdict}.")
    return [*said, together(len(said))] if len(said) > 1 else said


def together(differences: int) -> str:
    """Intervals of 95 % stand each for itself; the chances that they mislead add up at most (Bonferroni)."""
    return (
        f"Each of the {differences} differences is judged by itself: were there none at all, one or more would look "
        f"beyond noise in up to {chance_of_one(differences)} % of such comparisons."
    )


def chance_of_one(differences: int) -> int:
    return min(100, 5 * differences)


def temperature_notes(arms: list[Arm], *, tuned: bool = False) -> list[str]:
    """A tilt acts like a lower temperature: says which tilted arm lacks its untilted twin.

    Where the temperature is ``tuned``, any untilted arm that is like it otherwise is at the best it could have.
    """
    missing = (
        "no untilted arm that is like it otherwise had its temperature tuned beside it, so a gain over the others may "
        "be a gain of temperature. Add one."
        if tuned
        else "no untilted arm that is like it otherwise has that temperature, so a gain over the others may be a gain "
        "of temperature. Add one, or use --tune temperature=..."
    )
    return [
        f"{arm.text} repels like temperature {arm.effective_temperature:.3g}"
        f"{' where its tilt is strongest' if arm.tilt_moves else ''}{BUT * (not arm.repels_so_exactly)}; {missing}"
        for arm in arms
        if arm.beta > 0.0 and not any(arm.has_untilted_twin_in(other, at_any_temperature=tuned) for other in arms)
    ]


def unlike(options: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """What differs between runs with these options beside the negatives and the seeds, and its values."""
    values = {name: list(dict.fromkeys(_shown(one.get(name)) for one in options)) for name in (*SHARED, *BESIDE)}
    return {name: found for name, found in values.items() if name != "seed" and len(found) > 1}


def _shown(value: Any) -> str:
    """1 as 1.0 is."""
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def unlike_notes(options: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{name} differs: {', '.join(values)}." for name, values in unlike(options).items()]
