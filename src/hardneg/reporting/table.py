"""The table of every arm and seed, the dots beside it, and the other measures."""

from __future__ import annotations

from html import escape

from hardneg.comparing.request import TITLES
from hardneg.pages.dot_plot import Dots, dot_plot
from hardneg.reporting.figures import ABSENT, badge, measure_in, named, percent, points, signed, two_digits
from hardneg.reporting.story import ArmRuns, Story, Table, known


def results_section(story: Story) -> str:
    several = len(story.arms) > 1
    figures = _table(story)
    measured = [arm for arm in story.arms if arm.row["values"]]
    if measured and several:
        measure = measure_in(story, story.metric)
        rows = [_dots_of(arm, story) for arm in measured]
        plot = dot_plot(f"{measure} of every seed", rows, f"{measure}, %  (the axis does not start at 0)", two_digits)
        figures += (
            f'<figure class="card wide">{plot}<figcaption>Every dot is one seed, the upright bar the mean, the flat '
            "bar its 95 % interval, where it is known (it may go on beyond the picture). Thin lines join runs with the "
            f"same seed{', which began with the same weights' if story.same_weights else ''}: what counts is whether "
            "they lean the same way.</figcaption></figure>"
        )
    title = "Every arm, every seed" if several else "Figures"
    return f'<section><h2 class="h">{title}</h2>{figures}{_measures(story)}</section>'


def _dots_of(arm: ArmRuns, story: Story) -> Dots:
    values, half = arm.row["values"], arm.row.get("half_width")
    seeds = [s.seed for s in arm.seeds if s.result is not None and story.metric in s.result]
    numbers = seeds if story.kind != "comparison" and len(seeds) == len(values) else range(len(values))
    percents = {seed: 100.0 * value for seed, value in zip(numbers, values, strict=True)}
    wide = 100.0 * half if known(half) else None
    name = arm.text if len(arm.text) <= 38 else f"{arm.text[:35]}..."  # as much as a phone has room for
    return Dots(f"{arm.letter}  {name}", arm.text, arm.number, percents, 100.0 * arm.row["mean"], wide)


def _table(story: Story) -> str:
    """The table of the comparison; on a narrow screen every arm becomes a card."""
    metric = measure_in(story, story.metric)
    heads = [
        ("arm", "arm"), ("seeds", f"{metric} of every seed, %"), ("mean", "mean, %"),
        ("against", "against the first, points"), ("temperature", "effective temperature"),
        ("false", "false negatives"), ("hardness", "hardness"),
        ("clamped", "clamped"), ("steps", "steps"), ("seconds", "seconds"),
    ]  # fmt: skip
    if story.kind == "run":
        heads = [(key, f"{metric}, %" if key == "mean" else name) for key, name in heads if key != "seeds"]
    if story.kind in ("run", "several"):
        heads = [(key, name) for key, name in heads if key != "against"]
    head = "".join(f'<th scope="col" role="columnheader">{escape(name)}</th>' for _, name in heads)
    body = ""
    for arm in story.arms:
        cells = _cells(arm)
        first, *rest = heads
        body += f'<tr role="row"><th scope="row" role="rowheader">{cells[first[0]]}</th>' + "".join(
            f'<td role="cell" class="{key}" data-label="{escape(name, quote=True)}">{cells[key]}</td>'
            for key, name in rest
        )
        body += "</tr>"
    tuned = story.facts.get("tuned")
    tried = story.facts.get("comparison", {}).get("tune")
    note = "False negatives, hardness and clamped are means over the last records, seconds those of training" + (
        "." if story.kind == "run" else "; all are means over the seeds."
    )
    if tuned and tried:
        chosen = ", ".join(f"{text}: {value}" for text, value in tuned.items())
        values = ", ".join(map(str, tried[1]))
        note += f" Tuned on a validation split, with the same tries for all: {tried[0]} of {values}; taken: {chosen}."
        tries_of = (story.facts.get("tries") or {}).items()
        lost = [f"{text} with {value}" for text, tries in tries_of for value, reached in tries if reached is None]
        note += f" Diverged: {', '.join(lost)}." if lost else ""
    return (
        f'<div class="scroll"><table role="table" id="results"><thead><tr role="row">{head}</tr></thead>'
        f'<tbody>{body}</tbody></table></div><p class="small">{escape(note)}</p>'
    )


def _cells(arm: ArmRuns) -> dict[str, str]:
    row = arm.row
    half, against = row.get("half_width"), row.get("difference")
    mean = percent(row["mean"], unit="") + (f" ± {two_digits(100 * half)}" if known(half) else "")
    return {
        "arm": f'<span class="row">{named(arm)}</span>',
        "seeds": " ".join(f"<span>{two_digits(100 * value)}</span>" for value in row["values"]) or ABSENT,
        "mean": f"<b>{mean}</b>",
        "against": _against(row) if known(against) else ("" if arm.number == 0 else ABSENT),
        "temperature": f"{row['effective_temperature']:.3g}" if known(row.get("effective_temperature")) else ABSENT,
        "false": percent(row.get("false_negatives"), 1),
        "hardness": (f"{row['hardness']:.3f}" if known(row.get("hardness")) else ABSENT) + _collapsed(row),
        "clamped": percent(row.get("clamped"), 1),
        "steps": ABSENT if row.get("steps") is None else f"{row['steps']}",
        "seconds": f"{row['seconds']:.0f}" if known(row.get("seconds")) else ABSENT,
    }


def _collapsed(row: Table) -> str:
    found = row.get("collapsed")
    runs = f"collapsed in {found} of {len(row['values'])} runs"
    return f' <span class="tag">{escape(runs)}</span>' if found else ""


def _against(row: Table) -> str:
    value, half = row["difference"], row.get("difference_half_width")
    if not known(half):
        return f"<span>{signed(value)}</span>"
    side = "alike" if abs(value) <= half else "above" if value > 0 else "below"
    tag = f'<span class="tag {side}">{"within" if side == "alike" else "beyond"} noise</span>'
    return f"<span>{points(value, half)} {tag}</span>"


def _measures(story: Story) -> str:
    """The other evaluations, so that one measure does not decide alone."""
    known = {name for arm in story.arms for result in arm.finished() for name in result}
    names = [name for name in (*TITLES, "alignment", "uniformity") if name in known]
    if all(result.get("k") == 1 for arm in story.arms for result in arm.finished()):
        names = [name for name in names if name != "1nn"]  # the vote of one neighbour is the same
    if not names:
        return ""
    head = "".join(f'<th scope="col">{escape(measure_in(story, n))}{", %" if n in TITLES else ""}</th>' for n in names)
    body = ""
    for arm in story.arms:
        cells = ""
        for name in names:
            values = [float(r[name]) * (100.0 if name in TITLES else 1.0) for r in arm.finished() if name in r]
            cells += f"<td>{sum(values) / len(values):z.2f}</td>" if values else f"<td>{ABSENT}</td>"
        body += f'<tr><th scope="row">{badge(arm) or "this run"}</th>{cells}</tr>'
    return (
        '<h3>Other measures of the same features</h3><div class="sideways"><table class="plain" id="measures"><thead>'
        f'<tr><th scope="col">arm</th>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        f'<p class="small">{"" if story.kind == "run" else "Means over the seeds that are finished. "}'
        "Alignment is how far apart two views of one image are: lower is closer. Uniformity is how unevenly the "
        "features fill the sphere of directions: lower is more even. Neither is good by itself: labels, which draw "
        "classes together, leave the sphere less even.</p>"
    )
