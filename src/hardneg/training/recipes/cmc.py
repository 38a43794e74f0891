"""Contrastive Multiview Coding with any negatives (Tian et al. 2019): two aspects of an image, two encoders, two banks.

The aspects of a colour image are its lightness and its colours (L and ab of CIE Lab); those of a grey image its
intensities and its horizontal and vertical gradients. Each aspect is compared with the past of the other one. Loss
and negatives are those of instance discrimination, summed over both directions. CMCRing is ``negatives="Ring(...)"``.
The features are those of both encoders, each of unit norm, so that neither dominates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, pad

from hardneg.core.errors import ArgumentError
from hardneg.training.augmentation.views import Augmentation
from hardneg.training.data.images import ImageData
from hardneg.training.data.items import Items
from hardneg.training.encoders import features_of
from hardneg.training.normalisation import Normalise
from hardneg.training.options import CMCOptions, InstanceOptions, TrainOptions
from hardneg.training.recipes.instance import Instance
from hardneg.training.weights import initialised

XYZ = [[0.412453, 0.357580, 0.180423], [0.212671, 0.715160, 0.072169], [0.019334, 0.119193, 0.950227]]
"""Matrix from linear sRGB to CIE XYZ."""

DAYLIGHT = [0.95047, 1.0, 1.08883]
"""White point D65 in CIE XYZ."""


class CMCRecipe(Instance):
    """Instance discrimination across two aspects of an image."""

    def __init__(self, options: CMCOptions, data: Items, total: int) -> None:
        super().__init__(options, data, total, num_banks=2)

    def encoder_for(self, options: InstanceOptions, data: Items) -> nn.Module:
        """Build one encoder per aspect, scaled to the augmentation in use."""
        assert isinstance(data, ImageData), "cmc needs pixels"
        encoder = Aspects.built(list(data.images.shape[1:]), options)
        initialised(encoder, options)
        if isinstance(data.augment, Augmentation):
            encoder.learn_scale(data.augment, data.pixels(slice(1)))
        return encoder

    @classmethod
    def rebuilt(cls, kind: type[Items], record: dict[str, Any], options: CMCOptions) -> nn.Module:
        """Build the encoders of a finished run with fresh weights."""
        return Aspects.built(record["shape"], options)


class Aspects(nn.Module):
    """One encoder per aspect of an image; their vectors are concatenated.

    Args:
        first: Encoder of lightness or intensity, one channel.
        second: Encoder of colours or gradients, two channels.
        channels: Number of channels of the images.
    """

    low: Tensor
    high: Tensor

    def __init__(self, first: nn.Module, second: nn.Module, channels: int) -> None:
        super().__init__()
        self.name = getattr(first, "name", None)
        self.first, self.second = first, second
        self.normalise: Normalise | None = None  # as in ``Encoder``
        self.register_buffer("low", torch.zeros(channels, 1, 1))
        self.register_buffer("high", torch.ones(channels, 1, 1))

    @classmethod
    def built(cls, shape: list[int], options: TrainOptions) -> Aspects:
        """Build both encoders.

        Args:
            shape: Shape of an image, [c, h, w].
            options: Options of the recipe.
        """
        # Another seed, so that the encoders start with different weights.
        other = replace(options, seed=(options.seed + 2**30) % 2**31)
        first, second = (
            ImageData.rebuilt({"shape": [channels, *shape[1:]]}, one) for channels, one in ((1, options), (2, other))
        )
        return cls(first, second, shape[0])

    def learn_scale(self, augment: Augmentation, images: Tensor) -> None:
        """Measure the values of black and white after augmentation, since aspects are defined on [0, 1].

        Args:
            augment: The augmentation of the run.
            images: At least one image as stored, [n, c, h, w].

        Raises:
            ArgumentError: If white is not brighter than black in every channel.
        """
        black, white = (augment.plain(torch.full_like(images, value)) for value in (0, 255))
        self.low, self.high = (plain[0, :, :1, :1].float().cpu() for plain in (black, white))
        if not bool((self.high > self.low).all()):
            raise ArgumentError("cmc", "views in which white is brighter than black", f"--augment {augment!r}")

    def forward(self, images: Tensor) -> Tensor:
        """Return the projections of both aspects, [b, 2 d]."""
        first, second = self._aspects(images)
        return torch.cat([self.first(first), self.second(second)], dim=1)

    def features(self, images: Tensor) -> Tensor:
        """Return the features of both aspects, each of unit norm, concatenated."""
        both = zip((self.first, self.second), self._aspects(images), strict=True)
        return torch.cat([normalize(features_of(encoder)(aspect), dim=-1) for encoder, aspect in both], dim=1)

    def maps(self, images: Tensor) -> Tensor:
        """Return the feature maps of both encoders before pooling, [b, 2 c, h, w]."""
        encoders: Any = (self.first, self.second)
        both = zip(encoders, self._aspects(images), strict=True)
        return torch.cat([encoder.maps(aspect) for encoder, aspect in both], dim=1)

    def _aspects(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Rescale images to [0, 1] and split them into their aspects."""
        images = images if self.normalise is None else self.normalise(images)
        return aspects_of((images - self.low) / (self.high - self.low))


def aspects_of(images: Tensor) -> tuple[Tensor, Tensor]:
    """Split images into two aspects of about unit scale.

    Args:
        images: Values in [0, 1], [b, c, h, w]; three channels are RGB, otherwise one is grey.

    Returns:
        Lightness or intensity, [b, 1, h, w], and colours or gradients, [b, 2, h, w].
    """
    if images.shape[1] == 3:
        lab = lab_of(images.clamp(0.0, 1.0))
        return lab[:, :1] / 25.0 - 2.0, lab[:, 1:] / 25.0
    padded = pad(images, (1, 1, 1, 1), mode="replicate")
    across = padded[:, :, 1:-1, 2:] - padded[:, :, 1:-1, :-2]
    down = padded[:, :, 2:, 1:-1] - padded[:, :, :-2, 1:-1]
    return (images - 0.5) / 0.25, 2.0 * torch.cat([across, down], dim=1)


def lab_of(rgb: Tensor) -> Tensor:
    """Convert sRGB to CIE Lab.

    Args:
        rgb: Values in [0, 1], [b, 3, h, w].

    Returns:
        L in [0, 100], a and b, [b, 3, h, w].
    """
    linear = torch.where(rgb > 0.04045, ((rgb + 0.055) / 1.055) ** 2.4, rgb / 12.92)
    xyz = torch.einsum("ij,bjhw->bihw", rgb.new_tensor(XYZ), linear) / rgb.new_tensor(DAYLIGHT)[:, None, None]
    f = torch.where(xyz > (6 / 29) ** 3, xyz.clamp(min=1e-8) ** (1 / 3), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    x, y, z = f.unbind(1)
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], dim=1)
