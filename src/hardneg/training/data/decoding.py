"""Decode images by Pillow: 8 bits per channel, grey or RGB, the right way up, with transparency shown on white.

``decode`` returns an image, at a fraction of its resolution if it is much larger than needed. ``read_header`` finds its
size and whether it is grey from the first and last bytes of its file.
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from hardneg.core.errors import ArgumentError, optional
from hardneg.io.arrays import Array
from hardneg.io.processes import memory_bytes

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

ENDINGS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}
"""Bytes near the end of a complete file, by format; files without them may be incomplete."""
_NEAR_END = 4096
MARGIN = 3
"""Images are decoded at a fraction of their resolution while the shorter side stays this many times the side needed.

A crop of a ninth of the area still has all the pixels that it is resized to."""
_REDUCTIONS = 3  # the decoder of JPEG has 1/2, 1/4 and 1/8
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # of EXIF: values for images that are shown turned by a quarter


class Header(NamedTuple):
    """What the header of an image says.

    Attributes:
        width: Width in pixels, as the image is shown.
        height: Height in pixels, as the image is shown.
        grey: Whether it has one channel.
    """

    width: int
    height: int
    grey: bool


def read_header(head: bytes, tail: bytes, whole: Callable[[], bytes], where: str) -> Header:
    """Read the header of an image.

    Files that seem incomplete are decoded to be sure.

    Args:
        head: The first bytes of the file.
        tail: The last bytes of the file, after those.
        whole: Returns the whole file, for formats and files that need it.
        where: Where the image comes from, for errors.

    Raises:
        ArgumentError: If the image is unreadable, incomplete, too large, or has more than 16 bits.
    """
    Image = optional("PIL.Image", where, extra="vision")  # noqa: N806
    try:
        image = Image.open(BytesIO(head))
    except Exception:  # some formats have their header elsewhere, and decoders raise many types
        image = _open(whole(), where)
    with image:
        ending = ENDINGS.get(image.format or "")
        if ending is not None and ending not in (head + tail)[-_NEAR_END:]:
            decode(whole(), where)
        _check_depth(image, image.format, where)
        width, height = image.size
        if 3 * width * height > memory_bytes() // 2:
            raise _too_large(where, f"{width} x {height} pixels")
        # Pillow turns TIFF itself. Without the check of info, it would decode a PNG to look for EXIF at its end.
        if image.format != "TIFF" and "exif" in image.info and image.getexif().get(_ORIENTATION) in _TURNED:
            width, height = height, width
        return Header(width, height, _is_grey(image) or image.mode.startswith("I"))


def decode(data: Any, where: str, side: int | None = None) -> Picture:
    """Decode an image to modes L or RGB.

    Args:
        data: The bytes of a file, a PIL image, or uint8 [h, w], [h, w, c] or [c, h, w] with 1 or 3 channels.
        where: Where the image comes from, for errors.
        side: Side in pixels to which crops of the image are resized; larger images are then decoded at a fraction of
            their resolution, see ``MARGIN``. None decodes all pixels.

    Raises:
        ArgumentError: If the image is unreadable or has more than 16 bits.
    """
    Image = optional("PIL.Image", where, extra="vision")  # noqa: N806
    if isinstance(data, np.ndarray | Tensor):
        return _reduced(Image.fromarray(_channels_last(np.asarray(data), where)), side)
    if isinstance(data, Image.Image):
        return _reduced(_upright(data, where), side)
    with _open(data, where) as image:
        before, times = image.size, reduction(min(image.size), side)
        if times > 1:
            image.draft(None, (before[0] // times, before[1] // times))  # only decoders of JPEG can
        try:
            image.load()
            found = _upright(image, where)
        except ArgumentError:
            raise
        except Exception as error:  # decoders raise many types
            raise ArgumentError("data", "readable images", f"{where}: {error}") from error
    return _reduced(found, side) if image.size == before else found


def reduction(shorter: Any, side: int | None) -> Any:
    """Return the factor by which images are decoded smaller: 1, 2, 4 or 8.

    Args:
        shorter: The shorter side of an image in pixels, or an array of them.
        side: The side that is needed, or None.

    Example:
        >>> reduction(3000, 224), reduction(375, 224)
        (4, 1)
    """
    return 1 if side is None else 2 ** sum(shorter >= 2**k * MARGIN * side for k in range(1, _REDUCTIONS + 1))


def fitted(image: Picture, size: tuple[int, int]) -> Picture:
    """Return an image resized to a width and height, cropping the longer dimension in its middle."""
    from PIL import ImageOps

    return image if image.size == size else ImageOps.fit(image, size)


def _open(data: Any, where: str) -> Picture:
    """Open the bytes of a file, without decoding its pixels."""
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(BytesIO(data))
    except Image.DecompressionBombError as error:
        raise _too_large(where, f"more than {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels") from error
    except Exception as error:  # decoders raise many types
        reason = "an unknown format" if isinstance(error, UnidentifiedImageError) else error
        raise ArgumentError("data", "readable images", f"{where}: {reason}") from error


def _too_large(where: str, got: str) -> ArgumentError:
    return ArgumentError("data", "images that fit into memory", f"{got} in {where}", "make it smaller")


def _reduced(image: Picture, side: int | None) -> Picture:
    return image if (times := reduction(min(image.size), side)) == 1 else image.reduce(times)


def _upright(image: Any, where: str) -> Picture:
    """Return an image of any mode as L or RGB, turned as EXIF says, with transparent parts in white."""
    from PIL import ImageOps

    _check_depth(image, image.format, where)
    format = image.format
    turned = ImageOps.exif_transpose(image)
    return _on_white(_eight_bits(turned, format))


def _is_grey(image: Picture) -> bool:
    return image.mode in ("1", "L", "LA", "La")


def _on_white(image: Any) -> Picture:
    """Convert to grey or RGB, with transparent parts in white: colours under a mask were never meant to be seen."""
    from PIL import Image

    opaque, layered = ("L", "LA") if _is_grey(image) else ("RGB", "RGBA")
    if not image.mode.endswith(("A", "a")) and "transparency" not in image.info:
        return image.convert(opaque)  # type: ignore[no-any-return]
    image = image.convert(layered)
    white = Image.new(opaque, image.size, "white")
    white.paste(image.convert(opaque), mask=image.getchannel("A"))
    return white


def _check_depth(image: Picture, format: str | None, where: str) -> None:
    """Raise for images of more than 16 bits.

    Mode I has 16 bits in PNG (older Pillows) and in PGM, which Pillow scales to 16 bits. In other formats, as in mode
    F, the value of white is undefined.
    """
    deep = image.mode.startswith(("I", "F")) and not image.mode.startswith("I;16")
    if deep and not (image.mode == "I" and format in ("PNG", "PPM")):
        raise ArgumentError(
            "data",
            "images of 8 or 16 bits",
            f"mode {image.mode!r} in {where}, for which the value of white is undefined",
            "convert it to 8 bits over the range that you need",
        )


def _eight_bits(image: Picture, format: str | None) -> Picture:
    """Divide 16-bit grey by 257, so that 65,535 is white; Pillow would clip at 255."""
    if not image.mode.startswith("I"):
        return image
    from PIL import Image

    deep = np.asarray(image)
    see_through = deep == image.info.get("transparency", -1)  # PNG may declare one grey value as transparent
    return Image.fromarray(np.where(see_through, 255, np.rint(deep / 257.0)).astype(np.uint8))


def _channels_last(image: Array, where: str) -> Array:
    """Return a uint8 image [h, w], [h, w, c] or [c, h, w] as Pillow expects it."""
    planes: Array = channels_first(where, image[None])[0]
    return planes[0] if len(planes) == 1 else planes.transpose(1, 2, 0)


def channels_first(name: str, images: Array) -> Array:
    """Convert uint8 images [n, h, w], [n, c, h, w] or [n, h, w, c] to [n, c, h, w].

    Args:
        name: Name of the data, for the error.
        images: The images.

    Raises:
        ArgumentError: If the type is not uint8 or the shape is none of these.
    """
    if images.dtype != np.uint8:
        fix = "use (images * 255).round().astype('uint8') for values in [0, 1]" if images.dtype.kind == "f" else None
        raise ArgumentError("data", f"uint8 images in {name!r}", f"images of {images.dtype}", fix)
    if images.ndim == 3:
        return images[:, None]
    if images.ndim == 4 and images.shape[1] not in (1, 3) and images.shape[3] in (1, 3):
        return images.transpose(0, 3, 1, 2)
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        what = "images [n, h, w], [n, c, h, w] or [n, h, w, c] with 1 or 3 channels"
        raise ArgumentError("data", f"{what} in {name!r}", f"images={images.shape}")
    return images
