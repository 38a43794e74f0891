"""Row statistics of the closed family in Triton: log E_q[e^s] without the pairs, for one temperature.

    s = similarity / temperature;   log w = beta s inside the row's band and outside the masks by id and label

``row_statistics`` is the general call, ``two_view_losses`` the faster one for two views with InfoNCE;
``backends/triton.py`` calls both. The kernels and their derivation are in ``rows``. ``why_unsupported`` returns what
they do not support; there is no fallback.
"""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError
from hardneg.core.types import PerAnchor
from hardneg.kernels.triton.edges import Sizes
from hardneg.kernels.triton.function import FIXED_SHIFT_BITS, Band, LaunchPlan, RowStatisticsFunction, spread
from hardneg.kernels.triton.sides import HostTemperature, PerCandidate, SideTags, supported_sides
from hardneg.kernels.triton.sides import why_unsupported as why_unsupported


class RowStatistics(NamedTuple):
    """Statistics of each anchor's negatives."""

    log_mean: PerAnchor
    """log E_q[e^s]; -inf without a negative."""
    log_mass: PerAnchor
    """Log of the sum of the weights."""
    support: PerAnchor
    """Number of candidates that q allows, int32."""


def row_statistics(
    anchors: Annotated[Tensor, "b d"],
    candidates: Annotated[Tensor, "n d"] | None = None,
    *,
    temperature: float | Tensor | HostTemperature,
    beta: float = 0.0,
    detach: bool = False,
    anchor_ids: PerAnchor | None = None,
    candidate_ids: PerCandidate | None = None,
    anchor_labels: PerAnchor | None = None,
    candidate_labels: PerCandidate | None = None,
    low: float | PerAnchor | None = None,
    high: float | PerAnchor | None = None,
    window: Sizes | None = None,
    normalize: bool = False,
    unit: bool = True,
) -> RowStatistics:
    """Compute log E_q[e^s] and the log-mass of each anchor over the candidates, without a [b, n] tensor.

    Args:
        anchors: Vectors [b, d].
        candidates: Vectors [n, d]; None for the anchors themselves (two views in one tensor), where an anchor is never
            compared with itself and the tags of the candidates are those of the anchors.
        temperature: A number, or a tensor with one element, which gets a gradient; its value is read on the host.
        beta: The tilt log w = beta s.
        detach: Whether to stop the gradient through the tilt.
        anchor_ids: Ids of the anchors [b]; equal ids are never negatives, and a negative id equals no other.
        candidate_ids: Ids of the candidates, [n].
        anchor_labels: Labels of the anchors [b]; equal labels are never negatives (OtherLabel).
        candidate_labels: Labels of the candidates, [n].
        low: Lowest plain similarity of a negative, included.
        high: Highest plain similarity of a negative, included.
        window: Ranks of each anchor's negatives among candidates of other ids; needs ``normalize``, 16 bits, no band,
            no labels, and candidates without a gradient.
        normalize: Whether to divide vectors by their norms, inside the products.
        unit: Whether the vectors have unit norm; if not (and without ``normalize``) every row keeps a running maximum.

    Raises:
        ArgumentError: If the kernels do not support the arguments.
    """
    wide = normalize and low is None and high is None
    anchors, candidates = supported_sides("row_statistics", anchors, candidates, temperature, beta, wide)
    value, learned = HostTemperature.of(temperature)
    tags = SideTags.of(anchors, candidates, anchor_ids, candidate_ids, anchor_labels, candidate_labels)
    band = _band(low, high, anchors)
    if window is not None and (candidates is None or candidates.requires_grad or not wide or tags.labels is not None):
        what = "normalize=True, no band, no labels and candidates without a gradient for a window"
        raise ArgumentError("row_statistics", what, "other arguments")
    fixed = (unit or normalize) and spread(value, beta) < FIXED_SHIFT_BITS
    masked = tags.few or (window is not None and tags.ids is not None)  # ties are broken by column, not by id
    plan = LaunchPlan(value, float(beta), detach, normalize, fixed, candidates is None, masked, window=window)
    found = RowStatisticsFunction.apply(anchors, candidates, learned, tags, band, plan)  # type: ignore[no-untyped-call]
    return RowStatistics(*found[:3])


class ViewLosses(NamedTuple):
    """Losses and statistics of two views."""

    losses: PerAnchor
    """InfoNCE of each row, not reduced; 0 without a negative."""
    positives: PerAnchor
    """Scores of the positives, without a gradient."""
    log_mean: PerAnchor
    """log E_q[e^s] before tau_plus, without a gradient."""
    support: PerAnchor


def two_view_losses(
    vectors: Annotated[Tensor, "2b d"],
    *,
    temperature: float | Tensor | HostTemperature,
    beta: float = 0.0,
    detach: bool = False,
    tau_plus: float = 0.0,
    ids: Annotated[Tensor, "2b"] | None = None,
    labels: Annotated[Tensor, "2b"] | None = None,
    low: float | Annotated[Tensor, "2b"] | None = None,
    normalize: bool = False,
    unit: bool = True,
) -> ViewLosses:
    """Compute SimCLR, DCL or HCL of both views in one tensor, with positives, debiasing and losses inside the sweep.

    The result is that of ``row_statistics`` and a few operations on [2b] tensors, with a fraction of the launches,
    which dominate the time of small batches.

    Args:
        vectors: Both views [2b, d]; row i + b is the other view of row i.
        temperature: A number, or a tensor with one element, which gets a gradient.
        beta: The tilt log w = beta s.
        detach: Whether to stop the gradient through the tilt.
        tau_plus: Probability that a negative has the anchor's class.
        ids: Ids of the rows [2b]; by default both views of an instance have its number.
        labels: Labels of the rows [2b]; equal labels are never negatives.
        low: Lowest plain similarity of a negative.
        normalize: Whether to divide vectors by their norms, inside the products.
        unit: Whether the vectors have unit norm.

    Returns:
        The losses of all rows, not reduced, with the scores of the positives and the statistics.

    Raises:
        ArgumentError: If the number of rows is odd, or the kernels do not support the arguments.
    """
    supported_sides("two_view_losses", vectors, None, temperature, beta, wide=normalize and low is None)
    rows = vectors.shape[0]
    if rows % 2 or not 0.0 <= tau_plus < 1.0:
        what = "an even number of rows and tau_plus in [0, 1)"
        raise ArgumentError("two_view_losses", what, f"{rows=}, {tau_plus=}")
    ids = torch.arange(rows // 2, device=vectors.device).repeat(2) if ids is None else ids
    value, learned = HostTemperature.of(temperature)
    tags = SideTags.of(vectors, None, ids, None, labels, None)
    fixed = (unit or normalize) and spread(value, beta) < FIXED_SHIFT_BITS
    plan = LaunchPlan(
        value, float(beta), detach, normalize, fixed, True, tags.few, views=True, tau_plus=float(tau_plus)
    )
    found = RowStatisticsFunction.apply(vectors, None, learned, tags, _band(low, None, vectors), plan)  # type: ignore[no-untyped-call]
    return ViewLosses(found[3], found[4], found[0], found[2])


def _band(low: float | Tensor | None, high: float | Tensor | None, anchors: Tensor) -> Band:
    """Expand the limits of the similarity to one number per anchor."""
    if low is None and high is None:
        return None, None

    def per_anchor(value: float | Tensor) -> Tensor:
        bound = torch.as_tensor(value, dtype=torch.float32, device=anchors.device).detach()
        return bound.expand(len(anchors)).contiguous()

    return per_anchor(-math.inf if low is None else low), per_anchor(math.inf if high is None else high)
