"""Geometry of pairs of embeddings: alignment, uniformity, and similarities within and between classes.

All use directions only: rows are scaled to unit norm. Where there are more than ``MAX_PAIRS`` pairs, pairs are sampled,
so that no [n, n] matrix is held in memory. Called by ``embeddings.geometry`` and by the data kinds.
"""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from hardneg.core.errors import argument_error
from hardneg.io.embeddings import EmbeddingRows, Labels
from hardneg.search.histogram import SimilarityCounts

MAX_PAIRS, BLOCK = 2_000_000, 65_536
"""Pairs that are compared at most, and sampled pairs compared at a time."""


class SimilarityHistograms(NamedTuple):
    """Counts of pairwise cosines in even bins over [-1, 1], for pairs of the same class and of different classes.

    Attributes:
        edges: Edges of the bins, [bins + 1].
        same: Counts of same-class pairs, [bins].
        other: Counts of other-class pairs, [bins].
        same_mean: Mean cosine of same-class pairs; NaN if there are none.
        other_mean: Mean cosine of other-class pairs; NaN if there are none.
    """

    edges: Annotated[Tensor, "bins+1"]
    same: Annotated[Tensor, "bins"]
    other: Annotated[Tensor, "bins"]
    same_mean: float
    other_mean: float


def alignment(first: EmbeddingRows, second: EmbeddingRows, *, exponent: float = 2.0) -> float:
    """Return E |f(x) - f(y)|^exponent over positive pairs (Wang and Isola 2020), with rows scaled to unit norm.

    Args:
        first: Embeddings [n, d].
        second: Their partners [n, d].
        exponent: Exponent of the distance.

    Raises:
        ArgumentError: If the shapes differ.

    Example:
        >>> round(alignment(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]])), 3)
        2.0
    """
    if first.shape != second.shape:
        raise argument_error("alignment", f"a partner for each of {tuple(first.shape)}", "second", tuple(second.shape))
    return float((directions(first) - directions(second)).norm(dim=1).pow(exponent).double().mean())


def uniformity(x: EmbeddingRows, *, max_pairs: int = MAX_PAIRS, seed: int = 0) -> float:
    """Return log E e^(-2 |f(x) - f(y)|^2) over distinct unit-norm rows (Wang and Isola 2020); lower is better.

    Args:
        x: Embeddings [n, d], at least two.
        max_pairs: Use all pairs up to this number, else sample this many uniformly.
        seed: Seed of the sampled pairs.
    """
    x = directions(x)
    _check_rows("uniformity", x)
    if max_pairs >= len(x) * (len(x) - 1) // 2:
        cosines = above_diagonal(x @ x.T)
    else:
        cosines = _cosines(x, *_drawn_pairs(len(x), max_pairs, seed, x.device))
    # |a - b|^2 = 2 - 2 cos for unit vectors.
    return float(torch.logsumexp(2.0 * (2.0 * cosines.double() - 2.0), dim=0)) - math.log(len(cosines))


def similarity_histograms(
    x: EmbeddingRows, y: Labels, *, bins: int = 100, max_pairs: int = MAX_PAIRS, seed: int = 0
) -> SimilarityHistograms:
    """Count the cosines of pairs of the same class and of different classes.

    The further apart the two histograms, the better the features. All pairs i < j are used; where there are more than
    ``max_pairs``, that many same-class and that many other-class pairs are sampled uniformly with replacement.

    Args:
        x: Embeddings [n, d], at least two.
        y: Labels [n].
        bins: Number of even bins over [-1, 1].
        max_pairs: Pairs compared at most, per kind when sampled.
        seed: Seed of the sampled pairs.
    """
    x, y = directions(x), y.to(x.device)
    _check_rows("similarity_histograms", x)
    if bins < 1:
        raise argument_error("similarity_histograms", "at least one bin", "bins", bins)
    found = SimilarityCounts(2, bins)
    if max_pairs >= len(x) * (len(x) - 1) // 2:
        cosines, same = above_diagonal(x @ x.T), above_diagonal(y[:, None] == y)
        found.add(0, cosines[same])
        found.add(1, cosines[~same])
    else:
        for kind, alike in enumerate((True, False)):
            if (pairs := _drawn_of_kind(y, max_pairs, alike, seed)) is not None:
                found.add(kind, _cosines(x, *pairs))
    return SimilarityHistograms(found.edges, *found.counts, *found.means())


def directions(x: EmbeddingRows) -> EmbeddingRows:
    """Scale each row to unit norm, in float32."""
    return normalize(x.float(), dim=1)


def above_diagonal(matrix: Annotated[Tensor, "n n"]) -> Annotated[Tensor, "m"]:
    """Return the entries above the diagonal, row by row: each pair i < j once."""
    return matrix[torch.ones_like(matrix, dtype=torch.bool).triu(1)]


def _cosines(x: EmbeddingRows, i: Tensor, j: Tensor) -> Annotated[Tensor, "m"]:
    parts = zip(i.split(BLOCK), j.split(BLOCK), strict=True)  # type: ignore[no-untyped-call]
    return torch.cat([(x[first] * x[second]).sum(1) for first, second in parts])


def _drawn_pairs(n: int, num: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Sample pairs of distinct rows, uniform over all of them, with replacement."""
    generator = torch.Generator().manual_seed(seed)
    i = torch.randint(n, (num,), generator=generator)
    j = (i + torch.randint(1, n, (num,), generator=generator)) % n
    return i.to(device), j.to(device)


def _drawn_of_kind(y: Labels, num: int, same: bool, seed: int) -> tuple[Tensor, Tensor] | None:
    """Sample pairs of the same class, or of two classes, uniformly over all such pairs; None if there are none.

    Rows are sorted by class. A row's partners are the rows after it, cyclically: within its class, or among the rows
    outside its class. First rows are drawn in proportion to their number of partners.
    """
    order = torch.argsort(y.cpu(), stable=True)
    _, counts = torch.unique(y.cpu(), return_counts=True)
    size = counts.repeat_interleave(counts)
    begin = (counts.cumsum(0) - counts).repeat_interleave(counts)
    partners = size - 1 if same else len(y) - size
    if not partners.any():
        return None
    generator = torch.Generator().manual_seed(seed + same)
    ends = partners.cumsum(0)
    i = torch.searchsorted(ends, torch.randint(int(ends[-1]), (num,), generator=generator), right=True)
    step = (torch.rand(num, generator=generator, dtype=torch.float64) * partners[i]).long()
    j = begin[i] + (i - begin[i] + 1 + step) % size[i] if same else (begin[i] + size[i] + step) % len(y)
    return order[i].to(y.device), order[j].to(y.device)


def _check_rows(who: str, x: EmbeddingRows) -> None:
    if len(x) < 2:
        raise argument_error(who, "at least 2 rows", "x", tuple(x.shape))
