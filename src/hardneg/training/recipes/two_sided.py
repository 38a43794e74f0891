"""Losses of pairs over the whole data set: SogCLR, EMC2 and iSogCLR for two encoders, in ``clip`` and ``pairs``.

For each pair and direction, ``--denominator sogclr`` keeps a running normaliser (Yuan et al. 2022; LibAUC's GCLoss) and
``emc2`` a Markov chain (Yau et al. 2024); ``isogclr`` learns a temperature, over the batch (Qiu et al. 2023). Pairs of
one document are never negatives of each other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hardneg.losses.contrastive import ContrastiveLoss
from hardneg.losses.global_softmax import EMC2, SogCLR
from hardneg.losses.individual import IndividualTemperatures
from hardneg.negatives import parse
from hardneg.state.pools import Bank
from hardneg.training.options.texts import TwoSidedOptions


class TwoSided(nn.Module):
    """The loss of ``--denominator``, in one direction or the mean of both.

    Args:
        options: Options of the recipe.
        documents: Document of each pair, [n].
        dim: Width of the vectors.
        both: Whether the second sides are anchors as well.
    """

    documents: Tensor

    def __init__(self, options: TwoSidedOptions, documents: Tensor, dim: int, both: bool) -> None:
        super().__init__()
        self.register_buffer("documents", documents.clone(), persistent=False)
        self.kind, self.both, number = options.denominator, both, len(documents)
        temperature, ways = float(options.temperature), 2 if both else 1
        self.losses: Any = nn.ModuleList()
        if self.kind == "sogclr":  # which has both directions itself
            negatives = parse(options.negatives)
            more: dict[str, Any] = {"views": "cross", "negatives": negatives, "documents": documents.clone()}
            self.losses.append(SogCLR(number, temperature, options.gamma, **more))
        for way in range(0 if self.kind == "sogclr" else ways):
            if self.kind == "emc2":
                more = {"views": "cross", "remember": Bank(number, dim), "documents": documents.clone()}
                self.losses.append(EMC2(number, temperature, options.burn_in, seed=options.seed + way, **more))
            else:
                objective = f"isogclr({options.rho!r})"
                loss = ContrastiveLoss(options.negatives, views="cross", objective=objective, normalize=False)
                low, high = min(0.05, temperature), max(0.7, temperature)
                self.losses.append(IndividualTemperatures(loss, number, temperature, low=low, high=high))

    def forward(self, z1: Tensor, z2: Tensor, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the loss of all gathered pairs, for sogclr and emc2 a surrogate with the gradient of the data set.

        Args:
            z1: Unit vectors of the first sides, [b, d].
            z2: Unit vectors of the second sides, [b, d].
            ids: Positions of the pairs, [b].
            labels: Labels [b], for distributions that read them.
        """
        if self.kind == "sogclr":
            loss: Tensor = self.losses[0](z1, z2, ids, labels)
            return loss
        ways = ((z1, z2), (z2, z1))
        return torch.stack(
            [self._one(loss, *way, ids, labels) for loss, way in zip(self.losses, ways, strict=False)]
        ).mean()

    def _one(self, loss: Any, anchors: Tensor, others: Tensor, ids: Tensor, labels: Tensor | None) -> Tensor:
        """Return the loss of one direction."""
        if self.kind == "emc2":
            found: Tensor = loss(anchors, others, ids)
            return found
        in_batch: Tensor = loss.loss(anchors, others, self.documents[ids], labels, temperature=loss.of(ids))
        return in_batch

    def recorded(self, loss: Tensor) -> Tensor:
        """Return the real loss of the batch instead of the surrogate."""
        if self.kind == "isogclr":
            return loss
        return torch.stack([one.last["real_loss"] for one in self.losses]).mean()
