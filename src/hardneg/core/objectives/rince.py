"""RINCE (Chuang et al. 2022, eq. 4): a symmetric loss that bears false positives and false negatives.

-e^(q a) / q + (lam (e^a + M E_q[e^s]))^q / q. q to 0 gives InfoNCE (plus a constant), q = 1 is fully symmetric. Values
grow like e^(q / temperature): the paper uses temperatures of 0.1 and more.

The pull on a positive does not vanish as its similarity goes to 1. It then points along the vector, where the gradient
of the normalisation cancels it, and leaves its rounding error: in float32 at temperature 0.05 the gradient of nearly
equal views is 0.1 % off or worse. Bound: docs/explanation/papers.md, tests/core/test_precision.py.
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
    """-e^(q a) / q + (lam (e^a + M E_q[e^s]))^q / q; the defaults of the authors' code."""

    q: float = 0.5
    lam: float = 0.01
    name: ClassVar = "rince"
    examples: ClassVar = ("rince()", "rince(q=0.1, lam=0.025)")

    def __post_init__(self) -> None:
        check_range("rince", "q", self.q, 1e-6, 1.0)
        check_range("rince", "lam", self.lam, 1e-12, math.inf, open_high=True)

    def statistics(self) -> Mapping[str, Statistic]:
        return {"log_mean": LogMean(), "support": Support()}

    def __call__(self, positive: Tensor, row: Row) -> Tensor:
        log_all = torch.logaddexp(positive, row.log_mean + row.support.log())
        return ((self.q * (math.log(self.lam) + log_all)).exp() - (self.q * positive).exp()) / self.q
