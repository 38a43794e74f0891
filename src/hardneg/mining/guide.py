"""A second model's similarities for the candidates of mining, and the products of listed pairs."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError
from hardneg.core.nearest import Corpus
from hardneg.core.types import Keys
from hardneg.mining.search import most_numbers


class GuideModel:
    """Another model's vectors of the same queries and corpus, for BelowPositive(by="guide")."""

    def __init__(self, queries: Tensor, corpus: Tensor, own_queries: Keys, own_corpus: Corpus) -> None:
        if len(queries) != len(own_queries) or len(corpus) != len(own_corpus) or queries.shape[1:] != corpus.shape[1:]:
            raise ArgumentError(
                "mine",
                f"a guide of {len(own_queries)} queries and {len(own_corpus)} documents",
                f"guide={tuple(queries.shape)} and {tuple(corpus.shape)}",
            )
        self.queries = queries
        self.corpus = Corpus(corpus, own_corpus.device, own_corpus.block, queries.dtype, own_corpus.cosine)

    def pairs(self, query: Annotated[Tensor, "m"], rows: Annotated[Tensor, "m"]) -> Annotated[Tensor, "m"]:
        return pair_products(self.queries, self.corpus, query, rows)

    def block(self, query: Tensor, low: int, high: int) -> Annotated[Tensor, "b m"]:
        return rows_of_vectors(self.queries, query, self.corpus) @ self.corpus.part(low, high).T


def pair_products(vectors: Tensor, corpus: Corpus, query: Tensor, rows: Tensor) -> Annotated[Tensor, "m"]:
    """The dot product of each pair of a query and a row of the corpus."""
    at_once = max(1, most_numbers // vectors.shape[1])
    parts = [
        (rows_of_vectors(vectors, q, corpus) * corpus.rows(r)).sum(-1)
        for q, r in zip(torch.split(query, at_once), torch.split(rows, at_once), strict=True)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=corpus.dtype, device=corpus.device)


def rows_of_vectors(vectors: Tensor, query: Tensor, corpus: Corpus) -> Annotated[Tensor, "b d"]:
    return corpus.prepared(vectors[query.to(vectors.device)])
