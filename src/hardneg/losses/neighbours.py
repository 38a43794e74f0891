"""Close neighbours as extra positives: Local Aggregation (Zhuang et al. 2019), Ring's neighbour views and Ring + C_i.

All positives of an anchor share one numerator, log sum e^s, whereas SupCon gives each positive its own loss.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from hardneg.core.errors import check_among
from hardneg.core.objectives import log_expect_exp
from hardneg.core.types import NEVER, LogWeights, PairLosses, Scores

POOLINGS = ("sum", "mean", "geometric")


def neighbour_nce(
    scores: Scores, log_w: LogWeights, close: Annotated[Tensor, "b n"], *, own: bool = True, pooling: str = "sum"
) -> PairLosses:
    """Compute the loss of each anchor with its close candidates as positives.

    -log( sum of e^s over the positive and the close candidates / (e^a + sum over q of e^s) ). It is negative where the
    close candidates outweigh the denominator.

    Args:
        scores: Scores of b anchors against n candidates.
        log_w: Log-weights of the candidates in the denominator, [b, n].
        close: True for the candidates in the numerator, [b, n].
        own: Whether the anchor's positive is part of numerator and denominator. Not in Local Aggregation, where the
            anchor's own entry is one of the candidates.
        pooling: ``"sum"``; ``"mean"`` to divide both sums by their number of terms (Ring's eq. 5); or ``"geometric"``
            for the mean of the scores in the numerator (Ring's ``logsumexp_inner=False``).

    Returns:
        Losses [b, 1]; 0 for an anchor without negatives, or with an empty numerator.
    """
    check_among("neighbour_nce", "pooling", pooling, POOLINGS)
    supported = log_w != NEVER
    some = supported.any(-1)
    log_negative = log_expect_exp(scores.candidates, log_w) + supported.sum(-1).clamp(min=1).to(log_w.dtype).log()
    values, mask = scores.candidates, close
    if own:
        values = torch.cat([scores.positives, values], dim=1)
        mask = torch.cat([scores.positive_valid, mask], dim=1)
        log_positive = torch.logsumexp(scores.positives.masked_fill(~scores.positive_valid, NEVER), dim=-1)
        log_negative = torch.logaddexp(log_positive, log_negative)
    real = some & mask.any(-1)
    log_numerator = _pooled(values, mask & real[:, None], pooling)
    if pooling == "mean":
        sizes = [mask.sum(-1), supported.sum(-1) + (scores.positive_valid.sum(-1) if own else 0)]
        log_close, log_around = (size.clamp(min=1).to(log_w.dtype).log() for size in sizes)
        log_numerator, log_negative = log_numerator - log_close, log_negative - log_around
    losses = torch.where(real, log_negative, 0.0) - torch.where(real, log_numerator, 0.0)
    return torch.where(real, losses, scores.positives.sum(-1) * 0.0)[:, None]


def _pooled(values: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """Pool the masked scores of each row: log sum e^s, or the mean of s for "geometric"."""
    if pooling == "geometric":
        return torch.where(mask, values, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)
    some = mask.any(-1, keepdim=True)
    return torch.logsumexp(torch.where(some, values.masked_fill(~mask, NEVER), 0.0), dim=-1)
