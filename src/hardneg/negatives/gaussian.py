"""Gaussian weights over the similarity (ADNCE, Wu et al. 2023).

"Understanding contrastive learning via distributionally robust optimization", eq. 12. Candidates with a similarity near
``mu`` count most; the closest ones, which are the likeliest false negatives, count less again. The authors detach the
weights, and so does ``papers.adnce``; here the gradient flows through them unless ``detach=True``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from hardneg.core.errors import check_kind, check_range
from hardneg.core.schedules import Number
from hardneg.core.tiles import Tile
from hardneg.negatives.base import By, Negatives, check_by


@dataclass(frozen=True, repr=False)
class Gaussian(Negatives):
    """Weighs candidates with a similarity near mu most, so that the closest ones count less again.

    log w = -(similarity - mu)^2 / (2 sigma^2), in plain similarity (not divided by the temperature).

    Args:
        mu: Similarity with the largest weight.
        sigma: Standard deviation, in units of similarity.
        detach: Whether to stop the gradient through the weights.
        by: "score", or "guide" to use the similarities of another model.
    """

    mu: Number = 0.7
    sigma: Number = 1.0
    detach: bool = False
    by: By = field(default="score", kw_only=True)
    removes: ClassVar = False
    examples: ClassVar = ("Gaussian()", "Gaussian(0.4, sigma=0.3, detach=True)")

    def __post_init__(self) -> None:
        check_range("Gaussian", "mu", self.mu, -math.inf, math.inf)
        check_range("Gaussian", "sigma", self.sigma, 1e-6, math.inf, open_high=True)
        check_kind("Gaussian", "detach", self.detach, bool, "True or False")
        check_by("Gaussian", self.by)

    def log_weight(self, tile: Tile) -> Tensor:
        """Compute -(similarity - mu)^2 / (2 sigma^2)."""
        similarity = tile.similarity if self.by == "score" else tile.guided("Gaussian")
        distance: Tensor = ((similarity.detach() if self.detach else similarity) - self.mu) / self.sigma
        return -0.5 * distance.square()

    def describe(self) -> str:
        """Return the description with the numbers filled in."""
        return f"Weighs candidates of similarity {self.mu:g} most; those {self.sigma:g} away get 0.61 times the weight."
