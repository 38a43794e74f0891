"""Objectives of global losses: surrogates with the same gradient but a different value, and iSogCLR.

A global loss (SogCLR, Yuan et al. 2022; EMC2, Yau et al. 2024) normalises over the whole data set. Its gradient needs
only the batch and an estimate of each anchor's normaliser, which ``hardneg.losses.global_softmax`` and
``hardneg.state`` maintain.

iSogCLR (Qiu et al. 2023, eq. 4) learns a temperature for each anchor. Its loss is tau (log E_q[e^((s - s+) / tau)] +
rho), the robust form of the global contrastive loss. Without rho the temperatures would only grow; larger values of rho
lower them. The authors use 0.3 and temperatures in [0.05, 0.7].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from hardneg.core.errors import check_range
from hardneg.core.objectives.base import Objective, Row
from hardneg.core.statistics import Cotangents, Mass, Mean, PerRow, Statistic
from hardneg.core.types import NEVER, LogWeights, PairLosses, Scores


@dataclass(frozen=True)
class _Repulsion(Mean):
    """sum_j stop_gradient(w_j / norm) s_j: its gradient pushes negatives away in proportion to their weights."""

    detach: bool = True
    log_norm: Tensor | None = None

    def dense(self, scores: Scores, log_w: LogWeights) -> PerRow:
        if self.log_norm is None:
            share = torch.softmax(log_w, dim=-1)
        else:  # a row without a negative may have a norm of -inf
            log_norm = self.log_norm[:, None]
            share = (log_w - torch.where(log_norm == NEVER, -NEVER, log_norm)).exp()
        return (share.detach() * scores.candidates).sum(-1, keepdim=True)

    def finish(self, total: PerRow, mass: Mass) -> PerRow:
        if self.log_norm is None:
            return super().finish(total, mass)
        return total * (mass.shift - self.log_norm[:, None]).exp()

    def cotangents(self, grad: PerRow, total: PerRow, mass: Mass, value: Tensor, relative: Tensor) -> Cotangents:
        if self.log_norm is None:
            return super().cotangents(grad, total, mass, value, relative)
        return grad * (relative + (mass.shift - self.log_norm[:, None])).exp(), None


@dataclass(frozen=True, repr=False, eq=False)
class Surrogate(Objective):
    """Surrogate loss: -a + sum_j stop_gradient(w_j / norm) s_j.

    Args:
        log_norm: Logarithm of each anchor's normaliser, [b]. None normalises the weights over the row.
    """

    log_norm: Annotated[Tensor, "b"] | None = None
    name: ClassVar = "surrogate"

    def statistics(self) -> Mapping[str, Statistic]:
        """Return the weighted sum of the scores of the negatives."""
        return {"repulsion": _Repulsion(log_norm=self.log_norm)}

    def __call__(self, positive: Tensor, row: Row) -> Tensor:
        """Return the surrogate of each pair, [b, p]."""
        return row.repulsion - positive


def surrogate(scores: Scores, log_w: LogWeights, *, log_norm: Annotated[Tensor, "b"] | None = None) -> PairLosses:
    """Compute -a + sum_j stop_gradient(w_j / norm) s_j for each positive a, which has the gradient of a global loss.

    Args:
        scores: Scores of b anchors with p positives and n candidates.
        log_w: Log-weights of the negatives, [b, n]. SogCLR: those of ``Tilt(1.0)``. EMC2: log of the number of visits.
        log_norm: Logarithm of each anchor's normaliser, [b]. SogCLR: log u + log N. EMC2: log of the number of all
            visits. None normalises the weights over the row, which for ``Tilt(1.0)`` is the gradient of -a + LSE(s).

    Returns:
        The surrogate of each pair, [b, p]; its value is not that of the global loss.
    """
    return Surrogate(log_norm).losses(scores, log_w)


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
