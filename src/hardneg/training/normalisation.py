"""The scale of the images that an encoder was trained on, stored with the encoder wherever it is used.

``scale_of`` finds mean and std when a run starts; the run records them; ``load_encoder`` puts ``Normalise`` before the
backbone, and ``export`` writes them next to the weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from hardneg.core.errors import ArgumentError
from hardneg.training.augmentation.augment import Augment
from hardneg.training.augmentation.views import OF_DATA, Augmentation, as_unit, parse_augment, without_statistics
from hardneg.training.options import TrainOptions

Scale = dict[str, list[float]]
"""``mean`` and ``std`` of each channel for values in [0, 1]; empty if plain images are not (x - mean) / std."""

MEASURED = 10_000
"""Images at most over which mean and std are measured."""

MARGIN = 1e-3
"""Tolerance around [0, 1]: interpolation may overshoot by rounding errors."""


class Normalise(nn.Module):
    """Normalise images by (x - mean) / std, accepting values in [0, 1] or uint8.

    Args:
        mean: Mean of each channel, on the scale of [0, 1].
        std: Standard deviation of each channel, on the scale of [0, 1].

    Example:
        >>> Normalise([0.5], [0.25])(torch.full((1, 1, 1, 1), 255, dtype=torch.uint8)).item()
        2.0
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: list[float], std: list[float]) -> None:
        super().__init__()
        # Not persistent, so that state dicts have the same keys with and without normalisation.
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values)[:, None, None], persistent=False)

    def forward(self, images: Annotated[Tensor, "b c h w"]) -> Annotated[Tensor, "b c h w"]:
        """Return normalised images [b, c, h, w].

        Raises:
            ArgumentError: If float images have values outside [0, 1], which means that they are normalised already or
                not divided by 255.
        """
        if images.dtype == torch.uint8:
            images = as_unit(images)
        elif not torch.compiler.is_compiling() and images.numel():
            low, high = (float(end) for end in images.detach().aminmax())
            if not (low >= -MARGIN and high <= 1.0 + MARGIN):
                raise ArgumentError(
                    "load_encoder",
                    "images as uint8 or with values in [0, 1], which the encoder normalises itself",
                    f"values from {low:.3g} to {high:.3g}",
                    "pass the images as they are, or load the encoder with normalise=False",
                )
        return (images - self.mean) / self.std


def measured_scale(plain: Iterable[Annotated[Tensor, "b c h w"]]) -> Scale:
    """Return the mean and std of each channel over all pixels of images.

    Args:
        plain: Batches of images with values in [0, 1].

    Example:
        >>> measured_scale([torch.tensor([0.0, 1.0]).view(1, 1, 1, 2)])
        {'mean': [0.5], 'std': [0.5]}
    """
    number, total, squares = 0, torch.zeros(()), torch.zeros(())
    for images in plain:
        values = images.double().cpu().transpose(0, 1).flatten(1)  # [c, b * h * w]
        number, total = number + values.shape[1], total + values.sum(1)
        squares = squares + values.square().sum(1)
    mean = total / number
    return {"mean": mean.tolist(), "std": (squares / number - mean**2).clamp_min(1e-12).sqrt().tolist()}


def with_statistics(options: TrainOptions, items: Any) -> TrainOptions:
    """Return the options of a run whose images are normalised by their own mean and std.

    Args:
        options: Options of the run; the numbers are written into ``augment``.
        items: The training images, of which at most ``MEASURED`` are used.
    """
    unit = items.prepared(with_values(options, mean=(), std=()))
    places = torch.randperm(len(items), generator=torch.Generator().manual_seed(0))[:MEASURED]
    scale = measured_scale(unit.plain(index.to(items.ids.device)) for index in torch.split(places, 256))
    return with_values(options, **{name: tuple(round(one, 6) for one in values) for name, values in scale.items()})


def asks_for_statistics(options: TrainOptions) -> bool:
    """Return whether ``--augment`` normalises by the mean and std of the training images."""
    return OF_DATA in options.augment and OF_DATA in parse_augment(options.augment)[1].values()


def with_values(options: TrainOptions, **values: Any) -> TrainOptions:
    """Return the options with other values in the text of ``--augment``."""
    name, before = parse_augment(options.augment)
    written = ", ".join(f"{key}={value!r}" for key, value in {**without_statistics(before), **values}.items())
    return replace(options, augment=f"{name}({written})")


def scale_of(augment: Augmentation, images: Annotated[Tensor, "b c h w"]) -> Scale:
    """Return the mean and std with which evaluation normalises images.

    An ``Augment`` has them as fields. For a user's own views they are measured: per channel, a line is fitted between
    the raw and the plain images, and accepted if it explains all values.

    Args:
        augment: The augmentation of the run.
        images: Some uint8 images [b, c, h, w] to measure with.

    Returns:
        ``{"mean": [...], "std": [...]}``, or ``{}`` if the plain images are not (x - mean) / std of the raw ones.
    """
    channels = images.shape[1]
    if isinstance(augment, Augment):
        return {"mean": list(augment.mean or (0.0,) * channels), "std": list(augment.std or (1.0,) * channels)}
    plain = augment.plain(images)
    if plain.shape != images.shape:
        return {}
    before, after = (part.double().transpose(0, 1).flatten(1) for part in (as_unit(images), plain))  # [c, b * h * w]
    apart = before - before.mean(1, keepdim=True)
    slope = (apart * after).sum(1) / apart.square().sum(1)
    intercept = after.mean(1) - slope * before.mean(1)
    fitted = slope[:, None] * before + intercept[:, None]
    if not bool((slope > 0).all()) or not torch.allclose(fitted, after, rtol=1e-4, atol=1e-4):
        return {}
    return {"mean": (-intercept / slope).tolist(), "std": (1.0 / slope).tolist()}
