"""What the numbers of an audit rest on: similarities of positives and candidates, and some lists as texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hardneg.auditing.lists import Lists
from hardneg.auditing.measure import AuditChunk
from hardneg.auditing.result import Counted, Sample, Similarities
from hardneg.search.histogram import SimilarityCounts

BINS, NUM_SAMPLES, NUM_NEGATIVES = 80, 4, 3


class PairCounts(SimilarityCounts):
    """Those of positives, of known false candidates and of the others."""

    def __init__(self) -> None:
        super().__init__(3, BINS)

    def add_chunk(self, chunk: AuditChunk, temperature: float) -> None:
        scores = chunk.scores
        valid = scores.valid.expand_as(chunk.similarity)
        false = valid & chunk.false if chunk.false is not None else torch.zeros_like(valid)
        positives = scores.positives[scores.positive_valid] * temperature
        for kind, pairs in enumerate((positives, chunk.similarity[false], chunk.similarity[valid & ~false])):
            self.add(kind, pairs)

    def found(self) -> Similarities:
        means = zip(self.counts, self.means(), strict=True)
        kinds = [Counted(tuple(counts.tolist()), mean) if counts.any() else None for counts, mean in means]
        return Similarities(tuple(self.edges.tolist()), *kinds)


def samples_of(lists: Lists, query_text: Callable[[Any], Any], text_of: Callable[[Any], Any]) -> tuple[Sample, ...]:
    """Some queries, spread over the file, with a positive and their first negatives, as texts where they are known."""
    filled = [i for i, names in enumerate(lists.negatives) if names]
    chosen = filled[:: max(1, len(filled) // NUM_SAMPLES)][:NUM_SAMPLES]
    return tuple(
        Sample(
            query_text(lists.queries[i]),
            tuple(text_of(name) for name in lists.positives[i][:1]),
            tuple(text_of(name) for name in lists.negatives[i][:NUM_NEGATIVES]),
        )
        for i in chosen
    )
