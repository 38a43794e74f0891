"""MoCo with any negatives: v1 and v2 (He et al. 2020) against a queue of momentum keys, v3 (2021) those of the batch.

v1 and v2 differ in their temperature here: head and views are those of ``--encoder`` and ``--augment``. Ring is v1 with
``negatives="Ring(0.1, outer=linear(1.0, 0.1), dynamic_inner=True)"``. The queue starts empty, and an older key of the
anchor's own image is never its negative. Under several ranks every rank pushes the same gathered keys. The shuffling of
batches for BatchNorm is left out: use synchronised or no batch statistics.
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
from hardneg.training.checks import number_of
from hardneg.training.data.inputs import Inputs
from hardneg.training.data.items import Items
from hardneg.training.encoders import features_of
from hardneg.training.method import Batch, EncodeInputs, Method
from hardneg.training.options import MoCoOptions
from hardneg.training.parts import loss_for


class MoCoV2(Method):
    """v1 and v2."""

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
        return {} if self.queue_given else {"queue": self.queue.capacity}

    def prepare(self, how: Callable[[nn.Module], EncodeInputs]) -> None:
        self.encode_keys = how(self.slow)

    def loss_of(self, encode: EncodeInputs, batch: Batch) -> Tensor:
        first, second = batch.first, batch.second
        q = normalize(encode(first).float(), dim=-1)
        with torch.no_grad():
            k = normalize(self.encode_keys(second).float(), dim=-1)
        self.last = (q, k, batch.ids, batch.labels, self.queue.keys())
        self.keys = gather(Keys(k, batch.ids, batch.labels))
        loss: Tensor = self.loss(*self.last)
        return loss

    def after_step(self) -> None:
        self.slow.update_parameters(self.encoder)
        self.queue.push(self.keys)


class MoCoV3(Method):
    def __init__(self, options: MoCoOptions, data: Items, total: int) -> None:
        super().__init__()
        encoder = data.encoder(options)
        self.encoder: Predicted = Predicted(encoder, options.dim)
        assert options.momentum is not None
        assert options.temperature is not None
        self.slow = MomentumEncoder(encoder, cosine(options.momentum, 1.0), total)
        self.encode_keys: EncodeInputs = self.slow.__call__
        self.temperature = number_of(options.temperature)
        self.temperature_now = value_of(self.temperature, 0, total)
        self.loss = loss_for(options)

    def loss_of(self, encode: EncodeInputs, batch: Batch) -> Tensor:
        q1, q2 = normalize(encode(batch.views).float(), dim=-1).chunk(2)
        with torch.no_grad():
            k1, k2 = normalize(self.encode_keys(batch.views).float(), dim=-1).chunk(2)
        pool1, pool2 = (gather(Keys(k, batch.ids, batch.labels, source="batch")) for k in (k1, k2))
        self.last, self.keys = (q1, k2, batch.ids, batch.labels, pool2), pool2
        both: Tensor = self.loss(*self.last) + self.loss(q2, k1, batch.ids, batch.labels, pool1)
        return 2.0 * self.temperature_now * both  # the authors' factor, which frees the step size from the temperature

    def recorded_encoder(self) -> nn.Module:
        return self.encoder.encoder  # without the predictor, which is the method's

    def recorded(self, loss: Tensor) -> Tensor:
        """The mean of the two directions in nats, as of the other recipes."""
        return loss / (4.0 * self.temperature_now)

    prepare = MoCoV2.prepare

    def set_progress(self, step: int, total: int) -> None:
        super().set_progress(step, total)
        self.temperature_now = value_of(self.temperature, step, total)

    def after_step(self) -> None:
        self.slow.update_parameters(self.encoder.encoder)


class Predicted(nn.Module):
    """An encoder with v3's predictor behind its projection; ``features`` are the encoder's."""

    encoder: nn.Module

    def __init__(self, encoder: nn.Module, dim: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.predictor = nn.Sequential(
            nn.Linear(dim, 2 * dim), nn.LayerNorm(2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim)
        )

    def features(self, inputs: Inputs) -> Tensor:
        return features_of(self.encoder)(inputs)

    def forward(self, inputs: Inputs) -> Tensor:
        predicted: Tensor = self.predictor(self.encoder(inputs))
        return predicted


def moco(options: MoCoOptions, data: Items, total: int) -> Method:
    return (MoCoV3 if options.version == "v3" else MoCoV2)(options, data, total)
