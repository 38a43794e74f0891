"""What is taken out while searching: copies of the positives, and what the leading factors do not allow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor

from hardneg.core.types import NEVER
from hardneg.mining.directions import directions
from hardneg.mining.search import most_numbers, most_scores
from hardneg.mining.search_depth import support
from hardneg.mining.select import is_copy

if TYPE_CHECKING:
    from hardneg.mining.candidates import Finder


class Filters:
    """The guard near the positives and the leading factors, applied to blocks of scores while searching."""

    def __init__(self, finder: Finder, query: Annotated[Tensor, "b"]) -> None:
        self.finder, self.query = finder, query
        self.factors = finder.rule.negatives.factors[: finder.reach.num_leading]
        self.seen = torch.zeros(len(query), 2 + len(self.factors), dtype=torch.long, device=finder.device)

    def __call__(self, similarity: Annotated[Tensor, "b m"], low: int, high: int) -> Annotated[Tensor, "b m"]:
        valid = similarity != NEVER
        left = [valid.sum(1)]
        valid = valid & ~near_positive_block(self.finder, self.query, low, high)
        left.append(valid.sum(1))
        scores = self.finder.block_scores(self.query, similarity, valid, low, high)
        for factor in self.factors:
            valid = support(factor.log_weights(scores.narrowed(valid)))
            left.append(valid.sum(1))
        self.seen += torch.stack(left, 1)
        return valid


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
    part = directions(finder.corpus.part(low, high))
    place, positive = finder.positives.of(query)
    at_once = max(1, most_scores // (high - low))
    for where, row in zip(torch.split(place, at_once), torch.split(positive, at_once), strict=True):
        hits.index_add_(0, where, is_copy(finder.directions(row) @ part.T, finder.near_positive).int())
    return hits > 0
