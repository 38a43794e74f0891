"""Labels and groups of any kind as numbers; what is missing is like nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Tag = Tensor | NDArray[Any] | Sequence[Any] | None


def numbered(name: str, given: Tag, size: int, *, only_numbers: bool = False) -> Annotated[Tensor, "n"]:
    """Numbers as they are, and a number of 0 or more for each other value; what is missing (None, NaN, an empty text,
    a number below 0) gets one of its own below 0, which no other row has.

    >>> numbered("labels", ["cat", "dog", "cat", None], 4).tolist()
    [0, 1, 0, -5]
    """
    assert given is not None
    if isinstance(given, str) or not hasattr(given, "__len__"):
        raise ValueError(f"audit needs one of {name} for each row, got {name}={given!r}.")
    if isinstance(given, (Tensor, np.ndarray)) and given.ndim != 1:
        raise ValueError(f"audit needs one of {name} for each row, shape ({size},), got {name}={tuple(given.shape)}.")
    if len(given) != size:
        raise ValueError(f"audit needs one of {name} for each of {size} rows, got {len(given)} {name}.")
    if isinstance(given, np.ndarray) and given.dtype.kind in "iu":
        given = torch.from_numpy(given.astype(np.int64))
    if isinstance(given, Tensor) and not given.is_floating_point():
        return unlike(given.long())
    number: dict[Any, int] = {}
    values = given.tolist() if isinstance(given, (Tensor, np.ndarray)) else list(given)
    if all(_missing(one) or (isinstance(one, int) and not isinstance(one, bool)) for one in values):
        return unlike(torch.tensor([-1 if _missing(one) else one for one in values], dtype=torch.long))
    if only_numbers:
        raise ValueError(f"audit needs whole numbers as {name} beside a corpus, whose Keys have numbers, got others.")
    out = [-2 - row if _missing(one) else number.setdefault(one, len(number)) for row, one in enumerate(values)]
    return torch.tensor(out, dtype=torch.long, device=given.device if isinstance(given, Tensor) else None)


def unlike(tag: Annotated[Tensor, "n"], offset: int = 0) -> Annotated[Tensor, "n"]:
    """Numbers below 0, which mean that nothing is known, made different for every row; ``offset`` keeps two apart."""
    row = torch.arange(len(tag), device=tag.device).view(-1, *[1] * (tag.ndim - 1))
    return torch.where(tag < 0, -2 - offset - row, tag)


def numbered_both(name: str, first: Tag, second: Tag, sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Two columns with the same numbers for the same values."""
    assert first is not None
    assert second is not None
    for given, size in zip((first, second), sizes, strict=True):
        numbered(name, given, size)
    both = numbered(name, [*_listed(first), *_listed(second)], sum(sizes))
    return both[: sizes[0]], both[sizes[0] :]


def _listed(given: Any) -> list[Any]:
    return given.tolist() if isinstance(given, (Tensor, np.ndarray)) else list(given)


def _missing(one: Any) -> bool:
    if isinstance(one, (int, float)) and not isinstance(one, bool):
        return one != one or one < 0
    return one is None or one == ""
