"""Losses over the whole data set from small batches: SogCLR and EMC2.

Each call returns a surrogate, whose gradient is that of the global loss and whose value means nothing, and leaves the
real loss and its diagnostics in ``last``. Ids are positions in the data set. In eval mode nothing is remembered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor, nn

from hardneg.core.errors import argument_error
from hardneg.core.objectives import info_nce, reduce, surrogate
from hardneg.core.scoring import Pools, cross_views, score, two_views
from hardneg.core.types import NEVER, Keys, LogWeights, Scores
from hardneg.negatives import Negatives, Uniform
from hardneg.state.chain import Chain
from hardneg.state.partition import Partition
from hardneg.state.pools import Bank

Views = Annotated[Tensor, "b d"]
Encode = Callable[[Annotated[Tensor, "k"], Annotated[Tensor, "k"]], Annotated[Tensor, "k d"]]
"""(ids, views) -> vectors of these items at the current parameters."""


class SogCLR(nn.Module):
    """The global contrastive loss through a running normaliser per instance (Yuan et al. 2022).

    The scale is the authors': the two directions are added and nothing is divided by the temperature, so the gradient
    is 2 * temperature times that of the mean loss of 2b anchors; ``divide_by_temperature`` gives that of NT-Xent's
    scale. ``bimodal`` contrasts z1 with z2 only, both ways, each direction with its own normaliser of e^(s_ij - s_ii);
    its two directions are averaged, and each is a mean over the candidates (LibAUC's GCLoss_v2 sums over them, b - 1
    times more).

    >>> z1, z2 = torch.nn.functional.normalize(torch.randn(2, 8, 4), dim=-1)
    >>> loss = SogCLR(num_instances=100)
    >>> loss(z1, z2, ids=torch.arange(8)).ndim, sorted(loss.last)
    (0, ['real_loss', 'running_loss'])
    """

    last: dict[str, Tensor]

    def __init__(
        self,
        num_instances: int,
        temperature: float = 0.1,
        gamma: float = 0.9,
        *,
        divide_by_temperature: bool = False,
        bimodal: bool = False,
        negatives: Negatives = Uniform(),
    ) -> None:
        super().__init__()
        self.temperature, self.negatives = temperature, negatives
        self.divide_by_temperature, self.bimodal = divide_by_temperature, bimodal
        self.partitions = nn.ModuleList([Partition(num_instances, gamma) for _ in range(2 if bimodal else 1)])
        self.last = {}

    def forward(self, z1: Views, z2: Views, ids: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        if self.bimodal:
            both = [_relative(cross_views(*pair, self.temperature, ids, labels)) for pair in ((z1, z2), (z2, z1))]
        else:
            both = [two_views(z1, z2, self.temperature, ids, labels)]
        parts = [self._one(*part, ids) for part in zip(both, self.partitions, strict=True)]
        losses, real, running = (torch.stack(values).mean() for values in zip(*parts, strict=True))
        self.last = {"real_loss": real, "running_loss": running}
        scale = 1.0 if self.bimodal else 2.0
        return losses * (1.0 if self.divide_by_temperature else scale * self.temperature)

    def _one(self, scores: Scores, partition: nn.Module, ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        if ids is None:
            raise ValueError("SogCLR needs the ids of the rows, got ids=None; pass the positions in the data set.")
        log_w = self.negatives.log_weights(scores)
        log_norm = partition(scores, log_w)
        losses = surrogate(scores, _mean_one(log_w) + scores.candidates.detach(), log_norm=log_norm)
        some = (log_w != NEVER).any(-1, keepdim=True)
        running = torch.where(some, log_norm[:, None] - scores.positives.detach(), 0.0)
        return reduce(losses, scores), _real(scores, log_w), running.mean()


def _relative(scores: Scores) -> Scores:
    """s_ij - s_ii in place of s_ij: the positive is part of what the normaliser remembers."""
    return replace(scores, candidates=scores.candidates - scores.positives, positives=scores.positives * 0.0)


def _mean_one(log_w: LogWeights) -> LogWeights:
    """The same weights with mean 1 over their support, as the normaliser takes them."""
    supported = log_w != NEVER
    some = supported.any(-1, keepdim=True)
    mass = torch.logsumexp(torch.where(some, log_w.detach(), 0.0), dim=-1, keepdim=True)
    return log_w.detach() - mass + supported.sum(-1, keepdim=True).clamp(min=1).to(log_w.dtype).log()


def _real(scores: Scores, log_w: Tensor) -> Tensor:
    """The loss of this batch, the positive not in the denominator, as in the global loss."""
    with torch.no_grad():
        return reduce(info_nce(scores, log_w, positives_in_denominator="none"), scores)


class EMC2(nn.Module):
    """The global contrastive loss through Markov chains: the mean over the chains' visits stands for the softmax.

    views: ``"two"``, one encoder and two augmentations: 2b anchors against both views of the others (the paper's
        Fig. 2, one chain per row); ``"cross"``, two encoders: z1 against z2.
    remember: a Bank in which the loss keeps the (second) view's embeddings, so that a state outside the batch still
        repels, with its last embedding; ``encode(ids, views)`` at the call does the same with the current parameters
        and a gradient. With neither, such visits count in the normaliser only; ``last["outside"]`` is their share.
    num_steps: steps per batch, as many as there are candidates unless given; the share burn_in is not counted.

    ``pool`` at the call gives the candidates instead of the batch. With the whole data set in it the chains are exact.

    >>> z1, z2 = torch.nn.functional.normalize(torch.randn(2, 8, 4), dim=-1)
    >>> loss = EMC2(num_instances=100)
    >>> loss(z1, z2, ids=torch.arange(8)).ndim, sorted(loss.last)
    (0, ['acceptance', 'age', 'outside', 'real_loss'])
    """

    last: dict[str, Tensor]

    def __init__(
        self,
        num_instances: int,
        temperature: float = 0.07,
        burn_in: float = 0.5,
        *,
        views: str = "two",
        remember: Bank | None = None,
        num_steps: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if views not in ("two", "cross"):
            raise argument_error("EMC2", "views 'two' or 'cross'", "views", views)
        self.temperature, self.views, self.num_steps = temperature, views, num_steps
        self.chain = Chain(num_instances, burn_in, num_views=2 if views == "two" else 1, seed=seed)
        self.remember = remember
        self.last = {}

    def forward(
        self, z1: Views, z2: Views, ids: Tensor | None = None, pool: Pools | None = None, encode: Encode | None = None
    ) -> Tensor:
        if ids is None:
            raise ValueError("EMC2 needs the ids of the rows, got ids=None; pass the positions in the data set.")
        slots = self._slots(ids)
        states = None if pool is not None else self._states(slots, ids, encode)
        scores, proposable = self._scores(z1, z2, ids, pool, states)
        walk = self.chain.walk(scores, slots, num_steps=self.num_steps, proposable=proposable)
        losses = surrogate(scores, walk.log_visits, log_norm=walk.log_norm)
        real = _real(scores, Uniform().log_weights(scores.narrowed(proposable)))
        self.last = {"real_loss": real, **walk.summary()}
        if self.remember is not None and self.training:
            self.remember.push(Keys(z2.detach(), ids))
        return reduce(losses, scores)

    def _slots(self, ids: Tensor) -> Tensor:
        if self.views == "cross":
            return self.chain.slots(ids)
        return torch.cat([self.chain.slots(ids, 0), self.chain.slots(ids, 1)])

    def _states(self, slots: Tensor, ids: Tensor, encode: Encode | None) -> Keys | None:
        """Each chain's state as a candidate of its own, [b, 1, d]; id -1 where there is none or it is in the batch."""
        states = self.chain.states_of(slots)
        states = torch.where(torch.isin(states, ids), -1, states)
        if encode is not None:
            pairs = torch.stack([states, self.chain.twins_of(slots)], dim=1)[states >= 0]
            away, which = torch.unique(pairs, dim=0, return_inverse=True)  # type: ignore[no-untyped-call]
            known, vectors = states >= 0, encode(away[:, 0], away[:, 1])[which] if len(away) else None
        elif self.remember is not None:
            kept = self.remember.of(states)
            assert kept.ids is not None
            known, vectors = kept.ids >= 0, kept.vectors[kept.ids >= 0]
        else:
            return None
        if vectors is None or not len(vectors):
            return None
        # A row without one shows the first of them and is masked: a unit vector like the others, for the checks.
        rows = vectors[:1].detach().repeat(len(states), 1).index_put((known,), vectors)
        return Keys(rows[:, None], torch.where(known, states, -1)[:, None], source="state")

    def _scores(
        self, z1: Views, z2: Views, ids: Tensor, pool: Pools | None, states: Keys | None
    ) -> tuple[Scores, Tensor]:
        if pool is not None:
            first, second = (z1, z2) if self.views == "cross" else (torch.cat([z1, z2]), torch.cat([z2, z1]))
            scores = score(Keys(first, ids.repeat(len(first) // len(ids))), second, pool, self.temperature)
        else:
            build = two_views if self.views == "two" else cross_views
            scores = build(z1, z2, self.temperature, ids, extra=() if states is None else states)
        proposable = torch.ones_like(scores.valid[:1])
        if states is not None:
            assert states.ids is not None
            proposable = (scores.source != scores.source_names.index("state"))[None]
            scores = scores.narrowed(proposable | (states.ids >= 0))
        return scores, proposable
