"""Diagnostics of a batch: how hard the negatives are, how many are false, and how many effectively take part.

``diagnose`` computes a ``Diagnosis`` of dense scores and log-weights. ``ContrastiveLoss.diagnose`` and the run records
of ``hardneg train`` use it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Annotated

import torch
from torch import Tensor

import hardneg.core.objectives.base as base
from hardneg.core.objectives.base import corrects
from hardneg.core.objectives.info_nce import debiased
from hardneg.core.statistics import log_expect_exp
from hardneg.core.text import counted, html_table
from hardneg.core.types import NEVER, LogWeights, PerAnchor, Scores, with_support

LOG_PREFIX = "hardneg/"
"""Prefix of the names under which integrations log diagnostics: ``hardneg/hardness``."""


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """Effect of the distribution q of the negatives on each anchor; values are [b] unless noted.

    NaN marks values that are undefined, because the anchor has no negative or there are no labels.
    """

    hardness: PerAnchor
    """Mean similarity of the negatives under q; without the temperature."""
    uniform_hardness: PerAnchor
    """Mean similarity with equal weights for all valid candidates: the baseline for ``hardness``."""
    effective_number: PerAnchor
    """1 / sum q^2: the number of equally weighted negatives that would be as concentrated as q."""
    false_negatives: PerAnchor
    """False-negative rate: share of q on candidates with the anchor's label; NaN without labels."""
    attracted: PerAnchor
    """Share of the negatives that the loss pulls closer instead of pushing away."""
    effective_temperature: PerAnchor
    """Temperature / (1 + beta), where beta is the slope of the log-weights over the scores: the temperature of plain
    InfoNCE with similar gradients. NaN where beta <= -1, when easy negatives weigh more than at any temperature."""
    clamped: Annotated[Tensor, "b p"]
    """True where the debiased mean was replaced by its lower bound, so that the pair's negatives get no gradient."""
    real_pairs: Annotated[Tensor, "b p"]
    """True for pairs that contribute to the loss: a real positive, and an anchor with a negative."""
    empty: PerAnchor
    """True for anchors without a negative."""
    no_positive: PerAnchor
    """True for anchors without a positive."""
    no_direction: PerAnchor
    """True for anchors with similarity 0 to everything: their vector is zero and gets no gradient."""
    counts: Annotated[Tensor, "b k bins"]
    """Numbers of positives, negatives and (with labels, so that k is 3) false negatives by similarity, in even bins
    over [-1, 1]; similarities beyond it are in the outer bins. Without ``bins`` there are none."""

    def summary(self) -> dict[str, float]:
        """Return the mean of each field over the anchors for which it is defined (``clamped``: over the real pairs)."""
        names = [field.name for field in fields(self) if field.name != "counts"]
        means = {name: getattr(self, name).double().nanmean().item() for name in names}
        return means | {"clamped": self.clamped_share()}

    def similarities(self) -> dict[str, list[int]]:
        """Return the counts summed over the anchors: "positives", "negatives" and, with labels, "false_negatives"."""
        summed = self.counts.double().sum(0).long().tolist()
        return dict(zip(("positives", "negatives", "false_negatives"), summed, strict=False))

    def __repr__(self) -> str:
        """Summarise in one line: number of anchors and the means that are not 0."""
        means = [f"{name} {mean:.3g}" for name, mean in self.summary().items() if mean and not math.isnan(mean)]
        return f"Diagnosis({counted(len(self.empty), 'anchor')}: {', '.join(means)})"

    def _repr_html_(self) -> str:
        """Show the means as a table in notebooks."""
        rows = [
            (name.replace("_", " "), "n/a" if math.isnan(mean) else f"{mean:.4g}")
            for name, mean in self.summary().items()
        ]
        return html_table(f"Diagnosis of {counted(len(self.empty), 'anchor')}", ("", "mean"), rows)

    def clamped_share(self) -> float:
        """Return the share of real pairs whose debiased mean is at its lower bound."""
        return float(self.clamped.sum() / self.real_pairs.sum().clamp(min=1))


def joined(parts: list[Diagnosis]) -> Diagnosis:
    """Concatenate the diagnoses of consecutive blocks of anchors."""
    if len(parts) == 1:
        return parts[0]
    return Diagnosis(
        **{field.name: torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Diagnosis)}
    )


def diagnose(scores: Scores, log_w: LogWeights, *, tau_plus: float | Tensor = 0.0, bins: int = 0) -> Diagnosis:
    """Measure how hard the negatives of each anchor are, how many are false, and how many effectively take part.

    If the scores carry a graph, the gradient shows which negatives are attracted. Otherwise the weights are assumed to
    follow the scores linearly in log-space, as HCL's do; constant weights give slope 0.

    Args:
        scores: Scores of b anchors with p positives and n candidates.
        log_w: Log-weights of the negatives, [b, n].
        tau_plus: Share of false negatives that the loss corrects for, in [0, 1).
        bins: Number of bins of the histograms in ``counts``; 0 for none.

    Returns:
        A ``Diagnosis``; its ``summary()`` has one number per field.

    Raises:
        ArgumentError: If the shape of ``log_w`` does not match the candidates.

    Example:
        >>> from hardneg import Tilt, two_views
        >>> z = torch.nn.functional.normalize(torch.randn(8, 4), dim=-1)
        >>> scores = two_views(z, z, temperature=0.5)
        >>> diagnosis = diagnose(scores, Tilt(1.0).log_weights(scores))
        >>> round(diagnosis.summary()["effective_temperature"], 4)
        0.25
    """
    base.check_shape("diagnose", scores, log_w)
    repulsion = _repulsion(scores, log_w)
    with torch.no_grad():
        log_w = log_w.detach()
        supported = log_w != NEVER
        some, safe = supported.any(-1), with_support(log_w)[1]
        q = torch.softmax(safe, dim=-1)
        similarity = scores.candidates * scores.temperature
        slope = _slope(scores.candidates, log_w)
        if repulsion is None:
            p = torch.softmax(scores.candidates + safe, dim=-1)
            repulsion = p + slope[:, None] * (p - q)
        count = supported.sum(-1).to(q.dtype)
        num_valid = scores.num_valid().to(q.dtype)
        log_mean = log_expect_exp(scores.candidates, log_w)[:, None]
        pairs = scores.positive_valid & some[:, None]
        return Diagnosis(
            hardness=_where(some, (q * similarity).sum(-1)),
            uniform_hardness=_where(num_valid > 0, (scores.valid * similarity).sum(-1) / num_valid),
            effective_number=_where(some, 1.0 / q.square().sum(-1)),
            false_negatives=_where(some, _false_share(scores, q)),
            attracted=_where(some, ((repulsion < 0) & supported).sum(-1) / count),
            effective_temperature=_where(some & (slope > -1.0), _flat(scores.temperature) / (1.0 + slope)),
            clamped=pairs & debiased(log_mean, scores.positives, tau_plus, scores.temperature)[1]
            if corrects(tau_plus)
            else torch.zeros_like(pairs),
            real_pairs=pairs,
            empty=~some,
            no_positive=~scores.positive_valid.any(-1),
            no_direction=(scores.candidates == 0).all(-1) & (scores.positives == 0).all(-1),
            counts=_counts(scores, supported, bins),
        )


def _counts(scores: Scores, supported: Tensor, bins: int) -> Annotated[Tensor, "b k bins"]:
    """Count the positives, the negatives and the negatives of the anchor's label by their similarity."""
    kinds = [(scores.positives, scores.positive_valid), (scores.candidates, supported)]
    if scores.anchor_tags.labels is not None and scores.candidate_tags.labels is not None:
        kinds.append((scores.candidates, supported & scores.same_label("diagnose")))
    found = scores.candidates.new_zeros(len(scores.candidates), len(kinds), bins)
    if bins:
        for kind, (score, counted_ones) in enumerate(kinds):
            place = ((score * scores.temperature + 1.0) * (bins / 2)).long().clamp(0, bins - 1)
            found[:, kind].scatter_add_(1, place, counted_ones.to(found).expand_as(place))
    return found


def _repulsion(scores: Scores, log_w: LogWeights) -> Tensor | None:
    """Return the gradient of log E_q[e^s] by each candidate's score, [b, n], including that through the weights.

    None if the scores carry no graph.
    """
    if not (torch.is_grad_enabled() and scores.candidates.requires_grad):
        return None
    total = log_expect_exp(scores.candidates, log_w)
    total = torch.where(total == NEVER, 0.0, total).sum()
    try:
        return torch.autograd.grad(total, scores.candidates, retain_graph=True)[0].detach()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # the graph of the weights was freed by an earlier backward pass
        return None


def _slope(candidates: Tensor, log_w: Tensor) -> Tensor:
    """Return the least-squares slope of log w over s on q's support, [b]: beta for a tilt, 0 for a mask."""
    on = (log_w != NEVER).to(candidates.dtype)
    count = on.sum(-1, keepdim=True).clamp(min=1.0)
    s, w = (torch.where(on > 0, values, 0.0) for values in (candidates, log_w))
    s, w = (on * (values - values.sum(-1, keepdim=True) / count) for values in (s, w))
    variance = s.square().sum(-1)
    rounding = torch.finfo(s.dtype).eps * candidates.abs().sum(-1)
    return torch.where(variance > rounding**2, (s * w).sum(-1) / variance, 0.0)


def _false_share(scores: Scores, q: Tensor) -> Tensor:
    if scores.anchor_tags.labels is None or scores.candidate_tags.labels is None:
        return q.new_full((q.shape[0],), float("nan"))
    return (q * scores.same_label("diagnose")).sum(-1)


def _where(condition: Tensor, value: Tensor) -> Tensor:
    return torch.where(condition, value, float("nan"))


def _flat(temperature: float | Tensor) -> float | Tensor:
    return temperature[:, 0] if isinstance(temperature, Tensor) and temperature.ndim == 2 else temperature
