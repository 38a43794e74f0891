"""Charts of arms: lines over training steps, dot plots with every seed as a dot, and forest plots of differences.

Coordinates of dot plots and forest plots are percentages, so that the chart is as wide as the page.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from textwrap import wrap

from markupsafe import Markup

from hardneg.pages.charts.axes import (
    BOTTOM,
    HEIGHT,
    LEFT,
    NUM_COLOURS,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Format,
    Point,
    grid,
    padded,
    plain_number,
    shown,
    svg,
)

MOST_POINTS = 100  # of a line; more cannot be seen at this width and make the page large


@dataclass(frozen=True)
class Line:
    """One arm: its mean, the seeds behind it, and possibly a dashed companion.

    Attributes:
        label: Short name at the end of the line.
        title: Long name in tooltips.
        colour: Number of the colour and of the dash pattern.
        points: (step, value) of the mean over seeds.
        seeds: Points of each seed, drawn thin.
        dashed: Points of a second curve of the arm.
    """

    label: str  # short, at the end of the line
    title: str  # long, in the tooltip
    colour: int
    points: list[Point]
    seeds: list[list[Point]] = field(default_factory=list)
    dashed: list[Point] = field(default_factory=list)


def thinned(points: list[Point], most: int = MOST_POINTS) -> list[Point]:
    """Return at most ``most`` points: neighbours are averaged, and the last point is kept.

    >>> thinned([(0.0, 0.0), (1.0, 1.0), (2.0, 2.0), (3.0, 3.0), (4.0, 9.0)], most=3)
    [(0.5, 0.5), (2.5, 2.5), (4.0, 9.0)]
    """
    if len(points) <= most:
        return points
    size = math.ceil((len(points) - 1) / (most - 1))
    groups = [points[at : min(at + size, len(points) - 1)] for at in range(0, len(points) - 1, size)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups] + [points[-1]]


def line_chart(
    name: str, lines: list[Line], unit: str, show: Format, *, floor: float | None = None, along: str = "training step"
) -> Markup:
    """Draw lines over training steps or seconds, the seeds thin behind their mean, each line named at its end.

    Every colour has its own dash pattern (the first is solid), so a line below another remains visible in its gaps.

    Args:
        name: Name of the figure, for the accessible description.
        lines: The arms.
        unit: Name of the vertical axis.
        show: Formats values.
        floor: Lower limit of the vertical axis.
        along: Name of the horizontal axis.
    """
    drawn = [p for line in lines for part in (line.points, line.dashed, *line.seeds) for p in part]
    x = Axis(min(p[0] for p in drawn), max(p[0] for p in drawn), LEFT, WIDTH - RIGHT)
    if x.low == x.high:
        x = Axis(x.low - 1, x.high + 1, LEFT, WIDTH - RIGHT)
    y = Axis(*padded([p[1] for p in drawn], floor=floor), HEIGHT - BOTTOM, TOP)
    body = [grid(x, y, unit, along, plain_number, show)]
    for line in lines:
        thin = "".join(_path(thinned(seed), x, y, "seed") for seed in line.seeds if len(line.seeds) > 1)
        dashed = _path(thinned(line.dashed), x, y, "dashed") if line.dashed else ""
        points = thinned(line.points)
        hits = "".join(_hit(p, x, y, f"{line.title}, {along.split()[-1]} {p[0]:.0f}: {show(p[1])}") for p in points)
        mean = _path(points, x, y, f"mean d{line.colour % NUM_COLOURS}")
        body.append(f'<g class="c{line.colour % NUM_COLOURS} arm-{line.colour}">{thin}{dashed}{mean}{hits}</g>')
    body.append(_end_labels(lines, x, y))
    ends = "; ".join(f"{line.title} ends at {show(line.points[-1][1])}" for line in lines if line.points)
    return svg(f"{name} over {along}s. {ends}.", "".join(body))


def _end_labels(lines: list[Line], x: Axis, y: Axis) -> str:
    """Write the names at the ends of the lines; overlapping ones are moved, and a thin line leads back."""
    named = [line for line in lines if line.points and line.label]
    wanted = sorted(((y(line.points[-1][1]), line) for line in named), key=lambda one: one[0])
    labels = []
    for place, (end, line) in zip(_spread([at for at, _ in wanted], 13.0), wanted, strict=True):
        begin = x(line.points[-1][0])
        way = f"{begin:.1f},{end:.1f} {x.end + 4:.1f},{end:.1f} {x.end + 9},{place:.1f}"
        labels.append(
            f'<g class="c{line.colour % NUM_COLOURS} arm-{line.colour}"><polyline class="leader" points="{way}"/>'
            f'<text class="end" x="{x.end + 11}" y="{place + 4:.1f}">{shown(line.label)}</text></g>'
        )
    return "".join(labels)


def _spread(places: list[float], gap: float) -> list[float]:
    """Return sorted places at least ``gap`` apart, moved little by one pass down and one pass up."""
    placed = list(places)
    for i in range(1, len(placed)):
        placed[i] = max(placed[i], placed[i - 1] + gap)
    lowest = HEIGHT - BOTTOM
    for i in reversed(range(len(placed))):
        limit = lowest if i == len(placed) - 1 else placed[i + 1] - gap
        placed[i] = min(placed[i], limit)
    return placed


def _path(points: list[Point], x: Axis, y: Axis, kind: str) -> str:
    """Draw a curve, or a dot if it has only one point."""
    if not points:
        return ""
    if len(points) == 1:
        return f'<circle class="only" cx="{x(points[0][0]):.1f}" cy="{y(points[0][1]):.1f}" r="3"/>'
    return f'<polyline class="{kind}" points="{" ".join(f"{x(px):.1f},{y(py):.1f}" for px, py in points)}"/>'


def _hit(point: Point, x: Axis, y: Axis, tooltip: str) -> str:
    """Draw an invisible circle with a tooltip."""
    place = f'cx="{x(point[0]):.1f}" cy="{y(point[1]):.1f}"'
    return f'<circle class="hit" {place} r="6"><title>{shown(tooltip)}</title></circle>'


@dataclass(frozen=True)
class Dots:
    """One arm of the dot plot.

    Attributes:
        label: Name beside the dots.
        title: Name in tooltips and in the accessible description.
        colour: Index of the colour.
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


DIFFERENCE_ROW, NAME_LINE = 46, 17  # heights in pixels of a row, and of its line of text


@dataclass(frozen=True)
class Difference:
    """One row of the forest plot.

    Attributes:
        label: The two arms, such as "B against A".
        title: Sentence in the tooltip.
        arms: Numbers of both arms; the first one chooses the colour.
        value: The difference.
        half_width: Half of the 95 % interval of this difference alone.
        corrected_half_width: Half of the interval at the level of its test; equal to ``half_width`` for a single one.
        standing: "above" or "below" (significant) or "alike".
    """

    label: str
    title: str
    arms: tuple[int, int]
    value: float
    half_width: float
    corrected_half_width: float
    standing: str

    @property
    def reach(self) -> tuple[float, float]:
        """Ends of the wider interval."""
        wide = max(self.half_width, self.corrected_half_width)
        return self.value - wide, self.value + wide


def forest_plot(name: str, rows: list[Difference], unit: str, show: Format) -> Markup:
    """Draw differences with their intervals, from top to bottom; significant ones have a filled mark.

    Args:
        name: Name of the figure, for the accessible description.
        rows: The differences.
        unit: Name of the axis.
        show: Formats values, with their sign.
    """
    axis = _difference_axis(rows)
    base = DIFFERENCE_ROW * len(rows) + 8
    ticks = [(f"{axis(t):.2f}%", shown(plain_number(t))) for t in axis.ticks(6)]
    heights = [DIFFERENCE_ROW * i + NAME_LINE + 16 for i in range(len(rows))]
    body = [f'<text x="{x}" y="{base + 14}" text-anchor="middle">{number}</text>' for x, number in ticks]
    body += [f'<line class="grid" x1="{x}" x2="{x}" y1="{y - 10}" y2="{y + 12}"/>' for x, _ in ticks for y in heights]
    body += [
        f'<line class="zero" x1="{axis(0.0):.2f}%" x2="{axis(0.0):.2f}%" y1="{y - 13}" y2="{y + 15}"/>' for y in heights
    ]
    body.append(f'<text x="50%" y="{base + 32}" text-anchor="middle">{shown(unit)}</text>')
    body += [_difference_row(axis, row, y, show) for row, y in zip(rows, heights, strict=True)]
    described = "; ".join(f"{row.label}: {_figures(row, show)}" for row in rows)
    return Markup(
        f'<svg class="forest" role="img" aria-label="{shown(f"{name}. {described}.")}" width="100%" '
        f'height="{base + 38}">{"".join(body)}</svg>'
    )


def _difference_axis(rows: list[Difference]) -> Axis:
    """Return an axis that has zero and all intervals."""
    ends = [end for row in rows for end in row.reach]
    low, high = min(0.0, *ends), max(0.0, *ends)
    margin = 0.06 * (high - low) or 1.0
    return Axis(low - margin, high + margin, 1.0, 99.0)


def _figures(row: Difference, show: Format) -> str:
    """Return the difference with its 95 % interval and its verdict as text."""
    low, high = row.value - row.half_width, row.value + row.half_width
    verdict = "significant" if row.standing in ("above", "below") else "not significant"
    return f"{show(row.value)} ({show(low)} to {show(high)}), {verdict}"


def _difference_row(axis: Axis, row: Difference, y: float, show: Format) -> str:
    """Draw the name, the figures, both intervals and the mark of one difference."""
    low, high = row.reach
    thin = f'<line class="interval" x1="{axis(low):.2f}%" x2="{axis(high):.2f}%" y1="{y}" y2="{y}"/>' + "".join(
        f'<line class="interval" x1="{axis(end):.2f}%" x2="{axis(end):.2f}%" y1="{y - 5}" y2="{y + 5}"/>'
        for end in (low, high)
    )
    ends = (row.value - row.half_width, row.value + row.half_width)
    thick = f'<line class="alone" x1="{axis(ends[0]):.2f}%" x2="{axis(ends[1]):.2f}%" y1="{y}" y2="{y}"/>'
    kind = "mark" if row.standing in ("above", "below") else "mark open"
    title = f"<title>{shown(row.title)}</title>"
    mark = f'<circle class="{kind}" cx="{axis(row.value):.2f}%" cy="{y}" r="5.5">{title}</circle>'
    text = (
        f'<text class="name" x="0" y="{y - NAME_LINE}">{shown(row.label)}</text>'
        f'<text class="figures" x="100%" y="{y - NAME_LINE}" text-anchor="end">{shown(_figures(row, show))}</text>'
    )
    classes = f"c{row.arms[0] % NUM_COLOURS} " + " ".join(f"arm-{number}" for number in row.arms)
    return f'<g class="{classes}">{thin}{thick}{mark}{text}</g>'
