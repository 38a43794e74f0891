"""Similarities of same-class and other-class pairs, arm by arm, and how often the former are more alike."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from markupsafe import Markup
from torch.nn.functional import normalize

from hardneg.core.errors import warn_once
from hardneg.io.embeddings import EmbeddingRows, Labels, load_evaluated
from hardneg.pages.charts.histogram import Shares, histogram_chart
from hardneg.reporting.contents import ArmRuns, PageContents, known
from hardneg.training.evaluation.pairs import above_diagonal

MOST_IMAGES = 2000
"""Evaluated items whose pairs are compared; where there are more, as many are drawn, the same for every run."""


def histograms_of(story: PageContents) -> list[tuple[ArmRuns, str, Markup]]:
    """For each arm what it says of its pairs, and the chart."""
    found = [(arm, counts) for arm in story.arms if (counts := _counts(arm)) is not None]
    if not found:
        return []
    low, high = _occupied([counts for _, counts in found])
    shares = [(arm, counts, *_shares(counts, low, high)) for arm, counts in found]
    highest = max(max(*same, *other) for _, _, _, same, other in shares)
    cards = []
    for arm, counts, edges, same, other in shares:
        sentence, many = "", any((result.get("num_test") or 0) > MOST_IMAGES for result in arm.finished())
        if (share := separation_of(arm)) is not None:
            drawn = f", among {MOST_IMAGES:,} {story.noun}s drawn from them" * many
            sentence = (
                f"A same-class pair is more alike than an other-class pair {100 * share:.1f} % of the time{drawn}."
            )
        kinds = (
            Shares("same-class pairs", same, counts["same_mean"]),
            Shares("other-class pairs", other, counts["other_mean"]),
        )
        cards.append((arm, sentence, histogram_chart(arm.text, edges, *kinds, highest)))
    return cards


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


def separation_of(arm: ArmRuns) -> float | None:
    """The mean over the seeds, each by itself: pairs of two encoders are not compared. None without embeddings."""
    files = [one.run.path / "embeddings.npz" for one in arm.seeds if one.result is not None]
    found = [share for file in files if (share := _of_file(file)) is not None]
    return sum(found) / len(found) if found else None


def _of_file(file: Path) -> float | None:
    """None without a file or labels; without those of a damaged file the mean is of other seeds, so that it warns."""
    if not file.is_file():
        return None
    try:
        features, labels = load_evaluated(file)
    except (OSError, ValueError) as error:
        warn_once(f"damaged embeddings: {file}", f"How well classes are apart leaves out a run: {error}")
        return None
    return None if labels is None else separation(features, labels)


def separation(x: EmbeddingRows, y: Labels) -> float | None:
    """The share of all (same-class pair, other-class pair) in which the first is more alike; ties count half.

    None where there is no pair of one kind.
    """
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:MOST_IMAGES]
    x, y = normalize(x[order].double(), dim=1), y[order]
    cosines, alike = above_diagonal(x @ x.T), above_diagonal(y[:, None] == y)
    same, other = cosines[alike], cosines[~alike].sort().values
    if not len(same) or not len(other):
        return None
    below, not_above = (torch.searchsorted(other, same, right=right).double() for right in (False, True))
    return float((below + not_above).mean()) / (2.0 * len(other))
