"""Weights as a function of the score: the exponential tilt, which weighs harder candidates more, and the Gaussian.

The tilt, q(x-|x) ~ exp(beta * score), is that of HCL (Robinson et al. 2021, sec. 3.1) and H-SCL(beta). beta multiplies
the tempered score (similarity / temperature), as in the authors' code. The pseudo-code of HCL's Fig. 13 has a linear
weight instead, which its author called a typo. HCL lets the gradient flow through the weights; with ``detach=True`` it
does not, and then the gradient by the negatives is that of temperature / (1 + beta).

``Gaussian`` is ADNCE (Wu et al. 2023, "Understanding contrastive learning via distributionally robust optimization",
eq. 12). Candidates with a similarity near ``mu`` count most; the closest ones, which are the likeliest false negatives,
count less again. The authors detach the weights, and so does ``papers.adnce``; here the gradient flows through them
unless ``detach=True``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from hardneg.core.bounds import Bound, Largest
from hardneg.core.errors import check_kind, check_range
from hardneg.core.schedules import Number
from hardneg.core.tiles import Tile
from hardneg.negatives.base import By, Negatives, check_by
from hardneg.negatives.closed import ClosedForm


@dataclass(frozen=True, repr=False)
class Tilt(Negatives):
    """Weighs candidates by e^(beta * score), so that harder candidates count more.

    score = similarity / temperature. beta = 0 is the uniform distribution.

    Args:
        beta: Strength of the tilt, 0 or more; a number, schedule or tensor.
        detach: Whether to stop the gradient through the weights.
        source: Tilt only the candidates of this source; the others keep log-weight 0.
        by: "score", or "guide" to use the scores of another model.
    """

    beta: Number
    detach: bool = False
    source: str | None = None
    by: By = field(default="score", kw_only=True)
    removes: ClassVar = False
    examples: ClassVar = ("Tilt(1.0)", "Tilt(5.0, detach=True)", "Tilt(0.0)")

    def __post_init__(self) -> None:
        check_range("Tilt", "beta", self.beta, 0.0, math.inf, open_high=True)
        check_kind("Tilt", "detach", self.detach, bool, "True or False")
        if self.source is not None:
            check_kind("Tilt", "source", self.source, str, "the name of a source")
        check_by("Tilt", self.by)

    def log_weight(self, tile: Tile) -> Tensor:
        """Compute beta * score."""
        s = tile.score(self.by, "Tilt")
        s = s.detach() if self.detach else s
        one = isinstance(self.beta, (int, float)) and self.beta == 1  # the usual case, which saves two operations
        tilted: Tensor = s if one else self.beta * s
        return tilted if self.source is None else torch.where(tile.of_source("Tilt", self.source), tilted, 0.0)

    def describe(self) -> str:
        """Return the description with beta and the source filled in."""
        which = f"the candidates of {self.source!r}" if self.source is not None else "candidates"
        others = "; the others keep weight 1" if self.source is not None else ""
        return (
            f"Weighs {which} by e^({self.beta:g} s), where s = similarity / temperature: raising s by 1 multiplies the "
            f"weight by e^{self.beta:g}{others}."
        )

    def reads(self) -> frozenset[str]:
        """Return the inputs that it reads; "source" if it tilts one source only."""
        return super().reads() | ({"source"} if self.source is not None else set())

    @property
    def slope(self) -> Number:
        """The number beta if it applies to all candidates and to the model's own scores; otherwise 0."""
        return self.beta if self.source is None and self.by == "score" else 0.0

    @property
    def slope_detached(self) -> bool:
        """The argument ``detach``."""
        return self.detach

    def closed_form(self) -> ClosedForm | None:
        """Return the tilt as a closed form; None for one source, a guide, a schedule or a tensor."""
        plain = self.source is None and self.by == "score" and isinstance(self.beta, (int, float))
        return ClosedForm(float(self.beta), self.detach) if plain else None


@dataclass(frozen=True, repr=False)
class ClippedTilt(Negatives):
    """Weighs candidates by an exponential tilt whose exponent is limited, for embeddings of any norm.

    log w = beta * bound * score / max |score|. HCL Fig. 14 calls it clipping to [-2, 2]; it is a rescaling by the
    largest absolute score of the whole batch. As in the authors' code, the gradient also flows through the scale.

    Args:
        beta: Strength of the tilt, 0 or more.
        bound: Largest absolute value of the rescaled score.
        detach: Whether to stop the gradient through the weights.
        by: "score", or "guide" to use the scores of another model.
    """

    beta: Number
    bound: float = 2.0
    detach: bool = False
    by: By = field(default="score", kw_only=True)
    removes: ClassVar = False
    examples: ClassVar = ("ClippedTilt(1.0)", "ClippedTilt(10.0, bound=1.0, detach=True)")

    def __post_init__(self) -> None:
        check_range("ClippedTilt", "beta", self.beta, 0.0, math.inf, open_high=True)
        check_range("ClippedTilt", "bound", self.bound, 0.0, math.inf, open_high=True)
        check_kind("ClippedTilt", "detach", self.detach, bool, "True or False")
        check_by("ClippedTilt", self.by)

    def bounds(self) -> dict[str, Bound]:
        """Declare the largest absolute score of the batch."""
        return {"largest": Largest(lambda tile: self._score(tile).abs(), scope="batch", grad=not self.detach)}

    def log_weight(self, tile: Tile) -> Tensor:
        """Compute beta * bound * score / max |score|."""
        largest = tile.bound["largest"]
        log_w: Tensor = self.beta * (self._score(tile) * (self.bound / torch.where(largest > 0, largest, 1.0)))
        return log_w

    def describe(self) -> str:
        """Return the description with the range of the weights filled in."""
        most = self.beta * self.bound
        weight = f"e^({most:g} s / max |s|), where s = similarity / temperature and the maximum is that of the batch"
        return f"Weighs candidates by {weight}: from e^-{most:g} to e^{most:g}."

    def _score(self, tile: Tile) -> Tensor:
        s = tile.score(self.by, "ClippedTilt")
        return s.detach() if self.detach else s


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
