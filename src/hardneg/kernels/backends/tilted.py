"""A shortcut for uniform and tilted negatives of views: whole rows in few operations, with handwritten gradients.

It computes the dense loss of a small batch on a GPU, whose time is that of its operations. On a CPU ``cpu`` is tried
first, so that this shortcut only runs for vectors that are not finite.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from hardneg.core.objectives.base import Objective, Row, RowResult
from hardneg.core.pairing import Pairing, positive_columns
from hardneg.core.private_apis import is_plain
from hardneg.core.statistics import LogMean, PerRow, Support, log_expect_exp
from hardneg.core.tensors import (
    by_operations,
    constant,
    has_unit,
    known_number,
    unit,
    unit_gradient,
    unit_rows,
    without_autocast,
)
from hardneg.core.tiles import NEVER, other_id
from hardneg.negatives.base import Negatives
from hardneg.negatives.closed import ClosedForm

TILTED_STATISTICS = (LogMean, Support)
"""The statistics that are computed here."""


def why_not(pairing: Pairing, negatives: Negatives, objective: Objective) -> str | None:
    """Return why ``rows`` does not support these arguments; None if it does.

    It supports all other instances of a batch of views, weighted by e^(beta s): no labels, guides, bands, windows,
    several pools, other statistics, or compilers.

    Args:
        pairing: The anchors, positives and candidates of the batch.
        negatives: The distribution of negatives.
        objective: The objective, for the statistics that it declares.
    """
    if not pairing.num_views or len(pairing.candidates) > 1 or pairing.label_positives or pairing.guide is not None:
        return "the candidates are not one batch of views"
    if pairing.positive_mask is not None or pairing.positives.ids is not None:
        return "the positives have ids or a mask"
    anchors, (candidates,) = pairing.anchors, pairing.candidates
    temperature, n = known_number(pairing.temperature), candidates.vectors.shape[0]
    if temperature is None or not temperature > 0 or n <= pairing.num_views:  # a wrong one raises elsewhere
        return "the temperature is not one positive number, or there is no negative"
    if anchors.ids is None or candidates.ids is None:
        return "there are no ids"
    if not is_plain(anchors.vectors) or anchors.vectors.dtype != candidates.vectors.dtype:
        return "the vectors are not plain tensors of one type"
    form = negatives.closed_form()
    if form is None or form.other_labels or form.banded or form.window is not None:
        return "the distribution is not a tilt"
    if any(type(each) not in TILTED_STATISTICS for each in objective.statistics().values()):
        return "the objective needs other row statistics"
    return None


def rows(pairing: Pairing, negatives: Negatives, objective: Objective) -> RowResult | None:
    """Compute positives and log E_q[e^s] as one autograd function over matrices, on any device.

    Returns:
        The statistics; None where ``why_not`` gives a reason.
    """
    if why_not(pairing, negatives, objective) is not None:
        return None
    form = negatives.closed_form()
    assert form is not None
    tilt = _Tilt.of(pairing, form)
    if tilt.raw:
        own, log_mean = _Tilted.apply(pairing.anchors.vectors, None, tilt)  # type: ignore[no-untyped-call]
    else:
        anchors, (candidates,) = pairing.prepared_keys()
        others = None if candidates is anchors else candidates.vectors
        own, log_mean = _Tilted.apply(anchors.vectors, others, tilt)  # type: ignore[no-untyped-call]
    if tilt.number is None:
        log_mean = log_mean.masked_fill(tilt.support == 0, NEVER)  # there may be rows without a negative
    names = {"support": Support(), **objective.statistics()}
    values = {name: log_mean if type(each) is LogMean else tilt.support for name, each in names.items()}
    real = None if tilt.number is not None else torch.ones_like(own, dtype=torch.bool)
    return RowResult(Row(values, pairing.temperature, tilt.number), own, real)


class _Tilt(NamedTuple):
    """Which candidates are an anchor's positives, which are its own instance, and how the others are weighed."""

    scale: float
    """1 / temperature."""
    beta: float
    """Exponent of the weights, w = e^(beta s)."""
    slope: float
    """Slope of the log-weights as the gradient sees it: 0 if they are detached."""
    own: Annotated[Tensor, "b p"]
    """Columns of the positives."""
    ids: tuple[Annotated[Tensor, "b"], Annotated[Tensor, "n"]]
    """Ids of the anchors and of the candidates."""
    support: PerRow
    """Number of negatives of each row, [b, 1]."""
    same: Annotated[Tensor, "b v"] | None
    """Columns of the anchor's instance if the rows of the views were numbered; None if ids decide."""
    number: int | None
    """Support of every row if the rows of the views were numbered."""
    raw: bool
    """True if the vectors are as given, not of norm 1 yet."""

    @classmethod
    def of(cls, pairing: Pairing, form: ClosedForm) -> _Tilt:
        """Collect the numbers and masks of a pairing."""
        mine, theirs, views = pairing.anchors.ids, pairing.candidates[0].ids, pairing.num_views
        assert mine is not None
        assert theirs is not None
        b, n, device, vectors = mine.shape[0], theirs.shape[0], mine.device, pairing.anchors.vectors
        beta = form.beta if form.beta > 1e-30 else 0.0  # float32 may round smaller values to 0
        dtype = torch.float64 if vectors.dtype == torch.float64 else torch.float32
        if not pairing.ids_given:
            number, same = n - views, constant(_same_columns, b, views, device=device)
            support = constant(torch.full, (b, 1), number, dtype=dtype, device=device)
        else:
            number, same = None, None
            support = other_id(mine, theirs).sum(-1, keepdim=True).to(dtype)
        return cls(
            1.0 / float(pairing.temperature),
            beta,
            0.0 if form.detach else beta,
            constant(positive_columns, b, views, device=device),
            (mine, theirs),
            support,
            same,
            number,
            pairing.normalize and not pairing.ready and pairing.itself and has_unit(vectors),
        )

    def plain(self, anchors: Tensor, candidates: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute the result of ``_Tilted`` by plain operations, for higher derivatives."""
        anchors = unit(anchors) if self.raw else anchors
        s = anchors @ (anchors if candidates is None else candidates).T * self.scale
        weighed = self.slope * s + (self.beta - self.slope) * s.detach()
        log_w = torch.where(other_id(*self.ids), weighed, NEVER)
        return s.gather(1, self.own), log_expect_exp(s, log_w)[:, None]


def _same_columns(rows: int, views: int, device: torch.device) -> Annotated[Tensor, "b v"]:
    """Return the columns of the positives and, if the views are their own candidates, of the anchor itself."""
    own = positive_columns(rows, views, device)
    return own if views == 1 else torch.cat([own, torch.arange(rows, device=device)[:, None]], dim=1)


class _Tilted(torch.autograd.Function):
    """Computes the scores of the positives and log E_q[e^s]; ``candidates`` is None if they are the anchors.

    It saves q and the share of each candidate in E_q[e^s]: the gradient of log E_q[e^s] by the scores is
    (1 + slope) share - slope q.
    """

    @staticmethod
    def forward(ctx: Any, anchors: Tensor, candidates: Tensor | None, tilt: _Tilt) -> tuple[Tensor, Tensor]:
        given, beta, norm = anchors, tilt.beta, None
        if tilt.raw:
            anchors, norm = unit_rows(given)
        others = anchors if candidates is None else candidates
        s = torch.addmm(tilt.support, anchors, others.t(), beta=0, alpha=tilt.scale)  # with beta=0, it is not read
        own = s.gather(1, tilt.own)
        if tilt.same is not None:
            s.scatter_(1, tilt.same, NEVER)
        else:
            s.masked_fill_(~other_id(*tilt.ids), NEVER).masked_fill_(
                tilt.support == 0, 0.0
            )  # the loss of such a row is 0
        top = s.amax(-1, keepdim=True)
        if not beta:
            q, share = None, torch.softmax(s, dim=-1)
            mean = share.amax(-1, keepdim=True).mul_(tilt.support).reciprocal_()  # of e^(s - top)
        else:
            s.sub_(top)
            q = torch.softmax(s if beta == 1 else s * beta, dim=-1)
            share = s.exp_().mul_(q)
            mean = share.sum(-1, keepdim=True)
            share.div_(mean)
        ctx.tilt = tilt
        ctx.save_for_backward(given, candidates, q, share, anchors if tilt.raw else None, norm)
        return own, mean.log_().add_(top)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (of_own, of_mean), (given, candidates, q, share, rows, norm), tilt = gradients, ctx.saved_tensors, ctx.tilt
        with without_autocast(given.device):
            if torch.is_grad_enabled() or not (is_plain(of_own) and is_plain(of_mean)):
                return *by_operations(tilt.plain, (given, candidates), (of_own, of_mean)), None
            by_score = of_mean * (torch.lerp(q, share, 1.0 + tilt.slope) if tilt.slope else share)
            by_score.scatter_add_(1, tilt.own, of_own)
            anchors, of_anchors, of_others = given if rows is None else rows, None, None
            if ctx.needs_input_grad[0]:
                others = anchors if candidates is None else candidates
                of_anchors = torch.addmm(anchors, by_score, others, beta=0, alpha=tilt.scale)
                if candidates is None:
                    of_anchors.addmm_(by_score.t(), anchors, alpha=tilt.scale)
                if norm is not None:
                    of_anchors = unit_gradient(of_anchors, given, anchors, norm)
            if candidates is not None and ctx.needs_input_grad[1]:
                of_others = torch.addmm(candidates, by_score.t(), anchors, beta=0, alpha=tilt.scale)
        return of_anchors, of_others, None
