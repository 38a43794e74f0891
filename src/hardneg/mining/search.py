"""Exact nearest candidates by blocks: one matrix product per pair of blocks and a running top; FAISS if asked for.

The scores of all queries against all of the corpus, [q, n], are never held: at most one block of them is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor

from hardneg.core.errors import argument_error, optional
from hardneg.core.types import NEVER
from hardneg.mining.directions import directions

Mask = Callable[[Annotated[Tensor, "b m"], int, int], Annotated[Tensor, "b m"]]
"""(scores of a block of the corpus, its first row, its end) -> True where a candidate may stay."""


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
    """

    kind: str = "exact"
    query_block: int = 0
    corpus_block: int = 0
    device: str | None = None
    num_probes: int = 16
    candidates: int = 100
    cosine: bool = False
    also: tuple[Retriever, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("exact", "flat", "ivf", "hnsw", "also"):
            raise argument_error("Search", "kind 'exact', 'flat', 'ivf', 'hnsw' or 'also'", "kind", self.kind)
        if self.kind == "also" and not self.also:
            raise argument_error("Search", "retrievers in also with kind 'also'", "also", self.also)
        for name, least in (("query_block", 0), ("corpus_block", 0), ("num_probes", 1), ("candidates", 1)):
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

    def blocks(self) -> list[tuple[int, int]]:
        n = len(self)
        return [(low, min(low + self.block, n)) for low in range(0, n, self.block)]

    def part(self, low: int, high: int) -> Tensor:
        return self.prepared(self.vectors[low:high])

    def prepared(self, vectors: Annotated[Tensor, "m d"]) -> Annotated[Tensor, "m d"]:
        """Vectors of queries or documents as they are compared."""
        wide = vectors.to(self.device, self.dtype)
        return directions(wide) if self.cosine else wide

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
    corpus: Corpus, queries: Tensor, size: int, excluded: tuple[Tensor, Tensor], keep: Mask | None = None
) -> tuple[Annotated[Tensor, "b m"], Annotated[Tensor, "b m"]]:
    """The ``size`` most similar rows of each query, closest first, and their similarities.

    Where fewer are left after the exclusions, the similarity is NEVER and the row -1. Equal similarities in the list
    are sorted by row; which of several equal ones come last into the list is left open, and may follow the blocks.
    """
    size = min(size, len(corpus))
    held = min(corpus.block, len(corpus)) * queries.shape[0]
    out = torch.empty(held, dtype=corpus.dtype, device=corpus.device) if queries.shape[0] else None
    best: tuple[Tensor, Tensor] | None = None
    for low, high in corpus.blocks():
        similarity = corpus.scores(queries, excluded, low, high, out)
        if keep is not None:
            similarity.masked_fill_(~keep(similarity, low, high), NEVER)
        values, index = top_of_rows(similarity, min(size, high - low))
        index = index + low
        if best is not None:
            values, index = torch.cat([best[0], values], 1), torch.cat([best[1], index], 1)
            values, place = values.topk(min(size, values.shape[1]), dim=1)
            index = index.gather(1, place)
        best = values, index
    assert best is not None
    return in_order(*best)


def in_order(values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Sorted by similarity, closest first, and by row where equal; row -1 where there is none."""
    by_row = rows.argsort(dim=1)
    values, rows = values.gather(1, by_row), rows.gather(1, by_row)
    values, order = values.sort(dim=1, descending=True, stable=True)
    return values, rows.gather(1, order).masked_fill(values == NEVER, -1)


def top_of_rows(scores: Annotated[Tensor, "b n"], size: int, group: int = 16) -> tuple[Tensor, Tensor]:
    """``scores.topk(size)``, faster for a small size: only groups with one of the ``size`` largest maxima can matter.

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

    def nearest(self, queries: Tensor, size: int, excluded: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Like the exact search; the excluded pairs are taken out afterwards, so that many more are asked for."""
        n = len(self.corpus)
        most = int(torch.bincount(excluded[0]).max()) if len(excluded[0]) else 0
        values, rows = self.index.search(self._plain(queries), min(size + most, n))
        values, rows = torch.from_numpy(values), torch.from_numpy(rows)
        taken = torch.isin(torch.arange(len(queries))[:, None] * n + rows, excluded[0].cpu() * n + excluded[1].cpu())
        values = values.masked_fill(taken | (rows < 0), NEVER)
        values, rows = in_order(values, rows)
        return values[:, :size].to(queries.device, self.corpus.dtype), rows[:, :size].to(queries.device)

    @staticmethod
    def _plain(vectors: Tensor) -> Any:
        return vectors.detach().cpu().float().contiguous().numpy()
