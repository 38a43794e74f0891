"""Exact nearest rows of a corpus by similarity in float64, independent of block sizes and of the precision of products.

A matrix product of low precision screens each pair of blocks. A pair that may be among the nearest, given the bound of
its rounding error, is computed again by itself, in float64 and always in the same order, and only these numbers decide.
So the result is the same for any shape of the blocks, in float32, TF32 or bfloat16, on a CPU or a GPU.

``RunningNearest`` holds the lists of a block of queries and is fed one ``DocumentBlock`` after the other by mining;
``ExactRows`` and ``pair_similarity`` compute the float64 similarity that decides.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Annotated

import torch
from torch import Tensor

from hardneg.core.errors import NotFinite
from hardneg.core.tensors import power_of_two
from hardneg.core.tiles import NEVER
from hardneg.search.nearest import Corpus, Excluded, Nearest, Weigh, merged
from hardneg.search.topk import not_below, reached_by

LargestOfGroups = Callable[[Tensor, Tensor, int], Tensor]
"""(rows [b, d], columns [n, d], size of a group) -> the largest product of each row within each group [b, w]."""
GROUP = 16
"""Number of columns of which the screens keep the largest product."""
_MAX_GATHERED = 1 << 24
"""Numbers in gathered vectors that are held at a time."""
_MAX_CACHED = 1 << 17
"""The same on a CPU, in whose caches they should stay."""
_WORTH_ROUNDING = 1 << 30
"""Multiplications on a CPU from which products in bfloat16 may save time."""
_PAIRS_PER_EXACT = 64
"""A similarity in float64 takes about the time of this many products in float32."""


@dataclass(frozen=True, eq=False)
class ExactRows:
    """Vectors whose similarities are computed pair by pair in float64.

    Attributes:
        vectors: Vectors [m, d].
        power: Power of two by which each row is divided for the cosine [m]; None for dot products.
        squares: Square of the norm of each row, divided by its power [m]; None for dot products.
    """

    vectors: Annotated[Tensor, "m d"]
    power: Annotated[Tensor, "m"] | None = None
    squares: Annotated[Tensor, "m"] | None = None

    @classmethod
    def of(cls, vectors: Annotated[Tensor, "m d"], *, cosine: bool) -> ExactRows:
        """Prepare vectors for dot products or cosines."""
        if not cosine or not vectors.numel():
            return cls(vectors)
        parts = []
        for some in torch.split(vectors, _rows_at_once(vectors)):
            wide = some.double()
            power = power_of_two(wide)
            near_one = wide / power
            parts.append((power[:, 0], _folded(near_one * near_one)))
        power, squares = (torch.cat(each) for each in zip(*parts, strict=True))
        return cls(vectors, power, squares)

    def similarity(
        self, rows: Annotated[Tensor, "p"], other: ExactRows, columns: Annotated[Tensor, "p"]
    ) -> Annotated[Tensor, "p"]:
        """Compute the similarity of pairs of rows in float64.

        The result of a pair does not depend on the other pairs.

        Args:
            rows: Rows of these vectors [p]; all of them are held in float64.
            other: The other vectors, of which only those rows are converted.
            columns: Rows of the other vectors [p].
        """
        at_once = _rows_at_once(self.vectors)
        found = [self.vectors.new_zeros(0, dtype=torch.float64)]
        for some, its in zip(torch.split(rows, at_once), torch.split(columns, at_once), strict=True):
            second = other._unscaled(other.vectors.index_select(0, its), its)
            found.append(_folded(self._wide.index_select(0, some).mul_(second)))
        product = torch.cat(found)
        if self.squares is None or other.squares is None or self.power is None or other.power is None:
            return product
        if self.vectors.dtype != torch.float64:
            product = product / self.power[rows]
        if other.vectors.dtype != torch.float64:
            product = product / other.power[columns]
        squares = self.squares[rows] * other.squares[columns]
        return product / torch.where(squares > 0, squares, 1.0).sqrt()

    @cached_property
    def _wide(self) -> Annotated[Tensor, "m d"]:
        return self._unscaled(self.vectors, slice(None))

    def _unscaled(self, vectors: Tensor, index: Tensor | slice) -> Tensor:
        """Return these rows in float64, in which products of narrower types can neither overflow nor lose digits."""
        wide = vectors.double()
        return wide / self.power[index, None] if self.power is not None and vectors.dtype == torch.float64 else wide


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
    at_once = _rows_at_once(first)
    found = [first.new_zeros(0, dtype=torch.float64)]
    for a, b in zip(torch.split(first, at_once), torch.split(second, at_once), strict=True):
        rows = torch.arange(len(a), device=a.device)
        found.append(ExactRows.of(a, cosine=cosine).similarity(rows, ExactRows.of(b, cosine=cosine), rows))
    return torch.cat(found)


def _rows_at_once(vectors: Annotated[Tensor, "m d"]) -> int:
    numbers = _MAX_CACHED if vectors.device.type == "cpu" else _MAX_GATHERED
    return max(1, numbers // max(vectors.shape[1], 1))


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
        cosine: Whether the cosine is the similarity.
        rounded: Vectors in bfloat16.
        residual: Largest norm of the rounding error of ``rounded``.
    """

    low: int
    raw: Annotated[Tensor, "m d"]
    vectors: Annotated[Tensor, "m d"]
    norm: float
    least: float
    cosine: bool = False
    rounded: Annotated[Tensor, "m d"] | None = None
    residual: float = 0.0

    @cached_property
    def exact(self) -> ExactRows:
        """The vectors as they are stored, for similarities in float64."""
        return ExactRows.of(self.raw, cosine=self.cosine)

    def products(self, queries: Annotated[Tensor, "b d"]) -> Annotated[Tensor, "b m"]:
        """Compute products with vectors of these queries, in their type; the next call overwrites them on a CPU."""
        vectors = self.vectors if self.rounded is None or queries.dtype != torch.bfloat16 else self.rounded
        if queries.device.type != "cpu":
            return torch.mm(queries, vectors.T)
        buffer = self._buffers.get(queries.dtype)
        if buffer is None or len(buffer) < len(queries):  # new memory for each block would take longer than the product
            buffer = self._buffers[queries.dtype] = queries.new_empty(len(queries), len(self))
        return torch.mm(queries, vectors.T, out=buffer[: len(queries)])

    @cached_property
    def _buffers(self) -> dict[torch.dtype, Tensor]:
        return {}

    @classmethod
    def of(cls, corpus: Corpus, low: int, high: int, *, bfloat16: bool = False) -> DocumentBlock:
        """Prepare the rows low to high - 1 of a corpus; with ``bfloat16`` also their rounded copy."""
        raw = corpus.vectors[low:high]
        vectors = corpus.prepared(raw)
        norms = _norm(vectors)
        sizes = float(norms.max()), float(norms.min())
        if not bfloat16:
            return cls(low, raw, vectors, *sizes, corpus.cosine)
        rounded, residual = _rounded(vectors)
        return cls(low, raw, vectors, *sizes, corpus.cosine, rounded, float(residual.max()))

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


def largest_on(device: torch.device) -> LargestOfGroups | None:
    """Return the fastest implementation of ``largest_of_groups`` for a GPU; None for a CPU, which stores products."""
    if not runs_in_triton(device):
        return None if device.type == "cpu" else largest_of_groups
    from hardneg.search.triton_groups import largest_of_groups as largest_in_triton

    return largest_in_triton


def screens_in_bfloat16(device: torch.device, multiplications: int) -> bool:
    """True if products in bfloat16 are the faster screen on this device for a search of this size."""
    if device.type != "cpu":
        return runs_in_triton(device)
    return multiplications > _WORTH_ROUNDING and _bfloat16_is_fast()


@lru_cache
def _bfloat16_is_fast() -> bool:
    """True if products of bfloat16 take at most half the time of float32 on this CPU, which is measured once."""
    seconds = []
    for dtype in (torch.bfloat16, torch.float32):
        rows = torch.ones(256, 128, dtype=dtype)
        begun = [time.perf_counter()]
        for _ in range(4):
            torch.mm(rows, rows.T)
            begun.append(time.perf_counter())
        seconds.append(min(after - before for before, after in pairwise(begun)))
    return 2 * seconds[0] < seconds[1]


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
        largest: Implementation of ``largest_of_groups``, in bfloat16 or with float32 sums, to screen by groups of
            documents. Without it, products are stored.
    """

    def __init__(
        self,
        corpus: Corpus,
        queries: Annotated[Tensor, "b d"],
        size: int,
        excluded: Excluded,
        weigh: Weigh | None = None,
        largest: LargestOfGroups | None = None,
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
        self._banned = int(torch.bincount(excluded[0]).max()) if largest is not None and len(excluded[0]) else 0
        self._too_close = False

    @cached_property
    def _exact(self) -> ExactRows:
        """The queries as they were given, for similarities in float64."""
        return ExactRows.of(self.raw, cosine=self.corpus.cosine)

    @cached_property
    def _rounded(self) -> tuple[Tensor, Tensor]:
        """The queries in bfloat16, and the norms of their rounding errors."""
        return _rounded(self.queries)

    def add(self, documents: DocumentBlock) -> None:
        """Merge a block of documents into the lists.

        Raises:
            NotFinite: If products may overflow the precision of the corpus.
        """
        if documents.norm * self._longest > torch.finfo(self.corpus.dtype).max / 2:
            fix = "use the cosine, shorter vectors, or float64"
            raise NotFinite("mine", f"products within the range of {self.corpus.dtype}", "larger ones", fix)
        if documents.rounded is not None and self.weigh is None and self.largest is not None:
            self._add_by_groups(documents, documents.rounded, self.largest)
        elif documents.rounded is None or not self._add_rounded(documents):
            self._add_screened(documents)

    def found(self) -> Nearest:
        """Return the lists; if they are ordered by other keys, the plain similarities are added."""
        if not self.drawn:
            return self.best
        place, column = (self.best.rows >= 0).nonzero().unbind(1)
        similarity = torch.full_like(self.best.key, NEVER)
        rows = self.corpus.vectors[self.best.rows[place, column].to(self.corpus.vectors.device)]
        similarity[place, column] = pair_similarity(self.raw[place], rows, cosine=self.corpus.cosine)
        return Nearest(self.best.key, self.best.rows, similarity)

    def _add_rounded(self, documents: DocumentBlock) -> bool:
        """Merge a block that is screened by products in bfloat16.

        Returns:
            False, and nothing has changed, if too many candidates are left to compute in float64, or if the weights
            need all products in float32.
        """
        ceiling = None if self.weigh is None else self.weigh.ceiling
        if self._too_close or (self.weigh is not None and ceiling is None):
            return False
        low, high = documents.low, documents.low + len(documents)
        slack, most = self._wide_slack(documents), len(self.queries) * len(documents) // _PAIRS_PER_EXACT
        products = documents.products(self._rounded[0])
        self.corpus.exclude(products, self.excluded, low, high)
        above, similarity = self.queries.new_zeros(0).long(), self.queries.new_zeros(0)
        if ceiling is not None:
            above, column = not_below(products, _threshold(ceiling - slack, products.dtype))
            self._too_close = len(above) > most
            if self._too_close:
                return False
            similarity = self._similarity(documents, above, column)
            removed = similarity > (ceiling + self._slack(documents))[above, 0]
            products[above[removed], column[removed]] = NEVER
        place, column = not_below(products, _threshold(self._least(products, slack) - slack, products.dtype))
        self._too_close = len(place) > max(most, 4 * self.size * len(products))
        if self._too_close:
            return False
        if self.weigh is not None:
            self.weigh.count(above, similarity, low, high)
        self._extend(documents, place, column, self._similarity(documents, place, column))
        return True

    def _add_screened(self, documents: DocumentBlock) -> None:
        """Merge a block that is screened by products in the precision of the corpus."""
        low, high = documents.low, documents.low + len(documents)
        slack = self._slack(documents)
        similarity = documents.products(self.queries)
        self.corpus.exclude(similarity, self.excluded, low, high)
        key = similarity if self.weigh is None else self.weigh(similarity, low, high, slack)
        slack = torch.zeros_like(slack) if self.drawn else slack
        place, column = not_below(key, _threshold(self._least(key, slack) - slack, key.dtype))
        drawn = key[place, column].double() if self.drawn else self._similarity(documents, place, column)
        self._extend(documents, place, column, drawn)

    def _add_by_groups(self, documents: DocumentBlock, rounded: Tensor, largest_of: LargestOfGroups) -> None:
        """Merge a block of which only the largest products of groups are known, in bfloat16."""
        slack, wide = self._slack(documents), self._wide_slack(documents)
        largest = largest_of(self._rounded[0], rounded, GROUP)
        width = largest.shape[1]
        least = self._least(largest, wide, self._banned)
        place, group = not_below(largest, _threshold(least - wide, largest.dtype))
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
        order = (place * n + column)[met].argsort()
        place, column = place[met][order], column[met][order]
        self._extend(documents, place, column, self._similarity(documents, place, column))

    def _slack(self, documents: DocumentBlock) -> Annotated[Tensor, "b 1"]:
        """Bound the difference between a product and the similarity in float64, unit vectors included."""
        return rounding_of_products(self.queries.shape[1], self.corpus.dtype, self.norm, documents.norm)

    def _wide_slack(self, documents: DocumentBlock) -> Annotated[Tensor, "b 1"]:
        """Bound the difference between a product of rounded vectors, summed in float32, and the similarity."""
        sums = rounding_of_products(self.queries.shape[1], torch.float32, self.norm, documents.norm)
        return sums + self._rounded[1] * (documents.norm + documents.residual) + self.norm * documents.residual

    def _least(self, key: Annotated[Tensor, "b m"], slack: Tensor, others: int = 0) -> Annotated[Tensor, "b 1"]:
        """Return a lower bound of the last key of each list; at most ``others`` of the keys are not candidates."""
        least = self.best.key[:, -1:].clone()
        short = (least[:, 0] == NEVER).nonzero()[:, 0]
        size = self.size + others
        if len(short) and key.shape[1] >= size:
            last = reached_by(key if len(short) == len(key) else key[short], size)
            least[short] = (last if last.dtype != torch.bfloat16 else _below(last)).double() - slack[short]
        return least

    def _similarity(self, documents: DocumentBlock, place: Tensor, column: Tensor) -> Annotated[Tensor, "m"]:
        return self._exact.similarity(place, documents.exact, column)

    def _extend(
        self, documents: DocumentBlock, place: Annotated[Tensor, "m"], column: Annotated[Tensor, "m"], key: Tensor
    ) -> None:
        """Merge pairs into the lists; they are sorted by place, and those of a place by column."""
        if not len(place):
            return
        count = torch.bincount(place, minlength=len(self.queries))
        rank = torch.arange(len(place), device=place.device) - (count.cumsum(0) - count)[place]
        shape = len(count), int(count.max())
        keys = torch.full(shape, NEVER, dtype=torch.float64, device=place.device)
        numbers = torch.full(shape, -1, device=place.device)
        keys[place, rank], numbers[place, rank] = key, column + documents.low
        self.best = merged(self.best, Nearest(keys, numbers, keys), self.size)


def exact_nearest(
    corpus: Corpus,
    blocks: Iterable[DocumentBlock],
    queries: Annotated[Tensor, "b d"],
    size: int,
    excluded: Excluded,
) -> Nearest:
    """Find the most similar rows of each query, as ``nearest`` does, but decided in float64.

    Args:
        corpus: The corpus.
        blocks: All of its blocks, in order.
        queries: Vectors of the queries as they were given, [b, d].
        size: Number of rows per query.
        excluded: Pairs to skip.

    Returns:
        Lists [b, size]; where fewer rows are left, the key is NEVER and the row -1.
    """
    running = RunningNearest(corpus, queries, size, excluded)
    for documents in blocks:
        running.add(documents)
    return running.found()


def _norm(vectors: Annotated[Tensor, "m d"]) -> Annotated[Tensor, "m 1"]:
    norm: Tensor = torch.linalg.vector_norm(vectors.double(), dim=1, keepdim=True)
    return norm


def _rounded(vectors: Annotated[Tensor, "m d"]) -> tuple[Annotated[Tensor, "m d"], Annotated[Tensor, "m 1"]]:
    """Return vectors in bfloat16 and the norms of their rounding errors; processors take subnormal numbers as zero."""
    rounded = vectors.bfloat16()
    rounded.masked_fill_(rounded.abs() < torch.finfo(torch.bfloat16).tiny, 0.0)
    return rounded, _norm(vectors - rounded)


def _threshold(least: Tensor, dtype: torch.dtype) -> Tensor:
    """Round the limit in the same way as the numbers that it is compared with, which keeps the order; above NEVER."""
    return least.clamp(min=torch.finfo(dtype).min).to(dtype)


def _below(values: Tensor) -> Tensor:
    """Return the next lower bfloat16 number, which is below every number that was rounded to the value."""
    return torch.nextafter(values, torch.full_like(values, NEVER))
