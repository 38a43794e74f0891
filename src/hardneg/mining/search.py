"""Exact nearest candidates by blocks: one matrix product per pair of blocks and a running top; FAISS if asked for.

The scores of all queries against all of the corpus, [q, n], are never held: at most one block of them is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hardneg.core.errors import argument_error, optional
from hardneg.core.types import NEVER
from hardneg.core.vectors import unit

Weigh = Callable[[Annotated[Tensor, "b m"], int, int], Annotated[Tensor, "b m"]]
"""(similarities with a block of the corpus, its first row, its end) -> what to order by; NEVER: removed."""


_queries = {"cpu": 512, "cuda": 4096}
_block_bytes = {"cpu": 20 << 20, "cuda": 1 << 30}  # on a CPU what its caches still help with
most_scores = 1 << 25  # scores, and numbers of gathered vectors, held at a time
most_numbers = 1 << 24


class Retriever(Protocol):
    """Another way to find candidates, for instance by words."""

    @property
    def name(self) -> str: ...

    def __call__(self, queries: Annotated[Tensor, "b"], size: int) -> Annotated[Tensor, "b size"]:
        """Rows of the corpus for these queries (positions), best first; -1 where there are no more."""
        ...


@dataclass(frozen=True)
class Search:
    """How candidates are found. ``"exact"``, or through FAISS ``"flat"``, ``"ivf"``, ``"hnsw"`` (extra ``ann``), or by
    the retrievers of ``also`` alone.

    query_block, corpus_block: sizes of the blocks of one matrix product; 0 fits them to the device.
    device: where the products run; None is where the corpus is.
    num_probes: cells visited by ivf; hnsw keeps 16 times as many candidates.
    cosine: vectors are taken at unit length, block by block.
    also: other retrievers, whose candidates join the nearest ones. Then, and where candidates are rescored, each
        retriever gives ``candidates`` of them.
    shards: parts of the corpus that are searched one by one and whose results are merged; the same negatives.
    """

    kind: str = "exact"
    query_block: int = 0
    corpus_block: int = 0
    device: str | None = None
    num_probes: int = 16
    candidates: int = 100
    cosine: bool = False
    also: tuple[Retriever, ...] = ()
    shards: int = 1

    def __post_init__(self) -> None:
        if self.kind not in ("exact", "flat", "ivf", "hnsw", "also"):
            raise argument_error("Search", "kind 'exact', 'flat', 'ivf', 'hnsw' or 'also'", "kind", self.kind)
        if self.kind == "also" and not self.also:
            raise argument_error("Search", "retrievers in also with kind 'also'", "also", self.also)
        for name, least in (
            ("query_block", 0),
            ("corpus_block", 0),
            ("num_probes", 1),
            ("candidates", 1),
            ("shards", 1),
        ):
            if getattr(self, name) < least:
                raise argument_error("Search", f"{name} of {least} or more", name, getattr(self, name))

    def blocks(self, device: torch.device) -> tuple[int, int]:
        """Queries and documents of one matrix product."""
        queries = self.query_block or _queries.get(device.type, 512)
        return queries, self.corpus_block or max(1024, _block_bytes.get(device.type, 20 << 20) // (4 * queries))


class Corpus:
    """The corpus by blocks, in float32 or wider on the device; memory-mapped and half precision vectors are welcome."""

    def __init__(
        self,
        vectors: Annotated[Tensor, "n d"],
        device: torch.device,
        block: int,
        like: torch.dtype = torch.float32,
        cosine: bool = False,
    ) -> None:
        # On another device the whole corpus is moved there, as it is; on the CPU it may stay on disk.
        self.vectors = vectors.to(device)
        self.device = device
        self.block = block
        self.cosine = cosine
        self.dtype = torch.promote_types(torch.promote_types(vectors.dtype, like), torch.float32)

    def __len__(self) -> int:
        return self.vectors.shape[0]

    def rows(self, index: Tensor) -> Tensor:
        """Vectors of these rows, [*index.shape, d]; any row for a negative index."""
        flat = index.clamp(min=0).flatten().to(self.vectors.device)
        return self.prepared(self.vectors[flat]).view(*index.shape, self.vectors.shape[1])

    def blocks(self, part: tuple[int, int] | None = None) -> list[tuple[int, int]]:
        """The blocks, or those of a shard."""
        low, high = part or (0, len(self))
        return [(one, min(one + self.block, high)) for one in range(low, high, self.block)]

    def shards(self, number: int) -> list[tuple[int, int]]:
        """At most so many parts of whole blocks: the products of a block are the same to the bit in any shard."""
        blocks = self.blocks()
        step = -(-len(blocks) // number)
        return [(blocks[i][0], blocks[min(i + step, len(blocks)) - 1][1]) for i in range(0, len(blocks), step)]

    def part(self, low: int, high: int) -> Tensor:
        return self.prepared(self.vectors[low:high])

    def prepared(self, vectors: Annotated[Tensor, "m d"]) -> Annotated[Tensor, "m d"]:
        """Vectors of queries or documents as they are compared."""
        wide = vectors.to(self.device, self.dtype)
        return unit(wide) if self.cosine else wide

    def scores(
        self, queries: Tensor, excluded: tuple[Tensor, Tensor], low: int, high: int, out: Tensor | None = None
    ) -> Annotated[Tensor, "b m"]:
        """Similarities with the rows low to high - 1; NEVER for the excluded (query, row) pairs."""
        if out is not None:
            out = out[: queries.shape[0] * (high - low)].view(queries.shape[0], high - low)
        similarity = torch.mm(queries, self.part(low, high).T, out=out)
        query, row = excluded
        if len(row) and (low or high < len(self)):
            inside = (row >= low) & (row < high)
            query, row = query[inside], row[inside] - low
        if len(row):
            similarity[query, row] = NEVER
        return similarity


def nearest(
    corpus: Corpus, queries: Tensor, size: int, excluded: tuple[Tensor, Tensor], weigh: Weigh | None = None,
    part: tuple[int, int] | None = None,
) -> Nearest:  # fmt: skip
    """The ``size`` most similar rows of each query, closest first; of those that ``weigh`` leaves, by its key.

    Where fewer are left, the key is NEVER and the row -1. Of equal keys the lower row comes first, also into the list,
    so that no order of blocks or shards changes it. ``part``: only blocks of these rows.
    """
    size = min(size, len(corpus))
    held = min(corpus.block, len(corpus)) * queries.shape[0]
    out = torch.empty(held, dtype=corpus.dtype, device=corpus.device) if queries.shape[0] else None
    best: Nearest | None = None
    for low, high in corpus.blocks(part):
        similarity = corpus.scores(queries, excluded, low, high, out)
        key = similarity if weigh is None else weigh(similarity, low, high)
        values, index = top_of_rows(key, min(size, high - low))
        found = Nearest(values, index + low, values if weigh is None else similarity.gather(1, index))
        best = found if best is None else merged(best, found, size)
    assert best is not None
    return best.without_removed()


class Nearest(NamedTuple):
    """Lists of rows of the corpus, best first: keys, rows and similarities."""

    key: Annotated[Tensor, "b m"]
    rows: Annotated[Tensor, "b m"]
    similarity: Annotated[Tensor, "b m"]

    def without_removed(self) -> Nearest:
        removed = self.key == NEVER
        return Nearest(self.key, self.rows.masked_fill(removed, -1), self.similarity.masked_fill(removed, NEVER))


def merged(first: Nearest, second: Nearest, size: int) -> Nearest:
    """The best of two lists; all rows of the second are larger than those of the first."""
    both = [torch.cat(pair, 1) for pair in zip(first, second, strict=True)]
    key, place = both[0].sort(dim=1, descending=True, stable=True)
    place = place[:, :size]
    return Nearest(key[:, :size], both[1].gather(1, place), both[2].gather(1, place))


def in_order(values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Sorted by similarity, closest first, and by row where equal; row -1 where there is none."""
    by_row = rows.argsort(dim=1)
    values, rows = values.gather(1, by_row), rows.gather(1, by_row)
    values, order = values.sort(dim=1, descending=True, stable=True)
    return values, rows.gather(1, order).masked_fill(values == NEVER, -1)


def top_of_rows(scores: Annotated[Tensor, "b n"], size: int, group: int = 16) -> tuple[Tensor, Tensor]:
    """The ``size`` largest of each row, the largest first, and of equal ones the first; fast for a small size."""
    n = scores.shape[1]
    values, columns = _unordered_top(scores, min(size + 1, n), group)
    if size < n:  # one more than wanted shows whether equal values lie on both sides of the end
        tied = (values[:, size - 1] == values[:, size]).nonzero()[:, 0]
        values, columns = values[:, :size], columns[:, :size]
        if len(tied):
            found = scores[tied].sort(dim=1, descending=True, stable=True)
            values, columns = values.clone(), columns.clone()
            values[tied], columns[tied] = found.values[:, :size], found.indices[:, :size]
    by_column = columns.argsort(dim=1)
    values, columns = values.gather(1, by_column), columns.gather(1, by_column)
    values, order = values.sort(dim=1, descending=True, stable=True)
    return values, columns.gather(1, order)


def _unordered_top(scores: Tensor, size: int, group: int) -> tuple[Tensor, Tensor]:
    """``scores.topk(size)``: only groups of columns with one of the ``size`` largest maxima can matter.

    The largest of each group of ``group`` columns comes from one vectorised pass; the selection then looks at a
    ``group``-th of the row, and at ``size`` groups.
    """
    b, n = scores.shape
    width = n // group
    if size * group * 2 > n or not scores.numel():
        best = scores.topk(size, dim=1)
        return best.values, best.indices
    largest = scores[:, : width * group].view(b, group, width).amax(1)
    groups = largest.topk(size, dim=1, sorted=False).indices
    columns = groups[:, :, None] + torch.arange(group, device=scores.device) * width
    columns = columns.flatten(1)
    if width * group < n:
        rest = torch.arange(width * group, n, device=scores.device).expand(b, -1)
        columns = torch.cat([columns, rest], 1)
    values, place = scores.gather(1, columns).topk(size, dim=1)
    return values, columns.gather(1, place)


class FaissIndex:
    """FAISS behind ``nearest``: flat (exact), ivf or hnsw (approximate), inner product."""

    def __init__(self, corpus: Corpus, search: Search) -> None:
        faiss = optional("faiss", f"Search({search.kind!r})", extra="ann")
        dim = corpus.vectors.shape[1]
        self.corpus = corpus
        if search.kind == "flat":
            self.index = faiss.IndexFlatIP(dim)
        elif search.kind == "hnsw":
            self.index = faiss.IndexHNSWFlat(dim, 32, faiss.METRIC_INNER_PRODUCT)
            self.index.hnsw.efSearch = 16 * search.num_probes
        else:
            cells = max(1, min(int(4 * len(corpus) ** 0.5), len(corpus) // 39))
            self.index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, cells, faiss.METRIC_INNER_PRODUCT)
            sample = torch.linspace(0, len(corpus) - 1, min(len(corpus), 256 * cells)).long()
            self.index.train(self._plain(corpus.rows(sample)))
            self.index.nprobe = min(search.num_probes, cells)
        for low, high in corpus.blocks():
            self.index.add(self._plain(corpus.part(low, high)))

    def nearest(self, queries: Tensor, size: int, excluded: tuple[Tensor, Tensor]) -> Nearest:
        """Like the exact search; the excluded pairs are taken out afterwards, so that many more are asked for."""
        n = len(self.corpus)
        most = int(torch.bincount(excluded[0]).max()) if len(excluded[0]) else 0
        values, rows = self.index.search(self._plain(queries), min(size + most, n))
        values, rows = torch.from_numpy(values), torch.from_numpy(rows)
        taken = torch.isin(torch.arange(len(queries))[:, None] * n + rows, excluded[0].cpu() * n + excluded[1].cpu())
        values = values.masked_fill(taken | (rows < 0), NEVER)
        values, rows = in_order(values, rows)
        values = values[:, :size].to(queries.device, self.corpus.dtype)
        return Nearest(values, rows[:, :size].to(queries.device), values)

    @staticmethod
    def _plain(vectors: Tensor) -> Any:
        return vectors.detach().cpu().float().contiguous().numpy()
