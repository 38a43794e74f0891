"""One step of a recipe against the loss that a plain loop gives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from hardneg.training.loop.method import Batch


def unit(encoder: nn.Module, images: Tensor) -> Tensor:
    return normalize(encoder(images), dim=-1)


def assert_step(method: Any, batch: Batch, expected: Tensor, value: bool = True) -> Tensor:
    """The loss of the batch, and its gradient by every weight that is trained, are the expected ones."""
    weights = [p for p in method.parameters() if p.requires_grad]
    loss: Tensor = method.loss_of(method.encoder, batch)
    found, wanted = (torch.autograd.grad(one, weights) for one in (loss, expected))
    if value:
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    scale = max(float(gradient.abs().max()) for gradient in wanted)
    assert scale > 1e-3
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * scale)
    return loss.detach()
