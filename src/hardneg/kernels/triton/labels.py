"""Statistics of positives that are columns, for SupCon and H-SCL, with autograd; the kernels are in ``positives``.

``positive_statistics`` is for all positives in the denominator, ``pair_losses`` for each pair with its own.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from hardneg.core.errors import argument_error
from hardneg.core.tensors import first_derivative_only
from hardneg.core.types import PerAnchor
from hardneg.kernels.triton import positives as triton_positives
from hardneg.kernels.triton.function import LOG2_E
from hardneg.kernels.triton.sides import (
    HostTemperature,
    PerCandidate,
    SideTags,
    SweepSide,
    block_of,
    sides_from,
    sides_of,
    supported_sides,
    switches,
)

UNUSED = ("RAGGED", "LABELS")


class PositiveStatistics(NamedTuple):
    """Statistics of the candidates with each anchor's label and another id."""

    log_sum: PerAnchor
    """Log of the sum of e^s; -inf without a positive."""
    total: PerAnchor
    """Sum of the scores."""
    num_positives: PerAnchor
    """Number of positives, int32."""


class LabelLosses(NamedTuple):
    """Losses of the candidates with each anchor's label."""

    total: PerAnchor
    """The sum over the anchor's positives, each with the loss softplus(log_negative - score)."""
    num_positives: PerAnchor
    """Number of positives."""


def positive_statistics(
    anchors: Annotated[Tensor, "b d"],
    candidates: Annotated[Tensor, "n d"] | None = None,
    *,
    temperature: float | Tensor | HostTemperature,
    anchor_labels: PerAnchor,
    candidate_labels: PerCandidate | None = None,
    anchor_ids: PerAnchor | None = None,
    candidate_ids: PerCandidate | None = None,
    normalize: bool = False,
) -> PositiveStatistics:
    """Compute log-sum, sum and number of the scores of same-label candidates, for SupCon with all positives together.

    Own positives that are no candidates, like the other view of the anchor, are added by the caller. Tags and options
    are those of ``row_statistics``.

    Args:
        anchors: Vectors [b, d].
        candidates: Vectors [n, d]; None for the anchors themselves.
        temperature: The temperature.
        anchor_labels: Labels [b].
        candidate_labels: Labels [n].
        anchor_ids: Ids [b].
        candidate_ids: Ids [n]; a candidate with the anchor's id is no positive.
        normalize: Whether to divide vectors by their norms.
    """
    tags = SideTags.of(anchors, candidates, anchor_ids, candidate_ids, anchor_labels, candidate_labels)
    return PositiveStatistics(*_apply("positive_statistics", anchors, candidates, temperature, tags, normalize, None))


def pair_losses(
    anchors: Annotated[Tensor, "b d"],
    candidates: Annotated[Tensor, "n d"] | None = None,
    *,
    log_negative: PerAnchor,
    temperature: float | Tensor | HostTemperature,
    anchor_labels: PerAnchor,
    candidate_labels: PerCandidate | None = None,
    anchor_ids: PerAnchor | None = None,
    candidate_ids: PerCandidate | None = None,
    normalize: bool = False,
) -> LabelLosses:
    """Compute InfoNCE summed over same-label candidates, each the only positive in its denominator (H-SCL).

    Args:
        anchors: Vectors [b, d].
        candidates: Vectors [n, d]; None for the anchors themselves.
        log_negative: log M + log E_q[e^s] of each anchor [b], which gets a gradient; with -inf the loss of its pairs is
            0.
        temperature: The temperature.
        anchor_labels: Labels [b].
        candidate_labels: Labels [n].
        anchor_ids: Ids [b].
        candidate_ids: Ids [n]; a candidate with the anchor's id is no positive.
        normalize: Whether to divide vectors by their norms.
    """
    tags = SideTags.of(anchors, candidates, anchor_ids, candidate_ids, anchor_labels, candidate_labels)
    total, _, count = _apply("pair_losses", anchors, candidates, temperature, tags, normalize, log_negative)
    return LabelLosses(total, count)


def _apply(
    who: str,
    anchors: Tensor,
    candidates: Tensor | None,
    temperature: float | Tensor | HostTemperature,
    tags: SideTags,
    normalize: bool,
    log_negative: Tensor | None,
) -> Any:
    """Check labels and inputs, and run the autograd function."""
    anchors, candidates = supported_sides(who, anchors, candidates, temperature)
    if tags.labels is None:
        raise argument_error(who, "labels of the anchors and of the candidates", "candidate_labels", None)
    value, learned = HostTemperature.of(temperature)
    return _Positives.apply(  # type: ignore[no-untyped-call]
        anchors, candidates, learned, log_negative, tags, value, normalize
    )


class _Positives(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchors: Tensor,
        candidates: Tensor | None,
        learned: Tensor | None,
        log_negative: Tensor | None,
        tags: SideTags,
        temperature: float,
        normalize: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.learned, ctx.temperature, ctx.itself = learned, temperature, candidates is None
        rows, columns = sides_of(anchors, candidates, tags, normalize, tags.few)
        offset = None if log_negative is None else log_negative.detach().float().contiguous()
        first, second, count = _sweep(rows, columns, offset, temperature, ctx.itself)
        ctx.save_for_backward(*rows, *columns, offset, first, second)
        ctx.mark_non_differentiable(count)
        if offset is not None:
            ctx.mark_non_differentiable(second)
        return first, second, count

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, g_first: Tensor, g_second: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        rows, columns, (offset, first, second) = sides_from(saved)
        grad_anchors, grad_candidates, grad_learned = None, None, None
        grad_offset = g_first * second if offset is not None and ctx.needs_input_grad[3] else None
        parts = _upstream(g_first, g_second, first, offset, rows.vectors.dtype)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[2]:
            grad_anchors, product = _gradient(ctx, rows, columns, rows, parts, row=True, column=ctx.itself)
            if ctx.needs_input_grad[2]:
                total = -product.sum() / (ctx.temperature * (2.0 if ctx.itself else 1.0))
                grad_learned = total.to(ctx.learned.dtype).reshape(ctx.learned.shape)
        if not ctx.itself and ctx.needs_input_grad[1]:
            grad_candidates = _gradient(ctx, columns, rows, rows, parts, row=False, column=True)[0]
        return grad_anchors, grad_candidates, grad_learned, grad_offset, None, None, None


class LabelGradients(NamedTuple):
    """P, Q and L of the derivation, gradients divided by ``unit``; Q is None if each pair has a loss of its own."""

    p: Tensor
    q: Tensor | None
    log: Tensor
    unit: Tensor


def _upstream(
    g_first: Tensor, g_second: Tensor, first: Tensor, offset: Tensor | None, dtype: torch.dtype
) -> LabelGradients:
    """Scale the upstream gradients so that their products fit float16."""
    largest = g_first.abs().amax() + (0.0 if offset is not None else g_second.abs().amax())
    unit = torch.where(largest == 0, 1.0, largest * (4.0 / 2.0**14 if dtype == torch.float16 else 1.0))
    if offset is not None:
        return LabelGradients(g_first / unit, None, offset, unit)
    # An anchor without a positive has an LSE of -inf, and a gradient of nothing.
    return LabelGradients(g_first / unit, g_second / unit, torch.where(first == -math.inf, 0.0, first), unit)


def _sweep(
    rows: SweepSide, columns: SweepSide, offset: Tensor | None, temperature: float, itself: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the forward sweep; returns both sums and the number of positives of each row."""
    (b, d), n = rows.vectors.shape, columns.vectors.shape[0]
    first, second = rows.vectors.new_empty(2, b, dtype=torch.float32).unbind()
    count = rows.vectors.new_empty(b, dtype=torch.int32)
    block = block_of(rows.vectors, 0, backward=False)
    if b:
        triton_positives.positives_forward[(-(-b // block.rows),)](
            rows.vectors, columns.vectors, rows.inverse_norms, columns.inverse_norms,
            rows.ids, columns.ids, rows.labels, columns.labels, offset,
            rows.begin, rows.end, rows.order, first, second, count, b, n, d, LOG2_E / temperature,
            PAIRS=offset is not None, **switches(rows, columns, itself, block, UNUSED),
        )  # fmt: skip
    return first, second, count


def _gradient(
    ctx: Any, rows: SweepSide, columns: SweepSide, anchors: SweepSide, parts: LabelGradients, row: bool, column: bool
) -> tuple[Tensor, Tensor]:
    """Compute the gradient of the rows, and the product of each row with it."""
    (b, d), n = rows.vectors.shape, columns.vectors.shape[0]
    gradient = torch.empty_like(rows.vectors)
    product = rows.vectors.new_empty(b, dtype=torch.float32)
    block = block_of(rows.vectors, 0, backward=True)
    if b:
        triton_positives.positives_backward[(-(-b // block.rows),)](
            rows.vectors, columns.vectors, rows.inverse_norms, columns.inverse_norms, rows.slopes,
            rows.ids, columns.ids, rows.labels, columns.labels, parts.p, parts.q, parts.log,
            rows.begin, rows.end, rows.order, anchors.order, parts.unit / ctx.temperature, gradient, product,
            b, n, d, LOG2_E / ctx.temperature, PAIRS=parts.q is None, ROW=row, COLUMN=column,
            **switches(rows, columns, ctx.itself, block, UNUSED),
        )  # fmt: skip
    return gradient, product
