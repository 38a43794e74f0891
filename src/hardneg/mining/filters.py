"""What is taken out while searching: the guard near the positives and the factors of a distribution, tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from hardneg.core.bounds import Bounds, TileAndMask, find_bounds
from hardneg.core.types import NEVER
from hardneg.mining.corpus_scores import CorpusScorer, ModelVectors
from hardneg.negatives import Negatives
from hardneg.negatives.closed import ClosedForm
from hardneg.search.draws import gumbel_keys

CorpusPart = tuple[int, int]
"""The first row and the end of a part of the corpus."""
Uniforms = Callable[[int, int], Annotated[Tensor, "b m"]]
"""(first row, end) of a block of the corpus -> a random number for each query and row."""


@dataclass(frozen=True, eq=False)
class CorpusRows:
    """Some queries against a part of the corpus, as tiles for the sweep: the same tiles at each call."""

    scorer: CorpusScorer
    query: Annotated[Tensor, "b"]
    part: CorpusPart

    def tiles(self) -> Iterator[TileAndMask]:
        scorer, query = self.scorer, self.query
        vectors, excluded = scorer.model.of(query), scorer.excluded.of(query)
        for low, high in scorer.corpus.blocks(self.part):
            similarity = scorer.corpus.scores(vectors, excluded, low, high)
            valid = (similarity != NEVER) & ~scorer.near_positive_block(query, low, high)
            yield scorer.tile(query, similarity, low, high), valid

    def positives(self) -> Iterator[TileAndMask]:
        yield self.scorer.positive_tile(self.query)


def bounds_of(
    scorer: CorpusScorer, query: Annotated[Tensor, "b"], factors: Sequence[Negatives], part: CorpusPart | None = None
) -> list[Bounds]:
    """The bounds of each factor for these queries, over a part of the corpus or, without one, the positives alone."""
    return find_bounds(factors, [CorpusRows(scorer, query, part or (0, 0))])[0]


class Filters:
    """The guard near the positives and some of the factors, applied to blocks of similarities while searching.

    What is left is ordered by similarity or, with ``uniforms``, as Gumbel-max draws them. ``judged_again``: the factors
    see the candidates that are left once more, in float64, so that one which rounding may have moved over an edge is
    left in.
    """

    def __init__(
        self,
        scorer: CorpusScorer,
        query: Annotated[Tensor, "b"],
        factors: Sequence[Negatives],
        bounds: Sequence[Bounds],
        uniforms: Uniforms | None = None,
        *,
        judged_again: bool = False,
    ) -> None:
        self.scorer, self.query, self.factors, self.bounds = scorer, query, factors, bounds
        self.uniforms, self.drawn, self.judged_again = uniforms, uniforms is not None, judged_again
        self.seen = torch.zeros(len(query), 2 + len(factors), dtype=torch.long, device=scorer.device)

    def __call__(
        self, similarity: Annotated[Tensor, "b m"], low: int, high: int, slack: Annotated[Tensor, "b 1"]
    ) -> Annotated[Tensor, "b m"]:
        met = similarity != NEVER
        valid = met & ~self.scorer.near_positive_block(self.query, low, high)
        log_w, left = self._weighed(similarity, valid, low, high)
        self.seen += torch.stack([met.sum(1), *left], 1)
        if self.uniforms is not None:
            return gumbel_keys(log_w, self.uniforms(low, high))
        kept = log_w != NEVER
        if self.judged_again:
            by, guide = slack.to(similarity.dtype), self.scorer.guide
            wide = guide.slack(self.query, low, high).to(similarity.dtype) if isinstance(guide, ModelVectors) else None
            for moved in (similarity - by, similarity + by):
                for other in (None,) if wide is None else (-wide, wide):
                    kept |= self._weighed(moved, valid, low, high, other)[0] != NEVER
        return similarity.masked_fill(~kept, NEVER)

    def _weighed(
        self, similarity: Tensor, valid: Tensor, low: int, high: int, moved: Annotated[Tensor, "b 1"] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """The log-weights, and how many the guard and each factor left. The guide's are ``moved`` by as much."""
        tile = self.scorer.tile(self.query, similarity, low, high)
        if moved is not None and tile.guide is not None:
            tile.guide = tile.guide + moved
        log_w, left = torch.where(valid, 0.0, NEVER).to(similarity.dtype), [valid.sum(1)]
        for factor, bound in zip(self.factors, self.bounds, strict=True):
            log_w = torch.where(valid, log_w + factor.log_weight(tile.bounded(bound)), NEVER)
            valid = log_w != NEVER
            left.append(valid.sum(1))
        return log_w, left


class Ceilings:
    """Factors that only remove what scores above a ceiling, applied while searching: rows without such scores cost one
    look at their largest.

    The factors see the candidates that are left once more, in float64: one that rounding may have moved is left in.
    """

    drawn = False

    def __init__(self, scorer: CorpusScorer, query: Annotated[Tensor, "b"], forms: Sequence[ClosedForm]) -> None:
        positives, real = scorer.positive_scores(query)
        lowest = positives.masked_fill(~real, torch.inf).amin(1, keepdim=True)
        above = [lowest.new_full((len(query), 1), torch.inf)]
        for form in forms:
            ceiling = form.ceiling(lowest)
            above.append(above[-1] if ceiling is None else torch.minimum(above[-1], ceiling))
        self.ceilings = above[1:]
        pairs = torch.unique(torch.stack(scorer.excluded.of(query)), dim=1)
        self.place, self.row = pairs[0], pairs[1]
        self.seen = torch.zeros(len(query), 2 + len(forms), dtype=torch.long, device=scorer.device)

    def __call__(
        self, similarity: Annotated[Tensor, "b m"], low: int, high: int, slack: Annotated[Tensor, "b 1"]
    ) -> Annotated[Tensor, "b m"]:
        banned = torch.bincount(self.place[(self.row >= low) & (self.row < high)], minlength=len(similarity))
        self.seen += (high - low) - banned[:, None]
        least = self.ceilings[-1]
        some = (similarity.amax(1, keepdim=True) > least)[:, 0].nonzero()[:, 0]
        if len(some):
            part = similarity[some]
            removed = [(part > ceiling[some]).sum(1) for ceiling in self.ceilings]
            self.seen[some, 2:] -= torch.stack(removed, 1)
            similarity[some] = part.masked_fill(part > (least + slack)[some], NEVER)
        return similarity
