"""The sweep of mining: bounds over the tiles of a corpus, and what is taken out while searching."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor

from hardneg.core.draws import gumbel_keys
from hardneg.core.sweep import Bounds, MaskedTile, finish, left_by, merge_states, reduce_rows
from hardneg.core.types import NEVER
from hardneg.core.vectors import unit
from hardneg.mining.search import most_numbers, most_scores
from hardneg.mining.select import is_copy
from hardneg.negatives import Negatives

if TYPE_CHECKING:
    from hardneg.mining.candidates import Finder

Uniforms = Callable[[int, int], Annotated[Tensor, "b m"]]
"""(first row, end) of a block of the corpus -> a random number for each query and row."""


@dataclass(frozen=True, eq=False)
class CorpusRows:
    """Some queries against a part of the corpus, as tiles for the sweep: the same tiles at each call."""

    finder: Finder
    query: Annotated[Tensor, "b"]
    part: tuple[int, int]

    def tiles(self) -> Iterator[MaskedTile]:
        finder = self.finder
        vectors, excluded = finder.vectors(self.query), finder.excluded.of(self.query)
        for low, high in finder.corpus.blocks(self.part):
            similarity = finder.corpus.scores(vectors, excluded, low, high)
            valid = (similarity != NEVER) & ~near_positive_block(finder, self.query, low, high)
            yield finder.tile(self.query, similarity, low, high), valid

    def positives(self) -> Iterator[MaskedTile]:
        yield self.finder.positive_tile(self.query)


def bounds_of(finder: Finder, query: Annotated[Tensor, "b"], factors: Sequence[Negatives]) -> list[Bounds]:
    """The bounds of each factor for these queries, shard by shard and merged."""
    found: list[Bounds] = []
    for i, factor in enumerate(factors):
        declared = factor.bounds()
        if not declared:
            found.append({})
            continue
        left = left_by(factors[:i], found)
        states = [reduce_rows(declared, CorpusRows(finder, query, part), left) for part in finder.shards]
        found.append(finish(declared, reduce(lambda first, second: merge_states(declared, first, second), states)))
    return found


class Filters:
    """The guard near the positives and some of the factors, applied to blocks of similarities while searching.

    What is left is ordered by similarity or, with ``uniforms``, as Gumbel-max draws them.
    """

    def __init__(
        self,
        finder: Finder,
        query: Annotated[Tensor, "b"],
        factors: Sequence[Negatives],
        uniforms: Uniforms | None = None,
    ) -> None:
        self.finder, self.query, self.factors, self.uniforms = finder, query, factors, uniforms
        self.bounds = bounds_of(finder, query, factors)
        self.seen = torch.zeros(len(query), 2 + len(factors), dtype=torch.long, device=finder.device)

    def __call__(self, similarity: Annotated[Tensor, "b m"], low: int, high: int) -> Annotated[Tensor, "b m"]:
        valid = similarity != NEVER
        left = [valid.sum(1)]
        valid = valid & ~near_positive_block(self.finder, self.query, low, high)
        left.append(valid.sum(1))
        tile = self.finder.tile(self.query, similarity, low, high)
        log_w = torch.where(valid, 0.0, NEVER).to(similarity.dtype)
        for factor, bound in zip(self.factors, self.bounds, strict=True):
            log_w = torch.where(valid, log_w + factor.log_weight(tile.bounded(bound)), NEVER)
            valid = log_w != NEVER
            left.append(valid.sum(1))
        self.seen += torch.stack(left, 1)
        if self.uniforms is None:
            return similarity.masked_fill(~valid, NEVER)
        return gumbel_keys(log_w, self.uniforms(low, high))


def near_positive_listed(finder: Finder, query: Tensor, rows: Annotated[Tensor, "b m"]) -> Annotated[Tensor, "b|1 m"]:
    """True where a candidate of the list is nearly a positive of its query, by cosine."""
    if finder.near_positive is None:
        return torch.zeros(1, rows.shape[1], dtype=torch.bool, device=finder.device)
    hits = torch.zeros(rows.shape, dtype=torch.int32, device=finder.device)
    place, positive = finder.positives.of(query)
    at_once = max(1, most_numbers // (rows.shape[1] * finder.queries.dim))
    for where, row in zip(torch.split(place, at_once), torch.split(positive, at_once), strict=True):
        cosine = torch.bmm(finder.directions(rows[where]), finder.directions(row)[:, :, None])[:, :, 0]
        hits.index_add_(0, where, is_copy(cosine, finder.near_positive).int())
    return hits > 0


def near_positive_block(finder: Finder, query: Tensor, low: int, high: int) -> Annotated[Tensor, "b|1 m"]:
    """True where a row of this block of the corpus is nearly a positive of the query, by cosine."""
    if finder.near_positive is None:
        return torch.zeros(1, high - low, dtype=torch.bool, device=finder.device)
    hits = torch.zeros(len(query), high - low, dtype=torch.int32, device=finder.device)
    part = unit(finder.corpus.part(low, high))
    place, positive = finder.positives.of(query)
    at_once = max(1, most_scores // (high - low))
    for where, row in zip(torch.split(place, at_once), torch.split(positive, at_once), strict=True):
        hits.index_add_(0, where, is_copy(finder.directions(row) @ part.T, finder.near_positive).int())
    return hits > 0
