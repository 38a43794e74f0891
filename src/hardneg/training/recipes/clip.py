"""CLIP (Radford et al. 2021): two encoders, both directions, and a temperature that is learnt with them.

``--data imagetext:TABLE[image,caption]`` trains an image and a text encoder. The light version trains two projection
heads on precomputed vectors: ``--data embeddings:FILE.npz``. The temperature is exp(-scale) and at least 0.01, as in
the authors' code. ``--objective sigmoid`` is SigLIP (Zhai et al. 2023), whose bias is learnt as well. With
``--denominator`` the loss is over the whole data set, at a constant temperature, or each pair learns its own.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hardneg.core.diagnose import Diagnosis
from hardneg.core.objectives import Sigmoid
from hardneg.losses.contrastive import ContrastiveLoss
from hardneg.negatives.grammar import read_objective
from hardneg.theory.gradients import global_loss
from hardneg.training.data.items import Items
from hardneg.training.loop.parts import loss_for
from hardneg.training.options import CLIPOptions
from hardneg.training.recipes.simclr import SimCLR
from hardneg.training.recipes.two_sided import TwoSided

MIN_TEMPERATURE = 0.01
"""Lower bound of the temperature."""

SIGLIP_BIAS = -10.0
"""Initial bias of SigLIP: most pairs are negatives, and from 0 the first steps would only correct for that."""


class CLIP(SimCLR):
    """Both directions of a batch of pairs, with a learnt temperature.

    Args:
        options: Options of the recipe; ``temperature`` is the initial value.
        data: Pairs; those with the same document are never negatives of each other.
        total: Number of steps of the run.
    """

    arguments: ClassVar[dict[str, Any]] = {"views": "cross"}
    documents: Tensor
    """Document of each pair, [n]; pairs of one document are never negatives of each other."""

    def __init__(self, options: CLIPOptions, data: Items, total: int) -> None:
        super().__init__(options, data, total)
        self.scale = nn.Parameter(torch.tensor(-math.log(float(options.temperature))))
        documents = getattr(data, "documents", torch.arange(len(data)))
        self.register_buffer("documents", documents.clone(), persistent=False)
        self.over_data: TwoSided | None = None
        if options.denominator != "batch":
            self.over_data = TwoSided(options, self.documents, options.dim, both=True)
            self.scale.requires_grad_(False)
            self.everywhere = True  # type: ignore[misc]  # all ranks hold the same state

    def loss_for(self, options: CLIPOptions) -> ContrastiveLoss:
        """Build the loss; a sigmoid objective gets a learnt bias."""
        objective = read_objective(options.objective)
        if isinstance(objective, Sigmoid):
            start = objective.bias if "bias" in options.objective else SIGLIP_BIAS
            objective = replace(objective, bias=nn.Parameter(torch.tensor(float(start))))
        return loss_for(options, **self.arguments, objective=objective, gather=options.denominator == "batch")

    def temperature(self) -> Tensor:
        """Return the current temperature, exp(-scale), a scalar."""
        return torch.exp(-self.scale)

    @torch.no_grad()
    def after_step(self) -> None:
        """Keep the temperature at 0.01 or above.

        The parameter itself is clamped: clamping the value would make its gradient 0 for good.
        """
        super().after_step()
        self.scale.clamp_(max=-math.log(MIN_TEMPERATURE))

    def loss_of_views(self, z1: Tensor, z2: Tensor, ids: Tensor | None, labels: Tensor | None) -> Tensor:
        """Return the mean loss of both directions for images (or first texts) ``z1`` and texts ``z2``, each [b, d]."""
        if self.over_data is not None:
            loss: Tensor = self.over_data(z1, z2, ids, labels)
            return loss
        return (self._one_way(z1, z2, ids, labels) + self._one_way(z2, z1, ids, labels)) / 2.0

    def recorded(self, loss: Tensor) -> Tensor:
        """Return the loss in nats, for a surrogate the real loss of the batch."""
        return loss if self.over_data is None else self.over_data.recorded(loss)

    def _one_way(self, z1: Tensor, z2: Tensor, ids: Tensor | None, labels: Tensor | None) -> Tensor:
        """Return the loss of one direction, with the current temperature."""
        loss: Tensor = self.loss(z1, z2, self.documents[ids], labels, temperature=self.temperature().expand(len(z1)))
        return loss

    def global_loss(self, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
        """Return the exact loss over all pairs at the current temperature, mean of both directions."""
        t, ids = self.temperature(), self.documents[index]
        return (global_loss(z1, z2, t, "cross", ids) + global_loss(z2, z1, t, "cross", ids)) / 2.0

    def diagnose(self, bins: int = 0) -> Diagnosis:
        """Diagnose the negatives of the first direction at the current temperature."""
        z1, z2, ids, labels = self.last
        now = self.temperature().detach().expand(len(z1))
        found: Diagnosis = self.loss.diagnose(z1, z2, self.documents[ids], labels, temperature=now, bins=bins)
        return found
