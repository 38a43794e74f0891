"""SimCLR's augmentation on the device: whole batches, parameters per image, few kernels when compiled.

Every parameter is a pure function of (seed, epoch, id, view), so that views do not depend on the order of batches or on
the number of workers or ranks. Images stay uint8 until here. Views by kornia or by any callable are in views.py.

``Augment.views`` draws the parameters (``draw``) and then transforms (``apply``, whose operations are in pixels.py).
Where images differ in size, workers cut the crops (``crops``) from the original pixels, and ``views`` does the rest.
``PRESETS`` at the end are the values for ``--augment``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, argument_error, check_range
from hardneg.core.keyed import uniforms
from hardneg.training.augmentation.pixels import (
    Crops,
    Images,
    Parameters,
    Planes,
    blur,
    grey_of,
    jitter,
    per_row,
    resample,
)

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

MakeImageViews = Callable[[Images, Tensor, int, int], tuple[Images, Images]]
Range = tuple[float, float]
Extent = int | Tensor
"""Height or width of all images, or of each."""

OPERATIONS = ("brightness", "contrast", "saturation", "hue")
_CROP_TRIES = 6
_BLOCK_PIXELS = 1 << 19  # transformed at a time on a CPU, 10 views of 224 x 224 pixels; found by trying powers of 2
_BILINEAR = 2  # PIL.Image.Resampling.BILINEAR


@dataclass(frozen=True)
class Augment:
    """Random crop, flip, colour jitter, greyscale and blur of SimCLR (Chen et al. 2020), with CIFAR's usual values.

    Images with one channel skip the colour operations. ``rotate``, ``zoom`` and ``shift`` are for images on a black
    background, since they show black at the edges.

    Attributes:
        crop_scale: Range of the crop's area, as a fraction of the image's.
        crop_ratio: Range of the crop's width / height, drawn uniformly in log space.
        flip_probability: Probability of a horizontal flip.
        rotate: Largest rotation, in degrees either way.
        zoom: Range of the magnification.
        shift: Largest shift either way, as a fraction of the size.
        jitter: Strengths of brightness, contrast, saturation and hue, as in torchvision's ColorJitter.
        jitter_probability: Probability of colour jitter.
        order: Order of the four jitter operations: "random" per image, as in torchvision, or "fixed".
        grey_probability: Probability of greyscale.
        blur_probability: Probability of Gaussian blur.
        blur_sigma: Range of the blur's standard deviation, in pixels.
        mean: Mean of each channel in [0, 1] for normalisation; empty for none.
        std: Standard deviation of each channel; as many as ``mean``.
        dtype: Type of the views.
        channels_last: Whether the views have the memory layout that convolutions on GPUs prefer.

    Example:
        >>> images = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8)
        >>> first, second = Augment().views(images, ids=torch.arange(8), epoch=0, seed=0)
        >>> first.shape, first.dtype
        (torch.Size([8, 3, 32, 32]), torch.float32)
    """

    crop_scale: Range = (0.2, 1.0)
    crop_ratio: Range = (3 / 4, 4 / 3)
    flip_probability: float = 0.5
    rotate: float = 0.0
    zoom: Range = (1.0, 1.0)
    shift: float = 0.0
    jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.1)
    jitter_probability: float = 0.8
    order: str = "random"
    grey_probability: float = 0.2
    blur_probability: float = 0.0
    blur_sigma: Range = (0.1, 2.0)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    dtype: torch.dtype = torch.float32
    channels_last: bool = False

    def __post_init__(self) -> None:
        for name in ("flip", "jitter", "grey", "blur"):
            check_range("Augment", f"{name}_probability", getattr(self, f"{name}_probability"), 0.0, 1.0)
        for name, low, high in [("crop_scale", 0.01, 1.0), ("crop_ratio", 0.1, 10.0), ("zoom", 0.1, 10.0)]:
            _check_pair(name, getattr(self, name), low, high)
        _check_pair("blur_sigma", self.blur_sigma, 0.01, 100.0)
        check_range("Augment", "rotate", self.rotate, 0.0, 180.0)
        check_range("Augment", "shift", self.shift, 0.0, 1.0)
        for name, length in (("jitter", 4), ("mean", None), ("std", None)):
            _check_numbers(name, getattr(self, name), length)
        for name, value, high in zip(OPERATIONS, self.jitter, (1.0, 1.0, 1.0, 0.5), strict=True):
            check_range("Augment", f"jitter ({name})", value, 0.0, high)
        if self.order not in ("random", "fixed"):
            raise argument_error("Augment", 'an order "random" or "fixed"', "order", self.order)
        if len(self.mean) != len(self.std) or any(value <= 0 for value in self.std):
            raise argument_error("Augment", "as many positive std as mean", "std", self.std)
        if not self.dtype.is_floating_point:
            raise argument_error("Augment", "a floating point dtype", "dtype", self.dtype)

    def views(
        self, images: Images | Crops, ids: Annotated[Tensor, "b"], epoch: int | Tensor, seed: int | Tensor
    ) -> tuple[Images, Images]:
        """Return two views of each image.

        Args:
            images: uint8 images [b, c, h, w], or the crops that ``crops`` has made for both views.
            ids: Id of each image [b], int64.
            epoch: The epoch, part of the random key.
            seed: The seed, part of the random key.

        Returns:
            Two batches [b, c, h, w] in ``dtype``, normalised.
        """
        check_images(images, ids)
        parameters = self._draw_both(ids, epoch, seed, (images.shape[-2], images.shape[-1]))
        first, second = self._apply_both(images, parameters).chunk(2)
        return first, second

    def crops(
        self, pictures: Sequence[Picture], ids: Annotated[Tensor, "b"], epoch: int, seed: int, size: tuple[int, int]
    ) -> Crops:
        """Cut the crops of both views from images of any size; the first part of ``views``, for workers.

        Pillow resizes them with antialiasing.

        Args:
            pictures: Decoded images in mode L or RGB.
            ids: Id of each image [b].
            epoch: The epoch, part of the random key.
            seed: The seed, part of the random key.
            size: Width and height of the crops.
        """
        widths, heights = torch.tensor([picture.size for picture in pictures], dtype=torch.float64).repeat(2, 1).T
        u = uniforms(2 * _CROP_TRIES + 20, ids.repeat(2), _view_of_rows(ids), epoch, seed).double()
        # In float64, since the last bit of vectorised float32 functions depends on the place in the batch.
        left, top, wide, high = _crop_boxes(u[:12], u[17:19], self.crop_scale, self.crop_ratio, heights, widths)
        boxes = torch.stack([left, top, left + wide, top + high]).float()
        boxes[2:] = torch.minimum(boxes[2:], torch.stack([widths, heights]).float())
        made = [
            np.asarray(picture.resize(size, _BILINEAR, box))
            for picture, box in zip([*pictures] * 2, boxes.T.tolist(), strict=True)
        ]
        stacked = torch.from_numpy(np.stack(made)).view(2, len(ids), size[1], size[0], -1)
        return stacked.permute(0, 1, 4, 2, 3).contiguous()

    def plain(self, images: Images) -> Images:
        """Return the images without augmentation, normalised like the views: for evaluation."""
        return self._finished(list((images.to(torch.float32) / 255.0).unbind(1)))

    def compiled(self, **options: Any) -> MakeImageViews:
        """Return ``views`` compiled as two graphs, one that draws parameters and one that transforms.

        Args:
            **options: Options of ``torch.compile``.
        """
        return _compiled(self, tuple(sorted(options.items())))

    def draw(
        self, ids: Annotated[Tensor, "b"], view: Annotated[Tensor, "b"], epoch: int | Tensor, seed: int | Tensor,
        size: tuple[int, int],
    ) -> Parameters:  # fmt: skip
        """Draw the parameters of each (id, view).

        Every parameter has its own slots of random numbers, so that changing one option does not change the others'
        draws.

        Args:
            ids: Id of each row [b].
            view: View of each row [b], 0 or 1.
            epoch: The epoch, part of the random key.
            seed: The seed, part of the random key.
            size: Height and width of the images.
        """
        u = uniforms(2 * _CROP_TRIES + 20, ids, view, epoch, seed)
        tries, (flip, angle, zoom), shift, u = u[:12], u[12:15], u[15:17], u[17:]
        place, factors, keys, (jitter, grey, blur, sigma) = u[:2], u[2:6], u[6:10], u[10:14]
        height, width = size
        strengths = (torch.where(jitter < self.jitter_probability, strength, 0.0) for strength in self.jitter)
        jittered = zip((1.0, 1.0, 1.0, 0.0), strengths, factors, strict=True)
        return Parameters(
            box=_crop_boxes(tries, place, self.crop_scale, self.crop_ratio, height, width),
            flip=flip < self.flip_probability,
            angle=math.radians(self.rotate) * _either_way(angle),
            zoom=_between(zoom, self.zoom),
            shift=torch.stack(
                [self.shift * side * _either_way(u) for side, u in zip((width, height), shift, strict=True)]
            ),
            factors=torch.stack([base + strength * _either_way(u) for base, strength, u in jittered]),
            stage=_random_order(keys) if self.order == "random" else _fixed_order(keys),
            grey=grey < self.grey_probability,
            sigma=torch.where(blur < self.blur_probability, _between(sigma, self.blur_sigma), 0.0),
        )

    def apply(self, images: Images, parameters: Parameters) -> Images:
        """Transform images with the given parameters, one set per row; on a CPU in blocks, to save memory."""
        rows = max(1, _BLOCK_PIXELS // (images.shape[2] * images.shape[3]))
        if images.device.type != "cpu" or torch.compiler.is_compiling() or len(images) <= rows:
            return self._transformed(images, parameters)
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        made = torch.empty(images.shape, dtype=self.dtype, device=images.device, memory_format=layout)
        for start in range(0, len(images), rows):
            block = slice(start, start + rows)
            made[block] = self._transformed(images[block], parameters.of(block))
        return made

    def _transformed(self, images: Images, parameters: Parameters) -> Images:
        planes = resample(images.to(torch.float32) / 255.0, parameters, warped=self.warps)
        if len(planes) == 3:
            if self.jitter_probability > 0.0 and any(self.jitter):
                planes = jitter(planes, parameters.factors, parameters.stage, random_order=self.order == "random")
            if self.grey_probability > 0.0:
                grey, chosen = grey_of(planes), per_row(parameters.grey)
                planes = [torch.where(chosen, grey, plane) for plane in planes]
        if self.blur_probability > 0.0:
            planes = blur(planes, parameters.sigma)
        return self._finished(planes)

    @property
    def warps(self) -> bool:
        """Whether rotation, zoom or shift is enabled."""
        return self.rotate > 0.0 or self.shift > 0.0 or self.zoom != (1.0, 1.0)

    def _draw_both(
        self, ids: Annotated[Tensor, "b"], epoch: int | Tensor, seed: int | Tensor, size: tuple[int, int]
    ) -> Parameters:
        return self.draw(ids.repeat(2), _view_of_rows(ids), epoch, seed, size)

    def _apply_both(self, images: Images | Crops, parameters: Parameters) -> Images:
        if images.ndim == 5:
            return self.apply(images.flatten(0, 1), parameters._replace(box=None))
        return self.apply(images.repeat(2, 1, 1, 1), parameters)

    def _finished(self, planes: Planes) -> Images:
        """Normalise and stack once, in the requested dtype and memory layout."""
        if self.mean:
            if len(self.mean) != len(planes):
                raise argument_error("Augment", f"a mean for each of {len(planes)} channels", "mean", self.mean)
            planes = [(plane - m) / s for plane, m, s in zip(planes, self.mean, self.std, strict=True)]
        planes = [plane.to(self.dtype) for plane in planes]
        return torch.stack(planes, dim=-1).permute(0, 3, 1, 2) if self.channels_last else torch.stack(planes, dim=1)


def preset_for(images: Any) -> str:
    """Return the preset for images [n, c, h, w]: "cifar" in colour, "tiny" up to 16 x 16 (digits), else "grey"."""
    if images.shape[1] == 3:
        return "cifar"
    return "tiny" if max(images.shape[2:]) <= 16 else "grey"


def _crop_boxes(tries: Tensor, place: Tensor, scale: Range, ratio: Range, height: Extent, width: Extent) -> Tensor:
    """Return the first of six random boxes that fits, uniform in area and log ratio; else the last, clipped to fit.

    torchvision tries ten times and rounds to whole pixels; here 2 in 100,000 crops of CIFAR are clipped.
    """
    area = _between(tries[0::2], scale) * (height * width)
    aspect = torch.exp(_between(tries[1::2], (math.log(ratio[0]), math.log(ratio[1]))))
    box_width, box_height = torch.sqrt(area * aspect), torch.sqrt(area / aspect)
    wide, high = box_width[-1].clamp(max=width), box_height[-1].clamp(max=height)
    for i in reversed(range(_CROP_TRIES)):
        fits = (box_width[i] <= width) & (box_height[i] <= height)
        wide, high = torch.where(fits, box_width[i], wide), torch.where(fits, box_height[i], high)
    return torch.stack([place[0] * (width - wide), place[1] * (height - high), wide, high])


def _view_of_rows(ids: Annotated[Tensor, "b"]) -> Annotated[Tensor, "2*b"]:
    """Return 0 for the first views of all images and 1 for the second views after them."""
    return torch.arange(2, device=ids.device).repeat_interleave(len(ids))


def _random_order(keys: Annotated[Tensor, "4 b"]) -> Annotated[Tensor, "4 b"]:
    """Return the rank of each key: a permutation, uniform up to ties, which are broken by position."""
    first = torch.arange(4, device=keys.device)
    earlier = (first[:, None] > first)[:, :, None] & (keys[:, None] == keys)
    return ((keys[:, None] > keys) | earlier).sum(1)


def _fixed_order(keys: Annotated[Tensor, "4 b"]) -> Annotated[Tensor, "4 b"]:
    return torch.arange(4, device=keys.device)[:, None].expand(4, keys.shape[1])


def _either_way(u: Tensor) -> Tensor:
    return 2.0 * u - 1.0


def _between(u: Tensor, low_high: Range) -> Tensor:
    return low_high[0] + (low_high[1] - low_high[0]) * u


@lru_cache(maxsize=8)
def _compiled(augment: Augment, options: tuple[tuple[str, Any], ...]) -> MakeImageViews:
    # Two graphs: fused into one, the compiler would redraw an image's parameters for each of its pixels.
    draw: Callable[..., Parameters] = torch.compile(augment._draw_both, fullgraph=True, **dict(options))
    apply = torch.compile(augment._apply_both, fullgraph=True, **dict(options))

    def views(images: Images, ids: Annotated[Tensor, "b"], epoch: int, seed: int) -> tuple[Images, Images]:
        check_images(images, ids)
        # As tensors: Python numbers would be constants, and every epoch would compile a new graph.
        key = [torch.full((), value, dtype=torch.int64, device=images.device) for value in (epoch, seed)]
        first, second = apply(images, draw(ids, *key, (images.shape[-2], images.shape[-1]))).chunk(2)
        return first, second

    return views


def _check_numbers(name: str, value: Any, length: int | None) -> None:
    numbers = isinstance(value, tuple) and all(isinstance(one, int | float) for one in value)
    if not numbers or len(value) != (len(value) if length is None else length):
        what = f"{name} to be a tuple of {'numbers' if length is None else f'{length} numbers'}"
        raise argument_error("Augment", what, name, value)


def _check_pair(name: str, value: Range, low: float, high: float) -> None:
    _check_numbers(name, value, 2)
    if not low <= value[0] <= value[1] <= high:
        raise argument_error("Augment", f"{name} to be (low, high) within [{low}, {high}]", name, value)


def check_images(images: Tensor, ids: Tensor) -> None:
    """Raise unless images are uint8 [b, c, h, w], or crops [2, b, c, h, w], with one id per image."""
    if images.ndim not in (4, 5) or images.dtype != torch.uint8 or ids.shape != images.shape[images.ndim - 4 :][:1]:
        shapes = f"images={tuple(images.shape)} of {images.dtype} and ids={tuple(ids.shape)}"
        raise ArgumentError("Augment", "uint8 images [b, c, h, w] and one id per image", str(shapes))


CIFAR = Augment(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))
GREY = replace(CIFAR, mean=(0.5,), std=(0.25,))
TINY = Augment(
    crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0), flip_probability=0.0,
    rotate=10.0, zoom=(0.9, 1.1), shift=0.0625, mean=(0.5,), std=(0.25,),
)  # fmt: skip
IMAGENET = replace(
    CIFAR, crop_scale=(0.08, 1.0), jitter=(0.8, 0.8, 0.8, 0.2), blur_probability=0.5,
    mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225),
)  # fmt: skip
"""SimCLR's values for ImageNet."""
PRESETS = {"cifar": CIFAR, "grey": GREY, "tiny": TINY, "imagenet": IMAGENET}
