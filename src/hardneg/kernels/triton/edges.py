# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""The edges of windows of ranks by counting: exact, without sorting a row, two edges in the same passes.

A program has one row. The size-th largest value lies in a bracket [low, high), and of both ends it is known how many
values reach them. Each pass counts the row at two values p <= q inside the bracket, and finds the lowest value that
reaches p and the highest that does not reach q. The first two values come from a sample of the row, the others from
interpolation, so far apart that the edge is between them most of the time; every third pass bisects the ordered bits of
the float, p = q, which bounds the number of passes for any row.

``RowEdges.find`` launches the kernel for a chunk of rows; ``edges`` is the call for a matrix of values.
"""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from hardneg.core.bounds import Edge
from hardneg.kernels.triton.language import installed, interpreted, jit, launched, tl

BLOCK, WARPS, SAMPLE = 2048, 8, 512
MAX_PASSES = 256
"""Largest number of passes; more than any row needs."""
ALL = 2**62
"""A column after all others: every value that equals the edge is inside it."""


@jit
def _key(x, HALF: tl.constexpr):
    """Map floats to whole numbers in the same order."""
    if HALF:
        bits = x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        return (bits ^ ((bits >> 15) & 0x7FFF)).to(tl.int64)
    else:
        bits = x.to(tl.int32, bitcast=True)
        return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@jit
def _float(key, HALF: tl.constexpr):
    """Map whole numbers back to floats; the inverse of ``_key``."""
    bits = key.to(tl.int32)
    if HALF:
        return (bits ^ ((bits >> 15) & 0x7FFF)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def _between(step, size, low, at_low, high, above, first_hint, last_hint, HALF: tl.constexpr):
    """Choose two values inside the bracket: the hints, an interpolation on either side, or the middle of the bits."""
    first, last = _key(low, HALF) + 1, _key(high, HALF) - 1
    middle = _float(first + (last - first) // 2, HALF)
    number = tl.maximum(at_low - above, 1).to(tl.float32)
    margin = tl.minimum(0.6 * tl.sqrt(number), 0.25 * number) + 1.0
    share, width = (at_low - size + 0.5) / number, high - low
    known = (low > float("-inf")) & (high < float("inf")) & (step % 3 != 2)
    p = tl.where(known, low + width * (share - margin / number), middle)
    q = tl.where(known, low + width * (share + margin / number), middle)
    p, q = tl.where(step == 0, first_hint, p), tl.where(step == 0, last_hint, q)
    first, last = _float(first, HALF), _float(last, HALF)
    p = tl.minimum(tl.maximum(p, first), last)
    q = tl.minimum(tl.maximum(q, p), last)
    if HALF:
        p, q = p.to(tl.float16).to(tl.float32), q.to(tl.float16).to(tl.float32)
    return p, q


@jit
def _narrowed(size, low, at_low, high, above, p, count_p, up, q, count_q, down, HALF: tl.constexpr):
    """Narrow the bracket after a count at p and q: at least ``size`` values reach both, or p alone, or neither.

    ``up`` is the lowest value that reaches p and ``down`` the highest that does not reach q.
    """
    both, one = count_q >= size, count_p >= size
    next_high = _float(_key(down, HALF) + 1, HALF)
    low = tl.where(both, tl.maximum(q, up), tl.where(one, up, low))
    high = tl.where(both, high, tl.where(one, next_high, tl.minimum(p, next_high)))
    at_low = tl.where(both, count_q, tl.where(one, count_p, at_low))
    return low, at_low, high, tl.where(both, above, tl.where(one, count_q, count_p))


@jit
def _open(size, low, at_low, high, above, slack, HALF: tl.constexpr):
    """True if the bracket still has to be narrowed; it has no end before a value above it is found."""
    apart = (high == float("inf")) | (slack == 0) | (size - above > slack)
    return (size > 0) & (at_low - size > slack) & (_key(high, HALF) - _key(low, HALF) > 1) & apart


@jit
def _ending(size, low, at_low, high, above, slack, HALF: tl.constexpr):
    """Return the value of the edge, and how many of the equal values are inside it; -1 for all of them."""
    whole = at_low - size <= slack
    early = _key(high, HALF) - _key(low, HALF) > 1
    edge = tl.where(whole | (early == 0), low, high)
    missing = tl.where(whole | early, -1, size - above)
    return tl.where(size > 0, edge, float("inf")), tl.where(size > 0, missing, 0)


@jit
def _values(value_ptr, at, n, row_id, ids_ptr, IDS: tl.constexpr, HALF: tl.constexpr):
    """Load the values to rank; -inf for the same instance."""
    real = at < n
    x = tl.load(value_ptr + at, mask=real, other=float("-inf"))
    if IDS:
        same = (tl.load(ids_ptr + at, mask=real, other=-1) == row_id) & (row_id >= 0)
        x = tl.where(same, float("-inf"), x)
    if not HALF:
        x = x.to(tl.float32) + 0.0
    return x


@jit
def _counted(x, p, q, number, up, down, HALF: tl.constexpr):
    """Count in one number the values that reach p (lower half) and q (upper half).

    Float16 has few values: a bracket may end at any of them, not only at a value of the row.
    """
    reaches_p, reaches_q = x >= p, x >= q
    if not HALF:
        up = tl.minimum(up, tl.where(reaches_p, x, float("inf")))
        down = tl.maximum(down, tl.where(reaches_q, float("-inf"), x))
    return number + tl.where(reaches_q, 0x10001, reaches_p.to(tl.int32)), up, down


@jit
def _ends(p, q, up, down, HALF: tl.constexpr):
    """Return the next values of the row, or in float16 p and the value below q."""
    if HALF:
        return p, _float(_key(q, HALF) - 1, HALF)
    else:
        return tl.min(up), tl.max(down)


@jit
def _place(same, number, at):
    """Return the column of the number-th equal value."""
    return tl.max(tl.where((same > 0) & (tl.cumsum(same, 0) == number), at, -1))


@launched
def _edges(
    value_ptr, ids_ptr, row_ids_ptr, sizes_ptr, count_ptr, hints_ptr, edge_ptr, place_ptr,
    base, n, stride, slack, most,
    BLOCK: tl.constexpr, IDS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Find both edges of the rows from ``base`` on, whose values are given. HALF: they are float16."""
    row = base + tl.program_id(0)
    value_ptr += tl.program_id(0).to(tl.int64) * stride
    row_id = -1
    if IDS:
        row_id = tl.load(row_ids_ptr + row)
    size0, size1 = tl.load(sizes_ptr + 2 * row), tl.load(sizes_ptr + 2 * row + 1)
    count = tl.load(count_ptr + row)
    low0, high0, at0, above0 = float("-inf") + 0.0 * count, float("inf") + 0.0 * count, count, count * 0
    low1, high1, at1, above1 = low0, high0, count, count * 0
    hint0, hint1 = tl.load(hints_ptr + 4 * row), tl.load(hints_ptr + 4 * row + 1)
    hint2, hint3 = tl.load(hints_ptr + 4 * row + 2), tl.load(hints_ptr + 4 * row + 3)
    within = tl.arange(0, BLOCK)
    zero, infinite = tl.zeros([BLOCK], tl.int32), tl.full([BLOCK], float("inf"), tl.float32)
    step = 0
    going = _open(size0, low0, at0, high0, above0, slack, HALF) | _open(size1, low1, at1, high1, above1, slack, HALF)
    while going:
        p0, q0 = _between(step, size0, low0, at0, high0, above0, hint0, hint1, HALF)
        p1, q1 = _between(step, size1, low1, at1, high1, above1, hint2, hint3, HALF)
        number0, up0, down0 = zero, infinite, -infinite
        number1, up1, down1 = zero, infinite, -infinite
        at_p0, at_q0, at_p1, at_q1 = p0, q0, p1, q1
        if HALF:
            at_p0, at_q0, at_p1, at_q1 = p0.to(tl.float16), q0.to(tl.float16), p1.to(tl.float16), q1.to(tl.float16)
        for begin in tl.range(0, n, BLOCK, num_stages=4):
            x = _values(value_ptr, begin + within, n, row_id, ids_ptr, IDS, HALF)
            number0, up0, down0 = _counted(x, at_p0, at_q0, number0, up0, down0, HALF)
            number1, up1, down1 = _counted(x, at_p1, at_q1, number1, up1, down1, HALF)
        if _open(size0, low0, at0, high0, above0, slack, HALF):
            end0, end1 = _ends(p0, q0, up0, down0, HALF)
            low0, at0, high0, above0 = _narrowed(
                size0, low0, at0, high0, above0,
                p0, tl.sum(number0 & 0xFFFF), end0, q0, tl.sum(number0 >> 16), end1, HALF,
            )  # fmt: skip
        if _open(size1, low1, at1, high1, above1, slack, HALF):
            end0, end1 = _ends(p1, q1, up1, down1, HALF)
            low1, at1, high1, above1 = _narrowed(
                size1, low1, at1, high1, above1,
                p1, tl.sum(number1 & 0xFFFF), end0, q1, tl.sum(number1 >> 16), end1, HALF,
            )  # fmt: skip
        step += 1
        going = _open(size0, low0, at0, high0, above0, slack, HALF)
        going = (going | _open(size1, low1, at1, high1, above1, slack, HALF)) & (step < most)
    edge0, missing0 = _ending(size0, low0, at0, high0, above0, slack, HALF)
    edge1, missing1 = _ending(size1, low1, at1, high1, above1, slack, HALF)
    tl.store(edge_ptr + 2 * row, edge0)
    tl.store(edge_ptr + 2 * row + 1, edge1)
    place0, place1 = tl.where(missing0 < 0, n, -1), tl.where(missing1 < 0, n, -1)
    if (missing0 > 0) | (missing1 > 0):
        before0, before1 = 0, 0
        for begin in tl.range(0, n, BLOCK):
            at = begin + within
            x = _values(value_ptr, at, n, row_id, ids_ptr, IDS, HALF).to(tl.float32)
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


def can_rank(value: Tensor) -> bool:
    """True if the kernel can rank these values here."""
    return installed and (value.is_cuda or interpreted) and value.dtype not in (torch.float64,)


class Sizes(NamedTuple):
    """How many values of each row are inside the first and the second edge.

    Attributes:
        wanted: Sizes of both edges.
        number: Number of values per row.
        slack: Number of ranks by which an edge may be off.
    """

    wanted: Annotated[Tensor, "b 2"]
    number: Annotated[Tensor, "b"]
    slack: int

    @classmethod
    def of(cls, start: Tensor, stop: Tensor, count: Tensor, slack: float, n: int) -> Sizes:
        """Build the sizes from ranks.

        Args:
            start: Number of values inside the first edge of each row, [b, 1].
            stop: Number of values inside the second edge, [b, 1].
            count: Number of values of each row, [b, 1].
            slack: Share of the columns by which an edge may be off.
            n: Number of columns.
        """
        wanted = torch.cat([start, stop], dim=1).to(torch.int32).contiguous()
        return cls(wanted, count.flatten().to(torch.int32).contiguous(), int(slack * n))

    def hints(self, sample: Annotated[Tensor, "b k"], n: int) -> Annotated[Tensor, "b 4"]:
        """Return two values per edge, from a sample, between which the edge of each row usually lies.

        Args:
            sample: Some values of each row, [b, k].
            n: Number of columns.
        """
        sample, number = sample.float().sort(dim=1, descending=True).values, sample.shape[1]
        share = self.wanted.float() / max(n, 1)
        spread = 2.0 * (number * share * (1.0 - share)).clamp(min=0.0).sqrt() + 1.0
        places = torch.stack([share * number + spread, share * number - spread], dim=2)
        hints = sample.gather(1, places.flatten(1).long().clamp(0, number - 1))
        return torch.where(hints.isnan(), 0.0, hints).contiguous()


class RowEdges(NamedTuple):
    """Both edges of each row: their values, and the last column among equal values that is inside."""

    value: Annotated[Tensor, "b 2"]
    place: Annotated[Tensor, "b 2"]

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> RowEdges:
        """Allocate edges with nothing inside."""
        place = torch.full((rows, 2), -1, dtype=torch.int32, device=device)
        return cls(torch.full((rows, 2), math.inf, device=device), place)

    def find(
        self,
        values: Annotated[Tensor, "r n"],
        base: int,
        sizes: Sizes,
        hints: Tensor,
        ids: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> None:
        """Find the edges of the rows from ``base`` on.

        Args:
            values: Values to rank, [r, n].
            base: First row.
            sizes: Sizes of the edges of all rows.
            hints: Values from ``Sizes.hints``.
            ids: Ids of rows and columns; equal ones are excluded.
        """
        rows, n = values.shape
        if rows and n:
            _edges[(rows,)](
                values, ids[1], ids[0], sizes.wanted, sizes.number, hints, self.value, self.place,
                base, n, values.stride(0), sizes.slack, MAX_PASSES,
                BLOCK=BLOCK, IDS=ids[0] is not None and ids[1] is not None, HALF=values.dtype == torch.float16,
                num_warps=WARPS,
            )  # fmt: skip


def edges(
    value: Annotated[Tensor, "b n"],
    column: Annotated[Tensor, "b|1 n"],
    sizes: tuple[Annotated[Tensor, "b 1"], Annotated[Tensor, "b 1"]],
    count: Annotated[Tensor, "b 1"],
    slack: float = 0.0,
) -> list[Edge]:
    """Find the edges around the ``sizes`` closest values of each row; ties are broken by column.

    Args:
        value: Values to rank, [b, n]; -inf for excluded ones.
        column: Column numbers, [b or 1, n].
        sizes: Numbers of values inside the first and the second edge, [b, 1] each.
        count: Number of values that are not -inf, [b, 1].
        slack: Share of the row by which an edge may be off.
    """
    rows, n = value.shape
    found, wanted = RowEdges.empty(rows, value.device), Sizes.of(*sizes, count, slack, n)
    if n:
        value = value if value.stride(1) == 1 else value.contiguous()
        found.find(value, 0, wanted, wanted.hints(value[:, :: max(1, n // SAMPLE)], n))
    known = column.expand(rows, n).gather(1, found.place.clamp(0, max(n - 1, 0)).long()) if n else found.place.long()
    columns = torch.where(found.place < 0, -1, torch.where(found.place < n, known, ALL))
    return [(found.value[:, i : i + 1], columns[:, i : i + 1]) for i in (0, 1)]
