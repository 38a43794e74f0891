"""The Jensen-Shannon estimate of mutual information (InfoGraph, Sun et al. 2020), as a loss.

With a tilt it is HCL's hard version with the sign of the paper, q ~ exp(+beta s); the authors' graph code has
exp(-beta s), which prefers easy graphs.
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
    """Jensen-Shannon loss: E_q[softplus(s)] + softplus(-a) - 2 log 2.

    Args:
        tau_plus: Share of false negatives to correct for, in [0, 1); corrects the mean over the negatives.
    """

    tau_plus: TauPlus = 0.0
    name: ClassVar = "jsd"

    def __post_init__(self) -> None:
        check_tau_plus("jsd", self.tau_plus)

    def statistics(self) -> Mapping[str, Statistic]:
        """Return E_q[softplus(s)]."""
        return {"mean": Mean(_softplus_of)}

    def __call__(self, positive: Tensor, row: Row) -> Tensor:
        """Return the loss of each pair, [b, p]."""
        negative = row.mean
        if corrects(self.tau_plus):
            negative = (negative - self.tau_plus * softplus(positive)) / (1.0 - self.tau_plus)  # type: ignore[operator]
        return negative + softplus(-positive) - 2.0 * math.log(2.0)


def jsd(scores: Scores, log_w: LogWeights, *, tau_plus: float | Tensor = 0.0) -> PairLosses:
    """Compute the Jensen-Shannon loss, E_q[softplus(s)] + softplus(-a) - 2 log 2, for each positive a.

    InfoGraph uses the plain mean over other graphs: ``Uniform()``.

    Args:
        scores: Scores of b anchors with p positives and n candidates.
        log_w: Log-weights of the negatives, [b, n].
        tau_plus: Share of false negatives in [0, 1). The mean over the negatives becomes
            (E_q[softplus(s)] - tau_plus softplus(a)) / (1 - tau_plus).

    Returns:
        The loss of each pair, [b, p].

    Example:
        >>> import torch
        >>> from hardneg import Uniform, two_views
        >>> scores = two_views(torch.eye(2), torch.eye(2), temperature=1.0)
        >>> jsd(scores, Uniform().log_weights(scores))[0].round(decimals=4)  # log 2 + log(1 + 1/e) - 2 log 2
        tensor([-0.3799])
    """
    return JSD(tau_plus).losses(scores, log_w)
