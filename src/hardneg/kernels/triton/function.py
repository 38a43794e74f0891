"""The row statistics as one autograd function: which kernels are launched, with which numbers and switches.

``statistics`` calls ``RowStatisticsFunction``; ``LaunchPlan`` holds the options of one call. ``_sweep`` launches the
forward kernels and ``_gradient`` the backward kernels, with products computed beforehand (``wide``) if needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hardneg.core.tensors import first_derivative_only
from hardneg.kernels.triton import gradients as triton_gradients
from hardneg.kernels.triton import rows as triton_rows
from hardneg.kernels.triton.edges import SAMPLE, RowEdges, Sizes
from hardneg.kernels.triton.sides import (
    BlockShape,
    SideTags,
    SweepSide,
    block_of,
    is_wide,
    padded,
    sides_from,
    sides_of,
    switches,
)
from hardneg.kernels.triton.wide import Wide

LOG2_E = math.log2(math.e)
FIXED_SHIFT_BITS = 118.0
"""Largest spread, in bits, of the terms of a sum with one shift for all rows (float32 has 126)."""
SAFE_BITS = 64.0
"""Below this spread of the terms, coefficients of upstream gradients up to 2^60 do not overflow."""

Band = tuple[Tensor | None, Tensor | None]
"""The lowest and the highest similarity of each anchor's negatives, [b] each."""


def spread(temperature: float, beta: float) -> float:
    """Return the bits between the largest and the smallest term of the sums, for unit vectors."""
    return (1.0 + beta) * 2.0 * LOG2_E / temperature


@dataclass(frozen=True, eq=False)
class LaunchPlan:
    """The numbers and switches of one call.

    Attributes:
        temperature: The temperature, read on the host.
        beta: The tilt.
        detach: Whether to stop the gradient through the tilt.
        normalize: Whether to divide the vectors by their norms.
        tau_plus: Probability that a negative has the anchor's class.
    """

    temperature: float
    beta: float
    detach: bool
    normalize: bool
    fixed: bool
    """True for one shift for all rows instead of a running maximum."""
    itself: bool
    """True for self-similarity: the candidates are the anchors."""
    masked: bool
    """True for masks in every block; otherwise in those with ids or labels of the rows, both sides being sorted."""
    views: bool = False
    """True if the rows are two views of each instance and their losses are computed, too."""
    tau_plus: float = 0.0
    window: Sizes | None = None
    """Ranks of the negatives of each row."""

    def given(self, vectors: Tensor) -> bool:
        """True if the products are computed beforehand."""
        return self.window is not None or is_wide(vectors)

    @property
    def scale(self) -> float:
        """Factor from similarities to exponents of 2."""
        return LOG2_E / self.temperature

    @property
    def tilt(self) -> int:
        """The kind of tilt, for the kernels."""
        special = {0.0: triton_rows.UNIFORM, 1.0: triton_rows.SQUARE}
        return special.get(self.beta, triton_rows.GENERAL)

    @property
    def single(self) -> bool:
        """True if the gradient needs only one exponential of the score, e^(power s)."""
        return self.beta == 0.0 or self.detach

    @property
    def power(self) -> float:
        """Exponent of that exponential."""
        return 1.0 + self.beta if self.single else 1.0


class Coefficients(NamedTuple):
    """Coefficients of each anchor as in the derivation: A, C and the shift."""

    a: Tensor
    c: Tensor
    shift: Tensor


class RowStatisticsFunction(torch.autograd.Function):
    """Row statistics, or losses of two views, with gradients by anchors, candidates and temperature."""

    @staticmethod
    def forward(
        ctx: Any,
        anchors: Tensor,
        candidates: Tensor | None,
        temperature: Tensor | None,
        tags: SideTags,
        band: Band,
        plan: LaunchPlan,
    ) -> tuple[Tensor, ...]:
        """Launch the forward sweep."""
        ctx.plan, ctx.temperature = plan, temperature
        ctx.set_materialize_grads(False)
        rows, columns = sides_of(anchors, candidates, tags, plan.normalize, plan.masked, plan.given(anchors))
        if rows.order is not None and band[0] is not None and band[1] is not None:
            band = band[0][rows.order], band[1][rows.order]
        views = anchors.detach().contiguous() if plan.views else None
        found, sums, slopes, window = _sweep(rows, columns, band, plan, views)
        ctx.save_for_backward(*rows, *columns, *band, *sums, *window, *slopes, views)
        ctx.mark_non_differentiable(found[2], *found[4:])
        return found

    @staticmethod
    @first_derivative_only
    def backward(
        ctx: Any, g_mean: Tensor | None, g_mass: Tensor | None, _: None, g_loss: Tensor | None = None, *rest: None
    ) -> tuple[Tensor | None, ...]:
        """Launch the backward sweeps."""
        plan, saved = ctx.plan, ctx.saved_tensors
        rows, columns, saved = sides_from(saved)
        band, sums, window, (*slopes, views) = saved[:2], saved[2:5], saved[5:7], saved[7:]
        grad_anchors, grad_candidates, grad_temperature = None, None, None
        upstream = StatisticGradients(g_loss if plan.views else g_mean, g_mass, *slopes)
        if upstream.mean is None and g_mass is None:
            return None, None, None, None, None, None
        own, pull, unit = _coefficients(upstream, rows, sums, plan)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[2]:
            others = own if plan.itself else None
            learn = ctx.needs_input_grad[2]
            given = _Given(window, learn, (views, pull))
            grad_anchors, product = _gradient(rows, columns, own, others, band, unit, plan, given)
            if learn:
                # ds / d temperature = -s / temperature. The sum over pairs of gradient times s is that of the rows'
                # products; in self-similarity every pair is there in both roles.
                total = -product.sum() / (plan.temperature * (2.0 if plan.itself else 1.0))
                total = total + upstream.by_floor() / plan.temperature**2 if plan.tau_plus else total
                grad_temperature = total.to(ctx.temperature.dtype).reshape(ctx.temperature.shape)
        if not plan.itself and ctx.needs_input_grad[1]:
            assert plan.window is None  # see ``row_statistics``
            grad_candidates = _gradient(columns, rows, None, own, band, unit, plan, _Given())[0]
        return grad_anchors, grad_candidates, grad_temperature, None, None, None


def _sweep(
    rows: SweepSide, columns: SweepSide, band: Band, plan: LaunchPlan, views: Tensor | None
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """Launch the forward sweep.

    Returns statistics (and losses) in the given order, sums in sorted order, the slopes of the losses, and the edges.
    """
    (b, d), n = rows.vectors.shape, columns.vectors.shape[0]
    log_mean, log_mass, sum0, sum1, shift, *losses = rows.vectors.new_empty(
        9 if plan.views else 5, b, dtype=torch.float32
    ).unbind()
    loss, positive, *slopes = losses or (None, None, None, None)
    support = rows.vectors.new_empty(b, dtype=torch.int32)
    largest = None
    if not plan.normalize:
        largest = columns.vectors.new_zeros(()) if n == 0 else torch.linalg.vector_norm(columns.vectors, math.inf)
    given = plan.given(rows.vectors)
    block = block_of(rows.vectors, b, backward=False, given=given)
    outputs = largest, log_mean, log_mass, support, sum0, sum1, shift, views, loss, positive, *slopes
    numbers = plan.scale, plan.beta, plan.scale if plan.fixed else 0.0, plan.temperature, plan.tau_plus
    same = switches(rows, columns, plan.itself, block, ("PRECISION",) if given else ()) | {
        "TILT": plan.tilt, "FIXED": plan.fixed, "MASKED": plan.masked, "VIEWS": plan.views,
        "DEBIASED": plan.tau_plus > 0,
    }  # fmt: skip
    edges: tuple[Tensor | None, Tensor | None] = None, None
    if given:
        edges = _sweep_products(rows, columns, plan, block, (outputs, (b, n, d, *numbers), same))
    else:
        triton_rows.forward[(-(-b // block.rows),)](
            rows.vectors, columns.vectors, rows.inverse_norms, columns.inverse_norms,
            rows.ids, columns.ids, rows.labels, columns.labels, *band,
            rows.begin, rows.end, rows.split, rows.order, *outputs, b, n, d, *numbers,
            BAND=band[0] is not None, LATE=block.stages if plan.masked else 1, **same,
        )  # fmt: skip
    found = (log_mean, log_mass, support, *(each for each in (loss, positive) if each is not None))
    return found, (sum0, sum1, shift), tuple(slopes), edges


def _sweep_products(
    rows: SweepSide, columns: SweepSide, plan: LaunchPlan, block: BlockShape, launch: tuple[Any, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Launch the forward sweep with products computed chunk by chunk; return the edges of the window, if any."""
    outputs, numbers, same = launch
    wide, edges, search = Wide.of(rows, columns), None, None
    if plan.window is not None:
        edges = RowEdges.empty(len(rows.vectors), rows.vectors.device)
        hints = plan.window.hints(wide.sample(SAMPLE), len(columns.vectors))
        search = partial(edges.find, sizes=plan.window, hints=hints, ids=(rows.ids, columns.ids))
    launch_chunk = triton_rows.forward_of_products.bind(
        wide.memory, rows.vectors, rows.inverse_norms,
        rows.ids, columns.ids, rows.labels, columns.labels, *(edges or (None, None)),
        rows.begin, rows.end, rows.split, rows.order, *outputs, *numbers,
        WINDOW=edges is not None, AHEAD=block.stages, **same,
    )  # fmt: skip
    for chunk in wide.chunks():
        product = wide.product(chunk)
        if search is not None:
            search(product, chunk.begin)
        launch_chunk((chunk.programs(block.rows),), chunk.begin)
    return edges or (None, None)


class StatisticGradients(NamedTuple):
    """Gradients by log_mean and log_mass; with slopes, ``mean`` is the gradient by the losses of two views."""

    mean: Tensor | None
    mass: Tensor | None
    by_mean: Tensor | None
    by_positive: Tensor | None

    def largest(self) -> Tensor:
        """Return the largest absolute gradient."""
        mean = self.mean if self.mean is None or self.by_mean is None else self.mean * self.by_mean
        parts = [torch.linalg.vector_norm(part, math.inf) for part in (mean, self.mass) if part is not None]
        return torch.stack(parts).sum()

    def by_floor(self) -> Tensor:
        """Return the gradient by the floor of debiased means, -1 / temperature.

        Terms at the floor have no slope by log_mean.
        """
        assert self.mean is not None
        assert self.by_mean is not None
        assert self.by_positive is not None
        return -torch.where(self.by_mean == 0, self.mean * self.by_positive, 0.0).sum()


def _coefficients(
    upstream: StatisticGradients, rows: SweepSide, sums: Sequence[Tensor], plan: LaunchPlan
) -> tuple[Coefficients, Tensor | None, Tensor]:
    """Compute the rows' coefficients in their order, the pull of the positives, and a factor of the gradients."""
    b, half = rows.vectors.shape[0], rows.vectors.dtype == torch.float16
    a, c, shift, pull, unit = rows.vectors.new_empty(5, max(b, 1), dtype=torch.float32).unbind()
    g, h = upstream.mean, None if upstream.mass is None else upstream.mass.contiguous()
    headroom = (2.0 + 4.0 * plan.beta) / 2.0**14 if half else 1.0
    scaled = half or not plan.fixed or spread(plan.temperature, plan.beta) > SAFE_BITS
    if b:
        triton_gradients.coefficients[(-(-b // 256),)](
            g, h, upstream.largest() if scaled else None, rows.order, *sums, upstream.by_mean, upstream.by_positive,
            a, c, shift, pull, unit, b, 1 if g is None else g.stride(0), 0.0 if plan.single else plan.beta,
            1.0 if plan.detach else 1.0 + plan.beta, plan.power, headroom, plan.temperature,
            BLOCK=256, SORTED=rows.order is not None, MEAN=g is not None, MASS=h is not None, SCALED=scaled,
            VIEWS=plan.views,
        )  # fmt: skip
    return Coefficients(a, c, shift), pull if plan.views else None, unit


class _Given(NamedTuple):
    """Options of a gradient by the anchors: edges of a window, whether a temperature is learnt, views and pull."""

    window: tuple[Tensor | None, ...] = (None, None)
    learn: bool = False
    views: tuple[Tensor | None, Tensor | None] = (None, None)


def _gradient(
    rows: SweepSide,
    columns: SweepSide,
    of_rows: Coefficients | None,
    of_columns: Coefficients | None,
    band: Band,
    unit: Tensor,
    plan: LaunchPlan,
    given: _Given,
) -> tuple[Tensor, Tensor]:
    """Compute the gradient of the rows, and the product of each row with it.

    The side with coefficients is that of the anchors; both in self-similarity.
    """
    (b, d), n = rows.vectors.shape, columns.vectors.shape[0]
    gradient, beforehand = torch.empty_like(rows.vectors), plan.given(rows.vectors)
    product = rows.vectors.new_empty(b, dtype=torch.float32) if given.learn or plan.normalize else unit
    block = block_of(rows.vectors, b, backward=True, given=beforehand)
    scale = plan.scale * plan.power
    nothing = None, None, None
    roles = *(of_rows or nothing), *(of_columns or nothing)
    numbers = scale, plan.beta, scale if plan.fixed else 0.0
    unused = ("BD", "FULL_D", "RAGGED", "PRECISION") if beforehand else ()
    same = switches(rows, columns, plan.itself, block, unused) | {
        "TILT": triton_rows.UNIFORM if plan.single else plan.tilt, "FIXED": plan.fixed, "MASKED": plan.masked,
        "ROW": of_rows is not None, "COLUMN": of_columns is not None,
    }  # fmt: skip
    if not beforehand:
        triton_gradients.backward[(-(-b // block.rows),)](
            rows.vectors, columns.vectors, rows.inverse_norms, columns.inverse_norms, rows.slopes,
            rows.ids, columns.ids, rows.labels, columns.labels,
            *(band if of_rows else nothing[:2]), *(band if of_columns else nothing[:2]), *roles,
            rows.begin, rows.end, rows.split, rows.order, unit, gradient, product, *given.views, b, n, d, *numbers,
            BAND=band[0] is not None, PRODUCT=given.learn, VIEWS=given.views[0] is not None,
            LATE=block.stages if plan.masked else 1, **same,
        )  # fmt: skip
        return gradient, product
    wide, total = Wide.of(rows, columns), torch.empty_like(rows.vectors, dtype=torch.float32)
    e = wide.pairs()
    launch_chunk = triton_gradients.backward_of_products.bind(
        wide.memory, e, columns.inverse_norms, rows.ids, columns.ids,
        rows.labels, columns.labels, *given.window, *roles, rows.begin, rows.end, rows.split,
        b, n, *numbers, WINDOW=plan.window is not None, **same,
    )  # fmt: skip
    for chunk in wide.chunks():
        wide.product(chunk)
        launch_chunk((-(-n // block.columns), chunk.programs(block.rows)), chunk.begin)
        wide.add_up(chunk, e, total)
    triton_gradients.finished[(-(-b // 4),)](
        total, rows.vectors, rows.inverse_norms, rows.slopes, rows.order, unit, gradient, product,
        *given.views, b, n, d, BM=4, BD=padded(d), FULL_D=d == padded(d),
        NORMS=rows.inverse_norms is not None, SORTED=rows.order is not None, PRODUCT=given.learn,
        VIEWS=given.views[0] is not None, num_warps=4,
    )  # fmt: skip
    return gradient, product
