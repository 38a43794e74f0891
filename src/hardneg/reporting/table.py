"""The table of every arm and seed, the dots beside it, and the other measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from hardneg.pages.charts.dots import Dots, dot_plot
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
    """One cell: its text, or several that may stand on lines of their own, and a small mark under it."""

    key: str
    label: str
    parts: list[str]
    tag: str = ""
    tag_kind: str = ""


def dots_of(story: PageContents) -> Markup | None:
    """The first picture: every seed of every arm."""
    measured = [arm for arm in story.arms if arm.row.get("values")]
    if not measured or len(story.arms) == 1:
        return None
    measure = measure_in(story, story.metric)
    rows = [_dots_of(arm, story) for arm in measured]
    return dot_plot(
        f"{measure} of every seed",
        rows,
        f"{measure}, {unit_of(story.metric)}  (the axis does not start at 0)",
        two_digits,
        ceiling=100.0,
    )


def _dots_of(arm: ArmRuns, story: PageContents) -> Dots:
    values, half = arm.row["values"], arm.row.get("half_width")
    seeds = [one.seed for one in arm.seeds if one.result is not None and story.metric in one.result]
    numbers = seeds if story.kind != "comparison" and len(seeds) == len(values) else range(len(values))
    percents = {seed: 100.0 * value for seed, value in zip(numbers, values, strict=True)}
    wide = 100.0 * half if known(half) else None
    return Dots(f"{arm.letter}  {arm.text}", arm.text, arm.number, percents, 100.0 * sum(values) / len(values), wide)


def heads_of(story: PageContents) -> list[tuple[str, str]]:
    metric, unit = measure_in(story, story.metric), unit_of(story.metric)
    heads = [
        ("arm", "arm"), ("seeds", f"{metric} of every seed, {unit}"), ("mean", f"mean, {unit}"),
        ("against", "against the first, points"), ("temperature", "effective temperature"),
        ("false", "false negatives"), ("hardness", "hardness"),
        ("clamped", "clamped"), ("steps", "steps"), ("seconds", "seconds"),
    ]  # fmt: skip
    if story.kind == "run":
        heads = [(key, f"{metric}, {unit}" if key == "mean" else name) for key, name in heads if key != "seeds"]
    if story.kind in ("run", "several"):
        heads = [(key, name) for key, name in heads if key != "against"]
    return heads


def cells_of(arm: ArmRuns, heads: list[tuple[str, str]], first: ArmRuns) -> list[Cell]:
    """The cells of an arm but for its name; beside the first, one that alone sees labels has no verdict."""
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
    value, half = row.get("difference"), row.get("difference_half_width")
    if not known(value):
        return ("" if first else ABSENT), "", ""
    if not known(half):
        return signed(value), "no verdict", "alike"
    side = "alike" if abs(value) <= half else "above" if value > 0 else "below"
    return f"{signed(value)} ± {two_digits(100 * half)}", f"{'within' if side == 'alike' else 'beyond'} noise", side


def table_csv(story: PageContents) -> str:
    """Every figure of every seed, one line each."""
    names = ["mean", "half_width", "difference", "difference_half_width", "effective_temperature"]
    names += ["false_negatives", "hardness", "clamped", "collapsed", "steps", "seconds"]
    seeds = max((len(arm.row.get("values", [])) for arm in story.arms), default=0)
    head = ["arm", *(f"{story.metric} of run {i}" for i in range(seeds)), *names]
    rows = []
    for arm in story.arms:
        values = list(arm.row.get("values", []))
        rows.append([arm.text, *values, *[""] * (seeds - len(values)), *(arm.row.get(name, "") for name in names)])
    return csv_link(head, rows)


def table_note(story: PageContents) -> str:
    end = "." if story.kind == "run" else "; all are means over the seeds."
    note = f"False negatives, hardness and clamped are means over the last records, seconds those of training{end}"
    tuned, tried = story.facts.get("tuned"), story.facts.get("comparison", {}).get("tune")
    if story.kind != "comparison" or not tuned or not tried:
        return note
    chosen = ", ".join(f"{text}: {value}" for text, value in tuned.items())
    values = ", ".join(map(str, tried[1] or []))
    note += f" Tuned on a validation split, with the same tries for all: {tried[0]} of {values}; taken: {chosen}."
    tries_of = story.facts.get("tries", {}).items()
    lost = [f"{text} with {value}" for text, tries in tries_of for value, reached in tries if reached is None]
    return note + (f" Diverged: {', '.join(lost)}." if lost else "")


def measures_of(story: PageContents) -> dict[str, Any] | None:
    """The other evaluations, so that one measure does not decide alone."""
    finished = [result for arm in story.arms for result in arm.finished()]
    names = [name for name in (*MEASURES, "alignment", "uniformity") if any(name in result for result in finished)]
    if all(result.get("k") == 1 for result in finished):
        names = [name for name in names if name != "1nn"]  # the vote of one neighbour is the same
    if not names:
        return None
    heads = [measure_in(story, name) + (f", {unit_of(name)}" if name in MEASURES else "") for name in names]
    return {"heads": heads, "rows": [(arm, [_mean_of(arm, name) for name in names]) for arm in story.arms]}


def _mean_of(arm: ArmRuns, name: str) -> str:
    values = [float(r[name]) * (100.0 if name in MEASURES else 1.0) for r in arm.finished() if name in r]
    return f"{sum(values) / len(values):z.2f}" if values else ABSENT
