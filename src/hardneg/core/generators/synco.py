"""SynCo (Giakoumoglou and Stathaki 2024): six kinds of synthetic negatives, made from the hardest ones.

With q the anchor and n, m drawn from its hardest negatives, each scaled to unit norm and without a gradient:

    interpolated   a q + (1 - a) n              a in (0, 0.5)
    extrapolated   q + b (n - q)                b in (1, 1.5)
    mixed          c n + (1 - c) m              c in (0, 1)
    noisy          n + sigma e                  e normal
    perturbed      n + delta grad               grad = d <q, n> / d n = q
    adversarial    n + eta sign(grad)

Interpolated and mixed ones are those of MoCHi. The authors' code (giakoumoglou/synco) estimates the gradient by a
difference of 1e-5 along one random direction and then steps along that difference, so that its last two kinds stay
within 1e-6 of n; the gradient here is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from hardneg.core.errors import check_counts, check_range
from hardneg.core.generators.base import GeneratedVectors, Generator, hardest, picked
from hardneg.core.keyed import uniforms
from hardneg.core.pairing import Pairing
from hardneg.core.tensors import unit

KINDS = ("interpolated", "extrapolated", "mixed", "noisy", "perturbed", "adversarial")
"""The kinds of synthetic negatives, in the order in which they are candidates."""


@dataclass(frozen=True, repr=False)
class SynCo(Generator):
    """Synthesise negatives around and between hard negatives and the anchor.

    Args:
        num_hardest: Number of closest negatives to draw from.
        num_interpolated: Number of points between the anchor and a negative.
        num_extrapolated: Number of points beyond a negative, seen from the anchor.
        num_mixed: Number of mixtures of two negatives.
        num_noisy: Number of negatives with noise.
        num_perturbed: Number of negatives moved along the gradient of the similarity.
        num_adversarial: Number of negatives moved along the sign of that gradient.
        sigma: Standard deviation of the noise.
        delta: Length of the step along the gradient.
        eta: Length of the step along each sign.
        seed: Seed of the draws.
    """

    num_hardest: int = 1024
    num_interpolated: int = 256
    num_extrapolated: int = 256
    num_mixed: int = 256
    num_noisy: int = 64
    num_perturbed: int = 64
    num_adversarial: int = 64
    sigma: float = 0.01
    delta: float = 0.01
    eta: float = 0.01
    seed: int = 0
    name: ClassVar = "synco"
    examples: ClassVar = ("synco()", "synco(num_hardest=64, num_noisy=0, delta=0.05)")

    def __post_init__(self) -> None:
        check_counts("synco", self, "num_hardest")
        check_counts("synco", self, *(f"num_{kind}" for kind in KINDS), "seed", least=0)
        for name in ("sigma", "delta", "eta"):
            check_range("synco", name, getattr(self, name), 0.0, 1.0)

    @torch.no_grad()
    def make(self, pairing: Pairing, step: int) -> GeneratedVectors:
        """Return the synthetic negatives, in the order of ``KINDS``, and a mask of anchors that have a negative."""
        hard, real = hardest(pairing, self.num_hardest)
        if not hard.shape[1]:
            return hard, real
        q, count = pairing.anchors.vectors[:, None], real.sum(1).clamp(min=1)  # [b, 1, d], [b]
        numbers = [getattr(self, f"num_{kind}") for kind in KINDS]
        rows = torch.arange(len(q), device=q.device)
        draws = uniforms(3 * sum(numbers), rows, torch.zeros_like(rows), step, self.seed).T.to(q)
        first, second, share = draws.view(len(q), 3, -1).unbind(1)  # [b, k] each
        n, m = (torch.split(picked(hard, (u * count[:, None]).long()), numbers, dim=1) for u in (first, second))
        a, b, c, *_ = torch.split(share[:, :, None], numbers, dim=1)
        made = (
            0.5 * a * q + (1.0 - 0.5 * a) * n[0],
            q + (1.0 + 0.5 * b) * (n[1] - q),
            c * n[2] + (1.0 - c) * m[2],
            n[3] + self.sigma * self._noise(n[3], step),
            n[4] + self.delta * q,
            n[5] + self.eta * q.sign(),
        )
        return unit(torch.cat(made, dim=1)), real.any(1, keepdim=True).expand(-1, sum(numbers))

    def _noise(self, like: Annotated[Tensor, "b k d"], step: int) -> Annotated[Tensor, "b k d"]:
        """Return normal numbers that depend on the step and the seed only."""
        rows = torch.arange(len(like), device=like.device)
        drawn = uniforms(like[0].numel(), rows, torch.ones_like(rows), step, self.seed).T  # [b, k d], in [0, 1)
        normal: Tensor = torch.special.ndtri(drawn.double() + 2.0**-25)
        return normal.view(like.shape).to(like)
