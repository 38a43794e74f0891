"""The negative cache (Lindgren et al. 2021): hard negatives drawn from stale embeddings, then encoded afresh.

The softmax of the scores against all cached items is sampled by Gumbel-max; the drawn items are encoded with the
current parameters. With p+ the probability of the positive among itself and the cache, both stale,

    (1 - p+) * (s_negative - s_positive)

has the gradient of -log p+ in expectation, up to staleness. The authors' cache starts with zero vectors, which are
negatives of score 0 until they are replaced; this one starts empty. ``papers.negative_cache`` calls ``cache_loss``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from hardneg.core.errors import argument_error, check_among, check_range
from hardneg.core.objectives import info_nce, surrogate
from hardneg.core.scoring import score
from hardneg.core.types import NEVER, Keys, Scores
from hardneg.negatives import Negatives, Tilt, Uniform
from hardneg.search.draws import draw
from hardneg.state.stateful import Stateful, check_count, last_of_each

EncodeRows = Callable[[Annotated[Tensor, "k"]], Annotated[Tensor, "k d"]]
"""Function of ids [k] that returns the vectors of these items at the current parameters, [k, d]."""


class Cache(Stateful):
    """Embeddings of up to ``capacity`` items, each with the step at which it was computed.

    Pushing an item that is cached refreshes it; a new item takes a free slot or replaces the oldest embedding. If a
    push holds several rows with one id, the last one counts; if it holds more new items than the capacity, the last
    ones stay.

    Args:
        capacity: Largest number of items.
        dim: Number of features.
        seed: Seed of the draws.

    Example:
        >>> cache = Cache(capacity=2, dim=3)
        >>> for item in (5, 6, 5, 7):
        ...     cache.push(Keys(torch.ones(1, 3), torch.tensor([item])))
        >>> sorted(cache.keys().ids.tolist())
        [5, 7]
    """

    vectors: Tensor
    ids: Tensor
    computed_at: Tensor
    widening: ClassVar = ("vectors",)
    shown: ClassVar = ("capacity", "dim")

    def __init__(self, capacity: int, dim: int, *, seed: int = 0) -> None:
        super().__init__(seed)
        capacity, dim = check_count("Cache", "capacity", capacity), check_count("Cache", "dim", dim)
        self.capacity, self.dim = capacity, dim
        self.register_buffer("vectors", torch.zeros(capacity, dim))
        self.register_buffer("ids", torch.full((capacity,), -1))
        self.register_buffer("computed_at", torch.full((capacity,), -1))  # -1: free

    def keys(self) -> Keys:
        """Return the cached items in the order of their slots."""
        held = self.ids >= 0
        return Keys(self.vectors[held], self.ids[held], source="cache")

    def age(self) -> Annotated[Tensor, "n"]:
        """Return how many steps ago each cached embedding was computed."""
        return self.step - self.computed_at[self.ids >= 0]

    def __len__(self) -> int:
        return int((self.ids >= 0).sum())

    @torch.no_grad()
    def push(self, keys: Keys) -> None:
        """Store fresh embeddings: refresh cached items, and replace the oldest ones with new items.

        Args:
            keys: Vectors [n, d] with ids.

        Raises:
            ArgumentError: If ids are missing or the number of features differs.
        """
        if keys.ids is None or keys.private or keys.dim != self.dim:
            what = f"vectors [n, {self.dim}] with ids"
            raise argument_error("Cache.push", what, "vectors", tuple(keys.vectors.shape))
        self.vectors = self.vectors.to(torch.promote_types(self.vectors.dtype, keys.vectors.dtype))
        last = last_of_each(keys.ids.to(self.ids.device))
        ids, vectors = keys.ids.to(self.ids.device)[last], keys.vectors.detach()[last].to(self.vectors)
        self.step += 1
        known = torch.isin(ids, self.ids)
        order = self.ids.argsort()
        slots = order[torch.searchsorted(self.ids[order], ids).clamp(max=self.capacity - 1)]
        self._write(slots[known], ids[known], vectors[known])
        fresh = (~known).nonzero().squeeze(1)[-self.capacity :]
        oldest = self.computed_at.argsort(stable=True)[: len(fresh)]  # free slots first
        self._write(oldest, ids[fresh], vectors[fresh])

    @torch.no_grad()
    def refresh(self, encode: EncodeRows, share: float) -> None:
        """Encode the oldest items again; their share is the paper's budget rho of a step.

        Args:
            encode: Function of ids that returns vectors.
            share: Share of the cached items to encode, in [0, 1].
        """
        check_range("Cache.refresh", "share", share, 0.0, 1.0)
        held = (self.ids >= 0).nonzero().squeeze(1)
        budget = int(share * len(held) + 0.5)
        if budget:
            oldest = held[self.computed_at[held].argsort(stable=True)[:budget]]
            ids = self.ids[oldest]
            self.push(Keys(encode(ids), ids))

    def _write(self, slots: Tensor, ids: Tensor, vectors: Tensor) -> None:
        self.vectors[slots], self.ids[slots] = vectors, ids
        self.computed_at[slots] = self.step


@dataclass(frozen=True, eq=False)
class CacheLoss:
    """The result of ``cache_loss``."""

    losses: Annotated[Tensor, "b"]
    """The surrogate of each anchor, which carries the gradient; its value is not meaningful."""
    real: Annotated[Tensor, "b"]
    """The loss -log p+ of each anchor, from stale scores."""
    drawn: Annotated[Tensor, "b k"]
    """Columns of the drawn candidates, -1 where there was none."""


def retrieve(
    scores: Scores, k: int, generator: torch.Generator, how: str = "gumbel", negatives: Negatives = Tilt(1.0)
) -> Annotated[Tensor, "b k"]:
    """Choose k cached candidates for each anchor.

    One Gumbel-max draw is one draw from the softmax of the log-weights; Tilt(1.0) gives the softmax of the scores.
    Several draws are made with replacement, so that their plain mean is unbiased.

    Args:
        scores: Scores of b anchors against the cache.
        k: Number of candidates per anchor.
        generator: Random generator.
        how: "gumbel" (drawn from the weights) or "top" (the largest weights).
        negatives: The distribution to draw from.

    Returns:
        Columns [b, k]; -1 where there is no candidate.
    """
    check_among("retrieve", "how", how, ("gumbel", "top"))
    log_w = negatives.log_weights(scores)
    if how == "gumbel":
        return draw(log_w, k, generator, method="categorical")
    best = log_w.topk(min(k, log_w.shape[1]), dim=-1)
    return torch.where(best.values == NEVER, -1, best.indices)


def cache_loss(
    anchors: Keys,
    positives: Annotated[Tensor, "b d"],
    cache: Cache,
    encode: EncodeRows,
    temperature: float,
    *,
    k: int = 1,
    how: str = "gumbel",
    drawn: Annotated[Tensor, "b k"] | None = None,
) -> CacheLoss:
    """Compute (1 - p+) * (mean of the drawn negatives' fresh scores - the positive's score) of each anchor.

    Every drawn item is encoded once, with a gradient, and its fresh embedding is pushed to the cache.

    Args:
        anchors: The anchors, [b, d].
        positives: The positive of each anchor, [b, d].
        cache: The cache to draw from.
        encode: Function of ids that returns vectors with a gradient.
        temperature: Divides the similarities.
        k: Number of draws per anchor.
        how: "gumbel" or "top", see ``retrieve``.
        drawn: Columns of ``cache.keys()`` [b, k], instead of draws from the cache's seed and step.
    """
    held = cache.keys()
    assert held.ids is not None
    stale = score(anchors, positives, held, temperature)
    real = info_nce(stale, Uniform().log_weights(stale)).detach().squeeze(1)
    if drawn is None:
        drawn = retrieve(stale, k, cache.generator(), how)
    chosen = torch.cat([held.ids, held.ids.new_tensor([-1])])[drawn]  # -1 takes the last, which is not an instance
    if not bool((chosen >= 0).any()):
        return CacheLoss(anchors.vectors.sum(-1) * 0.0, real, drawn)
    items, which = torch.unique(chosen[chosen >= 0], return_inverse=True)  # type: ignore[no-untyped-call]
    encoded = encode(items)
    vectors = encoded.new_zeros(*chosen.shape, encoded.shape[1]).index_put((chosen >= 0,), encoded[which])
    fresh = score(anchors, positives, Keys(vectors, chosen, source="cache"), temperature).narrowed(chosen >= 0)
    cache.push(Keys(encoded, items))
    losses = surrogate(fresh, Uniform().log_weights(fresh)).squeeze(1)
    return CacheLoss(-torch.expm1(-real) * losses, real, drawn)
