"""What the numbers of an audit rest on: similarities of positives and candidates, and some lists as texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hardneg.auditing.lists import Lists
from hardneg.auditing.measure import Chunk
from hardneg.auditing.result import Counted, Sample, Similarities

BINS, NUM_SAMPLES, NUM_NEGATIVES = 80, 4, 3


class PairCounts:
    """Counts the similarities of positives, known false candidates and the others over even bins of [-1, 1]."""

    def __init__(self) -> None:
        self.counts = torch.zeros(3, BINS, dtype=torch.int64)
        self.sums = torch.zeros(3, dtype=torch.float64)

    def add(self, chunk: Chunk, temperature: float) -> None:
        scores = chunk.scores
        valid = scores.valid.expand_as(chunk.similarity)
        false = valid & chunk.false if chunk.false is not None else torch.zeros_like(valid)
        positives = scores.positives[scores.positive_valid] * temperature
        for kind, pairs in enumerate((positives, chunk.similarity[false], chunk.similarity[valid & ~false])):
            slots = ((pairs.detach().float() + 1.0) * (BINS / 2)).long().clamp(0, BINS - 1)
            self.counts[kind] += torch.bincount(slots.flatten(), minlength=BINS).cpu()
            self.sums[kind] += pairs.detach().double().sum().cpu()

    def found(self) -> Similarities:
        """Dot products outside of [-1, 1] count in the outer bins."""
        totals = self.counts.sum(dim=1)
        kinds = [
            Counted(tuple(counts.tolist()), float(total / number)) if number else None
            for counts, total, number in zip(self.counts, self.sums, totals, strict=True)
        ]
        return Similarities(tuple(torch.linspace(-1.0, 1.0, BINS + 1).tolist()), *kinds)


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
