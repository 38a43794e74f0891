"""Bounds on mutual information from contrastive scores (Wu et al. 2021, "Ring", section 3 and appendix B).

``mutual_information`` computes the bounds NCE (negatives from all candidates) and CNCE (negatives from a distribution
q) of a batch, and checks the premise of Theorem 3.1, under which CNCE <= NCE <= I(U; V). ``variance_over_draws`` is the
variance of Theorem 3.2.

The paper states Theorem 3.2 for any number of negatives. Its proof splits the draws into those inside and outside of
the set S_B, which covers all cases for one negative only; the tests enumerate small tables with one and two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, check_count
from hardneg.core.objectives.base import check_shape
from hardneg.core.objectives.info_nce import InfoNCE, NumNegatives, log_number
from hardneg.core.statistics import log_expect_exp
from hardneg.core.types import NEVER, LogWeights, Scores
from hardneg.negatives import Uniform
from hardneg.search.draws import draw


@dataclass(frozen=True, eq=False)
class MutualInformation:
    """Bounds on mutual information in nats, each with its standard error, and the premise that makes them bounds.

    Standard errors treat the anchors as independent. In a batch, anchors share candidates, so that the error over
    repeated batches can be larger.
    """

    nce: Annotated[Tensor, ""]
    """Bound with all valid candidates as negatives: mean of a - LSE(a, negatives) + log(1 + number of negatives)."""
    nce_error: Annotated[Tensor, ""]
    """Standard error of ``nce`` over the anchors; NaN for a single anchor."""
    nce_variance: Annotated[Tensor, ""]
    """Variance of one anchor's value of ``nce``."""
    cnce: Annotated[Tensor, ""]
    """The same mean with the negatives of q."""
    cnce_error: Annotated[Tensor, ""]
    """Standard error of ``cnce``."""
    cnce_variance: Annotated[Tensor, ""]
    """Variance of one anchor's value of ``cnce``."""
    premise: Annotated[Tensor, ""]
    """Share of anchors for which the premise of Theorem 3.1 holds; elsewhere ``cnce`` need not be a bound."""
    premise_error: Annotated[Tensor, ""]
    """Standard error of ``premise``, sqrt(p (1 - p) / number of anchors)."""


def mutual_information(
    scores: Scores, log_w: LogWeights | None = None, *, num_negatives: NumNegatives = "support"
) -> MutualInformation:
    """Estimate the lower bounds NCE and CNCE on the mutual information of anchors and positives.

    An anchor without a negative contributes 0, the bound without negatives. Anchors without a positive are left out.

    Args:
        scores: Scores of b anchors with p positives and n candidates. Candidates are a sample of the marginal p(v).
        log_w: Log-weights of q, [b, n], such as ``Ring(0.0, 0.1).log_weights(scores)``; all candidates by default.
        num_negatives: The number of negatives in both bounds, as in ``info_nce``. ``"support"`` counts them: CNCE then
            has fewer negatives than NCE, and is below log(1 + their number). Theorem 3.1 compares both at the same
            number: pass a number to see its inequality.

    Returns:
        The bounds with standard errors, and the share of anchors for which the premise of Theorem 3.1 holds. All values
        are scalar tensors; the bounds have gradients.

    Raises:
        ArgumentError: If the shape of ``log_w`` does not match, or no anchor has a positive.

    Example:
        >>> from hardneg import Ring, cross_views
        >>> z = torch.nn.functional.normalize(torch.arange(24.0).view(6, 4).sin(), dim=-1)
        >>> scores = cross_views(z, z, temperature=0.5)
        >>> found = mutual_information(scores, Ring(0.0, 0.4).log_weights(scores), num_negatives=5)
        >>> bool(found.cnce < found.nce < math.log(6)), round(float(found.premise), 2)
        (True, 0.33)
    """
    uniform = Uniform().log_weights(scores)
    log_w = uniform if log_w is None else log_w
    check_shape("mutual_information", scores, log_w)
    has_positive = scores.positive_valid.any(-1)
    if not bool(has_positive.any()):
        raise ArgumentError("mutual_information", "an anchor with a positive", "none", "check positive_mask")
    nce, cnce = (_per_anchor(scores, each, num_negatives)[has_positive] for each in (uniform, log_w))
    premise = theorem_3_1_premise(scores, log_w)[has_positive].to(nce.dtype)
    number = len(nce)
    share = premise.mean()
    return MutualInformation(
        *_mean_with_error(nce), *_mean_with_error(cnce), share, (share * (1.0 - share) / number).sqrt()
    )


def theorem_3_1_premise(scores: Scores, log_w: LogWeights) -> Annotated[Tensor, "b"]:
    """Return for which anchors q is as Theorem 3.1 of Ring assumes, [b].

    All negatives of q must have e^s strictly above c, the mean of e^s over all valid candidates, and equal weights (q
    is the marginal restricted to a set); there must be one at least.

    Args:
        scores: Scores of b anchors.
        log_w: Log-weights of q, [b, n].
    """
    supported = log_w != NEVER
    log_c = log_expect_exp(scores.candidates, Uniform().log_weights(scores))
    lowest = scores.candidates.masked_fill(~supported, math.inf).amin(-1)
    largest = log_w.amax(-1)
    smallest = log_w.masked_fill(~supported, math.inf).amin(-1)
    above = lowest - log_c > 16.0 * torch.finfo(log_c.dtype).eps * (1.0 + log_c.abs())  # equal scores are not above
    return supported.any(-1) & above & torch.isclose(largest, smallest, rtol=0.0, atol=1e-6)


def variance_over_draws(
    scores: Scores, log_w: LogWeights, num_draws: int, generator: torch.Generator, rounds: int = 1000
) -> Annotated[Tensor, "b"]:
    """Estimate Var_q[Z] of Theorem 3.2: the variance of an anchor's estimate over the draws of its negatives.

    Z = log(e^a / mean(e^a, e^s of the draws)), for the anchor's first positive a.

    Args:
        scores: Scores of b anchors.
        log_w: Log-weights of q, [b, n].
        num_draws: Number of negatives in each estimate (the paper's k - 1), drawn with replacement.
        generator: Random generator.
        rounds: Number of estimates, at least 2.

    Returns:
        The sample variance per anchor, [b]; 0 for anchors without a negative.

    Raises:
        ArgumentError: If ``num_draws`` is below 1 or ``rounds`` below 2.
    """
    check_count("variance_over_draws", "num_draws", num_draws)
    if rounds < 2:
        raise ArgumentError("variance_over_draws", "at least 2 rounds", f"rounds={rounds}")
    check_shape("variance_over_draws", scores, log_w)
    columns = draw(log_w, num_draws * rounds, generator)
    drawn = scores.candidates.gather(1, columns.clamp(min=0)).view(len(columns), rounds, num_draws)
    positive = scores.positives[:, :1, None].expand(-1, rounds, 1)
    values = positive[..., 0] - torch.cat([positive, drawn], dim=-1).logsumexp(-1)
    return torch.where(columns[:, 0] < 0, 0.0, values.var(-1))


def _per_anchor(scores: Scores, log_w: LogWeights, num_negatives: NumNegatives) -> Annotated[Tensor, "b"]:
    """Return log(1 + M) minus the InfoNCE loss with M negatives, averaged over the positives of each anchor, [b]."""
    objective = InfoNCE(num_negatives)
    row = objective.dense_row(scores, log_w)
    real = scores.positive_valid & (row.support > 0)
    bound = torch.log1p(torch.as_tensor(log_number(row, num_negatives)).exp()).to(scores.positives)
    pairs = torch.where(real, bound, 0.0) - objective.real_losses(scores.positives, row, scores.positive_valid)
    return torch.where(real, pairs, 0.0).sum(-1) / real.sum(-1).clamp(min=1)


def _mean_with_error(values: Annotated[Tensor, "b"]) -> tuple[Tensor, Tensor, Tensor]:
    variance = values.var() if len(values) > 1 else values.sum() * math.nan
    return values.mean(), (variance / len(values)).sqrt(), variance
