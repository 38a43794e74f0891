"""Charts of similarities as inline SVG: histograms of two kinds of pairs, and the frontier of an audit.

``histogram_chart`` overlays two histograms, such as similarities of positives and of negatives. ``scatter`` has a
numbered dot for each rule, by hardness and false-negative rate, named beside it or below the chart: it draws axes, dots
and the frontier; names are placed greedily where they cover nothing (``_names``), and the others are listed below
(``_key``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from markupsafe import Markup

from hardneg.pages.charts.axes import BOTTOM, HEIGHT, LEFT, TOP, WIDTH, Axis, Point, grid, padded, shown, svg

LETTER = 7.0  # width of a bold letter of a label in pixels, at most


@dataclass(frozen=True)
class Shares:
    """One of the two histograms.

    Attributes:
        name: Name of the kind of pairs.
        shares: Share of the pairs in each bin.
        mean: Mean similarity.
    """

    name: str
    shares: Sequence[float]
    mean: float


def histogram_chart(
    name: str,
    edges: Sequence[float],
    same: Shares,
    other: Shares,
    highest: float,
    unit: str = "share of pairs",
    third: Shares | None = None,
) -> Markup:
    """Draw the shares of two or three kinds of pairs over their similarity, with their means marked.

    Args:
        name: Name of the figure, for the accessible description.
        edges: Edges of the bins, one more than there are bins.
        same: Histogram in front.
        other: Histogram behind.
        highest: Largest share, for the vertical axis.
        unit: Name of the vertical axis.
        third: A third histogram, behind the others.
    """
    x = Axis(edges[0], edges[-1], LEFT, WIDTH - 12)
    y = Axis(0.0, highest * 1.18, HEIGHT - BOTTOM, TOP)
    body = [grid(x, y, unit, "cosine similarity", lambda v: f"{v:.4g}", lambda v: f"{100 * v:.3g} %")]
    labels = []
    swapped = same.mean < other.mean
    kinds = (("third", third), ("other", other), ("same", same))
    for kind, one in ((kind, one) for kind, one in kinds if one is not None):
        corners = [c for i, s in enumerate(one.shares) for c in ((edges[i], s), (edges[i + 1], s))]
        outline = " L".join(f"{x(px):.1f} {y(py):.1f}" for px, py in corners)
        base, at = y(0.0), x(one.mean)
        body.append(
            f'<g class="{kind}"><title>{shown(one.name)}: mean similarity {one.mean:.3f}</title>'
            f'<path class="area" d="M{x(edges[0]):.1f} {base:.1f} L{outline} L{x(edges[-1]):.1f} {base:.1f}Z"/>'
            f'<line class="middle" x1="{at:.1f}" x2="{at:.1f}" y1="{base:.1f}" y2="{TOP + 14}"/></g>'
        )
        labels.append(_label(kind, one, at, (kind != "same") != swapped))
    means = f"{same.name} have mean similarity {same.mean:.3f}, {other.name} {other.mean:.3f}"
    return svg(f"{name}: {means}.", "".join([*body, *labels]))


def _label(kind: str, one: Shares, at: float, left: bool) -> str:
    """Write the mean on its own side of the line if it fits there, otherwise on the other side."""
    words = f"{one.name.split()[0]} {one.mean:.2f}"
    wide = LETTER * len(words) + 5
    left = at + wide > WIDTH or (left and at - wide >= LEFT)  # on the left of LEFT is the axis
    side, shift = ("end", -5) if left else ("start", 5)
    row = TOP + {"same": 12, "other": 25, "third": 38}[kind]
    return f'<text class="halo {kind}" x="{at + shift:.1f}" y="{row}" text-anchor="{side}">{shown(words)}</text>'


RADIUS = 9.0  # of a dot
_left, _right, _top, _bottom = 52.0, 22.0, 26.0, 38.0  # margins around the plot
_letter, _line = 6.7, 14.0  # width of a letter and height of a line of the names

Box = tuple[float, float, float, float]
"""Left, top, right and bottom of a rectangle on the page."""


@dataclass(frozen=True)
class Spot:
    """One rule in the chart.

    Attributes:
        number: Number in the table.
        name: Name beside the dot.
        description: Text of the tooltip.
        x: Similarity of its negatives.
        y: Share of false negatives.
        error: Standard error of ``y``.
        colour: Number of the colour.
        front: Whether the rule is on the frontier.
        given: Whether the user gave the rule.
        bounds: Ends of the error bar, if they are not one standard error from ``y``.
    """

    number: int
    name: str
    description: str
    x: float
    y: float
    error: float
    colour: int
    front: bool
    given: bool
    bounds: tuple[float, float] | None = None

    @property
    def bar(self) -> tuple[float, float]:
        """Lower and upper end of the error bar."""
        return self.bounds or (self.y - self.error, self.y + self.error)


@dataclass(frozen=True)
class RootAxis(Axis):
    """An axis with a square-root scale from 0 to ``high``, which shows shares below one percent too."""

    def __call__(self, value: float) -> float:
        """Return the position of a value."""
        share = math.sqrt(min(max(value, 0.0) / self.high, 1.0))
        return self.start + (self.end - self.start) * share

    def ticks(self, most: int = 5) -> list[float]:
        """Return 0, and 1, 2 and 5 times powers of ten as far down as their labels do not overlap."""
        power = math.floor(math.log10(self.high))
        wanted = [factor * 10.0 ** (power - down) for down in range(5) for factor in (5.0, 2.0, 1.0)]
        kept = [0.0]
        for value in (value for value in wanted if value <= self.high):
            if all(abs(self(value) - self(other)) >= abs(self.end - self.start) / (2.2 * most) for other in kept):
                kept.append(value)
        return sorted(kept)


def scatter(spots: Sequence[Spot], random: float, *, width: int, height: int, named: bool, kind: str) -> Markup:
    """Draw rules by similarity (to the right) and known false negatives (upwards); the frontier is filled and joined.

    Args:
        spots: The rules.
        random: Similarity of random candidates, drawn as a vertical line; NaN if unknown.
        width: Width in pixels.
        height: Height in pixels, without the list of names below.
        named: Whether names are written beside the dots.
        kind: CSS class.
    """
    reach = [spot.x for spot in spots] + ([] if math.isnan(random) else [random])
    x = Axis(*padded(reach), _left, width - _right)
    y = RootAxis(0.0, 1.08 * max(*(spot.bar[1] for spot in spots), 1e-4), height - _bottom, _top)
    units = "known false negatives (lower is better)", "similarity of the negatives (harder to the right)"
    most = 7 if width > 500 else 4, 6
    body = [grid(x, y, *units, lambda v: f"{v:.4g}", lambda v: f"{100 * v:.4g} %", most=most)]
    if not math.isnan(random):
        body.append(_random(random, x, y))
    front = sorted((spot for spot in spots if spot.front), key=lambda spot: spot.x)
    if len(front) > 1:
        path = " ".join(f"{x(spot.x):.1f},{y(spot.y):.1f}" for spot in front)
        body.append(f'<polyline class="best" points="{path}"/>')
    drawn = sorted(spots, key=lambda spot: (spot.given, spot.front))
    radius = RADIUS if named else RADIUS - 2
    places = _apart({spot.number: (x(spot.x), y(spot.y)) for spot in spots}, radius)
    body += [_dot(spot, x, y, places[spot.number], radius) for spot in drawn]
    unnamed = _names(drawn[::-1], places, width, height, body) if named else list(spots)
    key, room = _key(sorted(unnamed, key=lambda spot: spot.number), width, height)
    description = "; ".join(f"{spot.number}: {spot.description}" for spot in spots)
    label = f"Similarity of the negatives against the share that is false. {description}."
    return svg(label, "".join(body) + key, width=width, height=height + room, kind=f"chart {kind}")


def _apart(places: dict[int, Point], radius: float) -> dict[int, Point]:
    """Move dots that cover each other apart, so that their numbers can be read."""
    moved = dict(places)
    for _ in range(60):
        for one, other in combinations(moved, 2):
            (x1, y1), (x2, y2) = moved[one], moved[other]
            away = math.hypot(x2 - x1, y2 - y1)
            if away < 2 * radius:
                part = (radius / away - 0.5) if away > 0.1 else 0.0
                dx, dy = (part * (x2 - x1), part * (y2 - y1)) if part else (0.0, radius)
                moved[one], moved[other] = (x1 - dx, y1 - dy), (x2 + dx, y2 + dy)
    return moved


def _dot(spot: Spot, x_axis: Axis, y_axis: Axis, place: Point, radius: float) -> str:
    """Draw a dot, its error bar and, if it was moved, a line to its true place."""
    (x, y), (true_x, true_y) = place, (x_axis(spot.x), y_axis(spot.y))
    low, high = map(y_axis, spot.bar)
    ends = f'x1="{true_x:.1f}" x2="{true_x:.1f}" y1="{low:.1f}" y2="{high:.1f}"'
    error = f'<line class="interval" {ends}/>' if spot.error or spot.bounds else ""
    moved = math.hypot(x - true_x, y - true_y) > 1.0
    pointer = f'<line class="pointer" x1="{x:.1f}" y1="{y:.1f}" x2="{true_x:.1f}" y2="{true_y:.1f}"/>' * moved
    rim = f'<circle class="rim" cx="{x:.1f}" cy="{y:.1f}" r="{radius + 4}"/>' if spot.given else ""
    kinds = " ".join(word for word, on in (("front", spot.front), ("given", spot.given)) if on)
    return (
        f'<g class="c{spot.colour} {kinds}"><title>{shown(spot.description)}</title>'
        f'{rim}{error}{pointer}<circle class="spot" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>'
        f'<text class="number" x="{x:.1f}" y="{y + 3.7:.1f}" text-anchor="middle">{spot.number}</text></g>'
    )


def _random(value: float, x: Axis, y: Axis) -> str:
    """Draw the line of random candidates."""
    at = x(value)
    return (
        f'<line class="random" x1="{at:.1f}" x2="{at:.1f}" y1="{y.start}" y2="{y.end}"/>'
        f'<text x="{at + 4:.1f}" y="{y.end + 6:.1f}">random</text>'
    )


def _key(spots: Sequence[Spot], width: int, height: int) -> tuple[str, int]:
    """List names below the chart in columns; returns the list and its height."""
    long = _letter * max((len(spot.name) for spot in spots), default=0) + 36
    columns = max(1, int((width - 2) // long))
    rows, most = -(-len(spots) // columns), int((width - 30) // _letter)
    texts = [
        f'<text class="rule" x="{2 + i // rows * long:.1f}" y="{height + 14 + i % rows * _line:.1f}">'
        f"<title>{shown(spot.description)}</title>"
        f"{spot.number} {shown(spot.name if len(spot.name) <= most else spot.name[: most - 3] + '...')}</text>"
        for i, spot in enumerate(spots)
    ]
    return "".join(texts), int(rows * _line + 8) if spots else 0


def _names(spots: Sequence[Spot], dots: dict[int, Point], width: int, height: int, written: list[str]) -> list[Spot]:
    """Write names beside their dots where they cover nothing, and return the spots whose names do not fit.

    A name above or below its dot must be nearer to it than to any other.
    """
    room = RADIUS + 1
    around = [dots[spot.number] for spot in spots]
    taken: list[Box] = [(x - room, y - room, x + room, y + room) for x, y in around]
    unnamed = []
    for spot in spots:
        x, y = dots[spot.number]
        for place, anchor in _places(spot, x, y):
            inside = (
                place[0] >= _left and place[2] <= width - 2 and place[1] >= _top - 8 and place[3] <= height - _bottom
            )
            at = place[0] if anchor == "start" else place[2]
            away = [_distance(place, *dots[one.number]) for one in spots if one is not spot]
            level = place[1] < y < place[3]
            own = level or _distance(place, x, y) + 2.0 <= min(away, default=math.inf)
            if inside and own and not any(_overlap(place, other) for other in taken):
                written.append(
                    f'<text class="rule halo" x="{at:.1f}" y="{place[3] - 3.5:.1f}" text-anchor="{anchor}">'
                    f"{shown(spot.name)}</text>"
                )
                taken.append(place)
                break
        else:
            unnamed.append(spot)
    return unnamed


def _places(spot: Spot, x: float, y: float) -> list[tuple[Box, str]]:
    """Return the places for a name: right, left, then diagonally above and below."""
    long, away = _letter * len(spot.name), RADIUS + 4
    found: list[tuple[Box, str]] = []
    for shift in (0.0, -12.0, 12.0):
        top = y - _line / 2 + shift
        found.append(((x + away, top, x + away + long, top + _line), "start"))
        found.append(((x - away - long, top, x - away, top + _line), "end"))
    return found


def _distance(box: Box, x: float, y: float) -> float:
    """Return the distance of a point from a box."""
    return math.hypot(max(box[0] - x, 0.0, x - box[2]), max(box[1] - y, 0.0, y - box[3]))


def _overlap(one: Box, other: Box) -> bool:
    """Whether two boxes overlap."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
