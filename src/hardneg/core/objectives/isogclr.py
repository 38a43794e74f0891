"""iSogCLR (Qiu et al. 2023, eq. 4): a learnt temperature for each anchor.

The loss is tau (log E_q[e^((s - s+) / tau)] + rho), the robust form of the global contrastive loss. Without rho the
temperatures would only grow; larger values of rho lower them. The authors use 0.3 and temperatures in [0.05, 0.7].
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
    """iSogCLR: tau (log E_q[e^s] - a + rho), where tau is the anchor's temperature.

    This is the loss of the batch, without running normalisers; ``hardneg.losses.individual`` learns the temperatures.

    Args:
        rho: Radius of the robust loss, 0 or more; larger values give lower temperatures.
    """

    rho: float = 0.3
    name: ClassVar = "isogclr"

    def __post_init__(self) -> None:
        check_range("isogclr", "rho", self.rho, 0.0, math.inf, open_high=True)

    def __call__(self, positive: Tensor, row: Row) -> Tensor:
        """Return tau (log E_q[e^s] - a + rho) for each pair, [b, p]."""
        return row.temperature * (row.log_mean - positive + self.rho)
