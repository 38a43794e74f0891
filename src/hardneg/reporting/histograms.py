"""Similarities of same-class and other-class pairs, arm by arm."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from markupsafe import Markup

from hardneg.pages.charts.histogram import Shares, histogram_chart
from hardneg.reporting.separation import MOST_IMAGES, separation_of
from hardneg.reporting.story import ArmRuns, Story, known


def histograms_of(story: Story) -> list[tuple[ArmRuns, str, Markup]]:
    """For each arm what it says of its pairs, and the chart."""
    found = [(arm, counts) for arm in story.arms if (counts := _counts(arm)) is not None]
    if not found:
        return []
    low, high = _occupied([counts for _, counts in found])
    shares = [(arm, counts, *_shares(counts, low, high)) for arm, counts in found]
    highest = max(max(*same, *other) for _, _, _, same, other in shares)
    cards = []
    for arm, counts, edges, same, other in shares:
        share = separation_of(arm)
        sentence = (
            f"A same-class pair is more alike than an other-class pair {100 * share:.1f} % of the time{_drawn(arm)}."
            if share is not None
            else ""
        )
        kinds = (
            Shares("same-class pairs", same, counts["same_mean"]),
            Shares("other-class pairs", other, counts["other_mean"]),
        )
        cards.append((arm, sentence, histogram_chart(arm.text, edges, *kinds, highest)))
    return cards


def _drawn(arm: ArmRuns) -> str:
    many = any((result.get("num_test") or 0) > MOST_IMAGES for result in arm.finished())
    return f", among {MOST_IMAGES:,} images drawn from them" if many else ""


def _counts(arm: ArmRuns) -> dict[str, Any] | None:
    """The counts of all seeds together, and the means over them; None without pairs of both kinds."""
    seeds = [found for result in arm.finished() if _whole(found := result.get("similarities", {}))]
    seeds = [one for one in seeds if one["edges"] == seeds[0]["edges"]]
    if not seeds:
        return None
    summed = {
        kind: [sum(column) for column in zip(*(one[kind] for one in seeds), strict=True)] for kind in ("same", "other")
    }
    means = {name: sum(one[name] for one in seeds) / len(seeds) for name in ("same_mean", "other_mean")}
    return {"edges": seeds[0]["edges"], **summed, **means}


def _whole(found: dict[str, Any]) -> bool:
    """Whether these are two histograms with pairs, over one set of rising edges."""
    edges, same, other = (found.get(name, []) for name in ("edges", "same", "other"))
    if not (known(found.get("same_mean")) and known(found.get("other_mean"))):
        return False
    fits = len(edges) > 1 and len(same) == len(other) == len(edges) - 1
    rising = all(low < high for low, high in pairwise(edges))
    return fits and rising and all(min(kind) >= 0 and sum(kind) > 0 for kind in (same, other))


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
