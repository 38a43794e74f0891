"""How candidates are found: the options of a search. The search itself is ``hardneg.search.nearest``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
from torch import Tensor

from hardneg.core.errors import argument_error, check_among, check_count, check_counts

_queries = {"cpu": 512, "cuda": 8192}
_block_bytes = 20 << 20  # of products: what the caches of a CPU still help with
_most_gpu_bytes = 2 << 30  # the same of a GPU
_products_per_second = 2e10  # of one core, at least
_seconds, _most_shards = 15.0, 256
_memory, _gpu_share_of_memory = 2 << 30, 8
most_numbers = 1 << 24  # of gathered vectors, held at a time


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
    fusion: in which order ``draw="top"`` takes the candidates of several retrievers: ``"rrf"``, reciprocal-rank fusion,
        or ``"similarity"``. quotas: instead, how many of each: ``(("bm25", 2), ("embedding", 3))``. See fusion.py.
    shards: parts of the corpus that are searched one by one and whose results are merged; the same negatives. 0: as
        many as take about a quarter of a minute each.
    precision: of the products that screen candidates: ``"float32"``, ``"bfloat16"``, or ``"auto"``, which takes
        bfloat16 where tensor cores have it; the same negatives.
    memory: bytes of one process for its blocks of scores and the lists of queries; with more queries than fit, the
        corpus is read again for the next ones. Vectors that are given in memory, ids and texts come on top. 0: 2 GiB,
        or an eighth of a GPU's memory if that is more.

    Scores are exact, in float64, and so is every choice among them. Only a ring takes the scores of its edges from
    float32 products: among copies of one vector, whose scores are equal, an edge may then fall on another copy where
    the blocks are other ones.
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
    precision: str = "auto"
    fusion: str = "rrf"
    quotas: tuple[tuple[str, int], ...] = ()
    memory: int = 0

    def __post_init__(self) -> None:
        check_among("Search", "kind", self.kind, ("exact", "flat", "ivf", "hnsw", "also"))
        check_among("Search", "precision", self.precision, ("auto", "float32", "bfloat16"))
        if self.kind == "also" and not self.also:
            raise argument_error("Search", "retrievers in also with kind 'also'", "also", self.also)
        check_among("Search", "fusion", self.fusion, ("rrf", "similarity"))
        for _, number in self.quotas:
            check_count("Search", "quotas", number)
        check_counts("Search", self, "query_block", "corpus_block", "shards", "memory", least=0)
        check_counts("Search", self, "num_probes", "candidates")

    def blocks(self, device: torch.device, rows: int | None = None) -> tuple[int, int]:
        """Queries and documents of one matrix product, for a corpus of so many rows."""
        queries = self.query_block or _queries.get(device.type, 512)
        held = _block_bytes
        if device.type == "cuda":
            held = min(self.memory_on(device) // 8, _most_gpu_bytes)
        documents = max(1024, held // (4 * queries))
        if rows is not None and self.shards > 1:  # as many shards as were wanted
            documents = min(documents, -(-rows // self.shards))
        return queries, self.corpus_block or documents

    def memory_on(self, device: torch.device) -> int:
        if self.memory or device.type != "cuda":
            return self.memory or _memory
        return max(_memory, torch.cuda.get_device_properties(device).total_memory // _gpu_share_of_memory)

    def most_scores(self, device: torch.device) -> int:
        """Scores of one tile: several tensors of its size are held at a time."""
        return max(1, self.memory_on(device) // 64)

    def shards_for(self, queries: int, rows: int, dim: int, device: torch.device) -> int:
        if self.shards or device.type != "cpu":
            return self.shards or 1
        seconds = 2.0 * queries * rows * dim / _products_per_second
        return min(max(1, round(seconds / _seconds)), _most_shards)
