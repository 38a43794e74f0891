"""Weights by any hardening function eta of H-SCL (Jiang et al. 2024, definition 1): log w = log eta(score).

eta must be non-negative and non-decreasing in the tempered score g = similarity / temperature. ``Hardening`` takes eta
by its registered name or as a Python function; ``assumption_1`` checks the assumption of the paper on a batch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from hardneg.core.errors import argument_error, check_range
from hardneg.core.objectives import log_expect_exp
from hardneg.core.schedules import Number, Schedule
from hardneg.core.tiles import NEVER, Tile
from hardneg.core.types import Scores
from hardneg.negatives.base import By, Negatives, check_by

LogEta = Callable[[Tensor], Tensor]
NamedLogEta = Callable[[Tensor, float], Tensor]


def _exponential(score: Tensor, beta: float) -> Tensor:
    """eta(x) = e^(beta x); the same as Tilt(beta)."""
    return beta * score


def _threshold(score: Tensor, tau: float) -> Tensor:
    """eta(x) = 1[e^x >= tau]; tau = e^(l / temperature) for a cosine l."""
    limit = (score.new_ones(()) * tau).log()
    return torch.zeros_like(score).masked_fill(score < limit, NEVER)


def _sigmoid(score: Tensor, slope: float) -> Tensor:
    """eta(x) = 1 / (1 + e^(-slope x)): a threshold at 0 with soft edges."""
    return torch.nn.functional.logsigmoid(slope * score)


_named: dict[str, NamedLogEta] = {"exponential": _exponential, "threshold": _threshold, "sigmoid": _sigmoid}
"""Registered log eta functions; ``describe`` shows their docstrings."""


def register_hardening(name: str, log_eta: NamedLogEta) -> None:
    """Register a hardening function, so that the grammar accepts ``Hardening(name, parameter)``.

    Args:
        name: Name in the grammar.
        log_eta: Function of (scores, parameter) that returns log eta with the shape of the scores. Its docstring is
            shown by ``hardneg explain``.
    """
    _named[name] = log_eta


@dataclass(frozen=True, repr=False)
class Hardening(Negatives):
    """Weighs candidates by a hardening function eta of the score, given by its name or as a Python function.

    Args:
        log_eta: "exponential", "threshold", "sigmoid", another registered name, or a function of the scores that
            returns log eta. It must be non-decreasing, which is checked on a grid from -20 to 20.
        parameter: The parameter of a registered function.
        by: "score", or "guide" to use the similarities of another model.

    Example:
        >>> Hardening("exponential", 2.0)
        Hardening('exponential', parameter=2.0)
    """

    log_eta: str | LogEta
    parameter: Number = 1.0
    by: By = field(default="score", kw_only=True)
    examples: ClassVar = ('Hardening("exponential")', 'Hardening("threshold", 0.9)', 'Hardening("sigmoid", 3.0)')

    def __post_init__(self) -> None:
        check_range("Hardening", "parameter", self.parameter, 0.0, math.inf, open_high=True)
        check_by("Hardening", self.by)
        if isinstance(self.log_eta, str) and self.log_eta not in _named:
            raise argument_error("Hardening", f"a function or one of {sorted(_named)}", "log_eta", self.log_eta)
        if not isinstance(self.log_eta, str) and self.parameter != 1.0:
            what = "no parameter with a function of the scores alone (use register_hardening for one with a parameter)"
            raise argument_error("Hardening", what, "parameter", self.parameter)
        if not isinstance(self.parameter, Schedule):
            _check_non_decreasing(self)

    def log_weight(self, tile: Tile) -> Tensor:
        """Compute log eta of the scores."""
        return self._of(tile.score(self.by, "Hardening"))

    def describe(self) -> str:
        """Return the formula of a registered eta with its parameter."""
        if not isinstance(self.log_eta, str):
            return super().describe()
        *_, parameter = inspect.signature(_named[self.log_eta]).parameters
        formula = inspect.getdoc(_named[self.log_eta]) or f"The registered eta {self.log_eta!r}."
        return f"Weighs candidates by eta(similarity / temperature). {formula} Here {parameter} is {self.parameter:g}."

    @property
    def monotone(self) -> bool:
        """True if the candidates that eta removes are those with the lowest scores."""
        return self.by == "score"

    def _of(self, score: Tensor) -> Tensor:
        if isinstance(self.log_eta, str):
            return _named[self.log_eta](score, self.parameter)  # type: ignore[arg-type]
        return self.log_eta(score)


def _check_non_decreasing(hardening: Hardening) -> None:
    """Raise unless log eta is defined and does not decrease on a grid of scores."""
    with torch.no_grad():
        on_grid = hardening._of(torch.linspace(-20.0, 20.0, 401))
    if on_grid.shape != (401,) or torch.isnan(on_grid).any():
        raise argument_error("Hardening", "a log eta that is defined for every score", "log_eta", hardening.log_eta)
    above = on_grid[on_grid != NEVER]
    lost = (on_grid[1:] == NEVER) & (on_grid[:-1] != NEVER)
    if lost.any() or (above.diff() < -1e-5).any():
        raise argument_error("Hardening", "a non-decreasing eta", "log_eta", hardening.log_eta)


def assumption_1(scores: Scores, hardening: Negatives) -> Annotated[Tensor, ""]:
    """Compute the share of anchors that satisfy Assumption 1 of H-SCL.

    The assumption: E[e^s] over the hard candidates with the anchor's own label is at least E[e^s] over the hard
    candidates with other labels.

    Args:
        scores: Dense scores [b, n] with labels.
        hardening: The distribution that makes candidates hard.

    Returns:
        The share as a scalar; anchors without candidates of either kind are skipped (NaN if all are).
    """
    same = scores.same_label("assumption_1")
    log_w = hardening.log_weights(scores)
    collision = log_expect_exp(scores.candidates, log_w.masked_fill(~same, NEVER))
    true_negative = log_expect_exp(scores.candidates, log_w.masked_fill(same, NEVER))
    defined = (collision != NEVER) & (true_negative != NEVER)
    return ((collision >= true_negative) & defined).sum() / defined.sum()
