"""MoCo with any negatives: v1 and v2 (He et al. 2020) against a queue of momentum keys, v3 (2021) those of the batch.

v1 and v2 differ only in their temperature here: the head and the views are those of ``--head`` and ``--augment``. v3
has a head of three layers and a predictor of two, ``--hidden-dim`` wide and normalised throughout. Ring is v1 with
``negatives="Ring(0.1, outer=linear(1.0, 0.1), dynamic_inner=True)"``, its Algorithm 1 with
``positives_in_denominator="none"``. The queue starts empty, and older keys of the anchor's own image are never its
negatives. With several ranks each one pushes the same gathered keys. Batches are not shuffled for BatchNorm: use
synchronised batch statistics or none.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from hardneg.core.distributed import gather
from hardneg.core.published import QUEUE
from hardneg.core.schedules import cosine, value_of
from hardneg.core.types import Keys
from hardneg.state.momentum import MomentumEncoder
from hardneg.state.pools import Queue
from hardneg.training.data.items import Items
from hardneg.training.encoders import Predicted
from hardneg.training.loop.checks import number_of
from hardneg.training.loop.method import Batch, EncodeInputs, Method
from hardneg.training.loop.parts import loss_for
from hardneg.training.options import MoCoOptions


class MoCoV2(Method):
    """MoCo v1 and v2: a momentum encoder whose past keys, in a queue, are the negatives."""

    def __init__(self, options: MoCoOptions, data: Items, total: int) -> None:
        super().__init__()
        self.encoder = data.encoder(options)
        assert options.momentum is not None
        self.slow = MomentumEncoder(self.encoder, options.momentum)
        self.encode_keys: EncodeInputs = self.slow.__call__
        self.queue = Queue(options.queue or max(1, min(QUEUE, len(data) // 2)), options.dim)
        self.queue_given = options.queue is not None
        self.loss = loss_for(options)

    def chosen(self) -> dict[str, int]:
        """Return the size of the queue if it was derived from the data."""
        return {} if self.queue_given else {"queue": self.queue.capacity}

    def prepare(self, how: Callable[[nn.Module], EncodeInputs]) -> None:
        """Wrap the momentum encoder like the trained one: compiled, in chunks."""
        self.encode_keys = how(self.slow)

    def loss_of(self, encode: EncodeInputs, batch: Batch) -> Tensor:
        """Compute the loss of queries from the first views against keys of the second views and the queue (eq. 1)."""
        q = normalize(encode(batch.first).float(), dim=-1)  # [b, d]
        with torch.no_grad():
            k = normalize(self.encode_keys(batch.second).float(), dim=-1)  # [b, d]
        self.last = (q, k, batch.ids, batch.labels, self.queue.keys())
        self.keys = gather(Keys(k, batch.ids, batch.labels))
        loss: Tensor = self.loss(*self.last)
        return loss

    def after_step(self) -> None:
        """Move the key encoder towards the encoder (eq. 2) and push the keys of the batch."""
        self.slow.update_parameters(self.encoder)
        self.queue.push(self.keys)


class MoCoV3(Method):
    """MoCo v3: both views against momentum keys of the batch, with a predictor behind the trained encoder.

    Args:
        options: Options of the recipe; the momentum rises to 1 along a cosine.
        data: The training items.
        total: Number of steps of the run.
    """

    def __init__(self, options: MoCoOptions, data: Items, total: int) -> None:
        super().__init__()
        encoder = data.encoder(options)
        self.encoder: Predicted = Predicted(encoder, options.dim, options.predictor)
        assert options.momentum is not None
        assert options.temperature is not None
        self.slow = MomentumEncoder(encoder, cosine(options.momentum, 1.0), total)
        self.encode_keys: EncodeInputs = self.slow.__call__
        self.temperature = number_of(options.temperature)
        self.temperature_now = value_of(self.temperature, 0, total)
        self.loss = loss_for(options)

    def loss_of(self, encode: EncodeInputs, batch: Batch) -> Tensor:
        """Compute the sum of both directions, times 2 temperature as in the authors' code."""
        q1, q2 = normalize(encode(batch.views).float(), dim=-1).chunk(2)  # [b, d] each, predicted
        with torch.no_grad():
            k1, k2 = normalize(self.encode_keys(batch.views).float(), dim=-1).chunk(2)  # [b, d] each
        pool1, pool2 = (gather(Keys(k, batch.ids, batch.labels, source="batch")) for k in (k1, k2))
        self.last, self.keys = (q1, k2, batch.ids, batch.labels, pool2), pool2
        both: Tensor = self.loss(*self.last) + self.loss(q2, k1, batch.ids, batch.labels, pool1)
        return 2.0 * self.temperature_now * both  # the authors' factor: makes gradients independent of the temperature

    def recorded_encoder(self) -> nn.Module:
        """Return the encoder without the predictor, which belongs to the method."""
        return self.encoder.encoder

    def recorded(self, loss: Tensor) -> Tensor:
        """Return the mean of the two directions in nats, comparable with other recipes."""
        return loss / (4.0 * self.temperature_now)

    prepare = MoCoV2.prepare

    def set_progress(self, step: int, total: int) -> None:
        """Evaluate the schedules of the loss and of the temperature before a step."""
        super().set_progress(step, total)
        self.temperature_now = value_of(self.temperature, step, total)

    def after_step(self) -> None:
        """Update the momentum encoder."""
        self.slow.update_parameters(self.encoder.encoder)


def moco(options: MoCoOptions, data: Items, total: int) -> Method:
    """Build the method of the version that the options name."""
    return (MoCoV3 if options.version == "v3" else MoCoV2)(options, data, total)
