"""Images inside a page: a small PNG writer and thumbnails as data URIs, without an imaging library."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from hardneg.core.errors import ArgumentError

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def encode_png(pixels: Annotated[NDArray[np.uint8], "h w c"]) -> bytes:
    """The pixels as a PNG file, 8 bits a channel: grey for one channel, RGB for three.

    >>> encode_png(np.zeros((2, 3, 1), np.uint8))[:4]
    b'\\x89PNG'
    """
    height, width, channels = pixels.shape
    if pixels.dtype != np.uint8 or channels not in (1, 3):
        raise ArgumentError("encode_png", "uint8 pixels [h, w, 1 or 3]", f"pixels={pixels.shape} of {pixels.dtype}")
    colour_type = {1: 0, 3: 2}[channels]
    rows = pixels.reshape(height, width * channels)
    filtered = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1)  # filter 0 before every row
    header = struct.pack(">IIBBBBB", width, height, 8, colour_type, 0, 0, 0)
    body = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(filtered.tobytes(), 9)) + _chunk(b"IEND", b"")
    return SIGNATURE + body


def thumbnail(image: Annotated[Tensor, "c h w"], longest: int = 48) -> str:
    """The image as a data URI, its longer side at most ``longest`` pixels; smaller ones keep every pixel."""
    height, width = image.shape[1:]
    if max(height, width) > longest:
        scale = longest / max(height, width)
        size = max(1, round(height * scale)), max(1, round(width * scale))
        shrunk = interpolate(image[None].float(), size=size, mode="area")[0]
        image = shrunk.round().clamp(0, 255).to(torch.uint8)
    pixels = np.ascontiguousarray(image.permute(1, 2, 0).cpu().numpy())
    return "data:image/png;base64," + base64.b64encode(encode_png(pixels)).decode()


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
