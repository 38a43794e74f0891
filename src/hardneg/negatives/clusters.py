"""Masks by cluster: Ring's Cave negatives (appendix F) come from the anchor's own cluster.

With several clusterings, sharing one of them is enough, as in Local Aggregation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hardneg.core.types import LogWeights, Scores
from hardneg.negatives.base import Negatives, keep


@dataclass(frozen=True, repr=False)
class SameCluster(Negatives):
    """Candidates of the anchor's own cluster: hard ones."""

    masks: ClassVar = True

    def log_weights(self, scores: Scores) -> LogWeights:
        return keep(scores, scores.same_cluster("SameCluster"))


@dataclass(frozen=True, repr=False)
class OtherCluster(Negatives):
    """Candidates of other clusters: fewer false ones."""

    masks: ClassVar = True

    def log_weights(self, scores: Scores) -> LogWeights:
        return keep(scores, ~scores.same_cluster("OtherCluster"))
