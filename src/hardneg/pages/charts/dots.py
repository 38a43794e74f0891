"""Dot plots: every seed as a dot. Coordinates are percentages, so that the chart is as wide as the page."""

from __future__ import annotations

import math
from dataclasses import dataclass
from textwrap import wrap

from markupsafe import Markup

from hardneg.pages.charts.axes import NUM_COLOURS, Axis, Format, padded, plain_number, shown


@dataclass(frozen=True)
class Dots:
    """One arm of the dot plot.

    Attributes:
        label: Name beside the dots.
        title: Name in tooltips and in the accessible description.
        colour: Number of the colour.
        values: Value by seed.
        mean: Mean over seeds.
        half_width: Half of the 95 % interval of the mean; None if unknown.
    """

    label: str
    title: str
    colour: int
    values: dict[int, float]
    mean: float
    half_width: float | None


LINE, ROW = 15, 37  # heights in pixels of a line of a name, and of the dots under it


def dot_plot(name: str, rows: list[Dots], unit: str, show: Format, *, ceiling: float = math.inf) -> Markup:
    """Draw every seed as a dot, the mean with its interval, and thin lines that join runs of the same seed.

    Args:
        name: Name of the figure, for the accessible description.
        rows: The arms, from top to bottom.
        unit: Name of the axis.
        show: Formats values in tooltips.
        ceiling: Largest possible value, where the axis ends.
    """
    axis, top, heights = _dot_axis(rows, ceiling), 6, []
    for row in rows:
        top += LINE * len(_name_lines(row)) + ROW
        heights.append(top - 17)
    base = top + 2
    ticks = [(f"{axis(t):.2f}%", shown(plain_number(t))) for t in axis.ticks(7)]
    body = [f'<text x="{x}" y="{base + 15}" text-anchor="middle">{number}</text>' for x, number in ticks]
    body += [  # grid lines only behind the dots, not behind the names
        f'<line class="grid" x1="{x}" x2="{x}" y1="{y - 13}" y2="{y + 15}"/>' for x, _ in ticks for y in heights
    ]
    body.append(f'<text x="50%" y="{base + 33}" text-anchor="middle">{shown(unit)}</text>')
    body += [_pairing(axis, *pair) for pair in zip(rows, rows[1:], heights, heights[1:], strict=False)]
    body += [_dot_row(axis, row, y, show) for row, y in zip(rows, heights, strict=True)]
    means = "; ".join(f"{row.title}: mean {show(row.mean)}" for row in rows)
    return Markup(
        f'<svg class="dots" role="img" aria-label="{shown(f"{name}. {means}.")}" width="100%" height="{base + 38}">'
        f"{''.join(body)}</svg>"
    )


def _name_lines(row: Dots) -> list[str]:
    """Break a name into lines that fit on a phone."""
    return wrap(row.label, 42, subsequent_indent="   ") or [""]


def _dot_axis(rows: list[Dots], ceiling: float) -> Axis:
    """Return an axis around the dots; intervals extend it by at most the span of the dots and are cut beyond."""
    values = [value for row in rows for value in row.values.values()]
    low, high = min(values), max(values)
    span = max(high - low, 0.5)
    reach = [(row.mean - (row.half_width or 0.0), row.mean + (row.half_width or 0.0)) for row in rows]
    low = max(min(low, *(r[0] for r in reach)), low - span)
    high = min(max(high, *(r[1] for r in reach)), high + span)
    low, high = padded([low, high], floor=0.0 if min(values) >= 0.0 else None, share=0.05)
    return Axis(low, min(high, max(ceiling, *values)), 2.0, 98.0)  # leaves room for lines beyond the axis


def _dot_row(axis: Axis, row: Dots, y: float, show: Format) -> str:
    """Draw the dots, mean, interval and name of one arm."""
    half = row.half_width or 0.0
    low, high = row.mean - half, row.mean + half
    ends = "".join(
        f'<line class="interval" x1="{axis(end):.2f}%" x2="{axis(end):.2f}%" y1="{y - 5}" y2="{y + 5}"/>'
        for end in (low, high)
        if half and axis.low <= end <= axis.high
    )
    bar = f'<line class="interval" x1="{axis(low):.2f}%" x2="{axis(high):.2f}%" y1="{y}" y2="{y}"/>' if half else ""
    dots = "".join(
        f'<circle class="dot" cx="{axis(v):.2f}%" cy="{y}" r="4.5"><title>'
        f"{shown(f'{row.title}, seed {seed}: {show(v)}')}</title></circle>"
        for seed, v in row.values.items()
    )
    tooltip = f"{row.title}: mean {show(row.mean)}" + (f", 95 % interval {show(low)} to {show(high)}" if half else "")
    middle = (
        f'<line class="centre" x1="{axis(row.mean):.2f}%" x2="{axis(row.mean):.2f}%" y1="{y - 10}" y2="{y + 10}">'
        f"<title>{shown(tooltip)}</title></line>"
    )
    lines = _name_lines(row)
    label = "".join(
        # The rectangle hides the lines of the seeds behind the name.
        f'<rect class="name" x="0" y="{y - 29 - LINE * above}" height="{LINE + 1}" style="width:{len(line)}ch"/>'
        f'<text class="halo name" x="0" y="{y - 17 - LINE * above}">{shown(line)}</text>'
        for above, line in enumerate(reversed(lines))
    )
    return f'<g class="c{row.colour % NUM_COLOURS} arm-{row.colour}">{bar}{ends}{dots}{middle}{label}</g>'


def _pairing(axis: Axis, upper: Dots, lower: Dots, y1: float, y2: float) -> str:
    """Draw lines between the dots of the same seed in two arms."""
    kind = f"pair arm-{upper.colour} arm-{lower.colour}"
    return "".join(
        f'<line class="{kind}" x1="{axis(v):.2f}%" x2="{axis(lower.values[seed]):.2f}%" y1="{y1}" y2="{y2}"/>'
        for seed, v in upper.values.items()
        if seed in lower.values
    )
