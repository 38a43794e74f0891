"""Cluster assignments of all instances, recomputed on request.

They are read by the distributions ``SameCluster`` and ``OtherCluster`` and by ``papers.local_aggregation``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, argument_error
from hardneg.core.types import Keys
from hardneg.search.kmeans import kmeans
from hardneg.state.pools import Bank
from hardneg.state.stateful import Stateful, check_count, check_ids


class Clusters(Stateful):
    """The cluster of each instance in one or several clusterings, [num_instances, num_runs].

    Before the first refresh every instance is its own cluster, as in the first batches of Local Aggregation.

    Args:
        num_instances: Size of the data set.
        num_runs: Number of clusterings, from different random rows.
        seed: Seed of k-means.

    Example:
        >>> clusters = Clusters(num_instances=4)
        >>> clusters.refresh(Keys(torch.tensor([[0.0], [0.1], [5.0]]), torch.tensor([3, 0, 1])), num_clusters=2)
        >>> same = clusters.of(torch.tensor([0, 1, 2, 3])).squeeze(1)
        >>> bool(same[0] == same[3]), bool(same[0] == same[1]), bool(same[0] == same[2])
        (True, False, False)
    """

    assignments: Tensor
    shown: ClassVar = ("num_instances", "num_runs")

    def __init__(self, num_instances: int, num_runs: int = 1, *, seed: int = 0) -> None:
        super().__init__(seed)
        num_instances = check_count("Clusters", "num_instances", num_instances)
        num_runs = check_count("Clusters", "num_runs", num_runs)
        self.num_instances, self.num_runs = num_instances, num_runs
        # Negative numbers are the instances that were never clustered: each its own cluster.
        own = -1 - torch.arange(num_instances)
        self.register_buffer("assignments", own[:, None].repeat(1, num_runs))

    def of(self, ids: Annotated[Tensor, "n | b k"]) -> Annotated[Tensor, "n r | b k r"]:
        """Return the clusters of these instances, with one column per clustering.

        Raises:
            ArgumentError: If an id is negative or too large.
        """
        check_ids("Clusters", ids.flatten(), self.num_instances)
        if ids.numel() and int(ids.min()) < 0:
            raise argument_error("Clusters.of", "known ids; id -1 has no cluster", "ids.min()", int(ids.min()))
        return self.assignments[ids]

    def tag(self, keys: Keys) -> Keys:
        """Return the same keys with their clusters."""
        if keys.ids is None:
            raise ArgumentError("Clusters.tag", "keys with ids", "ids=None")
        return replace(keys, clusters=self.of(keys.ids))

    @torch.no_grad()
    def refresh(self, store: Bank | Keys, num_clusters: int, num_iterations: int = 100) -> None:
        """Cluster the vectors again by k-means, once per clustering.

        Args:
            store: A bank, or keys with ids; instances without a vector keep their clusters.
            num_clusters: Number of clusters, at most the number of vectors.
            num_iterations: Largest number of iterations.
        """
        keys = store.keys() if isinstance(store, Bank) else store
        ids = check_ids("Clusters.refresh", keys.ids, self.num_instances)
        if num_clusters < 1 or num_clusters > len(keys):
            raise argument_error("Clusters.refresh", f"num_clusters in [1, {len(keys)}]", "num_clusters", num_clusters)
        for run in range(self.num_runs):
            found = kmeans(keys.vectors.float(), num_clusters, self.generator(stream=run), num_iterations)[1]
            self.assignments[ids, run] = found.to(self.assignments)
        self.step += 1
