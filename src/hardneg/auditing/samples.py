"""What the numbers of an audit rest on: similarities of positives and candidates, and some lists as texts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from hardneg.auditing.lists import Lists
from hardneg.auditing.measure import Chunk
from hardneg.auditing.result import Sample, Similarities

BINS, NUM_SAMPLES, NUM_NEGATIVES = 80, 4, 3


class PairCounts:
    """Counts the cosines of positives and of all candidates over even bins of [-1, 1]."""

    def __init__(self) -> None:
        self.positives, self.candidates = torch.zeros(BINS, dtype=torch.float64), torch.zeros(BINS, dtype=torch.float64)

    def add(self, chunk: Chunk, temperature: float) -> None:
        scores = chunk.scores
        self.positives += _counted(scores.positives[scores.positive_valid] * temperature)
        self.candidates += _counted(chunk.similarity[scores.valid.expand_as(chunk.similarity)])

    def found(self, positive: float, candidate: float) -> Similarities | None:
        """None where there are no positives to compare; dot products outside of [-1, 1] count in the outer bins."""
        if not self.positives.sum() or not self.candidates.sum() or math.isnan(positive) or math.isnan(candidate):
            return None
        edges = torch.linspace(-1.0, 1.0, BINS + 1).tolist()
        return Similarities(tuple(edges), tuple(self.positives.tolist()), tuple(self.candidates.tolist()))


def _counted(similarity: torch.Tensor) -> torch.Tensor:
    slots = ((similarity.detach().float().cpu() + 1.0) * (BINS / 2)).long().clamp(0, BINS - 1)
    return torch.bincount(slots.flatten(), minlength=BINS).double()


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
