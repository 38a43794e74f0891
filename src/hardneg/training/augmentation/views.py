"""Two views of each image: by the augmentation that a text names, by kornia, or by any callable.

    augment_for_text("auto", images)                        the preset for images of this shape
    augment_for_text("cifar(blur_probability=0.5)", images)  a preset with other values
    augment_for_text("kornia(crop_scale=(0.1, 1))", images)  the same values, by kornia's modules
    as_augmentation(call)                                   call(images, ids, epoch, seed) -> (view 1, view 2)

A callable should be a pure function of what it is given, or a resumed run sees other views: ``from_transform`` in
transforms.py seeds any transform of an image that way.
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
NAMES = ("auto", *PRESETS, KORNIA)
OPTIONS = tuple(one.name for one in fields(Augment) if one.name not in ("dtype", "channels_last"))


@runtime_checkable
class Augmentation(Protocol):
    """What training needs of an augmentation, such as ``Augment``."""

    def views(self, images: Images, ids: Ids, epoch: int, seed: int) -> tuple[Images, Images]:
        """Two views of uint8 images, as floats."""

    def plain(self, images: Images) -> Images:
        """The images as evaluation sees them, on the scale of the views."""

    def compiled(self) -> MakeImageViews:
        """``views``, faster where it can be."""


def as_unit(images: Images) -> Images:
    """Values in [0, 1]."""
    return images.to(torch.float32) / 255.0


@dataclass(frozen=True)
class AnyViews:
    """An augmentation of any callable: uint8 images [b, c, h, w], ids [b], epoch and seed in, two float batches out.

    Evaluation sees what ``shown`` makes of the images. Without it, that is what ``call.less_randomness`` gives, else
    values in [0, 1], and ``check_plain`` compares it with the views before a run.
    """

    call: MakeImageViews
    shown: Callable[[Images], Images] | None = None

    def views(self, images: Images, ids: Ids, epoch: int, seed: int) -> tuple[Images, Images]:
        check_images(images, ids)
        found = self.call(images, ids, epoch, seed)
        if len(found) != 2 or any(view.ndim != 4 or len(view) != len(images) for view in found):
            got = str([tuple(view.shape) for view in found])
            raise ArgumentError("Training", f"two views [{len(images)}, c, h, w] from a callable", got)
        if not all(view.is_floating_point() for view in found):
            raise ArgumentError("Training", "views as floats", str([str(view.dtype) for view in found]))
        return found

    __call__ = views

    def plain(self, images: Images) -> Images:
        if self.shown is not None:
            return self.shown(images)
        return getattr(self.call, "less_randomness", as_unit)(images)

    def compiled(self) -> MakeImageViews:
        """As they are: what a callable does is its own."""
        return self.views


def check_plain(augment: Augmentation, images: Images, ids: Ids, seed: int) -> None:
    """Raises if evaluation would see images on another scale, or of another size, than the views of a callable.

    Whoever says what evaluation sees is taken at their word.
    """
    if not isinstance(augment, AnyViews) or augment.shown is not None:
        return
    plain = augment.plain(images)
    mean, std = _scale_of(plain)
    for view in augment.views(images, ids, 0, seed):
        if view.shape != plain.shape:
            raise _not_as_trained(f"views {tuple(view.shape[1:])} and images {tuple(plain.shape[1:])} in evaluation")
        its_mean, its_std = _scale_of(view)
        ratio = its_std / std
        # Strong augmentations stay well within these; any usual Normalize is outside of one of them.
        if ((its_mean - mean).abs() > 0.75 * std).any() or (ratio >= 2.0).any() or (ratio <= 0.5).any():
            means, stds = (_in_words(pair) for pair in ((its_mean, mean), (its_std, std)))
            raise _not_as_trained(f"mean {means} and deviation {stds} of the channels in views and in evaluation")


def _scale_of(images: Images) -> tuple[Tensor, Tensor]:
    std, mean = torch.std_mean(images.double(), dim=(0, 2, 3))
    return mean, std.clamp(min=0.05)  # what is almost constant has no scale of its own


def _in_words(pair: tuple[Tensor, Tensor]) -> str:
    return " and ".join("/".join(f"{value:.2f}" for value in one.tolist()) for one in pair)


def _not_as_trained(got: str) -> ArgumentError:
    return ArgumentError(
        "train",
        "evaluation to see what training sees, less the randomness",
        got,
        fix="say what evaluation sees: from_transform(transform, plain=...), or a method plain(images) of the views, "
        "that takes uint8 images [b, c, h, w] and resizes and normalises them as the views are",
    )


def described(augment: Augmentation) -> str:
    """The augmentation in one line, the same in every process and on every device: for the record of a run."""
    if isinstance(augment, Augment):
        augment = replace(augment, channels_last=False)
    return re.sub(r" at 0x[0-9a-f]+", "", " ".join(repr(augment).split()))


def as_augmentation(views: MakeImageViews | Augmentation) -> Augmentation:
    """An augmentation as it is, or one of any callable; if that has a method ``plain``, evaluation sees its images."""
    if isinstance(views, Augmentation):
        return views
    if not callable(views):
        raise argument_error("train", "views(images, ids, epoch, seed) -> (view 1, view 2)", "views", views)
    return AnyViews(views, getattr(views, "plain", None))


@dataclass(frozen=True)
class OfBatches:
    """Views by kornia's modules, which draw for each row of a batch: as fast as whole batches are.

    Seeded from the seed, the epoch and the first id: repeatable for the same batches, but not the same for other
    batches of the same images, as ``Augment`` and ``from_transform`` are.
    """

    transform: nn.Module

    def __call__(self, images: Images, ids: Ids, epoch: int, seed: int) -> tuple[Images, Images]:
        word = int(uniforms(1, ids[:1], torch.zeros_like(ids[:1]), epoch, seed).item() * 2**24)
        self.transform.to(images.device)
        with torch.random.fork_rng([images.device] if images.is_cuda else []):
            torch.manual_seed(word)
            return self.transform(as_unit(images)), self.transform(as_unit(images))


def kornia_transform(augment: Augment, size: tuple[int, int], in_channels: int = 3) -> nn.Module:
    """The same augmentation from kornia's modules, with kornia's own randomness."""
    K = optional("kornia.augmentation", "kornia_transform", extra="vision")  # noqa: N806
    if augment.order != "random":
        raise argument_error("kornia_transform", 'the order "random", which is kornia\'s', "order", augment.order)
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
    """The preset, "auto" or "kornia" that a text names, and the values that are not the preset's.

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


def check_augment(text: str, in_channels: int | None = None) -> None:
    """Raises for a text that names no augmentation or, if they are known, one that does not fit the channels."""
    name, changes = parse_augment(text)
    if name == KORNIA:
        optional("kornia.augmentation", "train", extra="vision")
    mean = replace(PRESETS.get(name, Augment()), **changes).mean
    if in_channels is not None and mean and len(mean) != in_channels:
        fitting = [name for name, preset in PRESETS.items() if len(preset.mean) == in_channels]
        raise ArgumentError(
            "train",
            f"an --augment for images of {in_channels} channel{'s' * (in_channels > 1)}",
            f"augment={text!r}, which is for {len(mean)}",
            f"use auto or {' or '.join(fitting)}",
        )


def augment_for_text(text: str, images: Images, *, channels_last: bool = False) -> Augmentation:
    """The augmentation that a text names, for images like these."""
    in_channels, size = images.shape[1], (images.shape[2], images.shape[3])
    check_augment(text, in_channels)
    name, changes = parse_augment(text)
    augment = replace(PRESETS[name if name in PRESETS else preset_for(images)], channels_last=channels_last, **changes)
    if name == KORNIA:
        return AnyViews(OfBatches(kornia_transform(augment, size, in_channels)), augment.plain)
    return augment
