"""The interface of objectives: a loss is a function of a positive's score and the statistics of its anchor's row.

``Objective`` is the base class, ``Row`` holds the statistics, ``RowResult`` is the output of a kernel backend, and
``reduce`` turns losses of pairs into one number. ``ContrastiveLoss`` and the functions of this package call them.

Corner cases, the same for all objectives: a pair whose anchor has no negative, or whose positive is not real, has loss
0 and no gradient. NaN in the scores gives NaN in the loss.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, argument_error, check_range
from hardneg.core.schedules import Schedule, schedules_of, short_repr
from hardneg.core.statistics import LogMean, PerRow, Statistic, Support, dense_statistics
from hardneg.core.types import LogWeights, PairLosses, Scores

_registry: dict[str, type[Objective]] = {}


@dataclass(eq=False)
class Row:
    """Statistics of the anchors, each [b, 1], readable as attributes: ``row.log_mean``, ``row.support``.

    Attributes:
        statistics: The statistics that the objective declared, by name.
        temperature: Number or tensor ([] or [b, 1]) by which similarities were divided.
        number: The support, if it is known in advance and the same for all anchors; otherwise None.
    """

    statistics: Mapping[str, PerRow]
    temperature: float | Tensor
    number: int | None = None

    def __getattr__(self, name: str) -> PerRow:
        if name == "statistics" or name.startswith("__"):  # copy and pickle ask before the fields are set
            raise AttributeError(name)
        try:
            return self.statistics[name]
        except KeyError:
            raise AttributeError(f"{name!r} is not among the statistics {sorted(self.statistics)}") from None


class RowResult(NamedTuple):
    """Output of a kernel backend: statistics and positives of every anchor, with gradients."""

    row: Row
    positives: Annotated[Tensor, "b p"]
    """Scores of the anchors' own positives, and of same-label positives if the backend holds all pairs in memory."""
    real: Annotated[Tensor, "b p"] | None
    """True for real positives. None means that all are real and every anchor has a negative."""
    sum_pairs: Callable[[Objective], tuple[Annotated[Tensor, "b"], Annotated[Tensor, "b"]]] | None = None
    """Function of the objective that returns the sum of its losses over all same-label positives that were not kept
    in memory, and their number, per anchor."""
    losses: PairLosses | None = None
    """The losses of all pairs, if a kernel computed them together with the statistics."""

    def loss(self, objective: Objective, reduction: str) -> Tensor:
        """Apply the objective to every pair and reduce; all losses made of row statistics pass through here.

        Args:
            objective: The objective that declared the statistics.
            reduction: ``"anchors"``, ``"pairs"`` or ``"none"``, as in ``reduce``.

        Returns:
            A scalar, or the mean loss of each anchor, [b], for ``"none"``.
        """
        if self.real is None:
            losses = objective.__call__(self.positives, self.row) if self.losses is None else self.losses
            losses = losses if losses.shape == self.positives.shape else losses.expand_as(self.positives)
            return losses.mean(-1) if reduction == "none" else losses.mean()
        if self.sum_pairs is None:
            return _reduced(objective.real_losses(self.positives, self.row, self.real), self.real, reduction)
        sums, number = self.sum_pairs(objective)
        if self.positives.shape[1]:
            sums = objective.real_losses(self.positives, self.row, self.real).sum(-1) + sums
            number = self.real.sum(-1) + number
        return reduce_sums(sums, number, reduction)


class PairForm(NamedTuple):
    """A loss of the form ``offset - positive``, or softplus of that, with one offset per row."""

    softplus: bool
    offset: Callable[[Row], PerRow]
    """Function of the row statistics that returns the offset, [b, 1]."""


class Objective(ABC):
    """A loss for each pair of an anchor and a positive; the base class of all objectives.

    Subclasses are frozen dataclasses that implement ``__call__(positive, row)``. Defining a subclass registers it, so
    that losses, configuration files and the command line accept its name; docs/extend.md has an example.

    ``__call__`` gets the scores of positives, [b, p] or a block of them, and the statistics of their rows, [b, 1]
    each: those that ``statistics()`` declares. It returns the losses in the shape of ``positive``. It must not reduce,
    and must compute each row independently of the others. ``losses``, ``dense_row`` and ``real_losses`` are the same
    for all objectives: overriding one of them raises.
    """

    name: ClassVar[str]
    """Name in the grammar, as in ``objective="rince(q=0.5)"``; the class name by default."""
    examples: ClassVar[tuple[str, ...]] = ()
    """Expressions for the documentation and the conformance tests."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for method in ("losses", "dense_row", "real_losses"):
            if getattr(cls, method) is not getattr(Objective, method):
                what = f"the {method} of Objective, because only the dense backend would call another one"
                fix = "override __call__(positive, row) and statistics()"
                raise ArgumentError(cls.__name__, what, f"a {method} of its own", fix)
        cls.name = cls.__dict__.get("name", cls.__name__)
        _registry[cls.name] = cls

    def statistics(self) -> Mapping[str, Statistic]:
        """Return the statistics that the loss needs of each row, by name; ``support`` is always available."""
        return {"log_mean": LogMean()}

    @abstractmethod
    def __call__(self, positive: Tensor, row: Row) -> Tensor:
        """Return the loss of each pair.

        Args:
            positive: Scores of the positives, [b, p].
            row: Statistics of their rows, [b, 1] each.
        """

    @property
    def needs_negatives(self) -> bool:
        """True if anchors without a negative have loss 0."""
        return True

    @property
    def pair_form(self) -> PairForm | None:
        """The form of a pair's loss, for kernels that sum over many positives; None for any other form."""
        return None

    def at(self, step: int, total: int | None = None) -> Objective:
        """Return the objective with its schedules evaluated.

        The numbers are tensors, so that a new value does not recompile a graph.

        Args:
            step: Current step or epoch.
            total: Number of steps in the run, for schedules without a length.
        """
        changing = schedules_of(self).items()
        numbers = {name: torch.tensor(schedule(step, total), dtype=torch.float64) for name, schedule in changing}
        return replace(self, **numbers) if numbers else self  # type: ignore[type-var]

    def schedules(self) -> list[Schedule]:
        """Return the fields that are schedules."""
        return list(schedules_of(self).values())

    def losses(self, scores: Scores, log_w: LogWeights) -> PairLosses:
        """Compute the loss of each pair from dense scores.

        Args:
            scores: Scores of b anchors.
            log_w: Log-weights of the negatives, [b, n].

        Returns:
            Losses [b, p]; 0 for positives that are not real and anchors that lack a negative.
        """
        check_shape(self.name, scores, log_w)
        return self.real_losses(scores.positives, self.dense_row(scores, log_w), scores.positive_valid)

    def dense_row(self, scores: Scores, log_w: LogWeights) -> Row:
        """Compute the statistics of dense scores."""
        fill_empty = not self.needs_negatives  # otherwise the losses of rows without a negative are masked
        return Row(dense_statistics(self.statistics(), scores, log_w, fill_empty=fill_empty), scores.temperature)

    def real_losses(self, positive: Tensor, row: Row, real: Annotated[Tensor, "b p"]) -> PairLosses:
        """Return the loss of each real pair; 0 if the pair is not real or the row lacks the negatives it needs.

        Masking the loss alone is not enough: an infinite intermediate value would give a gradient of 0 * inf = NaN.

        Args:
            positive: Scores of the positives, [b, p].
            row: Statistics of their rows, [b, 1] each.
            real: True for real positives, [b, p].
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
    """Return every objective that the grammar accepts, by name."""
    return {name: cls for name, cls in _registry.items() if cls is not Function}


def check_shape(who: str, scores: Scores, log_w: LogWeights) -> None:
    """Raise ArgumentError unless there is one log-weight for each candidate, [b, n]."""
    fix = "use negatives.log_weights(scores)"
    if not isinstance(log_w, Tensor):
        raise ArgumentError(who, "log-weights as a tensor", f"log_w of type {type(log_w).__name__}", fix)
    if log_w.shape != scores.candidates.shape:
        what = f"a log-weight for each candidate, shape {tuple(scores.candidates.shape)}"
        raise ArgumentError(who, what, f"log_w={tuple(log_w.shape)}", fix)


@dataclass(frozen=True, repr=False)
class Function(Objective):
    """An objective built from a plain function of (positive, row).

    The function may use ``row.log_mean``, ``row.support`` and ``row.temperature``. Pass it as
    ``ContrastiveLoss(objective=function)``; it has no name in the grammar.
    """

    function: Callable[[Tensor, Row], Tensor]

    def statistics(self) -> Mapping[str, Statistic]:
        """Return the log-mean of the negatives and their number."""
        return {"log_mean": LogMean(), "support": Support()}

    def __call__(self, positive: Tensor, row: Row) -> Tensor:
        """Return ``function(positive, row)``."""
        return self.function(positive, row)


TauPlus = float | Tensor | Schedule
Reduction = Literal["anchors", "mean", "pairs", "none"]
"""How losses of pairs become one number: see ``reduce``; "mean" is another name of "anchors"."""


def check_tau_plus(who: str, tau_plus: TauPlus) -> None:
    """Raise ArgumentError unless 0 <= tau_plus < 1."""
    check_range(who, "tau_plus", tau_plus, 0.0, 1.0, open_high=True)


def corrects(tau_plus: TauPlus) -> bool:
    """Return True if ``tau_plus`` is not zero; tensors, such as an evaluated schedule, always count as not zero."""
    if not isinstance(tau_plus, (float, Tensor)) and isinstance(tau_plus, Schedule):
        float(tau_plus)  # raises the error that explains how to evaluate a schedule
    return isinstance(tau_plus, Tensor) or bool(tau_plus)


def reduce(
    losses: PairLosses, scores: Scores, reduction: Reduction = "anchors", weights: Annotated[Tensor, "b"] | None = None
) -> Tensor:
    """Reduce losses of pairs to one number.

    Args:
        losses: Loss of each pair, [b, p].
        scores: The scores that the losses were computed from.
        reduction: ``"anchors"`` or ``"mean"``: mean over the positives of each anchor, then over all anchors (SupCon);
            an anchor without a positive counts as 0. ``"pairs"``: mean over all real pairs (H-SCL), so that anchors
            with more positives count more. ``"none"``: the mean of each anchor, [b].
        weights: Weight of each anchor, [b], for a weighted mean.

    Returns:
        A scalar, or [b] for ``"none"``.

    Example:
        >>> from hardneg import Uniform, info_nce, two_views
        >>> scores = two_views(torch.eye(2), torch.eye(2), temperature=1.0)
        >>> reduce(info_nce(scores, Uniform().log_weights(scores)), scores).round(decimals=4)
        tensor(0.5514)
    """
    if losses.ndim != 2:
        raise ArgumentError("reduce", "losses of pairs, [b, p]", f"losses={tuple(losses.shape)}")
    return _reduced(losses, scores.positive_valid, reduction, weights)


def _reduced(
    losses: PairLosses, real: Annotated[Tensor, "b p"], reduction: str, weights: Annotated[Tensor, "b"] | None = None
) -> Tensor:
    if losses.shape[1] == 1 and reduction != "pairs":  # one positive, or none and a loss of 0
        if reduction in ("anchors", "mean") and weights is None:
            return losses.mean()
        return _reduce_means(losses.squeeze(1), reduction, weights)
    return reduce_sums(losses.sum(-1), real.sum(-1, dtype=losses.dtype), reduction, weights)


def reduce_sums(sums: Tensor, counts: Tensor, reduction: str, weights: Tensor | None = None) -> Tensor:
    """Reduce the sum of each anchor's losses, [b], and the number of its positives, [b], as ``reduce`` does."""
    if reduction != "pairs":
        return _reduce_means(sums / counts.clamp(min=1.0), reduction, weights)
    if weights is None:
        return sums.sum() / counts.sum().clamp(min=1.0)
    return (weights * sums).sum() / _at_least_tiny((weights * counts).sum())


def _reduce_means(per_anchor: Tensor, reduction: str, weights: Tensor | None) -> Tensor:
    if reduction == "none":
        return per_anchor if weights is None else weights * per_anchor
    if reduction in ("anchors", "mean"):
        return per_anchor.mean() if weights is None else (weights * per_anchor).sum() / _at_least_tiny(weights.sum())
    raise argument_error("reduce", "reduction 'anchors', 'mean', 'pairs' or 'none'", "reduction", reduction)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), accurate in float64 beyond torch's default threshold of 20, where e^-x still matters."""
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
