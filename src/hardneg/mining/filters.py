"""The sweep of mining: bounds over the tiles of a corpus, and what is taken out while searching."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Annotated

import torch
from torch import Tensor

from hardneg.core.draws import gumbel_keys
from hardneg.core.sweep import Bounds, MaskedTile, finish, left_by, merge_states, reduce_rows
from hardneg.core.types import NEVER
from hardneg.mining.meeting import Meeting
from hardneg.negatives import Negatives

Part = tuple[int, int]
"""The first row and the end of a part of the corpus."""
Uniforms = Callable[[int, int], Annotated[Tensor, "b m"]]
"""(first row, end) of a block of the corpus -> a random number for each query and row."""


@dataclass(frozen=True, eq=False)
class CorpusRows:
    """Some queries against a part of the corpus, as tiles for the sweep: the same tiles at each call."""

    meeting: Meeting
    query: Annotated[Tensor, "b"]
    part: Part

    def tiles(self) -> Iterator[MaskedTile]:
        meeting, query = self.meeting, self.query
        vectors, excluded = meeting.model.of(query), meeting.excluded.of(query)
        for low, high in meeting.corpus.blocks(self.part):
            similarity = meeting.corpus.scores(vectors, excluded, low, high)
            valid = (similarity != NEVER) & ~meeting.near_positive_block(query, low, high)
            yield meeting.tile(query, similarity, low, high), valid

    def positives(self) -> Iterator[MaskedTile]:
        yield self.meeting.positive_tile(self.query)


def bounds_of(
    meeting: Meeting, shards: Sequence[Part], query: Annotated[Tensor, "b"], factors: Sequence[Negatives]
) -> list[Bounds]:
    """The bounds of each factor for these queries, shard by shard and merged."""
    found: list[Bounds] = []
    for i, factor in enumerate(factors):
        declared = factor.bounds()
        if not declared:
            found.append({})
            continue
        left = left_by(factors[:i], found)
        states = [reduce_rows(declared, CorpusRows(meeting, query, part), left) for part in shards]
        found.append(finish(declared, reduce(lambda first, second: merge_states(declared, first, second), states)))
    return found


class Filters:
    """The guard near the positives and some of the factors, applied to blocks of similarities while searching.

    What is left is ordered by similarity or, with ``uniforms``, as Gumbel-max draws them.
    """

    def __init__(
        self,
        meeting: Meeting,
        shards: Sequence[Part],
        query: Annotated[Tensor, "b"],
        factors: Sequence[Negatives],
        uniforms: Uniforms | None = None,
    ) -> None:
        self.meeting, self.query, self.factors, self.uniforms = meeting, query, factors, uniforms
        self.bounds = bounds_of(meeting, shards, query, factors)
        self.seen = torch.zeros(len(query), 2 + len(factors), dtype=torch.long, device=meeting.device)

    def __call__(self, similarity: Annotated[Tensor, "b m"], low: int, high: int) -> Annotated[Tensor, "b m"]:
        valid = similarity != NEVER
        left = [valid.sum(1)]
        valid = valid & ~self.meeting.near_positive_block(self.query, low, high)
        left.append(valid.sum(1))
        tile = self.meeting.tile(self.query, similarity, low, high)
        log_w = torch.where(valid, 0.0, NEVER).to(similarity.dtype)
        for factor, bound in zip(self.factors, self.bounds, strict=True):
            log_w = torch.where(valid, log_w + factor.log_weight(tile.bounded(bound)), NEVER)
            valid = log_w != NEVER
            left.append(valid.sum(1))
        self.seen += torch.stack(left, 1)
        if self.uniforms is None:
            return similarity.masked_fill(~valid, NEVER)
        return gumbel_keys(log_w, self.uniforms(low, high))
