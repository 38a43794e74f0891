"""Supervised pairs with mined negatives: the first text of each pair against those of the batch and the mined.

Candidates carry the id of their text, so a text that also belongs to the anchor is never its negative. Mined
negatives have the source "mined" and are shared by all anchors: ``--negatives "Tilt(5, source='mined')"``. Every rank
computes the loss of all gathered rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from hardneg.core.distributed import gather
from hardneg.core.errors import ArgumentError
from hardneg.core.types import Keys
from hardneg.theory.gradients import global_loss
from hardneg.training.data.inputs import joined
from hardneg.training.data.items import Items
from hardneg.training.loop.method import Batch, EncodeInputs, Method
from hardneg.training.loop.parts import loss_for
from hardneg.training.options import PairsOptions
from hardneg.training.recipes.two_sided import TwoSided


class PairsRecipe(Method):
    """Pairs of texts, with the mined negatives of the data if it has any.

    Args:
        options: Options of the recipe.
        data: Pairs; rows with the same document are never negatives of each other.
        total: Number of steps of the run.
    """

    documents: Tensor
    """Document of each pair, [n]."""

    def __init__(self, options: PairsOptions, data: Items, total: int) -> None:
        super().__init__()
        self.encoder = data.encoder(options)
        self.loss = loss_for(options, views="pool", gather=False)
        self.both_ways = options.directions == "both"
        self.ids = options.ids
        documents = getattr(data, "documents", torch.arange(len(data))) if options.ids else torch.arange(len(data))
        self.register_buffer("documents", documents.clone(), persistent=False)
        self.over_data: TwoSided | None = None
        if options.denominator != "batch":
            if data.mined(torch.zeros(1, dtype=torch.int64, device=data.ids.device)) is not None:
                what = "pairs without mined negatives, which are no part of the data set that it sums over"
                raise ArgumentError(f"--denominator {options.denominator}", what, data.name)
            dim = options.dim if options.head == "linear" else getattr(self.encoder, "feature_dim", options.dim)
            self.over_data = TwoSided(options, self.documents, dim, self.both_ways)

    def loss_of(self, encode: EncodeInputs, batch: Batch) -> Tensor:
        """Compute the loss of the pairs of all ranks, in one or both directions.

        The mined negatives are candidates of the first direction only.
        """
        b, mined = len(batch.ids), batch.mined
        z = normalize(encode(joined([batch.views, *([] if mined is None else [mined.inputs])])).float(), dim=-1)
        documents = self.documents[batch.ids]
        first, second = (gather(Keys(part, documents, batch.labels, source="batch")) for part in (z[:b], z[b : 2 * b]))
        # Ids in the pool are those of documents; the ids of ``keys`` are positions of pairs.
        pool = [second]
        if mined is not None:
            ids = mined.ids if self.ids else torch.full_like(mined.ids, -1)
            pool.append(gather(Keys(z[2 * b :], ids, source="mined")))
        self.last = (first.vectors, second.vectors, first.ids, first.labels, pool)
        self.keys = gather(Keys(torch.cat([z[:b], z[b : 2 * b]], dim=1).detach() * 0.5**0.5, batch.ids))
        loss: Tensor
        if self.over_data is not None:
            loss = self.over_data(first.vectors, second.vectors, self.keys.ids, first.labels)
            return loss
        loss = self.loss(*self.last)
        if self.both_ways:
            loss = (loss + self.loss(second.vectors, first.vectors, second.ids, second.labels, [first])) / 2.0
        return loss

    def recorded(self, loss: Tensor) -> Tensor:
        """Return the loss in nats, for a surrogate the real loss of the batch."""
        return loss if self.over_data is None else self.over_data.recorded(loss)

    def global_loss(self, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
        """Return the exact loss over all pairs, from the first to the second texts; mined texts are not included."""
        return global_loss(z1, z2, self.loss.temperature_now(), "cross", self.documents[index])
