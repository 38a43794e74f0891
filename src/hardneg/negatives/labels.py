"""Masks by label and by source: supervised negatives (SupCon, H-SCL) and explicit ones."""

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
    """Candidates with another label than the anchor's."""

    masks: ClassVar = True
    needs: ClassVar = ("labels",)
    if_empty: ClassVar = "Use a larger batch with more labels in it, or add a pool."

    def log_weight(self, tile: Tile) -> Tensor:
        return tile.keep(~tile.same_label("OtherLabel"))

    def closed_form(self) -> ClosedForm:
        return ClosedForm(other_labels=True)


@dataclass(frozen=True, repr=False)
class From(Negatives):
    """Candidates of one source: "batch", "queue", "mined" ... as named in their Keys."""

    source: str
    masks: ClassVar = True
    needs: ClassVar = ("source",)
    examples: ClassVar = ('From("batch")',)

    def __post_init__(self) -> None:
        check_kind("From", "source", self.source, str, "the name of a source")

    def log_weight(self, tile: Tile) -> Tensor:
        return tile.keep(tile.of_source("From", self.source))

    def describe(self) -> str:
        return f"Keeps candidates of the source {self.source!r}."

    @property
    def only_source(self) -> str:
        return self.source
