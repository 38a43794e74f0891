# ruff: noqa: N803, N806, RUF059
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Statistics of positives that are columns, for SupCon and H-SCL: candidates with the anchor's label and another id.

With x_ij = log2(e) s_ij over the positives j of row i, one sweep gives their number and

    LSE_j s_ij and sum_j s_ij                              (SupCon: all positives in the denominator), or
    sum_j softplus(o_i - s_ij), sum_j sigmoid(o_i - s_ij)  (PAIRS: each pair's own; o_i the log of the row's negatives)

Backward, the gradient of s_ij as a score of row i is P_i e^(s_ij - L_i) + Q_i, with the upstream gradients P of the LSE
L and Q of the sum, or -P_i sigmoid(o_i - s_ij). In self-similarity the column's role is added, as in ``rows``.
Sorted by label, the positives of a block of rows are in few blocks of columns; no other block is read.

``positive_statistics`` is for all positives in the denominator, ``pair_losses`` for each pair with its own. The kernels
are at the top.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from hardneg.core.errors import argument_error
from hardneg.core.tensors import first_derivative_only
from hardneg.core.types import PerAnchor
from hardneg.kernels.triton.blocks import allowed_pairs, load_rows, load_vectors
from hardneg.kernels.triton.function import LOG2_E
from hardneg.kernels.triton.language import jit, launched, tl
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


@jit
def positive_blocks(begin_ptr, end_ptr, b, n, BM: tl.constexpr, BN: tl.constexpr, SORTED: tl.constexpr):
    """Return the columns [begin, end) that contain the positives of a block of rows; begin is a multiple of BN."""
    row = tl.program_id(0) * BM
    begin = row * 0
    end = begin + n
    if SORTED:
        begin = tl.load(begin_ptr + row) // BN * BN
        end = tl.load(end_ptr + tl.minimum(row + BM, b) - 1)
    return begin, end


@jit
def scores_and_positives(
    start, r, rows, c_ptr, r_norm_ptr, c_norm_ptr, r_ids_ptr, c_ids_ptr, r_labels_ptr, c_labels_ptr,
    begin_ptr, end_ptr, b, n, d, scale,
    BN: tl.constexpr, BD: tl.constexpr, FULL_D: tl.constexpr, NORMS: tl.constexpr, SELF: tl.constexpr,
    IDS: tl.constexpr, SORTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a block of scores and the mask of its positives; also return the loaded columns and their numbers."""
    columns = start + tl.arange(0, BN)
    c = load_vectors(c_ptr, columns, n, d, BD, True, FULL_D)
    x = tl.dot(r, tl.trans(c), input_precision=PRECISION) * scale
    if NORMS:
        x = x * load_rows(r_norm_ptr, rows, b, True)[:, None] * load_rows(c_norm_ptr, columns, n, True)[None, :]
    positive = allowed_pairs(r_ids_ptr, None, c_ids_ptr, None, rows, columns, b, n, SELF, IDS, False)
    if SORTED:  # the columns with the row's label
        begin = tl.load(begin_ptr + rows, mask=rows < b, other=0)[:, None]
        end = tl.load(end_ptr + rows, mask=rows < b, other=0)[:, None]
        positive = positive & (columns[None, :] >= begin) & (columns[None, :] < end)
    else:
        label = tl.load(r_labels_ptr + rows, mask=rows < b, other=0)[:, None]
        other = tl.load(c_labels_ptr + columns, mask=columns < n, other=0)[None, :]
        positive = positive & (label == other) & (rows < b)[:, None]
    return x, positive, c, columns


@jit
def log2_1p(t):
    """Compute log2(1 + t) for 0 <= t <= 1, also where 1 + t loses the digits of t."""
    small = t * (1.4426950408889634 - 0.7213475204444817 * t)
    return tl.where(t < 1e-4, small, tl.log2(1.0 + t))


@launched
def positives_forward(
    a_ptr, c_ptr, a_norm_ptr, c_norm_ptr, a_ids_ptr, c_ids_ptr, a_labels_ptr, c_labels_ptr, offset_ptr,
    begin_ptr, end_ptr, order_ptr, log_sum_ptr, total_ptr, count_ptr, b, n, d, scale,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, FULL_D: tl.constexpr, NORMS: tl.constexpr,
    SELF: tl.constexpr, IDS: tl.constexpr, SORTED: tl.constexpr, PRECISION: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Sum over the positives of each row; PAIRS: log_sum is the sum of the losses and total that of their slopes."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    real = rows < b
    given = rows
    if SORTED:
        given = tl.load(order_ptr + rows, mask=real, other=0)
    a = load_vectors(a_ptr, rows, b, d, BD, True, FULL_D)
    first = tl.zeros([BM], tl.float32)
    second = tl.zeros([BM], tl.float32)
    count = tl.zeros([BM], tl.int32)
    top = tl.full([BM], float("-inf"), tl.float32)
    if PAIRS:
        offset = tl.load(offset_ptr + given, mask=real, other=0.0)[:, None] * 1.4426950408889634
    begin, end = positive_blocks(begin_ptr, end_ptr, b, n, BM, BN, SORTED)
    for start in tl.range(begin, end, BN):
        x, positive, c, columns = scores_and_positives(
            start, a, rows, c_ptr, a_norm_ptr, c_norm_ptr, a_ids_ptr, c_ids_ptr, a_labels_ptr, c_labels_ptr,
            begin_ptr, end_ptr, b, n, d, scale, BN, BD, FULL_D, NORMS, SELF, IDS, SORTED, PRECISION,
        )  # fmt: skip
        count += tl.sum(positive.to(tl.int32), 1)
        if PAIRS:
            y = offset - x
            t = tl.exp2(-tl.abs(y))
            first += tl.sum(tl.where(positive, tl.maximum(y, 0.0) + log2_1p(t), 0.0), 1)
            second += tl.sum(tl.where(positive, tl.where(y > 0, 1.0, t) / (1.0 + t), 0.0), 1)
        else:
            second += tl.sum(tl.where(positive, x, 0.0), 1)
            x = tl.where(positive, x, float("-inf"))
            largest = tl.maximum(top, tl.max(x, 1))
            safe = tl.where(largest == float("-inf"), 0.0, largest)
            first = first * tl.exp2(top - safe) + tl.sum(tl.exp2(x - safe[:, None]), 1)
            top = largest
    ln2: tl.constexpr = 0.6931471805599453
    if PAIRS:
        first = first * ln2
    else:
        first = tl.where(count == 0, float("-inf"), (top + tl.log2(first)) * ln2)
        second = second * ln2
    tl.store(log_sum_ptr + given, first, mask=real)
    tl.store(total_ptr + given, second, mask=real)
    tl.store(count_ptr + given, count, mask=real)


@jit
def positive_gradient(
    x, P_ptr, Q_ptr, L_ptr, order_ptr, at, count, AXIS: tl.constexpr, SORTED: tl.constexpr, PAIRS: tl.constexpr
):
    """Compute the gradient of the pairs as scores of their rows (AXIS 1) or columns (AXIS 0)."""
    given = at
    if SORTED:
        given = tl.load(order_ptr + at, mask=at < count, other=0)
    P = tl.expand_dims(tl.load(P_ptr + given, mask=at < count, other=0.0), AXIS)
    L = tl.expand_dims(tl.load(L_ptr + given, mask=at < count, other=0.0), AXIS) * 1.4426950408889634
    if PAIRS:
        return -P / (1.0 + tl.exp2(x - L))
    else:
        return P * tl.exp2(x - L) + tl.expand_dims(tl.load(Q_ptr + given, mask=at < count, other=0.0), AXIS)


@launched
def positives_backward(
    r_ptr, c_ptr, r_norm_ptr, c_norm_ptr, slope_ptr, r_ids_ptr, c_ids_ptr, r_labels_ptr, c_labels_ptr,
    P_ptr, Q_ptr, L_ptr, begin_ptr, end_ptr, order_ptr, anchor_order_ptr, unit_ptr, gradient_ptr, product_ptr,
    b, n, d, scale,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, FULL_D: tl.constexpr, NORMS: tl.constexpr,
    SELF: tl.constexpr, IDS: tl.constexpr, SORTED: tl.constexpr, PRECISION: tl.constexpr, PAIRS: tl.constexpr,
    ROW: tl.constexpr, COLUMN: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the rows in their roles as anchors (ROW) and as candidates (COLUMN)."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    real = rows < b
    r = load_vectors(r_ptr, rows, b, d, BD, True, FULL_D)
    total = tl.zeros([BM, BD], tl.float32)
    begin, end = positive_blocks(begin_ptr, end_ptr, b, n, BM, BN, SORTED)
    for start in tl.range(begin, end, BN):
        x, positive, c, columns = scores_and_positives(
            start, r, rows, c_ptr, r_norm_ptr, c_norm_ptr, r_ids_ptr, c_ids_ptr, r_labels_ptr, c_labels_ptr,
            begin_ptr, end_ptr, b, n, d, scale, BN, BD, FULL_D, NORMS, SELF, IDS, SORTED, PRECISION,
        )  # fmt: skip
        e = tl.zeros_like(x)
        if ROW:
            e += positive_gradient(x, P_ptr, Q_ptr, L_ptr, anchor_order_ptr, rows, b, 1, SORTED, PAIRS)
        if COLUMN:
            e += positive_gradient(x, P_ptr, Q_ptr, L_ptr, anchor_order_ptr, columns, n, 0, SORTED, PAIRS)
        e = tl.where(positive, e, 0.0)
        if NORMS:
            e = e * load_rows(c_norm_ptr, columns, n, True)[None, :]
        total = tl.dot(e.to(c.dtype), c, total, input_precision=PRECISION)
    given = rows
    if SORTED:
        given = tl.load(order_ptr + rows, mask=real, other=0)
    total = total * tl.load(unit_ptr)
    z = load_vectors(r_ptr, rows, b, d, BD, True, FULL_D).to(tl.float32)
    if NORMS:
        z = z * load_rows(r_norm_ptr, rows, b, True)[:, None]
    product = tl.sum(total * z, 1)
    tl.store(product_ptr + rows, product, mask=real)
    if NORMS:
        total = (total - z * product[:, None]) * load_rows(slope_ptr, rows, b, True)[:, None]
    features = tl.arange(0, BD)
    at = gradient_ptr + given[:, None] * d + features[None, :]
    tl.store(at, total.to(r.dtype), mask=real[:, None] & (features < d)[None, :])


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

    Own positives that are not candidates, like the other view of the anchor, are added by the caller. Tags and options
    are those of ``row_statistics``.

    Args:
        anchors: Vectors [b, d].
        candidates: Vectors [n, d]; None for the anchors themselves.
        temperature: The temperature.
        anchor_labels: Labels [b].
        candidate_labels: Labels [n].
        anchor_ids: Ids [b].
        candidate_ids: Ids [n]; a candidate with the anchor's id is not a positive.
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
        candidate_ids: Ids [n]; a candidate with the anchor's id is not a positive.
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
        positives_forward[(-(-b // block.rows),)](
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
        positives_backward[(-(-b // block.rows),)](
            rows.vectors, columns.vectors, rows.inverse_norms, columns.inverse_norms, rows.slopes,
            rows.ids, columns.ids, rows.labels, columns.labels, parts.p, parts.q, parts.log,
            rows.begin, rows.end, rows.order, anchors.order, parts.unit / ctx.temperature, gradient, product,
            b, n, d, LOG2_E / ctx.temperature, PAIRS=parts.q is None, ROW=row, COLUMN=column,
            **switches(rows, columns, ctx.itself, block, UNUSED),
        )  # fmt: skip
    return gradient, product
