"""SigLIP (Zhai et al. 2023): every pair is a separate binary classification, without a softmax over the row.

The authors sum over the negatives, average over the anchors, learn the temperature, and start the bias at -10.
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
    """Sigmoid loss: -log sigmoid(a + bias) - M E_q[log sigmoid(-s - bias)].

    Args:
        bias: Added to every score; a number or a tensor, which may be learnt.
        num_negatives: M, as in ``info_nce``; the default makes the second term a sum over the negatives.
    """

    bias: float | Tensor = 0.0
    num_negatives: NumNegatives = "support"
    name: ClassVar = "sigmoid"

    def __post_init__(self) -> None:
        check_num_negatives("sigmoid", self.num_negatives)

    def statistics(self) -> Mapping[str, Statistic]:
        """Return E_q[softplus(s + bias)], the support, and the statistics needed for M."""
        return {"mean": Mean(self._of_negative), "support": Support(), **number_statistic(self.num_negatives)}

    def __call__(self, positive: Tensor, row: Row) -> Tensor:
        """Return the loss of each pair, [b, p]."""
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
    """Compute the loss of SigLIP (Zhai et al. 2023) for each positive.

    With a the score of the positive, it is -log sigmoid(a + bias) - M E_q[log sigmoid(-s - bias)].

    Args:
        scores: Scores of b anchors with p positives and n candidates.
        log_w: Log-weights of the negatives, [b, n].
        bias: Added to every score; the authors start a learnt bias at -10.
        num_negatives: M, as in ``info_nce``.

    Returns:
        The loss of each pair, [b, p].
    """
    return Sigmoid(bias, num_negatives).losses(scores, log_w)
