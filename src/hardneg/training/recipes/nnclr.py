"""NNCLR (Dwibedi et al. 2021): the nearest past embedding of each view stands in for it.

The anchors are the nearest neighbours of the projected first views in a queue of past projections, and the predictions
of the second views are positives and candidates; the loss is the mean of both directions. HCL and others are this
recipe with other ``negatives`` and ``tau_plus``. Until the queue has rows, a view is its own neighbour.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from hardneg.core.distributed import gather
from hardneg.core.types import Keys
from hardneg.state.pools import Queue
from hardneg.training.data.items import Items
from hardneg.training.encoders import Predicted
from hardneg.training.loop.method import Batch, EncodeInputs, Method
from hardneg.training.loop.parts import loss_for
from hardneg.training.options import NNCLROptions

QUEUE = 98_304
"""Queue length of the paper."""


class NNCLR(Method):
    """Nearest neighbours in a queue against predictions.

    Args:
        options: Options of the recipe.
        data: The training items.
        total: Number of steps of the run.
    """

    def __init__(self, options: NNCLROptions, data: Items, total: int) -> None:
        super().__init__()
        self.encoder: WithPrediction = WithPrediction(data.encoder(options), options.dim, options.predictor)
        self.queue = Queue(options.queue or max(1, min(QUEUE, len(data) // 2)), options.dim)
        self.queue_given = options.queue is not None
        self.loss = loss_for(options, views="cross")

    def chosen(self) -> dict[str, int]:
        """Return the size of the queue if it was derived from the data."""
        return {} if self.queue_given else {"queue": self.queue.capacity}

    def loss_of(self, encode: EncodeInputs, batch: Batch) -> Tensor:
        """Compute the mean of both directions: neighbours of one view against predictions of the other (eq. 2)."""
        z, p = (normalize(part, dim=-1) for part in encode(batch.views).float().chunk(2, dim=1))  # [2b, d] each
        (z1, z2), (p1, p2) = z.detach().chunk(2), p.chunk(2)
        self.last = (self.nearest(z1), p2, batch.ids, batch.labels)
        self.keys = gather(Keys(z1, batch.ids, batch.labels))
        other: Tensor = self.loss(self.nearest(z2), p1, batch.ids, batch.labels)
        loss: Tensor = (self.loss(*self.last) + other) / 2.0
        return loss

    @torch.no_grad()
    def nearest(self, z: Tensor) -> Tensor:
        """Return the closest row of the queue to each vector, [b, d]; the vectors themselves while it is empty."""
        past = self.queue.keys().vectors
        return past[(z @ past.T).argmax(1)] if len(past) else z

    def recorded_encoder(self) -> nn.Module:
        """Return the encoder without the predictor, which belongs to the method."""
        return self.encoder.encoder

    def after_step(self) -> None:
        """Push the first views of all ranks to the queue."""
        self.queue.push(self.keys)


class WithPrediction(Predicted):
    """An encoder with a predictor that returns the projection and the prediction side by side."""

    def forward(self, inputs: Any) -> Tensor:
        """Return projections and predictions, [b, 2 dim]."""
        z = self.encoder(inputs)
        return torch.cat([z, self.predictor(z)], dim=1)
