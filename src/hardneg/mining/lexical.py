"""Candidates that share words with the query: BM25 through bm25s, the extra ``lexical``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, optional
from hardneg.search.topk import top_of_rows


class Lexical:
    """BM25 over the texts of the corpus, as one more retriever of ``Search(also=...)``."""

    name = "bm25"

    def __init__(self, queries: Sequence[str], corpus: Sequence[str]) -> None:
        # bm25s imports JAX where it is installed, which would take three quarters of a GPU's memory for itself.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        self.bm25s = optional("bm25s", "BM25", extra="lexical")
        self.queries, self.size = queries, len(corpus)
        tokens = self.bm25s.tokenize(list(corpus), show_progress=False, return_ids=False)
        self.index = self.bm25s.BM25()
        if not any(tokens):
            raise ArgumentError("BM25", "words in the corpus", "none")
        self.index.index(tokens, show_progress=False)

    def scores(self, queries: Annotated[Tensor, "m"], rows: Annotated[Tensor, "m"]) -> Annotated[Tensor, "m"]:
        """The BM25 score of each pair."""
        out = torch.zeros(len(rows))
        distinct, place = torch.unique(queries, return_inverse=True)
        for number, words in enumerate(self._tokens(distinct)):
            mine = (place == number).nonzero()[:, 0]
            out[mine] = self._of_words(words)[rows[mine]]
        return out

    def _of_words(self, words: list[str]) -> Annotated[Tensor, "n"]:
        if not words:
            return torch.zeros(self.size)
        return torch.from_numpy(np.asarray(self.index.get_scores(words), dtype=np.float32))

    def _tokens(self, queries: Tensor) -> list[list[str]]:
        texts = [self.queries[int(query)] for query in queries]
        return self.bm25s.tokenize(texts, show_progress=False, return_ids=False)  # type: ignore[no-any-return]

    def __call__(self, queries: Annotated[Tensor, "b"], size: int) -> Annotated[Tensor, "b size"]:
        """By score and, among equal ones, by row: bm25s takes any of these, and others for another size."""
        rows = torch.full((len(queries), min(size, self.size)), -1)
        for place, words in enumerate(self._tokens(queries)):
            best, found = top_of_rows(self._of_words(words)[None], rows.shape[1])
            rows[place] = torch.where(best > 0, found, -1)[0]
        return rows
