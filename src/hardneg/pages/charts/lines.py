"""Line charts over training steps, one line for each arm."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

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


def line_chart(name: str, lines: list[Line], unit: str, show: Format, *, floor: float | None = None) -> Markup:
    """Draw lines over training steps, the seeds thin behind their mean, each line named at its end.

    Every colour has its own dash pattern (the first is solid), so a line below another remains visible in its gaps.

    Args:
        name: Name of the figure, for the accessible description.
        lines: The arms.
        unit: Name of the vertical axis.
        show: Formats values.
        floor: Lower limit of the vertical axis.
    """
    drawn = [p for line in lines for part in (line.points, line.dashed, *line.seeds) for p in part]
    x = Axis(min(p[0] for p in drawn), max(p[0] for p in drawn), LEFT, WIDTH - RIGHT)
    if x.low == x.high:
        x = Axis(x.low - 1, x.high + 1, LEFT, WIDTH - RIGHT)
    y = Axis(*padded([p[1] for p in drawn], floor=floor), HEIGHT - BOTTOM, TOP)
    body = [grid(x, y, unit, "training step", plain_number, show)]
    for line in lines:
        thin = "".join(_path(thinned(seed), x, y, "seed") for seed in line.seeds if len(line.seeds) > 1)
        dashed = _path(thinned(line.dashed), x, y, "dashed") if line.dashed else ""
        points = thinned(line.points)
        hits = "".join(_hit(p, x, y, f"{line.title}, step {p[0]:.0f}: {show(p[1])}") for p in points)
        mean = _path(points, x, y, f"mean d{line.colour % NUM_COLOURS}")
        body.append(f'<g class="c{line.colour % NUM_COLOURS} arm-{line.colour}">{thin}{dashed}{mean}{hits}</g>')
    body.append(_end_labels(lines, x, y))
    ends = "; ".join(f"{line.title} ends at {show(line.points[-1][1])}" for line in lines if line.points)
    return svg(f"{name} over training steps. {ends}.", "".join(body))


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
