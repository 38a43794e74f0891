"""MoCHi (Kalantidis et al. 2020, sec. 3.2 and 3.3): mixtures of hard negatives with each other and with the anchor.

h = a n_i + (1 - a) n_j with a in (0, 1), and h = b q + (1 - b) n_j with b in (0, 0.5), both scaled to unit norm; n_i
and n_j are drawn from the hardest negatives. No gradient flows into the mixtures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hardneg.core.errors import check_counts
from hardneg.core.generators.base import GeneratedVectors, Generator, hardest, picked
from hardneg.core.keyed import uniforms
from hardneg.core.pairing import Pairing
from hardneg.core.tensors import unit


@dataclass(frozen=True, repr=False)
class MoCHi(Generator):
    """Synthesise negatives as mixtures of two hard negatives, and of one with the anchor.

    Args:
        num_hardest: Number of closest negatives to draw from.
        num_mixed: Number of mixtures of two negatives.
        num_with_anchor: Number of mixtures of a negative with the anchor.
        seed: Seed of the draws.
    """

    num_hardest: int = 1024
    num_mixed: int = 1024
    num_with_anchor: int = 128
    seed: int = 0
    name: ClassVar = "mochi"
    examples: ClassVar = ("mochi()", "mochi(num_hardest=64, num_mixed=32, num_with_anchor=8)")

    def __post_init__(self) -> None:
        check_counts("mochi", self, "num_hardest")
        check_counts("mochi", self, "num_mixed", "num_with_anchor", "seed", least=0)

    @torch.no_grad()
    def make(self, pairing: Pairing, step: int) -> GeneratedVectors:
        """Return the mixtures, [b, num_mixed + num_with_anchor, d], and a mask of anchors that have a negative."""
        hard, real = hardest(pairing, self.num_hardest)
        anchors, count = pairing.anchors.vectors, real.sum(1).clamp(min=1)
        rows = torch.arange(len(anchors), device=anchors.device)
        number = self.num_mixed + self.num_with_anchor
        if not hard.shape[1]:
            return hard, real
        draws = uniforms(3 * number, rows, torch.zeros_like(rows), step, self.seed).T.to(anchors)  # [b, 3 k]
        first, second, share = draws.view(len(anchors), 3, number).unbind(1)
        one, other = (picked(hard, (draw * count[:, None]).long()) for draw in (first, second))
        share = share[:, :, None]
        mixed = share * one + (1.0 - share) * other
        with_anchor = 0.5 * share * anchors[:, None] + (1.0 - 0.5 * share) * one
        made = unit(torch.cat([mixed[:, : self.num_mixed], with_anchor[:, self.num_mixed :]], dim=1))
        return made, real.any(1, keepdim=True).expand(-1, number)
