"""Row statistics of the closed family in Triton: log E_q[e^s] without the pairs, for d <= 256 and one temperature.

    s = similarity / temperature;   log w = beta s inside the row's band and outside the masks by id and label

The kernels and their derivation are in ``triton_rows``. What they cannot do ``supports`` names; nothing falls back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hardneg.kernels import triton_rows
from hardneg.kernels.triton_sides import PerAnchor, PerCandidate, Side, Tags, block_of, check_served, sides_of, switches
from hardneg.kernels.triton_sides import supports as supports

LOG2_E = math.log2(math.e)
FIXED_SHIFT_BITS = 118.0
"""Terms of a sum with one shift for all rows may be that many bits below 1 (float32 has 126)."""


Band = tuple[Tensor | None, Tensor | None]
"""The lowest and the highest similarity of each anchor's negatives."""


class RowStatistics(NamedTuple):
    """What an objective needs of each anchor's negatives."""

    log_mean: PerAnchor
    """log E_q[e^s]; -inf without a negative."""
    log_mass: PerAnchor
    """LSE(log w), the log of the sum of the weights."""
    support: PerAnchor
    """The number of candidates that q allows, int32."""


def row_statistics(
    anchors: Annotated[Tensor, "b d"],
    candidates: Annotated[Tensor, "n d"] | None = None,
    *,
    temperature: float | Tensor,
    beta: float = 0.0,
    detach: bool = False,
    anchor_ids: PerAnchor | None = None,
    candidate_ids: PerCandidate | None = None,
    anchor_labels: PerAnchor | None = None,
    candidate_labels: PerCandidate | None = None,
    low: float | PerAnchor | None = None,
    high: float | PerAnchor | None = None,
    normalize: bool = False,
    unit: bool = True,
) -> RowStatistics:
    """log E_q[e^s] and the log-mass of each anchor over the candidates, with gradients and without a [b, n] tensor.

    candidates: None for the anchors themselves (two views in one tensor); then an anchor never meets itself, and the
        tags of the candidates are those of the anchors.
    temperature: a number, or a tensor with one element, which gets a gradient; its value is read on the host.
    beta, detach: the tilt log w = beta s, and whether its gradient is cut.
    anchor_ids, candidate_ids: equal ids are no negatives; a negative id is nobody's.
    anchor_labels, candidate_labels: equal labels are no negatives (OtherLabel).
    low, high: the band of each anchor in plain similarity, ends included.
    normalize: divides vectors by their norms, inside the products.
    unit: the vectors have unit norm; without it (and without ``normalize``) every row keeps a running maximum.
    """
    check_served("row_statistics", anchors, candidates, temperature, beta)
    value = float(temperature.detach()) if isinstance(temperature, Tensor) else float(temperature)
    tags = Tags.of(anchors, candidates, anchor_ids, candidate_ids, anchor_labels, candidate_labels)
    band = _band(low, high, anchors)
    bits = (1.0 + beta) * 2.0 * LOG2_E / value
    fixed = (unit or normalize) and bits < FIXED_SHIFT_BITS
    masked = tags.few
    plan = Plan(value, float(beta), detach, normalize, fixed, candidates is None, masked)
    given = temperature if isinstance(temperature, Tensor) and temperature.requires_grad else None
    return RowStatistics(
        *_RowStatistics.apply(  # type: ignore[no-untyped-call]
            anchors, candidates, given, tags, band, plan
        )
    )


@dataclass(frozen=True)
class Plan:
    """The numbers and switches of one call."""

    temperature: float
    beta: float
    detach: bool
    normalize: bool
    fixed: bool
    """One shift for all rows, and no running maximum."""
    itself: bool
    """Self-similarity: the candidates are the anchors."""
    masked: bool
    """Masks in every block; otherwise in those that hold ids or labels of the rows, both sides being sorted."""

    @property
    def scale(self) -> float:
        return LOG2_E / self.temperature

    @property
    def tilt(self) -> int:
        special = {0.0: triton_rows.UNIFORM, 1.0: triton_rows.SQUARE}
        return special.get(self.beta, triton_rows.GENERAL)

    @property
    def single(self) -> bool:
        """Whether the gradient needs one exponential of the score only, e^(power s)."""
        return self.beta == 0.0 or self.detach

    @property
    def power(self) -> float:
        return 1.0 + self.beta if self.single else 1.0


class Coefficients(NamedTuple):
    """Of each anchor, as in the derivation: A, C and the shift."""

    a: Tensor
    c: Tensor
    shift: Tensor


class _RowStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchors: Tensor,
        candidates: Tensor | None,
        temperature: Tensor | None,
        tags: Tags,
        band: Band,
        plan: Plan,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.plan, ctx.temperature = plan, temperature
        ctx.set_materialize_grads(False)
        rows, columns = sides_of(anchors, candidates, tags, plan.normalize, plan.masked)
        if rows.order is not None and band[0] is not None and band[1] is not None:
            band = band[0][rows.order], band[1][rows.order]
        found, sums = _sweep(rows, columns, band, plan)
        ctx.save_for_backward(*rows, *columns, *band, *sums)
        ctx.mark_non_differentiable(found[2])
        return found

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g_mean: Tensor | None, g_mass: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        plan, saved = ctx.plan, ctx.saved_tensors
        rows, columns, band, sums = Side(*saved[:8]), Side(*saved[8:16]), saved[16:18], saved[18:]
        grad_anchors: Tensor | None = None
        grad_candidates: Tensor | None = None
        grad_temperature: Tensor | None = None
        if g_mean is None and g_mass is None:
            return None, None, None, None, None, None
        own, unit = _coefficients(g_mean, g_mass, rows, sums, plan)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[2]:
            others = own if plan.itself else None
            learn = ctx.needs_input_grad[2]
            grad_anchors, product = _gradient(rows, columns, own, others, band, unit, plan, product_too=learn)
            if learn:
                # ds / d temperature = -s / temperature. The sum over pairs of gradient times s is that of the rows'
                # products; in self-similarity every pair is there in both roles.
                total = -product.sum() / (plan.temperature * (2.0 if plan.itself else 1.0))
                grad_temperature = total.to(ctx.temperature.dtype).reshape(ctx.temperature.shape)
        if not plan.itself and ctx.needs_input_grad[1]:
            grad_candidates = _gradient(columns, rows, None, own, band, unit, plan)[0]
        return grad_anchors, grad_candidates, grad_temperature, None, None, None


def _sweep(
    rows: Side, columns: Side, band: Band, plan: Plan
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    b, n, d = len(rows.vectors), len(columns.vectors), rows.vectors.shape[1]
    log_mean, log_mass, sum0, sum1, shift = rows.vectors.new_empty(5, b, dtype=torch.float32).unbind()
    support = rows.vectors.new_empty(b, dtype=torch.int32)
    largest = None
    if not plan.itself:
        largest = columns.vectors.new_zeros(()) if n == 0 else torch.linalg.vector_norm(columns.vectors, math.inf)
    block = block_of(rows.vectors, b, backward=False)
    if b:
        triton_rows.forward[(-(-b // block.rows),)](
            rows.vectors, columns.vectors, rows.inverse_norms, columns.inverse_norms,
            rows.ids, columns.ids, rows.labels, columns.labels, *band,
            rows.begin, rows.end, rows.split, rows.order, largest, log_mean, log_mass, support, sum0, sum1, shift,
            b, n, d, plan.scale, plan.beta, plan.scale if plan.fixed else 0.0,
            TILT=plan.tilt, BAND=band[0] is not None,
            FIXED=plan.fixed, MASKED=plan.masked, LATE=block.stages if plan.masked else 1,
            **switches(rows, columns, plan.itself, block),
        )  # fmt: skip
    return (log_mean, log_mass, support), (sum0, sum1, shift)


def _coefficients(
    g_mean: Tensor | None, g_mass: Tensor | None, rows: Side, sums: Sequence[Tensor], plan: Plan
) -> tuple[Coefficients, Tensor]:
    """The rows' coefficients, in the order of the rows, and what their gradients are to be multiplied by."""
    b = len(rows.vectors)
    a, c, shift = rows.vectors.new_empty(3, b, dtype=torch.float32).unbind()
    unit = rows.vectors.new_empty((), dtype=torch.float32)
    upstream = [None if g is None else g.contiguous() for g in (g_mean, g_mass)]
    largest = [None if g is None else torch.linalg.vector_norm(g, math.inf) for g in upstream]
    headroom = (2.0 + 4.0 * plan.beta) / 2.0**14 if rows.vectors.dtype == torch.float16 else 1.0
    slope, power = 1.0 if plan.detach else 1.0 + plan.beta, plan.power
    if b:
        triton_rows.coefficients[(-(-b // 256),)](
            *upstream, *largest, rows.order, *sums, a, c, shift, unit,
            b, 0.0 if plan.single else plan.beta, slope, power, headroom, plan.temperature,
            BLOCK=256, SORTED=rows.order is not None, MEAN=g_mean is not None, MASS=g_mass is not None,
        )  # fmt: skip
    return Coefficients(a, c, shift), unit


def _gradient(
    rows: Side,
    columns: Side,
    of_rows: Coefficients | None,
    of_columns: Coefficients | None,
    band: Band,
    unit: Tensor,
    plan: Plan,
    product_too: bool = False,
) -> tuple[Tensor, Tensor]:
    """The gradient of the rows, and of each row its product with it; whose coefficients are given are the anchors."""
    b, n, d = len(rows.vectors), len(columns.vectors), rows.vectors.shape[1]
    gradient = torch.empty_like(rows.vectors)
    product = rows.vectors.new_empty(b, dtype=torch.float32)
    block = block_of(rows.vectors, b, backward=True)
    scale = plan.scale * plan.power
    nothing = None, None, None
    if b:
        triton_rows.backward[(-(-b // block.rows),)](
            rows.vectors, columns.vectors, rows.inverse_norms, columns.inverse_norms,
            rows.ids, columns.ids, rows.labels, columns.labels,
            *(band if of_rows else nothing[:2]), *(band if of_columns else nothing[:2]),
            *(of_rows or nothing), *(of_columns or nothing),
            rows.begin, rows.end, rows.split, rows.order, unit, gradient, product,
            b, n, d, scale, plan.beta, scale if plan.fixed else 0.0,
            TILT=triton_rows.UNIFORM if plan.single else plan.tilt, BAND=band[0] is not None,
            ROW=of_rows is not None, COLUMN=of_columns is not None, PRODUCT=product_too,
            FIXED=plan.fixed, MASKED=plan.masked, LATE=block.stages if plan.masked else 1,
            **switches(rows, columns, plan.itself, block),
        )  # fmt: skip
    return gradient, product


def _band(low: float | Tensor | None, high: float | Tensor | None, anchors: Tensor) -> Band:
    if low is None and high is None:
        return None, None

    def per_anchor(value: float | Tensor) -> Tensor:
        bound = torch.as_tensor(value, dtype=torch.float32, device=anchors.device).detach()
        return bound.expand(len(anchors)).contiguous()

    return per_anchor(-math.inf if low is None else low), per_anchor(math.inf if high is None else high)
