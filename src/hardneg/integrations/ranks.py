"""What the losses of several libraries need when the batch is spread over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hardneg.core.distributed import gather
from hardneg.core.tensors import constant
from hardneg.core.types import Keys

_other_rank = 1 << 32


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def own_rank() -> int:
    return dist.get_rank() if num_ranks() > 1 else 0


def of_all_ranks(vectors: Tensor, ids: Tensor) -> Keys:
    """The rows of all ranks as candidates, with gradient."""
    return gather(Keys(vectors, ids, source="batch"))


def distinct_ids(rows: Tensor) -> Tensor:
    """Ids that no other row of any rank has."""
    first = own_rank() * _other_rank
    return constant(torch.arange, first, first + len(rows), device=rows.device)
