"""Slowly moving copies of an encoder: MoCo's momentum encoder, which computes the keys, and averaged weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from hardneg.core.errors import check_range
from hardneg.core.private_apis import lerp_all
from hardneg.core.schedules import Number, value_of


class MomentumEncoder(AveragedModel):
    """A slow copy of an encoder: parameters <- momentum * parameters + (1 - momentum) * the encoder's, no gradient.

    Call ``update_parameters(encoder)`` after each optimiser step. Buffers (BatchNorm's statistics) remain the copy's
    own.

    torch's AveragedModel copies the encoder at its first update, which would lose the first step; here the copy at
    construction counts as that update, and ``n_averaged``, a buffer, counts the steps from 1.

    Args:
        encoder: The encoder to copy.
        momentum: Share of the old parameters; MoCo v2 has 0.999, v3 ``cosine(0.99, 1.0)`` with ``total`` steps.
        total: Number of steps, for schedules.

    Example:
        >>> encoder = nn.Linear(2, 2)
        >>> slow = MomentumEncoder(encoder, momentum=0.9)
        >>> with torch.no_grad():
        ...     before = encoder.weight.clone()
        ...     _ = encoder.weight.add_(1.0)
        >>> slow.update_parameters(encoder)
        >>> torch.allclose(slow.module.weight, before + 0.1)
        True
    """

    def __init__(self, encoder: nn.Module, momentum: Number = 0.999, total: int | None = None) -> None:
        check_range("MomentumEncoder", "momentum", momentum, 0.0, 1.0)
        super().__init__(encoder)  # type: ignore[no-untyped-call]
        self.momentum, self.total = momentum, total
        self.n_averaged.add_(1)
        self._updates: int | None = 0  # n_averaged - 1, known without waiting for the GPU; None: read it once
        self.requires_grad_(False)

    def momentum_at(self, step: int) -> float:
        """Return the momentum at a step."""
        return value_of(self.momentum, step, self.total)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Move the parameters of the copy towards those of the encoder."""
        if self._updates is None:
            self._updates = int(self.n_averaged) - 1
        slow: list[Tensor] = list(self.module.parameters())
        fast = [new.to(old.device) for old, new in zip(slow, model.parameters(), strict=True)]
        lerp_all(slow, fast, 1.0 - self.momentum_at(self._updates))
        self.n_averaged.add_(1)
        self._updates += 1

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._updates = None


class AveragedWeights(MomentumEncoder):
    """Exponential moving average of the weights of an encoder, and of its buffers, for evaluation and export.

    The decay of update t (from 0) is min(decay, (1 + t) / (10 + t)), as in TensorFlow, so that a short run does not
    evaluate its initial weights.

    Args:
        encoder: The encoder to average.
        decay: Share of the old average, such as 0.999.

    Example:
        >>> encoder = nn.Linear(1, 1, bias=False)
        >>> average = AveragedWeights(encoder, decay=0.5)
        >>> with torch.no_grad():
        ...     before = encoder.weight.clone()
        ...     _ = encoder.weight.add_(1.0)
        >>> average.update_parameters(encoder)  # the first decay is 1 / 10
        >>> torch.allclose(average.module.weight, before + 0.9)
        True
    """

    def __init__(self, encoder: nn.Module, decay: float) -> None:
        super().__init__(encoder, decay)

    def momentum_at(self, step: int) -> float:
        """Return the decay at a step."""
        return min(super().momentum_at(step), (1.0 + step) / (10.0 + step))

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Move parameters and buffers of the average towards those of the encoder; integers are copied."""
        decay = self.momentum_at(int(self.n_averaged) - 1 if self._updates is None else self._updates)
        super().update_parameters(model)
        for old, new in zip(self.module.buffers(), model.buffers(), strict=True):
            old.lerp_(new.to(old), 1.0 - decay) if old.is_floating_point() else old.copy_(new)
