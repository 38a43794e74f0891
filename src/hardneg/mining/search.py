"""The options of a search: how candidates are found, and how much memory and how many blocks that takes.

The search itself is in ``hardneg.search.nearest`` and ``candidates.py``. ``Search`` is public:
users pass it to ``hn.mine``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, get_args

import torch
from torch import Tensor

from hardneg.core.errors import argument_error, check_among, check_count, check_counts
from hardneg.mining.options import Fusion, Similarity

_query_blocks = {"cpu": 512, "cuda": 8192}
_block_bytes = 20 << 20  # products of one block on a CPU; larger ones do not fit its caches
_most_gpu_bytes = 2 << 30  # products of one block on a GPU, at most
_products_per_second = 2e10  # multiplications of one core, a low estimate
_seconds, _most_shards = 15.0, 256
_memory, _gpu_share_of_memory = 2 << 30, 8
most_numbers = 1 << 24
"""Most numbers of gathered vectors held at a time."""


SearchKind = Literal["exact", "flat", "ivf", "hnsw", "also"]


class Retriever(Protocol):
    """Another way to find candidates, such as BM25 or a stored run."""

    @property
    def name(self) -> str:
        """Name that ``From`` and quotas use, such as ``"bm25"``."""
        ...

    def __call__(self, queries: Annotated[Tensor, "b"], size: int) -> Annotated[Tensor, "b size"]:
        """Return the best ``size`` rows of the corpus for each of these queries.

        Args:
            queries: Positions of queries [b].
            size: Number of candidates wanted for each.

        Returns:
            Rows of the corpus [b, size], best first, and -1 where there are no more.
        """
        ...


@dataclass(frozen=True)
class Search:
    """How candidates are found, and with which blocks and memory.

    Scores are exact, in float64, and so is every choice among them. Only a ring takes the scores of
    its edges from float32 products: among copies of one vector, whose scores are equal, an edge may
    then fall on another copy if the blocks differ.

    Attributes:
        kind: ``"exact"``; ``"flat"``, ``"ivf"`` or ``"hnsw"`` through FAISS (extra ``ann``); or
            ``"also"``, only the retrievers of ``also``.
        query_block: Queries of one matrix product; 0 fits them to the device.
        corpus_block: Documents of one matrix product; 0 fits them to the device.
        device: Device of the products; None is that of the corpus.
        num_probes: Cells visited by ivf; hnsw keeps 16 times as many candidates.
        candidates: Candidates of each retriever, where there are several or a rescorer.
        similarity: ``"cosine"``, which scales vectors to unit length block by block, or ``"dot"``.
        also: Other retrievers, whose candidates join the nearest ones.
        shards: Parts of the corpus that are searched one by one and merged, with the same
            negatives; 0 makes them last about a quarter of a minute each.
        precision: Precision of the products that screen candidates: ``"float32"``, ``"bfloat16"``,
            or ``"auto"``, bfloat16 where the GPU or the CPU is faster with it; the same negatives.
        fusion: Order in which ``draw="top"`` takes the candidates of several retrievers: ``"rrf"``,
            reciprocal-rank fusion, or ``"similarity"``.
        quotas: Number of negatives of each retriever instead: ``(("bm25", 2), ("embedding", 3))``.
            See ``fusion.py``.
        memory: Memory budget of one process in bytes, for blocks of scores and lists of queries;
            with more queries than fit, the corpus is read again for the next ones. Vectors held in
            memory, ids and texts come on top. 0 means 2 GiB, or an eighth of a GPU's memory if that
            is more.

    Example:
        >>> from hardneg.mining import mine
        >>> mine([[2.0, 0.0]], [[1.0, 0.0], [3.0, 4.0]], [0], "Uniform()", 1, search=Search(similarity="dot")).scores
        tensor([[6.]])
    """

    kind: SearchKind = "exact"
    query_block: int = 0
    corpus_block: int = 0
    device: str | None = None
    num_probes: int = 16
    candidates: int = 100
    similarity: Similarity = "cosine"
    also: tuple[Retriever, ...] = ()
    shards: int = 1
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    fusion: Fusion = "rrf"
    quotas: tuple[tuple[str, int], ...] = ()
    memory: int = 0

    def __post_init__(self) -> None:
        check_among("Search", "kind", self.kind, get_args(SearchKind))
        check_among("Search", "similarity", self.similarity, get_args(Similarity))
        check_among("Search", "precision", self.precision, ("auto", "float32", "bfloat16"))
        if self.kind == "also" and not self.also:
            raise argument_error("Search", "retrievers in also with kind 'also'", "also", self.also)
        check_among("Search", "fusion", self.fusion, get_args(Fusion))
        for _, number in self.quotas:
            check_count("Search", "quotas", number)
        check_counts("Search", self, "query_block", "corpus_block", "shards", "memory", least=0)
        check_counts("Search", self, "num_probes", "candidates")

    @property
    def cosine(self) -> bool:
        """Whether vectors are compared by the cosine."""
        return self.similarity == "cosine"

    def blocks(self, device: torch.device, rows: int | None = None) -> tuple[int, int]:
        """Return the number of queries and of documents of one matrix product.

        Args:
            device: Device that computes the products.
            rows: Size of the corpus, if known: blocks are then small enough for the requested
                number of shards.
        """
        queries = self.query_block or _query_blocks.get(device.type, 512)
        held = _block_bytes
        if device.type == "cuda":
            held = min(self.memory_on(device) // 8, _most_gpu_bytes)
        documents = max(1024, held // (4 * queries))
        if rows is not None and self.shards > 1:  # else a block could span several of the requested shards
            documents = min(documents, -(-rows // self.shards))
        return queries, self.corpus_block or documents

    def memory_on(self, device: torch.device) -> int:
        """Return the memory budget of one process on this device, in bytes."""
        if self.memory or device.type != "cuda":
            return self.memory or _memory
        return max(_memory, torch.cuda.get_device_properties(device).total_memory // _gpu_share_of_memory)

    def most_scores(self, device: torch.device) -> int:
        """Return the largest number of scores in one tile; several tensors of that size exist at a time."""
        return max(1, self.memory_on(device) // 64)

    def shards_for(self, queries: int, rows: int, dim: int, device: torch.device) -> int:
        """Return the number of shards, so that each takes about 15 seconds on one CPU core.

        Args:
            queries: Number of queries.
            rows: Number of documents.
            dim: Dimension of the vectors.
            device: Device that computes the products; other devices than CPUs search in one shard
                by default.
        """
        if self.shards or device.type != "cpu":
            return self.shards or 1
        seconds = 2.0 * queries * rows * dim / _products_per_second
        return min(max(1, round(seconds / _seconds)), _most_shards)
