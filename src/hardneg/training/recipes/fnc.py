"""False-negative cancellation (Huynh et al. 2022): candidates that resemble any view of an image stop being negatives.

``--num-support`` adds further views of each image, its support set. The candidates closest to any view of the image,
``--num-found`` of them at most and above ``--threshold``, are attracted like its own views or left out
(``--found remove``). All views are anchors, as in the authors' code. Every rank computes the loss of all gathered rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from hardneg import papers
from hardneg.core.distributed import gather
from hardneg.core.types import Keys
from hardneg.training.data.inputs import joined
from hardneg.training.data.items import Items
from hardneg.training.loop.method import Batch, EncodeInputs
from hardneg.training.options import FNCOptions
from hardneg.training.recipes.simclr import SimCLR


class FNC(SimCLR):
    """SimCLR with false negatives found by a support set.

    Args:
        options: Options of the recipe.
        data: The training items, which also make the views of the support set.
        total: Number of steps of the run.
    """

    def __init__(self, options: FNCOptions, data: Items, total: int) -> None:
        super().__init__(options, data, total)  # its loss only diagnoses the embeddings
        self.options, self.data = options, data
        self.steps_an_epoch, self.epoch = max(1, total // options.epochs), 0
        attract, temperature = options.found == "attract", float(options.temperature)
        self.cancelled = papers.fnc(temperature, options.num_found, options.threshold, attract)

    def loss_of(self, encode: EncodeInputs, batch: Batch) -> Tensor:
        """Encode both views and the support set, and compute the loss of all views of all ranks."""
        inputs = joined([batch.views, *self._support(batch.ids)])
        views = torch.split(normalize(encode(inputs).float(), dim=-1), len(batch.ids))  # [b, d] each
        self.first, self.second = (Keys(z, batch.ids, batch.labels) for z in views[:2])
        self.last = self.first.vectors, self.second.vectors, batch.ids, batch.labels
        keys = [gather(Keys(z, batch.ids, batch.labels)) for z in views]
        loss: Tensor
        loss, self.found = self.cancelled([one.vectors for one in keys], keys[0].ids)
        return loss

    def _support(self, index: Tensor) -> list[Any]:
        """Return the support set of these items, in pairs of views whose random numbers no other view has."""
        views: list[Any] = []
        for turn in range(1, (self.options.num_support + 1) // 2 + 1):
            epoch = self.options.epoch_of_views(self.epoch) + turn * self.options.epochs
            views += self.data.views(index, epoch, self.options.seed)
        return views[: self.options.num_support]

    def figures(self) -> dict[str, float]:
        """Return how many candidates of an anchor were found to be false negatives, on average."""
        return {"found": float(self.found.sum(1).double().mean())}

    def set_progress(self, step: int, total: int) -> None:
        """Set the epoch, which selects the views of the support set."""
        super().set_progress(step, total)
        self.epoch = step // self.steps_an_epoch
