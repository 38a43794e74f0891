"""How often a pair of one class is more alike than a pair of two, by all pairs of a run's embeddings."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn.functional import normalize

from hardneg.io.embeddings import Features, Labels, load_embeddings
from hardneg.reporting.story import ArmRuns

MOST_IMAGES = 2000
"""Evaluated images whose pairs are compared; where there are more, as many are drawn, the same for every run."""


def separation_of(arm: ArmRuns) -> float | None:
    """The mean over the seeds, each by itself: pairs of two encoders are not compared. None without embeddings."""
    files = [one.run.path / "embeddings.npz" for one in arm.seeds if one.result is not None]
    found = [share for file in files if (share := _of_file(file)) is not None]
    return sum(found) / len(found) if found else None


def _of_file(file: Path) -> float | None:
    try:
        _, _, features, labels = load_embeddings(file)
    except (OSError, ValueError):
        return None
    return separation(features, labels)


def separation(x: Features, y: Labels) -> float | None:
    """The share of all (same-class pair, other-class pair) in which the first is more alike; ties count half.

    None where there is no pair of one kind.
    """
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:MOST_IMAGES]
    x, y = normalize(x[order].double(), dim=1), y[order]
    above = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    cosines, alike = (x @ x.T)[above], (y[:, None] == y)[above]
    same, other = cosines[alike], cosines[~alike].sort().values
    if not len(same) or not len(other):
        return None
    below, not_above = (torch.searchsorted(other, same, right=right).double() for right in (False, True))
    return float((below + not_above).mean()) / (2.0 * len(other))
