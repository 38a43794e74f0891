"""Axes, grids and text of charts as inline SVG; all functions return strings.

Colours are CSS classes (``c0`` to ``c7``), so style.css chooses them for light and dark; they can be distinguished by
colour-blind people, and no chart relies on them alone. Charts with a ``viewBox`` are drawn for cards of about 360
pixels, where their text is as large as the small print of the page.
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
    """A linear axis: maps values in [low, high] to positions in [start, end] on the page.

    Attributes:
        low: Smallest value.
        high: Largest value.
        start: Position of ``low``.
        end: Position of ``high``.

    Example:
        >>> Axis(0.0, 10.0, 100.0, 200.0)(5.0)
        150.0
    """

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the position of a value, at most 2 % outside of the axis."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * min(max(share, -0.02), 1.02)

    def ticks(self, most: int = 5) -> list[float]:
        """Return round values for at most about ``most`` ticks."""
        return ticks(self.low, self.high, most)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers in [low, high]: multiples of 1, 2 or 5 times a power of ten.

    >>> ticks(0.0, 1.0, 5)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1.0, 2.0, 5.0, 10.0) if power * factor >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(step * i, 12) for i in range(first, last + 1)]


def padded(values: Sequence[float], *, floor: float | None = None, share: float = 0.06) -> tuple[float, float]:
    """Return a nonempty range around the values.

    Args:
        values: Values to cover.
        floor: Lower limit of the range.
        share: Margin on each side, relative to the span of the values.

    Example:
        >>> padded([0.0, 1.0], floor=0.0, share=0.1)
        (0.0, 1.1)
    """
    low, high = min(values), max(values)
    room = (high - low) * share or abs(high) * share or 1.0
    low, high = low - room, high + room
    return (low if floor is None else max(low, floor)), high


def grid(
    x: Axis, y: Axis, y_unit: str, x_unit: str, show_x: Format, show_y: Format, *, most: tuple[int, int] = (5, 5)
) -> str:
    """Return grid lines, ticks, tick labels and the names of both axes.

    Args:
        x: Horizontal axis.
        y: Vertical axis.
        y_unit: Name of the vertical axis.
        x_unit: Name of the horizontal axis.
        show_x: Formats horizontal tick labels.
        show_y: Formats vertical tick labels.
        most: Number of horizontal and of vertical ticks, at most.
    """
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
    """Return a chart with an accessible label."""
    return Markup(
        f'<svg class="{kind}" role="img" aria-label="{shown(label)}" viewBox="0 0 {width} {height}">{body}</svg>'
    )


def shown(text: object) -> str:
    """Escape text for use inside an element or attribute."""
    return escape(printable(text), quote=True)


def plain_number(value: float) -> str:
    """Format a number with spaces between thousands, or with six significant digits.

    >>> plain_number(12000.0), plain_number(0.25)
    ('12 000', '0.25')
    """
    return f"{value:,.0f}".replace(",", " ") if value == round(value) else f"{value:.6g}"
