"""Optimisers and learning-rate schedules written as text, and the update of the weights from losses.

--optimizer  adam | adamw | "sgd(momentum=0.9, nesterov=True)" | lars | lamb
--schedule   constant | "cosine(warmup=5)" | "steps(30, 40, factor=0.1)"       warm-ups and steps are in epochs

``read_optimiser`` and ``read_rate`` parse these texts; add a class to ``OPTIMISERS`` or ``RATES`` to extend them.
``Updates`` applies gradients in the training loop: accumulation, clipping, learning rate.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from hardneg.core.errors import ArgumentError, argument_error, check_range, warn_once
from hardneg.core.schedules import short_repr
from hardneg.negatives.grammar import read_expression
from hardneg.training.options import TrainOptions

if TYPE_CHECKING:
    from accelerate import Accelerator

WHO = "train"


@dataclass(frozen=True, repr=False)
class Optimiser(ABC):
    """Abstract base of the optimisers: their constant arguments, and how parameters are grouped."""

    def build(self, parameters: Iterable[nn.Parameter], weight_decay: float, **common: Any) -> torch.optim.Optimizer:
        """Build the optimiser; only weights of two or more dimensions decay.

        Biases, the scales of normalisation layers, learnt temperatures and per-item parameters such as iSogCLR's do
        not: decay would change the parameter of an item that no batch has visited.

        Args:
            parameters: The parameters to train.
            weight_decay: Weight decay of matrices and kernels.
            common: ``lr`` and ``fused``, as torch's optimisers have them.
        """
        groups: dict[float, list[nn.Parameter]] = {}
        for one in parameters:
            groups.setdefault(weight_decay if one.ndim > 1 else 0.0, []).append(one)
        return self.create([{"params": some, "weight_decay": decay} for decay, some in groups.items()], **common)

    @abstractmethod
    def create(self, groups: list[dict[str, Any]], **common: Any) -> torch.optim.Optimizer:
        """Create torch's optimiser for these parameter groups.

        Args:
            groups: Parameter groups, each with its weight decay.
            common: ``lr`` and ``fused``.
        """

    def __repr__(self) -> str:
        return short_repr(self).lower().replace("true", "True")


@dataclass(frozen=True, repr=False)
class Adam(Optimiser):
    """Adam (Kingma and Ba 2015); the weight decay is added to the gradient."""

    beta1: float = 0.9
    beta2: float = 0.999
    kind: ClassVar[Callable[..., torch.optim.Optimizer]] = torch.optim.Adam

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            check_range(WHO, name, getattr(self, name), 0.0, 1.0, open_high=True)

    def create(self, groups: list[dict[str, Any]], **common: Any) -> torch.optim.Optimizer:
        """Create torch's Adam or AdamW for these parameter groups."""
        return self.kind(groups, betas=(self.beta1, self.beta2), **common)


@dataclass(frozen=True, repr=False)
class AdamW(Adam):
    """AdamW (Loshchilov and Hutter 2019); the weight decay is decoupled from the gradient."""

    kind: ClassVar[Callable[..., torch.optim.Optimizer]] = torch.optim.AdamW


@dataclass(frozen=True, repr=False)
class SGD(Optimiser):
    """Stochastic gradient descent with momentum, as SimCLR and MoCo are trained."""

    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_range(WHO, "momentum", self.momentum, 0.0, 1.0, open_high=True)
        if self.nesterov and not self.momentum:
            raise argument_error(WHO, "a momentum with nesterov=True", "momentum", self.momentum)

    def create(self, groups: list[dict[str, Any]], **common: Any) -> torch.optim.Optimizer:
        """Create torch's SGD for these parameter groups."""
        return torch.optim.SGD(groups, momentum=self.momentum, nesterov=self.nesterov, **common)


@dataclass(frozen=True, repr=False)
class LARS(Optimiser):
    """LARS (You et al. 2017) as SimCLR and MoCo v3 use it: SGD whose step is scaled to the norm of each weight.

    Attributes:
        momentum: Momentum of the scaled gradients.
        trust: Ratio of the length of a step, before the learning rate, to the norm of the weight.
    """

    momentum: float = 0.9
    trust: float = 1e-3

    def __post_init__(self) -> None:
        check_range(WHO, "momentum", self.momentum, 0.0, 1.0, open_high=True)
        check_range(WHO, "trust", self.trust, 1e-9, 1.0)

    def create(self, groups: list[dict[str, Any]], **common: Any) -> torch.optim.Optimizer:
        """Create ``ScaledSteps`` of LARS for these parameter groups."""
        momentum, trust = self.momentum, self.trust

        def update(parameter: Tensor, gradient: Tensor, state: dict[str, Any], decay: float) -> Tensor:
            gradient = gradient + decay * parameter
            if parameter.ndim > 1:
                gradient = gradient * (trust * norm_ratio(parameter, gradient))
            state["momentum"] = gradient + momentum * state["momentum"] if state else gradient
            found: Tensor = state["momentum"]
            return found

        return ScaledSteps(groups, update, common["lr"])


@dataclass(frozen=True, repr=False)
class LAMB(Adam):
    """LAMB (You et al. 2020): steps of AdamW, each scaled to the norm of its weight; for very large batches."""

    def create(self, groups: list[dict[str, Any]], **common: Any) -> torch.optim.Optimizer:
        """Create ``ScaledSteps`` of LAMB for these parameter groups."""

        def update(parameter: Tensor, gradient: Tensor, state: dict[str, Any], decay: float) -> Tensor:
            if not state:
                state |= {"step": torch.zeros(()), "mean": torch.zeros_like(gradient), "square": gradient * 0.0}
            state["step"] += 1.0
            state["mean"] = torch.lerp(gradient, state["mean"], self.beta1)
            state["square"] = torch.lerp(gradient.square(), state["square"], self.beta2)
            first, second = (1.0 - beta ** float(state["step"]) for beta in (self.beta1, self.beta2))
            step: Tensor = state["mean"] / first / ((state["square"] / second).sqrt() + EPSILON) + decay * parameter
            return step * norm_ratio(parameter, step) if parameter.ndim > 1 else step

        return ScaledSteps(groups, update, common["lr"])


EPSILON = 1e-6
"""Constant in the denominator of LAMB, as in its paper's code."""

Update = Callable[[Tensor, Tensor, dict[str, Any], float], Tensor]
"""(parameter, gradient, its state, weight decay) -> the step, which is multiplied by the learning rate."""


class ScaledSteps(torch.optim.Optimizer):
    """An optimiser from a function of one parameter, its gradient and its state.

    Args:
        groups: Parameter groups, each with its weight decay.
        update: Computes the step of a parameter.
        lr: Learning rate.
    """

    def __init__(self, groups: list[dict[str, Any]], update: Update, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.sub_(self.update(one, one.grad, self.state[one], group["weight_decay"]), alpha=group["lr"])


def norm_ratio(parameter: Tensor, step: Tensor) -> Tensor:
    """Return |parameter| / |step|, or 1 if either norm is 0; no value is read from the GPU.

    >>> norm_ratio(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0])), norm_ratio(torch.zeros(2), torch.ones(2))
    (tensor(2.5000), tensor(1.))
    """
    ratio = parameter.norm() / step.norm()
    return torch.where((ratio > 0.0) & ratio.isfinite(), ratio, 1.0)


@dataclass(frozen=True, repr=False)
class Rate(ABC):
    """Factor of the learning rate over training: a linear warm-up from 0, then ``after``.

    Attributes:
        warmup: Length of the warm-up in epochs.
    """

    warmup: float = 0.0

    def __post_init__(self) -> None:
        check_range(WHO, "warmup", self.warmup, 0.0, math.inf)

    def factor(self, step: int, total: int, per_epoch: int) -> float:
        """Return the factor of the learning rate for one update.

        Args:
            step: Number of batches before this update.
            total: Number of batches of the whole run.
            per_epoch: Number of batches per epoch.
        """
        warm = self.warmup * per_epoch
        if step < warm:
            return (step + 1) / (warm + 1)
        return self.after(step / per_epoch, (step - warm) / max(1.0, total - warm))

    @abstractmethod
    def after(self, epochs: float, share: float) -> float:
        """Return the factor after the warm-up.

        Args:
            epochs: Epochs since the start of the run.
            share: Share of the time after the warm-up that has passed, in [0, 1].
        """

    def __repr__(self) -> str:
        return short_repr(self).lower()


@dataclass(frozen=True, repr=False)
class Constant(Rate):
    """A constant learning rate."""

    def after(self, epochs: float, share: float) -> float:
        """Return 1."""
        return 1.0


@dataclass(frozen=True, repr=False)
class Cosine(Rate):
    """Half a cosine from 1 down to ``end``.

    Attributes:
        end: Factor at the end of the run.
    """

    end: float = 0.0

    def after(self, epochs: float, share: float) -> float:
        """Return end + (1 - end) (1 + cos(pi share)) / 2."""
        return self.end + (1.0 - self.end) * 0.5 * (1.0 + math.cos(math.pi * share))


@dataclass(frozen=True, repr=False)
class Steps(Rate):
    """A learning rate that is multiplied by ``by`` at each of the given epochs.

    Attributes:
        epochs: When the rate changes.
        by: Factor of each change.
    """

    epochs: tuple[float, ...] = ()
    by: float = 0.1

    def after(self, epochs: float, share: float) -> float:
        """Return ``by`` to the power of the number of epochs in ``epochs`` that have passed."""
        return float(self.by ** sum(epochs >= one for one in self.epochs))

    def __repr__(self) -> str:
        warmup = f", warmup={self.warmup!r}" if self.warmup else ""
        return f"steps({', '.join(map(repr, self.epochs))}, factor={self.by!r}{warmup})"


def _steps(*epochs: float, factor: float = 0.1, warmup: float = 0.0) -> Steps:
    """Build ``Steps`` from the text form ``steps(30, 40, factor=0.1)``."""
    if not epochs:
        raise ArgumentError(WHO, "the epochs at which the learning rate falls, as in steps(30, 40)", "none")
    check_range(WHO, "factor", factor, 0.0, 1.0)
    return Steps(warmup, epochs, factor)


OPTIMISERS: dict[str, Callable[..., Optimiser]] = {"adam": Adam, "adamw": AdamW, "sgd": SGD, "lars": LARS, "lamb": LAMB}
RATES: dict[str, Callable[..., Rate]] = {"constant": Constant, "cosine": Cosine, "steps": _steps}


def read_optimiser(text: str) -> Optimiser:
    """Parse the text of an optimiser; a bare name has default arguments.

    Args:
        text: Such as "adam" or "sgd(momentum=0.9, nesterov=True)".

    Example:
        >>> read_optimiser("sgd(momentum=0.9)") == read_optimiser("sgd")
        True
    """
    found: Optimiser = read_expression(_called(text, OPTIMISERS), OPTIMISERS)
    return found


def read_rate(text: str) -> Rate:
    """Parse the text of a learning-rate schedule; a bare name has default arguments.

    Args:
        text: Such as "constant", "cosine(warmup=5)" or "steps(30, 40)".

    Example:
        >>> round(read_rate("cosine(warmup=5)").factor(55, 100, per_epoch=1), 3)
        0.459
    """
    found: Rate = read_expression(_called(text, RATES), RATES)
    return found


def _called(text: str, names: dict[str, Callable[..., Any]]) -> str:
    """Return the text as a call: a bare name becomes a call without arguments."""
    return f"{text.strip()}()" if text.strip() in names else text


class Updates:
    """Turns losses into updates: gradients of ``accumulate`` batches are averaged, clipped and applied.

    Every epoch ends with an update, from fewer batches if ``accumulate`` does not divide it. Checkpoints are written
    after an update, so that they need no gradients.

    Args:
        accelerator: The accelerator of the run.
        optimizer: The prepared optimiser.
        parameters: All trained parameters, whose gradients are clipped together.
        outside: Trained parameters outside the encoder, whose gradients are averaged over the ranks here.
        options: Options of the recipe.
        per_epoch: Number of batches per epoch.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        optimizer: Any,
        parameters: list[nn.Parameter],
        outside: list[nn.Parameter],
        options: TrainOptions,
        per_epoch: int,
    ) -> None:
        self.accelerator, self.optimizer, self.options, self.per_epoch = accelerator, optimizer, options, per_epoch
        self.parameters, self.outside = parameters, outside
        self.rate, self.total = read_rate(options.schedule), options.epochs * per_epoch
        if options.accumulate > 1:
            warn_once(
                "training.accumulate",
                f"--accumulate {options.accumulate} averages gradients only: each batch still has the negatives of "
                f"{options.batch_size} items. For more negatives, raise --batch-size, and use --encode-chunk to "
                "encode the batch in parts that fit into memory.",
            )

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of the update after ``step`` batches."""
        return self.options.learning_rate * self.rate.factor(step, self.total, self.per_epoch)

    def __call__(self, loss: Tensor, step: int) -> bool:
        """Back-propagate the loss of one batch, and update the weights if its group is complete.

        Args:
            loss: Loss of the batch, a scalar with a gradient.
            step: Number of batches before this one.

        Returns:
            True if the weights were updated.
        """
        place = step % self.per_epoch
        begun = place - place % self.options.accumulate
        size = min(self.options.accumulate, self.per_epoch - begun)
        if place == begun:
            self.optimizer.zero_grad(set_to_none=True)
        self.accelerator.backward(loss / size)
        if place + 1 < begun + size:
            return False
        for parameter in self.outside:  # the wrapper of the encoder averages its own over the ranks
            parameter.grad = None if parameter.grad is None else self.accelerator.reduce(parameter.grad, "mean")
        if self.options.clip:
            self.accelerator.clip_grad_norm_(self.parameters, self.options.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        self.optimizer.step()
        return True
