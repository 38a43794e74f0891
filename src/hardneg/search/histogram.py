"""Histograms of similarities for pairs of several kinds, accumulated part by part; used by audits and diagnosis."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor


class SimilarityCounts:
    """Counts and sums of similarities by kind, over even bins of [-1, 1].

    Dot products outside [-1, 1] count in the outer bins.

    Args:
        num_kinds: Number of kinds of pairs.
        bins: Number of bins.

    Example:
        >>> found = SimilarityCounts(num_kinds=1, bins=4)
        >>> found.add(0, torch.tensor([-1.0, 0.1, 0.2, 1.0]))
        >>> found.counts.tolist(), found.edges.tolist()
        ([[1, 0, 2, 1]], [-1.0, -0.5, 0.0, 0.5, 1.0])
    """

    def __init__(self, num_kinds: int, bins: int) -> None:
        self.bins, self.edges = bins, torch.linspace(-1.0, 1.0, bins + 1)
        self.counts = torch.zeros(num_kinds, bins, dtype=torch.int64)
        self.sums = torch.zeros(num_kinds, dtype=torch.float64)

    def add(self, kind: int, similarity: Annotated[Tensor, "m"]) -> None:
        """Add similarities [m] of one kind."""
        slots = ((similarity.float() + 1.0) * (0.5 * self.bins)).long().clamp(0, self.bins - 1)
        self.counts[kind] += slots.bincount(minlength=self.bins).cpu()
        self.sums[kind] += similarity.double().sum().cpu()

    def means(self) -> list[float]:
        """Return the mean similarity of each kind; NaN where there is no pair."""
        means: list[float] = (self.sums / self.counts.sum(1)).tolist()
        return means
