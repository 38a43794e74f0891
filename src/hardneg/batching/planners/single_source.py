"""Single-source batches: all instances of a batch have the same value in a column (a data set, a language, a task).

This is common when training on many data sets (Nomic, Arctic, Qwen3): otherwise the source alone reveals the positive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from torch import Tensor

from hardneg.batching.filling import BatchBuilder
from hardneg.batching.planners.base import Planner, num_instances_of
from hardneg.core.errors import argument_error


@dataclass(frozen=True, eq=False)
class SingleSource(Planner):
    """Batches from one source each, which is drawn in proportion to its number of free instances.

    A source that cannot fill a batch comes last: these remainders, fewer than a batch per source, share the last
    batches of the epoch, since the number of batches is that of a plain epoch.

    Attributes:
        column: Source of each instance, shape [n].
    """

    column: Annotated[Tensor, "n"]

    def prepare(self, data: Any, batch_size: int, rng: np.random.Generator) -> list[Any]:
        """Return the members of each source."""
        n = num_instances_of(data)
        if len(self.column) != n:
            raise argument_error("SingleSource", f"a column of {n} instances", "len(column)", len(self.column))
        values, own = np.unique(self.column.cpu().numpy(), return_inverse=True)
        return [np.flatnonzero(own == number) for number in range(len(values))]

    def fill(self, prepared: Any, builder: BatchBuilder, rng: np.random.Generator) -> None:
        """Offer the free members of a random source that can fill the batch."""
        free = [members[builder.taken[members] == 0] for members in prepared]
        count = np.array([len(members) for members in free])
        able = np.where(count >= builder.missing, count, 0)
        if able.sum():
            builder.offer(rng.permutation(free[rng.choice(len(free), p=able / able.sum())]))
