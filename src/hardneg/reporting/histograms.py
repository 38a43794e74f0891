"""Similarity histograms of same-class and other-class pairs for each arm, and how well the classes are separated.

The histograms come from result.json; the separation is computed from embeddings.npz. Called by write.py.
"""

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

MAX_ITEMS = 2000
"""Maximum number of evaluated items whose pairs are compared; of more, a random sample, the same for every run."""


def histograms_of(page: PageContents) -> list[tuple[ArmRuns, str, Markup]]:
    """Return for each arm the sentence on its separation and its chart; empty if no run has labelled pairs."""
    found = [(arm, counts) for arm in page.arms if (counts := _counts(arm)) is not None]
    if not found:
        return []
    low, high = _occupied([counts for _, counts in found])
    shares = [(arm, counts, *_shares(counts, low, high)) for arm, counts in found]
    highest = max(max(*same, *other) for _, _, _, same, other in shares)
    cards = []
    for arm, counts, edges, same, other in shares:
        sentence, many = "", any((result.get("num_test") or 0) > MAX_ITEMS for result in arm.finished())
        if (share := separation_of(arm)) is not None:
            drawn = f", in a random sample of {MAX_ITEMS:,} {page.noun}s" * many
            sentence = (
                f"A same-class pair is more similar than an other-class pair {100 * share:.1f} % of the time{drawn}."
            )
        kinds = (
            Shares("same-class pairs", same, counts["same_mean"]),
            Shares("other-class pairs", other, counts["other_mean"]),
        )
        cards.append((arm, sentence, histogram_chart(arm.text, edges, *kinds, highest)))
    return cards


def _counts(arm: ArmRuns) -> dict[str, Any] | None:
    """Return the counts of all seeds together and the means over them; None without pairs of both kinds."""
    seeds = [found for result in arm.finished() if _valid(found := result.get("similarities", {}))]
    seeds = [one for one in seeds if one["edges"] == seeds[0]["edges"]]
    if not seeds:
        return None
    summed = {
        kind: [sum(column) for column in zip(*(one[kind] for one in seeds), strict=True)] for kind in ("same", "other")
    }
    means = {name: sum(one[name] for one in seeds) / len(seeds) for name in ("same_mean", "other_mean")}
    return {"edges": seeds[0]["edges"], **summed, **means}


def _valid(found: dict[str, Any]) -> bool:
    """Return whether the record has two histograms with pairs, over one set of increasing edges."""
    edges, same, other = (found.get(name, []) for name in ("edges", "same", "other"))
    if not (known(found.get("same_mean")) and known(found.get("other_mean"))):
        return False
    fits = len(edges) > 1 and len(same) == len(other) == len(edges) - 1
    rising = all(low < high for low, high in pairwise(edges))
    return fits and rising and all(min(kind) >= 0 and sum(kind) > 0 for kind in (same, other))


def _occupied(every: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the range of similarities in which any arm has pairs worth drawing."""
    low, high = 1.0, -1.0
    for counts in every:
        for kind in ("same", "other"):
            least = 2e-4 * sum(counts[kind])
            bins = [i for i, count in enumerate(counts[kind]) if count > least]
            low, high = min(low, counts["edges"][bins[0]]), max(high, counts["edges"][bins[-1] + 1])
    return low, high


def _shares(counts: dict[str, Any], low: float, high: float) -> tuple[list[float], list[float], list[float]]:
    """Return the edges inside the range, and the share of same-class and other-class pairs in each bin."""
    edges = counts["edges"]
    inside = [i for i in range(len(edges) - 1) if edges[i] >= low - 1e-9 and edges[i + 1] <= high + 1e-9]
    same, other = ([counts[kind][i] / sum(counts[kind]) for i in inside] for kind in ("same", "other"))
    return [edges[i] for i in inside] + [edges[inside[-1] + 1]], same, other


def separation_of(arm: ArmRuns) -> float | None:
    """Return the mean separation over the seeds of an arm; None without embeddings.

    Each seed counts by itself, since similarities of two encoders are not comparable.
    """
    files = [one.run.path / "embeddings.npz" for one in arm.seeds if one.result is not None]
    found = [share for file in files if (share := _of_file(file)) is not None]
    return sum(found) / len(found) if found else None


def _of_file(file: Path) -> float | None:
    """Return the separation of one run; None without a file or labels. A damaged file warns and is left out."""
    if not file.is_file():
        return None
    try:
        features, labels = load_evaluated(file)
    except (OSError, ValueError) as error:
        warn_once(f"damaged embeddings: {file}", f"The separation of the classes leaves out a run: {error}")
        return None
    return None if labels is None else separation(features, labels)


def separation(x: EmbeddingRows, y: Labels) -> float | None:
    """Return the probability that a same-class pair is more similar than an other-class pair (ties count half).

    Args:
        x: Embeddings, shape [n, d]; at most ``MAX_ITEMS`` random rows are used, the same for every run.
        y: Labels, shape [n].

    Returns:
        A probability, or None if there is no pair of one kind.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
        >>> separation(x, torch.tensor([0, 0, 1, 1]))
        1.0
    """
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:MAX_ITEMS]
    x, y = normalize(x[order].double(), dim=1), y[order]
    cosines, alike = above_diagonal(x @ x.T), above_diagonal(y[:, None] == y)
    same, other = cosines[alike], cosines[~alike].sort().values
    if not len(same) or not len(other):
        return None
    below, not_above = (torch.searchsorted(other, same, right=right).double() for right in (False, True))
    return float((below + not_above).mean()) / (2.0 * len(other))
