"""What each factor removed, and why queries have too few negatives.

``Explanation`` counts while negatives are chosen; it is part of ``Mined``, printed by the command
line and stored in the manifest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, spelled, written
from hardneg.negatives import Negatives

TOO_FEW = "too few candidates"
"""Reason of a short query from which no factor removed anything."""


@dataclass
class Explanation:
    """Counts over the candidates examined, which are the nearest ones that the expression needs, not always all.

    Attributes:
        steps: Names of the steps: the guard near the positives, each factor, the guard near other
            negatives.
        used: Whether each step is active; False for a guard that is off.
        queries: Number of queries.
        short: Queries with fewer than k negatives.
        empty: Queries without any negative.
        looked_at: Candidates examined.
        removed: Candidates removed by each step.
        why: Number of short queries for each reason: the step after which fewer than k candidates
            were left.
    """

    steps: tuple[str, ...]
    used: tuple[bool, ...]
    queries: int = 0
    short: int = 0
    empty: int = 0
    looked_at: int = 0
    removed: list[int] = field(default_factory=list)
    why: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, negatives: Negatives, near_positive: float | None, near_negative: float | None) -> Explanation:
        """Return an empty explanation for an expression and its guards."""
        factors = [f"{i + 1}. {factor!r}" for i, factor in enumerate(negatives.factors)]
        steps = (f"near_positive={near_positive}", *factors, f"near_negative={near_negative}")
        used = (near_positive is not None, *(True for _ in factors), near_negative is not None)
        return cls(steps, used, removed=[0] * len(steps))

    def count(self, left: Annotated[Tensor, "b f"], removed: Annotated[Tensor, "b f"], chosen: Tensor, k: int) -> None:
        """Add a block of queries.

        Args:
            left: Candidates at the start, after the guard and after each factor [b, steps].
            removed: Candidates removed by each step [b, steps].
            chosen: Number of negatives of each query [b].
            k: Number of negatives wanted.
        """
        self.queries += len(chosen)
        self.looked_at += int(left[:, 0].sum())
        self.removed = [had + int(more) for had, more in zip(self.removed, removed.sum(0), strict=True)]
        short = chosen < k
        self.short += int(short.sum())
        self.empty += int((chosen == 0).sum())
        few = left[short] < k  # columns: at the start, after the guard, after each factor
        first = torch.where(few.any(1), few.int().argmax(1), few.shape[1])
        reasons = (TOO_FEW, *self.steps)
        self._explain(Counter(reasons[place] for place in first.tolist()))

    def short_after(self, rows: Annotated[Tensor, "q k"]) -> None:
        """Count short queries again, after lists were filled with documents judged irrelevant."""
        self.short, self.empty = int((rows < 0).any(1).sum()), int((rows < 0).all(1).sum())

    def _explain(self, why: Mapping[str, int]) -> None:
        self.why = dict(Counter(self.why) + Counter(why))

    def rows(self) -> list[tuple[str, int, int]]:
        """Return (step, candidates removed, queries short for this reason) for a table, without unused guards."""
        every = zip(self.steps, self.removed, self.used, strict=True)
        return [(step, gone, self.why.get(step, 0)) for step, gone, used in every if used]

    def reason(self) -> str:
        """Return the step after which most short queries had too few candidates."""
        return max(self.why, key=lambda step: self.why[step], default="no candidates")

    def cause(self) -> str:
        """Return the reason without the number of the step."""
        return self.reason().split(". ", 1)[-1]

    def as_dict(self) -> dict[str, Any]:
        """Return the counts for the manifest."""
        return {
            "queries": self.queries,
            "looked_at": self.looked_at,
            "removed": {step: gone for step, gone, _ in self.rows()},
            "short": self.short,
            "empty": self.empty,
            "why_short": dict(self.why),
        }


class NoNegatives(ArgumentError):
    """Raised if no query has enough negatives to be written.

    Attributes:
        explanation: Counts of what each factor removed.
    """

    explanation: Explanation


def no_negatives(explanation: Explanation, format: str, candidates: int | None = None) -> NoNegatives:
    """Return the error for a job without rows: the average number of candidates, what removed them, and the fix.

    Args:
        explanation: Counts of the job.
        format: Format of the output.
        candidates: Candidates of each retriever, if negatives were chosen from lists of retrievers.
    """
    looked_at = f"{explanation.looked_at / max(explanation.queries, 1):,.1f}".removesuffix(".0")
    cause = explanation.cause()
    few = "which are too few" if cause == TOO_FEW else f"of which {cause} leaves too few"
    got = f"none of {explanation.queries:,} queries with enough: on average, a query has {looked_at} candidates, {few}"
    fix = f"use a smaller {spelled('mine', 'k')} or a less strict expression"
    if not explanation.looked_at:
        fix = f"give more documents with {spelled('mine', 'corpus')}"
    elif candidates is not None:
        given = written("mine", "candidates", candidates)
        fix = f"{fix}, or raise {given} (per retriever); BM25 only finds documents that share a word"
    error = NoNegatives("mine", f"negatives to write as {format}", got, fix)
    error.explanation = explanation
    return error
