"""Masks by cluster: keep candidates of the anchor's own cluster, or of all others.

Ring's Cave negatives (appendix F) come from the anchor's own cluster. With several clusterings, two items count as
being in the same cluster if they share one in any of them, as in Local Aggregation. ``state.clusters.Clusters``
computes the clusters; pass them to the loss as ``clusters=``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hardneg.core.tiles import Tile
from hardneg.negatives.base import Negatives


@dataclass(frozen=True, repr=False)
class SameCluster(Negatives):
    """Keeps candidates of the anchor's own cluster, which are hard negatives."""

    masks: ClassVar = True
    needs: ClassVar = ("clusters",)

    def log_weight(self, tile: Tile) -> Tensor:
        """Compute log-weight 0 inside the anchor's cluster and ``NEVER`` outside."""
        return tile.keep(tile.same_cluster("SameCluster"))


@dataclass(frozen=True, repr=False)
class OtherCluster(Negatives):
    """Keeps candidates of other clusters than the anchor's, which avoids many false negatives."""

    masks: ClassVar = True
    needs: ClassVar = ("clusters",)

    def log_weight(self, tile: Tile) -> Tensor:
        """Compute log-weight 0 outside the anchor's cluster and ``NEVER`` inside."""
        return tile.keep(~tile.same_cluster("OtherCluster"))
