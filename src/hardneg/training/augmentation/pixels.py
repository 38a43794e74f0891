"""The image operations of augmentation: float batches in [0, 1], one set of parameters per row, deterministic.

``Augment.draw`` makes the ``Parameters``; ``Augment.apply`` calls ``resample``, ``jitter``, ``grey_of`` and ``blur`` in
this order. All are written on separate channels (``Planes``), which compilers fuse into few kernels.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grid_sample, pad

Images = Annotated[Tensor, "b c h w"]
Crops = Annotated[Tensor, "2 b c h w"]
"""The crops of both views of a batch."""
Planes = list[Annotated[Tensor, "b h w"]]
"""Separate channels: stacking them between operations would prevent a compiler from fusing these."""

_CACHED_PIXELS = 1 << 16
"""Pixels of a block of images that is jittered on a CPU; found by trying powers of 2 for 32 to 224 pixels a side."""
_GREY = (0.299, 0.587, 0.114)  # ITU-R 601, as in kornia; torchvision rounds the first to 0.2989


class Parameters(NamedTuple):
    """The parameters drawn for each row; rows are images, or the first views of all images and then the second.

    Attributes:
        box: Left, top, width and height of the crop in pixels, [4, b]; None if the images are crops already.
        flip: Whether to flip horizontally, bool [b].
        angle: Rotation in radians, [b].
        zoom: Magnification, [b].
        shift: Shift to the right and down in pixels, [2, b].
        factors: Brightness, contrast and saturation (1 changes nothing) and hue (in turns), [4, b].
        stage: Position, 0 to 3, at which each of the four is applied, [4, b].
        grey: Whether to convert to grey, bool [b].
        sigma: Standard deviation of the blur in pixels, [b]; 0 leaves the image sharp.
    """

    box: Annotated[Tensor, "4 b"] | None
    flip: Annotated[Tensor, "b"]
    angle: Annotated[Tensor, "b"]
    zoom: Annotated[Tensor, "b"]
    shift: Annotated[Tensor, "2 b"]
    factors: Annotated[Tensor, "4 b"]
    stage: Annotated[Tensor, "4 b"]
    grey: Annotated[Tensor, "b"]
    sigma: Annotated[Tensor, "b"]

    def of(self, rows: slice) -> Parameters:
        """Return the parameters of some rows."""
        return Parameters(*(None if one is None else one[..., rows] for one in self))  # type: ignore[arg-type]


def resample(pixels: Images, parameters: Parameters, *, warped: bool) -> Planes:
    """Crop, flip and, if ``warped``, rotate, zoom and shift, in one bilinear resampling to the size of the input.

    Outside the image, a crop repeats its edge, as cropping and then resizing does; a warp shows black.

    Args:
        pixels: Images [b, c, h, w] in [0, 1].
        parameters: One set per row.
        warped: Whether to rotate, zoom and shift.

    Returns:
        The channels, each [b, h, w].
    """
    height, width = pixels.shape[2:]
    if parameters.box is None and not warped:
        return list(torch.where(per_row(parameters.flip)[:, None], pixels.flip(3), pixels).unbind(1))
    whole = pixels.new_tensor([[0.0], [0.0], [width], [height]]).expand(4, len(pixels))
    left, top, box_width, box_height = (per_row(side) for side in (whole if parameters.box is None else parameters.box))
    x = (torch.arange(width, device=pixels.device) + 0.5 - 0.5 * width).expand(1, height, width)
    y = (torch.arange(height, device=pixels.device)[:, None] + 0.5 - 0.5 * height).expand(1, height, width)
    x = torch.where(per_row(parameters.flip), -x, x)
    if warped:
        cos, sin = (per_row(f(parameters.angle) / parameters.zoom) for f in (torch.cos, torch.sin))
        right, down = (per_row(side) for side in parameters.shift)
        x, y = cos * (x - right) + sin * (y - down), cos * (y - down) - sin * (x - right)
    column = left + (x / width + 0.5) * box_width - 0.5
    row = top + (y / height + 0.5) * box_height - 0.5
    if not warped:
        column = column.clamp(left, left + box_width - 1.0)
        row = row.clamp(top, top + box_height - 1.0)
    shape = (len(pixels), height, width)
    scaled = [(2.0 * column + 1.0) / width - 1.0, (2.0 * row + 1.0) / height - 1.0]
    grid = torch.stack([axis.expand(shape) for axis in scaled], dim=-1)
    return list(grid_sample(pixels, grid, padding_mode="zeros" if warped else "border", align_corners=False).unbind(1))


def jitter(
    planes: Planes, factors: Annotated[Tensor, "4 b"], stage: Annotated[Tensor, "4 b"], *, random_order: bool = True
) -> Planes:
    """Apply brightness, contrast, saturation and hue, each at its own stage, clamping to [0, 1] after each.

    The first three are blends, f x + (1 - f) target, with black, the image's mean grey, and its grey.

    Args:
        planes: Red, green and blue, each [b, h, w].
        factors: Strengths [4, b].
        stage: Stage of each operation [4, b].
        random_order: False if the stages are 0, 1, 2, 3 in every row, which takes less work.
    """
    if planes[0].device.type == "cpu" and not torch.compiler.is_compiling():
        return _jitter_by_order(planes, factors, stage)
    for step in range(4):
        if random_order or step < 3:
            now = stage == step
            factor = per_row(torch.where(now[:3], factors[:3], 1.0).prod(0))
            grey = grey_of(planes)
            mean = grey.mean((1, 2), keepdim=True)
            target = (1.0 - factor) * (per_row(now[1]) * mean + per_row(now[2]) * grey)
            planes = [(factor * plane + target).clamp(0.0, 1.0) for plane in planes]
        if random_order or step == 3:
            turned = shift_hue(planes, factors[3])
            here = per_row(stage[3] == step)
            planes = [torch.where(here, new, old) for new, old in zip(turned, planes, strict=True)]
    return planes


def _jitter_by_order(planes: Planes, factors: Annotated[Tensor, "4 b"], stage: Annotated[Tensor, "4 b"]) -> Planes:
    """Jitter groups of rows with the same order: each operation once, in blocks that stay in the cache of a core."""
    made = torch.stack(planes)  # [3, b, h, w]
    places = stage.new_tensor([[1], [4], [16], [64]])
    unchanged = (factors == factors.new_tensor([[1.0], [1.0], [1.0], [0.0]])).all(0)
    codes, size = (stage * places).sum(0), max(1, _CACHED_PIXELS // planes[0][0].numel())
    for code in torch.unique(codes).tolist():
        rows = torch.nonzero((codes == code) & ~unchanged)[:, 0]
        if not len(rows):
            continue
        order = stage[:, rows[0]].argsort().tolist()
        for block in rows.split(size):  # type: ignore[no-untyped-call]
            some = made[:, block]
            for operation in order:
                _adjust(some, operation, factors[operation, block])
            made[:, block] = some
    return list(made.unbind(0))


def _adjust(images: Annotated[Tensor, "3 b h w"], operation: int, factor: Annotated[Tensor, "b"]) -> None:
    """Apply one of the four operations in place, by its place in ``Parameters.factors``."""
    if operation == 3:
        for plane, turned in zip(images, shift_hue(list(images.unbind(0)), factor), strict=True):
            plane.copy_(turned)
        return
    weight = per_row(factor)
    if operation:
        grey = grey_of(list(images.unbind(0)))
        target = (1.0 - weight) * (grey.mean((1, 2), keepdim=True) if operation == 1 else grey)
        images.mul_(weight).add_(target).clamp_(0.0, 1.0)
    else:
        images.mul_(weight).clamp_(0.0, 1.0)


def shift_hue(planes: Planes, turns: Annotated[Tensor, "b"]) -> Planes:
    """Rotate the hue of HSV by a fraction of a full turn; value and chroma are unchanged.

    Args:
        planes: Red, green and blue, each [b, h, w].
        turns: Rotation of each row [b].
    """
    red, green, blue = planes
    value, low = torch.maximum(torch.maximum(red, green), blue), torch.minimum(torch.minimum(red, green), blue)
    chroma = value - low
    divisor = torch.where(chroma > 0.0, chroma, 1.0)
    below = torch.where(value == green, 2.0 + (blue - red) / divisor, 4.0 + (red - green) / divisor)
    sextant = torch.where(value == red, (green - blue) / divisor, below) + per_row(6.0 * turns)
    sextant = sextant - 6.0 * torch.floor(sextant / 6.0)  # in [0, 6); torch.remainder takes several times as long
    # Each channel is a trapezium over the hue, of height 1 in units of the chroma.
    heights = [(sextant - 3.0).abs() - 1.0, 2.0 - (sextant - 2.0).abs(), 2.0 - (sextant - 4.0).abs()]
    return [torch.addcmul(low, chroma, height.clamp(0.0, 1.0)) for height in heights]


def grey_of(planes: Planes) -> Annotated[Tensor, "b h w"]:
    """Return the luma of red, green and blue by ITU-R 601, [b, h, w]."""
    red, green, blue = planes
    return _GREY[0] * red + _GREY[1] * green + _GREY[2] * blue


def blur(planes: Planes, sigma: Annotated[Tensor, "b"]) -> Planes:
    """Blur with a Gaussian kernel of a tenth of the size, at least 3 pixels wide, reflecting at the edges.

    Args:
        planes: Channels, each [b, h, w].
        sigma: Standard deviation of each row in pixels [b]; rows with 0 are unchanged.
    """
    return [_blurred(_blurred(plane, sigma, 1), sigma, 2) for plane in planes]


def _blurred(plane: Annotated[Tensor, "b h w"], sigma: Tensor, dim: int) -> Tensor:
    radius = blur_radius(plane.shape[dim])
    # In float64, since the last bit of vectorised float32 functions depends on the place in the batch.
    weights = [torch.exp(-0.5 * (k / sigma.double().clamp(min=0.01)) ** 2) for k in range(-radius, radius + 1)]
    total = torch.stack(weights).sum(0)
    padded = pad(plane[:, None], (radius, radius, 0, 0) if dim == 2 else (0, 0, radius, radius), mode="reflect")[:, 0]
    shifted = [padded.narrow(dim, k, plane.shape[dim]) for k in range(len(weights))]
    blurred = sum(
        per_row((weight / total).to(plane.dtype)) * part for weight, part in zip(weights, shifted, strict=True)
    )
    return torch.where(per_row(sigma > 0.0), blurred, plane)


def blur_radius(size: int) -> int:
    """Return the radius of the blur kernel in pixels for a given side, at least 1."""
    return max(1, size // 20)


def per_row(values: Annotated[Tensor, "b"]) -> Annotated[Tensor, "b 1 1"]:
    """Reshape [b] to [b, 1, 1], to broadcast over pixels."""
    return values[:, None, None]
