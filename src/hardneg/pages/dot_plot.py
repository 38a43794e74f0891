"""Every seed as a dot. Its coordinates are percentages, so that it is as wide as the page."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from hardneg.pages.axes import NUM_COLOURS, Axis, Format, padded, plain_number


@dataclass(frozen=True)
class Dots:
    """One arm of the dot plot: a value per seed, their mean and half of its interval (None where unknown)."""

    label: str
    title: str
    colour: int
    values: dict[int, float]
    mean: float
    half_width: float | None


def dot_plot(name: str, rows: list[Dots], unit: str, show: Format) -> str:
    """Every seed as a dot, the mean with its interval, and thin lines that join the same seed in all arms."""
    axis, step, top = _dot_axis(rows), 52, 6
    height = top + step * len(rows) + 40
    base = top + step * len(rows) + 2
    body = [
        f'<line class="grid" x1="{axis(t):.2f}%" x2="{axis(t):.2f}%" y1="{top}" y2="{base}"/>'
        f'<text x="{axis(t):.2f}%" y="{base + 15}" text-anchor="middle">{escape(plain_number(t))}</text>'
        for t in axis.ticks(7)
    ]
    body.append(f'<text x="50%" y="{base + 33}" text-anchor="middle">{escape(unit)}</text>')
    heights = [top + step * i + 35 for i in range(len(rows))]
    body += [_pairing(axis, *pair) for pair in zip(rows, rows[1:], heights, heights[1:], strict=False)]
    body += [_dot_row(axis, row, y, show) for row, y in zip(rows, heights, strict=True)]
    told = "; ".join(f"{row.title}: mean {show(row.mean)}" for row in rows)
    label = escape(f"{name}. {told}.", quote=True)
    return f'<svg class="dots" role="img" aria-label="{label}" width="100%" height="{height}">{"".join(body)}</svg>'


def _dot_axis(rows: list[Dots]) -> Axis:
    """Around the dots; an interval may add as much again on either side, and is cut beyond that."""
    values = [value for row in rows for value in row.values.values()]
    low, high = min(values), max(values)
    span = max(high - low, 0.5)
    reach = [(row.mean - (row.half_width or 0.0), row.mean + (row.half_width or 0.0)) for row in rows]
    low = max(min(low, *(r[0] for r in reach)), low - span)
    high = min(max(high, *(r[1] for r in reach)), high + span)
    return Axis(*padded([low, high], share=0.05), 0.0, 100.0)


def _dot_row(axis: Axis, row: Dots, y: float, show: Format) -> str:
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
        f"{escape(f'{row.title}, seed {seed}: {show(v)}')}</title></circle>"
        for seed, v in row.values.items()
    )
    told = f"{row.title}: mean {show(row.mean)}" + (f", 95 % interval {show(low)} to {show(high)}" if half else "")
    middle = (
        f'<line class="centre" x1="{axis(row.mean):.2f}%" x2="{axis(row.mean):.2f}%" y1="{y - 10}" y2="{y + 10}">'
        f"<title>{escape(told)}</title></line>"
    )
    label = f'<text class="halo name" x="0" y="{y - 17}">{escape(row.label)}</text>'
    return f'<g class="c{row.colour % NUM_COLOURS}">{bar}{ends}{dots}{middle}</g>{label}'


def _pairing(axis: Axis, upper: Dots, lower: Dots, y1: float, y2: float) -> str:
    return "".join(
        f'<line class="pair" x1="{axis(v):.2f}%" x2="{axis(lower.values[seed]):.2f}%" y1="{y1}" y2="{y2}"/>'
        for seed, v in upper.values.items()
        if seed in lower.values
    )
