"""Remove candidates during the search: near-duplicates of positives and factors of the distribution, tile by tile.

``Filters`` applies any factors; ``Ceilings`` is faster if all factors only remove candidates above
a score. ``Finder.running`` chooses between them. ``bounds_of`` computes the bounds that factors
need.
"""

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
from hardneg.search.nearest import Weigh

CorpusPart = tuple[int, int]
"""First row and end of a part of the corpus."""
Uniforms = Callable[[int, int], Annotated[Tensor, "b m"]]
"""(first row, end) of a block of the corpus -> a random number in (0, 1) for each query and row."""


@dataclass(frozen=True, eq=False)
class CorpusRows:
    """Some queries against a part of the corpus, as tiles for ``find_bounds``; each call yields the same tiles.

    Attributes:
        scorer: Queries and corpus.
        query: Positions of the queries [b].
        part: First row and end of the part.
    """

    scorer: CorpusScorer
    query: Annotated[Tensor, "b"]
    part: CorpusPart

    def tiles(self) -> Iterator[TileAndMask]:
        """Yield tiles of the part of the corpus, with a mask of the candidates."""
        scorer, query = self.scorer, self.query
        vectors, excluded = scorer.model.of(query), scorer.excluded.of(query)
        for low, high in scorer.corpus.blocks(self.part):
            similarity = scorer.corpus.scores(vectors, excluded, low, high)
            valid = (similarity != NEVER) & ~scorer.near_positive_block(query, low, high)
            yield scorer.tile(query, similarity, low, high), valid

    def positives(self) -> Iterator[TileAndMask]:
        """Yield the tile of the positives."""
        yield self.scorer.positive_tile(self.query)


def bounds_of(
    scorer: CorpusScorer, query: Annotated[Tensor, "b"], factors: Sequence[Negatives], part: CorpusPart | None = None
) -> list[Bounds]:
    """Return the bounds of each factor for these queries.

    Args:
        scorer: Queries and corpus.
        query: Positions of the queries [b].
        factors: Factors of the expression.
        part: Part of the corpus that bounds are computed over; None uses only the positives.
    """
    return find_bounds(factors, [CorpusRows(scorer, query, part or (0, 0))])[0]


class Filters(Weigh):
    """Near-duplicates of positives and some factors, removed from blocks of similarities during a search.

    The remaining candidates are ordered by similarity or, with ``uniforms``, by their Gumbel-max keys.

    Args:
        scorer: Queries and corpus.
        query: Positions of the queries [b].
        factors: Factors to apply.
        bounds: Bounds of each factor.
        uniforms: Random numbers of a Gumbel draw; None orders by similarity.
        judged_again: Whether the factors see the remaining candidates again in float64. Candidates
            that rounding may have moved over an edge then stay in.
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
        """Return the keys of a block, ``NEVER`` where a candidate is removed, and count the steps in ``seen``.

        Args:
            similarity: Similarities of the block [b, m].
            low: First row of the block.
            high: End of the block.
            slack: Largest rounding error of the similarities [b, 1].
        """
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
        """Return the log-weights and the number of candidates left by the guard and by each factor.

        Scores of the guide are shifted by ``moved``, if given.
        """
        tile = self.scorer.tile(self.query, similarity, low, high)
        if moved is not None and tile.guide is not None:
            tile.guide = tile.guide + moved
        log_w, left = torch.where(valid, 0.0, NEVER).to(similarity.dtype), [valid.sum(1)]
        for factor, bound in zip(self.factors, self.bounds, strict=True):
            log_w = torch.where(valid, log_w + factor.log_weight(tile.bounded(bound)), NEVER)
            valid = log_w != NEVER
            left.append(valid.sum(1))
        return log_w, left


class Ceilings(Weigh):
    """Factors that only remove candidates above a score, applied during a search.

    If no score of a query in a block exceeds the ceiling, only its largest score is computed. Candidates
    within rounding error of the ceiling stay in, because the factors are applied again in float64.

    Args:
        scorer: Queries and corpus.
        query: Positions of the queries [b].
        forms: Closed forms of the factors.
    """

    drawn = False

    def __init__(self, scorer: CorpusScorer, query: Annotated[Tensor, "b"], forms: Sequence[ClosedForm]) -> None:
        positives, real = scorer.positive_scores(query)
        lowest = positives.masked_fill(~real, torch.inf).amin(1, keepdim=True)
        above = [lowest.new_full((len(query), 1), torch.inf)]
        for form in forms:
            ceiling = form.ceiling(lowest)
            above.append(above[-1] if ceiling is None else torch.minimum(above[-1], ceiling))
        self.ceilings, self.ceiling = above[1:], above[-1]
        pairs = torch.unique(torch.stack(scorer.excluded.of(query)), dim=1)
        self.place, self.row = pairs[0], pairs[1]
        self.seen = torch.zeros(len(query), 2 + len(forms), dtype=torch.long, device=scorer.device)

    def __call__(
        self, similarity: Annotated[Tensor, "b m"], low: int, high: int, slack: Annotated[Tensor, "b 1"]
    ) -> Annotated[Tensor, "b m"]:
        """Return the scores, masked above the ceilings in place, and count the steps in ``seen``."""
        self._count_all(low, high)
        least = self.ceilings[-1]
        some = (similarity.amax(1, keepdim=True) > least)[:, 0].nonzero()[:, 0]
        if len(some):
            part = similarity[some]
            removed = [(part > ceiling[some]).sum(1) for ceiling in self.ceilings]
            self.seen[some, 2:] -= torch.stack(removed, 1)
            similarity[some] = part.masked_fill(part > (least + slack)[some], NEVER)
        return similarity

    def count(self, place: Annotated[Tensor, "p"], similarity: Annotated[Tensor, "p"], low: int, high: int) -> None:
        """Count the steps of a block in ``seen``, given all similarities above the lowest ceiling."""
        self._count_all(low, high)
        for step, ceiling in enumerate(self.ceilings, start=2):
            self.seen[:, step] -= torch.bincount(place[similarity > ceiling[place, 0]], minlength=len(self.seen))

    def _count_all(self, low: int, high: int) -> None:
        banned = torch.bincount(self.place[(self.row >= low) & (self.row < high)], minlength=len(self.seen))
        self.seen += (high - low) - banned[:, None]
