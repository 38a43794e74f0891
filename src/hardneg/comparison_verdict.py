"""What the figures of a comparison are worth: intervals over the seeds, the smallest difference seen, and sentences."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import erfc
from typing import Any

import numpy as np

from hardneg.arms import Arm


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
                half_width=paired(values, [0.0] * len(values), resolution)[1],
                difference=against[0],
                difference_half_width=against[1],
                detectable=against[2],
                effective_temperature=arm.effective_temperature,
                false_negatives=_mean_of_final(of_arm, "false_negatives"),
                hardness=_mean_of_final(of_arm, "hardness"),
                clamped=_mean_of_final(of_arm, "clamped"),
                steps=of_arm[0]["steps"],
                seconds=float(np.mean([result["seconds"] for result in of_arm])),
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

    Accuracies are rounded to ``resolution``, which alone gives a difference of two the standard deviation
    resolution / sqrt(6). Seeds that happen to agree do not say less than that.
    """
    from scipy.stats import t

    differences = np.asarray(values) - np.asarray(against)
    n = len(differences)
    error = max(float(differences.std(ddof=1)), resolution / 6.0**0.5) / n**0.5
    return float(differences.mean()), float(t.ppf(0.975, n - 1)) * error, detectable_errors(n) * error


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
    """What each difference is worth, in plain words."""
    first, said = rows[0], []
    for row in rows[1:]:
        assert row.difference is not None
        assert row.difference_half_width is not None
        assert row.detectable is not None
        points, width, seen = (100.0 * value for value in (row.difference, row.difference_half_width, row.detectable))
        side = "above" if points > 0 else "below"
        verdict = (
            f"beyond noise (95 % interval {points - width:+.2f} to {points + width:+.2f})"
            if abs(points) > width
            else f"not beyond noise (with {len(row.values)} seeds, less than {seen:.2f} points is not seen reliably)"
        )
        where = f"{abs(points):.2f} points {side}" if abs(points) >= 0.005 else "level with"
        said.append(f"{row.arm} is {where} {first.arm}: {verdict}.")
    return said


def temperature_notes(arms: list[Arm]) -> list[str]:
    """A tilt acts like a lower temperature: says which tilted arm lacks its untilted twin."""
    return [
        f"{arm.text} repels like temperature {arm.effective_temperature:.3g}"
        f"{' where its tilt is strongest' if arm.tilt_moves else ''}; no untilted arm that is like it otherwise has "
        "that temperature, so a gain over the others may be a gain of temperature. Add one, or use --tune "
        "temperature=..."
        for arm in arms
        if arm.beta > 0.0 and not any(arm.has_untilted_twin_in(other) for other in arms)
    ]
