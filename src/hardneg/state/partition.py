"""SogCLR (Yuan et al. 2022): a running normaliser per instance, which gives a small batch the scale of the data set.

    g_i = mean_j e^(s_ij)        u_i <- (1 - gamma) u_i + gamma g_i        weight of candidate j: e^(s_ij) / (n u_i)

It is stored as log u, so that no temperature overflows. Differences from the authors' code: the first visit of an
instance sets u_i = g_i, for each instance separately (theirs only when the whole batch is new; otherwise u_i = gamma
g_i, and the weights are 1 / gamma too large), and u is a buffer (theirs is lost on resume).
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from hardneg.core.errors import check_range
from hardneg.core.objectives import log_expect_exp
from hardneg.core.types import NEVER, LogWeights, Scores
from hardneg.core.views import NUMBERED
from hardneg.state.stateful import Stateful, Writes, check_count


class Partition(Stateful):
    """The running normaliser log u_i of each instance.

    Rows with the same id (two views, or an instance that occurs twice in the batch) share u_i: each weighs its
    candidates with its own update of the old value, and the mean of these updates is stored. In eval mode nothing is
    stored.

    Args:
        num_instances: Size of the data set.
        gamma: Weight of the new value in the running average.

    Example:
        >>> from hardneg import Tilt, Uniform, surrogate, two_views
        >>> z1, z2 = torch.nn.functional.normalize(torch.randn(2, 8, 4), dim=-1)
        >>> partition, scores = Partition(num_instances=100), two_views(z1, z2, 0.1, ids=torch.arange(8))
        >>> log_norm = partition(scores, Uniform().log_weights(scores))
        >>> surrogate(scores, Tilt(1.0).log_weights(scores), log_norm=log_norm).shape
        torch.Size([16, 1])
    """

    log_u: Tensor
    precise: ClassVar = ("log_u",)
    shown: ClassVar = ("num_instances", "gamma")

    def __init__(self, num_instances: int, gamma: float = 0.9) -> None:
        super().__init__()
        num_instances = check_count("Partition", "num_instances", num_instances)
        check_range("Partition", "gamma", gamma, 0.0, 1.0)
        self.num_instances, self.gamma = num_instances, gamma
        self.register_buffer("log_u", torch.full((num_instances,), NEVER, dtype=torch.float64))  # -inf: not visited

    @torch.no_grad()
    def forward(self, scores: Scores, log_w: LogWeights) -> Annotated[Tensor, "b"]:
        """Update log u with a batch and return log(n u_i) of each anchor, the ``log_norm`` of ``surrogate``.

        Args:
            scores: Scores of b anchors with ids.
            log_w: Log-weights [b, n] of the candidates in the mean; n is the number of candidates with a weight.
        """
        log_g = log_expect_exp(scores.candidates.double(), log_w.double())
        log_u = self.mixed(scores.anchor_tags.ids, log_g)
        num_negatives = (log_w != NEVER).sum(-1).clamp(min=1).double()
        return (log_u + num_negatives.log()).to(scores.candidates.dtype)

    @torch.no_grad()
    def mixed(self, ids: Tensor | None, log_g: Annotated[Tensor, "b"]) -> Annotated[Tensor, "b"]:
        """Update log u with the values of a batch and return it, in float64.

        Args:
            ids: Instance of each anchor, [b].
            log_g: Logarithm of the new value of each anchor, [b]; -inf for an anchor without a negative.
        """
        ids = None if ids is None else torch.where(ids >= NUMBERED, -1, ids)  # such rows are not instances
        ids = self.checked("Partition", ids, self.num_instances).to(self.log_u.device)
        log_u = self._mixed(self._of(ids), log_g.double())
        if self.training:
            self._store(ids, log_u)
            self.step += 1
        return log_u

    @property
    def visited(self) -> Annotated[Tensor, "num_instances"]:
        """True for the instances that were in a batch."""
        return self.log_u != NEVER

    def _of(self, ids: Tensor) -> Tensor:
        return torch.where(ids >= 0, self.log_u[ids.clamp(min=0)], NEVER)

    def _mixed(self, old: Tensor, log_g: Tensor) -> Tensor:
        keep = math.log1p(-self.gamma) if self.gamma < 1.0 else NEVER
        take = math.log(self.gamma) if self.gamma > 0.0 else NEVER
        mixed = torch.logaddexp(keep + old, take + log_g)
        # A row without a negative has log g = -inf and does not change u.
        return torch.where(old == NEVER, log_g, torch.where(log_g == NEVER, old, mixed))

    def _store(self, ids: Tensor, log_u: Tensor) -> None:
        """The mean of u over the rows of each id, in log-space."""
        writes, known = Writes(ids), log_u != NEVER
        group = writes.last
        top = torch.full_like(log_u, NEVER).scatter_reduce(0, group, log_u, "amax")
        share = torch.where(known, (log_u - top[group]).exp(), 0.0)
        # index_put_ adds in the order of the rows, also on a GPU: the same state on every rank.
        total, count = (
            torch.zeros_like(top).index_put_((group,), values, accumulate=True) for values in (share, known.to(top))
        )
        writes.into(self.log_u, torch.where(count > 0, top + total.log() - count.log(), self._of(ids)))
