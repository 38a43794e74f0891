"""Scores and pairings to try a distribution on, and what can be done with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import normalize

from hardneg.core.bounds import find_bounds, weigh
from hardneg.core.pairing import Pairing
from hardneg.core.scoring import dense
from hardneg.core.tiles import NEVER, Tile
from hardneg.core.types import Guide, Keys, LogWeights, Scores
from hardneg.negatives import Negatives


def make_scores(dtype: torch.dtype = torch.float64, *, temperature: float = 0.5, private: bool = False) -> Scores:
    """Scores with all that a distribution may read: labels, clusters, ids, sources, a guide, several positives, twins.

    Six anchors, of which the last has no positive, against six candidates of the source "batch", themselves among
    them, and eight of "mined", shared or private, one of which is anchor 3 again. Similarities reach from -1 to 1.
    """
    pairing, random = _pairing(dtype, temperature, private)
    scores = dense(pairing)
    guide = torch.rand(6, 16, generator=random, dtype=torch.float64).to(scores.candidates)
    guide[:, 9] = guide[:, 8]  # the twins have equal similarities there too
    return replace(scores, guide=Guide(guide[:, :2], guide[:, 2:]))


def make_pairing(*, private: bool = False) -> Pairing:
    """The same pairs as vectors, with a guide of vectors, for what goes through tiles."""
    pairing, random = _pairing(torch.float64, 0.5, private)
    sides = (pairing.anchors, pairing.positives, *pairing.candidates)
    shapes = [keys.vectors.shape for keys in sides]
    other = [Keys(torch.randn(shape, generator=random, dtype=torch.float64)) for shape in shapes]
    return pairing.guided(Pairing(other[0], other[1], tuple(other[2:]), 1.0))


def _pairing(dtype: torch.dtype, temperature: float, private: bool) -> tuple[Pairing, torch.Generator]:
    random = torch.Generator().manual_seed(0)

    def unit(*shape: int) -> Tensor:
        return normalize(torch.randn(*shape, 8, generator=random, dtype=torch.float64), dim=-1).to(dtype)

    ids, labels = torch.arange(6), torch.tensor([0, 0, 1, 1, 2, 2])
    clusters = torch.tensor([[0, 1], [0, 2], [1, 1], [1, 2], [0, 1], [2, 2]])
    anchors, mined = unit(6), unit(8)
    mined[0] = mined[1] = anchors[4]  # equal scores and tags: which of the two is taken is free
    mined[4] = -anchors[0]
    mined_ids, mined_labels = torch.tensor([20, 21, 3, 23, 24, 25, 26, 27]), torch.tensor([1, 1, 1, 0, 2, 0, 1, 2])
    mined_clusters = torch.tensor([[0, 1], [0, 1], [1, 1], [2, 2], [1, 0], [0, 0], [2, 1], [0, 2]])
    if private:
        mined, mined_ids, mined_labels, mined_clusters = (
            each.expand(6, *each.shape) for each in (mined, mined_ids, mined_labels, mined_clusters)
        )
    positives = unit(6, 2)
    pools = (
        Keys(unit(6), ids, labels, clusters, source="batch"),
        Keys(mined, mined_ids, mined_labels, mined_clusters, source="mined"),
    )
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1], [0, 1], [0, 0]]).bool()
    return Pairing(Keys(anchors, ids, labels, clusters), Keys(positives), pools, temperature, mask), random


def take_rows(scores: Scores, index: Annotated[Tensor, "b"]) -> Scores:
    """The scores of these anchors, in this order."""

    def rows(tag: Tensor) -> Tensor:
        return tag if len(tag) == 1 else tag[index]

    return replace(
        scores,
        positives=scores.positives[index],
        candidates=scores.candidates[index],
        positive_valid=scores.positive_valid[index],
        valid=scores.valid[index],
        anchor_tags=scores.anchor_tags.mapped(rows),
        candidate_tags=scores.candidate_tags.mapped(rows),
        guide=scores.guide and Guide(scores.guide.positives[index], scores.guide.candidates[index]),
    )


def take_columns(scores: Scores, index: Annotated[Tensor, "n"]) -> Scores:
    """The scores of these candidates, in this order."""
    return replace(
        scores,
        candidates=scores.candidates[:, index],
        valid=scores.valid[:, index],
        candidate_tags=scores.candidate_tags.mapped(lambda tag: tag[:, index]),
        source=scores.source[index],
        guide=scores.guide and Guide(scores.guide.positives, scores.guide.candidates[:, index]),
    )


@dataclass(eq=False)
class Cuts:
    """Dense scores cut into tiles of a few columns, as a sweep sees them."""

    scores: Scores
    edges: tuple[int, ...]

    def tiles(self) -> Iterator[tuple[Tile, Tensor]]:
        for low, high in pairwise(self.edges):
            part = take_columns(self.scores, torch.arange(low, high))
            tile = part.tile()
            tile.column = tile.column + low
            yield tile, part.valid

    def positives(self) -> Iterator[tuple[Tile, Tensor]]:
        yield self.scores.positive_tile(), self.scores.positive_valid


def weights_by_tiles(negatives: Negatives, scores: Scores, edges: tuple[int, ...]) -> LogWeights:
    """The log-weights of a product, from a sweep over tiles with these edges."""
    cuts = Cuts(scores, edges)
    bounds = find_bounds(negatives.factors, [cuts])[0]
    parts = [torch.where(valid, weigh(negatives.factors, tile, bounds), NEVER) for tile, valid in cuts.tiles()]
    return torch.cat(parts, dim=1)
