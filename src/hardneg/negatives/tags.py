"""Masks by label, cluster or source of the candidates.

Labels give supervised negatives (SupCon, H-SCL), sources the negatives of a queue or of mined items. Ring's Cave
negatives (appendix F) come from the anchor's own cluster. With several clusterings, two items count as being in the
same cluster if they share one in any of them, as in Local Aggregation. ``state.clusters.Clusters`` computes the
clusters; pass them to the loss as ``clusters=``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hardneg.core.errors import check_kind
from hardneg.core.tiles import Tile
from hardneg.negatives.base import Negatives
from hardneg.negatives.closed import ClosedForm


@dataclass(frozen=True, repr=False)
class OtherLabel(Negatives):
    """Keeps candidates whose label differs from the anchor's."""

    masks: ClassVar = True
    needs: ClassVar = ("labels",)
    if_empty: ClassVar = "Use a larger batch with more labels in it, or add a pool."

    def log_weight(self, tile: Tile) -> Tensor:
        """Return log-weight 0 for other labels and ``NEVER`` for the anchor's label."""
        return tile.keep(~tile.same_label("OtherLabel"))

    def closed_form(self) -> ClosedForm:
        """Return the closed form that excludes the anchor's label."""
        return ClosedForm(other_labels=True)


@dataclass(frozen=True, repr=False)
class SameCluster(Negatives):
    """Keeps candidates of the anchor's own cluster, which are hard negatives."""

    masks: ClassVar = True
    needs: ClassVar = ("clusters",)

    def log_weight(self, tile: Tile) -> Tensor:
        """Return log-weight 0 inside the anchor's cluster and ``NEVER`` outside."""
        return tile.keep(tile.same_cluster("SameCluster"))


@dataclass(frozen=True, repr=False)
class OtherCluster(Negatives):
    """Keeps candidates of other clusters than the anchor's, which avoids many false negatives."""

    masks: ClassVar = True
    needs: ClassVar = ("clusters",)

    def log_weight(self, tile: Tile) -> Tensor:
        """Return log-weight 0 outside the anchor's cluster and ``NEVER`` inside it."""
        return tile.keep(~tile.same_cluster("OtherCluster"))


@dataclass(frozen=True, repr=False)
class From(Negatives):
    """Keeps candidates of one source, such as "batch", "queue" or "mined".

    Args:
        source: The name of the source, as in ``Keys.source``.
    """

    source: str
    masks: ClassVar = True
    needs: ClassVar = ("source",)
    examples: ClassVar = ('From("batch")',)

    def __post_init__(self) -> None:
        check_kind("From", "source", self.source, str, "the name of a source")

    def log_weight(self, tile: Tile) -> Tensor:
        """Return log-weight 0 for this source and ``NEVER`` for all others."""
        return tile.keep(tile.of_source("From", self.source))

    def describe(self) -> str:
        """Return the description with the source filled in."""
        return f"Keeps candidates of the source {self.source!r}."

    @property
    def only_source(self) -> str:
        """The name of the source."""
        return self.source
