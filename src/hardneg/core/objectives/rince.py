"""RINCE (Chuang et al. 2022, eq. 4): a symmetric loss that is robust to false positives and false negatives.

The loss is -e^(q a) / q + (lam (e^a + M E_q[e^s]))^q / q. q -> 0 gives InfoNCE (plus a constant), and q = 1 is fully
symmetric. Values grow like e^(q / temperature): the paper uses temperatures of 0.1 and more.

Precision: the gradient of a positive does not vanish as its similarity approaches 1. It then points along the vector,
where the gradient of the normalisation cancels it and leaves its rounding error: in float32 at temperature 0.05 the
gradient of nearly equal views is off by 0.1 % or more. Bound: docs/explanation/papers.md, tests/core/test_precision.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hardneg.core.errors import check_range
from hardneg.core.objectives.base import Objective, Row
from hardneg.core.statistics import LogMean, Statistic, Support


@dataclass(frozen=True, repr=False, eq=False)
class RINCE(Objective):
    """RINCE: -e^(q a) / q + (lam (e^a + M E_q[e^s]))^q / q, with M the number of negatives.

    The defaults are those of the authors' code.

    Args:
        q: Robustness, in (0, 1]: near 0 the loss behaves like InfoNCE, 1 is the most robust.
        lam: Weight of the denominator, above 0.
    """

    q: float = 0.5
    lam: float = 0.01
    name: ClassVar = "rince"
    examples: ClassVar = ("rince()", "rince(q=0.1, lam=0.025)")

    def __post_init__(self) -> None:
        check_range("rince", "q", self.q, 1e-6, 1.0)
        check_range("rince", "lam", self.lam, 1e-12, math.inf, open_high=True)

    def statistics(self) -> Mapping[str, Statistic]:
        """Return the log-mean of the negatives and their number."""
        return {"log_mean": LogMean(), "support": Support()}

    def __call__(self, positive: Tensor, row: Row) -> Tensor:
        """Return the loss of each pair, [b, p]."""
        log_all = torch.logaddexp(positive, row.log_mean + row.support.log())
        return ((self.q * (math.log(self.lam) + log_all)).exp() - (self.q * positive).exp()) / self.q
