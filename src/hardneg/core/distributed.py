"""Distributed training: make several ranks behave like one process; no other module deals with ranks.

The backward pass of a gather adds the gradients that all ranks have for a row. Together with DistributedDataParallel,
which averages gradients, both of these give the value and the gradient of one process with the whole batch:

    gather                       a loss over all gathered rows on every rank: required by losses with state
    gathered, mean_over_ranks    the loss of each rank's own anchors against the candidates of all ranks

The second does 1 / ranks of the work: a rank compares its b anchors with all n candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hardneg.core.errors import ArgumentError
from hardneg.core.pairing import Pairing
from hardneg.core.types import Keys
from hardneg.core.views import NUMBERED

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
"""Dtypes that vectors and tags may have; a dtype is sent to other ranks as its index."""


def several_ranks() -> bool:
    """Return True if torch.distributed is initialised with more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def gather(keys: Keys) -> Keys:
    """Gather the keys of all ranks in the order of the ranks, with gradient to every row.

    Ranks may have different numbers of rows. Without torch.distributed, or with one rank, returns ``keys`` itself.

    Raises:
        ArgumentError: On every rank, if features, tags or dtypes differ between ranks.

    Example:
        >>> keys = Keys(torch.eye(2))
        >>> gather(keys) is keys
        True
    """
    return keys.mapped(_Ranks(_sizes(keys)).rows) if several_ranks() else keys


def gathered(pairing: Pairing, *, candidates: bool = True, anchors: bool = False) -> Pairing:
    """Replace the candidates of a pairing with those of all ranks.

    Args:
        pairing: Anchors and candidates of this rank.
        candidates: Gather the shared candidates. False keeps them, for a queue that is identical on all ranks.
        anchors: Gather the anchors and their positives as well.
    """
    if not several_ranks():
        return pairing
    own = pairing.candidates[0] is pairing.anchors
    positives = pairing.own()
    ranks = _Ranks(_sizes(pairing.anchors), views=1 + positives.vectors.shape[1] if own else 1)
    if min(ranks.sizes) == 0:
        raise ArgumentError("gather", "at least one row on every rank", f"rows={ranks.sizes}")

    def pool(keys: Keys) -> Keys:
        if keys.private:
            return keys.mapped(ranks.rows) if anchors else keys
        apart = _apart(keys, ranks.begin, pairing.ids_given)
        return apart.mapped((ranks if own else _Ranks(_sizes(keys))).rows) if candidates else keys

    pools = tuple(pool(keys) for keys in pairing.candidates)
    mine = _apart(pairing.anchors, ranks.begin, pairing.ids_given)
    changes: dict[str, Any] = {"anchors": mine, "positives": positives, "candidates": pools}
    if anchors:
        changes["anchors"] = pools[0] if own else mine.mapped(ranks.rows)
        changes["positives"] = positives.mapped(ranks.rows)
        if pairing.positive_mask is not None:
            changes["positive_mask"] = ranks.rows(pairing.positive_mask)
        if isinstance(pairing.temperature, Tensor) and pairing.temperature.ndim == 2:
            changes["temperature"] = ranks.rows(pairing.temperature)
    if pairing.guide is not None:
        changes["guide"] = gathered(pairing.guide, candidates=candidates, anchors=anchors)
    return pairing.changed(num_views=0, **changes)


def of_first_rank(tensor: Tensor) -> Tensor:
    """Overwrite the tensor with that of the first rank, for values that rounding may make different on each rank."""
    if several_ranks():
        dist.broadcast(tensor, src=0)
    return tensor


def spread(encode: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Compute ``encode(rows)`` by letting each rank encode a part, and gather the result on every rank.

    Args:
        encode: Function that returns one vector for each row.
        rows: The rows, identical on all ranks.
    """
    if not several_ranks() or len(rows) < dist.get_world_size():
        return encode(rows)
    return gather(Keys(encode(rows.tensor_split(dist.get_world_size())[dist.get_rank()]))).vectors


def mean_over_ranks(mean: Tensor, number: int) -> Tensor:
    """Average over all ranks, weighted by the number of values on each.

    The value is the same on all ranks. The gradient is that of this rank's part times the number of ranks, because
    DistributedDataParallel divides by that number.

    Args:
        mean: Mean of this rank's values.
        number: Number of this rank's values.
    """
    if not several_ranks():
        return mean
    sums = torch.stack([mean.detach().double() * number, torch.full_like(mean, number, dtype=torch.float64)])
    dist.all_reduce(sums)
    own = mean * (number * dist.get_world_size() / sums[1]).to(mean.dtype)
    return own + ((sums[0] / sums[1]).to(mean.dtype) - own).detach()


@dataclass(frozen=True)
class _Ranks:
    """Number of rows on each rank, where the rows consist of ``views`` views, one after the other."""

    sizes: list[int]
    views: int = 1

    @property
    def begin(self) -> int:
        return sum(self.sizes[: dist.get_rank()])

    def rows(self, rows: Tensor) -> Tensor:
        """Gather rows in the order that one process would have: the first view of all ranks, then the second."""
        every: Tensor = _GatherRows.apply(rows, self)  # type: ignore[no-untyped-call]
        if self.views == 1:
            return every
        parts = [part.chunk(self.views) for part in every.split(self.sizes)]  # type: ignore[no-untyped-call]
        return torch.cat([part[view] for view in range(self.views) for part in parts])


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: _Ranks) -> Tensor:
        """Pad to the longest rank before gathering, because not every backend gathers different sizes."""
        ctx.ranks = ranks
        padded = rows.new_zeros(max(ranks.sizes), *rows.shape[1:])
        padded[: len(rows)] = rows.detach()
        parts = [torch.empty_like(padded) for _ in ranks.sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, ranks.sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total)
        begin = ctx.ranks.begin
        return total[begin : begin + ctx.ranks.sizes[dist.get_rank()]], None


def _sizes(keys: Keys) -> list[int]:
    """Return the number of rows of each rank.

    Raises on all ranks if anything else differs between them, since the collectives would hang.
    """
    tags = (keys.ids, keys.labels, keys.clusters)
    shapes = [len(keys.vectors), keys.dim, *(0 if tag is None else tag.ndim for tag in tags)]
    kinds = [_number_of(None if one is None else one.dtype) for one in (keys.vectors, *tags)]
    mine = torch.tensor([*shapes, *kinds], device=keys.vectors.device)
    of_ranks = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, mine)
    (sizes, *others) = zip(*(each.tolist() for each in of_ranks), strict=True)
    names = ("features", "ids", "labels", "clusters")
    for name, values in zip(names, others[:4], strict=True):
        if len(set(values)) > 1:
            got = f"{values}" if name == "features" else f"{[bool(value) for value in values]}"
            raise ArgumentError("gather", f"the same {name} on every rank", f"{name}={got}", "give all ranks the same")
    for name, values in zip(("vectors", *names[1:]), others[4:], strict=True):
        if len(set(values)) > 1:
            got = ", ".join(str((*_DTYPES, "another")[value]).removeprefix("torch.") for value in values)
            fix = "give all ranks the same precision, for example by autocast on every rank"
            raise ArgumentError("gather", f"the same dtype of {name} on every rank", got, fix)
    return list(sizes)


def _number_of(dtype: torch.dtype | None) -> int:
    """Return the index of a dtype, which is the same on every rank."""
    return _DTYPES.index(dtype) if dtype in _DTYPES else len(_DTYPES)


def _apart(keys: Keys, begin: int, given: bool) -> Keys:
    """Give rows that were numbered on each rank ids that no other rank has."""
    if keys.ids is None:
        return keys
    numbered = keys.ids >= NUMBERED if given else torch.ones_like(keys.ids, dtype=torch.bool)
    return keys.changed(ids=torch.where(numbered, keys.ids + begin, keys.ids))
