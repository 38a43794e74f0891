"""Local Aggregation (Zhuang et al. 2019): the entries of an image's cluster against all entries close to it.

The background is what ``negatives`` leave of the bank, the image's own entry among it; those of its cluster in any of
several k-means runs are close, and -log(close / background) is the loss. Until the first clusters each image is its
own: instance discrimination, from which the authors start, too.
"""

from __future__ import annotations

from torch import Tensor

from hardneg import papers
from hardneg.training.data.items import Items
from hardneg.training.options import LocalAggregationOptions
from hardneg.training.recipes.instance import BankMethod, ViewList

ALIKE = 1e6
"""A temperature at which all scores are alike."""


class LocalAggregation(BankMethod):
    def __init__(self, options: LocalAggregationOptions, data: Items, total: int) -> None:
        super().__init__(options, data, total, num_clusters=options.clusters or max(2, len(data) // 40))
        self.encoder = data.encoder(options)

    def of_views(self, views: ViewList) -> Tensor:
        return self._loss(views[0], self.temperature)

    def figures(self) -> dict[str, float]:
        """The loss of a guess is log(background / close), by their numbers."""
        return {"guess_loss": float(self._loss(self.split(self.keys.vectors)[0], ALIKE))}

    def _loss(self, z: Tensor, temperature: float) -> Tensor:
        loss = papers.local_aggregation(temperature, background=self.negatives)
        return loss(z, self.keys.ids, self.banks[0], self.clusters)
