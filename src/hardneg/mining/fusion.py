"""Several retrievers as one ranking: reciprocal-rank fusion, the order of one source, and quotas.

Each retriever gives its best ``candidates`` of a query, positives and the query itself taken out first; ranks count
from 1 in what is left. The candidates are the union of these lists.

- Fused order: by sum over retrievers of 1 / (60 + rank), from the largest; equal ones by row of the corpus.
- ``From(name)`` in the expression keeps what that retriever found, whoever else did, in that retriever's order.
- Quotas ((name, number), ...): the first ``number`` of the support in each retriever's own order, retriever by
  retriever; what was taken before counts for the first. If some are short, the others fill up to k, in the same order.

The expression reads similarities as ever: fusion decides only in which order ``draw="top"`` takes what it leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, spelled, written
from hardneg.core.types import NEVER
from hardneg.negatives import Negatives

CONSTANT = 60  # Cormack et al. 2009
RankedLists = Sequence[Annotated[Tensor, "b c"]]
Quotas = tuple[tuple[Annotated[Tensor, "b m"], int], ...]


def named_source(negatives: Negatives, retrievers: Sequence[str]) -> int | None:
    """Which retriever ``From`` names; None without one."""
    names = {factor.only_source for factor in negatives.factors if factor.only_source is not None}
    if not names:
        return None
    if len(names) > 1:
        raise ArgumentError("mine", "one source in the expression", " and ".join(sorted(names)), "use quotas")
    return source_number(next(iter(names)), retrievers)


def source_number(name: str, retrievers: Sequence[str]) -> int:
    if name not in retrievers:
        fix = f"add {spelled('mine', 'bm25')} or {spelled('mine', 'runs')}, or leave it out"
        raise ArgumentError("mine", f"a source among {', '.join(retrievers)}", repr(name), fix)
    return list(retrievers).index(name)


def check_quotas(quotas: Sequence[tuple[str, int]], k: int, draw: str, retrievers: Sequence[str]) -> None:
    """Raises for quotas of unknown sources, of more than k in all, or beside a draw."""
    for name, _ in quotas:
        source_number(name, retrievers)
    total = sum(number for _, number in quotas)
    if total > k:
        raise ArgumentError("mine", f"quotas of at most {written('mine', 'k', k)} in all", str(total))
    if quotas and draw != "top":
        raise ArgumentError("mine", "draw 'top' with quotas", written("mine", "draw", draw))


def compacted(rows: Annotated[Tensor, "b c"], size: int) -> Annotated[Tensor, "b c"]:
    """The rows that are left, in their order and without gaps, ``size`` at most; -1 behind them."""
    first = torch.arange(rows.shape[1], 0, -1, device=rows.device).masked_fill(rows < 0, 0)
    best = first.topk(min(size, rows.shape[1]), dim=1)  # 10 times as fast as a stable sort
    return rows.gather(1, best.indices).masked_fill(best.values == 0, -1)


def ranks_in(found: Annotated[Tensor, "b c"], rows: Annotated[Tensor, "b m"]) -> Annotated[Tensor, "b m"]:
    """The rank of each candidate in a retriever's list, from 1; 0 where it is not there."""
    if not found.shape[1]:
        return torch.zeros_like(rows)
    ordered, order = found.sort(dim=1, stable=True)
    place = torch.searchsorted(ordered.contiguous(), rows.contiguous()).clamp(max=found.shape[1] - 1)
    here = (ordered.gather(1, place) == rows) & (rows >= 0)
    return torch.where(here, order.gather(1, place) + 1, 0)


def fused_key(lists: RankedLists, rows: Annotated[Tensor, "b m"]) -> Annotated[Tensor, "b m"]:
    """The larger, the earlier a candidate is taken: no two of a query are equal; NEVER where no list has it."""
    total = torch.zeros(rows.shape, dtype=torch.float64, device=rows.device)
    for found in lists:
        rank = ranks_in(found, rows)
        total = total + torch.where(rank > 0, 1.0 / (CONSTANT + rank), 0.0)
    by_row = rows.argsort(dim=1, stable=True)
    best = by_row.gather(1, total.gather(1, by_row).argsort(dim=1, descending=True, stable=True))
    place = torch.empty_like(best).scatter_(1, best, torch.arange(rows.shape[1], device=rows.device).expand_as(best))
    return (-place).double().masked_fill(total == 0, NEVER)


def by_quotas(support: Annotated[Tensor, "b m"], quotas: Quotas, wanted: int) -> Annotated[Tensor, "b wanted"]:
    """Columns of the support in the order in which quotas take them, -1 behind the last."""
    last = torch.iinfo(torch.long).max
    place = torch.full(support.shape, last, device=support.device)
    first = 0
    for keys_and_numbers in (quotas, [(key, support.shape[1]) for key, _ in quotas]):
        for key, number in keys_and_numbers:
            left = key.masked_fill(~support | (place < last), NEVER)
            rank = left.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
            taken = (rank < number) & (left != NEVER)
            place = torch.where(taken, first + rank, place)
            first += number
    best = place.topk(min(wanted, place.shape[1]), dim=1, largest=False, sorted=True)
    return torch.where(best.values < last, best.indices, -1)
