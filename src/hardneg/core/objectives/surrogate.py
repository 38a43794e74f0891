"""Surrogates: the gradient of a global loss, without its value (SogCLR, Yuan et al. 2022; EMC2, Yau et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from hardneg.core.objectives.base import Objective, Row
from hardneg.core.statistics import Cotangents, Mass, Mean, PerRow, Statistic
from hardneg.core.types import NEVER, LogWeights, PairLosses, Scores


@dataclass(frozen=True)
class _Repulsion(Mean):
    """sum_j stop_gradient(w_j / norm) s_j."""

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
    """-a + sum_j stop_gradient(w_j / norm) s_j, the weights being normalised over the row without ``log_norm``."""

    log_norm: Annotated[Tensor, "b"] | None = None
    name: ClassVar = "surrogate"

    def statistics(self) -> Mapping[str, Statistic]:
        return {"repulsion": _Repulsion(log_norm=self.log_norm)}

    def __call__(self, positive: Tensor, row: Row) -> Tensor:
        return row.repulsion - positive


def surrogate(scores: Scores, log_w: LogWeights, *, log_norm: Annotated[Tensor, "b"] | None = None) -> PairLosses:
    """-a + sum_j stop_gradient(w_j / norm) s_j: the gradient of a global loss, without its value.

    SogCLR: log_w = Tilt(1.0), log_norm = log u + log N. EMC2: log_w = log of the visits, log_norm = log of all visits.
    Without log_norm the weights are normalised over the row: the gradient of -a + LSE(s) for Tilt(1.0).
    """
    return Surrogate(log_norm).losses(scores, log_w)
