"""SigLIP (Zhai et al. 2023): each pair is a yes-or-no question.

The authors sum over the negatives and average over the anchors, learn the temperature and start the bias at -10.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hardneg.core.objectives.base import Objective, Row, softplus
from hardneg.core.objectives.info_nce import (
    NumNegatives,
    check_num_negatives,
    given_number,
    log_number,
    number_statistic,
)
from hardneg.core.statistics import Mean, Statistic, Support
from hardneg.core.tiles import Tile
from hardneg.core.types import LogWeights, PairLosses, Scores


@dataclass(frozen=True, repr=False, eq=False)
class Sigmoid(Objective):
    """-log sigmoid(a + bias) - M E_q[log sigmoid(-s - bias)]; the bias may be learnt."""

    bias: float | Tensor = 0.0
    num_negatives: NumNegatives = "support"
    name: ClassVar = "sigmoid"

    def __post_init__(self) -> None:
        check_num_negatives("sigmoid", self.num_negatives)

    def statistics(self) -> Mapping[str, Statistic]:
        return {"mean": Mean(self._of_negative), "support": Support(), **number_statistic(self.num_negatives)}

    def __call__(self, positive: Tensor, row: Row) -> Tensor:
        if isinstance(self.num_negatives, str):
            number = torch.where(row.support > 0, log_number(row, self.num_negatives), 0.0).exp()
        else:
            number = given_number(row.mean, self.num_negatives)
        return softplus(-positive - self.bias) + number * row.mean

    def _of_negative(self, tile: Tile) -> Tensor:
        return softplus(tile.s + self.bias)


def sigmoid(
    scores: Scores, log_w: LogWeights, *, bias: float | Tensor = 0.0, num_negatives: NumNegatives = "support"
) -> PairLosses:
    """SigLIP (Zhai et al. 2023): -log sigmoid(a + bias) - M E_q[log sigmoid(-s - bias)]."""
    return Sigmoid(bias, num_negatives).losses(scores, log_w)
