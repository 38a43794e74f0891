"""Two histograms over one another."""

from __future__ import annotations

from hardneg.pages.axes import BOTTOM, HEIGHT, LEFT, TOP, WIDTH, Axis, grid, svg


def histogram_chart(
    name: str, edges: list[float], same: list[float], other: list[float], means: tuple[float, float], highest: float
) -> str:
    """Shares of same-class and of other-class pairs over their similarity, with their means marked."""
    x = Axis(edges[0], edges[-1], LEFT, WIDTH - 12)
    y = Axis(0.0, highest * 1.18, HEIGHT - BOTTOM, TOP)
    body = [grid(x, y, "share of pairs", "cosine similarity", lambda v: f"{v:.4g}", lambda v: f"{100 * v:.0f} %")]
    labels = []
    kinds = (("other", other, means[0]), ("same", same, means[1]))
    swapped = means[1] < means[0]
    for kind, shares, mean in kinds:
        corners = [c for i, s in enumerate(shares) for c in ((edges[i], s), (edges[i + 1], s))]
        outline = " L".join(f"{x(px):.1f} {y(py):.1f}" for px, py in corners)
        base, at = y(0.0), x(mean)
        body.append(
            f'<g class="{kind}"><title>{kind}-class pairs: mean similarity {mean:.3f}</title>'
            f'<path class="area" d="M{x(edges[0]):.1f} {base:.1f} L{outline} L{x(edges[-1]):.1f} {base:.1f}Z"/>'
            f'<line class="middle" x1="{at:.1f}" x2="{at:.1f}" y1="{base:.1f}" y2="{TOP + 14}"/></g>'
        )
        left = (kind == "other") != swapped
        side, shift = ("end", -5) if left else ("start", 5)
        if (left and at - LEFT < 70) or (not left and WIDTH - 12 - at < 70):  # no room on its own side of the line
            side, shift = ("start", 5) if left else ("end", -5)
        row = TOP + 12 if kind == "same" else TOP + 25
        labels.append(
            f'<text class="halo {kind}" x="{at + shift:.1f}" y="{row}" text-anchor="{side}">{kind} {mean:.2f}</text>'
        )
    told = f"{name}: same-class pairs have mean similarity {means[1]:.3f}, other-class pairs {means[0]:.3f}."
    return svg(told, "".join([*body, *labels]))
