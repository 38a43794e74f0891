"""Draws docs/figures/losses.svg from benchmarks/results/losses.json: time and memory against rows, both logarithmic.

python benchmarks/losses_picture.py
"""

from __future__ import annotations

import json
import math
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DIM = 128
COLOURS = {
    "plain eager": "#d55e00",
    "plain compiled": "#e69f00",
    "hardneg dense, HCL": "#999999",
    "flex_attention": "#56b4e9",
    "ours, uniform": "#009e73",
    "ours, HCL": "#0072b2",
}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 300, 52, 132, 28, 40


class Scale:
    """A logarithmic axis."""

    def __init__(self, values: list[float], start: float, end: float) -> None:
        self.low, self.high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        return self.start + (self.end - self.start) * (math.log10(value) - self.low) / (self.high - self.low)

    def powers(self) -> list[float]:
        return [10.0**power for power in range(self.low, self.high + 1)]


def chart(rows: list[dict[str, Any]], key: str, title: str, shift: float) -> str:
    rows = [row for row in rows if row.get(key) and row["dim"] == DIM and row["loss"] in COLOURS]
    x = Scale([row["rows"] for row in rows], LEFT, WIDTH - RIGHT)
    y = Scale([row[key] for row in rows], HEIGHT - BOTTOM, TOP)
    parts = [f'<text x="{LEFT}" y="16" font-weight="bold">{escape(title)}</text>']
    for tick in y.powers():
        parts.append(f'<line class="g" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in x.powers():
        parts.append(f'<line class="g" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{tick:,.0f}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">rows (two views)</text>')
    parts += [line for name in COLOURS for line in curve(name, rows, key, x, y)]
    return f'<g transform="translate({shift} 0)">{"".join(parts)}{labels(rows, key, y)}</g>'


def curve(name: str, rows: list[dict[str, Any]], key: str, x: Scale, y: Scale) -> list[str]:
    points = sorted((row["rows"], row[key]) for row in rows if row["loss"] == name)
    placed = [f"{x(one):.1f},{y(other):.1f}" for one, other in points]
    if not placed:
        return []
    colour = COLOURS[name]
    dots = [f'<circle cx="{at.split(",")[0]}" cy="{at.split(",")[1]}" r="2.5" fill="{colour}"/>' for at in placed]
    return [f'<polyline points="{" ".join(placed)}" fill="none" stroke="{colour}" stroke-width="1.8"/>', *dots]


def labels(rows: list[dict[str, Any]], key: str, y: Scale) -> str:
    """The names at the ends of the curves, moved apart where they would meet."""
    ends = {name: max((row["rows"], row[key]) for row in rows if row["loss"] == name)
            for name in COLOURS if any(row["loss"] == name for row in rows)}  # fmt: skip
    parts, last = [], 0.0
    for name, (_, value) in sorted(ends.items(), key=lambda item: -item[1][1]):
        last = max(y(value) + 4, last + 14)
        parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{last:.1f}" style="fill:{COLOURS[name]}">{escape(name)}</text>')
    return "".join(parts)


def picture(rows: list[dict[str, Any]]) -> str:
    style = "text{font:12px sans-serif;fill:#777}.g{stroke:#777;stroke-opacity:.25}"
    charts = chart(rows, "milliseconds", f"milliseconds, d = {DIM}", 0) + chart(rows, "extra_gib", "extra GiB", WIDTH)
    box = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {HEIGHT}" role="img"'
    return f"<svg {box}><title>Losses by rows</title><style>{style}</style>{charts}</svg>\n"


def main() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "losses.json").read_text(encoding="utf-8"))
    drawn = picture(results["grid"]["losses"])
    (ROOT / "docs" / "figures" / "losses.svg").write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
