"""Losses of pairs over the whole data set: SogCLR, EMC2 and iSogCLR for two encoders, in ``clip`` and ``pairs``.

For each pair and direction, ``--denominator sogclr`` keeps a running normaliser (Yuan et al. 2022; LibAUC's GCLoss) and
``emc2`` a Markov chain (Yau et al. 2024); ``isogclr`` a running normaliser and a learnt temperature (Qiu et al. 2023).
Pairs of one document are never negatives of each other.
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
    """The loss for ``--denominator``: one direction, or the mean of both.

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
        self.denominator = options.denominator
        self.losses: Any = nn.ModuleList()  # one for each direction; SogCLR has both in one
        if self.denominator == "sogclr":
            self.losses.append(self._sogclr(options))
        for direction in range(0 if self.denominator == "sogclr" else 2 if both else 1):
            one = self._emc2(options, dim, direction) if self.denominator == "emc2" else self._isogclr(options)
            self.losses.append(one)

    def _sogclr(self, options: TwoSidedOptions) -> SogCLR:
        """Build SogCLR with a normaliser per pair and direction."""
        negatives, documents, temperature = parse(options.negatives), self.documents.clone(), float(options.temperature)
        number, gamma = len(documents), options.gamma
        return SogCLR(number, temperature, gamma, views="cross", negatives=negatives, documents=documents)

    def _emc2(self, options: TwoSidedOptions, dim: int, direction: int) -> EMC2:
        """Build EMC2 for one direction, with a chain per pair and a bank of the vectors of the other side."""
        number, temperature, seed = len(self.documents), float(options.temperature), options.seed + direction
        bank, documents = Bank(number, dim), self.documents.clone()
        how: dict[str, Any] = {"views": "cross", "remember": bank, "seed": seed, "documents": documents}
        return EMC2(number, temperature, options.burn_in, **how)

    def _isogclr(self, options: TwoSidedOptions) -> IndividualTemperatures:
        """Build iSogCLR for one direction, with a temperature per pair."""
        start, objective = float(options.temperature), f"isogclr({options.rho!r})"
        loss = ContrastiveLoss(options.negatives, views="cross", objective=objective, normalize=False)
        low, high, gamma = min(0.05, start), max(0.7, start), options.gamma
        return IndividualTemperatures(loss, len(self.documents), start, low, high, gamma)

    def forward(self, z1: Tensor, z2: Tensor, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the loss of all gathered pairs, a surrogate with the gradient of the loss over the data set.

        Args:
            z1: Unit vectors of the first sides, [b, d].
            z2: Unit vectors of the second sides, [b, d].
            ids: Positions of the pairs, [b].
            labels: Labels [b], for distributions that read them.
        """
        if self.denominator == "sogclr":
            both: Tensor = self.losses[0](z1, z2, ids, labels)
            return both
        directions = ((z1, z2), (z2, z1))[: len(self.losses)]
        found = [
            loss(anchors, others, ids)
            if self.denominator == "emc2"
            else loss(anchors, others, ids, documents=self.documents[ids], labels=labels)
            for loss, (anchors, others) in zip(self.losses, directions, strict=True)
        ]
        return torch.stack(found).mean()

    def recorded(self, loss: Tensor) -> Tensor:
        """Return the real loss of the batch instead of the surrogate."""
        return torch.stack([one.last.get("real_loss", loss) for one in self.losses]).mean()
