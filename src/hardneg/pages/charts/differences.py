"""Forest plot of paired differences: one row for each, with its interval, around a line at zero.

Coordinates are percentages, so that the chart is as wide as the page.
"""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from hardneg.pages.charts.axes import NUM_COLOURS, Axis, Format, plain_number, shown

ROW, NAME = 46, 17  # heights in pixels of a row, and of its line of text


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
    axis = _axis(rows)
    base = ROW * len(rows) + 8
    ticks = [(f"{axis(t):.2f}%", shown(plain_number(t))) for t in axis.ticks(6)]
    heights = [ROW * i + NAME + 16 for i in range(len(rows))]
    body = [f'<text x="{x}" y="{base + 14}" text-anchor="middle">{number}</text>' for x, number in ticks]
    body += [f'<line class="grid" x1="{x}" x2="{x}" y1="{y - 10}" y2="{y + 12}"/>' for x, _ in ticks for y in heights]
    body += [
        f'<line class="zero" x1="{axis(0.0):.2f}%" x2="{axis(0.0):.2f}%" y1="{y - 13}" y2="{y + 15}"/>' for y in heights
    ]
    body.append(f'<text x="50%" y="{base + 32}" text-anchor="middle">{shown(unit)}</text>')
    body += [_row(axis, row, y, show) for row, y in zip(rows, heights, strict=True)]
    described = "; ".join(f"{row.label}: {_figures(row, show)}" for row in rows)
    return Markup(
        f'<svg class="forest" role="img" aria-label="{shown(f"{name}. {described}.")}" width="100%" '
        f'height="{base + 38}">{"".join(body)}</svg>'
    )


def _axis(rows: list[Difference]) -> Axis:
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


def _row(axis: Axis, row: Difference, y: float, show: Format) -> str:
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
        f'<text class="name" x="0" y="{y - NAME}">{shown(row.label)}</text>'
        f'<text class="figures" x="100%" y="{y - NAME}" text-anchor="end">{shown(_figures(row, show))}</text>'
    )
    classes = f"c{row.arms[0] % NUM_COLOURS} " + " ".join(f"arm-{number}" for number in row.arms)
    return f'<g class="{classes}">{thin}{thick}{mark}{text}</g>'
