"""Arrays of NumPy, lists and text ids as the tensors that keys are made of."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardneg.core.errors import ArgumentError

Names = NDArray[np.object_]
Given = Tensor | NDArray[Any] | Sequence[Any] | None


def number_of(text: str) -> int:
    """The same number, 0 or more, for the same text, anywhere: 63 bits of its hash."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def int_if_whole(value: Any) -> Any:
    """3.0 as 3, since pandas turns whole numbers beside missing ones into floats; anything else as it is."""
    return int(value) if isinstance(value, (float, np.floating)) and float(value).is_integer() else value


def as_vectors(value: Any) -> Tensor:
    """Vectors as a tensor; a list of vectors becomes float32. A DataFrame of numbers is an array."""
    value = value.to_numpy() if hasattr(value, "to_numpy") else value
    if isinstance(value, (list, tuple)):
        value = [one.detach().cpu().numpy() if isinstance(one, Tensor) else one for one in value]
        try:
            value = np.asarray(value, dtype=np.float32)
        except (TypeError, ValueError):
            raise ArgumentError("Keys", "vectors of one length", "a list of others") from None
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiu":
        kind = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        fix = "read the file first, such as by numpy.load" if isinstance(value, str | Path) else None
        raise ArgumentError("Keys", "vectors as a tensor, an array or a list", kind, fix)
    if not value.dtype.isnative or any(step < 0 for step in value.strides):
        value = value.astype(value.dtype.newbyteorder("="))
    with warnings.catch_warnings():
        # Vectors are only read, and a copy would bring a memory-mapped file into memory.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(value)


def as_numbers(name: str, value: Any) -> tuple[Tensor, Names | None]:
    """Whole numbers as a tensor; texts by number_of, and the texts themselves."""
    array = np.asarray(value.tolist() if hasattr(value, "tolist") else value, dtype=object)
    flat = array.reshape(-1)
    flat[:] = [int_if_whole(one) for one in flat]
    if len(flat) and all(isinstance(one, str) for one in flat):
        numbers = torch.tensor([number_of(one) for one in flat], dtype=torch.long)
        if len(torch.unique(numbers)) < len(set(flat.tolist())):
            raise ArgumentError("Keys", f"texts as {name} with different hashes", "two that share one", "use numbers")
        return numbers.view(array.shape), array
    if any(isinstance(one, bool) or not isinstance(one, (int, np.integer)) for one in flat):
        kinds = sorted({type(one).__name__ for one in flat})
        raise ArgumentError("Keys", f"whole numbers or texts as {name}", f"{name} of {', '.join(kinds)}")
    return torch.tensor(array.astype(np.int64)), None
