"""Verdicts of a comparison: the table, which differences are significant, and the sentences that report them.

``rows_of`` makes the table and ``verdicts_of`` the pairwise verdicts, from the estimates of statistics.py.
``headline``, ``answer``, ``sentences`` and ``temperature_notes`` put them into words, once for comparison.json, the
terminal and the report. Sentences name arms by their letters A, B, ..., which the table and the page explain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from hardneg.comparing.arms import Arm
from hardneg.comparing.request import letter_of
from hardneg.comparing.statistics import (
    LEAST_SEEDS,
    SIGNIFICANCE,
    MeanEstimate,
    Outcomes,
    difference_of,
    holm,
    holm_levels,
    mean_of,
    outcomes_of,
)
from hardneg.training.evaluation.measures import BEFORE

GRADIENT_CAVEAT = ", before the gradient through its weights is counted"
"""A tilt repels exactly like a lower temperature only if no gradient flows through its weights: Tilt(detach=True)."""

SIDES = {
    "above": "Significantly better",
    "below": "Significantly worse",
    "alike": "No significant difference",
}
"""Headings of the answer, by the standing of a verdict."""

RunResults = Sequence[Mapping[str, Any]]
"""For one arm the results of its seeds."""


@dataclass(frozen=True)
class ArmRow:
    """One arm's line of the table, as comparison.json has it.

    Attributes:
        arm: The arm as text.
        values: Deciding metric of every seed.
        mean: Mean of the values.
        half_width: Half the 95 % interval of the mean, over seeds and test items; None with too few seeds.
        difference: Mean difference from the first arm; None for the first arm itself.
        difference_half_width: Half the 95 % interval of the difference.
        detectable: True difference that would be detected with a probability of 80 %.
        effective_temperature: Temperature / (1 + beta), at the strongest tilt of the schedule.
        false_negatives: Share of false negatives, mean over the last records.
        hardness: Mean similarity of the negatives, mean over the last records.
        clamped: Share of pairs whose correction was clamped, mean over the last records.
        steps: Number of training steps.
        seconds: Mean training time of a run.
        uses_labels: True if training uses labels.
        collapsed: Number of runs that collapsed.
        before: Mean of the deciding metric before training, if known.
    """

    arm: str
    values: list[float]
    mean: float
    half_width: float | None
    difference: float | None
    difference_half_width: float | None
    detectable: float | None
    effective_temperature: float
    false_negatives: float
    hardness: float
    clamped: float
    steps: int
    seconds: float
    uses_labels: bool = False
    collapsed: int = 0
    before: float | None = None


def rows_of(arms: list[Arm], results: Sequence[RunResults], metric: str) -> list[ArmRow]:
    """Return the table: one row per arm, with differences from the first arm.

    Args:
        arms: Arms of the comparison.
        results: For every arm the results of its seeds.
        metric: Name of the score that decides.
    """
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
                before=_mean_before(of_arm, metric),
            )
        )
    return rows


def before_training(means: Sequence[tuple[str, float | None]]) -> str:
    """Return a sentence with the deciding metric before training, once if it is that of all arms.

    Args:
        means: Name and mean of every arm; None where it is unknown.

    Example:
        >>> before_training([("A", 0.453), ("B", 0.453)]), before_training([("A", 0.453), ("B", 0.5)])
        (' Before training the mean was 45.3.', ' Before training the means were A 45.3, B 50.0.')
    """
    each = {arm: f"{100 * mean:.1f}" for arm, mean in means if mean is not None}
    if len(each) == len(means) and len(set(each.values())) == 1:
        return f" Before training the mean was {each.popitem()[1]}."
    listed = ", ".join(f"{arm} {value}" for arm, value in each.items())
    return f" Before training the means were {listed}." if each else ""


def _mean_before(results: RunResults, metric: str) -> float | None:
    """Mean over seeds of a metric before training; None if a run has none."""
    found = [result.get(BEFORE, {}).get(metric) for result in results]
    return None if None in found else float(np.mean(found))


def _mean_of_last(results: RunResults, name: str) -> float:
    """Mean over seeds of a statistic of the last records; NaN where a run has none."""
    found = [result.get("final", {}).get(name) for result in results]
    return float(np.mean([np.nan if value is None else value for value in found]))


@dataclass(frozen=True)
class Verdict:
    """Comparison of two arms.

    Attributes:
        arm: The arm as text.
        against: The arm that it is compared with.
        letter: Letter of the arm.
        against_letter: Letter of the arm that it is compared with.
        kind: "first" (against the first arm), "labels" (only one of the two uses labels, so nothing is concluded about
            negatives), "peers" (both use labels and the first arm does not, or the reverse) or "temperature" (a tilted
            arm against its untilted control).
        difference: Difference of the means, as a share.
        half_width: Half the uncorrected 95 % interval of the difference; None where there is no verdict.
        corrected_half_width: Half the interval at the level of its test, which excludes 0 if it is significant.
        p_value: P-value of the difference, corrected for all differences of the comparison.
        family: Number of differences of the comparison that are judged.
        detectable: True difference that would be detected with a probability of 80 %.
        seeds: Number of seeds.
        num_test: Number of test items, if known.
        alike_at: Where an arm and its untilted control repel alike, such as "effective temperature 0.25".
        why_open: Why there is no verdict.
    """

    arm: str
    against: str
    letter: str
    against_letter: str
    kind: str
    difference: float
    half_width: float | None
    corrected_half_width: float | None
    p_value: float | None
    family: int
    detectable: float | None
    seeds: int
    num_test: int | None
    alike_at: str = ""
    why_open: str = ""

    @property
    def standing(self) -> str:
        """Outcome: "above" or "below" (significant), "alike" (not significant), or "open" (no verdict)."""
        if self.p_value is None:
            return "open"
        if self.p_value > SIGNIFICANCE or self.difference == 0.0:
            return "alike"
        return "above" if self.difference > 0 else "below"

    def without_verdict(self, why: str) -> Verdict:
        """Return the difference alone, with the reason why it is not judged."""
        unjudged = replace(self, half_width=None, corrected_half_width=None, p_value=None, detectable=None)
        return replace(unjudged, why_open=why)

    def sentence(self) -> str:
        """Return the whole finding as one or two sentences."""
        apart = f"{self.position()}: {self.judgement()}."
        if self.kind == "labels":
            return f"{apart} Only one of the two uses labels, so this is not a difference between negatives."
        if self.alike_at:
            return f"{apart} Both repel alike ({self.alike_at}): this is the tilt's effect beyond its temperature."
        return apart

    def position(self) -> str:
        """Return the first half of the sentence: by how many points the arm is above or below the other."""
        points = 100.0 * self.difference
        side = "above" if points > 0 else "below"
        place = f"{abs(points):.2f} points {side}" if abs(points) >= 0.005 else "level with"
        return f"{self.letter} is {place} {self.against_letter}"

    def interval(self) -> str:
        """Return the 95 % interval of the difference in points; empty where there is none."""
        if self.half_width is None:
            return ""
        points, width = 100.0 * self.difference, 100.0 * self.half_width
        return f"95 % interval {points - width:+z.2f} to {points + width:+z.2f}"

    def judgement(self) -> str:
        """Return the second half of the sentence: whether the difference is significant, with its interval."""
        if self.half_width is None or self.detectable is None or self.p_value is None:
            return "no verdict"  # the headline gives the reason
        corrected = f"; p {_shown_p(self.p_value)}, corrected for {self.family} differences" if self.family > 1 else ""
        if self.standing != "alike":
            return f"significant ({self.interval()}{corrected})"
        if abs(self.difference) > self.half_width:
            return f"not significant after correction ({self.interval()} for this difference alone{corrected})"
        known = f"{self.seeds} seeds and {self.num_test:,} test items"
        seen = 100.0 * self.detectable
        return f"not significant ({self.interval()}; {known} do not reliably detect less than {seen:.2f} points)"


def _shown_p(value: float) -> str:
    """Format a p-value.

    >>> _shown_p(0.0300), _shown_p(1e-9)
    ('= 0.03', '< 0.001')
    """
    return f"= {value:.2g}" if value >= 0.001 else "< 0.001"


def verdicts_of(arms: list[Arm], results: Sequence[RunResults], metric: str) -> list[Verdict]:
    """Return the verdicts of a comparison.

    These are every arm against the first, arms that use labels against each other where the first does not (or the
    reverse), and tilted arms against their untilted controls. All of them are one family: if no two arms differ, at
    most 5 % of the comparisons have any significant difference (Holm's method).

    Args:
        arms: Arms of the comparison.
        results: For every arm the results of its seeds.
        metric: Name of the score that decides.
    """
    outcomes = [outcomes_of(of_arm, metric) for of_arm in results]
    pairs = list(_pairs(arms))
    estimates = [difference_of(outcomes[i], outcomes[j]) for i, j, _ in pairs]
    judged = [k for k, one in enumerate(estimates) if one is not None]
    alone = [one.p_value for one in estimates if one is not None]
    tests = dict(zip(judged, zip(holm(alone), holm_levels(alone), strict=True), strict=True))
    return [
        _verdict(arms, outcomes, pair, estimate, tests.get(k), len(judged))
        for k, (pair, estimate) in enumerate(zip(pairs, estimates, strict=True))
    ]


def _pairs(arms: list[Arm]) -> Iterator[tuple[int, int, str]]:
    """Yield the pairs to compare, as positions among the arms, with the kind of their verdict."""
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


def _verdict(
    arms: list[Arm],
    outcomes: list[Outcomes],
    pair: tuple[int, int, str],
    estimate: MeanEstimate | None,
    test: tuple[float, float] | None,
    family: int,
) -> Verdict:
    """Compare two arms; ``test`` has the corrected p-value and the level of the test."""
    i, j, kind = pair
    one, other = outcomes[i], outcomes[j]
    seeds = len(one.accuracies)
    why_open = "the number of test items is not known"
    if seeds < LEAST_SEEDS:
        why_open = f"{seeds} seeds are fewer than {LEAST_SEEDS}"
    return Verdict(
        arm=arms[i].text,
        against=arms[j].text,
        letter=letter_of(i),
        against_letter=letter_of(j),
        kind=kind,
        difference=float((one.accuracies - other.accuracies).mean()),
        half_width=estimate.half_width if estimate else None,
        corrected_half_width=estimate.half_width_at(test[1]) if estimate and test else None,
        p_value=test[0] if test else None,
        family=family,
        detectable=estimate.detectable if estimate else None,
        seeds=seeds,
        num_test=one.num_test,
        alike_at=_alike_at(arms[i]) if arms[i].has_untilted_twin_in(arms[j]) else "",
        why_open="" if estimate else why_open,
    )


def _alike_at(arm: Arm) -> str:
    """Describe where the arm and its untilted control repel alike."""
    where = ", where the tilt is strongest" if arm.tilt_moves else ""
    return f"effective temperature {arm.effective_temperature:.3g}{where}{GRADIENT_CAVEAT * (not arm.tilt_detached)}"


def sentences(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the sentence of each verdict, and a note on the correction if several differences are judged."""
    judged = sum(one.standing != "open" for one in verdicts)
    return [one.sentence() for one in verdicts] + ([correction_note(judged)] if judged > 1 else [])


def correction_note(differences: int) -> str:
    """Return the note on multiple comparisons."""
    return (
        f"The verdicts are corrected for the {differences} differences (Holm's method): if all arms were equal, at "
        f"most {100 * SIGNIFICANCE:.0f} % of such comparisons would have any significant difference. Each interval is "
        "for its difference alone."
    )


def data_name(data: str) -> str:
    """Return a short name of a data set: without its kind, folder and fold.

    >>> data_name("npz:/data/birds.npz"), data_name("graphs:MUTAG@3/10")
    ('birds.npz', 'MUTAG')
    """
    return PurePosixPath(re.sub(r"@\d+/\d+$", "", data.rpartition(":")[2])).name or data


def headline(verdicts: Sequence[Verdict], data: str) -> str:
    """Return the answer in one sentence: which choice of negatives is significantly better, and by how much.

    Args:
        verdicts: Verdicts of the comparison.
        data: Name of the data.
    """
    if verdicts[0].standing == "open":
        return f"No verdict on {data}: {verdicts[0].why_open}."
    # If the first arm is the only one that uses labels (or does not), the others are compared with the first of them.
    fair = [one for one in verdicts if one.kind == "first"] or [one for one in verdicts if one.kind == "peers"]
    if not fair:
        return f"No two choices of negatives can be compared on {data}: only one of them uses labels."
    better, worse = ([one for one in fair if one.standing == side] for side in ("above", "below"))
    if not better:
        end = f"; {_letters(worse)} {_are(worse)} significantly worse than {fair[0].against_letter}" if worse else ""
        return f"No choice of negatives is significantly better on {data}{end}."
    best = max(better, key=lambda one: one.difference)
    against = f"{_are(better)} significantly better than {fair[0].against_letter}"
    which = f"; {best.letter} has the largest gain" if len(better) > 1 else ""
    return f"{_letters(better)} {against} on {data}{which}: {100 * best.difference:+.2f} points ({best.interval()})."


def _letters(verdicts: Sequence[Verdict]) -> str:
    return _listed([one.letter for one in verdicts])


def _are(verdicts: Sequence[Verdict]) -> str:
    return "is" if len(verdicts) == 1 else "are"


def _listed(parts: list[str]) -> str:
    """Join texts with commas and "and"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def answer(verdicts: Sequence[Verdict], measured: str) -> list[str]:
    """Return the answer to which arms are better than the first.

    Arms that use labels are never ranked against arms that do not; they are listed separately.

    Args:
        verdicts: Verdicts of the comparison, those against the first arm included.
        measured: Name of the metric in words.

    Returns:
        Sentences for comparison.json, the terminal and the report.
    """
    first, fair = verdicts[0], [one for one in verdicts if one.kind == "first"]
    apart = [one for one in verdicts if one.kind == "labels"]
    if first.standing == "open":
        return []  # the headline has the reason
    known = f"{first.seeds} seeds and {first.num_test:,} test items"
    lines = [f"Against {first.against_letter}, in {measured}, with {known}:"] if fair else []
    for side, words in SIDES.items():
        if named := [f"{one.letter} ({100 * one.difference:+z.2f} points)" for one in fair if one.standing == side]:
            lines.append(f"{words}: {', '.join(named)}.")
    better = {one.arm for one in fair if one.standing == "above"}
    lines += [
        f"But {one.letter} is not significantly better than {one.against_letter}, which has its effective temperature: "
        "lowering the temperature may have the same effect."
        for one in verdicts
        if one.kind == "temperature" and one.arm in better and one.standing != "above"
    ]
    if apart:
        pairs = f"{_letters(apart)} against {first.against_letter}"
        lines.append(f"Reported separately, as only one of the two uses labels: {pairs}.")
    return lines


def temperature_notes(arms: list[Arm], *, tuned: bool = False) -> list[str]:
    """Return a note for each tilted arm without an untilted control, since a tilt acts like a lower temperature.

    Args:
        arms: Arms of the comparison.
        tuned: True if the temperature was tuned: then any untilted arm that is otherwise equal is at its best
            temperature, and is a control.
    """
    missing = (
        "no untilted arm that is otherwise equal had its temperature tuned, so a gain over the others may come from "
        "the temperature. Add one."
        if tuned
        else "no untilted arm that is otherwise equal has that temperature, so a gain over the others may come from "
        "the temperature. Add one, or use --tune temperature=..."
    )
    return [
        f"{letter_of(number)} repels like temperature {arm.effective_temperature:.3g}"
        f"{' where its tilt is strongest' if arm.tilt_moves else ''}"
        f"{GRADIENT_CAVEAT * (not arm.tilt_detached)}; {missing}"
        for number, arm in enumerate(arms)
        if arm.beta > 0.0 and not any(arm.has_untilted_twin_in(other, at_any_temperature=tuned) for other in arms)
    ]
