"""The negative cache (Lindgren et al. 2021): negatives drawn from a cache of old embeddings and encoded again.

Each first view draws from the softmax over the cache by Gumbel-max and is repelled by the current embeddings of the
items that it drew. The value of this surrogate has no meaning, so the recorded loss is the real one against the cache.
After a step its second views replace the oldest entries, and a share of the oldest is encoded again. Every rank
computes the loss of all gathered rows; drawn items are encoded once, divided among the ranks.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from hardneg.core.diagnose import Diagnosis
from hardneg.core.distributed import spread
from hardneg.core.errors import DataChanged
from hardneg.core.keyed import generator_at
from hardneg.core.types import Keys
from hardneg.state.cache import Cache, cache_loss
from hardneg.training.data.items import Items
from hardneg.training.loop.method import Batch, EncodeInputs
from hardneg.training.options import NegativeCacheOptions
from hardneg.training.recipes.instance import encode_all
from hardneg.training.recipes.simclr import SimCLR


class NegativeCache(SimCLR):
    """First views against negatives drawn from a cache of embeddings."""

    everywhere: ClassVar[bool] = True
    arguments: ClassVar[dict[str, Any]] = {"views": "pool", "gather": False}

    def __init__(self, options: NegativeCacheOptions, data: Items, total: int) -> None:
        super().__init__(options, data, total)
        self.options, self.data, self.temperature = options, data, float(options.temperature)
        self.cache = Cache(min(options.cache, len(data)), options.dim, seed=options.seed)
        self.steps_an_epoch, self.epoch, self.begun = max(1, total // options.epochs), 0, False

    def loss_of(self, encode: EncodeInputs, batch: Batch) -> Tensor:
        """Fill the cache in the first step, then compute the loss of the batch."""
        # A function, since a module would be registered a second time.
        self.encode: EncodeInputs = lambda inputs: encode(inputs)
        if not self.begun:
            self._begin(encode)
        return super().loss_of(encode, batch)

    def _begin(self, encode: EncodeInputs) -> None:
        """Fill an empty cache; raise if that of a checkpoint refers to items which the data no longer has."""
        self.begun, number = True, len(self.data)
        if not len(self.cache):
            some = torch.randperm(number, generator=generator_at(self.options.seed, 0))
            encode_all(encode, self.data, self.options, some[: self.cache.capacity], self._push, view=1)
        elif (last := int(self.cache.ids.max())) >= number:
            what, fix = f"a cache of the {number} {self.data.noun}s of the data", "begin a new run in another --out"
            raise DataChanged("train", what, f"position {last}", fix)

    def loss_of_views(self, z1: Tensor, z2: Tensor, ids: Tensor | None, labels: Tensor | None) -> Tensor:
        """Return the surrogate loss of first views ``z1`` with second views ``z2`` as positives, each [b, d]."""
        self.found = cache_loss(Keys(z1, ids), z2, self.cache, self.encoded, self.temperature, k=self.options.num_draws)
        return self.found.losses.mean()

    def encoded(self, items: Tensor) -> Tensor:
        """Return unit vectors of the second views of these items under the current encoder, [len(items), d]."""

        def encode(part: Tensor) -> Tensor:
            return normalize(self.encode(self.data.views(part, self.epoch, self.options.seed)[1]).float(), dim=-1)

        return spread(encode, items)

    def _push(self, keys: Keys) -> None:
        self.cache.push(keys.changed(vectors=normalize(keys.vectors, dim=-1)))

    @torch.no_grad()
    def after_step(self) -> None:
        """Push the second views of the batch into the cache and encode its oldest entries again."""
        self._push(self.second)
        self.cache.refresh(self.encoded, self.options.cache_refresh)

    def recorded(self, loss: Tensor) -> Tensor:
        """Return the mean of the real loss against the whole cache instead of the surrogate."""
        return self.found.real.mean()

    def diagnose(self, bins: int = 0) -> Diagnosis:
        """Diagnose the whole cache with equal weights: the softmax that the draws estimate."""
        held, labels = self.cache.keys(), self.data.labels
        pool = held if labels is None else held.changed(labels=labels[held.ids])
        found: Diagnosis = self.loss.diagnose(*self.last, pool, bins=bins)
        return found

    def set_progress(self, step: int, total: int) -> None:
        """Evaluate the schedules before a step; the epoch selects the views of drawn items."""
        super().set_progress(step, total)
        self.epoch = self.options.epoch_of_views(step // self.steps_an_epoch)
