"""Views by any callable on one image, such as torchvision's, seeded by (seed, epoch, id, view)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from hardneg.core.errors import ArgumentError, argument_error
from hardneg.core.keyed import uniforms
from hardneg.training.augmentation.pixels import Images
from hardneg.training.augmentation.views import AnyViews, Ids, as_unit

Transform = Callable[[Tensor], Tensor]

PROBES, DRAWS = 16, 256
"""Images and draws that show whether a step of a transform is random: one that acts in 5 % of its calls is found to be
deterministic in one of 200,000 cases."""


def from_transform(
    transform: Transform,
    plain: Callable[[Images], Images] | None = None,
    *,
    seed: Callable[[int], object] | None = None,
) -> AnyViews:
    """Views from any callable on one float image [c, h, w] in [0, 1].

    It may draw from torch, NumPy's global generator and ``random``: all are seeded from (seed, epoch, id, view) for
    each call, so that a view is the same in every batch, and set back afterwards. A transform with a generator of its
    own, as those of albumentations from 1.4.19 on, needs ``seed``, which is called with a whole number below 2**32
    before each call: ``seed=compose.set_random_seed``. Without it, the first batch raises.

    Evaluation sees ``plain`` of the uint8 images [b, c, h, w]. Without it, it sees the steps of the transform that are
    not random (of a ``Compose`` or ``nn.Sequential``, one by one), such as a Normalize at its end; a run stops if that
    is on another scale, or of another size, than the views.

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
    """The views of a transform of one image, and its steps that are not random."""

    transform: Transform
    seed: Callable[[int], object] | None = field(default=None, repr=False)
    _kept: list[Transform] | None = field(default=None, init=False, repr=False, compare=False)
    _repeats: bool = field(default=False, init=False, repr=False, compare=False)

    def __call__(self, images: Images, ids: Ids, epoch: int, seed: int) -> tuple[Images, Images]:
        _to(self.transform, images.device)
        with _random_state_kept(images.device):
            if not self._repeats:
                self._check_repeats(as_unit(images[:PROBES]))
                object.__setattr__(self, "_repeats", True)
            first, second = (self._view(images, ids, view, epoch, seed) for view in range(2))
        return first, second

    def _view(self, images: Images, ids: Ids, view: int, epoch: int, seed: int) -> Images:
        words = (uniforms(2, ids, torch.full_like(ids, view), epoch, seed).double() * 2**24).long()
        seeds = ((words[0] << 24) + words[1]).tolist()
        made = []
        for image, word in zip(as_unit(images), seeds, strict=True):
            made.append(self._seeded(image, word))
        return _stacked(made)

    def _seeded(self, image: Tensor, word: int) -> Tensor:
        _seed_all(word, image.device)
        if self.seed is not None:
            self.seed(word % 2**32)
        return _applied(self.transform, image)

    def _check_repeats(self, probes: Images) -> None:
        """Raises unless the transform gives the same view again for the same seed."""
        for word in range(max(1, DRAWS // (2 * len(probes)))):
            for image in probes:
                first, second = self._seeded(image, word), self._seeded(image, word)
                if first.shape != second.shape or not torch.allclose(first, second, equal_nan=True):
                    raise ArgumentError(
                        "from_transform",
                        "a transform that gives the same view for the same seed",
                        "two views of one image, since it draws from a generator of its own",
                        fix="draw from torch, numpy.random or random; or pass what seeds it, such as "
                        "from_transform(transform, seed=compose.set_random_seed) for albumentations",
                    )

    def less_randomness(self, images: Images) -> Images:
        """What the steps that are not random make of the images."""
        if self._kept is None:
            object.__setattr__(self, "_kept", _not_random(self.transform, as_unit(images[:PROBES])))
        found = as_unit(images)
        for step in self._kept or []:
            found = _stacked([_applied(step, image) for image in found])
        return found


def _not_random(transform: Transform, images: Images) -> list[Transform]:
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
                    "to know what evaluation sees",
                    f"{type(error).__name__} from {name} without the random steps before it ({error})",
                    fix="from_transform(transform, plain=...) says it, of uint8 images [b, c, h, w]",
                ) from error
            kept += [] if random_step else [step]
    return kept


def _is_random(step: Transform, probes: Sequence[Tensor]) -> bool:
    device = probes[0].device
    _seed_all(0, device)
    usual = [_applied(step, image) for image in probes]
    for word in range(1, max(2, DRAWS // len(probes))):
        _seed_all(word, device)
        if not all(torch.equal(_applied(step, image), first) for image, first in zip(probes, usual, strict=True)):
            return True
    return False


def _steps_of(transform: Transform) -> list[Transform]:
    """Of a sequence. By its name: torchvision need not be there, and its RandomApply has ``transforms``, too."""
    if type(transform) is nn.Sequential:
        parts = list(transform)
    elif type(transform).__name__ == "Compose":
        parts = list(getattr(transform, "transforms", []))
    else:
        return [transform]
    return [step for part in parts for step in _steps_of(part)]


def _applied(transform: Transform, image: Tensor) -> Tensor:
    made = transform(image.clone())  # it may work in place
    if isinstance(made, Tensor) and made.ndim == 4 and len(made) == 1:  # kornia makes batches of images
        made = made[0]
    if not isinstance(made, Tensor) or made.ndim != 3:
        got = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
        raise ArgumentError("from_transform", "a transform that gives an image [c, h, w] for an image", f"{got}")
    return made


def _stacked(images: list[Tensor]) -> Images:
    if any(image.shape != images[0].shape for image in images):
        shapes = sorted({tuple(image.shape) for image in images})
        raise ArgumentError("from_transform", "a transform whose images have one size", f"{shapes}")
    return torch.stack(images)


def _to(transform: Transform, device: torch.device) -> None:
    if isinstance(transform, nn.Module):
        transform.to(device)


def _seed_all(word: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(word)  # torch.manual_seed looks for every kind of device, which takes 1 ms
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(word)
    np.random.seed(word % 2**32)
    random.seed(word)


@contextmanager
def _random_state_kept(device: torch.device) -> Iterator[None]:
    """Sets the generators of torch, NumPy and ``random`` back to where they were."""
    numpy_state, state = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(state)
