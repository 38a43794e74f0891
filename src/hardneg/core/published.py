"""The authors' values that a paper in ``hardneg.papers`` and the recipe that trains it share, so that both are one."""

from __future__ import annotations

from typing import NamedTuple


class MoCoVersion(NamedTuple):
    """What the versions of MoCo differ in, beside v3's symmetric loss, predictor and keys of the batch."""

    temperature: float
    momentum: float  # of the momentum encoder; that of v3 goes to 1 by a cosine


MOCO = {"v1": MoCoVersion(0.07, 0.999), "v2": MoCoVersion(0.2, 0.999), "v3": MoCoVersion(0.2, 0.99)}
QUEUE = 65_536
"""Keys of MoCo v1 and v2. He et al. only warn of a queue near the size of the data: recipes take at most half of it."""

BANK_TEMPERATURE = 0.07
"""Of instance discrimination, CMC, Local Aggregation and the negative cache."""
INSTANCE_DRAWS, CMC_DRAWS = 4096, 16384
"""Negatives drawn from the bank for each image; recipes draw at most as many as there are images."""
