"""Objectives: plain functions of scores and log-weights, one loss per anchor and positive, never reduced.

Everything stands on one primitive, computed in log-space:

    log E_q[e^s] = LSE(s + log_w) - LSE(log_w)

Corner cases: a pair whose anchor has no negative, or whose positive is not valid, costs 0 and has no gradient. (With
all positives in the denominator an anchor without a negative still contrasts its positives, as SupCon does.) NaN in
gives NaN out.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hardneg.core.errors import ArgumentError, argument_error, check_range
from hardneg.core.types import NEVER, LogWeights, PairLosses, Scores, with_support

NumNegatives = str | float | Tensor


def log_expect_exp(candidates: Annotated[Tensor, "b n"], log_w: LogWeights) -> Annotated[Tensor, "b"]:
    """log E_q[e^s] of each row; -inf where q has no support.

    The weights are normalised first: s + log q stays of the size of s, where s + log w would lose the digits of s
    under a large tilt.
    """
    some, log_w = with_support(log_w)
    log_q = torch.log_softmax(log_w, dim=-1)
    return torch.where(some[:, 0], torch.logsumexp(candidates + log_q, dim=-1), NEVER)


def info_nce(
    scores: Scores,
    log_w: LogWeights,
    *,
    num_negatives: NumNegatives = "support",
    tau_plus: float | Tensor = 0.0,
    positives_in_denominator: str = "own",
    log_q: tuple[Tensor, Tensor] | None = None,
) -> PairLosses:
    """InfoNCE = -log e^a / (e^a + M E_q[e^s]) for each positive a.

    num_negatives: M. ``"support"``, the number of candidates that q allows; ``"candidates"``, all that are not the
        anchor itself (H-SCL's 2B - 2); ``"mass"``, the sum of the weights, which leaves them unnormalised; a number.
    tau_plus: share of false negatives to correct for (DCL, HCL): E becomes (E - tau_plus e^a) / (1 - tau_plus), with
        the pair's own positive, and at least e^(-1/temperature), the smallest e^s of unit vectors. A floored pair
        has no gradient to its negatives.
    positives_in_denominator: ``"own"``, the pair's positive; ``"all"``, every positive of the anchor (SupCon);
        ``"none"`` (GraphCL; can be negative).
    log_q: log-probability with which each candidate ([n] or [b, n]) and each positive ([b] or [b, p]) was sampled
        into the batch; subtracted from the scores after the weights are known (Yi et al. 2019).

    >>> from hardneg import Uniform, two_views
    >>> z = torch.nn.functional.normalize(torch.ones(2, 4), dim=-1)
    >>> scores = two_views(z, z, temperature=1.0)
    >>> info_nce(scores, Uniform().log_weights(scores)).squeeze(1)  # log 3: one positive, two equal negatives
    tensor([1.0986, 1.0986, 1.0986, 1.0986])
    """
    check_range("info_nce", "tau_plus", tau_plus, 0.0, 1.0, open_high=True)
    check_num_negatives("info_nce", num_negatives)
    _check_shape("info_nce", scores, log_w)
    positives, candidates = scores.positives, scores.candidates
    if log_q is not None:
        positives, candidates = _without_sampling_bias(positives, candidates, log_q, tau_plus)
    log_mean = log_expect_exp(candidates, log_w)[:, None]  # [b, 1]
    if corrects(tau_plus):
        log_mean, _ = debiased(log_mean, positives, tau_plus, scores.temperature)  # [b, p]
    log_negative = log_mean + _log_number(scores, log_w, num_negatives)[:, None]
    if positives_in_denominator == "own":
        losses = -logsigmoid(positives - log_negative)
    elif positives_in_denominator == "all":
        some = scores.positive_valid.any(-1, keepdim=True)
        log_positive = torch.where(some, _masked_lse(positives, scores.positive_valid)[:, None], 0.0)
        # Not logaddexp(...) - positives, which would lose a loss that is small beside its scores.
        losses = _softplus(log_negative - log_positive) + (log_positive - positives)
    elif positives_in_denominator == "none":
        losses = log_negative - positives
    else:
        raise argument_error("info_nce", "'own', 'all' or 'none'", "positives_in_denominator", positives_in_denominator)
    if positives_in_denominator == "all":
        return torch.where(scores.positive_valid, losses, scores.positives * 0.0)
    return _only_real_pairs(losses, scores, log_w)


def debiased(
    log_mean: Annotated[Tensor, "b 1"],
    positives: Annotated[Tensor, "b p"],
    tau_plus: float | Tensor,
    temperature: float | Tensor,
) -> tuple[Annotated[Tensor, "b p"], Annotated[Tensor, "b p"]]:
    """log max((E - tau_plus e^a) / (1 - tau_plus), e^(-1/temperature)), and where the floor was taken.

    Chuang et al. 2020, eq. 8, in log-space. The floor is active once the mean of e^s over the negatives falls below
    tau_plus e^a + (1 - tau_plus) e^(-1/temperature); at low temperature that is soon everywhere.
    """
    share = torch.as_tensor(tau_plus, dtype=torch.float64 if not isinstance(tau_plus, Tensor) else None)
    log_share = share.log() + positives - log_mean  # tau_plus e^a / E
    negative = (log_share >= 0) | (
        log_mean == NEVER
    )  # without a negative, where tau_plus=0 would have a gradient of NaN
    rest = log_mean + _log1m_exp(torch.where(negative, -1.0, log_share)) - torch.log1p(-share)
    floor = torch.zeros_like(rest) - 1.0 / temperature
    clamped = negative | ((rest <= floor) & (share > 0))
    return torch.where(clamped, floor, rest), clamped


def jsd(scores: Scores, log_w: LogWeights, *, tau_plus: float | Tensor = 0.0) -> PairLosses:
    """Jensen-Shannon estimate of mutual information, as a loss: E_q[softplus(s)] + softplus(-a) - 2 log 2.

    InfoGraph takes the plain mean over other graphs. A tilt gives HCL's hard version with the sign of the paper,
    q ~ exp(+beta s); the authors' graph code has exp(-beta s), which prefers easy graphs. ``tau_plus`` corrects the
    negative term to (E_q[softplus(s)] - tau_plus softplus(a)) / (1 - tau_plus).
    """
    check_range("jsd", "tau_plus", tau_plus, 0.0, 1.0, open_high=True)
    _check_shape("jsd", scores, log_w)
    q = torch.softmax(with_support(log_w)[1], dim=-1)
    negative = (q * _softplus(scores.candidates)).sum(-1)[:, None]
    negative = (negative - tau_plus * _softplus(scores.positives)) / (1.0 - tau_plus)
    return _only_real_pairs(negative + _softplus(-scores.positives) - 2.0 * math.log(2.0), scores, log_w)


def sigmoid(
    scores: Scores, log_w: LogWeights, *, bias: float | Tensor = 0.0, num_negatives: NumNegatives = "support"
) -> PairLosses:
    """SigLIP (Zhai et al. 2023): -log sigmoid(a + bias) - M E_q[log sigmoid(-s - bias)].

    Each pair is a yes-or-no question. The authors sum over the negatives and average over the anchors, learn the
    temperature and start the bias at -10.
    """
    check_num_negatives("sigmoid", num_negatives)
    _check_shape("sigmoid", scores, log_w)
    some, safe = with_support(log_w)
    q = torch.softmax(safe, dim=-1)
    number = torch.where(some[:, 0], _log_number(scores, log_w, num_negatives), 0.0).exp()
    negative = number * (q * _softplus(scores.candidates + bias)).sum(-1)
    return _only_real_pairs(_softplus(-scores.positives - bias) + negative[:, None], scores, log_w)


def surrogate(scores: Scores, log_w: LogWeights, *, log_norm: Annotated[Tensor, "b"] | None = None) -> PairLosses:
    """-a + sum_j stop_gradient(w_j / norm) s_j: the gradient of a global loss, without its value.

    SogCLR: log_w = Tilt(1.0), log_norm = log u + log N. EMC2: log_w = log of the visits, log_norm = log of all visits.
    Without log_norm the weights are normalised over the row: the gradient of -a + LSE(s) for Tilt(1.0).
    """
    _check_shape("surrogate", scores, log_w)
    some, safe = with_support(log_w)
    share = torch.softmax(safe, dim=-1) if log_norm is None else (safe - log_norm[:, None]).exp()
    share = torch.where(some, share, 0.0).detach()
    return _only_real_pairs((share * scores.candidates).sum(-1)[:, None] - scores.positives, scores, log_w)


def reduce(
    losses: PairLosses, scores: Scores, reduction: str = "anchors", weights: Annotated[Tensor, "b"] | None = None
) -> Tensor:
    """One number from the pairs.

    ``"anchors"``: mean over the positives of each anchor, then over all anchors (SupCon); an anchor without a positive
    counts as 0. ``"pairs"``: mean over all valid pairs (H-SCL), so anchors with more positives count more. ``"none"``:
    the mean of each anchor, [b]. ``weights`` of the anchors make either mean a weighted one.
    """
    valid = scores.positive_valid.to(losses.dtype)
    per_anchor = losses.sum(-1) / valid.sum(-1).clamp(min=1.0)
    if reduction == "none":
        return per_anchor if weights is None else weights * per_anchor
    if reduction == "anchors":
        return per_anchor.mean() if weights is None else (weights * per_anchor).sum() / _at_least_tiny(weights.sum())
    if reduction == "pairs":
        if weights is None:
            return losses.sum() / valid.sum().clamp(min=1.0)
        return (weights * losses.sum(-1)).sum() / _at_least_tiny((weights * valid.sum(-1)).sum())
    raise argument_error("reduce", "reduction 'anchors', 'pairs' or 'none'", "reduction", reduction)


def check_num_negatives(who: str, num_negatives: NumNegatives) -> None:
    if isinstance(num_negatives, Tensor):
        fine = num_negatives.ndim <= 1
    elif isinstance(num_negatives, str):
        fine = num_negatives in ("support", "candidates", "mass")
    else:
        fine = isinstance(num_negatives, (int, float)) and not isinstance(num_negatives, bool) and num_negatives > 0
    if not fine:
        what = "num_negatives 'support', 'candidates', 'mass', a number above 0 or a tensor [] or [b]"
        raise argument_error(who, what, "num_negatives", num_negatives)


def corrects(tau_plus: float | Tensor) -> bool:
    """Whether there is something to correct for; a tensor, such as a schedule's number, is not looked into."""
    return isinstance(tau_plus, Tensor) or bool(tau_plus)


def _check_shape(who: str, scores: Scores, log_w: LogWeights) -> None:
    if log_w.shape != scores.candidates.shape:
        what = f"a log-weight for each candidate, shape {tuple(scores.candidates.shape)}"
        raise ArgumentError(who, what, f"log_w={tuple(log_w.shape)}", "use negatives.log_weights(scores)")


def _log_number(scores: Scores, log_w: LogWeights, num_negatives: NumNegatives) -> Tensor:
    if isinstance(num_negatives, str):
        if num_negatives == "support":
            return (log_w != NEVER).sum(-1).to(log_w.dtype).log()
        if num_negatives == "candidates":
            return scores.other_instance().sum(-1).to(log_w.dtype).log()
        if num_negatives == "mass":
            return _masked_lse(log_w, log_w != NEVER)
    else:
        return (torch.ones_like(log_w[:, 0:1].sum(-1)) * num_negatives).log()
    raise AssertionError(num_negatives)


def _only_real_pairs(losses: Tensor, scores: Scores, log_w: LogWeights) -> Tensor:
    real = (log_w != NEVER).any(-1)[:, None] & scores.positive_valid
    return torch.where(real, losses, scores.positives * 0.0)  # times 0: NaN stays NaN


def _without_sampling_bias(
    positives: Tensor, candidates: Tensor, log_q: tuple[Tensor, Tensor], tau_plus: float | Tensor
) -> tuple[Tensor, Tensor]:
    if corrects(tau_plus):
        raise ValueError("info_nce needs tau_plus=0 with log_q: the floor of the debiased mean has no meaning there.")
    of_candidates, of_positives = log_q
    of_positives = of_positives[:, None] if of_positives.ndim == 1 else of_positives
    return positives - of_positives, candidates - of_candidates


def _masked_lse(values: Tensor, mask: Tensor) -> Tensor:
    some = mask.any(-1)
    safe = torch.where(some[:, None], torch.where(mask, values, NEVER), 0.0)
    return torch.where(some, torch.logsumexp(safe, dim=-1), NEVER)


def _log1m_exp(x: Tensor) -> Tensor:
    """log(1 - e^x) for x < 0, accurate at both ends (Maechler 2012)."""
    close = x > -math.log(2.0)
    return torch.where(
        close,
        torch.log(-torch.expm1(torch.where(close, x, -1.0))),
        torch.log1p(-torch.exp(torch.where(close, -1.0, x))),
    )


def _softplus(x: Tensor) -> Tensor:
    """log(1 + e^x); torch's own softplus drops the digits of e^-x above 20."""
    return -logsigmoid(-x)


def _at_least_tiny(total: Tensor) -> Tensor:
    return torch.where(total > 0, total, 1.0)
