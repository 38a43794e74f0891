"""The exact contrastive loss over a data set, and how far a method's gradient is from its gradient.

``global_loss`` compares all items of a data set with each other, by tiles, so that memory stays small. Methods such as
SogCLR and EMC2 estimate its gradient from small batches; ``gradient_error`` measures their bias and variance (the
instrument behind Fig. 7 of Yau et al. 2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from hardneg.core.errors import argument_error, check_among, check_callable, check_count
from hardneg.core.objectives.info_nce import Denominator
from hardneg.core.types import Keys, View
from hardneg.core.views import check_views
from hardneg.losses.contrastive import ContrastiveLoss
from hardneg.state.pools import Bank, Queue

WHO = "gradient_error"
NUM_BLOCKS = 20
"""Number of blocks of consecutive batches whose means show the noise of the mean gradient."""


def global_loss(
    z1: View,
    z2: View,
    temperature: float | Tensor,
    views: Literal["two", "cross"] = "two",
    ids: Annotated[Tensor, "n"] | None = None,
    *,
    positives_in_denominator: Denominator = "own",
) -> Annotated[Tensor, ""]:
    """Compute InfoNCE over a whole data set, with all other items as the negatives of each.

    It is computed by tiles (or by Triton kernels on a GPU): no [n, n] matrix is held. The gradient is exact too.

    Args:
        z1: First view of all n items, [n, d], of unit norm.
        z2: Second view, [n, d], of unit norm.
        temperature: Positive number or tensor.
        views: ``"two"``: 2n anchors, each against both views of all others (SimCLR). ``"cross"``: z1 against z2, one
            direction; average it with the swapped call for a symmetric loss.
        ids: Ids of the items, [n]; items with the same id are not each other's negatives. By default all differ.
        positives_in_denominator: ``"own"``, or ``"none"`` for the loss of EMC2 (eq. 1), GraphCL and SogCLR.

    Returns:
        The mean loss over all anchors, a scalar with a gradient.

    Raises:
        ArgumentError: If the shapes do not agree, or an option is not known.

    Example:
        >>> z = torch.eye(3)
        >>> global_loss(z, z, temperature=1.0).round(decimals=4)  # log(e + 4) - 1
        tensor(0.9048)
    """
    check_among("global_loss", "views", views, ("two", "cross"))
    check_views("global_loss", [z1, z2])
    loss = ContrastiveLoss(
        temperature=temperature,
        views=views,
        positives_in_denominator=positives_in_denominator,
        normalize=False,
        impl="streamed",
    )
    value: Tensor = loss(z1, z2, ids=ids)
    return value


@dataclass(frozen=True)
class GradientError:
    """Bias and variance of a method's gradient, relative to the exact gradient G of the global loss.

    The mean gradient is estimated from ``num_batches`` batches. ``bias`` and ``cosine`` are corrected for the noise of
    this mean, which is estimated from the means of 20 consecutive blocks because the batches of a chain are correlated.
    """

    bias: float
    """Norm of E[g] - G, divided by the norm of G."""
    variance: float
    """E of the squared norm of g - E[g], divided by the squared norm of G."""
    cosine: float
    """Cosine of E[g] and G; NaN if E[g] cannot be distinguished from 0."""
    batch_cosine: float
    """Mean cosine of one batch's gradient and G."""
    batch_size: int
    """Number of items in a batch."""
    num_batches: int
    """Number of batches that were measured."""


def gradient_error(
    loss: Callable[..., Tensor],
    z1: View,
    z2: View,
    *,
    batch_size: int,
    temperature: float,
    views: Literal["two", "cross"] = "two",
    positives_in_denominator: Denominator = "own",
    num_batches: int = 1000,
    warm_up: int | None = None,
    pool: Queue | Bank | None = None,
    encode: bool = False,
    seed: int = 0,
) -> GradientError:
    """Measure bias and variance of a loss's gradient from small batches against that of the global loss.

    The embeddings are the parameters, and both gradients pass through their normalisation. They stay fixed, so errors
    that come from moving parameters (stale queues, old normalisers) are not included. A loss whose scale differs from
    that of the mean InfoNCE has a large bias; its cosine is not affected.

    Args:
        loss: Any loss of this library, or a function of (z1, z2) or (z1, z2, ids=...). State that it keeps advances as
            in training, so pass a new one.
        z1: First view of all n items, [n, d].
        z2: Second view, [n, d].
        batch_size: Number of items per batch. Batches are those of shuffled passes over the items, as in training.
        temperature: Temperature of the global loss.
        views: As in ``global_loss``.
        positives_in_denominator: As in ``global_loss``.
        num_batches: Number of batches. ``variance / num_batches`` is the noise that remains in their mean.
        warm_up: Number of batches before the measurement, for chains and queues; by default one pass over the items.
        pool: A queue or bank that is passed as ``pool`` and to which z2 is pushed after each batch (MoCo).
        encode: Whether to pass ``encode``, a function of (ids, views) that returns embeddings with a gradient (EMC2
            with states encoded afresh, Algorithm 1, the negative cache).
        seed: Seed of the batches.

    Raises:
        ArgumentError: If the batch is larger than the data, or shapes do not agree.

    Example:
        >>> z1, z2 = torch.nn.functional.normalize(torch.randn(2, 32, 8), dim=-1)
        >>> found = gradient_error(ContrastiveLoss(temperature=0.5), z1, z2, batch_size=32, temperature=0.5)
        >>> round(found.bias, 3), round(found.cosine, 3)  # the batch is the data set
        (0.0, 1.0)
    """
    _check(loss, z1, z2, batch_size, num_batches)
    warm_up = math.ceil(len(z1) / batch_size) if warm_up is None else check_count(WHO, "warm_up", warm_up, least=0)
    table = torch.stack([z1, z2]).detach().requires_grad_()
    unit = normalize(table, dim=-1)
    whole = global_loss(unit[0], unit[1], temperature, views, positives_in_denominator=positives_in_denominator)
    measured = _Measured(torch.autograd.grad(whole, table)[0], num_batches)
    batches = _shuffled(len(z1), batch_size, seed)
    for index in range(-warm_up, num_batches):
        gradient = _batch_gradient(loss, table, next(batches).to(z1.device), pool, encode)
        if index >= 0:
            measured.add(index, gradient)
    return measured.summary(batch_size)


def _check(loss: Callable[..., Tensor], z1: View, z2: View, batch_size: int, num_batches: int) -> None:
    """Raise ArgumentError unless the loss can be called and the numbers fit the data."""
    check_views(WHO, [z1, z2])
    check_callable(WHO, "loss", loss, "a loss, called as loss(z1, z2, ids=ids)")
    if check_count(WHO, "batch_size", batch_size, least=2) > len(z1):
        fix = "use a batch_size of at most the number of items"
        raise argument_error(WHO, f"a batch of at most {len(z1)} items", "batch_size", batch_size, fix)
    check_count(WHO, "num_batches", num_batches, least=2)


def _shuffled(number: int, batch_size: int, seed: int) -> Iterator[Annotated[Tensor, "b"]]:
    """Yield the items of each batch, pass after pass; the last, smaller batch of a pass is dropped."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(number, generator=generator)
        yield from order[: number // batch_size * batch_size].view(-1, batch_size)


def _batch_gradient(
    loss: Callable[..., Tensor], table: Tensor, ids: Tensor, pool: Queue | Bank | None, encode: bool
) -> Tensor:
    """Return the gradient of one batch's loss by the whole table of embeddings, [2, n, d]."""
    first, second = normalize(table[:, ids], dim=-1)
    options: dict[str, Any] = {"ids": ids} if _accepts_ids(loss) else {}
    if pool is not None:
        options["pool"] = pool
    if encode:
        options["encode"] = lambda items, which: normalize(table[which, items], dim=-1)
    value = loss(first, second, **options)
    if pool is not None:
        pool.push(Keys(second.detach(), ids))
    if not value.requires_grad:  # nothing to compare with yet, such as an empty queue
        return torch.zeros_like(table)
    (gradient,) = torch.autograd.grad(value, table, allow_unused=True)
    return torch.zeros_like(table) if gradient is None else gradient.detach()


def _accepts_ids(loss: Callable[..., Tensor]) -> bool:
    parameters = signature(loss.forward if isinstance(loss, torch.nn.Module) else loss).parameters
    return "ids" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


class _Measured:
    """Running sums over the gradients of batches, as a whole and by consecutive blocks."""

    def __init__(self, exact: Tensor, num_batches: int) -> None:
        self.exact, self.num_batches = exact, num_batches
        self.blocks = min(NUM_BLOCKS, num_batches)
        self.total, self.block = torch.zeros_like(exact), torch.zeros_like(exact)
        self.squares = self.block_squares = self.cosines = 0.0
        self.in_block = 0

    def add(self, index: int, gradient: Tensor) -> None:
        """Add the gradient of batch ``index``."""
        self.total, self.block, self.in_block = self.total + gradient, self.block + gradient, self.in_block + 1
        self.squares += float(gradient.square().sum())
        self.cosines += float(cosine_similarity(gradient.flatten(), self.exact.flatten(), dim=0))
        if (index + 1) * self.blocks // self.num_batches > index * self.blocks // self.num_batches:
            self.block_squares += float((self.block / self.in_block).square().sum())
            self.block, self.in_block = torch.zeros_like(self.block), 0

    def summary(self, batch_size: int) -> GradientError:
        """Return the errors, with squared norms of the mean gradient corrected for its noise."""
        mean, number = self.total / self.num_batches, self.num_batches
        squared, own = float(self.exact.square().sum()), float(mean.square().sum())
        variance = max(0.0, self.squares / number - own) * number / (number - 1)
        noise = max(0.0, self.block_squares / self.blocks - own) / (self.blocks - 1)
        bias = math.sqrt(max(0.0, float((mean - self.exact).square().sum()) - noise))
        length, dot = own - noise, float((mean * self.exact).sum())
        cosine = math.nan if length <= 0.0 or squared == 0.0 else min(1.0, dot / math.sqrt(length * squared))
        scale = squared if squared > 0.0 else math.nan
        return GradientError(
            bias / math.sqrt(scale), variance / scale, cosine, self.cosines / number, batch_size, number
        )
