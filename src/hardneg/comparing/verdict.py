"""Which differences are beyond noise: the table, and the sentences that terminal, JSON and page show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hardneg.comparing.arms import Arm
from hardneg.comparing.statistics import LEAST_SEEDS, Outcomes, difference_of, mean_of, outcomes_of

BUT = ", before the gradient through its weights is counted"
"""A tilt repels like a lower temperature exactly where its weights carry no gradient: Tilt(..., detach=True)."""

RunResults = Sequence[Mapping[str, Any]]
"""The figures of every seed of an arm."""


@dataclass(frozen=True)
class ArmRow:
    """One arm's line of the table."""

    arm: str
    values: list[float]
    mean: float
    half_width: float | None  # of the 95 % interval of the mean, over seeds and test items
    difference: float | None  # against the first arm
    difference_half_width: float | None
    detectable: float | None  # the true difference that is found four times in five
    effective_temperature: float  # at the strongest tilt of its schedule
    false_negatives: float  # this and the next two: means over the last records
    hardness: float
    clamped: float
    steps: int
    seconds: float
    uses_labels: bool = False
    collapsed: int = 0  # how many of its runs


def rows_of(arms: list[Arm], results: Sequence[RunResults], metric: str) -> list[ArmRow]:
    """The table: for each arm the results of all seeds, held against those of the first arm."""
    rows: list[ArmRow] = []
    first = outcomes_of(results[0], metric)
    for arm, of_arm in zip(arms, results, strict=True):
        outcomes = outcomes_of(of_arm, metric)
        mean, against = mean_of(outcomes), difference_of(outcomes, first) if rows else None
        rows.append(
            ArmRow(
                arm=arm.text,
                values=outcomes.accuracies.tolist(),
                mean=float(outcomes.accuracies.mean()),
                half_width=mean.half_width if mean else None,
                difference=float((outcomes.accuracies - first.accuracies).mean()) if rows else None,
                difference_half_width=against.half_width if against else None,
                detectable=against.detectable if against else None,
                effective_temperature=arm.effective_temperature,
                false_negatives=_mean_of_last(of_arm, "false_negatives"),
                hardness=_mean_of_last(of_arm, "hardness"),
                clamped=_mean_of_last(of_arm, "clamped"),
                steps=of_arm[0]["steps"],
                seconds=float(np.mean([result["seconds"] for result in of_arm])),
                uses_labels=arm.uses_labels,
                collapsed=sum(bool(result.get("collapsed")) for result in of_arm),
            )
        )
    return rows


def _mean_of_last(results: RunResults, name: str) -> float:
    found = [result.get("final", {}).get(name) for result in results]
    return float(np.mean([np.nan if value is None else value for value in found]))


@dataclass(frozen=True)
class Verdict:
    """Two arms held against each other, and what may be concluded.

    ``kind`` is "first" (against the first arm), "labels" (only one of the two sees labels, so nothing is concluded
    about negatives), "peers" (both see labels and the first arm does not, or the reverse) or "temperature" (a tilt
    against the untilted arm that repels alike).
    """

    arm: str
    against: str
    kind: str
    difference: float
    half_width: float | None
    detectable: float | None
    seeds: int
    num_test: int | None
    alike_at: str = ""  # "effective temperature 0.25", where the two repel alike
    why_open: str = ""  # where there is no verdict

    @property
    def standing(self) -> str:
        """ "above", "below" or "alike"; "open" with too few seeds, or without the number of test items."""
        if self.half_width is None:
            return "open"
        if abs(self.difference) <= self.half_width:
            return "alike"
        return "above" if self.difference > 0 else "below"

    def sentence(self) -> str:
        apart = f"{self.where()}: {self.worth()}."
        if self.kind == "labels":
            return f"{apart} Only one of the two sees labels, so this is not a difference of negatives."
        if self.alike_at:
            return (
                f"{apart} Both repel alike ({self.alike_at}): this is what is left of the tilt beside the temperature."
            )
        return apart

    def where(self) -> str:
        points = 100.0 * self.difference
        side = "above" if points > 0 else "below"
        place = f"{abs(points):.2f} points {side}" if abs(points) >= 0.005 else "level with"
        return f"{self.arm} is {place} {self.against}"

    def worth(self) -> str:
        if self.half_width is None or self.detectable is None:
            return "no verdict"  # the answer gives the reason
        points, width, seen = (100.0 * value for value in (self.difference, self.half_width, self.detectable))
        interval = f"95 % interval {points - width:+z.2f} to {points + width:+z.2f}"
        if self.standing != "alike":
            return f"beyond noise ({interval})"
        known = f"{self.seeds} seeds and {self.num_test:,} test items"
        return f"not beyond noise ({interval}; with {known}, less than {seen:.2f} points is not found reliably)"


def verdicts_of(arms: list[Arm], results: Sequence[RunResults], metric: str) -> list[Verdict]:
    """Every arm against the first, those that see labels among themselves, and tilts against their temperature."""
    outcomes = [outcomes_of(of_arm, metric) for of_arm in results]
    return [_verdict(arms, outcomes, *pair) for pair in _pairs(arms)]


def _pairs(arms: list[Arm]) -> Iterator[tuple[int, int, str]]:
    sees = [arm.uses_labels for arm in arms]
    peer = next((i for i, one in enumerate(sees) if one != sees[0]), None)
    for i in range(1, len(arms)):
        yield i, 0, "first" if sees[i] == sees[0] else "labels"
    for i in range(1, len(arms)):
        if peer is not None and i > peer and sees[i] == sees[peer]:
            yield i, peer, "peers"
    for i, arm in enumerate(arms):
        for j, other in enumerate(arms):
            if j not in (0, i) and not (peer == j < i) and arm.has_untilted_twin_in(other):
                yield i, j, "temperature"


def _verdict(arms: list[Arm], outcomes: list[Outcomes], i: int, j: int, kind: str) -> Verdict:
    one, other = outcomes[i], outcomes[j]
    found, seeds = difference_of(one, other), len(one.accuracies)
    why_open = "the number of test items is not known"
    if seeds < LEAST_SEEDS:
        why_open = f"{seeds} seeds are fewer than {LEAST_SEEDS}"
    return Verdict(
        arm=arms[i].text,
        against=arms[j].text,
        kind=kind,
        difference=float((one.accuracies - other.accuracies).mean()),
        half_width=found.half_width if found else None,
        detectable=found.detectable if found else None,
        seeds=seeds,
        num_test=one.num_test,
        alike_at=_alike_at(arms[i]) if arms[i].has_untilted_twin_in(arms[j]) else "",
        why_open="" if found else why_open,
    )


def _alike_at(arm: Arm) -> str:
    where = ", where the tilt is strongest" if arm.tilt_moves else ""
    return f"effective temperature {arm.effective_temperature:.3g}{where}{BUT * (not arm.repels_so_exactly)}"


def sentences(verdicts: Sequence[Verdict]) -> list[str]:
    """Whether each difference is beyond noise, and how far several of them can be trusted together."""
    judged = [one for one in verdicts if one.standing != "open"]
    return [one.sentence() for one in verdicts] + ([together(len(judged))] if len(judged) > 1 else [])


def together(differences: int) -> str:
    """Each 95 % interval is for one difference; over several, the error rates add up at most (Bonferroni)."""
    return (
        f"Each of the {differences} differences is judged by itself: were there none at all, one or more would look "
        f"beyond noise in up to {chance_of_one(differences)} % of such comparisons."
    )


def chance_of_one(differences: int) -> int:
    return min(100, 5 * differences)


SIDES = {"above": "Better beyond noise", "below": "Worse beyond noise", "alike": "No difference beyond noise"}


def answer(verdicts: Sequence[Verdict], measured: str) -> list[str]:
    """The answer: which arms are better than the first. One that sees labels is never it against arms that do not."""
    first, fair = verdicts[0], [one for one in verdicts if one.kind == "first"]
    apart = [one for one in verdicts if one.kind == "labels"]
    if first.half_width is None:
        return [f"There is no verdict, as {first.why_open}."]
    known = f"{first.seeds} seeds and {first.num_test:,} test items"
    lines = [f"Against {first.against}, in {measured}, with {known}:"] if fair else []
    for side, words in SIDES.items():
        if named := [f"{one.arm} ({100 * one.difference:+z.2f} points)" for one in fair if one.standing == side]:
            lines.append(f"{words}: {', '.join(named)}.")
    better = {one.arm for one in fair if one.standing == "above"}
    lines += [
        f"But {one.arm} is not better beyond noise than {one.against}, which has its effective temperature: a lower "
        "temperature may do as much."
        for one in verdicts
        if one.kind == "temperature" and one.arm in better and one.standing != "above"
    ]
    if apart:
        names = ", ".join(one.arm for one in apart)
        lines.append(f"Shown apart, as only one of the two sees labels: {names} beside {first.against}.")
    return lines


def temperature_notes(arms: list[Arm], *, tuned: bool = False) -> list[str]:
    """A tilt acts like a lower temperature: names the tilted arms without an untilted control.

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
