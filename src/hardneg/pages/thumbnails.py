"""Images inside a page, as data URIs."""

from __future__ import annotations

import base64
from io import BytesIO
from typing import Annotated

from torch import Tensor

from hardneg.core.errors import optional


def thumbnail(image: Annotated[Tensor, "c h w"], longest: int = 48) -> str:
    """The image (uint8, grey or RGB) as PNG, at most ``longest`` pixels a side; smaller ones keep every pixel."""
    pillow = optional("PIL.Image", "report", extra="report")
    pixels = image.permute(1, 2, 0).cpu().numpy()
    picture = pillow.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    picture.thumbnail((longest, longest), pillow.Resampling.BOX)  # never larger
    file = BytesIO()
    picture.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
