"""The nearest rows of a corpus, block by block or through FAISS.

``nearest`` takes one matrix product per block and keeps a running top list: the scores of all queries against the whole
corpus, [q, n], are never held, only one block of them. ``FaissIndex`` has the same interface. ``exact`` builds on the
types of this file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from hardneg.core.errors import optional
from hardneg.core.tensors import unit
from hardneg.core.tiles import NEVER
from hardneg.search.topk import in_order, in_order_of, top_of_rows

Excluded = tuple[Annotated[Tensor, "m"], Annotated[Tensor, "m"]]
"""Pairs to skip: positions of queries [m], and rows of the corpus [m]."""
_COMPARED = 1 << 22
"""Pairs of listed and excluded rows that are compared at a time."""


class Weigh(ABC):
    """Base of functions that remove candidates of a block, or order them by their own keys.

    Attributes:
        drawn: True if its own keys, not the similarities, order the candidates.
        seen: Number of candidates so far, and number left after each of its steps, per query.
        ceiling: Highest similarity of a candidate [b, 1], if it only removes those above; otherwise None.
    """

    drawn: bool
    seen: Annotated[Tensor, "b f"]
    ceiling: Annotated[Tensor, "b 1"] | None = None

    @abstractmethod
    def __call__(
        self, similarity: Annotated[Tensor, "b m"], low: int, high: int, slack: Annotated[Tensor, "b 1"]
    ) -> Annotated[Tensor, "b m"]:
        """Compute keys for the rows low to high - 1; ``NEVER`` removes a candidate.

        Args:
            similarity: Similarities [b, m].
            low: First row of the block.
            high: Row after the block.
            slack: Bound of the rounding error of the similarities, [b, 1].
        """

    def count(self, place: Annotated[Tensor, "p"], similarity: Annotated[Tensor, "p"], low: int, high: int) -> None:
        """Add a block to the counts in ``seen``, given all of its similarities above the ceiling.

        Args:
            place: Positions of the queries [p].
            similarity: Their similarities with documents of the block, in float64; some may be below the ceiling.
            low: First row of the block.
            high: Row after the block.
        """
        raise NotImplementedError("Only weights with a ceiling count by it.")


class Corpus:
    """A corpus that is read in blocks, in float32 or wider, on a device.

    Vectors may be memory-mapped and of half precision. On a CPU they may stay on disk; for another device the whole
    corpus is moved there as it is.

    Args:
        vectors: Vectors [n, d].
        device: Device of the computation.
        block: Rows of a block.
        like: Type of the queries; the wider one is used.
        cosine: Whether to compare unit vectors.
    """

    def __init__(
        self,
        vectors: Annotated[Tensor, "n d"],
        device: torch.device,
        block: int,
        like: torch.dtype = torch.float32,
        cosine: bool = False,
    ) -> None:
        # For another device the whole corpus is moved as it is; on the CPU it may stay on disk.
        self.vectors = vectors.to(device)
        self.device = device
        self.block = block
        self.cosine = cosine
        self.dtype = torch.promote_types(torch.promote_types(vectors.dtype, like), torch.float32)

    def __len__(self) -> int:
        return self.vectors.shape[0]

    def rows(self, index: Tensor) -> Tensor:
        """Return the vectors of these rows, [*index.shape, d]; any row for a negative index."""
        flat = index.clamp(min=0).flatten().to(self.vectors.device)
        return self.prepared(self.vectors[flat]).view(*index.shape, self.vectors.shape[1])

    def blocks(self, part: tuple[int, int] | None = None) -> list[tuple[int, int]]:
        """Return the blocks as (low, high), or those of one shard."""
        low, high = part or (0, len(self))
        return [(one, min(one + self.block, high)) for one in range(low, high, self.block)]

    def shards(self, number: int) -> list[tuple[int, int]]:
        """Split the corpus into at most ``number`` shards of whole blocks.

        The products of a block are the same to the bit in any shard.
        """
        blocks = self.blocks()
        step = -(-len(blocks) // number)
        return [(blocks[i][0], blocks[min(i + step, len(blocks)) - 1][1]) for i in range(0, len(blocks), step)]

    def part(self, low: int, high: int) -> Tensor:
        """Return the vectors of the rows low to high - 1, as they are compared."""
        return self.prepared(self.vectors[low:high])

    def prepared(self, vectors: Annotated[Tensor, "m d"]) -> Annotated[Tensor, "m d"]:
        """Convert vectors of queries or documents to the device and type in which they are compared."""
        wide = vectors.to(self.device, self.dtype)
        return unit(wide) if self.cosine else wide

    def scores(
        self, queries: Tensor, excluded: Excluded, low: int, high: int, out: Tensor | None = None
    ) -> Annotated[Tensor, "b m"]:
        """Compute the similarities with the rows low to high - 1; ``NEVER`` for excluded pairs.

        Args:
            queries: Prepared vectors, [b, d].
            excluded: Pairs to skip.
            low: First row.
            high: Row after the last.
            out: Memory for the result.
        """
        if out is not None:
            out = out[: queries.shape[0] * (high - low)].view(queries.shape[0], high - low)
        similarity = torch.mm(queries, self.part(low, high).T, out=out)
        self.exclude(similarity, excluded, low, high)
        return similarity

    def exclude(self, similarity: Tensor, excluded: Excluded, low: int, high: int) -> None:
        """Set the similarities of excluded pairs to ``NEVER``, in place.

        Args:
            similarity: Similarities with the rows low to high - 1, [b, m].
            excluded: Pairs to skip.
            low: First row.
            high: Row after the last.
        """
        query, row = excluded
        if len(row) and (low or high < len(self)):
            inside = (row >= low) & (row < high)
            query, row = query[inside], row[inside] - low
        if len(row):
            similarity[query, row] = NEVER


def nearest(corpus: Corpus, queries: Tensor, size: int, excluded: Excluded) -> Nearest:
    """Find the most similar rows of each query by plain products, closest first.

    Of equal keys the lower row comes first. See ``exact`` for results that do not depend on block sizes.

    Args:
        corpus: The corpus.
        queries: Prepared vectors, [b, d].
        size: Number of rows per query.
        excluded: Pairs to skip.

    Returns:
        Lists [b, size]; where fewer rows are left, the key is NEVER and the row -1.
    """
    size = min(size, len(corpus))
    held = min(corpus.block, len(corpus)) * queries.shape[0]
    out = torch.empty(held, dtype=corpus.dtype, device=corpus.device) if queries.shape[0] else None
    best: Nearest | None = None
    for low, high in corpus.blocks():
        values, index = top_of_rows(corpus.scores(queries, excluded, low, high, out), min(size, high - low))
        found = Nearest(values, index + low, values)
        best = found if best is None else merged(best, found, size)
    assert best is not None
    return best.without_removed()


class Nearest(NamedTuple):
    """Lists of rows of the corpus, best first: keys, rows and similarities, [b, m] each."""

    key: Annotated[Tensor, "b m"]
    rows: Annotated[Tensor, "b m"]
    similarity: Annotated[Tensor, "b m"]

    def without_removed(self) -> Nearest:
        """Return the lists with row -1 and similarity NEVER where the key is NEVER."""
        removed = self.key == NEVER
        return Nearest(self.key, self.rows.masked_fill(removed, -1), self.similarity.masked_fill(removed, NEVER))


def merged(first: Nearest, second: Nearest, size: int) -> Nearest:
    """Merge two lists and keep the best.

    Args:
        first: Lists of earlier rows.
        second: Lists of later rows: all of their rows must be larger than those of the first.
        size: Length of the result.
    """
    both = [torch.cat(pair, 1) for pair in zip(first, second, strict=True)]
    place = in_order_of(both[0])[:, :size]
    return Nearest(*(each.gather(1, place) for each in both))


def _among(rows: Annotated[Tensor, "b m"], excluded: Excluded) -> Annotated[Tensor, "b m"]:
    """Return which rows of the corpus, listed by query, are excluded."""
    found, at_once = torch.zeros_like(rows, dtype=torch.bool), max(1, _COMPARED // rows.shape[1])
    for query, row in zip(*(torch.split(each, at_once) for each in excluded), strict=True):
        place, column = (rows[query] == row[:, None]).nonzero().unbind(1)
        found[query[place], column] = True
    return found


class FaissIndex:
    """A FAISS index with the interface of ``nearest``, by inner product.

    Args:
        corpus: The corpus.
        kind: "flat" (exact), "ivf" or "hnsw" (approximate).
        num_probes: Cells to search (ivf); for hnsw, efSearch is 16 times this.
        who: Name of the caller, for the error if FAISS is missing.
    """

    def __init__(self, corpus: Corpus, kind: str, num_probes: int = 16, who: str | None = None) -> None:
        faiss = optional("faiss", who or f"Search({kind!r})", extra="ann")
        dim = corpus.vectors.shape[1]
        self.corpus, self.kind = corpus, kind
        if kind == "flat":
            self.index = faiss.IndexFlatIP(dim)
        elif kind == "hnsw":
            self.index = faiss.IndexHNSWFlat(dim, 32, faiss.METRIC_INNER_PRODUCT)
            self.index.hnsw.efSearch = 16 * num_probes
        else:
            cells = max(1, min(int(4 * len(corpus) ** 0.5), len(corpus) // 39))
            self.index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, cells, faiss.METRIC_INNER_PRODUCT)
            sample = torch.linspace(0, len(corpus) - 1, min(len(corpus), 256 * cells)).long()
            self.index.train(self._plain(corpus.rows(sample)))
            self.index.nprobe = min(num_probes, cells)
        for low, high in corpus.blocks():
            self.index.add(self._plain(corpus.part(low, high)))

    def nearest(self, queries: Annotated[Tensor, "b d"], size: int, excluded: Excluded) -> Nearest:
        """Find the nearest rows as ``nearest`` does, removing excluded pairs afterwards.

        More rows are searched for, so that enough are left.
        """
        most = int(torch.bincount(excluded[0]).max()) if len(excluded[0]) else 0
        wanted = min(size + most + (self.kind == "flat"), len(self.corpus))
        values, rows = map(torch.from_numpy, self.index.search(self._plain(queries), wanted))
        taken = _among(rows, (excluded[0].cpu(), excluded[1].cpu()))
        values, rows = in_order(values.masked_fill_(taken | (rows < 0), NEVER), rows)
        key = values[:, :size].to(queries.device, self.corpus.dtype)
        found = Nearest(key, rows[:, :size].to(queries.device), key).without_removed()
        if self.kind == "flat" and values.shape[1] > size:
            tied = (values[:, size - 1] == values[:, size]) & (values[:, size] != NEVER)
            self._settle_ties(found, queries, excluded, tied)
        return found

    def _settle_ties(self, found: Nearest, queries: Tensor, excluded: Excluded, tied: Annotated[Tensor, "b"]) -> None:
        """Search exactly where equal similarities lie on both sides of the end, since FAISS picks any of them."""
        again = tied.nonzero()[:, 0].to(queries.device)
        if not len(again):
            return
        place = torch.full((len(queries),), -1, device=queries.device)
        place[again] = torch.arange(len(again), device=queries.device)
        query, row = place[excluded[0]], excluded[1]
        exact = nearest(self.corpus, queries[again], found.rows.shape[1], (query[query >= 0], row[query >= 0]))
        for each, right in zip(found, exact, strict=True):
            each[again] = right

    @staticmethod
    def _plain(vectors: Tensor) -> Any:
        return vectors.detach().cpu().float().contiguous().numpy()
