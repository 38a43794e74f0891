"""K-means: strata of batches and clusters that distributions read."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor


def kmeans(
    vectors: Annotated[Tensor, "n d"], count: int, generator: torch.Generator, num_iterations: int
) -> tuple[Annotated[Tensor, "c d"], Annotated[Tensor, "n"]]:
    """Cluster vectors by Lloyd's algorithm, started from random rows.

    Args:
        vectors: Vectors [n, d].
        count: Number of clusters; an empty cluster moves to a random row.
        generator: Random generator.
        num_iterations: Largest number of iterations.

    Returns:
        Centres [c, d] and the cluster of each row [n].
    """
    n = len(vectors)
    centres = vectors[torch.randperm(n, generator=generator)[:count].to(vectors.device)].clone()
    nearest = torch.zeros(n, dtype=torch.long, device=vectors.device)
    for _ in range(num_iterations):
        half = centres.square().sum(1) / 2
        nearest = torch.cat([(chunk @ centres.T - half).argmax(1) for chunk in torch.split(vectors, 8192)])
        sizes = torch.bincount(nearest, minlength=count)
        sums = torch.zeros_like(centres).index_add_(0, nearest, vectors)
        spare = vectors[torch.randint(n, (count,), generator=generator).to(vectors.device)]
        moved = torch.where((sizes > 0)[:, None], sums / sizes.clamp(min=1)[:, None], spare)
        if torch.equal(moved, centres):
            break
        centres = moved
    return centres, nearest
