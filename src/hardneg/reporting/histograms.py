"""Similarities of same-class and other-class pairs, arm by arm."""

from __future__ import annotations

from typing import Any

from hardneg.pages.histogram_chart import histogram_chart
from hardneg.pages.page import card, said_instead
from hardneg.reporting.figures import evaluated_in, named
from hardneg.reporting.separation import MOST_IMAGES, separation_of
from hardneg.reporting.story import ArmRuns, Story, known


def histograms_section(story: Story) -> str:
    found = [(arm, counts) for arm in story.arms if (counts := _counts(arm)) is not None]
    title = "Do the features keep classes apart?"
    if not found:
        return said_instead(title, "No finished run has similarities of labelled pairs.")
    low, high = _occupied([counts for _, counts in found])
    shares = [(arm, counts, *_shares(counts, low, high)) for arm, counts in found]
    highest = max(max(*same, *other) for _, _, _, same, other in shares)
    cards = []
    for arm, counts, edges, same, other in shares:
        share = separation_of(arm)
        told = (
            f"A same-class pair is more alike than an other-class pair {100 * share:.1f} % of the time{_drawn(arm)}."
            if share is not None
            else ""
        )
        chart = histogram_chart(arm.text, edges, same, other, (counts["other_mean"], counts["same_mean"]), highest)
        cards.append(card(named(arm), told, chart, plain=False))
    key = (
        '<p class="legend"><span class="key same"></span> same class <span class="key other"></span> other classes</p>'
    )
    return (
        f'<section><h2 class="h">{title}</h2><p>How alike pairs of {evaluated_in(story)} images are in the '
        f"trained features. The less the two overlap, the better. Labels only tell which pairs are which.</p>{key}"
        f'<div class="grid">{"".join(cards)}</div></section>'
    )


def _drawn(arm: ArmRuns) -> str:
    many = any((result.get("num_test") or 0) > MOST_IMAGES for result in arm.finished())
    return f", among {MOST_IMAGES:,} images drawn from them" if many else ""


def _counts(arm: ArmRuns) -> dict[str, Any] | None:
    """The counts of all seeds together, and the means over them."""
    seeds = [result["similarities"] for result in arm.finished() if result.get("similarities")]
    seeds = [one for one in seeds if known(one.get("same_mean")) and known(one.get("other_mean"))]
    seeds = [one for one in seeds if one["edges"] == seeds[0]["edges"]]
    if not seeds:
        return None
    summed = {
        kind: [sum(column) for column in zip(*(one[kind] for one in seeds), strict=True)] for kind in ("same", "other")
    }
    means = {name: sum(one[name] for one in seeds) / len(seeds) for name in ("same_mean", "other_mean")}
    return {"edges": seeds[0]["edges"], **summed, **means}


def _occupied(every: list[dict[str, Any]]) -> tuple[float, float]:
    """The range of similarities in which any arm has pairs worth drawing."""
    low, high = 1.0, -1.0
    for counts in every:
        for kind in ("same", "other"):
            least = 2e-4 * sum(counts[kind])
            bins = [i for i, count in enumerate(counts[kind]) if count > least]
            low, high = min(low, counts["edges"][bins[0]]), max(high, counts["edges"][bins[-1] + 1])
    return low, high


def _shares(counts: dict[str, Any], low: float, high: float) -> tuple[list[float], list[float], list[float]]:
    edges = counts["edges"]
    inside = [i for i in range(len(edges) - 1) if edges[i] >= low - 1e-9 and edges[i + 1] <= high + 1e-9]
    same, other = ([counts[kind][i] / sum(counts[kind]) for i in inside] for kind in ("same", "other"))
    return [edges[i] for i in inside] + [edges[inside[-1] + 1]], same, other
