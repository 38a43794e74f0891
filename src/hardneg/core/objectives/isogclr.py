"""iSogCLR (Qiu et al. 2023, eq. 4): a temperature of its own for each anchor, learnt with the loss.

tau (log E_q[e^((s - s+) / tau)] + rho): the robust form of the global contrastive loss. rho keeps temperatures from
falling; the authors take 0.3 and temperatures in [0.05, 0.7].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hardneg.core.errors import check_range
from hardneg.core.objectives.base import Objective, Row


@dataclass(frozen=True, repr=False, eq=False)
class ISogCLR(Objective):
    """tau (log E_q[e^s] - a + rho), tau being the anchor's temperature; of the batch, without running normalisers."""

    rho: float = 0.3
    name: ClassVar = "isogclr"

    def __post_init__(self) -> None:
        check_range("isogclr", "rho", self.rho, 0.0, math.inf, open_high=True)

    def __call__(self, positive: Tensor, row: Row) -> Tensor:
        return row.temperature * (row.log_mean - positive + self.rho)
