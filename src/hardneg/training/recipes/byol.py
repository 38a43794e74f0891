"""BYOL (Grill et al. 2020): each view predicts the other one as a momentum encoder sees it; there are no negatives.

The reference of ProSampler's Table 1. The loss is the squared distance of unit vectors, summed over both directions.
The momentum of the target rises to 1 along a cosine. The similarities that a run records are those of target
embeddings of different items, as if these were negatives: they show whether a run collapses.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from hardneg.core.distributed import gather
from hardneg.core.schedules import cosine
from hardneg.core.types import Keys
from hardneg.state.momentum import MomentumEncoder
from hardneg.training.data.items import Items
from hardneg.training.encoders import Predicted
from hardneg.training.loop.method import Batch, EncodeInputs, Method
from hardneg.training.loop.parts import loss_for
from hardneg.training.options import BYOLOptions


class BYOL(Method):
    """A predictor behind the trained encoder, and a slow copy of the encoder as its target.

    Args:
        options: Options of the recipe.
        data: The training items.
        total: Number of steps of the run.
    """

    def __init__(self, options: BYOLOptions, data: Items, total: int) -> None:
        super().__init__()
        encoder = data.encoder(options)
        self.encoder: Predicted = Predicted(encoder, options.dim, options.predictor)
        self.slow = MomentumEncoder(encoder, cosine(options.momentum, 1.0), total)
        self.encode_targets: EncodeInputs = self.slow.__call__
        self.loss = loss_for(options)  # only diagnoses the embeddings

    def prepare(self, how: Callable[[nn.Module], EncodeInputs]) -> None:
        """Compile and chunk the momentum encoder like the trained one."""
        self.encode_targets = how(self.slow)

    def loss_of(self, encode: EncodeInputs, batch: Batch) -> Tensor:
        """Compute |q1 - z2|^2 + |q2 - z1|^2, the mean over the batch (eq. 2)."""
        q1, q2 = normalize(encode(batch.views).float(), dim=-1).chunk(2)  # [b, d] each, predicted
        with torch.no_grad():
            z1, z2 = normalize(self.encode_targets(batch.views).float(), dim=-1).chunk(2)  # [b, d], targets
        self.last, self.keys = (z1, z2, batch.ids, batch.labels), gather(Keys(z2, batch.ids, batch.labels))
        return (q1 - z2).square().sum(1).mean() + (q2 - z1).square().sum(1).mean()

    def figures(self) -> dict[str, float]:
        """Return 0, the loss of a collapsed run, so that only the similarities decide whether it has collapsed."""
        return {"guess_loss": 0.0}

    def recorded_encoder(self) -> nn.Module:
        """Return the encoder without the predictor, which belongs to the method."""
        return self.encoder.encoder

    def after_step(self) -> None:
        """Move the target towards the encoder: target = m target + (1 - m) encoder."""
        self.slow.update_parameters(self.encoder.encoder)
