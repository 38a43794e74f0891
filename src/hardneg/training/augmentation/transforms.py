"""Views from any transform of a single image, such as torchvision's, seeded by (seed, epoch, id, view).

``from_transform`` is public (``hardneg.training.augmentation``); ``PerImage`` seeds and applies the transform, checks
that it is repeatable, and finds its deterministic steps for evaluation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from hardneg.core.errors import ArgumentError, argument_error
from hardneg.core.keyed import uniforms
from hardneg.training.augmentation.pixels import Crops, Images
from hardneg.training.augmentation.views import AnyViews, Ids, as_unit

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

Transform = Callable[[Tensor], Tensor]

PROBES, DRAWS = 16, 256
"""Images and draws that test whether a step of a transform is random: a step that acts in 5 % of its calls passes as
deterministic in one of 200,000 cases."""


def from_transform(
    transform: Transform,
    plain: Callable[[Images], Images] | None = None,
    *,
    seed: Callable[[int], object] | None = None,
) -> AnyViews:
    """Make views from any callable on one float image [c, h, w] in [0, 1].

    The transform may draw from torch, NumPy's global generator and ``random``: all are seeded from (seed, epoch, id,
    view) for each call, so that a view is the same in every batch, and restored afterwards.

    Args:
        transform: Callable of an image [c, h, w] that returns an image.
        plain: Makes the images that evaluation sees from uint8 images [b, c, h, w]. By default these are the steps of
            the transform that are not random (of a ``Compose`` or ``nn.Sequential``, one by one), such as a final
            Normalize; a run stops if their scale or size differs from the views'.
        seed: Called with an integer below 2**32 before each image, for transforms with their own generator, such as
            albumentations from 1.4.19 on: ``seed=compose.set_random_seed``. Without it, the first batch raises.

    Returns:
        An augmentation to pass as ``views`` to a recipe.

    Raises:
        ArgumentError: If the transform is not callable; while drawing views, if it is not repeatable or returns images
            of different sizes.

    Example:
        >>> images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
        >>> views = from_transform(lambda image: image + 0.1 * torch.randn_like(image))
        >>> first, second = views.views(images, ids=torch.arange(4), epoch=0, seed=0)
        >>> alone, _ = views.views(images[2:3], ids=torch.tensor([2]), epoch=0, seed=0)
        >>> torch.equal(alone[0], first[2])
        True
    """
    if not callable(transform):
        raise argument_error("from_transform", "a callable on one float image [c, h, w]", "transform", transform)
    return AnyViews(PerImage(transform, seed), plain)


@dataclass(frozen=True)
class PerImage:
    """Views by a transform of one image, and the transform's deterministic steps.

    Attributes:
        transform: Callable of an image [c, h, w].
        seed: Seeds the transform's own generator, if it has one.
    """

    transform: Transform
    seed: Callable[[int], object] | None = field(default=None, repr=False)
    _kept: list[Transform] | None = field(default=None, init=False, repr=False, compare=False)
    _repeats: bool = field(default=False, init=False, repr=False, compare=False)

    def __call__(self, images: Images | Sequence[Tensor], ids: Ids, epoch: int, seed: int) -> tuple[Images, Images]:
        """Return two views of each image, each seeded by (seed, epoch, id, view).

        Args:
            images: uint8 images [b, c, h, w], or a list of images [c, h, w] of different sizes.
            ids: Id of each image [b].
            epoch: The epoch.
            seed: The seed.

        Raises:
            ArgumentError: On the first batch, if the transform is not repeatable.
        """
        _to(self.transform, images[0].device)
        with _random_state_kept(images[0].device):
            if not self._repeats:
                self._check_repeats([as_unit(image) for image in images[:PROBES]])
                object.__setattr__(self, "_repeats", True)
            first, second = (self._view(images, ids, view, epoch, seed) for view in range(2))
        return first, second

    def crops(self, pictures: Sequence[Picture], ids: Ids, epoch: int, seed: int, size: tuple[int, int]) -> Crops:
        """Return both views of images of any size, in workers.

        Args:
            pictures: Decoded images in mode L or RGB.
            ids: Id of each image [b].
            epoch: The epoch.
            seed: The seed.
            size: Unused: the transform decides the size of the views.
        """
        arrays = (np.array(picture) for picture in pictures)
        images = [torch.from_numpy(array).view(*array.shape[:2], -1).permute(2, 0, 1) for array in arrays]
        return torch.stack(self(images, ids, epoch, seed))

    def _view(self, images: Images | Sequence[Tensor], ids: Ids, view: int, epoch: int, seed: int) -> Images:
        words = (uniforms(2, ids, torch.full_like(ids, view), epoch, seed).double() * 2**24).long()
        seeds = ((words[0] << 24) + words[1]).tolist()
        return _stacked([self._seeded(as_unit(image), word) for image, word in zip(images, seeds, strict=True)])

    def _seeded(self, image: Tensor, word: int) -> Tensor:
        _seed_all(word, image.device)
        if self.seed is not None:
            self.seed(word % 2**32)
        return _applied(self.transform, image)

    def _check_repeats(self, probes: Sequence[Tensor]) -> None:
        """Raise unless the transform returns the same view again for the same seed."""
        for word in range(max(1, DRAWS // (2 * len(probes)))):
            for image in probes:
                first, second = self._seeded(image, word), self._seeded(image, word)
                if first.shape != second.shape or not torch.allclose(first, second, equal_nan=True):
                    raise ArgumentError(
                        "from_transform",
                        "a transform that returns the same view for the same seed",
                        "two different views, since it draws from its own generator",
                        fix="draw from torch, numpy.random or random, or pass a function that seeds it, such as "
                        "from_transform(transform, seed=compose.set_random_seed) for albumentations",
                    )

    def less_randomness(self, images: Images) -> Images:
        """Apply the steps of the transform that are not random to uint8 images [b, c, h, w].

        Raises:
            ArgumentError: If a step fails without the random steps before it.
        """
        if self._kept is None:
            object.__setattr__(self, "_kept", _not_random(self.transform, as_unit(images[:PROBES])))
        found = as_unit(images)
        for step in self._kept or []:
            found = _stacked([_applied(step, image) for image in found])
        return found


def _not_random(transform: Transform, images: Images) -> list[Transform]:
    """Return the steps of a transform that give the same result under different seeds."""
    kept, probes = [], list(images)
    _to(transform, images.device)
    with _random_state_kept(images.device):
        for step in _steps_of(transform):
            try:
                random_step = _is_random(step, probes)
                probes = probes if random_step else [_applied(step, image) for image in probes]
            except Exception as error:
                name = getattr(step, "__name__", type(step).__name__)
                raise ArgumentError(
                    "from_transform",
                    "deterministic steps that also work without the random ones, for evaluation",
                    f"{type(error).__name__} from {name} without the random steps before it ({error})",
                    fix="pass from_transform(transform, plain=...), a function of uint8 images [b, c, h, w]",
                ) from error
            kept += [] if random_step else [step]
    return kept


def _is_random(step: Transform, probes: Sequence[Tensor]) -> bool:
    """Return whether a step's result differs between seeds for one of the probes."""
    device = probes[0].device
    _seed_all(0, device)
    usual = [_applied(step, image) for image in probes]
    for word in range(1, max(2, DRAWS // len(probes))):
        _seed_all(word, device)
        if not all(torch.equal(_applied(step, image), first) for image, first in zip(probes, usual, strict=True)):
            return True
    return False


def _steps_of(transform: Transform) -> list[Transform]:
    """Return the steps of a sequence, recursively; anything else is one step.

    ``Compose`` is recognised by name, since torchvision may not be installed and its RandomApply also has
    ``transforms``.
    """
    if type(transform) is nn.Sequential:
        parts = list(transform)
    elif type(transform).__name__ == "Compose":
        parts = list(getattr(transform, "transforms", []))
    else:
        return [transform]
    return [step for part in parts for step in _steps_of(part)]


def _applied(transform: Transform, image: Tensor) -> Tensor:
    made = transform(image.clone())  # a transform may work in place
    if isinstance(made, Tensor) and made.ndim == 4 and len(made) == 1:  # kornia makes batches of images
        made = made[0]
    if not isinstance(made, Tensor) or made.ndim != 3:
        got = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
        raise ArgumentError("from_transform", "a transform that returns an image [c, h, w]", f"{got}")
    return made


def _stacked(images: list[Tensor]) -> Images:
    if any(image.shape != images[0].shape for image in images):
        shapes = sorted({tuple(image.shape) for image in images})
        raise ArgumentError("from_transform", "a transform that returns images of one size", f"{shapes}")
    return torch.stack(images)


def _to(transform: Transform, device: torch.device) -> None:
    if isinstance(transform, nn.Module):
        transform.to(device)


def _seed_all(word: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(word)  # torch.manual_seed checks every kind of device, which takes 1 ms
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(word)
    np.random.seed(word % 2**32)
    random.seed(word)


@contextmanager
def _random_state_kept(device: torch.device) -> Iterator[None]:
    """Restore the generators of torch, NumPy and ``random`` afterwards."""
    numpy_state, state = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(state)
