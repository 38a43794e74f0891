"""The recipe iSogCLR (Qiu et al. 2023): SimCLR with a temperature per image, learnt with the encoder.

The loss is that of the batch, without the running normalisers that SogCLR has. Images similar to many others get a
higher temperature, rare ones a lower one.
"""

from __future__ import annotations

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

    def __init__(self, options: ISogCLROptions, data: Items, total: int) -> None:
        super().__init__(options, data, total)
        start, high = float(options.temperature), max(0.7, float(options.temperature))
        self.individual = IndividualTemperatures(self.loss, len(data), start, low=min(0.05, start), high=high)

    def loss_for(self, options: ISogCLROptions) -> ContrastiveLoss:
        """Build the loss with the objective ``isogclr(rho)``."""
        return ContrastiveLoss(options.negatives, objective=f"isogclr({options.rho!r})", normalize=False, gather=True)

    def loss_of_views(self, z1: Tensor, z2: Tensor, ids: Tensor | None, labels: Tensor | None) -> Tensor:
        """Return the loss of two views, each [b, d], at the temperatures of their images."""
        loss: Tensor = self.individual(z1, z2, ids, labels=labels)
        return loss

    def global_loss(self, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
        """Return the exact loss at the mean temperature of the images."""
        return global_loss(z1, z2, self.individual.of(index).mean(), ids=index)

    def diagnose(self, bins: int = 0) -> Diagnosis:
        """Diagnose the negatives at the current temperatures of the images."""
        own = self.individual.of(self.last[2]).detach()
        found: Diagnosis = self.loss.diagnose(*self.last, temperature=own, bins=bins)
        return found
