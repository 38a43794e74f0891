"""Draws docs/figures/against.svg from benchmarks/results/against.json: ours / theirs of each case and size.

python benchmarks/against/picture.py
"""

from __future__ import annotations

import json
import math
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LEFT, WIDTH, ROW, TOP, BOTTOM = 250, 700, 22, 30, 40
LOW, HIGH = math.log10(0.1), math.log10(100.0)
MET, MISSED = "#009e73", "#d55e00"


def place(ratio: float) -> float:
    """Return the horizontal place of a ratio on the logarithmic axis."""
    share = (min(max(math.log10(ratio), LOW), HIGH) - LOW) / (HIGH - LOW)
    return LEFT + share * (WIDTH - LEFT - 20)


def row(name: str, case: dict[str, Any], y: float) -> str:
    """Draw the name of a case, a line at its goal, and a dot for each size, larger for larger sizes."""
    parts = [f'<text x="{LEFT - 10}" y="{y + 4:.0f}" text-anchor="end">{escape(name)}</text>']
    if (goal := case["goal"]) is not None:
        x = place(goal)
        parts.append(f'<line class="goal" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 9:.0f}" y2="{y + 9:.0f}"/>')
    for i, (size, figure) in enumerate(case["sizes"].items()):
        matters = goal is not None and (not case["at"] or int(size) in case["at"])
        colour = "#999" if not matters else MET if figure["ratio"] <= goal else MISSED
        title = f"{int(size):,} {case['unit']}: {figure['ratio']:.2f}"
        dot = f'cx="{place(figure["ratio"]):.1f}" cy="{y:.0f}" r="{3 + 0.7 * i:.1f}" fill="{colour}"'
        parts.append(f"<circle {dot}><title>{escape(title)}</title></circle>")
    return "".join(parts)


def picture(cases: dict[str, dict[str, Any]]) -> str:
    """Return the picture of all cases with a peer."""
    shown = {
        name: case for name, case in cases.items() if any("ratio" in each for each in case.get("sizes", {}).values())
    }
    height = TOP + ROW * len(shown) + BOTTOM
    style = "text{font:12px sans-serif;fill:#777}.g{stroke:#777;stroke-opacity:.25}.goal{stroke:#0072b2;stroke-width:2}"
    parts = [f'<text x="{LEFT}" y="16" font-weight="bold">our processor time / that of the peer</text>']
    for tick in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0):
        x = place(tick)
        parts.append(f'<line class="g" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - BOTTOM + 16}" text-anchor="middle">{tick:g}</text>')
    parts += [row(name, case, TOP + ROW * (i + 0.5)) for i, (name, case) in enumerate(shown.items())]
    box = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
    return f"<svg {box}><title>Time beside peers</title><style>{style}</style>{''.join(parts)}</svg>\n"


def main() -> None:
    """Draw the picture."""
    results = json.loads((ROOT / "benchmarks" / "results" / "against.json").read_text(encoding="utf-8"))
    (ROOT / "docs" / "figures" / "against.svg").write_text(picture(results["cases"]), encoding="utf-8")


if __name__ == "__main__":
    main()
