"""Row statistics: the few numbers per anchor that an objective needs of q and its candidates.

Each is computed from dense scores, or from parts: one for each block of candidates, relative to the block's largest
log-weight, since two plain log-sum-exps would lose the digits of the scores under a large tilt. At the row's own shift
a statistic is a plain sum over all pairs, so its gradient by a tile is that of the tile's own terms: ``cotangents``.
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
PerBlock = Annotated[Tensor, "b k"]
Cotangents = tuple[Tensor | None, Tensor | None]
"""The gradients by the value and by the log-weight of each pair of a tile; None for none."""


def plain_score(tile: Tile) -> Tensor:
    return tile.s


class Mass(NamedTuple):
    """Of whole rows: the shift, and the logarithm of the sum of the weights relative to it."""

    shift: PerRow
    log_mass: PerRow  # -inf without support

    def share(self, relative: Tensor) -> Tensor:
        """q, and 0 in rows without support."""
        return (relative - torch.where(self.log_mass == NEVER, -NEVER, self.log_mass)).exp()


class Statistic(ABC):
    """One number per anchor; ``value`` is what it takes of a pair.

    ``part`` reduces blocks of pairs over the last dimension, given their log-weights relative to the largest of the
    block; ``merge`` brings the parts of a row together, each of which is relative to a shift that is ``-by`` lower.
    """

    value: Value = staticmethod(plain_score)
    over: str = "candidates"
    empty: ClassVar[float | None] = None
    """The value of an anchor without a negative; None if it does not depend on the negatives."""

    @abstractmethod
    def dense(self, scores: Scores, log_w: LogWeights) -> PerRow:
        """Compute it from dense scores, of rows that all have a negative; see ``dense_statistics``."""

    @abstractmethod
    def part(self, value: Tensor, relative: Tensor) -> Tensor: ...

    def merge(self, parts: PerBlock, by: PerBlock) -> PerRow:
        return parts.sum(-1, keepdim=True)

    def finish(self, total: PerRow, mass: Mass) -> PerRow:
        return total

    def cotangents(self, grad: PerRow, total: PerRow, mass: Mass, value: Tensor, relative: Tensor) -> Cotangents:
        return None, None


@dataclass(frozen=True)
class Support(Statistic):
    """The number of candidates that q allows."""

    def dense(self, scores: Scores, log_w: LogWeights) -> PerRow:
        return (log_w != NEVER).sum(-1, keepdim=True, dtype=log_w.dtype)

    def part(self, value: Tensor, relative: Tensor) -> Tensor:
        return (relative != NEVER).sum(-1, dtype=torch.int32).to(relative.dtype)  # half the work of 64 bits on a GPU


def _is_other(tile: Tile) -> Tensor:
    return tile.other_instance().expand(tile.s.shape).to(tile.s.dtype)


@dataclass(frozen=True)
class Others(Statistic):
    """The number of candidates that are not the anchor itself, negatives or not."""

    value: Value = _is_other

    def dense(self, scores: Scores, log_w: LogWeights) -> PerRow:
        return scores.other_instance().sum(-1, keepdim=True, dtype=log_w.dtype)

    def part(self, value: Tensor, relative: Tensor) -> Tensor:
        return value.sum(-1)


@dataclass(frozen=True)
class LogMass(Statistic):
    """log of the sum of the weights; -inf without support."""

    empty: ClassVar = NEVER

    def dense(self, scores: Scores, log_w: LogWeights) -> PerRow:
        return torch.logsumexp(log_w, dim=-1, keepdim=True)

    def part(self, value: Tensor, relative: Tensor) -> Tensor:
        return relative.new_zeros(relative.shape[:-1])  # the mass has it already

    def finish(self, total: PerRow, mass: Mass) -> PerRow:
        return mass.shift + mass.log_mass

    def cotangents(self, grad: PerRow, total: PerRow, mass: Mass, value: Tensor, relative: Tensor) -> Cotangents:
        return None, grad * mass.share(relative)


@dataclass(frozen=True)
class LogMean(Statistic):
    """log E_q[e^s]; -inf without support."""

    empty: ClassVar[float | None] = NEVER

    def dense(self, scores: Scores, log_w: LogWeights) -> PerRow:
        return supported_log_mean(scores.candidates, log_w)

    def part(self, value: Tensor, relative: Tensor) -> Tensor:
        return torch.logsumexp(value + relative, dim=-1)

    def merge(self, parts: PerBlock, by: PerBlock) -> PerRow:
        return torch.logsumexp(parts + by, dim=-1, keepdim=True)

    def finish(self, total: PerRow, mass: Mass) -> PerRow:
        return torch.where(mass.log_mass == NEVER, NEVER, total - mass.log_mass)

    def cotangents(self, grad: PerRow, total: PerRow, mass: Mass, value: Tensor, relative: Tensor) -> Cotangents:
        share = (value + relative - torch.where(mass.log_mass == NEVER, 0.0, total)).exp()
        return grad * share, grad * (share - mass.share(relative))


@dataclass(frozen=True)
class Mean(Statistic):
    """E_q of a pointwise value; 0 without support. With ``detach`` no gradient flows through the weights."""

    value: Value = plain_score
    detach: bool = False
    empty: ClassVar = 0.0

    def dense(self, scores: Scores, log_w: LogWeights) -> PerRow:
        q = torch.softmax(log_w, dim=-1)
        return ((q.detach() if self.detach else q) * self.value(scores.tile())).sum(-1, keepdim=True)

    def part(self, value: Tensor, relative: Tensor) -> Tensor:
        return (relative.exp() * value).sum(-1)

    def merge(self, parts: PerBlock, by: PerBlock) -> PerRow:
        return (parts * by.exp()).sum(-1, keepdim=True)

    def finish(self, total: PerRow, mass: Mass) -> PerRow:
        return torch.where(mass.log_mass == NEVER, total * 0.0, total * (-mass.log_mass).exp())

    def cotangents(self, grad: PerRow, total: PerRow, mass: Mass, value: Tensor, relative: Tensor) -> Cotangents:
        share = grad * mass.share(relative)
        return share, None if self.detach else share * (value - self.finish(total, mass))


@dataclass(frozen=True)
class LogPositives(LogMean):
    """log of the sum of e^a over the positives of the anchor, whose parts are those of a mean; 0 without a positive."""

    over: str = "positives"
    empty: ClassVar = None

    def dense(self, scores: Scores, log_w: LogWeights) -> PerRow:
        some = scores.positive_valid.any(-1, keepdim=True)
        return torch.where(some, masked_lse(scores.positives, scores.positive_valid), 0.0)

    def finish(self, total: PerRow, mass: Mass) -> PerRow:
        return torch.where(total == NEVER, 0.0, total)

    def cotangents(self, grad: PerRow, total: PerRow, mass: Mass, value: Tensor, relative: Tensor) -> Cotangents:
        return grad * (value + relative - self.finish(total, mass)).exp(), None


def dense_statistics(
    declared: Mapping[str, Statistic], scores: Scores, log_w: LogWeights, *, fill_empty: bool
) -> dict[str, PerRow]:
    """Compute the declared statistics of dense scores, and the support.

    A row without a negative would make softmaxes NaN, so its log-weights count as 0. Its statistics are then any finite
    numbers or, with ``fill_empty``, their ``empty``.
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
    """Log E_q[e^s] of each row; -inf where q has no support.

    The weights are normalised first: s + log q stays of the size of s, where s + log w would lose the digits of s
    under a large tilt.
    """
    some, safe = with_support(log_w)
    return supported_log_mean(candidates, safe).masked_fill(~some, NEVER).squeeze(-1)


def supported_log_mean(candidates: Annotated[Tensor, "b n"], log_w: LogWeights) -> PerRow:
    """Log E_q[e^s] of rows that all have a candidate that q allows."""
    terms = candidates + torch.log_softmax(log_w, dim=-1)
    if not (is_plain(terms) and terms.numel()):
        return torch.logsumexp(terms, dim=-1, keepdim=True)
    log_mean: Tensor = LogSumExp.apply(terms)[0]  # type: ignore[no-untyped-call]
    return log_mean


def masked_lse(values: Tensor, mask: Tensor) -> PerRow:
    some = mask.any(-1, keepdim=True)
    safe = torch.where(some, torch.where(mask, values, NEVER), 0.0)
    return torch.where(some, torch.logsumexp(safe, dim=-1, keepdim=True), NEVER)


def row_max(x: Tensor) -> Tensor:
    return x.amax(-1, keepdim=True) if x.shape[-1] else x.new_full((*x.shape[:-1], 1), NEVER)
