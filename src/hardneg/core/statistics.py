"""Row statistics: the few numbers per anchor that an objective needs of q and its candidates.

Each is computed from dense scores, or as a running sum over tiles relative to the row's largest log-weight so far: two
plain log-sum-exps would lose the digits of the scores under a large tilt. At the final shift a statistic is a plain
sum over tiles, so its gradient by a tile is that of the tile's own terms: ``cotangents``.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from hardneg.core.tiles import NEVER, Tile
from hardneg.core.types import LogWeights, Scores, with_support

PerRow = Annotated[Tensor, "b 1"]
State = tuple[Tensor, ...]
Value = Callable[[Tile], Tensor]


def plain_score(tile: Tile) -> Tensor:
    return tile.s


class Weighed(NamedTuple):
    """A tile with its log-weights relative to ``shift``, NEVER outside of q's support."""

    tile: Tile
    relative: Annotated[Tensor, "b n"]


class Mass(NamedTuple):
    """Of whole rows: the shift, and the logarithm of the sum of the weights relative to it."""

    shift: PerRow
    log_mass: PerRow  # -inf without support

    def share(self, relative: Tensor) -> Tensor:
        """q, and 0 in rows without support."""
        return torch.where(self.log_mass == NEVER, 0.0, (relative - self.log_mass).exp())


class Statistic(ABC):  # noqa: B024
    """One number per anchor; ``value`` is what it takes of a pair."""

    value: Value = staticmethod(plain_score)
    over: str = "candidates"

    def dense(self, scores: Scores, log_w: LogWeights) -> PerRow:
        raise NotImplementedError

    def start(self, like: PerRow) -> State:
        return (torch.zeros_like(like),)

    def add(self, state: State, value: Tensor, weighed: Weighed) -> State:
        raise NotImplementedError

    def shifted(self, state: State, by: PerRow) -> State:
        """The state relative to a shift that is larger by ``-by``."""
        return state

    def finish(self, state: State, mass: Mass) -> PerRow:
        return state[0]

    def cotangents(
        self, grad: PerRow, state: State, mass: Mass, value: Tensor, relative: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients by the value and by the log-weight of each pair of a tile; None for none."""
        return None, None


@dataclass(frozen=True)
class Support(Statistic):
    """The number of candidates that q allows."""

    def dense(self, scores: Scores, log_w: LogWeights) -> PerRow:
        return (log_w != NEVER).sum(-1, keepdim=True).to(log_w.dtype)

    def add(self, state: State, value: Tensor, weighed: Weighed) -> State:
        return (state[0] + (weighed.relative != NEVER).sum(-1, keepdim=True),)


@dataclass(frozen=True)
class Others(Statistic):
    """The number of candidates that are not the anchor itself, negatives or not."""

    def dense(self, scores: Scores, log_w: LogWeights) -> PerRow:
        return scores.other_instance().sum(-1, keepdim=True).to(log_w.dtype)

    def add(self, state: State, value: Tensor, weighed: Weighed) -> State:
        others = weighed.tile.other_instance().expand_as(weighed.relative)
        return (state[0] + others.sum(-1, keepdim=True),)


@dataclass(frozen=True)
class LogMass(Statistic):
    """log of the sum of the weights; -inf without support."""

    def dense(self, scores: Scores, log_w: LogWeights) -> PerRow:
        return masked_lse(log_w, log_w != NEVER)

    def add(self, state: State, value: Tensor, weighed: Weighed) -> State:
        return state

    def finish(self, state: State, mass: Mass) -> PerRow:
        return mass.shift + mass.log_mass

    def cotangents(
        self, grad: PerRow, state: State, mass: Mass, value: Tensor, relative: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        return None, grad * mass.share(relative)


@dataclass(frozen=True)
class LogMean(Statistic):
    """log E_q[e^s]; -inf without support."""

    def dense(self, scores: Scores, log_w: LogWeights) -> PerRow:
        return log_expect_exp(scores.candidates, log_w)[:, None]

    def start(self, like: PerRow) -> State:
        return torch.full_like(like, NEVER), torch.zeros_like(like)

    def add(self, state: State, value: Tensor, weighed: Weighed) -> State:
        return added_exp(state, value + weighed.relative)

    def shifted(self, state: State, by: PerRow) -> State:
        return state[0] + by, state[1]

    def finish(self, state: State, mass: Mass) -> PerRow:
        return torch.where(mass.log_mass == NEVER, NEVER, state[0] + state[1].log() - mass.log_mass)

    def cotangents(
        self, grad: PerRow, state: State, mass: Mass, value: Tensor, relative: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        total = torch.where(mass.log_mass == NEVER, 0.0, state[0] + state[1].log())
        share = (value + relative - total).exp()
        return grad * share, grad * (share - mass.share(relative))


@dataclass(frozen=True)
class Mean(Statistic):
    """E_q of a pointwise value; 0 without support. With ``detach`` no gradient flows through the weights."""

    value: Value = plain_score
    detach: bool = False

    def dense(self, scores: Scores, log_w: LogWeights) -> PerRow:
        q = torch.softmax(with_support(log_w)[1], dim=-1)
        return ((q.detach() if self.detach else q) * self.value(scores.tile())).sum(-1, keepdim=True)

    def add(self, state: State, value: Tensor, weighed: Weighed) -> State:
        return (state[0] + (weighed.relative.exp() * value).sum(-1, keepdim=True),)

    def shifted(self, state: State, by: PerRow) -> State:
        return (state[0] * by.exp(),)

    def finish(self, state: State, mass: Mass) -> PerRow:
        return torch.where(mass.log_mass == NEVER, state[0] * 0.0, state[0] * (-mass.log_mass).exp())

    def cotangents(
        self, grad: PerRow, state: State, mass: Mass, value: Tensor, relative: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        share = grad * mass.share(relative)
        return share, None if self.detach else share * (value - self.finish(state, mass))


@dataclass(frozen=True)
class LogPositives(Statistic):
    """log of the sum of e^a over the positives of the anchor; 0 without a positive."""

    over: str = "positives"

    def dense(self, scores: Scores, log_w: LogWeights) -> PerRow:
        some = scores.positive_valid.any(-1, keepdim=True)
        return torch.where(some, masked_lse(scores.positives, scores.positive_valid), 0.0)

    def start(self, like: PerRow) -> State:
        return torch.full_like(like, NEVER), torch.zeros_like(like)

    def add(self, state: State, value: Tensor, weighed: Weighed) -> State:
        return added_exp(state, value + weighed.relative)

    def finish(self, state: State, mass: Mass) -> PerRow:
        return torch.where(state[0] == NEVER, 0.0, state[0] + state[1].log())

    def cotangents(
        self, grad: PerRow, state: State, mass: Mass, value: Tensor, relative: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        return grad * (value + relative - self.finish(state, mass)).exp(), None


def log_expect_exp(candidates: Annotated[Tensor, "b n"], log_w: LogWeights) -> Annotated[Tensor, "b"]:
    """log E_q[e^s] of each row; -inf where q has no support.

    The weights are normalised first: s + log q stays of the size of s, where s + log w would lose the digits of s
    under a large tilt.
    """
    some, log_w = with_support(log_w)
    log_q = torch.log_softmax(log_w, dim=-1)
    return torch.where(some[:, 0], torch.logsumexp(candidates + log_q, dim=-1), NEVER)


def masked_lse(values: Tensor, mask: Tensor) -> PerRow:
    some = mask.any(-1, keepdim=True)
    safe = torch.where(some, torch.where(mask, values, NEVER), 0.0)
    return torch.where(some, torch.logsumexp(safe, dim=-1, keepdim=True), NEVER)


def added_exp(state: State, x: Tensor) -> State:
    """The largest so far and the sum of e^(x - largest), with more x; NaN stays NaN."""
    largest = torch.maximum(state[0], row_max(x))
    safe = torch.where(largest == NEVER, 0.0, largest)
    return largest, state[1] * (state[0] - safe).exp() + (x - safe).exp().sum(-1, keepdim=True)


def row_max(x: Tensor) -> PerRow:
    return x.amax(-1, keepdim=True) if x.shape[1] else x.new_full((len(x), 1), NEVER)
