"""Table of all arms and seeds, the dot plot above it, the CSV download, and the table of other measures.

``heads_of`` chooses the columns for the kind of page and ``cells_of`` fills them; write.py calls all public functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from hardneg.pages.charts.arms import Dots, dot_plot
from hardneg.pages.render import csv_link
from hardneg.reporting.contents import (
    ABSENT,
    ArmRuns,
    ContentsTable,
    PageContents,
    known,
    measure_in,
    number,
    percent,
    signed,
    two_digits,
)
from hardneg.training.evaluation.measures import MEASURES, unit_of


@dataclass(frozen=True)
class Cell:
    """One cell of the table.

    Attributes:
        key: Name of the column.
        label: Heading of the column, which narrow screens show in the cell.
        parts: Texts of the cell, each of which may be on a line of its own.
        tag: Small mark under the text, such as "significant".
        tag_kind: CSS class of the mark: "above", "below" or "alike".
    """

    key: str
    label: str
    parts: list[str]
    tag: str = ""
    tag_kind: str = ""


def dots_of(page: PageContents) -> Markup | None:
    """Return the dot plot with every seed of every arm; None for a single arm or without values."""
    measured = [arm for arm in page.arms if arm.row.get("values")]
    if not measured or len(page.arms) == 1:
        return None
    measure = measure_in(page, page.metric)
    rows = [_dots_of(arm, page) for arm in measured]
    return dot_plot(
        f"{measure} of every seed",
        rows,
        f"{measure}, {unit_of(page.metric)}  (the axis does not start at 0)",
        two_digits,
        ceiling=100.0,
    )


def _dots_of(arm: ArmRuns, page: PageContents) -> Dots:
    """Return the dots of one arm, in percent, with the mean and its interval."""
    values, half = arm.row["values"], arm.row.get("half_width")
    seeds = [one.seed for one in arm.seeds if one.result is not None and page.metric in one.result]
    numbers = seeds if page.kind != "comparison" and len(seeds) == len(values) else range(len(values))
    percents = {seed: 100.0 * value for seed, value in zip(numbers, values, strict=True)}
    wide = 100.0 * half if known(half) else None
    return Dots(f"{arm.letter}  {arm.text}", arm.text, arm.number, percents, 100.0 * sum(values) / len(values), wide)


def heads_of(page: PageContents) -> list[tuple[str, str]]:
    """Return the columns of the table, as (key, heading); they depend on the kind of page."""
    metric, unit = measure_in(page, page.metric), unit_of(page.metric)
    heads = [
        ("arm", "arm"), ("seeds", f"{metric} of every seed, {unit}"), ("mean", f"mean, {unit}"),
        ("against", "against the first, points"), ("temperature", "effective temperature"),
        ("false", "false negatives"), ("hardness", "hardness"),
        ("clamped", "clamped"), ("steps", "steps"), ("seconds", "seconds"),
    ]  # fmt: skip
    if page.kind == "run":
        heads = [(key, f"{metric}, {unit}" if key == "mean" else name) for key, name in heads if key != "seeds"]
    if page.kind in ("run", "several"):
        heads = [(key, name) for key, name in heads if key != "against"]
    return heads


def cells_of(arm: ArmRuns, heads: list[tuple[str, str]], first: ArmRuns) -> list[Cell]:
    """Return the cells of an arm, without its name.

    Args:
        arm: Arm of the row.
        heads: Columns of the table.
        first: Reference arm; there is no verdict if only one of the two uses labels.
    """
    row = arm.row
    half = row.get("half_width")
    against, tag, kind = _against(row, first=arm is first)
    if tag and arm.uses_labels != first.uses_labels:
        tag, kind = f"{'sees' if arm.uses_labels else 'without'} labels", "alike"
    runs = f"collapsed in {row.get('collapsed')} of {len(row.get('values', []))} runs"
    texts: dict[str, list[str]] = {
        "seeds": [two_digits(100 * value) for value in row.get("values", [])] or [ABSENT],
        "mean": [percent(row.get("mean"), unit="") + (f" ± {two_digits(100 * half)}" if known(half) else "")],
        "against": [against],
        "temperature": [number(row.get("effective_temperature"), ".3g")],
        "false": [percent(row.get("false_negatives"), 1)],
        "hardness": [number(row.get("hardness"), ".3f")],
        "clamped": [percent(row.get("clamped"), 1)],
        "steps": [number(row.get("steps"), "d")],
        "seconds": [number(row.get("seconds"), ".0f")],
    }
    tags = {"against": (tag, kind), "hardness": (runs if row.get("collapsed") else "", "below")}
    return [Cell(key, label, texts[key], *tags.get(key, ("", ""))) for key, label in heads if key != "arm"]


def _against(row: ContentsTable, *, first: bool) -> tuple[str, str, str]:
    """Return the difference from the first arm as text, with the tag for its significance and the kind of the tag."""
    value, half = row.get("difference"), row.get("difference_half_width")
    if not known(value):
        return ("" if first else ABSENT), "", ""
    if not known(half):
        return signed(value), "no verdict", "alike"
    side = "alike" if abs(value) <= half else "above" if value > 0 else "below"
    return f"{signed(value)} ± {two_digits(100 * half)}", f"{'not ' * (side == 'alike')}significant", side


def table_csv(page: PageContents) -> str:
    """Return the table as a link with CSV data: one line per arm, one column per seed."""
    names = ["mean", "half_width", "difference", "difference_half_width", "effective_temperature"]
    names += ["false_negatives", "hardness", "clamped", "collapsed", "steps", "seconds"]
    seeds = max((len(arm.row.get("values", [])) for arm in page.arms), default=0)
    head = ["arm", *(f"{page.metric} of run {i}" for i in range(seeds)), *names]
    rows = []
    for arm in page.arms:
        values = list(arm.row.get("values", []))
        rows.append([arm.text, *values, *[""] * (seeds - len(values)), *(arm.row.get(name, "") for name in names)])
    return csv_link(head, rows)


def table_note(page: PageContents) -> str:
    """Return the note under the table: what the columns are means of, and how values were tuned."""
    end = "." if page.kind == "run" else "; all are means over the seeds."
    note = f"False negatives, hardness and clamped are means over the last records, seconds those of training{end}"
    tuned, tried = page.facts.get("tuned"), page.facts.get("comparison", {}).get("tune")
    if page.kind != "comparison" or not tuned or not tried:
        return note
    chosen = ", ".join(f"{text}: {value}" for text, value in tuned.items())
    values = ", ".join(map(str, tried[1] or []))
    note += (
        f" Tuned on a validation split, with the same values for all arms: {tried[0]} of {values}; chosen: {chosen}."
    )
    tries_of = page.facts.get("tries", {}).items()
    lost = [f"{text} with {value}" for text, tries in tries_of for value, reached in tries if reached is None]
    return note + (f" Diverged: {', '.join(lost)}." if lost else "")


def measures_of(page: PageContents) -> dict[str, Any] | None:
    """Return the table of other measures, so that the choice does not depend on one; None without any."""
    finished = [result for arm in page.arms for result in arm.finished()]
    names = [name for name in (*MEASURES, "alignment", "uniformity") if any(name in result for result in finished)]
    if all(result.get("k") == 1 for result in finished):
        names = [name for name in names if name != "1nn"]  # the vote of one neighbour is the same
    if not names:
        return None
    heads = [measure_in(page, name) + (f", {unit_of(name)}" if name in MEASURES else "") for name in names]
    return {"heads": heads, "rows": [(arm, [_mean_of(arm, name) for name in names]) for arm in page.arms]}


def _mean_of(arm: ArmRuns, name: str) -> str:
    """Return the mean of a measure over finished runs as text."""
    values = [float(r[name]) * (100.0 if name in MEASURES else 1.0) for r in arm.finished() if name in r]
    return f"{sum(values) / len(values):z.2f}" if values else ABSENT
