"""k-means strata (Arctic-Embed): cluster the vectors, and draw each batch from one cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hardneg.batching.filling import BatchBuilder
from hardneg.batching.graph import in_range
from hardneg.batching.planners.base import Planner
from hardneg.batching.walks import torch_generator
from hardneg.core.errors import check_counts
from hardneg.search.kmeans import kmeans


@dataclass(frozen=True)
class Strata(Planner):
    """Batches drawn from the cluster of a uniform start; when it is used up, from the next closest cluster.

    Attributes:
        num_strata: Number of clusters; None: about four batches per cluster.
        num_iterations: Number of iterations of k-means.
    """

    num_strata: int | None = None
    num_iterations: int = 20
    needs: ClassVar[str] = "vectors"

    def __post_init__(self) -> None:
        if self.num_strata is not None:
            check_counts("Strata", self, "num_strata")
        check_counts("Strata", self, "num_iterations", least=0)

    def prepare(
        self, data: Any, batch_size: int, rng: np.random.Generator
    ) -> tuple[NDArray[Any], list[NDArray[Any]], NDArray[Any]]:
        """Return the cluster of each instance, the members of each cluster, and the clusters by closeness."""
        count = self.num_strata if self.num_strata is not None else max(2, len(data) // (4 * batch_size))
        count = min(count, len(data))
        centres, stratum = kmeans(in_range(data)[0].float(), count, torch_generator(rng), self.num_iterations)
        order = (centres @ centres.T - centres.square().sum(1) / 2).argsort(dim=1, descending=True).cpu().numpy()
        own = stratum.cpu().numpy()
        return own, [np.flatnonzero(own == number) for number in range(count)], order

    def fill(self, prepared: Any, builder: BatchBuilder, rng: np.random.Generator) -> None:
        """Offer members of the start's cluster, then of the closest ones."""
        own, members, order = prepared
        node = builder.start()
        if node is None:
            return
        stratum = own[node]
        for number in [stratum, *order[stratum][order[stratum] != stratum]]:
            if not builder.missing:
                return
            builder.offer(rng.permutation(members[number]))
