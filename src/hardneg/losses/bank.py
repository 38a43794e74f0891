"""Instance discrimination (Wu et al. 2018) and CMC (Tian et al. 2019): noise-contrastive estimation against a bank.

The model's probability of an instance is P = e^s / Z, and K noise instances are uniform over N. Each real or noise pair
is classified by itself:

    L = -log P+ / (P+ + K/N) - sum over the noise of log (K/N) / (P- + K/N)

which in log-space is a sigmoid of s - log Z - log(K/N). Z is one number for all instances; the authors set it once from
the first batch, here it follows the batches (``momentum=1.0`` is theirs).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from torch.utils.checkpoint import checkpoint

from hardneg.core.errors import argument_error, check_range
from hardneg.core.objectives import info_nce, reduce
from hardneg.core.pairing import not_infinite
from hardneg.core.published import BANK_TEMPERATURE, CMC_DRAWS, INSTANCE_DRAWS
from hardneg.core.scoring import score
from hardneg.core.tensors import widened
from hardneg.core.types import NEVER, Keys, LogWeights, PairLosses, Scores, Tags, View, other_id
from hardneg.negatives import Uniform
from hardneg.state.pools import Bank
from hardneg.state.stateful import Stateful, check_count

_few = 16  # times as many entries as draws
_most_gathered = 1 << 22  # numbers that are gathered at a time


def binary_nce(
    scores: Scores,
    log_w: LogWeights,
    *,
    log_z: Annotated[Tensor, ""],
    num_instances: int,
    epsilon: float = 0.0,
) -> PairLosses:
    """NCE of each positive and its noise: -log sigmoid(a - c) - sum_j w_j log sigmoid(c - s_j), c = log(Z K / N).

    K is the size of the support of log_w. epsilon: what the authors' code adds to K/N (1e-7).
    """
    supported = log_w != NEVER
    share = supported.sum(-1, keepdim=True).to(scores.candidates.dtype) / num_instances
    level = log_z.to(scores.candidates.dtype) + (share + epsilon).log()
    noise = logsigmoid(level - scores.candidates) + (share / (share + epsilon)).log()
    weights = torch.where(supported, log_w, 0.0).exp() * supported
    losses = -logsigmoid(scores.positives - level) - (weights * noise).sum(-1, keepdim=True)
    real = supported.any(-1, keepdim=True) & scores.positive_valid
    return torch.where(real, losses, scores.positives * 0.0)


class RunningZ(Stateful):
    """log Z of the whole data set: N times the mean of e^s over what a batch was compared with, averaged over batches.

    The first batch sets it; then Z <- momentum * Z + (1 - momentum) * new. ``momentum=1.0`` keeps the first.
    """

    log_z: Tensor
    precise: ClassVar = ("log_z",)

    def __init__(self, num_instances: int, momentum: float = 0.99) -> None:
        super().__init__()
        num_instances = check_count("RunningZ", "num_instances", num_instances)
        check_range("RunningZ", "momentum", momentum, 0.0, 1.0)
        self.num_instances, self.momentum = num_instances, momentum
        self.register_buffer("log_z", torch.tensor(NEVER, dtype=torch.float64))

    @torch.no_grad()
    def forward(self, scores: Scores) -> Annotated[Tensor, ""]:
        seen = torch.cat([scores.positives[scores.positive_valid], scores.candidates[scores.valid]]).double()
        if self.training and len(seen):
            new = torch.logsumexp(seen, 0) - math.log(len(seen)) + math.log(self.num_instances)
            keep = math.log(self.momentum) if self.momentum > 0.0 else NEVER
            take = math.log1p(-self.momentum) if self.momentum < 1.0 else NEVER
            mixed = torch.logaddexp(keep + self.log_z, take + new)
            self.log_z.copy_(torch.where(self.log_z == NEVER, new, mixed))
            self.step += 1
        return self.log_z.clone()


class BankContrast(nn.Module):
    """Vectors against a bank: the positive is the instance's own entry, the negatives are k uniform others.

    objective: ``"nce"``, with a running Z; ``"softmax"``, InfoNCE over the entry and the draws.
    An instance that the bank does not know yet has no positive and costs 0.
    """

    def __init__(
        self,
        num_instances: int,
        num_draws: int,
        temperature: float,
        objective: str = "nce",
        *,
        z_momentum: float = 0.99,
        epsilon: float = 0.0,
    ) -> None:
        super().__init__()
        if objective not in ("nce", "softmax"):
            raise argument_error("BankContrast", "objective 'nce' or 'softmax'", "objective", objective)
        self.num_draws = check_count("BankContrast", "num_draws", num_draws)
        self.num_instances, self.temperature = check_count("BankContrast", "num_instances", num_instances), temperature
        self.objective, self.epsilon = objective, epsilon
        self.running_z = RunningZ(num_instances, z_momentum)

    def forward(self, z: View, ids: Tensor, bank: Bank, draws: Annotated[Tensor, "b k"] | None = None) -> Tensor:
        """``draws`` are ids, if not to be drawn from the bank's seed and step; own ids among them are left out."""
        scores = self._scores(z, ids, bank, bank.draw_ids(ids, self.num_draws) if draws is None else draws)
        log_w = Uniform().log_weights(scores)
        if self.objective == "softmax":
            return reduce(info_nce(scores, log_w), scores)
        losses = binary_nce(
            scores, log_w, log_z=self.running_z(scores), num_instances=self.num_instances, epsilon=self.epsilon
        )
        return reduce(losses, scores)

    def _scores(self, z: View, ids: Tensor, bank: Bank, draws: Annotated[Tensor, "b k"]) -> Scores:
        own, none = bank.of(ids), Keys(z.new_zeros(len(z), 0, bank.dim), ids[:, None][:, :0], source=bank.source)
        assert own.ids is not None
        known = (own.ids >= 0)[:, None]
        # Masked; a unit vector all the same, for hn.core.scoring.checks().
        entries = torch.where(known, own.vectors, z.detach())
        scores = score(Keys(z, ids), entries, none, self.temperature, positive_mask=known)
        drawn = torch.where(bank.knows(draws), draws, -1)
        with torch.autocast(z.device.type, enabled=False):
            similarity = drawn_products(not_infinite(widened(z)), bank, drawn)
        return scores.changed(
            candidates=similarity / self.temperature,
            valid=(drawn >= 0) & other_id(ids, drawn),
            candidate_tags=Tags(drawn),
            source=ids.new_zeros(drawn.shape[1]),
        )

    def extra_repr(self) -> str:
        return f"num_draws={self.num_draws}, temperature={self.temperature}, objective={self.objective!r}"


def drawn_products(z: View, bank: Bank, ids: Annotated[Tensor, "b k"]) -> Annotated[Tensor, "b k"]:
    """Products of each row with the entries of its ids, 0 for a negative id; no more is held than the bank takes.

    What is held is a copy, since a bank may be pushed to before the backward pass. Of few entries all products are
    cheaper than to gather those that are wanted.
    """
    places, k, wide = ids.clamp(min=0), ids.shape[1], torch.promote_types(z.dtype, bank.vectors.dtype)
    z = z.to(wide)
    if ids.numel() <= len(bank.vectors):
        found = _gathered_products(z, bank.vectors, places)
    elif len(bank.vectors) <= _few * k:
        found = (z @ bank.vectors.to(wide, copy=True).T).gather(1, places)
    else:
        entries, rows = bank.vectors.clone(), max(1, _most_gathered // (k * z.shape[1]))
        parts = zip(z.split(rows), places.split(rows), strict=True)  # type: ignore[no-untyped-call]
        gathered = partial(checkpoint, _gathered_products, use_reentrant=False, preserve_rng_state=False)
        found = torch.cat([gathered(part, entries, at) for part, at in parts])
    return found.masked_fill(ids < 0, 0.0)


def _gathered_products(z: View, entries: Tensor, places: Annotated[Tensor, "b k"]) -> Annotated[Tensor, "b k"]:
    return torch.bmm(entries[places].to(z.dtype), z[:, :, None]).squeeze(2)


class InstanceDiscrimination(nn.Module):
    """Each instance against its own past in a bank, updated after the loss (in training mode).

    >>> loss = InstanceDiscrimination(num_instances=50, dim=4, num_draws=8)
    >>> z, ids = torch.nn.functional.normalize(torch.randn(16, 4), dim=-1), torch.arange(16)
    >>> loss(z, ids).item()  # the bank is empty
    0.0
    >>> loss(z, ids).item() > 0
    True
    """

    def __init__(
        self,
        num_instances: int,
        dim: int,
        num_draws: int = INSTANCE_DRAWS,
        temperature: float = BANK_TEMPERATURE,
        momentum: float = 0.5,
        objective: str = "nce",
        **options: float,
    ) -> None:
        super().__init__()
        self.bank = Bank(num_instances, dim, momentum)
        self.contrast = BankContrast(num_instances, num_draws, temperature, objective, **options)

    def forward(self, z: View, ids: Tensor, draws: Annotated[Tensor, "b k"] | None = None) -> Tensor:
        loss: Tensor = self.contrast(z, ids, self.bank, draws)
        if self.training:
            self.bank.push(Keys(z, ids))
        return loss


class CMC(nn.Module):
    """Two views, two banks, crossed: each view against the other view's past; the two directions are added."""

    def __init__(
        self,
        num_instances: int,
        dim: int,
        num_draws: int = CMC_DRAWS,
        temperature: float = BANK_TEMPERATURE,
        momentum: float = 0.5,
        objective: str = "nce",
        **options: float,
    ) -> None:
        super().__init__()
        self.banks = nn.ModuleList([Bank(num_instances, dim, momentum, seed=seed) for seed in (0, 1)])
        self.contrasts = nn.ModuleList(
            [BankContrast(num_instances, num_draws, temperature, objective, **options) for _ in range(2)]
        )

    def forward(self, z1: View, z2: View, ids: Tensor, draws: Annotated[Tensor, "b k"] | None = None) -> Tensor:
        first, second = self.banks
        loss: Tensor = self.contrasts[0](z1, ids, second, draws) + self.contrasts[1](z2, ids, first, draws)
        if self.training:
            for bank, z in zip(self.banks, (z1, z2), strict=True):
                bank.push(Keys(z, ids))  # type: ignore[operator]
        return loss
