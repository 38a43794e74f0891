"""Local Aggregation (Zhuang et al. 2019): the entries of an image's cluster against all entries close to it.

The background is the set that ``negatives`` selects from the bank, the image's own entry included. Close neighbours
are the members of its cluster in any of several k-means runs, and the loss is -log(close / background). Until the
first clustering each image is its own cluster, as in instance discrimination, with which the authors start too.
"""

from __future__ import annotations

from torch import Tensor

from hardneg import papers
from hardneg.training.data.items import Items
from hardneg.training.options import LocalAggregationOptions
from hardneg.training.recipes.instance import BankMethod, ViewList

UNIFORM_TEMPERATURE = 1e6
"""A temperature at which all candidates have the same weight."""


class LocalAggregation(BankMethod):
    """Close neighbours, found by clustering the bank, against background neighbours.

    Args:
        options: Options of the recipe; without ``clusters`` there is one per 40 images.
        data: The training items.
        total: Number of steps of the run.
    """

    def __init__(self, options: LocalAggregationOptions, data: Items, total: int) -> None:
        super().__init__(options, data, total, num_clusters=options.clusters or max(2, len(data) // 40))
        self.encoder, self.pooling = data.encoder(options), options.pooling

    def loss_of_views(self, views: ViewList) -> Tensor:
        """Return the loss of the first views against the bank."""
        return self._loss(views[0], self.temperature)

    def figures(self) -> dict[str, float]:
        """Return the loss of random guessing: log(background / close), counting neighbours (0 for pooling="mean")."""
        return {"guess_loss": float(self._loss(self.split(self.keys.vectors)[0], UNIFORM_TEMPERATURE))}

    def _loss(self, z: Tensor, temperature: float) -> Tensor:
        """Return the loss of vectors [b, d] against the bank."""
        loss = papers.local_aggregation(temperature, background=self.negatives, pooling=self.pooling)
        return loss(z, self.keys.ids, self.banks[0], self.clusters)
