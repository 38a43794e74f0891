"""Exact nearest rows of a corpus by similarity in float64, independent of block sizes and of the precision of products.

A matrix product of low precision screens each pair of blocks. A pair that may be among the nearest, given the bound of
its rounding error, is computed again by itself, in float64 and always in the same order, and only these numbers decide.
So the result is the same for any shape of the blocks, in float32, TF32 or bfloat16, on a CPU or a GPU.

``RunningNearest`` holds the lists of a block of queries and is fed one ``DocumentBlock`` after the other by mining;
``pair_similarity`` computes the float64 similarity that decides.
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
"""Number of columns of which the bfloat16 screen keeps the largest product."""
_MAX_GATHERED = 1 << 24
"""Numbers in gathered vectors that are held at a time."""


def pair_similarity(
    first: Annotated[Tensor, "m d"], second: Annotated[Tensor, "m d"], *, cosine: bool = False
) -> Annotated[Tensor, "m"]:
    """Compute dot products or cosines of pairs of rows in float64.

    The result of a row does not depend on the other rows.

    Args:
        first: Vectors [m, d].
        second: Vectors [m, d].
        cosine: Whether to divide by the norms; the cosine with a zero vector is 0.

    Returns:
        Similarities [m] in float64.

    Example:
        >>> rows = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> pair_similarity(rows, rows).tolist(), pair_similarity(rows, rows, cosine=True).tolist()
        ([25.0, 0.0], [1.0, 0.0])
    """
    at_once = max(1, _MAX_GATHERED // max(first.shape[1], 1))
    pieces = zip(torch.split(first, at_once), torch.split(second, at_once), strict=True)
    return torch.cat([_pair_similarity(a, b, cosine) for a, b in pieces]) if len(first) else first.new_zeros(0).double()


def _pair_similarity(first: Tensor, second: Tensor, cosine: bool) -> Tensor:
    if not cosine:
        return _folded(first.double() * second.double())
    a, b = scaled(first.double()), scaled(second.double())
    squares = _folded(a * a) * _folded(b * b)
    return _folded(a * b) / torch.where(squares > 0, squares, 1.0).sqrt()


def _folded(products: Annotated[Tensor, "m d"]) -> Annotated[Tensor, "m"]:
    """Sum the rows by halves: a fixed order of additions, whereas that of ``sum`` depends on the shape."""
    while (width := products.shape[1]) > 1:
        half = width // 2
        both = products[:, :half] + products[:, half : 2 * half]
        products = torch.cat([both, products[:, 2 * half :]], 1) if width % 2 else both
    return products.sum(1)


@dataclass(frozen=True, eq=False)
class DocumentBlock:
    """A block of the corpus, prepared once for all queries.

    Attributes:
        low: First row of the block.
        raw: Vectors as they are stored.
        vectors: Vectors as they are compared.
        norm: Largest norm.
        least: Smallest norm.
        rounded: Vectors in bfloat16.
        residual: Largest norm of the rounding error of ``rounded``.
    """

    low: int
    raw: Annotated[Tensor, "m d"]
    vectors: Annotated[Tensor, "m d"]
    norm: float
    least: float
    rounded: Annotated[Tensor, "m d"] | None = None
    residual: float = 0.0

    @classmethod
    def of(cls, corpus: Corpus, low: int, high: int, *, bfloat16: bool = False) -> DocumentBlock:
        """Prepare the rows low to high - 1 of a corpus; with ``bfloat16`` also their rounded copy."""
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
    """Compute the largest product of each row within groups of columns.

    Group i holds the columns i, i + w, i + 2 w, ... for w = n / group rounded up.

    Args:
        rows: Vectors [b, d].
        columns: Vectors [n, d].
        group: Number of columns in a group.

    Returns:
        Maxima [b, w].
    """
    n = len(columns)
    products = torch.mm(rows, torch.nn.functional.pad(columns, (0, 0, 0, -n % group)).T)
    products[:, n:] = NEVER
    return products.view(len(rows), group, -1).amax(1)


def runs_in_triton(device: torch.device) -> bool:
    """True if the Triton kernel for group maxima can run on this device."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET", "0") == "0":
        return False  # Triton is slow to import
    from hardneg.search.triton_groups import can_run

    return can_run(device)


def largest_on(device: torch.device) -> Callable[[Tensor, Tensor, int], Tensor]:
    """Return the fastest implementation of ``largest_of_groups`` for this device."""
    if not runs_in_triton(device):
        return largest_of_groups
    from hardneg.search.triton_groups import largest_of_groups as largest_in_triton

    return largest_in_triton


def rounding_of_products(dim: int, dtype: torch.dtype, norm: Tensor, other: float) -> Tensor:
    """Bound the rounding error of products of vectors with these norms, relative to float64.

    Covers sums in any order, the rounding of unit vectors, and products that underflow.

    Args:
        dim: Number of features.
        dtype: Type of the product.
        norm: Norms of the first vectors.
        other: Largest norm of the second vectors.
    """
    digits = torch.finfo(dtype)
    share = (dim + 8) * digits.eps
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        share += 2.0**-6  # both factors are rounded to 7 digits, once; the sums stay float32
    return share * other * norm + dim * digits.tiny


class RunningNearest:
    """The ``size`` nearest rows so far of a block of queries; documents are added block by block, in the order of rows.

    Of equal similarities, or equal keys, the lower row comes first.

    Args:
        corpus: The corpus.
        queries: Vectors of the queries, [b, d].
        size: Length of the lists.
        excluded: (query, row) pairs to skip.
        weigh: Removes candidates or, with keys of its own (``weigh.drawn``), orders them; its keys are used as they
            are.
        largest: Implementation of ``largest_of_groups``, in bfloat16 or with float32 sums.
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
        """Merge a block of documents into the lists.

        Raises:
            NotFinite: If products may overflow the precision of the corpus.
        """
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
        """Return the lists; if they are ordered by other keys, the plain similarities are added."""
        if not self.drawn:
            return self.best
        place, column = (self.best.rows >= 0).nonzero().unbind(1)
        similarity = torch.full_like(self.best.key, NEVER)
        rows = self.corpus.vectors[self.best.rows[place, column].to(self.corpus.vectors.device)]
        similarity[place, column] = pair_similarity(self.raw[place], rows, cosine=self.corpus.cosine)
        return Nearest(self.best.key, self.best.rows, similarity)

    def _similarity(self, documents: DocumentBlock, place: Tensor, column: Tensor) -> Tensor:
        found, at_once = [], max(1, _MAX_GATHERED // max(self.raw.shape[1], 1))
        for some, its in zip(torch.split(place, at_once), torch.split(column, at_once), strict=True):
            rows = documents.raw[its.to(documents.raw.device)].to(self.corpus.device)
            found.append(pair_similarity(self.raw[some], rows, cosine=self.corpus.cosine))
        return torch.cat(found)

    def _slack(self, documents: DocumentBlock) -> Annotated[Tensor, "b 1"]:
        """Bound the difference between a product and the similarity in float64, unit vectors included."""
        return rounding_of_products(self.queries.shape[1], self.corpus.dtype, self.norm, documents.norm)

    def _screened(self, documents: DocumentBlock) -> tuple[Tensor, Tensor, Tensor]:
        """Return places and columns that may be among the nearest, and their keys."""
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
        """Return a lower bound of the last key of each list; at most ``others`` of the keys are not candidates."""
        least = self.best.key[:, -1:].clone()
        short = (least[:, 0] == NEVER).nonzero()[:, 0]
        size = self.size + others
        if len(short) and key.shape[1] >= size:
            part = _coarser(key if len(short) == len(key) else key[short], size)
            last = top_of_rows(part, size, ties=False)[0][:, -1:]
            least[short] = (last if last.dtype != torch.bfloat16 else _below(last)).double() - slack[short]
        return least

    def _screened_by_groups(self, documents: DocumentBlock, rounded: Tensor) -> tuple[Tensor, Tensor]:
        """Screen in bfloat16: find groups whose largest may be among the nearest, then compute them in float32."""
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
        step = max(1, _MAX_GATHERED * 16 // (GROUP * self.queries.shape[1]))
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
        """Merge these pairs into the lists."""
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
    """Round the limit in the same way as the numbers that it is compared with, which keeps the order; above NEVER."""
    return least.clamp(min=torch.finfo(dtype).min).to(dtype)


def _coarser(keys: Annotated[Tensor, "b m"], size: int) -> Annotated[Tensor, "b w"]:
    """Return the largest of groups: a fast pass before a selection that reads its rows several times.

    The ``size``-th of the result is no larger than that of the keys, and hardly smaller.
    """
    width = keys.shape[1] // GROUP
    return keys[:, : GROUP * width].view(len(keys), GROUP, width).amax(1) if width >= GROUP * size else keys


def _below(values: Tensor) -> Tensor:
    """Return the next lower bfloat16 number, which is below every number that was rounded to the value."""
    return torch.nextafter(values, torch.full_like(values, NEVER))
