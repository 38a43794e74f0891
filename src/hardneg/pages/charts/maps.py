"""Two-dimensional map of embeddings: a mark for each item, and lines from anchors to their hardest negatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from hardneg.pages.charts.axes import NUM_COLOURS, WIDTH, Axis, shown, svg

MAP_HEIGHT, MARGIN = 330, 8
SHAPES = 4
"""Number of different marks; with the colours they distinguish 32 classes."""


@dataclass(frozen=True)
class MapPoint:
    """One item of the map.

    Attributes:
        x: Horizontal place.
        y: Vertical place.
        name: Text of the tooltip.
        kind: Number of its class, which chooses colour and mark; None without labels.
        anchor: Whether its hardest negatives are drawn.
    """

    x: float
    y: float
    name: str
    kind: int | None
    anchor: bool


@dataclass(frozen=True)
class MapEdge:
    """A line from an anchor to one of its hardest negatives.

    Attributes:
        anchor: Position of the anchor among the points.
        negative: Position of the negative among the points.
        false: Whether the negative is known to be false.
    """

    anchor: int
    negative: int
    false: bool


def map_chart(name: str, points: Sequence[MapPoint], edges: Sequence[MapEdge]) -> Markup:
    """Draw the items, and above them the edges and the anchors.

    Args:
        name: Name of the figure, for the accessible description.
        points: The items.
        edges: Lines to the hardest negatives; false ones are red and solid, others grey and dashed.
    """
    x = _axis([one.x for one in points], MARGIN, WIDTH - MARGIN)
    y = _axis([one.y for one in points], MAP_HEIGHT - MARGIN, MARGIN)
    places = [(x(one.x), y(one.y)) for one in points]
    lines = "".join(
        f'<line class="{"edge false" if one.false else "edge"}" x1="{places[one.anchor][0]:.1f}" '
        f'y1="{places[one.anchor][1]:.1f}" x2="{places[one.negative][0]:.1f}" y2="{places[one.negative][1]:.1f}"/>'
        for one in sorted(edges, key=lambda one: one.false)
    )
    drawn = sorted(zip(points, places, strict=True), key=lambda one: one[0].anchor)
    below = "".join(_mark(one, *place) for one, place in drawn if not one.anchor)
    above = "".join(_mark(one, *place) for one, place in drawn if one.anchor)
    false = sum(one.false for one in edges)
    text = f"{name}: {len(points)} items, {len(edges)} edges to the hardest negatives, {false} of them false."
    return svg(text, below + lines + above, height=MAP_HEIGHT, kind="chart map")


def class_mark(kind: int, name: str) -> Markup:
    """Return the mark of a class for a legend."""
    mark = _mark(MapPoint(0, 0, "", kind, False), 6.0, 6.0, radius=4.5, role="sample")
    label = shown(f"mark of class {name}")
    return Markup(
        f'<svg class="sign" role="img" aria-label="{label}" width="12" height="12" viewBox="0 0 12 12">{mark}</svg>'
    )


def _axis(values: list[float], start: float, end: float) -> Axis:
    low, high = min(values), max(values)
    return Axis(low, high, start, end) if high > low else Axis(low - 1.0, high + 1.0, start, end)


def _mark(point: MapPoint, x: float, y: float, radius: float | None = None, role: str = "item") -> str:
    """Draw an item: the colour is its class modulo 8, the mark its class divided by 8."""
    r = radius or (4.0 if point.anchor else 2.6)
    kind = point.kind or 0
    colour = "plain" if point.kind is None else f"c{kind % NUM_COLOURS}"
    classes = f"{'anchor' if point.anchor else role} {colour}"
    title = f"<title>{shown(point.name)}</title>" if point.name else ""
    shape = kind // NUM_COLOURS % SHAPES
    if shape == 0:
        return f'<circle class="{classes}" cx="{x:.1f}" cy="{y:.1f}" r="{r}">{title}</circle>'
    if shape == 1:
        place = f'x="{x - r:.1f}" y="{y - r:.1f}" width="{2 * r}" height="{2 * r}"'
        return f'<rect class="{classes}" {place}>{title}</rect>'
    corners = ((0, -1.3), (1.2, 0.9), (-1.2, 0.9)) if shape == 2 else ((0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0))
    path = "L".join(f"{x + r * dx:.1f} {y + r * dy:.1f}" for dx, dy in corners)
    return f'<path class="{classes}" d="M{path}Z">{title}</path>'
