"""Helpers for losses whose batch is distributed over ranks, shared by the adapters.

Ids decide which candidates are never negatives, so rows without ids get numbers that are unique over all ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hardneg.core.distributed import gather
from hardneg.core.tensors import constant
from hardneg.core.types import Keys

_ids_per_rank = 1 << 32


def num_ranks() -> int:
    """Return the number of ranks; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def own_rank() -> int:
    """Return the number of this rank; 0 without torch.distributed."""
    return dist.get_rank() if num_ranks() > 1 else 0


def of_all_ranks(vectors: Tensor, ids: Tensor) -> Keys:
    """Gather the rows of all ranks as candidates, with gradient.

    Args:
        vectors: Vectors of this rank, [b, d].
        ids: Their ids, [b], unique over all ranks unless two rows must never be negatives of each other.

    Returns:
        Candidates of the source "batch", in the order of the ranks.
    """
    return gather(Keys(vectors, ids, source="batch"))


def distinct_ids(rows: Tensor) -> Tensor:
    """Return ids, [b], for the ``b`` rows of this rank that no other row of any rank has."""
    first = own_rank() * _ids_per_rank
    return constant(torch.arange, first, first + len(rows), device=rows.device)
