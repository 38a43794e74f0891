"""Axes, grids and paths of charts as inline SVG. Strings in, strings out.

Colours are CSS classes (``c0`` to ``c7``), so that style.css decides what they are in light and in dark; colour-blind
people can distinguish them, and no chart relies on them alone. Charts with a ``viewBox`` are drawn for cards of
about 360 pixels, where their text is as large as the page's small print.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

from hardneg.core.text import printable

Point = tuple[float, float]
Format = Callable[[float], str]

NUM_COLOURS = 8
WIDTH, HEIGHT = 360, 216
LEFT, RIGHT, TOP, BOTTOM = 46, 26, 20, 36


@dataclass(frozen=True)
class Axis:
    """A range with round ticks, and where they fall on the page."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * min(max(share, -0.02), 1.02)

    def ticks(self, most: int = 5) -> list[float]:
        return ticks(self.low, self.high, most)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers inside [low, high]: multiples of 1, 2 or 5 times a power of ten.

    >>> ticks(0.0, 1.0, 5)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1.0, 2.0, 5.0, 10.0) if power * factor >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(step * i, 12) for i in range(first, last + 1)]


def padded(values: Sequence[float], *, floor: float | None = None, share: float = 0.06) -> tuple[float, float]:
    """A range around the values that is never empty; it does not go below ``floor``."""
    low, high = min(values), max(values)
    room = (high - low) * share or abs(high) * share or 1.0
    low, high = low - room, high + room
    return (low if floor is None else max(low, floor)), high


def grid(
    x: Axis, y: Axis, y_unit: str, x_unit: str, show_x: Format, show_y: Format, *, most: tuple[int, int] = (5, 5)
) -> str:
    """Lines across, ticks along, at most so many of each, and the names of both axes."""
    across = "".join(
        f'<line class="grid" x1="{x.start}" x2="{x.end}" y1="{y(t):.1f}" y2="{y(t):.1f}"/>'
        f'<text x="{x.start - 6}" y="{y(t) + 4:.1f}" text-anchor="end">{shown(show_y(t))}</text>'
        for t in y.ticks(most[1])
    )
    along = "".join(
        f'<line class="tick" x1="{x(t):.1f}" x2="{x(t):.1f}" y1="{y.start}" y2="{y.start + 4}"/>'
        f'<text x="{x(t):.1f}" y="{y.start + 16}" text-anchor="middle">{shown(show_x(t))}</text>'
        for t in x.ticks(most[0])
    )
    axis = f'<line class="tick" x1="{x.start}" x2="{x.end}" y1="{y.start}" y2="{y.start}"/>'
    named = (
        f'<text class="unit" x="2" y="11">{shown(y_unit)}</text>'
        f'<text class="unit" x="{x.end}" y="{y.start + BOTTOM - 4}" text-anchor="end">{shown(x_unit)}</text>'
    )
    return across + along + axis + named


def svg(label: str, body: str, *, width: int = WIDTH, height: int = HEIGHT, kind: str = "chart") -> Markup:
    return Markup(
        f'<svg class="{kind}" role="img" aria-label="{shown(label)}" viewBox="0 0 {width} {height}">{body}</svg>'
    )


def shown(text: object) -> str:
    """Text of others inside of an element or an attribute."""
    return escape(printable(text), quote=True)


def plain_number(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ") if value == round(value) else f"{value:.6g}"
