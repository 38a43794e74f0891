"""The nearest rows of a corpus by similarity in float64, whatever the blocks and the precision of their products.

A matrix product of low precision screens each pair of blocks. A pair that may belong to the nearest, by the bound of
its rounding error, is computed again by itself, in float64 and always in the same order, and only these numbers decide.
So the result is the same for any shape of the blocks, in float32, TF32 or bfloat16, on a CPU or a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from hardneg.core.errors import NotFinite
from hardneg.core.tensors import scaled
from hardneg.core.tiles import NEVER
from hardneg.search.nearest import Corpus, Excluded, Nearest, Weigh, merged
from hardneg.search.topk import top_of_rows

GROUP = 16
"""Columns of which the bfloat16 screen keeps the largest product."""
_NUMBERS = 1 << 24  # of gathered vectors held at a time


def pair_similarity(
    first: Annotated[Tensor, "m d"], second: Annotated[Tensor, "m d"], *, cosine: bool = False
) -> Annotated[Tensor, "m"]:
    """Dot products or cosines of pairs of rows in float64; no row's number depends on the other rows.

    >>> rows = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    >>> pair_similarity(rows, rows).tolist(), pair_similarity(rows, rows, cosine=True).tolist()
    ([25.0, 0.0], [1.0, 0.0])
    """
    at_once = max(1, _NUMBERS // max(first.shape[1], 1))
    pieces = zip(torch.split(first, at_once), torch.split(second, at_once), strict=True)
    return torch.cat([_pair_similarity(a, b, cosine) for a, b in pieces]) if len(first) else first.new_zeros(0).double()


def _pair_similarity(first: Tensor, second: Tensor, cosine: bool) -> Tensor:
    if not cosine:
        return _folded(first.double() * second.double())
    a, b = scaled(first.double()), scaled(second.double())
    squares = _folded(a * a) * _folded(b * b)
    return _folded(a * b) / torch.where(squares > 0, squares, 1.0).sqrt()


def _folded(products: Annotated[Tensor, "m d"]) -> Annotated[Tensor, "m"]:
    """Sums of rows by halves: a fixed order of additions, where that of ``sum`` depends on the shape."""
    while (width := products.shape[1]) > 1:
        half = width // 2
        both = products[:, :half] + products[:, half : 2 * half]
        products = torch.cat([both, products[:, 2 * half :]], 1) if width % 2 else both
    return products.sum(1)


@dataclass(frozen=True, eq=False)
class DocumentBlock:
    """A block of the corpus, prepared once for all queries."""

    low: int
    raw: Annotated[Tensor, "m d"]
    vectors: Annotated[Tensor, "m d"]
    norm: float  # the largest of the block, and the least
    least: float
    rounded: Annotated[Tensor, "m d"] | None = None  # to bfloat16
    residual: float = 0.0  # the largest norm of what that lost

    @classmethod
    def of(cls, corpus: Corpus, low: int, high: int, *, bfloat16: bool = False) -> DocumentBlock:
        raw = corpus.vectors[low:high]
        vectors = corpus.prepared(raw)
        norms = _norm(vectors)
        sizes = float(norms.max()), float(norms.min())
        if not bfloat16:
            return cls(low, raw, vectors, *sizes)
        rounded = vectors.bfloat16()
        return cls(low, raw, vectors, *sizes, rounded, float(_norm(vectors - rounded).max()))

    def __len__(self) -> int:
        return len(self.vectors)


def largest_of_groups(
    rows: Annotated[Tensor, "b d"], columns: Annotated[Tensor, "n d"], group: int
) -> Annotated[Tensor, "b w"]:
    """The largest of the products of each row with the columns j, j + w, j + 2 w, ..., for w = n / group rounded up."""
    n = len(columns)
    products = torch.mm(rows, torch.nn.functional.pad(columns, (0, 0, 0, -n % group)).T)
    products[:, n:] = NEVER
    return products.view(len(rows), group, -1).amax(1)


def runs_in_triton(device: torch.device) -> bool:
    """Whether the Triton kernel for group maxima can run on this device."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET", "0") == "0":
        return False  # Triton is slow to import
    from hardneg.search import triton_groups

    return triton_groups.can_run(device)


def largest_on(device: torch.device) -> Callable[[Tensor, Tensor, int], Tensor]:
    """The fastest implementation of ``largest_of_groups`` for this device."""
    if not runs_in_triton(device):
        return largest_of_groups
    from hardneg.search import triton_groups

    return triton_groups.largest_of_groups


def rounding_of_products(dim: int, dtype: torch.dtype, norm: Tensor, other: float) -> Tensor:
    """By how much a product of two vectors of these norms may differ from that in float64: sums in any order, unit
    vectors included, and products that underflow.
    """
    digits = torch.finfo(dtype)
    share = (dim + 8) * digits.eps
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        share += 2.0**-6  # both factors are rounded to 7 digits, once; the sums stay float32
    return share * other * norm + dim * digits.tiny


class RunningNearest:
    """The ``size`` nearest so far of a block of queries; documents are added block by block, in the order of rows.

    ``weigh`` removes candidates or, with keys of its own, orders them (``weigh.drawn``): those are taken as they are.
    Of equal similarities, or keys, the lower row comes first. ``largest``: a faster way to do ``largest_of_groups``,
    in bfloat16 or with float32 sums.
    """

    def __init__(
        self,
        corpus: Corpus,
        queries: Annotated[Tensor, "b d"],
        size: int,
        excluded: Excluded,
        weigh: Weigh | None = None,
        largest: Callable[[Tensor, Tensor, int], Tensor] = largest_of_groups,
    ) -> None:
        self.corpus, self.excluded, self.weigh, self.largest = corpus, excluded, weigh, largest
        self.raw = queries.to(corpus.device)
        self.queries = corpus.prepared(queries)
        self.norm = _norm(self.queries)
        self._longest = float(self.norm.max()) if len(queries) else 0.0
        self.size = min(size, len(corpus))
        self.drawn = weigh is not None and weigh.drawn
        shape = len(queries), self.size
        never = torch.full(shape, NEVER, dtype=torch.float64, device=corpus.device)
        self.best = Nearest(never, torch.full(shape, -1, device=corpus.device), never)
        self._rounded: Tensor | None = None
        self._lost, self._banned = self.norm, 0

    def add(self, documents: DocumentBlock) -> None:
        if documents.norm * self._longest > torch.finfo(self.corpus.dtype).max / 2:
            fix = "use the cosine, shorter vectors, or float64"
            raise NotFinite("mine", f"products within the range of {self.corpus.dtype}", "larger ones", fix)
        if documents.rounded is not None and self.weigh is None:
            place, column = self._screened_by_groups(documents, documents.rounded)
            key = None
        else:
            place, column, key = self._screened(documents)
        if not len(place):
            return
        if key is None or not self.drawn:
            key = self._similarity(documents, place, column)
        self._extend(place, column + documents.low, key)

    def found(self) -> Nearest:
        """The list, with plain similarities beside keys of their own."""
        if not self.drawn:
            return self.best
        place, column = (self.best.rows >= 0).nonzero().unbind(1)
        similarity = torch.full_like(self.best.key, NEVER)
        rows = self.corpus.vectors[self.best.rows[place, column].to(self.corpus.vectors.device)]
        similarity[place, column] = pair_similarity(self.raw[place], rows, cosine=self.corpus.cosine)
        return Nearest(self.best.key, self.best.rows, similarity)

    def _similarity(self, documents: DocumentBlock, place: Tensor, column: Tensor) -> Tensor:
        found, at_once = [], max(1, _NUMBERS // max(self.raw.shape[1], 1))
        for some, its in zip(torch.split(place, at_once), torch.split(column, at_once), strict=True):
            rows = documents.raw[its.to(documents.raw.device)].to(self.corpus.device)
            found.append(pair_similarity(self.raw[some], rows, cosine=self.corpus.cosine))
        return torch.cat(found)

    def _slack(self, documents: DocumentBlock) -> Annotated[Tensor, "b 1"]:
        """By how much a product may differ from the similarity in float64: sums in any order, unit vectors included."""
        return rounding_of_products(self.queries.shape[1], self.corpus.dtype, self.norm, documents.norm)

    def _screened(self, documents: DocumentBlock) -> tuple[Tensor, Tensor, Tensor]:
        """Places and columns that may be among the nearest, and their keys."""
        low, high = documents.low, documents.low + len(documents)
        slack = self._slack(documents)
        similarity = torch.mm(self.queries, documents.vectors.T)
        self.corpus.exclude(similarity, self.excluded, low, high)
        key = similarity if self.weigh is None else self.weigh(similarity, low, high, slack)
        slack = torch.zeros_like(slack) if self.drawn else slack
        least = _threshold(self._least(key, slack) - slack, key.dtype)
        some = (key.amax(1, keepdim=True) >= least)[:, 0].nonzero()[:, 0]
        if len(some) < len(key):
            key, least = key[some], least[some]
        place, column = (key >= least).nonzero().unbind(1)
        return some[place], column, key[place, column].double()

    def _least(self, key: Annotated[Tensor, "b m"], slack: Tensor, others: int = 0) -> Annotated[Tensor, "b 1"]:
        """A lower bound of what the last of the list will be; at most ``others`` of the keys are no candidates."""
        least = self.best.key[:, -1:].clone()
        short = (least[:, 0] == NEVER).nonzero()[:, 0]
        size = self.size + others
        if len(short) and key.shape[1] >= size:
            part = _coarser(key if len(short) == len(key) else key[short], size)
            last = top_of_rows(part, size, ties=False)[0][:, -1:]
            least[short] = (last if last.dtype != torch.bfloat16 else _below(last)).double() - slack[short]
        return least

    def _screened_by_groups(self, documents: DocumentBlock, rounded: Tensor) -> tuple[Tensor, Tensor]:
        """The same from bfloat16: groups of columns whose largest may be among the nearest, then float32 for each."""
        if self._rounded is None:
            self._rounded = self.queries.bfloat16()
            self._lost = _norm(self.queries - self._rounded)
            self._banned = int(torch.bincount(self.excluded[0]).max()) if len(self.excluded[0]) else 0
        slack = self._slack(documents)
        wide = slack + self._lost * (documents.norm + documents.residual) + self.norm * documents.residual
        largest = self.largest(self._rounded, rounded, GROUP)
        width = largest.shape[1]
        least = self._least(largest, wide, self._banned)
        place, group = (largest >= _threshold(least - wide, largest.dtype)).nonzero().unbind(1)
        places, columns = [], []
        step = max(1, _NUMBERS * 16 // (GROUP * self.queries.shape[1]))
        for some, its in zip(torch.split(place, step), torch.split(group, step), strict=True):
            column = its[:, None] + width * torch.arange(GROUP, device=group.device)
            inside = column.clamp(max=len(documents) - 1)
            product = torch.bmm(documents.vectors[inside], self.queries[some][:, :, None])[:, :, 0]
            kept = (product >= (least - slack)[some].to(product.dtype)) & (column < len(documents))
            where, which = kept.nonzero().unbind(1)
            places.append(some[where])
            columns.append(column[where, which])
        place, column = torch.cat(places), torch.cat(columns)
        n = len(self.corpus)
        met = ~torch.isin(place * n + column + documents.low, self.excluded[0] * n + self.excluded[1])
        return place[met], column[met]

    def _extend(self, place: Annotated[Tensor, "m"], rows: Annotated[Tensor, "m"], key: Annotated[Tensor, "m"]) -> None:
        """Merges these pairs into the lists."""
        order = rows.argsort(stable=True)
        order = order[key[order].argsort(descending=True, stable=True)]
        order = order[place[order].argsort(stable=True)]
        place, rows, key = place[order], rows[order], key[order]
        some, count = torch.unique_consecutive(place, return_counts=True)
        first = count.cumsum(0) - count
        rank = torch.arange(len(place), device=place.device) - first.repeat_interleave(count)
        kept = rank < self.size
        line = torch.arange(len(some), device=place.device).repeat_interleave(count)[kept]
        shape = len(some), min(self.size, int(count.max()))
        keys = torch.full(shape, NEVER, dtype=torch.float64, device=place.device)
        numbers = torch.full(shape, -1, device=place.device)
        keys[line, rank[kept]], numbers[line, rank[kept]] = key[kept], rows[kept]
        before = Nearest(*(each[some] for each in self.best))
        after = merged(before, Nearest(keys, numbers, keys), self.size)
        self.best.key[some], self.best.rows[some] = after.key, after.rows


def _norm(vectors: Annotated[Tensor, "m d"]) -> Annotated[Tensor, "m 1"]:
    norm: Tensor = torch.linalg.vector_norm(vectors.double(), dim=1, keepdim=True)
    return norm


def _threshold(least: Tensor, dtype: torch.dtype) -> Tensor:
    """What to compare rounded numbers with, itself rounded, which keeps the order; above NEVER."""
    return least.clamp(min=torch.finfo(dtype).min).to(dtype)


def _coarser(keys: Annotated[Tensor, "b m"], size: int) -> Annotated[Tensor, "b w"]:
    """The largest of groups, of which the ``size``-th is no larger, and hardly smaller: a fast pass before a selection
    that reads its rows several times.
    """
    width = keys.shape[1] // GROUP
    return keys[:, : GROUP * width].view(len(keys), GROUP, width).amax(1) if width >= GROUP * size else keys


def _below(values: Tensor) -> Tensor:
    """The next lower number of bfloat16, which whatever was rounded to a value exceeds."""
    return torch.nextafter(values, torch.full_like(values, NEVER))
