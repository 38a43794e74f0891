"""Yes-or-no answers as text that JSON can hold: one bit each, in base64."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np
from numpy.typing import NDArray


def pack_bits(answers: NDArray[np.bool_]) -> str:
    """10,000 answers are 1,668 characters.

    >>> unpack_bits(pack_bits(np.array([True, False, True])), 3)
    array([ True, False,  True])
    """
    return base64.b64encode(np.packbits(answers).tobytes()).decode()


def unpack_bits(text: Any, number: int) -> NDArray[np.bool_] | None:
    """The answers, or None where the text does not hold so many."""
    try:
        packed = np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
    except (TypeError, ValueError, binascii.Error):
        return None
    return np.unpackbits(packed, count=number).astype(bool) if len(packed) == -(-number // 8) else None
