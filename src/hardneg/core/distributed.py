"""Many ranks as one: gather the keys, then every rank computes the same loss and the same state.

The backward pass adds the gradients that all ranks have for a row. With the averaging of gradients that
DistributedDataParallel does, a loss of all gathered anchors on every rank (what the losses with state need), or a mean
over each rank's own, equally many anchors against all gathered candidates, gives the gradient of one process with the
whole batch. Nothing else in the library knows of ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hardneg.core.types import Keys


def gather(keys: Keys) -> Keys:
    """The keys of all ranks, in the order of the ranks, with gradient to every row; any number of rows per rank.

    Without torch.distributed, or with one rank, the keys themselves.

    >>> keys = Keys(torch.eye(2))
    >>> gather(keys) is keys
    True
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return keys
    sizes = _sizes(len(keys.vectors), keys.vectors.device)
    ids, labels, clusters = (
        None if tag is None else _gather_rows(tag, sizes) for tag in (keys.ids, keys.labels, keys.clusters)
    )
    vectors: Tensor = _GatherRows.apply(keys.vectors, sizes)  # type: ignore[no-untyped-call]
    return replace(keys, vectors=vectors, ids=ids, labels=labels, clusters=clusters)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int]) -> Tensor:
        ctx.sizes = sizes
        return _gather_rows(rows, sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total)
        start = sum(ctx.sizes[: dist.get_rank()])
        return total[start : start + ctx.sizes[dist.get_rank()]], None


def _gather_rows(rows: Tensor, sizes: list[int]) -> Tensor:
    """Padded to the longest, because not every backend gathers different sizes."""
    padded = rows.new_zeros(max(sizes), *rows.shape[1:])
    padded[: len(rows)] = rows.detach()
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _sizes(size: int, device: torch.device) -> list[int]:
    mine = torch.tensor([size], device=device)
    sizes = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, mine)
    return [int(value) for value in sizes]
