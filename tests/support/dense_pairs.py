"""The statistics of the kernels from the whole matrix of pairs, in the dtype of the vectors: float64 in the tests."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize as unit_norm
from torch.nn.functional import softplus


def scores_and_masks(
    anchors: Tensor,
    candidates: Tensor | None,
    *,
    temperature: float | Tensor,
    anchor_ids: Tensor | None = None,
    candidate_ids: Tensor | None = None,
    anchor_labels: Tensor | None = None,
    candidate_labels: Tensor | None = None,
    normalize: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Similarity, scores, the pairs of different instances, the pairs with the same label."""
    others = anchors if candidates is None else candidates
    if normalize:
        anchors, others = unit_norm(anchors, dim=-1), unit_norm(others, dim=-1)
    if candidates is None:
        candidate_ids, candidate_labels = anchor_ids, anchor_labels
    similarity = anchors @ others.T
    different = torch.ones_like(similarity, dtype=torch.bool)
    if candidates is None:
        different.fill_diagonal_(False)
    if anchor_ids is not None and candidate_ids is not None:
        different &= (anchor_ids[:, None] != candidate_ids) | (anchor_ids < 0)[:, None]
    same_label = torch.zeros_like(different)
    if anchor_labels is not None and candidate_labels is not None:
        same_label = anchor_labels[:, None] == candidate_labels
    return similarity, similarity / temperature, different, same_label


def row_statistics(
    anchors: Tensor,
    candidates: Tensor | None = None,
    *,
    beta: float = 0.0,
    detach: bool = False,
    low: float | Tensor = -math.inf,
    high: float | Tensor = math.inf,
    unit: bool = True,
    **pairs: object,
) -> tuple[Tensor, Tensor, Tensor]:
    similarity, s, different, same_label = scores_and_masks(anchors, candidates, **pairs)  # type: ignore[arg-type]
    low, high = (torch.as_tensor(bound, device=s.device).to(s).reshape(-1, 1) for bound in (low, high))
    allowed = different & ~same_label & ~(similarity < low) & ~(similarity > high)
    log_w = beta * (s.detach() if detach else s)
    log_mass = masked_lse(log_w, allowed)
    return masked_lse(s + log_w, allowed) - torch.where(allowed.any(1), log_mass, 0.0), log_mass, allowed.sum(1)


def positive_statistics(anchors: Tensor, candidates: Tensor | None = None, **pairs: object) -> tuple[Tensor, ...]:
    _, s, different, same_label = scores_and_masks(anchors, candidates, **pairs)  # type: ignore[arg-type]
    positive = different & same_label
    return masked_lse(s, positive), torch.where(positive, s, 0.0).sum(1), positive.sum(1)


def pair_losses(
    anchors: Tensor, candidates: Tensor | None = None, *, log_negative: Tensor, **pairs: object
) -> tuple[Tensor, Tensor]:
    _, s, different, same_label = scores_and_masks(anchors, candidates, **pairs)  # type: ignore[arg-type]
    positive = different & same_label
    losses = softplus(log_negative[:, None] - s, threshold=1e9)
    return torch.where(positive, losses, 0.0).sum(1), positive.sum(1)


def masked_lse(values: Tensor, mask: Tensor) -> Tensor:
    some = mask.any(1)
    safe = torch.where(mask | ~some[:, None], values, -math.inf)
    return torch.where(some, safe.logsumexp(1), -math.inf)
