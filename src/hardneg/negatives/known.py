"""Judged pairs: relevance judgements, an LLM judge, RLHN: what is known of single (anchor, candidate) pairs.

Built from tensors, so it works everywhere and cannot be written as text.
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
            raise ArgumentError(
                "KnownPairs",
                "one candidate id per anchor id",
                f"anchor_ids={tuple(anchor_ids.shape)} and candidate_ids={tuple(candidate_ids.shape)}",
            )
        if bool((anchor_ids < 0).any()) or bool((candidate_ids < 0).any()):
            raise ArgumentError("KnownPairs", "ids of 0 or more", "a negative one, which matches nothing")
        self.anchor_ids, self.candidate_ids = anchor_ids, candidate_ids
        self.span = int(candidate_ids.max()) + 1 if len(candidate_ids) else 1
        order = torch.argsort(anchor_ids * self.span + candidate_ids)
        self.keys = (anchor_ids * self.span + candidate_ids)[order]
        self.values = torch.as_tensor(values, dtype=torch.float64).expand(len(order))[order]

    def __len__(self) -> int:
        return len(self.keys)

    def look_up(self, scores: Scores | Tile) -> tuple[Annotated[Tensor, "b n"], Annotated[Tensor, "b n"]]:
        """Which pairs of the scores are known, and their value (0 where not)."""
        tile = scores if isinstance(scores, Tile) else scores.tile()
        anchors, candidates = tile.anchor_tags.ids, tile.candidate_tags.ids
        if anchors is None or candidates is None or not tile.ids_given:
            raise ArgumentError("Known", "ids of anchors and candidates", "None", "pass ids=... with the vectors")
        if not len(self):
            return torch.zeros_like(tile.s, dtype=torch.bool), torch.zeros_like(tile.s)
        key = anchors[:, None] * self.span + candidates
        keys, values = self._on(key.device)
        slot = torch.searchsorted(keys, key).clamp(max=len(keys) - 1)
        in_range = (anchors >= 0)[:, None] & (candidates >= 0) & (candidates < self.span)
        known = ((keys[slot] == key) & in_range).expand_as(tile.s)
        return known, torch.where(known, values[slot].to(tile.s.dtype), 0.0)

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The table on this device, copied there once."""
        if self.keys.device != device:
            self.keys, self.values = self.keys.to(device), self.values.to(device)
        return self.keys, self.values


@dataclass(frozen=True, repr=False)
class Known(Negatives):
    """Log-weights of judged pairs; NEVER (the default of KnownPairs) makes a pair no negative; others stay at 0.

    Pairs judged positive: ``more_positives(scores, pairs.look_up(scores)[0])``.
    """

    pairs: KnownPairs
    textual: ClassVar = False

    def log_weight(self, tile: Tile) -> Tensor:
        return self.pairs.look_up(tile)[1]

    def reads(self) -> frozenset[str]:
        return frozenset({"ids"})

    def __repr__(self) -> str:
        return f"Known(<{len(self.pairs)} pairs>)"
