"""How an audit looks at the data."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hardneg.core.errors import argument_error, check_range


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
