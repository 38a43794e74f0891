"""Masks by cluster: Ring's Cave negatives (appendix F) come from the anchor's own cluster.

With several clusterings, sharing one of them is enough, as in Local Aggregation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hardneg.core.tiles import Tile
from hardneg.negatives.base import Negatives


@dataclass(frozen=True, repr=False)
class SameCluster(Negatives):
    """Candidates of the anchor's own cluster: hard ones."""

    masks: ClassVar = True
    needs: ClassVar = ("clusters",)

    def log_weight(self, tile: Tile) -> Tensor:
        return tile.keep(tile.same_cluster("SameCluster"))


@dataclass(frozen=True, repr=False)
class OtherCluster(Negatives):
    """Candidates of other clusters: fewer false ones."""

    masks: ClassVar = True
    needs: ClassVar = ("clusters",)

    def log_weight(self, tile: Tile) -> Tensor:
        return tile.keep(~tile.same_cluster("OtherCluster"))
