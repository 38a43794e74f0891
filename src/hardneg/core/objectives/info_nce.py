"""InfoNCE (van den Oord et al. 2018) with any number of negatives, three denominators and the correction of DCL.

Everything rests on one statistic, computed in log-space: log E_q[e^s] = LSE(s + log_w) - LSE(log_w), the mean of e^s
under the distribution q of the negatives. ``info_nce`` is the public function, ``InfoNCE`` the class behind it, and
``debiased`` the correction for false negatives (DCL, HCL).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, argument_error, check_range
from hardneg.core.objectives.base import (
    Objective,
    PairForm,
    Row,
    TauPlus,
    check_tau_plus,
    corrects,
    log1m_exp,
    softplus,
)
from hardneg.core.private_apis import is_plain
from hardneg.core.statistics import (
    LogMass,
    LogMean,
    LogPositives,
    LogPositivesTilted,
    Others,
    PerRow,
    Statistic,
    Support,
)
from hardneg.core.tensors import by_operations, known_number
from hardneg.core.types import NEVER, LogWeights, PairLosses, Scores

NumNegatives = Literal["support", "candidates", "mass"] | float | Tensor
"""The M of a denominator: "support", "candidates", "mass", a number, or a tensor [] or [b]."""
Denominator = Literal["own", "all", "none"]
"""Positives in the denominator: that of the pair, all of the anchor, or none."""


@dataclass(frozen=True, repr=False, eq=False)
class InfoNCE(Objective):
    """InfoNCE: -log e^a / (e^a + M E_q[e^s]) for each positive a.

    Args:
        num_negatives: M, as in ``info_nce``.
        tau_plus: Share of false negatives to correct for, in [0, 1), as in ``info_nce``; may be a schedule.
        positives_in_denominator: ``"own"``, ``"all"`` or ``"none"``, as in ``info_nce``.
        correction_beta: None, or the tilt of all positives in the correction, as in ``info_nce``.
    """

    num_negatives: NumNegatives = "support"
    tau_plus: TauPlus = 0.0
    positives_in_denominator: Denominator = "own"
    correction_beta: float | None = None
    name: ClassVar = "info_nce"

    def __post_init__(self) -> None:
        check_tau_plus("info_nce", self.tau_plus)
        check_num_negatives("info_nce", self.num_negatives)
        if self.positives_in_denominator not in ("own", "all", "none"):
            what = "positives_in_denominator 'own', 'all' or 'none'"
            raise argument_error("info_nce", what, "positives_in_denominator", self.positives_in_denominator)
        if self.correction_beta is not None:
            check_range("info_nce", "correction_beta", self.correction_beta, 0.0, math.inf, open_high=True)
            if not isinstance(self.correction_beta, Real):
                raise argument_error("info_nce", "a number", "correction_beta", self.correction_beta)

    def statistics(self) -> Mapping[str, Statistic]:
        """Return the log-mean, and the statistics needed for M and for all positives in the denominator."""
        needed: dict[str, Statistic] = {"log_mean": LogMean()}
        if self.positives_in_denominator == "all":
            needed["log_positives"] = LogPositives()
        if self._pools:
            beta = float(self.correction_beta)  # type: ignore[arg-type]
            needed["log_tilted_positives"] = LogPositivesTilted(scale=1.0 + beta)
            needed["log_positive_weights"] = LogPositivesTilted(scale=beta)
        return {**needed, **number_statistic(self.num_negatives)}

    @property
    def _pools(self) -> bool:
        """True if the correction uses all positives of the anchor."""
        return self.correction_beta is not None and corrects(self.tau_plus)

    def correction(self, positive: Tensor, row: Row) -> Annotated[Tensor, "b p|1"]:
        """Return log E[e^a] over the positives that stand for the anchor's class in the correction."""
        return row.log_tilted_positives - row.log_positive_weights if self._pools else positive

    @property
    def needs_negatives(self) -> bool:
        """False with all positives in the denominator (SupCon), where anchors without a negative still have a loss."""
        return self.positives_in_denominator != "all"  # there the positives compete with each other, as in SupCon

    @property
    def pair_form(self) -> PairForm | None:
        """softplus(offset - a), or offset - a; None with ``tau_plus``, where the offset depends on the pair."""
        if corrects(self.tau_plus):
            return None
        return PairForm(self.positives_in_denominator == "own", self._pair_offset)

    def _pair_offset(self, row: Row) -> PerRow:
        log_negative = row.log_mean + log_number(row, self.num_negatives)
        if self.positives_in_denominator != "all":
            return log_negative
        return softplus(log_negative - row.log_positives) + row.log_positives

    def __call__(self, positive: Tensor, row: Row) -> Tensor:
        """Return the loss of each pair, [b, p]."""
        log_mean = row.log_mean
        if corrects(self.tau_plus):
            log_mean = _debiased(log_mean, self.correction(positive, row), self.tau_plus, row.temperature)  # type: ignore[arg-type]
        log_negative = log_mean + log_number(row, self.num_negatives)
        if self.positives_in_denominator == "own":
            return softplus(log_negative - positive)
        if self.positives_in_denominator == "none":
            return log_negative - positive
        # Not logaddexp(...) - positive, which would lose a loss that is small beside its scores.
        return softplus(log_negative - row.log_positives) + (row.log_positives - positive)


def info_nce(
    scores: Scores,
    log_w: LogWeights,
    *,
    num_negatives: NumNegatives = "support",
    tau_plus: float | Tensor = 0.0,
    positives_in_denominator: Denominator = "own",
    correction_beta: float | None = None,
    log_q: tuple[Tensor, Tensor] | None = None,
) -> PairLosses:
    """Compute InfoNCE, -log e^a / (e^a + M E_q[e^s]), for each positive a.

    Args:
        scores: Scores of b anchors with p positives and n candidates.
        log_w: Log-weights of the negatives, [b, n], such as ``Tilt(1.0).log_weights(scores)``; they define q.
        num_negatives: The number M. ``"support"``: the number of candidates that q allows; ``"candidates"``: all
            candidates except the anchor itself (H-SCL's 2B - 2); ``"mass"``: the sum of the weights, so that they
            count unnormalised; or a number, or a tensor [] or [b].
        tau_plus: Share of false negatives to correct for (DCL, HCL), a number or a tensor [] or [b, 1]: E becomes
            (E - tau_plus e^a) / (1 - tau_plus), with the pair's own positive, and at least e^(-1/temperature), the
            smallest e^s of unit vectors. A pair at this lower bound has no gradient to its negatives.
        positives_in_denominator: ``"own"``: the pair's positive; ``"all"``: every positive of the anchor (SupCon);
            ``"none"``: no positive (GraphCL; the loss can be negative).
        correction_beta: With several positives and ``tau_plus``: None corrects each pair by its own positive, e^a. A
            number corrects by all positives of the anchor (M > 1 in HCL's eq. 4), by their mean of e^a with weights
            e^(correction_beta a): pass the beta of the ``Tilt`` (HCL), or 0 (DCL).
        log_q: Log-probabilities with which each candidate, [n] or [b, n], and each positive, [b] or [b, p], was sampled
            into the batch. They are subtracted from the scores after the weights are computed (Yi et al. 2019).

    Returns:
        The loss of each pair, [b, p]; 0 for positives that are not real and anchors without a negative.

    Raises:
        ArgumentError: If an option is out of range, the shape of ``log_w`` does not match, or both ``log_q`` and
            ``tau_plus`` are given.

    Example:
        >>> from hardneg import Uniform, two_views
        >>> z = torch.nn.functional.normalize(torch.ones(2, 4), dim=-1)
        >>> scores = two_views(z, z, temperature=1.0)
        >>> info_nce(scores, Uniform().log_weights(scores)).squeeze(1)  # log 3: one positive, two equal negatives
        tensor([1.0986, 1.0986, 1.0986, 1.0986])
    """
    objective = InfoNCE(num_negatives, tau_plus, positives_in_denominator, correction_beta)
    if log_q is not None:
        scores = _without_sampling_bias(scores, log_q, tau_plus)
    return objective.losses(scores, log_w)


def debiased(
    log_mean: Annotated[Tensor, "b 1"],
    positives: Annotated[Tensor, "b p"],
    tau_plus: float | Tensor,
    temperature: float | Tensor,
) -> tuple[Annotated[Tensor, "b p"], Annotated[Tensor, "b p"]]:
    """Correct the mean of the negatives for false negatives (Chuang et al. 2020, eq. 8), in log-space.

    With E = e^log_mean, returns log max((E - tau_plus e^a) / (1 - tau_plus), e^(-1/temperature)) for each positive a.
    The lower bound applies once E falls below tau_plus e^a + (1 - tau_plus) e^(-1/temperature); at low temperatures
    this soon happens for every pair. A mean over no negatives stays NEVER.

    Args:
        log_mean: log E_q[e^s], [b, 1].
        positives: Scores of the positives, [b, p].
        tau_plus: Share of false negatives in [0, 1).
        temperature: Number or tensor by which similarities were divided.

    Returns:
        The corrected log-mean, [b, p], and a mask [b, p] that is True where the lower bound was used.
    """
    share = tau_plus if isinstance(tau_plus, Tensor) else torch.tensor(tau_plus, dtype=torch.float64)
    none, never = share <= 0, log_mean == NEVER
    log_share = torch.where(none, 1.0, share).log() + positives - log_mean  # tau_plus e^a / E
    negative = ((log_share >= 0) & ~none) | never
    left = log1m_exp(torch.where(negative | none, -1.0, log_share))
    # A share of 0 has no logarithm but a gradient, e^a / E, which is cut off before it overflows.
    small = share * torch.where(never, 0.0, positives - log_mean).clamp(max=80.0).exp()
    left = torch.where(none, torch.log1p(-torch.where(none, small, 0.0)), left)
    rest = log_mean + left - torch.log1p(-share)
    floor = torch.zeros_like(rest) - 1.0 / temperature
    clamped = negative | ((rest <= floor) & (share > 0))
    return torch.where(log_mean == NEVER, NEVER, torch.where(clamped, floor, rest)), clamped


def _debiased(
    log_mean: Tensor, positives: Tensor, tau_plus: float | Tensor, temperature: float | Tensor
) -> Annotated[Tensor, "b p|1"]:
    """The first result of ``debiased``, with fewer operations if ``tau_plus`` and the temperature are plain numbers."""
    numbers = known_number(tau_plus), known_number(temperature)
    if None in numbers or not (is_plain(log_mean) and is_plain(positives)):
        return debiased(log_mean, positives, tau_plus, temperature)[0]
    found: Tensor = _Debiased.apply(log_mean, positives, *numbers) if numbers[0] else log_mean  # type: ignore[no-untyped-call]
    return found


class _Debiased(torch.autograd.Function):
    """``debiased`` as one autograd function, for numbers that are known on the host."""

    @staticmethod
    def forward(ctx: Any, log_mean: Tensor, positives: Tensor, tau_plus: float, temperature: float) -> Tensor:
        left = (positives - log_mean).add_(math.log(tau_plus)).expm1_().neg_().clamp_(min=0.0)  # 1 - tau_plus e^a / E
        floor = -1.0 / temperature
        found = left.log().add_(log_mean).sub_(math.log1p(-tau_plus)).clamp_(min=floor)
        ctx.numbers = tau_plus, temperature
        ctx.save_for_backward(log_mean, positives, left, found > floor)
        return found.masked_fill_(log_mean == NEVER, NEVER)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (log_mean, positives, left, free) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled() or not is_plain(grad):
            plain = by_operations(lambda *given: debiased(*given, *ctx.numbers)[0], (log_mean, positives), grad)
            return *plain, None, None
        by_mean = torch.where(free, grad / left, 0.0)
        return by_mean.sum_to_size(log_mean.shape), (left - 1.0).mul_(by_mean), None, None


def check_num_negatives(who: str, num_negatives: NumNegatives) -> None:
    """Raise ArgumentError unless the value is a known name, a positive number, or a tensor [] or [b]."""
    if isinstance(num_negatives, Tensor):
        fine = num_negatives.ndim <= 1
        check_range(who, "num_negatives", num_negatives, 0.0, math.inf)
    elif isinstance(num_negatives, str):
        fine = num_negatives in _numbers
    else:
        fine = isinstance(num_negatives, Real) and not isinstance(num_negatives, bool) and num_negatives > 0
    if not fine:
        what = "num_negatives 'support', 'candidates', 'mass', a number above 0 or a tensor [] or [b]"
        raise argument_error(who, what, "num_negatives", num_negatives)


# The statistics that each named number of negatives is computed from.
_numbers: dict[str, dict[str, Statistic]] = {
    "support": {"support": Support()},
    "candidates": {"candidates": Others()},
    "mass": {"log_mass": LogMass()},
}


def number_statistic(num_negatives: NumNegatives) -> dict[str, Statistic]:
    """Return the statistics from which ``log_number`` computes the number of negatives."""
    return _numbers[num_negatives] if isinstance(num_negatives, str) else {}


def log_number(row: Row, num_negatives: NumNegatives) -> float | PerRow:
    """Return log M for each row, [b, 1], or one number for all rows."""
    if isinstance(num_negatives, str):
        if row.number is not None and num_negatives == "support":
            return math.log(row.number)
        if num_negatives == "mass":
            return row.log_mass
        return (row.support if num_negatives == "support" else row.candidates).log()
    return given_number(row.log_mean, num_negatives).log()


def given_number(like: Annotated[Tensor, "b 1"], number: float | Tensor) -> Annotated[Tensor, "b 1"]:
    """Expand a number, [] or [b], to one value per row, [b, 1]."""
    return torch.ones_like(like) * (number[:, None] if isinstance(number, Tensor) and number.ndim else number)


def _without_sampling_bias(scores: Scores, log_q: tuple[Tensor, Tensor], tau_plus: TauPlus) -> Scores:
    if corrects(tau_plus):
        what = "tau_plus=0 with log_q: corrected scores are not similarities, so the debiased mean has no lower bound"
        raise ArgumentError("info_nce", what)
    of_candidates, of_positives = log_q
    of_positives = of_positives[:, None] if of_positives.ndim == 1 else of_positives
    return scores.changed(positives=scores.positives - of_positives, candidates=scores.candidates - of_candidates)
