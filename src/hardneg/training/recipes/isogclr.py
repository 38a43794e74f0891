"""The recipe iSogCLR (Qiu et al. 2023): SimCLR with a temperature per image, learnt with the encoder (eq. 4).

Like SogCLR it has a running normaliser per image, unless ``--gamma 1``. Images similar to many others get a higher
temperature, rare ones a lower one. The recorded loss is that of the batch. Every rank computes the loss of all gathered
rows, so that all ranks hold the same normalisers.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from hardneg.core.diagnose import Diagnosis
from hardneg.losses.contrastive import ContrastiveLoss
from hardneg.losses.individual import IndividualTemperatures
from hardneg.theory.gradients import global_loss
from hardneg.training.data.items import Items
from hardneg.training.options import ISogCLROptions
from hardneg.training.recipes.simclr import SimCLR


class ISogCLRRecipe(SimCLR):
    """SimCLR with a learnt temperature per image.

    Temperatures start at ``options.temperature`` and stay in [0.05, 0.7], extended by the starting value.
    """

    everywhere: ClassVar[bool] = True

    def __init__(self, options: ISogCLROptions, data: Items, total: int) -> None:
        super().__init__(options, data, total)
        start, high = float(options.temperature), max(0.7, float(options.temperature))
        self.individual = IndividualTemperatures(
            self.loss, len(data), start, low=min(0.05, start), high=high, gamma=options.gamma
        )

    def loss_for(self, options: ISogCLROptions) -> ContrastiveLoss:
        """Build the loss with the objective ``isogclr(rho)``."""
        return ContrastiveLoss(options.negatives, objective=f"isogclr({options.rho!r})", normalize=False)

    def loss_of_views(self, z1: Tensor, z2: Tensor, ids: Tensor | None, labels: Tensor | None) -> Tensor:
        """Return the loss of two views, each [b, d], at the temperatures of their images."""
        loss: Tensor = self.individual(z1, z2, ids, labels=labels)
        return loss

    def recorded(self, loss: Tensor) -> Tensor:
        """Return the real loss of the batch instead of the surrogate."""
        return self.individual.last.get("real_loss", loss)

    def global_loss(self, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
        """Return the exact loss at the mean temperature of the images."""
        return global_loss(z1, z2, self.individual.of(index).mean(), ids=index)

    def diagnose(self, bins: int = 0) -> Diagnosis:
        """Diagnose the negatives at the current temperatures of the images."""
        own = self.individual.of(self.last[2]).detach()
        found: Diagnosis = self.loss.diagnose(*self.last, temperature=own, bins=bins)
        return found
