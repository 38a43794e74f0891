"""SimCLR with any negatives (Chen et al. 2020): two views of each image, both against all others of the batch.

HCL, DCL, tilts, rings and thresholds are this recipe with other ``negatives`` and ``tau_plus``. Most other recipes
derive from ``SimCLR`` and override ``arguments``, ``loss_for`` or ``loss_of_views``.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from hardneg.core.distributed import gather
from hardneg.core.types import Keys
from hardneg.losses.contrastive import ContrastiveLoss
from hardneg.training.data.items import Items
from hardneg.training.loop.method import Batch, EncodeInputs, Method
from hardneg.training.loop.parts import loss_for


class SimCLR(Method):
    """Two views of each item, contrasted within the batch by a ``ContrastiveLoss``.

    Args:
        options: Options of the recipe.
        data: The training items, which also build the encoder.
        total: Number of steps of the run.
    """

    everywhere: ClassVar[bool] = False
    """Whether every rank computes the loss of all gathered rows."""
    arguments: ClassVar[dict[str, Any]] = {}
    """Arguments of the loss that the recipe fixes, in addition to those of the options."""

    def __init__(self, options: Any, data: Items, total: int) -> None:
        super().__init__()
        self.encoder = data.encoder(options)
        self.loss = self.loss_for(options)

    def loss_for(self, options: Any) -> ContrastiveLoss:
        """Build the loss from the options and the fixed ``arguments`` of the recipe."""
        return loss_for(options, **self.arguments)

    def loss_of(self, encode: EncodeInputs, batch: Batch) -> Tensor:
        """Encode both views of the batch and compute their loss (eq. 1)."""
        z1, z2 = normalize(encode(batch.views).float(), dim=-1).chunk(2)  # [b, d] each
        views = [Keys(z, batch.ids, batch.labels) for z in (z1, z2)]
        self.first, self.second = map(gather, views) if self.everywhere else views
        self.last = self.first.vectors, self.second.vectors, self.first.ids, self.first.labels
        return self.loss_of_views(*self.last)

    def loss_of_views(self, z1: Tensor, z2: Tensor, ids: Tensor | None, labels: Tensor | None) -> Tensor:
        """Compute the loss of two views.

        Args:
            z1: Unit vectors of the first views, [b, d]; those of all ranks if ``everywhere``.
            z2: Unit vectors of the second views, [b, d].
            ids: Positions of the items in the data set, [b].
            labels: Labels of the items, [b], or None.
        """
        loss: Tensor = self.loss(z1, z2, ids, labels)
        return loss

    def harvest(self) -> Keys:
        """Return both views of each image as one vector of unit norm, [b, 2d]."""
        vectors = torch.cat([self.first.vectors, self.second.vectors], dim=1).detach() * 0.5**0.5
        keys = Keys(vectors, self.first.ids)
        return keys if self.everywhere else gather(keys)
