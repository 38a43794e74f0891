"""SwAV (Caron et al. 2020): each view predicts the prototypes to which another view is assigned; no negatives.

The reference of ProSampler's Table 1. The assignments ("codes") of a batch are balanced over the prototypes by
Sinkhorn-Knopp iterations on the embeddings of all ranks, with a queue of past ones if there is one. ``num_crops`` adds
smaller crops, which predict the codes of the two views and have none themselves (multi-crop). Every rank computes the
loss of all gathered rows. The recorded similarities are those of different items, as if they were negatives.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, normalize

from hardneg.core.distributed import gather
from hardneg.core.schedules import value_of
from hardneg.core.types import Keys
from hardneg.state.pools import Queue
from hardneg.training.augmentation.augment import Augment
from hardneg.training.data.images import ImageData
from hardneg.training.data.inputs import joined
from hardneg.training.data.items import Items
from hardneg.training.loop.checks import number_of
from hardneg.training.loop.method import Batch, EncodeInputs, Method
from hardneg.training.loop.parts import loss_for
from hardneg.training.options import SwAVOptions

PROTOTYPES = 3000
"""Prototypes of the paper, for the 1,000 classes of ImageNet."""
SMALL = (0.05, 0.14)
"""Share of an image's area in a small crop, as in the paper."""


class SwAV(Method):
    """Embeddings compared with trained prototypes.

    Args:
        options: Options of the recipe.
        data: The training items.
        total: Number of steps of the run.
    """

    def __init__(self, options: SwAVOptions, data: Items, total: int) -> None:
        super().__init__()
        self.options, self.small = options, smaller(data)
        self.encoder = data.encoder(options)
        number = options.num_prototypes or max(2, min(PROTOTYPES, len(data) // 10))
        self.prototypes = nn.Parameter(normalize(torch.randn(number, options.dim), dim=-1))  # [k, d], unit vectors
        self.queues: Any = nn.ModuleList([Queue(options.queue, options.dim) for _ in range(2) if options.queue])
        self.loss = loss_for(options, gather=False)  # only diagnoses the embeddings
        self.temperature = number_of(options.temperature)
        self.steps_an_epoch = max(1, total // options.epochs)
        self.set_progress(0, total)

    def chosen(self) -> dict[str, int]:
        """Return the number of prototypes if it was derived from the data."""
        return {} if self.options.num_prototypes else {"num_prototypes": len(self.prototypes)}

    def loss_of(self, encode: EncodeInputs, batch: Batch) -> Tensor:
        """Predict the codes of each of the two views from all other views: the mean cross-entropy (eq. 2)."""
        crops, b = self._crops(batch.ids), len(batch.ids)
        parts = [batch.views, *([joined(crops)] if crops else [])]  # those of one size are encoded together
        views = [z for part in parts for z in torch.split(normalize(encode(part).float(), dim=-1), b)]  # [b, d] each
        keys = [gather(Keys(z, batch.ids, batch.labels)) for z in views]
        self.first, self.second, *_ = keys
        self.last = self.first.vectors, self.second.vectors, self.first.ids, self.first.labels
        prototypes = self.prototypes.detach() if self.epoch < self.options.frozen_epochs else self.prototypes
        scores = [one.vectors @ prototypes.T for one in keys]  # [b, k] each
        predicted = [(one / self.temperature_now).log_softmax(1) for one in scores]
        losses = [
            -(self._codes(i, keys[i].vectors, scores[i]) * predicted[v]).sum(1).mean()
            for i in range(2)
            for v in range(len(keys))
            if v != i
        ]
        return torch.stack(losses).mean()

    @torch.no_grad()
    def _codes(self, view: int, z: Tensor, scores: Tensor) -> Tensor:
        """Return the codes of a view, [b, k], balanced together with those of its queue once that is full."""
        if self.queues and len(self.queues[view]) == self.options.queue:
            past = self.queues[view].keys().vectors @ self.prototypes.T
            scores = torch.cat([past, scores])
        return sinkhorn(scores / self.options.epsilon, self.options.sinkhorn_steps)[-len(z) :]

    def _crops(self, index: Tensor) -> list[Tensor]:
        """Return the small crops of these items, in pairs of views whose random numbers no other view has."""
        crops, left = [], self.options.num_crops
        for turn in range(1, (left + 1) // 2 + 1):
            epoch = self.options.epoch_of_views(self.epoch) + turn * self.options.epochs
            pair = self.small.views(index, epoch, self.options.seed)[:left]
            crops += [half(view) for view in pair]
            left -= len(pair)
        return crops

    @torch.no_grad()
    def after_step(self) -> None:
        """Bring the prototypes back to unit norm and push the embeddings of the batch to the queues."""
        self.prototypes.copy_(normalize(self.prototypes, dim=-1))
        for queue, keys in zip(self.queues, (self.first, self.second), strict=False):
            queue.push(keys)

    def figures(self) -> dict[str, float]:
        """Return the loss of random guessing, the logarithm of the number of prototypes."""
        return {"guess_loss": math.log(len(self.prototypes))}

    def harvest(self) -> Keys:
        """Return both views of each item as one vector of unit norm, [b, 2d]."""
        return Keys(torch.cat([self.first.vectors, self.second.vectors], dim=1).detach() * 0.5**0.5, self.first.ids)

    def set_progress(self, step: int, total: int) -> None:
        """Evaluate the schedule of the temperature before a step; the epoch decides whether prototypes are trained."""
        super().set_progress(step, total)
        self.temperature_now, self.epoch = value_of(self.temperature, step, total), step // self.steps_an_epoch


def sinkhorn(scores: Tensor, num_steps: int) -> Tensor:
    """Return assignments with equal weight for all columns, by Sinkhorn-Knopp iterations in log-space.

    Args:
        scores: Scores divided by epsilon, [n, k].
        num_steps: Number of iterations.

    Returns:
        Assignments [n, k]; each row sums to 1, each column approximately to n / k.
    """
    log_q = scores
    for _ in range(num_steps):
        log_q = log_q.log_softmax(0).log_softmax(1)  # columns of equal weight, then rows
    return log_q.exp()


def smaller(data: Items) -> Items:
    """Return the items with views of a small part of each image; other data, and views of your own, as they are."""
    if not isinstance(data, ImageData) or not isinstance(data.augment, Augment):
        return data
    augment = replace(data.augment, crop_scale=SMALL)
    return replace(data, augment=augment, make_views=augment.views)


def half(views: Any) -> Any:
    """Return images at half their size, down to 8 pixels; other inputs as they are."""
    if not isinstance(views, Tensor) or views.ndim != 4 or min(views.shape[2:]) < 16:
        return views
    return interpolate(views, size=[views.shape[2] // 2, views.shape[3] // 2], mode="area")
