"""Single-source batches: all instances of a batch share a column's value (a data set, a language, a task).

Common practice when training on many data sets (Nomic, Arctic, Qwen3): otherwise the source alone gives the positive
away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from torch import Tensor

from hardneg.batching.filling import BatchFiller
from hardneg.batching.planners.base import Planner, num_instances_of
from hardneg.core.errors import argument_error


@dataclass(frozen=True, eq=False)
class SingleSource(Planner):
    """A batch is a uniform draw from one source, chosen by how many of its instances are free.

    A source that cannot fill a batch alone is left for last: those remainders, fewer than a batch per source, share
    the epoch's last batches, since the number of batches is that of a plain epoch.
    """

    column: Annotated[Tensor, "n"]

    def prepare(self, data: Any, batch_size: int, rng: np.random.Generator) -> list[Any]:
        n = num_instances_of(data)
        if len(self.column) != n:
            raise argument_error("SingleSource", f"a column of {n} instances", "len(column)", len(self.column))
        values, own = np.unique(self.column.cpu().numpy(), return_inverse=True)
        return [np.flatnonzero(own == number) for number in range(len(values))]

    def fill(self, prepared: Any, filler: BatchFiller, rng: np.random.Generator) -> None:
        free = [members[filler.taken[members] == 0] for members in prepared]
        count = np.array([len(members) for members in free])
        able = np.where(count >= filler.missing, count, 0)
        if able.sum():
            filler.offer(rng.permutation(free[rng.choice(len(free), p=able / able.sum())]))
