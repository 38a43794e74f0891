"""A loss and a miner for pytorch-metric-learning that accept any negatives.

Example::

    contrast = hn.ContrastiveLoss("Tilt(1.0)", temperature=0.1, reduction="pairs")
    loss = NegativesLoss(contrast)  # instead of NTXentLoss(0.1)
    loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)

See docs/guides/metric-learning.md.
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

PairIndices = tuple[Tensor, Tensor, Tensor, Tensor]


class NegativesLoss(BaseMetricLossFunction):  # type: ignore[misc]
    """A ``ContrastiveLoss`` usable as a loss of pytorch-metric-learning, with its distances, reducers and regularizers.

    Pairs with equal labels are positives and all other pairs negatives; ``indices_tuple`` of a miner restricts both,
    and a repeated pair counts once. The unit that the reducer reduces depends on the reduction of ``loss``:

    - ``"pairs"``: one loss per positive pair. With ``Uniform()`` this is NTXentLoss.
    - ``"anchors"``: one loss per anchor, the mean over its positives. With ``Uniform()`` and
      ``positives_in_denominator="all"`` this is SupConLoss.

    The distance normalises the embeddings, so the ``normalize`` of ``loss`` has no effect.

    Args:
        loss: Its negatives, temperature, objective and reduction are used.
        **options: ``distance``, ``reducer``, ``embedding_regularizer`` ... of pytorch-metric-learning.

    Raises:
        ArgumentError: ``loss`` is not a ContrastiveLoss, or has ``reduction="none"``.
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
        """Return the unreduced losses; the base class passes them to the reducer.

        Args:
            embeddings: Anchors, [b, d].
            labels: [b], or None with ``indices_tuple``.
            indices_tuple: (a, p, n) or (a1, p, a2, n) of a miner, or None for all pairs.
            ref_emb: Candidates, [n, d]; the embeddings themselves unless given in the call.
            ref_labels: [n], or None.

        Returns:
            ``{"loss": {"losses", "indices", "reduction_type"}}``, the format of the library.
        """
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
        """Return the distance used unless another is given."""
        return CosineSimilarity()


class NegativesMiner(BaseMiner):  # type: ignore[misc]
    """Miner that keeps all positive pairs and chooses the negatives of each anchor by a distribution.

    Without ``k``, every candidate of non-zero weight is a negative, which suits distributions that remove candidates:
    ``Rank(0, 10)``, ``Ring(0.1, 0.5)``, ``BelowPositive(relative=0.05)``. With ``k``, that many are drawn for each
    anchor without replacement, so that a ``Tilt`` draws harder ones.

    Args:
        negatives: Distribution over negatives, as an object or in the grammar.
        k: Negatives to draw for each anchor, or None for all.
        temperature: Temperature of the distribution.
        seed: Seed of the draws. They also depend on the number of calls, which is part of the ``state_dict``.
        **options: ``distance`` and other options of pytorch-metric-learning.
    """

    calls: Tensor

    def __init__(
        self, negatives: Negatives | str, k: int | None = None, temperature: float = 0.1, seed: int = 0, **options: Any
    ) -> None:
        super().__init__(**options)
        self.negatives = parse(negatives) if isinstance(negatives, str) else negatives
        self.k, self.temperature, self.seed = k, temperature, seed
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> PairIndices:
        """Return the indices (a1, p, a2, n) of positive pairs and chosen negative pairs.

        Args:
            embeddings: Anchors, [b, d].
            labels: [b].
            ref_emb: Candidates, [n, d].
            ref_labels: [n].
        """
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
        """Return the distance used unless another is given."""
        return CosineSimilarity()


def _similarity(distance: Any, embeddings: Tensor, others: Tensor) -> Tensor:
    """Return similarities, [b, n]: a distance of the library, negated unless larger already means closer."""
    matrix: Tensor = distance(embeddings, others)
    return matrix if distance.is_inverted else -matrix


def _mask(rows: Tensor, columns: Tensor, like: Tensor) -> Tensor:
    """Return a mask of the shape of ``like`` that is True at the given pairs."""
    mask = torch.zeros_like(like, dtype=torch.bool)
    mask[rows, columns] = True
    return mask
