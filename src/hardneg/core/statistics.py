"""Row statistics: the few numbers per anchor through which an objective depends on the candidates.

Examples are log E_q[e^s] (``LogMean``) and the number of negatives (``Support``). An objective declares the statistics
it needs; ``dense_statistics`` computes them from matrices, and the backends in ``hardneg.kernels`` from blocks.

For each block of candidates, ``part`` reduces values relative to the block's largest log-weight, and ``merge`` combines
the parts of a row. Working relative to the largest weight matters: the difference of two plain log-sum-exps would lose
the digits of the scores under a large tilt. Relative to the shift of the whole row, a statistic is a plain sum over all
pairs, so its gradient with respect to a tile depends on that tile only: ``cotangents``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor

from hardneg.core.bounds import Value
from hardneg.core.private_apis import is_plain
from hardneg.core.tensors import LogSumExp
from hardneg.core.tiles import NEVER, Tile
from hardneg.core.types import LogWeights, Scores, with_support

PerRow = Annotated[Tensor, "b 1"]
"""One number per anchor."""
PerBlock = Annotated[Tensor, "b k"]
"""One number per anchor and block of candidates."""
Cotangents = tuple[Tensor | None, Tensor | None]
"""Gradients by the value and by the log-weight of each pair of a tile; None stands for zero."""


def plain_score(tile: Tile) -> Tensor:
    """Return the scores of a tile."""
    return tile.s


class Mass(NamedTuple):
    """Normaliser of whole rows: a shift, and the logarithm of the sum of the weights relative to it.

    Attributes:
        shift: Largest log-weight of the row, [b, 1].
        log_mass: log of the sum of e^(log_w - shift), [b, 1]; -inf for rows without support.
    """

    shift: PerRow
    log_mass: PerRow  # -inf without support

    def share(self, relative: Tensor) -> Tensor:
        """Return the probabilities q of log-weights relative to the shift; 0 in rows without support."""
        return (relative - torch.where(self.log_mass == NEVER, -NEVER, self.log_mass)).exp()


class Statistic(ABC):
    """One number per anchor, reduced from the values of its pairs; the base class of all statistics.

    ``dense`` computes it from matrices. ``part``, ``merge`` and ``finish`` compute it from blocks, in this order, and
    ``cotangents`` is the backward pass of a block.
    """

    value: Value = staticmethod(plain_score)
    """Function of a tile that returns the value of each pair."""
    over: str = "candidates"
    """``"candidates"``, or ``"positives"`` for a statistic of the anchor's positives."""
    empty: ClassVar[float | None] = None
    """Value for anchors without a negative; None if the statistic does not depend on the negatives."""

    @abstractmethod
    def dense(self, scores: Scores, log_w: LogWeights) -> PerRow:
        """Compute the statistic from dense scores, [b, 1].

        Every row must have a negative; ``dense_statistics`` takes care of the others.
        """

    @abstractmethod
    def part(self, value: Tensor, relative: Tensor) -> Tensor:
        """Reduce blocks of pairs over the last dimension.

        Args:
            value: Value of each pair.
            relative: Log-weights relative to the largest of the block; -inf for pairs that are not negatives.
        """

    def merge(self, parts: PerBlock, by: PerBlock) -> PerRow:
        """Combine the parts of a row.

        Args:
            parts: Results of ``part``, [b, k].
            by: Log-space correction of each part: its block's shift minus that of the row, 0 or less, [b, k].
        """
        return parts.sum(-1, keepdim=True)

    def finish(self, total: PerRow, mass: Mass) -> PerRow:
        """Turn the merged parts into the statistic, given the mass of the row."""
        return total

    def cotangents(self, grad: PerRow, total: PerRow, mass: Mass, value: Tensor, relative: Tensor) -> Cotangents:
        """Return the gradients for one tile.

        Args:
            grad: Gradient by the statistic, [b, 1].
            total: Merged parts of the whole row, [b, 1].
            mass: Mass of the whole row.
            value: Values of the tile, [b, c].
            relative: Log-weights of the tile relative to ``mass.shift``, [b, c].

        Returns:
            The gradients by the value and by the log-weight of each pair, [b, c]; None stands for zero.
        """
        return None, None


@dataclass(frozen=True)
class Support(Statistic):
    """The number of candidates with a log-weight above -inf."""

    def dense(self, scores: Scores, log_w: LogWeights) -> PerRow:
        """Count the candidates of dense rows."""
        return (log_w != NEVER).sum(-1, keepdim=True, dtype=log_w.dtype)

    def part(self, value: Tensor, relative: Tensor) -> Tensor:
        """Count the candidates of a block."""
        return (relative != NEVER).sum(-1, dtype=torch.int32).to(relative.dtype)  # int32 takes half as long on a GPU


def _is_other(tile: Tile) -> Tensor:
    return tile.other_instance().expand(tile.s.shape).to(tile.s.dtype)


@dataclass(frozen=True)
class Others(Statistic):
    """The number of candidates with another id than the anchor, whether they are negatives or not."""

    value: Value = _is_other

    def dense(self, scores: Scores, log_w: LogWeights) -> PerRow:
        """Count the other instances of dense rows."""
        return scores.other_instance().sum(-1, keepdim=True, dtype=log_w.dtype)

    def part(self, value: Tensor, relative: Tensor) -> Tensor:
        """Count the other instances of a block."""
        return value.sum(-1)


@dataclass(frozen=True)
class LogMass(Statistic):
    """Logarithm of the sum of the weights; -inf without support."""

    empty: ClassVar = NEVER

    def dense(self, scores: Scores, log_w: LogWeights) -> PerRow:
        """Compute it from dense log-weights."""
        return torch.logsumexp(log_w, dim=-1, keepdim=True)

    def part(self, value: Tensor, relative: Tensor) -> Tensor:
        """Return zeros: the mass of the row is computed anyway."""
        return relative.new_zeros(relative.shape[:-1])  # nothing to add: ``finish`` reads it from the mass

    def finish(self, total: PerRow, mass: Mass) -> PerRow:
        """Return the logarithm of the mass with its shift."""
        return mass.shift + mass.log_mass

    def cotangents(self, grad: PerRow, total: PerRow, mass: Mass, value: Tensor, relative: Tensor) -> Cotangents:
        """Return the gradient by the log-weights, which is grad * q."""
        return None, grad * mass.share(relative)


@dataclass(frozen=True)
class LogMean(Statistic):
    """log E_q[e^s], the mean of e^s under the distribution of the negatives; -inf without support."""

    empty: ClassVar[float | None] = NEVER

    def dense(self, scores: Scores, log_w: LogWeights) -> PerRow:
        """Compute it from dense scores."""
        return supported_log_mean(scores.candidates, log_w)

    def part(self, value: Tensor, relative: Tensor) -> Tensor:
        """Return LSE(s + relative log-weight) of a block."""
        return torch.logsumexp(value + relative, dim=-1)

    def merge(self, parts: PerBlock, by: PerBlock) -> PerRow:
        """Combine the parts by a log-sum-exp."""
        return torch.logsumexp(parts + by, dim=-1, keepdim=True)

    def finish(self, total: PerRow, mass: Mass) -> PerRow:
        """Divide by the sum of the weights, in log-space."""
        return torch.where(mass.log_mass == NEVER, NEVER, total - mass.log_mass)

    def cotangents(self, grad: PerRow, total: PerRow, mass: Mass, value: Tensor, relative: Tensor) -> Cotangents:
        """Return grad * p by the scores and grad * (p - q) by the log-weights, where p is proportional to q e^s."""
        share = (value + relative - torch.where(mass.log_mass == NEVER, 0.0, total)).exp()
        return grad * share, grad * (share - mass.share(relative))


@dataclass(frozen=True)
class Mean(Statistic):
    """E_q of the value of each pair; 0 without support.

    Args:
        value: Function of a tile that returns the value of each pair; the scores by default.
        detach: Stop the gradient through the weights.
    """

    value: Value = plain_score
    detach: bool = False
    empty: ClassVar = 0.0

    def dense(self, scores: Scores, log_w: LogWeights) -> PerRow:
        """Compute it from dense scores."""
        q = torch.softmax(log_w, dim=-1)
        return ((q.detach() if self.detach else q) * self.value(scores.tile())).sum(-1, keepdim=True)

    def part(self, value: Tensor, relative: Tensor) -> Tensor:
        """Return the weighted sum of a block."""
        return (relative.exp() * value).sum(-1)

    def merge(self, parts: PerBlock, by: PerBlock) -> PerRow:
        """Rescale the parts to the shift of the row and add them."""
        return (parts * by.exp()).sum(-1, keepdim=True)

    def finish(self, total: PerRow, mass: Mass) -> PerRow:
        """Divide by the sum of the weights."""
        return torch.where(mass.log_mass == NEVER, total * 0.0, total * (-mass.log_mass).exp())

    def cotangents(self, grad: PerRow, total: PerRow, mass: Mass, value: Tensor, relative: Tensor) -> Cotangents:
        """Return grad * q by the values and grad * q * (value - mean) by the log-weights."""
        share = grad * mass.share(relative)
        return share, None if self.detach else share * (value - self.finish(total, mass))


@dataclass(frozen=True)
class LogPositives(LogMean):
    """log of the sum of e^a over the positives of the anchor; 0 without a positive.

    It reuses the parts of ``LogMean``, over positives instead of candidates and with weights of 1.
    """

    over: str = "positives"
    empty: ClassVar = None

    def dense(self, scores: Scores, log_w: LogWeights) -> PerRow:
        """Compute it from dense scores."""
        some = scores.positive_valid.any(-1, keepdim=True)
        return torch.where(some, masked_lse(scores.positives, scores.positive_valid), 0.0)

    def finish(self, total: PerRow, mass: Mass) -> PerRow:
        """Replace -inf with 0 for anchors without a positive."""
        return torch.where(total == NEVER, 0.0, total)

    def cotangents(self, grad: PerRow, total: PerRow, mass: Mass, value: Tensor, relative: Tensor) -> Cotangents:
        """Return the gradient by the scores of the positives, grad * e^(a - total)."""
        return grad * (value + relative - self.finish(total, mass)).exp(), None


@dataclass(frozen=True)
class LogPositivesTilted(LogPositives):
    """log of the sum of e^(scale a) over the positives of the anchor; 0 without a positive.

    Args:
        scale: Factor of the scores; 0 gives the logarithm of the number of positives.
    """

    scale: float = 1.0

    def value(self, tile: Tile) -> Tensor:  # type: ignore[override]
        """Return the scaled scores of a tile."""
        return tile.s * self.scale

    def dense(self, scores: Scores, log_w: LogWeights) -> PerRow:
        """Compute it from dense scores."""
        some = scores.positive_valid.any(-1, keepdim=True)
        return torch.where(some, masked_lse(scores.positives * self.scale, scores.positive_valid), 0.0)


def dense_statistics(
    declared: Mapping[str, Statistic], scores: Scores, log_w: LogWeights, *, fill_empty: bool
) -> dict[str, PerRow]:
    """Compute the declared statistics, and the support, from dense scores.

    The log-weights of a row without a negative are replaced by 0, because its softmax would be NaN.

    Args:
        declared: The statistics by name.
        scores: Scores of b anchors.
        log_w: Log-weights, [b, n].
        fill_empty: Set the statistics of rows without a negative to ``Statistic.empty``. Otherwise they are arbitrary
            finite numbers, to be masked by the caller.

    Returns:
        Each statistic by name, [b, 1].
    """
    support = Support().dense(scores, log_w)
    none = support == 0
    safe, found = log_w.masked_fill(none, 0.0), {"support": support}
    for name, statistic in declared.items():
        value = support if type(statistic) is Support else statistic.dense(scores, safe)
        if fill_empty and statistic.empty is not None:
            value = value.masked_fill(none, statistic.empty)
        found[name] = value
    return found


def log_expect_exp(candidates: Annotated[Tensor, "b n"], log_w: LogWeights) -> Annotated[Tensor, "b"]:
    """Compute log E_q[e^s] of each row, [b]; -inf where q has no support.

    The weights are normalised first: s + log q has the magnitude of s, whereas s + log w would lose the digits of s
    under a large tilt.

    Args:
        candidates: Scores, [b, n].
        log_w: Log-weights that define q, [b, n].

    Example:
        >>> log_expect_exp(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0, NEVER]]))
        tensor([0.])
    """
    some, safe = with_support(log_w)
    return supported_log_mean(candidates, safe).masked_fill(~some, NEVER).squeeze(-1)


def supported_log_mean(candidates: Annotated[Tensor, "b n"], log_w: LogWeights) -> PerRow:
    """Compute log E_q[e^s], [b, 1], of rows that all have at least one candidate with a weight."""
    terms = candidates + torch.log_softmax(log_w, dim=-1)
    if not (is_plain(terms) and terms.numel()):
        return torch.logsumexp(terms, dim=-1, keepdim=True)
    log_mean: Tensor = LogSumExp.apply(terms)[0]  # type: ignore[no-untyped-call]
    return log_mean


def masked_lse(values: Tensor, mask: Tensor) -> PerRow:
    """Compute the log-sum-exp of the values in the mask, [b, 1]; -inf where the mask is empty."""
    some = mask.any(-1, keepdim=True)
    safe = torch.where(some, torch.where(mask, values, NEVER), 0.0)
    return torch.where(some, torch.logsumexp(safe, dim=-1, keepdim=True), NEVER)


def row_max(x: Tensor) -> Tensor:
    """Return the largest number of each row, [b, 1]; -inf for rows without columns."""
    return x.amax(-1, keepdim=True) if x.shape[-1] else x.new_full((*x.shape[:-1], 1), NEVER)
