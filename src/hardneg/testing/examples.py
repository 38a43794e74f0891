"""Scores and pairings to try a distribution on, and ways to select, permute and tile them."""

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
    """Return scores with everything a distribution may read.

    They have labels, clusters, ids, sources, a guide, several positives and twins (equal candidates). Six anchors, of
    which the last has no positive, are compared with six candidates of the source "batch", themselves among them, and
    with eight of the source "mined", one of which is anchor 3 again. Similarities range from -1 to 1.

    Args:
        dtype: Type of the vectors.
        temperature: Temperature of the scores.
        private: Whether every anchor has its own "mined" candidates.

    Example:
        >>> make_scores().candidates.shape
        torch.Size([6, 14])
    """
    pairing, random = _pairing(dtype, temperature, private)
    scores = dense(pairing)
    guide = torch.rand(6, 16, generator=random, dtype=torch.float64).to(scores.candidates)
    guide[:, 9] = guide[:, 8]  # the twins are equal for the guide too
    return replace(scores, guide=Guide(guide[:, :2], guide[:, 2:]))


def make_pairing(*, private: bool = False) -> Pairing:
    """Return the pairs of ``make_scores`` as vectors, with a guide of vectors, for computations in tiles."""
    pairing, random = _pairing(torch.float64, 0.5, private)
    sides = (pairing.anchors, pairing.positives, *pairing.candidates)
    shapes = [keys.vectors.shape for keys in sides]
    other = [Keys(torch.randn(shape, generator=random, dtype=torch.float64)) for shape in shapes]
    return pairing.guided(Pairing(other[0], other[1], tuple(other[2:]), 1.0))


def _pairing(dtype: torch.dtype, temperature: float, private: bool) -> tuple[Pairing, torch.Generator]:
    """Return the vectors and tags, and the random generator for a guide."""
    random = torch.Generator().manual_seed(0)

    def unit(*shape: int) -> Tensor:
        return normalize(torch.randn(*shape, 8, generator=random, dtype=torch.float64), dim=-1).to(dtype)

    ids, labels = torch.arange(6), torch.tensor([0, 0, 1, 1, 2, 2])
    clusters = torch.tensor([[0, 1], [0, 2], [1, 1], [1, 2], [0, 1], [2, 2]])
    anchors, mined = unit(6), unit(8)
    mined[0] = mined[1] = anchors[4]  # twins with equal scores and tags: a distribution may choose either
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
    """Return the scores of these anchors [b], in this order."""

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
    """Return the scores of these candidates [n], in this order."""
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
    """Dense scores cut into tiles of a few columns, as a sweep over a large pool sees them.

    Attributes:
        scores: The scores.
        edges: First column of each tile, and the number of columns.
    """

    scores: Scores
    edges: tuple[int, ...]

    def tiles(self) -> Iterator[tuple[Tile, Tensor]]:
        """Yield the tiles of the candidates, each with its valid pairs."""
        for low, high in pairwise(self.edges):
            part = take_columns(self.scores, torch.arange(low, high))
            tile = part.tile()
            tile.column = tile.column + low
            yield tile, part.valid

    def positives(self) -> Iterator[tuple[Tile, Tensor]]:
        """Yield the tile of the positives with its valid pairs."""
        yield self.scores.positive_tile(), self.scores.positive_valid


def weights_by_tiles(negatives: Negatives, scores: Scores, edges: tuple[int, ...]) -> LogWeights:
    """Return the log-weights [b, n] of a product, computed in tiles with these edges."""
    cuts = Cuts(scores, edges)
    bounds = find_bounds(negatives.factors, [cuts])[0]
    parts = [torch.where(valid, weigh(negatives.factors, tile, bounds), NEVER) for tile, valid in cuts.tiles()]
    return torch.cat(parts, dim=1)
