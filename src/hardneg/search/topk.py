"""The largest values of each row, fast, with one rule for ties: of equal values the lower column comes first.

``top_of_rows`` chooses among three implementations: plain ``topk``, maxima of groups for long rows, and integers that
pack value and column on a CPU.
"""

from __future__ import annotations

import sys
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardneg.core.tiles import NEVER

_GROUP = 16


def top_of_rows(
    scores: Annotated[Tensor, "b n"], size: int, *, ties: bool = True
) -> tuple[Annotated[Tensor, "b k"], Annotated[Tensor, "b k"]]:
    """Return the ``size`` largest values of each row, largest first, and their columns.

    Args:
        scores: Values [b, n].
        size: Number of values per row.
        ties: Whether the lower column comes first among equal values. False returns any of them where that saves time:
            settling ties waits for the GPU.

    Returns:
        Values [b, k] and columns [b, k].

    Example:
        >>> top_of_rows(torch.tensor([[1.0, 3.0, 2.0, 3.0]]), 3)[1].tolist()
        [[1, 3, 2]]
    """
    n = scores.shape[1]
    few = size * _GROUP * 2 <= n
    packable = scores.device.type == "cpu" and scores.dtype == torch.float32 and sys.byteorder == "little"
    if packable and not few and scores.numel() and not bool(scores.isnan().any()):
        return _packed_top(scores, size)
    if not ties:
        return _plain(scores, size)
    values, columns = (_of_groups if few and scores.numel() else _plain)(scores, min(size + 1, n))
    if size < n:  # one more than wanted shows whether equal values lie on both sides of the end
        tied = (values[:, size - 1] == values[:, size]).nonzero()[:, 0]
        values, columns = values[:, :size], columns[:, :size]
        if len(tied):
            found = scores[tied].sort(dim=1, descending=True, stable=True)
            values, columns = values.clone(), columns.clone()
            values[tied], columns[tied] = found.values[:, :size], found.indices[:, :size]
    return in_order(values, columns)


def reached_by(values: Annotated[Tensor, "b m"], n: int) -> Annotated[Tensor, "b 1"]:
    """Return a value that at least n values of each row reach, close to the n-th largest.

    It is the n-th largest of the maxima of groups, if these are many. Numpy selects with vector instructions.

    Args:
        values: Values [b, m]; NaN if there are any.
        n: Number of values, at most m.

    Example:
        >>> reached_by(torch.tensor([[1.0, 3.0, 2.0, 3.0]]), 3)
        tensor([[2.]])
    """
    if values.device.type == "cpu" and values.dtype == torch.bfloat16:
        # Bits of positive floats are in their order. If only negative ones are left, the result is not positive.
        last = _nth(_maxima(values.view(torch.int16), n), n)
        return last.view(torch.bfloat16) if bool((last > 0).all()) else reached_by(values.float(), n).bfloat16()
    maxima = _maxima(values, n)
    return _nth(maxima, n) if values.device.type == "cpu" else top_of_rows(maxima, n, ties=False)[0][:, -1:]


def _maxima(values: Annotated[Tensor, "b m"], n: int) -> Annotated[Tensor, "b w"]:
    width = values.shape[1] // _GROUP
    return values[:, : _GROUP * width].view(len(values), _GROUP, width).amax(1) if width >= 4 * n else values


def _nth(values: Tensor, n: int) -> Annotated[Tensor, "b 1"]:
    place = values.shape[1] - n
    return torch.from_numpy(np.partition(values.numpy(), place, axis=1)[:, place, None])


def not_below(
    values: Annotated[Tensor, "b n"], least: Annotated[Tensor, "b 1"]
) -> tuple[Annotated[Tensor, "m"], Annotated[Tensor, "m"]]:
    """Return the rows and columns of the values that are not below the least of their row, row by row.

    Args:
        values: Values [b, n], of which few are not below.
        least: Smallest value of each row, of the same type.

    Example:
        >>> not_below(torch.tensor([[1.0, 3.0], [2.0, 0.0]]), torch.tensor([[2.0], [2.0]]))
        (tensor([0, 1]), tensor([1, 0]))
    """
    if values.device.type != "cpu":
        some = (values.amax(1, keepdim=True) >= least)[:, 0].nonzero()[:, 0]
        place, column = (values[some] >= least[some]).nonzero().unbind(1)
        return some[place], column
    if values.dtype != torch.bfloat16:
        found = values.numpy() >= least.numpy()
    elif bool((least > 0).all()):  # the bits of positive floats are in their order, and above those of negative ones
        found = values.view(torch.int16).numpy() >= least.view(torch.int16).numpy()
    else:
        found = (values >= least).numpy()
    both = np.divmod(np.flatnonzero(found), values.shape[1])  # ten times as fast as nonzero of torch
    return torch.from_numpy(both[0]), torch.from_numpy(both[1])


def in_order_of(keys: Annotated[Tensor, "b m"]) -> Annotated[Tensor, "b m"]:
    """Return the columns of each row in descending order of the keys, of equal ones above NEVER the first."""
    if keys.device.type != "cpu" or not keys.numel() or bool(keys.isnan().any()):
        return keys.argsort(dim=1, descending=True, stable=True)
    order = torch.from_numpy(np.argsort(-keys.numpy(), axis=1))  # vector instructions, but equal keys in any order
    ordered = keys.gather(1, order)
    tied = (_tied(ordered) & (ordered[:, 1:] != NEVER)).any(1).nonzero()[:, 0]
    order[tied] = keys[tied].argsort(dim=1, descending=True, stable=True)
    return order


def in_order(values: Annotated[Tensor, "b k"], columns: Annotated[Tensor, "b k"]) -> tuple[Tensor, Tensor]:
    """Sort by value, largest first, and by column where values are equal."""
    order = in_order_of(values)
    values, columns = values.gather(1, order), columns.gather(1, order)
    wrong = (_tied(values) & (columns[:, 1:] < columns[:, :-1])).any(1).nonzero()[:, 0]
    by_column = columns[wrong].argsort(dim=1)
    of_wrong, order = values[wrong].gather(1, by_column).sort(dim=1, descending=True, stable=True)
    values[wrong], columns[wrong] = of_wrong, columns[wrong].gather(1, by_column).gather(1, order)
    return values, columns


def _tied(values: Annotated[Tensor, "b k"]) -> Annotated[Tensor, "b k-1"]:
    """Mark each value that equals the one before it in a sorted row."""
    return values[:, 1:] == values[:, :-1]


def _plain(scores: Tensor, size: int) -> tuple[Tensor, Tensor]:
    best = scores.topk(size, dim=1)
    return best.values, best.indices


def _of_groups(scores: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Compute ``topk`` through groups of columns: only those with one of the ``size`` largest maxima can matter.

    The largest of each group comes from one vectorised pass; the selection then reads a sixteenth of the row, and
    ``size`` groups.
    """
    b, n = scores.shape
    width = n // _GROUP
    largest = scores[:, : width * _GROUP].view(b, _GROUP, width).amax(1)
    groups = largest.topk(min(size, width), dim=1, sorted=False).indices
    columns = (groups[:, :, None] + torch.arange(_GROUP, device=scores.device) * width).flatten(1)
    rest = torch.arange(width * _GROUP, n, device=scores.device).expand(b, -1)
    columns = torch.cat([columns, rest], 1)
    values, place = scores.gather(1, columns).topk(size, dim=1)
    return values, columns.gather(1, place)


def _packed_top(scores: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Compute ``topk`` on whole numbers that hold score and column.

    NumPy selects and sorts those with vector instructions: twice as fast as torch.topk for 100 of 1,000. The bits of
    floats are in their order once those of negative ones are flipped, and columns count down, so that of equal scores
    the first column gives the largest number.
    """
    n = scores.shape[1]
    packed = np.empty(scores.shape, dtype=np.int64)
    halves = packed.view(np.int32).reshape(*scores.shape, 2)
    halves[..., 0] = np.arange(n - 1, -1, -1, dtype=np.int32)
    _flip((scores + 0.0).contiguous().numpy().view(np.int32), out=halves[..., 1])  # + 0.0: -0 equals 0
    if size < n:
        packed.partition(n - size, axis=1)
    best = np.sort(packed[:, n - size :], axis=1)[:, ::-1]
    bits = np.empty(best.shape, dtype=np.int32)
    _flip((best >> 32).astype(np.int32), out=bits)
    return torch.from_numpy(bits.view(np.float32)), torch.from_numpy(n - 1 - (best & 0xFFFFFFFF))


def _flip(bits: NDArray[np.int32], out: NDArray[np.int32]) -> None:
    """Flip the bits of negative floats, so that integers sort as the floats do; its own inverse."""
    np.right_shift(bits, 31, out=out)
    np.bitwise_and(out, 0x7FFFFFFF, out=out)
    np.bitwise_xor(out, bits, out=out)
