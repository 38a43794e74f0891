"""What an objective is: a plain function of a positive's score and the statistics of its anchor's row.

Corner cases, the same for all: a pair whose anchor has no negative, or whose positive is not valid, costs 0 and has no
gradient. NaN in gives NaN out.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, argument_error, check_range
from hardneg.core.schedules import Schedule, schedules_of, short_repr
from hardneg.core.statistics import LogMean, PerRow, Statistic, Support, dense_statistics
from hardneg.core.types import LogWeights, PairLosses, Scores

_registry: dict[str, type[Objective]] = {}


@dataclass(eq=False)
class Row:
    """The statistics of anchors, [b, 1] each, as attributes: ``row.log_mean``, ``row.support``.

    ``number`` is the support of every anchor, where it was known and not counted.
    """

    statistics: Mapping[str, PerRow]
    temperature: float | Tensor
    number: int | None = None

    def __getattr__(self, name: str) -> PerRow:
        if name == "statistics" or name.startswith("__"):  # of a copy that has no fields yet
            raise AttributeError(name)
        try:
            return self.statistics[name]
        except KeyError:
            raise AttributeError(f"{name!r} is not among the statistics {sorted(self.statistics)}") from None


class RowResult(NamedTuple):
    """What a backend of the row engine returns: statistics and positives of every anchor, with gradients."""

    row: Row
    positives: Annotated[Tensor, "b p"]
    """The scores of the anchors' own positives, and of promoted ones where a backend holds all pairs."""
    real: Annotated[Tensor, "b p"] | None
    """Which of the positives are real; None: all are, and every anchor has a negative."""
    sum_pairs: Callable[[Objective], tuple[Annotated[Tensor, "b"], Annotated[Tensor, "b"]]] | None = None
    """Given the objective, the sum of its losses over promoted positives that were not held, and their number."""
    losses: PairLosses | None = None
    """The losses of the pairs where a kernel computed them with the statistics."""

    def loss(self, objective: Objective, reduction: str) -> Tensor:
        """Apply the objective to every pair and reduce: the one place where a loss is made of row statistics."""
        if self.real is None:
            losses = objective.__call__(self.positives, self.row) if self.losses is None else self.losses
            losses = losses if losses.shape == self.positives.shape else losses.expand_as(self.positives)
            return losses.mean(-1) if reduction == "none" else losses.mean()
        losses = objective.real_losses(self.positives, self.row, self.real)
        if self.sum_pairs is None:
            return _reduced(losses, self.real, reduction)
        sums, number = self.sum_pairs(objective)
        return reduce_sums(losses.sum(-1) + sums, self.real.sum(-1) + number, reduction)


class PairForm(NamedTuple):
    """The loss of a pair is offset - positive, or its softplus, with one offset for each row."""

    softplus: bool
    offset: Callable[[Row], PerRow]


class Objective(ABC):
    """A loss for each pair of an anchor and a positive. Subclasses are frozen dataclasses; defining one registers it.

    ``__call__(positive, row)`` gets scores of positives, [b, p] or a tile of them, and the statistics of their rows,
    [b, 1]: those that ``statistics()`` declares.
    """

    name: ClassVar[str]
    """The name in the grammar: ``objective="rince(q=0.5)"``."""
    examples: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = cls.__dict__.get("name", cls.__name__)
        _registry[cls.name] = cls

    def statistics(self) -> Mapping[str, Statistic]:
        """What it needs of each row, by name. The support is always there."""
        return {"log_mean": LogMean()}

    @abstractmethod
    def __call__(self, positive: Tensor, row: Row) -> Tensor: ...

    @property
    def needs_negatives(self) -> bool:
        """Whether an anchor without a negative costs nothing."""
        return True

    @property
    def pair_form(self) -> PairForm | None:
        """The form of a pair's loss, for kernels that sum it over many positives; None for any other form."""
        return None

    def at(self, step: int, total: int | None = None) -> Objective:
        """With its schedules evaluated, as tensors, so that a new number does not compile a graph again."""
        changing = schedules_of(self).items()
        numbers = {name: torch.tensor(schedule(step, total), dtype=torch.float64) for name, schedule in changing}
        return replace(self, **numbers) if numbers else self  # type: ignore[type-var]

    def schedules(self) -> list[Schedule]:
        return list(schedules_of(self).values())

    def losses(self, scores: Scores, log_w: LogWeights) -> PairLosses:
        """Return the loss of each pair, [b, p], from dense scores."""
        check_shape(self.name, scores, log_w)
        return self.real_losses(scores.positives, self.dense_row(scores, log_w), scores.positive_valid)

    def dense_row(self, scores: Scores, log_w: LogWeights) -> Row:
        """Return the statistics of dense scores."""
        fill_empty = not self.needs_negatives  # otherwise the losses of rows without a negative are masked
        return Row(dense_statistics(self.statistics(), scores, log_w, fill_empty=fill_empty), scores.temperature)

    def real_losses(self, positive: Tensor, row: Row, real: Annotated[Tensor, "b p"]) -> PairLosses:
        """Return the loss of each real pair; 0 if the pair is not real or the row lacks the negatives it needs.

        Masking the loss is not enough: an infinite number on the way to it makes a gradient of 0 * inf.
        """
        if self.needs_negatives:
            none = row.support == 0
            real = real.masked_fill(none, False)
            row = Row({name: value.masked_fill(none, 1.0) for name, value in row.statistics.items()}, row.temperature)
        positive = positive * real  # not where(real, ...): NaN stays NaN
        losses = self.__call__(positive, row)  # self(...) compiles anew per object in torch 2.6
        return torch.where(real, losses, positive.detach())

    def __repr__(self) -> str:
        return short_repr(self).replace(type(self).__name__, self.name, 1) if is_dataclass(self) else f"{self.name}()"


def registered_objectives() -> dict[str, type[Objective]]:
    """Every objective that the grammar knows, by name."""
    return {name: cls for name, cls in _registry.items() if cls is not Function}


def check_shape(who: str, scores: Scores, log_w: LogWeights) -> None:
    fix = "use negatives.log_weights(scores)"
    if not isinstance(log_w, Tensor):
        raise ArgumentError(who, "log-weights as a tensor", f"log_w of type {type(log_w).__name__}", fix)
    if log_w.shape != scores.candidates.shape:
        what = f"a log-weight for each candidate, shape {tuple(scores.candidates.shape)}"
        raise ArgumentError(who, what, f"log_w={tuple(log_w.shape)}", fix)


@dataclass(frozen=True, repr=False)
class Function(Objective):
    """A plain function of (positive, row), which has ``row.log_mean``, ``row.support`` and ``row.temperature``."""

    function: Callable[[Tensor, Row], Tensor]

    def statistics(self) -> Mapping[str, Statistic]:
        return {"log_mean": LogMean(), "support": Support()}

    def __call__(self, positive: Tensor, row: Row) -> Tensor:
        return self.function(positive, row)


TauPlus = float | Tensor | Schedule


def check_tau_plus(who: str, tau_plus: TauPlus) -> None:
    check_range(who, "tau_plus", tau_plus, 0.0, 1.0, open_high=True)


def corrects(tau_plus: TauPlus) -> bool:
    """Whether there is something to correct for; a tensor, such as a schedule's number, is not looked into."""
    if not isinstance(tau_plus, (float, Tensor)) and isinstance(tau_plus, Schedule):
        float(tau_plus)  # which says that it is not a number yet
    return isinstance(tau_plus, Tensor) or bool(tau_plus)


def reduce(
    losses: PairLosses, scores: Scores, reduction: str = "anchors", weights: Annotated[Tensor, "b"] | None = None
) -> Tensor:
    """One number from the pairs.

    ``"anchors"``: mean over the positives of each anchor, then over all anchors (SupCon); an anchor without a positive
    counts as 0. ``"pairs"``: mean over all valid pairs (H-SCL), so anchors with more positives count more. ``"none"``:
    the mean of each anchor, [b]. ``weights`` of the anchors make either mean a weighted one.
    """
    if losses.ndim != 2:
        raise ArgumentError("reduce", "losses of pairs, [b, p]", f"losses={tuple(losses.shape)}")
    return _reduced(losses, scores.positive_valid, reduction, weights)


def _reduced(
    losses: PairLosses, real: Annotated[Tensor, "b p"], reduction: str, weights: Annotated[Tensor, "b"] | None = None
) -> Tensor:
    if losses.shape[1] == 1 and reduction != "pairs":  # one positive, or none and a loss of 0
        if reduction == "anchors" and weights is None:
            return losses.mean()
        return _reduce_means(losses.squeeze(1), reduction, weights)
    return reduce_sums(losses.sum(-1), real.sum(-1, dtype=losses.dtype), reduction, weights)


def reduce_sums(sums: Tensor, counts: Tensor, reduction: str, weights: Tensor | None = None) -> Tensor:
    """One number from the sum of each anchor's losses, [b], and the number of its positives, [b]."""
    if reduction != "pairs":
        return _reduce_means(sums / counts.clamp(min=1.0), reduction, weights)
    if weights is None:
        return sums.sum() / counts.sum().clamp(min=1.0)
    return (weights * sums).sum() / _at_least_tiny((weights * counts).sum())


def _reduce_means(per_anchor: Tensor, reduction: str, weights: Tensor | None) -> Tensor:
    if reduction == "none":
        return per_anchor if weights is None else weights * per_anchor
    if reduction == "anchors":
        return per_anchor.mean() if weights is None else (weights * per_anchor).sum() / _at_least_tiny(weights.sum())
    raise argument_error("reduce", "reduction 'anchors', 'pairs' or 'none'", "reduction", reduction)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x); beyond torch's usual threshold of 20 the digits of e^-x still count in float64."""
    return torch.nn.functional.softplus(x, threshold=80.0)


def log1m_exp(x: Tensor) -> Tensor:
    """log(1 - e^x) for x < 0, accurate at both ends (Maechler 2012)."""
    close = x > -math.log(2.0)
    return torch.where(
        close,
        torch.log(-torch.expm1(torch.where(close, x, -1.0))),
        torch.log1p(-torch.exp(torch.where(close, -1.0, x))),
    )


def _at_least_tiny(total: Tensor) -> Tensor:
    return torch.where(total > 0, total, 1.0)
