"""Labels and groups of any kind as numbers; what is missing is like nothing else."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError
from hardneg.mining.judgements import Tag, numbered_both


def numbered(name: str, given: Tag, size: int, *, only_numbers: bool = False) -> Annotated[Tensor, "n"]:
    """Numbers as they are, and a number of 0 or more for each other value; what is missing (None, NaN, an empty text,
    a number below 0) gets one of its own below 0, which no other row has.

    >>> numbered("labels", ["cat", "dog", "cat", None], 4).tolist()
    [0, 1, 0, -5]
    """
    if isinstance(given, np.ndarray) and given.dtype.kind in "iu":
        given = torch.from_numpy(given.astype(np.int64))
    if isinstance(given, Tensor) and given.shape == (size,) and not given.is_floating_point():
        return unlike(given.long())
    if isinstance(given, (list, tuple)):  # numbers of NumPy and of torch in a list are numbers
        given = [one.item() if isinstance(one, (np.generic, Tensor)) else one for one in given]
    number = numbered_both(name, given, [], (size, 0), "audit")[0]
    values = given.tolist() if isinstance(given, (Tensor, np.ndarray)) else list(given)
    known = list(zip(values, (number >= 0).tolist(), strict=True))
    if all(type(one) is int and one < 2**63 for one, is_known in known if is_known):
        return unlike(torch.tensor([one if is_known else -1 for one, is_known in known], dtype=torch.long))
    if only_numbers:
        raise ArgumentError("audit", f"whole numbers as {name} beside a corpus, whose Keys have numbers", "others")
    return number


def unlike(tag: Annotated[Tensor, "n"], offset: int = 0) -> Annotated[Tensor, "n"]:
    """Numbers below 0, which mean that nothing is known, made different for every row; ``offset`` keeps two apart."""
    row = torch.arange(len(tag), device=tag.device).view(-1, *[1] * (tag.ndim - 1))
    return torch.where(tag < 0, -2 - offset - row, tag)
