"""A tile: a block of anchors against a block of candidates, with everything a distribution may use about each pair.

A dense score matrix is a single tile. Streamed losses, mining and audits process many tiles, so the weight of a pair
may depend only on that pair and on the bounds of its row (``hardneg.core.bounds``), never on the tile's other columns.

Distributions read tiles in ``log_weight(tile)``. Tiles are built by ``Scores.tile`` and ``Pairing.tile``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, argument_error

NEVER = float("-inf")
"""The log-weight of a candidate that is not a negative: minus infinity."""

PairMatrix = Annotated[Tensor, "b n"]


@dataclass(frozen=True, eq=False)
class Tags:
    """Ids, labels and clusters of rows; None where they are unknown.

    Rows with the same id are the same instance. A negative id matches nothing.

    Attributes:
        ids: Instance ids, [n] or [b, k].
        labels: Class labels, [n] or [b, k].
        clusters: Cluster numbers, [n] or [b, k]; [n, r] or [b, k, r] for r clusterings.
    """

    ids: Tensor | None = None
    labels: Tensor | None = None
    clusters: Tensor | None = None

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Tags:
        """Return tags with ``change`` applied to every tag that is present."""
        return Tags(*(None if tag is None else change(tag) for tag in (self.ids, self.labels, self.clusters)))


@dataclass(eq=False)
class Tile:
    """A block of r anchors against c candidates.

    Attributes:
        s: Scores (similarity / temperature), [r, c].
        temperature: Number or tensor ([] or [r, 1]) by which similarities were divided.
        anchor_tags: Tags of the anchors, [r].
        candidate_tags: Tags of the candidates, [r|1, c], or [r|1, c, k] for k clusterings.
        column: Position of each candidate in the full row, [c]; ties between equal scores are broken by it.
        source: Name of the source of all columns, or an index into ``source_names`` for each column.
        source_names: Names of all candidate sources.
        guide: Similarities under a second model, [r, c], without temperature; None without a second model.
        ids_given: False if ids only number the rows of the batch.
        bound: Row bounds that the distribution declared in ``bounds()``, by name, [r, 1] each.
    """

    s: PairMatrix
    temperature: float | Tensor
    anchor_tags: Tags
    candidate_tags: Tags
    column: Annotated[Tensor, "n"]
    source: Tensor | str = "pool"
    source_names: tuple[str, ...] = ()
    guide: PairMatrix | None = None
    ids_given: bool = True
    bound: Mapping[str, Any] = field(default_factory=dict)

    def bounded(self, bound: Mapping[str, Any]) -> Tile:
        """Return the same pairs with other row bounds."""
        return Tile(**{name: getattr(self, name) for name in _pairs_of_tile}, bound=bound)

    @property
    def similarity(self) -> PairMatrix:
        """Similarities without the temperature: the cosine, for unit vectors."""
        return self.s * self.temperature

    def tempered(self, similarity: Any) -> Tensor:
        """Convert a plain similarity to the scale of the scores, with exactly the same division."""
        scaled: Tensor = self.s.new_ones(()) * similarity / self.temperature
        return scaled

    def read(self, by: str, who: str) -> tuple[PairMatrix, Tensor]:
        """Return the similarities to judge by, and the value that a similarity of 1 has on their scale.

        Args:
            by: ``"score"`` for the scores, ``"guide"`` for the similarities of the second model, without gradient.
            who: Name of the caller, for the error message if there is no guide.

        Returns:
            Values [r, c] and their scale, a scalar tensor or [r, 1].
        """
        if by == "score":
            return self.s, self.tempered(1.0)
        return self.guided(who), self.s.new_ones(())

    def score(self, by: str, who: str) -> PairMatrix:
        """Return similarity / temperature under the model selected by ``by`` (see ``read``), [r, c]."""
        return self.s if by == "score" else self.tempered(self.guided(who))

    def guided(self, who: str) -> PairMatrix:
        """Return the similarities under the second model, [r, c]; raise ArgumentError if there is none."""
        if self.guide is None:
            fix = "pass guide=... to the loss or to hn.mine, or call scores.guided(...) on scores you built yourself"
            raise ArgumentError(who, "a second model's similarities", "by='guide' without a guide", fix)
        return self.guide

    def keep(self, mask: Tensor) -> PairMatrix:
        """Return log-weight 0 inside the mask and NEVER outside."""
        return torch.where(mask, self.s.new_zeros(()), NEVER)

    def constant(self, value: float = 0.0) -> PairMatrix:
        """Return the same log-weight for every pair, as a view that takes no memory."""
        return self.s.new_full((), value).expand(self.s.shape)

    def pair(self, name: str, who: str) -> tuple[Tensor, Tensor]:
        """Return one tag of both sides, shaped so that they broadcast against each other.

        Args:
            name: ``"ids"``, ``"labels"`` or ``"clusters"``.
            who: Name of the caller, for the error message.

        Returns:
            The tag of the anchors, [r, 1, ...], and of the candidates, [r|1, c, ...].

        Raises:
            ArgumentError: If anchors or candidates lack the tag.
        """
        anchor, candidate = getattr(self.anchor_tags, name), getattr(self.candidate_tags, name)
        if anchor is None or candidate is None:
            side = "the anchors" if anchor is None else "every candidate"
            raise ArgumentError(who, f"{name} of {side}", "None", f"pass {name}=... with the vectors")
        return anchor[:, None], candidate

    def same_label(self, who: str) -> Annotated[Tensor, "b|1 n"]:
        """Return a mask [r|1, c] that is True where anchor and candidate have the same label."""
        anchor, candidate = self.pair("labels", who)
        return anchor == candidate

    def same_cluster(self, who: str) -> Annotated[Tensor, "b n"]:
        """Return a mask [r, c] that is True where anchor and candidate share a cluster in at least one clustering.

        Raises:
            ArgumentError: If clusters are missing, or the two sides have different numbers of clusterings.
        """
        anchor, candidate = self.pair("clusters", who)
        anchor = anchor[..., None] if anchor.ndim == 2 else anchor  # [r, 1, k]
        candidate = candidate[..., None] if candidate.ndim == 2 else candidate  # [r|1, c, k]
        if anchor.shape[-1] != candidate.shape[-1]:
            counts = f"{anchor.shape[-1]} of the anchors and {candidate.shape[-1]} of the candidates"
            raise ArgumentError(who, "the same number of clusterings on both sides", counts)
        return (anchor == candidate).any(-1)

    def other_instance(self) -> Annotated[Tensor, "b n"]:
        """Return a mask [r, c] that is True where a candidate does not have the anchor's id."""
        if self.anchor_tags.ids is None or self.candidate_tags.ids is None:
            return torch.ones_like(self.s, dtype=torch.bool)
        return other_id(self.anchor_tags.ids, self.candidate_tags.ids, self.ids_given)

    def of_source(self, who: str, source: str) -> Annotated[Tensor, "n"]:
        """Return a mask [c] that is True for candidates of the named source.

        Raises:
            ArgumentError: If no candidates have this source.
        """
        if source not in self.source_names:
            fix = "set the name when you build the candidates: Keys(..., source=...)"
            raise argument_error(who, f"a source among {self.source_names}", "source", source, fix)
        if isinstance(self.source, str):
            return torch.full_like(self.column, self.source == source, dtype=torch.bool)
        return self.source == self.source_names.index(source)


_pairs_of_tile = tuple(one.name for one in fields(Tile) if one.name != "bound")


def num_others(anchor: Annotated[Tensor, "b"], candidate: Annotated[Tensor, "n"]) -> Annotated[Tensor, "b"]:
    """Count the candidates that ``other_id`` allows for each anchor, without a [b, n] matrix.

    Args:
        anchor: Ids of the anchors, [b]; a negative id matches nothing.
        candidate: Ids of the shared candidates, [n].

    Example:
        >>> num_others(torch.tensor([1, 2, -1]), torch.tensor([1, 1, 2, 3]))
        tensor([2, 3, 4])
    """
    ids = candidate.sort().values
    low, high = (torch.searchsorted(ids, anchor, right=right) for right in (False, True))
    return len(ids) - torch.where(anchor >= 0, high - low, 0)


def other_id(
    anchor: Annotated[Tensor, "b"], candidate: Annotated[Tensor, "b|1 n"], given: bool = True
) -> Annotated[Tensor, "b n"]:
    """Return True where the ids differ, [b, n].

    Args:
        anchor: Ids of the anchors, [b].
        candidate: Ids of the candidates, [b|1, n].
        given: True if the caller passed the ids; a negative id then matches nothing. Ids that only number the rows are
            never negative, so that test is skipped.

    Example:
        >>> other_id(torch.tensor([1, -1]), torch.tensor([[1, -1]]))
        tensor([[False,  True],
                [ True,  True]])
    """
    anchor = anchor.unsqueeze(1)
    return (anchor != candidate) | (anchor < 0) if given else anchor != candidate
