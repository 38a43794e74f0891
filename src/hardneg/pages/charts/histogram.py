"""Two overlaid histograms, such as similarities of positives and of negatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from hardneg.pages.charts.axes import BOTTOM, HEIGHT, LEFT, TOP, WIDTH, Axis, grid, shown, svg

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
    name: str, edges: Sequence[float], same: Shares, other: Shares, highest: float, unit: str = "share of pairs"
) -> Markup:
    """Draw the shares of two kinds of pairs over their similarity, with their means marked.

    Args:
        name: Name of the figure, for the accessible description.
        edges: Edges of the bins, one more than there are bins.
        same: Histogram in front.
        other: Histogram behind.
        highest: Largest share, for the vertical axis.
        unit: Name of the vertical axis.
    """
    x = Axis(edges[0], edges[-1], LEFT, WIDTH - 12)
    y = Axis(0.0, highest * 1.18, HEIGHT - BOTTOM, TOP)
    body = [grid(x, y, unit, "cosine similarity", lambda v: f"{v:.4g}", lambda v: f"{100 * v:.3g} %")]
    labels = []
    swapped = same.mean < other.mean
    for kind, one in (("other", other), ("same", same)):
        corners = [c for i, s in enumerate(one.shares) for c in ((edges[i], s), (edges[i + 1], s))]
        outline = " L".join(f"{x(px):.1f} {y(py):.1f}" for px, py in corners)
        base, at = y(0.0), x(one.mean)
        body.append(
            f'<g class="{kind}"><title>{shown(one.name)}: mean similarity {one.mean:.3f}</title>'
            f'<path class="area" d="M{x(edges[0]):.1f} {base:.1f} L{outline} L{x(edges[-1]):.1f} {base:.1f}Z"/>'
            f'<line class="middle" x1="{at:.1f}" x2="{at:.1f}" y1="{base:.1f}" y2="{TOP + 14}"/></g>'
        )
        labels.append(_label(kind, one, at, (kind == "other") != swapped))
    means = f"{same.name} have mean similarity {same.mean:.3f}, {other.name} {other.mean:.3f}"
    return svg(f"{name}: {means}.", "".join([*body, *labels]))


def _label(kind: str, one: Shares, at: float, left: bool) -> str:
    """Write the mean on its own side of the line if it fits there, otherwise on the other side."""
    words = f"{one.name.split()[0]} {one.mean:.2f}"
    wide = LETTER * len(words) + 5
    left = at >= wide if left else at + wide > WIDTH
    side, shift = ("end", -5) if left else ("start", 5)
    row = TOP + 12 if kind == "same" else TOP + 25
    return f'<text class="halo {kind}" x="{at + shift:.1f}" y="{row}" text-anchor="{side}">{shown(words)}</text>'
