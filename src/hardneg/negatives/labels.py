"""Masks by label and by source: supervised negatives (SupCon, H-SCL) and explicit ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hardneg.core.errors import check_kind
from hardneg.core.types import LogWeights, Scores
from hardneg.negatives.base import Negatives, keep


@dataclass(frozen=True, repr=False)
class OtherLabel(Negatives):
    """Candidates with another label than the anchor's."""

    masks: ClassVar = True

    def log_weights(self, scores: Scores) -> LogWeights:
        return keep(scores, ~scores.same_label("OtherLabel"))


@dataclass(frozen=True, repr=False)
class From(Negatives):
    """Candidates of one source: "batch", "queue", "mined" ... as named in their Keys."""

    source: str
    masks: ClassVar = True
    examples: ClassVar = ('From("batch")',)

    def __post_init__(self) -> None:
        check_kind("From", "source", self.source, str, "the name of a source")

    def log_weights(self, scores: Scores) -> LogWeights:
        return keep(scores, scores.of_source("From", self.source))
