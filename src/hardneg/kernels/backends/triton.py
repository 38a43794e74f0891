"""The Triton backend: any distribution of the closed family, without a [b, n] tensor.

``why_unsupported_loss`` returns why the kernels do not support a loss. Two views with InfoNCE of their own positives go
through one sweep; everything else through row statistics, an objective of them and, for positives by label, one more
sweep over those. The kernels are in ``kernels/triton``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from hardneg.core.bounds import Window
from hardneg.core.objectives.base import Objective, Row, RowResult
from hardneg.core.objectives.info_nce import InfoNCE
from hardneg.core.pairing import Pairing
from hardneg.core.statistics import LogMass, LogMean, LogPositives, Others, Statistic, Support, masked_lse
from hardneg.core.tensors import known_number
from hardneg.core.tiles import num_others
from hardneg.core.types import NEVER, Keys
from hardneg.core.views import check_temperature
from hardneg.kernels.triton.edges import Sizes
from hardneg.kernels.triton.labels import PositiveStatistics, pair_losses, positive_statistics
from hardneg.kernels.triton.own import own_similarity
from hardneg.kernels.triton.sides import NOT_WIDE, SORTED_FROM, HostTemperature, is_wide, why_unsupported
from hardneg.kernels.triton.statistics import RowStatistics, row_statistics, two_view_losses
from hardneg.negatives.base import Negatives
from hardneg.negatives.closed import ClosedForm

FUSED_STATISTICS = (LogMass, LogMean, LogPositives, Others, Support)
"""The row statistics that the kernels compute."""
MAX_RANKED = 2**26
"""Number of candidates from which the pairs of a chunk of anchors cannot be numbered in 32 bits."""
LARGEST_UNIT_NORM = 1.02
"""Largest norm that counts as 1: unit vectors rounded to bfloat16 stay below it."""


class Triton:
    """Computes uniform, tilted, banded and ranked negatives in fused kernels on a GPU."""

    def why_not(self, pairing: Pairing, negatives: Negatives, objective: Objective) -> str | None:
        """Return why the kernels do not support this; None if they do."""
        return why_unsupported_loss(pairing, negatives, objective)

    def rows(self, pairing: Pairing, negatives: Negatives, objective: Objective) -> RowResult:
        """Launch the kernels."""
        return rows_of_closed_family(pairing, negatives, objective)


def why_unsupported_loss(pairing: Pairing, negatives: Negatives, objective: Objective) -> str | None:
    """Return why the kernels do not support these arguments; None if they do.

    The reasons are shown by ``ContrastiveLoss.explain_path``. The order of the checks is from cheap to expensive.

    Args:
        pairing: The anchors, positives and candidates of the batch.
        negatives: The distribution of negatives.
        objective: The objective, for the statistics that it declares.
    """
    form, pools = negatives.closed_form(), pairing.candidates
    beta = 0.0 if form is None else form.beta
    if any(keys.private for keys in pools):
        return "candidates are private to each anchor"
    for keys in pools:
        if reason := why_unsupported(pairing.anchors.vectors, keys.vectors, pairing.temperature, beta):
            return reason
    if is_slow(pairing):
        return "products of float32 without TF32 are faster in cuBLAS"
    if form is None:
        return "the distribution is not of the closed family"
    if unknown := [name for name, each in objective.statistics().items() if type(each) not in FUSED_STATISTICS]:
        return f"the objective needs the row statistic {unknown[0]!r}"
    if pairing.label_positives and objective.pair_form is None:
        return "the objective needs every pair of positives by label"
    if pairing.label_positives and form.ceilings:
        return "the distribution needs the lowest of the positives by label"
    plain = pairing.normalize and not (form.banded or form.ceilings or pairing.label_positives)
    if is_wide(pairing.anchors.vectors) and not plain:
        return NOT_WIDE
    if form.window is not None and not (plain and _is_queue(pairing)):
        return "the window needs normalised anchors of 16 bits against candidates without a gradient"
    if pairing.positives.ids is not None:
        return "the positives have their own ids"
    if pairing.positives.vectors.numel() >= 2**31:
        return "the positives have 2**31 elements or more"
    labels_read = pairing.label_positives or form.other_labels
    if labels_read and any(keys.labels is None for keys in (pairing.anchors, *pools)):
        return "labels are missing"
    return None


def _is_queue(pairing: Pairing) -> bool:
    """True if 16-bit anchors are compared with candidates that need no gradient and are few enough to be numbered."""
    sides = (pairing.anchors, *pairing.candidates)
    learnt = any(keys.vectors.requires_grad for keys in pairing.candidates)
    single = any(keys.vectors.dtype == torch.float32 for keys in sides)
    return not (pairing.itself or learnt or single or pairing.num_candidates >= MAX_RANKED)


def is_slow(pairing: Pairing) -> bool:
    """True for exact products of float32, which in Triton take five times as long as tiles (measured on an H200)."""
    single = any(keys.vectors.dtype == torch.float32 for keys in (pairing.anchors, *pairing.candidates))
    return single and torch.get_float32_matmul_precision() == "highest"


def rows_of_closed_family(pairing: Pairing, negatives: Negatives, objective: Objective) -> RowResult:
    """Compute the statistics of the closed family; two views with InfoNCE get their losses in the same launch.

    Args:
        pairing: A pairing that ``why_unsupported_loss`` accepts.
        negatives: A distribution with a closed form.
        objective: The objective, for the statistics that it declares.
    """
    form = negatives.closed_form()
    assert form is not None
    temperature = HostTemperature.of(pairing.temperature)
    check_temperature("ContrastiveLoss", temperature.value)
    tau_plus = _fused_tau_plus(objective)
    two_views = pairing.num_views == 2 and pairing.itself and not pairing.label_positives
    if two_views and tau_plus is not None and not form.ceilings:
        return _two_views(pairing, form, temperature, tau_plus)
    own = own_similarity(pairing.anchors.vectors, pairing.own().vectors, pairing.normalize)
    own = own / pairing.temperature
    real = torch.ones_like(own, dtype=torch.bool) if pairing.positive_mask is None else pairing.positive_mask
    swept = _Swept(pairing, form, temperature)
    row = swept.row(objective, own, real)
    return RowResult(row, own, real, partial(swept.promoted, row=row) if pairing.label_positives else None)


def _fused_tau_plus(objective: Objective) -> float | None:
    """Return the tau_plus of an InfoNCE that ``two_view_losses`` computes; None for any other objective."""
    if type(objective) is not InfoNCE or objective.positives_in_denominator != "own":
        return None
    if objective.correction_beta is not None:  # needs the positives of the whole row
        return None
    fused = isinstance(objective.num_negatives, str) and objective.num_negatives == "support"
    return known_number(objective.tau_plus) if fused else None  # type: ignore[arg-type]


def _two_views(pairing: Pairing, form: ClosedForm, temperature: HostTemperature, tau_plus: float) -> RowResult:
    """Compute the losses of two views of each instance in one sweep."""
    found = two_view_losses(
        pairing.anchors.vectors,
        temperature=temperature,
        beta=form.beta,
        detach=form.detach,
        tau_plus=tau_plus,
        ids=pairing.anchors.ids,
        labels=pairing.anchors.labels if form.other_labels else None,
        low=form.lowest(torch.float32) if form.banded else None,
        normalize=pairing.normalize,
        unit=_has_unit_norm(pairing),
    )
    row = Row({"log_mean": found.log_mean.unsqueeze(1), "support": found.support.unsqueeze(1)}, pairing.temperature)
    return RowResult(row, found.positives.unsqueeze(1), None, losses=found.losses.unsqueeze(1))


def _has_unit_norm(pairing: Pairing) -> bool:
    """True if all vectors are known to have unit norm.

    It reads their norms only where the running maximum, which works for all vectors, would cost more than waiting for
    the result.
    """
    if pairing.normalize or len(pairing) < SORTED_FROM or torch.cuda.is_current_stream_capturing():
        return pairing.normalize
    norms = [
        torch.linalg.vector_norm(keys.vectors.detach(), dim=-1, dtype=torch.float32).amax()
        for keys in {id(keys): keys for keys in (pairing.anchors, *pairing.candidates) if len(keys)}.values()
    ]
    return bool(torch.stack(norms).amax() <= LARGEST_UNIT_NORM)


class _Swept:
    """The anchors of a pairing against all candidates as one side."""

    def __init__(self, pairing: Pairing, form: ClosedForm, temperature: HostTemperature) -> None:
        self.pairing, self.form, self.temperature = pairing, form, temperature
        anchors, pools = pairing.anchors, pairing.candidates
        self.anchor_ids, self.ids = anchors.ids, None if pairing.itself else _joined_ids(pools)
        self.candidates = None if pairing.itself else _joined([keys.vectors for keys in pools])

    def row(self, objective: Objective, own: Tensor, real: Tensor) -> Row:
        """Compute the statistics that the objective declares, and the support.

        Args:
            objective: The objective.
            own: Scores of the anchors' own positives, [b, p].
            real: True for own positives that exist, [b, p].
        """
        pairing, form = self.pairing, self.form
        by_label = form.other_labels or (pairing.label_positives and not pairing.same_label_negatives)
        lowest = torch.where(real, own.detach(), torch.inf).amin(-1) * self.temperature.value
        found = row_statistics(
            **self._sides(by_label),
            beta=form.beta,
            detach=form.detach,
            low=form.lowest(torch.float32) if form.banded else None,
            high=form.ceiling(lowest),
            window=None if form.window is None else self._sizes(form.window),
            unit=_has_unit_norm(pairing),
        )
        needed = {"support": Support(), **objective.statistics()}
        values = {name: self._of(each, found, own, real)[:, None] for name, each in needed.items()}
        return Row(values, pairing.temperature)

    def _of(self, statistic: Statistic, found: RowStatistics, own: Tensor, real: Tensor) -> Tensor:
        """Return one declared statistic of all rows, [b]."""
        if isinstance(statistic, LogPositives):
            log_sum = masked_lse(own, real)[:, 0]
            log_sum = torch.logaddexp(log_sum, self.by_label.log_sum) if self.pairing.label_positives else log_sum
            return torch.where(log_sum == NEVER, 0.0, log_sum)
        known = {LogMean: found.log_mean, LogMass: found.log_mass, Support: found.support}
        value = self._num_others() if isinstance(statistic, Others) else known[type(statistic)]
        return value.to(own.dtype)

    def _sizes(self, window: Window) -> Sizes:
        """Convert a window of ranks to the numbers of candidates inside its edges."""
        count, n = self._num_others()[:, None], self.pairing.num_candidates
        start, stop = window.places({"count": count})
        return Sizes.of(start, stop, count, window.slack, n)

    def _num_others(self) -> Tensor:
        """Return the number of candidates of each anchor that are not the same instance."""
        ids, n = self.anchor_ids if self.pairing.itself else self.ids, self.pairing.num_candidates
        if self.anchor_ids is None or ids is None:
            return torch.full((len(self.pairing),), n, device=self.pairing.anchors.vectors.device)
        return num_others(self.anchor_ids, ids)

    def promoted(self, objective: Objective, row: Row) -> tuple[Tensor, Tensor]:
        """Compute the sum of the losses of each anchor's positives by label, and their number."""
        some = row.support > 0
        if objective.needs_negatives:
            row = Row({name: torch.where(some, value, 1.0) for name, value in row.statistics.items()}, row.temperature)
        else:
            some = torch.ones_like(some)
        form = objective.pair_form
        assert form is not None  # see ``why_unsupported_loss``
        offset = form.offset(row)[:, 0]
        if form.softplus:
            total, number = pair_losses(log_negative=torch.where(some[:, 0], offset, NEVER), **self._sides(True))
            return total, number
        found = self.by_label
        return torch.where(some[:, 0], found.num_positives * offset - found.total, 0.0), found.num_positives

    @cached_property
    def by_label(self) -> PositiveStatistics:
        """The statistics of the positives by label."""
        return positive_statistics(**self._sides(True))

    def _sides(self, labels: bool) -> dict[str, Any]:
        """Return vectors and tags of both sides as arguments of the kernels; with ``labels`` also the labels."""
        anchors, pools = self.pairing.anchors, self.pairing.candidates
        of_pools = None
        if labels and not self.pairing.itself:
            of_pools = _joined([keys.labels for keys in pools if keys.labels is not None])
        return {
            "anchors": anchors.vectors,
            "candidates": self.candidates,
            "anchor_ids": self.anchor_ids,
            "candidate_ids": self.ids,
            "anchor_labels": anchors.labels if labels else None,
            "candidate_labels": of_pools,
            "temperature": self.temperature,
            "normalize": self.pairing.normalize,
        }


def _joined_ids(pools: Sequence[Keys]) -> Tensor | None:
    """Return the ids of all candidates, -1 where a pool has none; None if no pool has ids."""
    if all(keys.ids is None for keys in pools):
        return None
    parts = [
        torch.full((len(keys),), -1, device=keys.vectors.device) if keys.ids is None else keys.ids.long()
        for keys in pools
    ]
    return _joined(parts)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
