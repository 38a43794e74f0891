"""Instance discrimination (Wu et al. 2018) and CMC (Tian et al. 2019): noise-contrastive estimation against a bank.

The model's probability of an instance is P = e^s / Z, and K noise instances are drawn uniformly from N. Every real or
noise pair is classified by itself:

    L = -log P+ / (P+ + K/N) - sum over the noise of log (K/N) / (P- + K/N)

which in log-space is a sigmoid of s - log Z - log(K/N). Z is one number for all instances. The authors set it once,
from the first batch; here it is a running average over batches (``momentum=1.0`` gives the authors' version).

``binary_nce`` is the pure function, ``BankContrast`` applies it to vectors and a bank, and ``InstanceDiscrimination``
and ``CMC`` hold the banks.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad
from torch.utils.checkpoint import checkpoint

from hardneg.core.errors import argument_error, check_range
from hardneg.core.objectives import info_nce, reduce
from hardneg.core.pairing import not_infinite
from hardneg.core.published import BANK_TEMPERATURE, CMC_DRAWS, INSTANCE_DRAWS
from hardneg.core.scoring import score
from hardneg.core.tensors import typed_as, widened
from hardneg.core.types import NEVER, Keys, LogWeights, PairLosses, Scores, Tags, View, other_id
from hardneg.losses.neighbours import neighbour_nce
from hardneg.negatives import Uniform
from hardneg.state.clusters import Clusters
from hardneg.state.pools import Bank
from hardneg.state.stateful import Stateful, check_count

_whole_bank_factor = 16
"""A bank of up to this many times the draws is multiplied as a whole instead of gathering the drawn entries."""
_max_gathered = 1 << 22
"""Numbers that are gathered at a time."""


def binary_nce(
    scores: Scores,
    log_w: LogWeights,
    *,
    log_z: Annotated[Tensor, ""],
    num_instances: int,
    epsilon: float = 0.0,
) -> PairLosses:
    """Compute the NCE loss of each positive and its noise.

    -log sigmoid(a - c) - sum_j w_j log sigmoid(c - s_j) with c = log(Z K / N), where K is the number of candidates with
    a weight.

    Args:
        scores: Scores of b anchors: positives [b, p] and noise [b, n].
        log_w: Log-weights of the noise, [b, n]; ``NEVER`` for candidates that are not noise.
        log_z: log Z, a scalar.
        num_instances: Size N of the data set.
        epsilon: Added to K/N; the authors' code has 1e-7.

    Returns:
        Losses [b, p]; 0 for positives that are not valid and for anchors without noise.
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
    """Running estimate of log Z over the data set: N times the mean of e^s over the compared pairs.

    The first batch sets it; afterwards Z <- momentum * Z + (1 - momentum) * new. It is updated in training mode only.

    Args:
        num_instances: Size N of the data set.
        momentum: Share of the old value; 1.0 keeps that of the first batch.
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
        """Update log Z with the scores of a batch and return it."""
        seen = torch.cat([scores.positives[scores.positive_valid], scores.candidates[scores.valid]]).double()
        if self.training and len(seen):
            new = torch.logsumexp(seen, 0) - math.log(len(seen)) + math.log(self.num_instances)
            keep = math.log(self.momentum) if self.momentum > 0.0 else NEVER
            take = math.log1p(-self.momentum) if self.momentum < 1.0 else NEVER
            mixed = torch.logaddexp(keep + self.log_z, take + new)
            self.log_z.copy_(torch.where(self.log_z == NEVER, new, mixed))
            self.step += 1
        return self.log_z.clone()

    if TYPE_CHECKING:

        @typed_as(forward)
        def __call__(self) -> Any:
            """Return what ``forward`` returns."""


class BankContrast(nn.Module):
    """Vectors against a bank: the instance's own entry is the positive, k uniform draws of other entries the negatives.

    The loss of an instance that is not in the bank yet is 0, because it has no positive.

    Args:
        num_instances: Size of the data set.
        num_draws: Number k of draws per anchor.
        temperature: Divides the similarities.
        objective: "nce" with a running Z, or "softmax", InfoNCE over the own entry and the draws.
        z_momentum: Momentum of the running Z.
        epsilon: Added to K/N, see ``binary_nce``.
        positives_in_denominator: Of "softmax": "own", or "none" (Algorithm 1 of Ring).
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
        positives_in_denominator: Literal["own", "none"] = "own",
    ) -> None:
        super().__init__()
        if objective not in ("nce", "softmax"):
            raise argument_error("BankContrast", "objective 'nce' or 'softmax'", "objective", objective)
        self.num_draws = check_count("BankContrast", "num_draws", num_draws)
        self.num_instances, self.temperature = check_count("BankContrast", "num_instances", num_instances), temperature
        self.objective, self.epsilon, self.denominator = objective, epsilon, positives_in_denominator
        self.running_z = RunningZ(num_instances, z_momentum)

    def forward(
        self,
        z: View,
        ids: Tensor,
        bank: Bank,
        draws: Annotated[Tensor, "b k"] | None = None,
        clusters: Clusters | None = None,
    ) -> Tensor:
        """Compute the mean loss of a batch against the bank.

        Args:
            z: Vectors [b, d].
            ids: Positions in the data set, [b].
            bank: The bank of entries.
            draws: Ids of the negatives [b, k]; by default drawn with the bank's seed and step. Own ids among them are
                ignored.
            clusters: With the softmax, entries in a cluster of the instance join the positive in the numerator: Ring +
                C_i (Wu et al. 2021, appendix F). The draws are the same with and without them.
        """
        scores = self._scores(z, ids, bank, bank.draw_ids(ids, self.num_draws) if draws is None else draws)
        log_w = Uniform().log_weights(scores)
        if self.objective == "softmax":
            if clusters is not None:
                return reduce(self._with_neighbours(scores, log_w, z, ids, bank, clusters), scores)
            return reduce(info_nce(scores, log_w, positives_in_denominator=self.denominator), scores)
        losses = binary_nce(
            scores, log_w, log_z=self.running_z(scores), num_instances=self.num_instances, epsilon=self.epsilon
        )
        return reduce(losses, scores)

    if TYPE_CHECKING:

        @typed_as(forward)
        def __call__(self) -> Any:
            """Return what ``forward`` returns."""

    def _with_neighbours(
        self, scores: Scores, log_w: LogWeights, z: View, ids: Tensor, bank: Bank, clusters: Clusters
    ) -> PairLosses:
        """Return the losses with all entries of the instance's clusters in the numerator, [b, 1]."""
        anchors = Keys(z, ids, clusters=clusters.of(ids))
        every = score(anchors, z.detach(), clusters.tag(bank.keys()), self.temperature)
        close = every.same_cluster("BankContrast") & every.valid
        both = scores.changed(
            candidates=torch.cat([scores.candidates, every.candidates], dim=1),
            valid=torch.cat([scores.valid, every.valid], dim=1),
        )
        none = torch.full_like(every.candidates, NEVER)
        return neighbour_nce(both, torch.cat([log_w, none], dim=1), pad(close, (scores.candidates.shape[1], 0)))

    def _scores(self, z: View, ids: Tensor, bank: Bank, draws: Annotated[Tensor, "b k"]) -> Scores:
        own, none = bank.of(ids), Keys(z.new_zeros(len(z), 0, bank.dim), ids[:, None][:, :0], source=bank.source)
        assert own.ids is not None
        known = (own.ids >= 0)[:, None]
        # Unknown entries are masked, but must be unit vectors to pass the checks of core.scoring.
        entries = torch.where(known, own.vectors, z.detach())
        scores = score(Keys(z, ids), entries, none, self.temperature, positive_mask=known)
        drawn = torch.where(bank.contains(draws), draws, -1)
        with torch.autocast(z.device.type, enabled=False):
            similarity = drawn_products(not_infinite(widened(z)), bank, drawn)
        return scores.changed(
            candidates=similarity / self.temperature,
            valid=(drawn >= 0) & other_id(ids, drawn),
            candidate_tags=Tags(drawn),
            source=ids.new_zeros(drawn.shape[1]),
        )

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        return f"num_draws={self.num_draws}, temperature={self.temperature}, objective={self.objective!r}"


def drawn_products(z: View, bank: Bank, ids: Annotated[Tensor, "b k"]) -> Annotated[Tensor, "b k"]:
    """Compute the products of each row with the bank entries of its ids.

    Memory is at most that of the bank. The products use a copy of the entries, because the bank may be updated before
    the backward pass. Multiplying a small bank as a whole is cheaper than gathering the drawn entries.

    Args:
        z: Vectors [b, d].
        bank: The bank.
        ids: Ids of k entries per row, [b, k]; the product of a negative id is 0.
    """
    places, k, wide = ids.clamp(min=0), ids.shape[1], torch.promote_types(z.dtype, bank.vectors.dtype)
    z = z.to(wide)
    if ids.numel() <= len(bank.vectors):
        found = _gathered_products(z, bank.vectors, places)
    elif len(bank.vectors) <= _whole_bank_factor * k:
        found = (z @ bank.vectors.to(wide, copy=True).T).gather(1, places)
    else:
        entries, rows = bank.vectors.clone(), max(1, _max_gathered // (k * z.shape[1]))
        parts = zip(z.split(rows), places.split(rows), strict=True)  # type: ignore[no-untyped-call]
        gathered = partial(checkpoint, _gathered_products, use_reentrant=False, preserve_rng_state=False)
        found = torch.cat([gathered(part, entries, at) for part, at in parts])
    return found.masked_fill(ids < 0, 0.0)


def _gathered_products(z: View, entries: Tensor, places: Annotated[Tensor, "b k"]) -> Annotated[Tensor, "b k"]:
    return torch.bmm(entries[places].to(z.dtype), z[:, :, None]).squeeze(2)


class InstanceDiscrimination(nn.Module):
    """Contrast each instance with its own past in a bank, which is updated after the loss in training mode.

    Args:
        num_instances: Size of the data set.
        dim: Number of features.
        num_draws: Negatives per anchor.
        temperature: Divides the similarities.
        momentum: Momentum of the entries of the bank.
        objective: "nce" or "softmax".
        **options: Further options of ``BankContrast``.

    Example:
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
        **options: Any,
    ) -> None:
        super().__init__()
        self.bank = Bank(num_instances, dim, momentum)
        self.contrast = BankContrast(num_instances, num_draws, temperature, objective, **options)

    def forward(self, z: View, ids: Tensor, draws: Annotated[Tensor, "b k"] | None = None) -> Tensor:
        """Compute the mean loss, then push the vectors to the bank (in training mode).

        Args:
            z: Vectors [b, d].
            ids: Positions in the data set, [b].
            draws: Ids of the negatives [b, k], instead of random ones.
        """
        loss: Tensor = self.contrast(z, ids, self.bank, draws)
        if self.training:
            self.bank.push(Keys(z, ids))
        return loss

    if TYPE_CHECKING:

        @typed_as(forward)
        def __call__(self) -> Any:
            """Return what ``forward`` returns."""


class CMC(nn.Module):
    """Two views and two banks: each view against the past of the other view, with both directions added.

    The arguments are those of ``InstanceDiscrimination``.
    """

    def __init__(
        self,
        num_instances: int,
        dim: int,
        num_draws: int = CMC_DRAWS,
        temperature: float = BANK_TEMPERATURE,
        momentum: float = 0.5,
        objective: str = "nce",
        **options: Any,
    ) -> None:
        super().__init__()
        self.banks = nn.ModuleList([Bank(num_instances, dim, momentum, seed=seed) for seed in (0, 1)])
        self.contrasts = nn.ModuleList(
            [BankContrast(num_instances, num_draws, temperature, objective, **options) for _ in range(2)]
        )

    def forward(self, z1: View, z2: View, ids: Tensor, draws: Annotated[Tensor, "b k"] | None = None) -> Tensor:
        """Compute the sum of both directions, then push the views to their banks (in training mode).

        Args:
            z1: Vectors of the first view, [b, d].
            z2: Vectors of the second view, [b, d].
            ids: Positions in the data set, [b].
            draws: Ids of the negatives [b, k], instead of random ones.
        """
        first, second = self.banks
        loss: Tensor = self.contrasts[0](z1, ids, second, draws) + self.contrasts[1](z2, ids, first, draws)
        if self.training:
            for bank, z in zip(self.banks, (z1, z2), strict=True):
                bank.push(Keys(z, ids))  # type: ignore[operator]
        return loss

    if TYPE_CHECKING:

        @typed_as(forward)
        def __call__(self) -> Any:
            """Return what ``forward`` returns."""
