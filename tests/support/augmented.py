"""Images and the random parameters of their views, for tests of augmentation."""

from __future__ import annotations

import torch
from torch import Tensor

from hardneg.training.augmentation.augment import Augment
from hardneg.training.augmentation.pixels import Parameters

PIXEL = 1e-5
"""A tolerance on the scale of [0, 1]: a four-hundredth of a grey level."""


def random_images(b: int, c: int = 3, h: int = 32, w: int = 32) -> Tensor:
    return torch.randint(0, 256, (b, c, h, w), dtype=torch.uint8)


def draw_of(augment: Augment, n: int, size: tuple[int, int] = (32, 32), seed: int = 0) -> Parameters:
    return augment.draw(torch.arange(n), torch.zeros(n, dtype=torch.int64), 0, seed, size)
