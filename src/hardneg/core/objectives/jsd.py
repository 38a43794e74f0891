"""The Jensen-Shannon estimate of mutual information (InfoGraph, Sun et al. 2020), as a loss.

A tilt gives HCL's hard version with the sign of the paper, q ~ exp(+beta s); the authors' graph code has exp(-beta s),
which prefers easy graphs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hardneg.core.objectives.base import Objective, Row, TauPlus, check_tau_plus, corrects, softplus
from hardneg.core.statistics import Mean, Statistic
from hardneg.core.tiles import Tile
from hardneg.core.types import LogWeights, PairLosses, Scores


def _softplus_of(tile: Tile) -> Tensor:
    return softplus(tile.s)


@dataclass(frozen=True, repr=False, eq=False)
class JSD(Objective):
    """E_q[softplus(s)] + softplus(-a) - 2 log 2; ``tau_plus`` corrects the negative term."""

    tau_plus: TauPlus = 0.0
    name: ClassVar = "jsd"

    def __post_init__(self) -> None:
        check_tau_plus("jsd", self.tau_plus)

    def statistics(self) -> Mapping[str, Statistic]:
        return {"mean": Mean(_softplus_of)}

    def __call__(self, positive: Tensor, row: Row) -> Tensor:
        negative = row.mean
        if corrects(self.tau_plus):
            negative = (negative - self.tau_plus * softplus(positive)) / (1.0 - self.tau_plus)  # type: ignore[operator]
        return negative + softplus(-positive) - 2.0 * math.log(2.0)


def jsd(scores: Scores, log_w: LogWeights, *, tau_plus: float | Tensor = 0.0) -> PairLosses:
    """Jensen-Shannon estimate of mutual information, as a loss: E_q[softplus(s)] + softplus(-a) - 2 log 2.

    InfoGraph takes the plain mean over other graphs. ``tau_plus`` corrects the negative term to
    (E_q[softplus(s)] - tau_plus softplus(a)) / (1 - tau_plus).
    """
    return JSD(tau_plus).losses(scores, log_w)
