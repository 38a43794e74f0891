"""A loss and a miner for pytorch-metric-learning, with any negatives.

loss = NegativesLoss(hn.ContrastiveLoss("Tilt(1.0)", temperature=0.1, reduction="pairs"))   # NTXentLoss(0.1) there
loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)
"""

from __future__ import annotations

from typing import Any

import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import BaseMetricLossFunction
from pytorch_metric_learning.miners import BaseMiner
from pytorch_metric_learning.utils.loss_and_miner_utils import convert_to_pairs
from torch import Tensor

from hardneg.core.errors import ArgumentError
from hardneg.core.scoring import from_matrix
from hardneg.core.types import NEVER, Tags
from hardneg.losses.contrastive import ContrastiveLoss
from hardneg.negatives import Negatives, parse
from hardneg.search.draws import draw

Pairs = tuple[Tensor, Tensor, Tensor, Tensor]


class NegativesLoss(BaseMetricLossFunction):  # type: ignore[misc]
    """A ContrastiveLoss with the call, the distances, the reducers and the regularizers of pytorch-metric-learning.

    Positives are the pairs of one label, negatives the others, or those of ``indices_tuple``, where a pair counts once
    however often it is listed. With ``reduction="pairs"`` each positive pair is a loss for the reducer, and
    ``Uniform()`` is NTXentLoss; with ``"anchors"`` each anchor is one, the mean over its positives, and with
    ``positives_in_denominator="all"`` that is SupConLoss. The distance normalises, not the ContrastiveLoss.
    """

    def __init__(self, loss: ContrastiveLoss, **options: Any) -> None:
        super().__init__(**options)
        if not isinstance(loss, ContrastiveLoss) or loss.reduction == "none":
            what = "a hardneg.ContrastiveLoss with reduction 'pairs' or 'anchors'"
            raise ArgumentError("NegativesLoss", what, f"loss={loss!r}")
        self.loss = loss

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: tuple[Tensor, ...] | None,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> dict[str, Any]:
        if labels is None and indices_tuple is None:
            raise ArgumentError("NegativesLoss", "labels or an indices_tuple", "neither")
        similarity = _similarity(self.distance, embeddings, ref_emb)
        a1, p, a2, n = convert_to_pairs(indices_tuple, labels, ref_labels)
        positive, negative = _mask(a1, p, similarity), _mask(a2, n, similarity)
        rows = positive.any(1)  # a miner may leave an anchor without any pair
        if not rows.any():
            zero: dict[str, Any] = self.zero_losses()
            return zero
        anchors, candidates = Tags(labels=labels if labels is None else labels[rows]), Tags(labels=ref_labels)
        own = self.loss.of_matrix(
            similarity[rows], positive[rows], valid=negative[rows], anchors=anchors, candidates=candidates
        )
        if self.loss.reduction == "pairs":
            pairs = torch.where(positive)
            return {"loss": {"losses": own[positive[rows]], "indices": pairs, "reduction_type": "pos_pair"}}
        means = own.new_zeros(len(rows)).masked_scatter(rows, own.sum(1) / positive[rows].sum(1))
        every = torch.arange(len(rows), device=means.device)
        return {"loss": {"losses": means, "indices": every, "reduction_type": "element"}}

    def get_default_distance(self) -> Any:
        return CosineSimilarity()


class NegativesMiner(BaseMiner):  # type: ignore[misc]
    """``(a1, p, a2, n)``: all pairs of one label, and for each anchor the negatives that a distribution leaves.

    ``Rank(0, 10)``, ``Ring(0.1, 0.5)``, ``BelowPositive(relative=0.05)`` and the like leave some. With ``k``, that many
    are drawn from the distribution for each anchor, without replacement, so that a ``Tilt`` draws harder ones. The
    temperature is the one of the distribution. The draws follow from the seed and from how often the miner was called,
    which is in its ``state_dict``.
    """

    calls: Tensor

    def __init__(
        self, negatives: Negatives | str, k: int | None = None, temperature: float = 0.1, seed: int = 0, **options: Any
    ) -> None:
        super().__init__(**options)
        self.negatives = parse(negatives) if isinstance(negatives, str) else negatives
        self.k, self.temperature, self.seed = k, temperature, seed
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Pairs:
        similarity = _similarity(self.distance, embeddings, ref_emb)
        a1, p, a2, n = convert_to_pairs(None, labels, ref_labels)
        scores = from_matrix(
            similarity,
            _mask(a1, p, similarity),
            self.temperature,
            valid=_mask(a2, n, similarity),
            anchors=Tags(labels=labels),
            candidates=Tags(labels=ref_labels),
        )
        log_w = self.negatives.log_weights(scores)
        if self.k is None:
            return a1, p, *torch.where(log_w != NEVER)
        self.calls += 1
        random = torch.Generator().manual_seed(self.seed * 2**32 + int(self.calls))
        drawn = draw(log_w, self.k, random, method="gumbel")
        rows, places = torch.where(drawn >= 0)
        return a1, p, rows, drawn[rows, places]

    def get_default_distance(self) -> Any:
        return CosineSimilarity()


def _similarity(distance: Any, embeddings: Tensor, others: Tensor) -> Tensor:
    matrix: Tensor = distance(embeddings, others)
    return matrix if distance.is_inverted else -matrix


def _mask(rows: Tensor, columns: Tensor, like: Tensor) -> Tensor:
    mask = torch.zeros_like(like, dtype=torch.bool)
    mask[rows, columns] = True
    return mask
