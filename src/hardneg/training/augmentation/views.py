"""Two views of each image: from the text of ``--augment``, by kornia, or by any callable.

    augment_for_text("auto", images)                        the preset for images of this shape
    augment_for_text("cifar(blur_probability=0.5)", images)  a preset with other values
    augment_for_text("kornia(crop_scale=(0.1, 1))", images)  the same values, by kornia's modules
    as_augmentation(call)                                   call(images, ids, epoch, seed) -> (view 1, view 2)

A callable should be a pure function of its arguments, or a resumed run sees different views: ``from_transform`` in
transforms.py seeds any transform of an image that way.

Read ``Augmentation``, the protocol that training uses, then ``augment_for_text`` at the end. ``ImageData.prepared``
(data/images.py) calls ``augment_for_text`` or ``as_augmentation``; ``check_plain`` compares a user's views with what
evaluation sees before a run starts.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from hardneg.core.errors import ArgumentError, GrammarError, UnknownName, argument_error, optional
from hardneg.core.keyed import uniforms
from hardneg.training.augmentation.augment import PRESETS, Augment, MakeImageViews, check_images, preset_for
from hardneg.training.augmentation.pixels import Images, blur_radius

Ids = Annotated[Tensor, "b"]

KORNIA = "kornia"
OF_DATA = "data"
"""Value of ``mean`` that stands for mean and std of the training images, as in ``"imagenet(mean='data')"``."""
NAMES = ("auto", *PRESETS, KORNIA)
OPTIONS = tuple(one.name for one in fields(Augment) if one.name not in ("dtype", "channels_last"))


@runtime_checkable
class Augmentation(Protocol):
    """The methods that training needs of an augmentation, such as ``Augment``."""

    def views(self, images: Images, ids: Ids, epoch: int, seed: int) -> tuple[Images, Images]:
        """Return two float views of uint8 images [b, c, h, w] with ids [b]."""

    def plain(self, images: Images) -> Images:
        """Return the images as evaluation sees them, on the scale of the views."""

    def compiled(self) -> MakeImageViews:
        """Return ``views``, or a faster equivalent."""


def as_unit(images: Images) -> Images:
    """Convert uint8 images to float32 in [0, 1]."""
    return images.to(torch.float32) / 255.0


@dataclass(frozen=True)
class AnyViews:
    """An augmentation by any callable: uint8 images [b, c, h, w], ids [b], epoch and seed in, two float batches out.

    Attributes:
        call: The callable.
        shown: Makes the images that evaluation sees. Without it these are ``call.less_randomness`` of the images if
            there is such a method, else values in [0, 1]; ``check_plain`` compares them with the views before a run.
    """

    call: MakeImageViews
    shown: Callable[[Images], Images] | None = None

    def views(self, images: Images, ids: Ids, epoch: int, seed: int) -> tuple[Images, Images]:
        """Return the callable's two views.

        Args:
            images: uint8 images [b, c, h, w].
            ids: Id of each image [b].
            epoch: The epoch.
            seed: The seed.

        Raises:
            ArgumentError: If the callable does not return two float batches of b images.
        """
        if images.ndim == 5:  # what ``crops`` has returned
            return images[0], images[1]
        check_images(images, ids)
        found = self.call(images, ids, epoch, seed)
        if len(found) != 2 or any(view.ndim != 4 or len(view) != len(images) for view in found):
            got = str([tuple(view.shape) for view in found])
            raise ArgumentError("Training", f"two views [{len(images)}, c, h, w] from a callable", got)
        if not all(view.is_floating_point() for view in found):
            raise ArgumentError("Training", "views as floats", str([str(view.dtype) for view in found]))
        return found

    __call__ = views

    @property
    def crops(self) -> Any:
        """The callable's method ``crops``, which makes views of PIL images in workers, or None."""
        return getattr(self.call, "crops", None)

    def plain(self, images: Images) -> Images:
        """Return the images as evaluation sees them."""
        if self.shown is not None:
            return self.shown(images)
        return getattr(self.call, "less_randomness", as_unit)(images)

    def compiled(self) -> MakeImageViews:
        """Return ``views`` uncompiled: arbitrary code may not compile."""
        return self.views


def check_plain(augment: Augmentation, images: Images, ids: Ids, seed: int) -> None:
    """Raise if evaluation would see images of another scale or size than the views of a callable.

    Views that define ``plain`` themselves are trusted.

    Args:
        augment: The augmentation of the run.
        images: Some uint8 images [b, c, h, w].
        ids: Their ids [b].
        seed: The seed of the run.

    Raises:
        ArgumentError: If shapes differ, a channel's mean differs by more than 0.75 of its deviation, or its deviation
            by a factor of 2 or more.
    """
    if not isinstance(augment, AnyViews) or augment.shown is not None:
        return
    plain = augment.plain(images)
    mean, std = _scale_of(plain)
    for view in augment.views(images, ids, 0, seed):
        if view.shape != plain.shape:
            raise _not_as_trained(f"views {tuple(view.shape[1:])} and evaluation images {tuple(plain.shape[1:])}")
        its_mean, its_std = _scale_of(view)
        ratio = its_std / std
        # Strong augmentations stay well within these limits; any usual Normalize exceeds one of them.
        if ((its_mean - mean).abs() > 0.75 * std).any() or (ratio >= 2.0).any() or (ratio <= 0.5).any():
            means, stds = (_in_words(pair) for pair in ((its_mean, mean), (its_std, std)))
            raise _not_as_trained(f"channel means {means} and deviations {stds} in views and in evaluation")


def _scale_of(images: Images) -> tuple[Tensor, Tensor]:
    std, mean = torch.std_mean(images.double(), dim=(0, 2, 3))
    return mean, std.clamp(min=0.05)  # the deviation of an almost constant channel is meaningless


def _in_words(pair: tuple[Tensor, Tensor]) -> str:
    return " and ".join("/".join(f"{value:.2f}" for value in one.tolist()) for one in pair)


def _not_as_trained(got: str) -> ArgumentError:
    return ArgumentError(
        "train",
        "evaluation images with the scale and size of the views",
        got,
        fix="define what evaluation sees: from_transform(transform, plain=...), or a method plain(images) of your "
        "views, which resizes and normalises uint8 images [b, c, h, w] like the views",
    )


def described(augment: Augmentation) -> str:
    """Describe the augmentation in one line for the record of a run, the same in every process and on every device."""
    if isinstance(augment, Augment):
        augment = replace(augment, channels_last=False)
    return re.sub(r" at 0x[0-9a-f]+", "", " ".join(repr(augment).split()))


def as_augmentation(views: MakeImageViews | Augmentation) -> Augmentation:
    """Return an augmentation unchanged, or wrap a callable; its method ``plain``, if any, defines what evaluation sees.

    Raises:
        ArgumentError: If it is neither.
    """
    if isinstance(views, Augmentation):
        return views
    if not callable(views):
        raise argument_error("train", "views(images, ids, epoch, seed) -> (view 1, view 2)", "views", views)
    return AnyViews(views, getattr(views, "plain", None))


@dataclass(frozen=True)
class OfBatches:
    """Views by kornia's modules, which draw parameters for each row of a batch and process whole batches.

    Seeded by the seed, the epoch and the first id: repeatable for the same batches, but unlike ``Augment`` and
    ``from_transform`` an image's views change with its batch.

    Attributes:
        transform: Kornia's modules.
    """

    transform: nn.Module

    def __call__(self, images: Images, ids: Ids, epoch: int, seed: int) -> tuple[Images, Images]:
        """Return two views of uint8 images [b, c, h, w].

        Args:
            images: The images.
            ids: Id of each image [b]; the first one is part of the random key.
            epoch: The epoch, part of the random key.
            seed: The seed, part of the random key.
        """
        word = int(uniforms(1, ids[:1], torch.zeros_like(ids[:1]), epoch, seed).item() * 2**24)
        self.transform.to(images.device)
        with torch.random.fork_rng([images.device] if images.is_cuda else []):
            torch.manual_seed(word)
            return self.transform(as_unit(images)), self.transform(as_unit(images))


def kornia_transform(augment: Augment, size: tuple[int, int], in_channels: int = 3) -> nn.Module:
    """Build the augmentation from kornia's modules, with kornia's own randomness.

    Args:
        augment: The values of the augmentation.
        size: Height and width of the images.
        in_channels: 3 includes the colour operations.

    Raises:
        ArgumentError: If the order of the colour operations is fixed, which kornia does not support.
    """
    K = optional("kornia.augmentation", "kornia_transform", extra="vision")  # noqa: N806
    if augment.order != "random":
        raise argument_error("kornia_transform", 'order="random", the only one of kornia', "order", augment.order)
    steps: list[Any] = [
        K.RandomResizedCrop(size, augment.crop_scale, augment.crop_ratio, align_corners=False),
        K.RandomHorizontalFlip(p=augment.flip_probability),
    ]
    if augment.warps:
        shift = (augment.shift, augment.shift)  # without align_corners, kornia 0.7 shifts by size / (size - 1) as much
        steps.append(K.RandomAffine(augment.rotate, shift, augment.zoom, p=1.0, align_corners=True))
    if in_channels == 3:
        steps.append(K.ColorJitter(*augment.jitter, p=augment.jitter_probability))
        steps.append(K.RandomGrayscale(p=augment.grey_probability))
    if augment.blur_probability > 0.0:
        kernel = tuple(2 * blur_radius(side) + 1 for side in size)
        steps.append(K.RandomGaussianBlur(kernel, augment.blur_sigma, p=augment.blur_probability))
    if augment.mean:
        steps.append(K.Normalize(torch.tensor(augment.mean), torch.tensor(augment.std)))
    return nn.Sequential(*steps)


def parse_augment(text: str) -> tuple[str, dict[str, Any]]:
    """Parse ``--augment`` into its name (a preset, "auto" or "kornia") and changed values.

    Raises:
        UnknownName: If the name or an option is unknown.
        GrammarError: If the text cannot be parsed.

    Example:
        >>> parse_augment("cifar(crop_scale=(0.08, 1.0), blur_probability=0.5)")
        ('cifar', {'crop_scale': (0.08, 1.0), 'blur_probability': 0.5})
    """
    name, bracket, _ = text.strip().partition("(")
    if name not in NAMES:
        raise UnknownName(text, NAMES)
    if not bracket:
        return name, {}
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("options are written as name=value")
        changes = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        example = f"{name}(blur_probability=0.5)"
        raise GrammarError("An augmentation", f"options such as {example!r}", f"{text!r} ({error})") from None
    for option in changes:
        if option not in OPTIONS:
            raise UnknownName(option, OPTIONS, f"in {name}")
    return name, changes


def without_statistics(changes: dict[str, Any]) -> dict[str, Any]:
    """Return the changed values without mean="data" and std="data", for which ``with_statistics`` puts numbers."""
    return {name: value for name, value in changes.items() if not (name in ("mean", "std") and value == OF_DATA)}


def check_augment(text: str, in_channels: int | None = None) -> None:
    """Raise if a text does not name an augmentation or does not match the channels.

    Args:
        text: The value of ``--augment``.
        in_channels: Channels of the images, if known.

    Raises:
        ArgumentError: If the preset normalises another number of channels.
    """
    name, changes = parse_augment(text)
    if name == KORNIA:
        optional("kornia.augmentation", "train", extra="vision")
    mean = replace(PRESETS.get(name, Augment()), **without_statistics(changes)).mean
    if in_channels is not None and mean and len(mean) != in_channels:
        fitting = [name for name, preset in PRESETS.items() if len(preset.mean) == in_channels]
        raise ArgumentError(
            "train",
            f"an --augment for images of {in_channels} channel{'s' * (in_channels > 1)}",
            f"augment={text!r}, which is for {len(mean)}",
            f"use auto or {' or '.join(fitting)}",
        )


class HasShape(Protocol):
    """Images of which only the shape is needed: a tensor, or images that are not decoded yet."""

    @property
    def shape(self) -> Any:
        """The shape [n, c, h, w]."""


def augment_for_text(text: str, images: HasShape, *, channels_last: bool = False) -> Augmentation:
    """Return the augmentation of a text, for images of this shape.

    Args:
        text: The value of ``--augment``.
        images: Images [n, c, h, w].
        channels_last: Whether the views have the memory layout that convolutions on GPUs prefer.
    """
    in_channels, size = images.shape[1], (images.shape[2], images.shape[3])
    check_augment(text, in_channels)
    name, changes = parse_augment(text)
    preset = PRESETS[name if name in PRESETS else preset_for(images)]
    augment = replace(preset, channels_last=channels_last, **without_statistics(changes))
    if name == KORNIA:
        return AnyViews(OfBatches(kornia_transform(augment, size, in_channels)), augment.plain)
    return augment
