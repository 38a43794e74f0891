"""Exponential tilting: harder candidates weigh more, q(x-|x) ~ exp(beta * score).

HCL (Robinson et al. 2021, sec. 3.1) and H-SCL(beta). beta multiplies the tempered score, as in the authors' code. The
pseudo-code of HCL's Fig. 13 has a linear weight instead, which its author called a typo. HCL lets the gradient through
the weights; ``detach=True`` does not, and then repels exactly like temperature / (1 + beta).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from hardneg.core.errors import check_kind, check_range
from hardneg.core.schedules import Number
from hardneg.core.types import NEVER, LogWeights, Scores
from hardneg.negatives.base import Negatives


@dataclass(frozen=True, repr=False)
class Tilt(Negatives):
    """log w = beta * score. ``source`` tilts the candidates of one source and leaves the others at log-weight 0."""

    beta: Number
    detach: bool = False
    source: str | None = None
    examples: ClassVar = ("Tilt(1.0)", "Tilt(5.0, detach=True)", "Tilt(0.0)")

    def __post_init__(self) -> None:
        check_range("Tilt", "beta", self.beta, 0.0, math.inf, open_high=True)
        check_kind("Tilt", "detach", self.detach, bool, "True or False")
        if self.source is not None:
            check_kind("Tilt", "source", self.source, str, "the name of a source")

    def log_weights(self, scores: Scores) -> LogWeights:
        tilted = self.beta * (scores.candidates.detach() if self.detach else scores.candidates)
        if self.source is not None:
            tilted = torch.where(scores.of_source("Tilt", self.source), tilted, 0.0)
        return tilted.masked_fill(~scores.valid, NEVER)


@dataclass(frozen=True, repr=False)
class ClippedTilt(Negatives):
    """log w = beta * bound * score / max |score|, for embeddings that are not on a sphere.

    HCL Fig. 14 calls it clipping to [-2, 2]; it is a rescale, by the largest absolute score of the whole batch. The
    gradient flows through the scale too, as in the authors' code, unless ``detach``.
    """

    beta: Number
    bound: float = 2.0
    detach: bool = False
    ranks: ClassVar = True  # the scale is that of the valid candidates
    examples: ClassVar = ("ClippedTilt(1.0)", "ClippedTilt(10.0, bound=1.0, detach=True)")

    def __post_init__(self) -> None:
        check_range("ClippedTilt", "beta", self.beta, 0.0, math.inf, open_high=True)
        check_range("ClippedTilt", "bound", self.bound, 0.0, math.inf, open_high=True)
        check_kind("ClippedTilt", "detach", self.detach, bool, "True or False")

    def log_weights(self, scores: Scores) -> LogWeights:
        s = scores.candidates.detach() if self.detach else scores.candidates
        size = torch.where(scores.valid, s, 0.0).abs()
        largest = size.amax() if size.numel() else size.sum()
        rescaled = s * (self.bound / torch.where(largest > 0, largest, 1.0))
        return (self.beta * rescaled).masked_fill(~scores.valid, NEVER)
