"""How an audit looks at the data, and which rules none of the others beats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hardneg.audits.result import Row
from hardneg.notices import argument_error, check_range


@dataclass(frozen=True)
class Settings:
    """How an audit looks: the loss it has in mind, and how much of the data it looks at."""

    temperature: float = 0.5
    tau_plus: float = 0.0
    near_duplicate: float = 0.95
    num_anchors: int = 512
    seed: int = 0
    wanted_false_negatives: float | None = None
    frontier: bool = True

    def __post_init__(self) -> None:
        check_range("audit", "temperature", self.temperature, 0.0, math.inf, open_high=True)
        if self.temperature == 0:
            raise argument_error("audit", "a temperature above 0", "temperature", self.temperature)
        check_range("audit", "tau_plus", self.tau_plus, 0.0, 1.0, open_high=True)
        check_range("audit", "near_duplicate", self.near_duplicate, -1.0, 1.0)
        if isinstance(self.num_anchors, bool) or not isinstance(self.num_anchors, int) or self.num_anchors < 1:
            raise argument_error("audit", "num_anchors of 1 or more", "num_anchors", self.num_anchors)
        if self.wanted_false_negatives is not None:
            check_range("audit", "wanted_false_negatives", self.wanted_false_negatives, 0.0, 1.0)


def with_frontier(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Marks the rules that no other beats: none has negatives at least as similar, at most as false, and one better."""

    def beaten(place: int, row: Row) -> bool:
        """Of rules that do the same, the first one stands for all."""
        return any(
            other.similarity >= row.similarity
            and other.false_negatives <= row.false_negatives
            and (other.similarity > row.similarity or other.false_negatives < row.false_negatives or before < place)
            for before, other in enumerate(rows)
            if not other.reads_judge
        )

    def placed(row: Row) -> bool:
        known = not math.isnan(row.similarity) and not math.isnan(row.false_negatives)
        return known and not row.reads_judge

    return tuple(replace(row, on_frontier=placed(row) and not beaten(i, row)) for i, row in enumerate(rows))
