"""How an audit looks at the data."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hardneg.core.errors import argument_error, check_counts, check_range, check_seed
from hardneg.core.options import make_plain, option
from hardneg.mining.options import TEMPERATURE

RULES, LOOK = "Which rules", "How it looks"


@dataclass(frozen=True)
class Settings:
    """How an audit looks: the loss it has in mind, and how much of the data it looks at."""

    temperature: float = option(TEMPERATURE, "Of tilts and of the loss; as in mine.", RULES)
    tau_plus: float = option(0.0, "Share of false negatives that the loss corrects for.", RULES)
    near_duplicate: float = option(0.95, "Cosine of a copy.", LOOK)
    num_anchors: int = option(512, "Anchors in the sample.", LOOK)
    seed: int = option(0, "Of the sample.", LOOK)
    wanted_false_negatives: float | None = option(None, "Suggest rules with at most this share, such as 0.02.", RULES)
    frontier: bool = option(True, "Measure a default set of rules.", LOOK, "--frontier/--no-frontier")
    memory: float = option(1.0, "GiB for similarities with a corpus on disk.", LOOK)

    def __post_init__(self) -> None:
        make_plain(self)
        check_range("audit", "temperature", self.temperature, 0.0, math.inf, open_high=True)
        if self.temperature == 0:
            raise argument_error("audit", "a temperature above 0", "temperature", self.temperature)
        check_range("audit", "tau_plus", self.tau_plus, 0.0, 1.0, open_high=True)
        check_range("audit", "near_duplicate", self.near_duplicate, -1.0, 1.0)
        check_counts("audit", self, "num_anchors")
        check_seed("audit", self.seed)
        check_range("audit", "memory", self.memory, 0.0, math.inf, open_high=True)
        if self.wanted_false_negatives is not None:
            check_range("audit", "wanted_false_negatives", self.wanted_false_negatives, 0.0, 1.0)
