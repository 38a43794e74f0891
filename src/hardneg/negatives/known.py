"""Weights for single (anchor, candidate) pairs that were judged: relevance judgements, an LLM judge, RLHN.

``KnownPairs`` is the table of judged pairs and ``Known`` the distribution that applies it. Both are built from tensors,
so they work in every backend but cannot be written as text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError
from hardneg.core.tiles import NEVER, Tile
from hardneg.core.types import Scores
from hardneg.negatives.base import Negatives


class KnownPairs:
    """A set of (anchor id, candidate id) pairs with a value each, looked up by binary search.

    Args:
        anchor_ids: Ids of the anchors, [m], 0 or more.
        candidate_ids: Ids of the candidates, [m], 0 or more.
        values: Log-weight of each pair, [m] or one number for all; ``NEVER`` excludes the pair.

    Raises:
        ArgumentError: If the shapes differ or an id is negative.

    Example:
        >>> pairs = KnownPairs(torch.tensor([3, 3]), torch.tensor([7, 9]))
        >>> len(pairs)
        2
    """

    def __init__(
        self,
        anchor_ids: Annotated[Tensor, "m"],
        candidate_ids: Annotated[Tensor, "m"],
        values: Annotated[Tensor, "m"] | float = NEVER,
    ) -> None:
        if anchor_ids.ndim != 1 or anchor_ids.shape != candidate_ids.shape:
            got = f"anchor_ids={tuple(anchor_ids.shape)} and candidate_ids={tuple(candidate_ids.shape)}"
            raise ArgumentError("KnownPairs", "one candidate id per anchor id", got)
        if bool((anchor_ids < 0).any()) or bool((candidate_ids < 0).any()):
            raise ArgumentError("KnownPairs", "ids of 0 or more", "a negative id, which matches no instance")
        self.anchor_ids, self.candidate_ids = anchor_ids, candidate_ids
        self.anchors, rank = anchor_ids.long().unique(return_inverse=True)  # type: ignore[no-untyped-call]
        self.candidates, other = candidate_ids.long().unique(return_inverse=True)  # type: ignore[no-untyped-call]
        # Keys of ranks, not of ids: a product of ids may overflow and match a pair that is not known.
        self.keys, order = (rank * len(self.candidates) + other).sort()
        self.values = torch.as_tensor(values, dtype=torch.float64).expand(len(order))[order]

    def __len__(self) -> int:
        return len(self.keys)

    def look_up(self, scores: Scores | Tile) -> tuple[Annotated[Tensor, "b n"], Annotated[Tensor, "b n"]]:
        """Look up all pairs of the scores.

        Args:
            scores: Dense scores or a tile, with the ids of anchors and candidates.

        Returns:
            A mask of the known pairs [b, n], and their values (0 for the others).

        Raises:
            ArgumentError: If ids are missing.
        """
        tile = scores if isinstance(scores, Tile) else scores.tile()
        anchors, candidates = tile.anchor_tags.ids, tile.candidate_tags.ids
        if anchors is None or candidates is None or not tile.ids_given:
            raise ArgumentError("Known", "ids of anchors and candidates", "None", "pass ids=... with the vectors")
        if not len(self):
            return torch.zeros_like(tile.s, dtype=torch.bool), torch.zeros_like(tile.s)
        if self.keys.device != anchors.device:  # the table moves once
            for name in ("anchors", "candidates", "keys", "values"):
                setattr(self, name, getattr(self, name).to(anchors.device))
        row, some = _rank(anchors[:, None], self.anchors)
        column, other = _rank(candidates, self.candidates)
        slot, known = _rank(row * len(self.candidates) + column, self.keys)
        known = (known & some & other).expand_as(tile.s)
        return known, torch.where(known, self.values[slot].to(tile.s.dtype), 0.0)


def _rank(values: Tensor, table: Annotated[Tensor, "m"]) -> tuple[Tensor, Tensor]:
    """Return the position of each value in a sorted table, and whether it is there."""
    place = torch.searchsorted(table, values.long().contiguous()).clamp(max=len(table) - 1)
    return place, table[place] == values


@dataclass(frozen=True, repr=False)
class Known(Negatives):
    """Applies the log-weights of judged pairs and leaves all other pairs as they are.

    Pairs with the value ``NEVER`` (the default of ``KnownPairs``) are not negatives. To make pairs positives instead,
    use ``more_positives(scores, pairs.look_up(scores)[0])``.

    Args:
        pairs: The table of judged pairs.
    """

    pairs: KnownPairs
    textual: ClassVar = False
    needs: ClassVar = ("ids",)

    def log_weight(self, tile: Tile) -> Tensor:
        """Compute the value of each known pair, and 0 for all others."""
        return self.pairs.look_up(tile)[1]

    def __repr__(self) -> str:
        return f"Known(<{len(self.pairs)} pairs>)"
