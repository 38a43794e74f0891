# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Similarities of anchors with their own positives: norms and gradients in one kernel each way."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from hardneg.core.tensors import first_derivative_only
from hardneg.kernels.triton.blocks import unit_rows
from hardneg.kernels.triton.language import jit, launched, tl
from hardneg.kernels.triton.sides import padded

ROWS = 16


@jit
def _load(at, mask, NORMS: tl.constexpr):
    """Load rows in float32, of unit norm with NORMS, and the slopes of their norms; infinities become NaN."""
    v = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    slope = tl.sum(v * 0.0, 1) + 1.0
    if NORMS:
        v, inverse, slope = unit_rows(v)
        v = v * inverse[:, None]
    return v + v * 0.0, slope


@launched
def _forward(
    a_ptr, p_ptr, out_ptr, b, num_positives, d, BM: tl.constexpr, BD: tl.constexpr, NORMS: tl.constexpr
):  # fmt: skip
    """Compute the similarities of a block of anchors with their positives."""
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)  # positives may have 2**31 elements
    features = tl.arange(0, BD)
    mask = (rows < b)[:, None] & (features < d)[None, :]
    a, _ = _load(a_ptr + rows[:, None] * d + features[None, :], mask, NORMS)
    for k in tl.range(0, num_positives):
        pairs = rows * num_positives + k
        p, _ = _load(p_ptr + pairs[:, None] * d + features[None, :], mask, NORMS)
        tl.store(out_ptr + pairs, tl.sum(a * p, 1), mask=rows < b)


@launched
def _backward(
    a_ptr, p_ptr, g_ptr, a_gradient_ptr, p_gradient_ptr, b, num_positives, d,
    BM: tl.constexpr, BD: tl.constexpr, NORMS: tl.constexpr, POSITIVES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients; with unit vectors u and v, the gradient of the raw u is slope_u sum g (v - u (u . v))."""
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)  # positives may have 2**31 elements
    features = tl.arange(0, BD)
    mask = (rows < b)[:, None] & (features < d)[None, :]
    at = rows[:, None] * d + features[None, :]
    a, a_slope = _load(a_ptr + at, mask, NORMS)
    total = tl.zeros([BM, BD], tl.float32)
    for k in tl.range(0, num_positives):
        pairs = rows * num_positives + k
        there = pairs[:, None] * d + features[None, :]
        p, p_slope = _load(p_ptr + there, mask, NORMS)
        g = tl.load(g_ptr + pairs, mask=rows < b, other=0.0)[:, None]
        total += g * p
        if POSITIVES:
            e = g * a
            if NORMS:
                e = (e - p * tl.sum(e * p, 1)[:, None]) * p_slope[:, None]
            tl.store(p_gradient_ptr + there, e.to(p_gradient_ptr.dtype.element_ty), mask=mask)
    if NORMS:
        total = (total - a * tl.sum(total * a, 1)[:, None]) * a_slope[:, None]
    tl.store(a_gradient_ptr + at, total.to(a_gradient_ptr.dtype.element_ty), mask=mask)


class _Similarity(torch.autograd.Function):
    """The similarities of anchors with their own positives, as an autograd function."""

    @staticmethod
    def forward(ctx: Any, anchors: Tensor, positives: Tensor, normalize: bool) -> Tensor:
        anchors, positives = anchors.contiguous(), positives.contiguous()
        ctx.normalize = normalize
        ctx.save_for_backward(anchors, positives)
        b, p, d = positives.shape
        out = anchors.new_empty(b, p, dtype=torch.float32)
        if out.numel():
            _forward[(-(-b // ROWS),)](anchors, positives, out, b, p, d, BM=ROWS, BD=padded(d), NORMS=normalize)
        return out

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        anchors, positives = ctx.saved_tensors
        b, p, d = positives.shape
        of_anchors = torch.empty_like(anchors)
        of_positives = torch.empty_like(positives) if ctx.needs_input_grad[1] else None
        if b:
            _backward[(-(-b // ROWS),)](
                anchors, positives, grad.float().contiguous(), of_anchors, of_positives, b, p, d,
                BM=ROWS, BD=padded(d), NORMS=ctx.normalize, POSITIVES=of_positives is not None,
            )  # fmt: skip
        return of_anchors, of_positives, None


def own_similarity(
    anchors: Annotated[Tensor, "b d"], positives: Annotated[Tensor, "b p d"], normalize: bool
) -> Annotated[Tensor, "b p"]:
    """Compute the cosine (``normalize``) or product of each anchor with each of its positives, in float32.

    Args:
        anchors: Vectors [b, d].
        positives: Vectors [b, p, d].
        normalize: Whether to divide by the norms.
    """
    found: Tensor = _Similarity.apply(anchors, positives, normalize)  # type: ignore[no-untyped-call]
    return found
