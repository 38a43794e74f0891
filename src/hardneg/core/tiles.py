"""A tile: some anchors against some candidates, and all that a distribution may ask about a pair.

The dense matrix of scores is the case of one tile. Streamed losses, mining and audits go through many, so what a
distribution says of a pair may come from that pair and from the bounds of its row only, never from the other columns
at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, argument_error

NEVER = float("-inf")
"""The log-weight of a candidate that is not a negative."""

PairMatrix = Annotated[Tensor, "b n"]


@dataclass(frozen=True, eq=False)
class Tags:
    """What is known of rows besides their vectors; None where nothing is known.

    Rows with the same id are the same instance. A negative id matches nothing.
    """

    ids: Tensor | None = None  # [n] or [b, k]
    labels: Tensor | None = None  # [n] or [b, k]
    clusters: Tensor | None = None  # [n], [n, r], [b, k] or [b, k, r]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Tags:
        """Each tag that there is, changed."""
        return Tags(*(None if tag is None else change(tag) for tag in (self.ids, self.labels, self.clusters)))


@dataclass(eq=False)
class Tile:
    """Anchors [r] against candidates [c]; tags of candidates are [r|1, c] or, for clusterings, [r|1, c, k].

    ``s`` is similarity / temperature, ``column`` the place of each candidate among all of its row, which breaks
    ties. ``bound`` holds what the distribution declared in ``bounds()``, one number per row.
    """

    s: PairMatrix
    temperature: float | Tensor
    anchor_tags: Tags
    candidate_tags: Tags
    column: Annotated[Tensor, "n"]
    source: Tensor | str = "pool"  # one name, or an index into source_names for each column
    source_names: tuple[str, ...] = ()
    guide: PairMatrix | None = None  # plain similarities under another model
    ids_given: bool = True
    bound: Mapping[str, Any] = field(default_factory=dict)

    def bounded(self, bound: Mapping[str, Any]) -> Tile:
        """The same pairs with the bounds of another factor."""
        return Tile(**{name: getattr(self, name) for name in _pairs_of_tile}, bound=bound)

    @property
    def similarity(self) -> PairMatrix:
        """Without the temperature: the cosine, for unit vectors."""
        return self.s * self.temperature

    def tempered(self, similarity: Any) -> Tensor:
        """A plain similarity on the scale of the scores, divided exactly as they were."""
        scaled: Tensor = self.s.new_ones(()) * similarity / self.temperature
        return scaled

    def read(self, by: str, who: str) -> tuple[PairMatrix, Tensor]:
        """The similarities to judge by, and what a similarity of 1 is on their scale.

        ``"score"``: the scores. ``"guide"``: the plain similarities of another model, which carry no gradient.
        """
        if by == "score":
            return self.s, self.tempered(1.0)
        return self.guided(who), self.s.new_ones(())

    def score(self, by: str, who: str) -> PairMatrix:
        """Similarity / temperature under the model to judge by."""
        return self.s if by == "score" else self.tempered(self.guided(who))

    def guided(self, who: str) -> PairMatrix:
        if self.guide is None:
            fix = "pass guide=... to the loss or to hn.mine; scores of your own have scores.guided(...)"
            raise ArgumentError(who, "a second model's similarities", "by='guide' and none", fix)
        return self.guide

    def keep(self, mask: Tensor) -> PairMatrix:
        """Log-weight 0 inside the mask, NEVER outside."""
        return torch.where(mask, self.s.new_zeros(()), NEVER)

    def constant(self, value: float = 0.0) -> PairMatrix:
        return self.s.new_full((), value).expand(self.s.shape)

    def pair(self, name: str, who: str) -> tuple[Tensor, Tensor]:
        """A tag of the anchors, [r, 1, ...], and of the candidates, [r|1, c, ...]."""
        anchor, candidate = getattr(self.anchor_tags, name), getattr(self.candidate_tags, name)
        if anchor is None or candidate is None:
            side = "the anchors" if anchor is None else "every candidate"
            raise ArgumentError(who, f"{name} of {side}", "None", f"pass {name}=... with the vectors")
        return anchor[:, None], candidate

    def same_label(self, who: str) -> Annotated[Tensor, "b|1 n"]:
        anchor, candidate = self.pair("labels", who)
        return anchor == candidate

    def same_cluster(self, who: str) -> Annotated[Tensor, "b n"]:
        """True where anchor and candidate share a cluster in at least one of the clusterings."""
        anchor, candidate = self.pair("clusters", who)
        anchor = anchor[..., None] if anchor.ndim == 2 else anchor  # [r, 1, k]
        candidate = candidate[..., None] if candidate.ndim == 2 else candidate  # [r|1, c, k]
        if anchor.shape[-1] != candidate.shape[-1]:
            counts = f"{anchor.shape[-1]} of the anchors and {candidate.shape[-1]} of the candidates"
            raise ArgumentError(who, "the same number of clusterings on both sides", counts)
        return (anchor == candidate).any(-1)

    def other_instance(self) -> Annotated[Tensor, "b n"]:
        """True where a candidate does not carry the anchor's id."""
        if self.anchor_tags.ids is None or self.candidate_tags.ids is None:
            return torch.ones_like(self.s, dtype=torch.bool)
        return other_id(self.anchor_tags.ids, self.candidate_tags.ids, self.ids_given)

    def of_source(self, who: str, source: str) -> Annotated[Tensor, "n"]:
        if source not in self.source_names:
            fix = "name it where the candidates come in: Keys(..., source=...)"
            raise argument_error(who, f"a source among {self.source_names}", "source", source, fix)
        if isinstance(self.source, str):
            return torch.full_like(self.column, self.source == source, dtype=torch.bool)
        return self.source == self.source_names.index(source)


_pairs_of_tile = tuple(one.name for one in fields(Tile) if one.name != "bound")


def num_others(anchor: Annotated[Tensor, "b"], candidate: Annotated[Tensor, "n"]) -> Annotated[Tensor, "b"]:
    """How many candidates ``other_id`` allows of each anchor, without [b, n]."""
    ids = candidate.sort().values
    low, high = (torch.searchsorted(ids, anchor, right=right) for right in (False, True))
    return len(ids) - torch.where(anchor >= 0, high - low, 0)


def other_id(
    anchor: Annotated[Tensor, "b"], candidate: Annotated[Tensor, "b|1 n"], given: bool = True
) -> Annotated[Tensor, "b n"]:
    """False where both carry the same id; a negative id equals no other. Ids that were not given are never negative."""
    anchor = anchor.unsqueeze(1)
    return (anchor != candidate) | (anchor < 0) if given else anchor != candidate
