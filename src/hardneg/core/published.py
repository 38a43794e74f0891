"""Published hyperparameters that a paper in ``hardneg.papers`` shares with the recipe that trains it."""

from __future__ import annotations

from typing import NamedTuple


class MoCoVersion(NamedTuple):
    """Differences between the versions of MoCo, besides v3's symmetric loss, predictor and in-batch keys."""

    temperature: float
    momentum: float  # of the momentum encoder; v3 raises it to 1 by a cosine


MOCO = {"v1": MoCoVersion(0.07, 0.999), "v2": MoCoVersion(0.2, 0.999), "v3": MoCoVersion(0.2, 0.99)}
QUEUE = 65_536
"""Queue length of MoCo v1 and v2. He et al. warn against a queue near the size of the data, so recipes limit it to half
the data set."""

BANK_TEMPERATURE = 0.07
"""Temperature of instance discrimination, CMC, Local Aggregation and the negative cache."""
INSTANCE_DRAWS, CMC_DRAWS = 4096, 16384
"""Negatives drawn from the bank for each image; recipes draw at most one per image of the data set."""
