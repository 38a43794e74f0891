"""Quick-thoughts (Logeswaran and Lee 2018): a sentence predicts its neighbours among the sentences of the batch.

Batches are consecutive sentences, and scores are raw dot products of two encoders. The sentence itself stays in the
softmax with a logit of 0, as in the authors' code. The features are those of both encoders; ``--encoder gru`` is the
paper's. Every rank computes the loss of all gathered rows, since neighbours may be on different ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hardneg.core.diagnose import Diagnosis, diagnose
from hardneg.core.distributed import gather
from hardneg.core.errors import ArgumentError
from hardneg.core.objectives import reduce
from hardneg.core.scoring import from_matrix
from hardneg.core.tensors import widened
from hardneg.core.types import Keys, Scores
from hardneg.training.data.inputs import Sided, TwoTowers
from hardneg.training.data.items import Items
from hardneg.training.loop.method import Batch, EncodeInputs, Method
from hardneg.training.loop.parts import loss_for
from hardneg.training.options import QuickThoughtsOptions


class QuickThoughts(Method):
    """Sentences against their neighbours in the text.

    Raises:
        ArgumentError: If the data is not ordered text, or no two sentences are neighbours.
    """

    places: Tensor
    """Position of each sentence in the text, [n]."""

    def __init__(self, options: QuickThoughtsOptions, data: Items, total: int) -> None:
        super().__init__()
        places = getattr(data, "places", None)
        if places is None:
            raise ArgumentError("quick-thoughts", "sentences in their order", f"data={data.name!r}", "use text:FILE")
        if not bool((places.sort().values.diff() <= options.context_size).any()):
            got = f"data={data.name!r}, in which no two sentences are neighbours"
            raise ArgumentError("quick-thoughts", "consecutive lines", got, "remove the empty lines between them")
        self.register_buffer("places", places.clone(), persistent=False)
        self.two = options.encoders == "two"
        first = data.encoder(options)
        self.encoder = TwoTowers(first, data.encoder(_of_second(options))) if self.two else first
        self.context_size = options.context_size
        self.loss = loss_for(options, positives_in_denominator="all")
        self.negatives = self.loss.negatives

    @classmethod
    def rebuilt(cls, kind: type[Items], record: dict[str, Any], options: QuickThoughtsOptions) -> nn.Module:
        """Build the encoder or both encoders of a finished run with fresh weights."""
        first = kind.rebuilt(record, options)
        return TwoTowers(first, kind.rebuilt(record, _of_second(options))) if options.encoders == "two" else first

    def loss_of(self, encode: EncodeInputs, batch: Batch) -> Tensor:
        """Encode both sides of the batch and compute the loss of all gathered sentences."""
        u, v = encode(Sided(batch.first, batch.second) if self.two else batch.views).float().chunk(2)
        first, second = (gather(Keys(part, batch.ids)) for part in (u, v))
        self.first, self.second = first, second
        similarity, near = self._matrix()
        # Dot products are at least -|u| |v|, where cosines are at least -1.
        lengths = [widened(side.vectors.detach()).norm(dim=1, keepdim=True) for side in (first, second)]  # [b, 1]
        lowest = -lengths[0] * lengths[1].max()
        return reduce(self.loss.of_matrix(similarity, near, lowest=lowest), from_matrix(similarity, near))

    def _matrix(self) -> tuple[Tensor, Tensor]:
        """Return dot products [b, b], 0 for the sentence itself, and the mask of neighbours [b, b]."""
        u, v, ids = widened(self.first.vectors), widened(self.second.vectors), self.first.ids
        assert ids is not None
        places = self.places[ids]
        distance = (places[:, None] - places).abs()
        with torch.autocast(u.device.type, enabled=False):
            similarity = (u @ v.T).masked_fill(distance == 0, 0.0)
        return similarity, (distance > 0) & (distance <= self.context_size)

    def diagnose(self, bins: int = 0) -> Diagnosis:
        """Diagnose the negatives: all sentences of the batch that are not neighbours."""
        scores: Scores = from_matrix(*self._matrix(), self.loss.temperature_now())
        return diagnose(scores, self.negatives.log_weights(scores), bins=bins)

    def harvest(self) -> Keys:
        """Return the vectors of both encoders as one vector of unit norm."""
        vectors = torch.cat([self.first.vectors, self.second.vectors], dim=1).detach()
        return Keys(torch.nn.functional.normalize(vectors, dim=-1), self.first.ids)

    def set_progress(self, step: int, total: int) -> None:
        """Evaluate the schedules of the loss and of its negatives before a step."""
        super().set_progress(step, total)
        self.negatives = self.loss.negatives.at(step, total)


def _of_second(options: QuickThoughtsOptions) -> QuickThoughtsOptions:
    """Return the options of the second encoder: another seed, so that the two start with different weights."""
    return replace(options, seed=(options.seed + 2**30) % 2**31)
