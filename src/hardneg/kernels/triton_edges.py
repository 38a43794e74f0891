# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""The edges of windows of ranks by counting: exact, without sorting a row, two edges in the same passes.

A program has one row, which stays in the caches. The size-th largest value is bracketed by two values of the row; each
pass counts the row at a value between them, and moves an end to the next value that is there. The first two values come
from a sample of the row, the others from interpolation, every third from a bisection of the ordered bits of the float,
which bounds the number of passes for any row.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor

from hardneg.core.bounds import Edge
from hardneg.kernels.triton_language import installed, interpreted, jit, tl

BLOCK, SAMPLE = 2048, 1024
ALL = 2**62
"""A column behind all others: whatever has the value of the edge is within it."""


@jit
def _key(x):
    """Whole numbers in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@jit
def _float(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def _between(step, size, low, at_low, high, above_high, hint):
    """A value above ``low`` and not above ``high``: the hint, an interpolation, or the middle of the bits."""
    first, last = _key(low), _key(high)
    middle = _float(first + (last - first + 1) // 2)
    share = (at_low - size + 0.5) / tl.maximum(at_low - above_high, 1)
    line = low + (high - low) * share
    line = tl.minimum(tl.maximum(line, _float(first + 1)), high)
    known = (low > float("-inf")) & (high < float("inf")) & (step % 3 != 1)
    found = tl.where(known, line, middle)
    return tl.where((step < 2) & (hint > low) & (hint <= high), hint, found)


@jit
def _narrowed(size, low, at_low, high, above_high, count, next_up, next_down):
    """The bracket after a count: at least ``size`` values reach what was counted, or fewer."""
    reached = count >= size
    low, at_low = tl.where(reached, next_up, low), tl.where(reached, count, at_low)
    return low, at_low, tl.where(reached, high, next_down), tl.where(reached, above_high, count)


@jit
def _open(size, low, at_low, high, above_high, slack):
    """Whether the bracket still has to be narrowed. What is above no value yet is no end of one."""
    apart = (high == float("inf")) | (size - above_high > tl.maximum(slack, 1))
    return (size > 0) & (low < high) & (at_low - size > slack) & apart


@jit
def _ending(size, low, at_low, high, above_high, slack):
    """The value of the edge, and how many of those that have it are within it; -1 for all of them, 0 for none."""
    whole = at_low - size <= slack
    missing = tl.where(whole, -1, tl.where((slack > 0) & (low < high), 0, size - above_high))
    return tl.where(size > 0, tl.where(whole, low, high), float("inf")), tl.where(size > 0, missing, 0)


@jit
def _place(same, number, at):
    """Where the number-th of those that are the same stands."""
    return tl.max(tl.where((same > 0) & (tl.cumsum(same, 0) == number), at, -1))


@jit
def _edges(
    value_ptr, sizes_ptr, count_ptr, hints_ptr, edge_ptr, place_ptr, n, stride, slack, most,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    value_ptr += row * stride
    within = tl.arange(0, BLOCK)
    size0, size1 = tl.load(sizes_ptr + 2 * row), tl.load(sizes_ptr + 2 * row + 1)
    count = tl.load(count_ptr + row)
    low0, high0, at0, above0 = float("-inf") + 0.0 * count, float("inf") + 0.0 * count, count, count * 0
    low1, high1, at1, above1 = low0, high0, count, count * 0
    step = 0
    going = _open(size0, low0, at0, high0, above0, slack) | _open(size1, low1, at1, high1, above1, slack)
    while going:
        at_hint = hints_ptr + 4 * row + tl.minimum(step, 1)
        mid0 = _between(step, size0, low0, at0, high0, above0, tl.load(at_hint))
        mid1 = _between(step, size1, low1, at1, high1, above1, tl.load(at_hint + 2))
        number0, number1 = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
        up0, up1 = tl.full([BLOCK], float("inf"), tl.float32), tl.full([BLOCK], float("inf"), tl.float32)
        down0, down1 = -up0, -up1
        for begin in tl.range(0, n, BLOCK):
            inside = begin + within < n
            x = tl.load(value_ptr + begin + within, mask=inside, other=float("-inf")).to(tl.float32) + 0.0
            number0 += (x >= mid0).to(tl.int32)
            up0 = tl.minimum(up0, tl.where(x >= mid0, x, float("inf")))
            down0 = tl.maximum(down0, tl.where(x < mid0, x, float("-inf")))
            number1 += (x >= mid1).to(tl.int32)
            up1 = tl.minimum(up1, tl.where(x >= mid1, x, float("inf")))
            down1 = tl.maximum(down1, tl.where(x < mid1, x, float("-inf")))
        if _open(size0, low0, at0, high0, above0, slack):
            low0, at0, high0, above0 = _narrowed(
                size0, low0, at0, high0, above0, tl.sum(number0), tl.min(up0), tl.max(down0)
            )
        if _open(size1, low1, at1, high1, above1, slack):
            low1, at1, high1, above1 = _narrowed(
                size1, low1, at1, high1, above1, tl.sum(number1), tl.min(up1), tl.max(down1)
            )
        step += 1
        going = _open(size0, low0, at0, high0, above0, slack) | _open(size1, low1, at1, high1, above1, slack)
        going = going & (step < most)
    edge0, missing0 = _ending(size0, low0, at0, high0, above0, slack)
    edge1, missing1 = _ending(size1, low1, at1, high1, above1, slack)
    tl.store(edge_ptr + 2 * row, edge0)
    tl.store(edge_ptr + 2 * row + 1, edge1)
    place0, place1 = tl.where(missing0 < 0, n, -1), tl.where(missing1 < 0, n, -1)
    if (missing0 > 0) | (missing1 > 0):
        before0, before1 = 0, 0
        for begin in tl.range(0, n, BLOCK):
            at = begin + within
            x = tl.load(value_ptr + at, mask=at < n, other=float("-inf")).to(tl.float32)
            same0, same1 = (x == edge0).to(tl.int32), (x == edge1).to(tl.int32)
            more0, more1 = tl.sum(same0), tl.sum(same1)
            if (before0 < missing0) & (before0 + more0 >= missing0):
                place0 = _place(same0, missing0 - before0, at)
            if (before1 < missing1) & (before1 + more1 >= missing1):
                place1 = _place(same1, missing1 - before1, at)
            before0 += more0
            before1 += more1
    tl.store(place_ptr + 2 * row, place0)
    tl.store(place_ptr + 2 * row + 1, place1)


def serves(value: Tensor) -> bool:
    return installed and (value.is_cuda or interpreted) and value.dtype not in (torch.float64,)


def edges(
    value: Annotated[Tensor, "b n"],
    column: Annotated[Tensor, "b|1 n"],
    sizes: tuple[Annotated[Tensor, "b 1"], Annotated[Tensor, "b 1"]],
    count: Annotated[Tensor, "b 1"],
    slack: float = 0.0,
) -> list[Edge]:
    """The edges of the ``sizes`` closest of each row, of ``count`` values that are not -inf; ties by column.

    ``slack``: by how many ranks, as a share of the row, an edge may be off.
    """
    rows, n = value.shape
    wanted = torch.cat(sizes, dim=1).to(torch.int32).contiguous()
    edge = torch.full((rows, 2), math.inf, device=value.device)
    place = torch.full((rows, 2), -1, dtype=torch.int32, device=value.device)
    if n:
        value = value if value.stride(1) == 1 else value.contiguous()
        counts, hints, off = count.to(torch.int32).contiguous(), _hints(value, wanted), int(slack * n)
        _edges[(rows,)](
            value, wanted, counts, hints, edge, place, n, value.stride(0), off, 256, BLOCK=BLOCK, num_warps=16,
        )  # fmt: skip
    known = column.expand(rows, n).gather(1, place.clamp(0, max(n - 1, 0)).long()) if n else place.long()
    columns = torch.where(place < 0, -1, torch.where(place < n, known, ALL))
    return [(edge[:, i : i + 1], columns[:, i : i + 1]) for i in (0, 1)]


def _hints(value: Tensor, sizes: Annotated[Tensor, "b 2"]) -> Annotated[Tensor, "b 4"]:
    """Values of a sample of each row that the edges lie between most of the time: below, then above, for each."""
    sample = value[:, :: max(1, value.shape[1] // SAMPLE)].float().sort(dim=1, descending=True).values
    number = sample.shape[1]
    spread = 1.5 * math.sqrt(number) + 1.0
    place = sizes.float() * (number / value.shape[1])
    places = torch.stack([place + spread, place - spread], dim=2)
    hints = sample.gather(1, places.flatten(1).long().clamp(0, number - 1))
    return torch.where(hints.isnan(), 0.0, hints).contiguous()
