# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""The largest product of each group of columns without storing the products: the screen of an exact search on a GPU.

A group is every width-th column, j, j + width, ... So the largest of a group is an elementwise maximum of GROUP
products of the same anchors with consecutive columns, which stay in registers: of [b, n] products only [b, n / GROUP]
are written, in float32. ``exact.largest_on`` decides whether this or the plain version runs.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from hardneg.kernels.triton.language import installed, interpreted, jit, tl

ROWS, COLUMNS, WARPS, STAGES = 128, 64, 8, 4
"""Block sizes of the kernel.

At most 96 KiB of shared memory and 128 registers: two programs run on a multiprocessor of an H100 or H200, and one
multiplies while the other computes maxima.
"""


@jit
def _largest(
    rows_ptr, columns_ptr, out_ptr, num_rows, num_columns, width, dim,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FEATURES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    feature = tl.arange(0, FEATURES)
    from_rows = rows_ptr + row.to(tl.int64)[:, None] * dim + feature[None, :]
    first = tl.load(from_rows, mask=(row < num_rows)[:, None] & (feature < dim)[None, :], other=0.0)
    best = tl.full([ROWS, COLUMNS], float("-inf"), tl.float32)
    for member in tl.range(0, GROUP):
        column = member * width + place
        real = (place < width) & (column < num_columns)
        from_columns = columns_ptr + column.to(tl.int64)[None, :] * dim + feature[:, None]
        other = tl.load(from_columns, mask=real[None, :] & (feature < dim)[:, None], other=0.0)
        product = tl.dot(first, other)
        if not WHOLE:  # else the loop over the members, and not an inner one, is the one that loads ahead
            for begin in tl.range(FEATURES, dim, FEATURES):
                rest = begin + feature < dim
                more = tl.load(from_rows + begin, mask=(row < num_rows)[:, None] & rest[None, :], other=0.0)
                other = tl.load(from_columns + begin, mask=real[None, :] & rest[:, None], other=0.0)
                product = tl.dot(more, other, product)
        best = tl.maximum(best, tl.where(real[None, :], product, float("-inf")))
    to = out_ptr + row.to(tl.int64)[:, None] * width + place[None, :]
    tl.store(to, best, mask=(row < num_rows)[:, None] & (place < width)[None, :])


def largest_of_groups(
    rows: Annotated[Tensor, "b d"], columns: Annotated[Tensor, "n d"], group: int
) -> Annotated[Tensor, "b w"]:
    """Compute the largest product of each row within groups of columns, as ``exact.largest_of_groups`` does.

    Args:
        rows: Vectors [b, d].
        columns: Vectors [n, d].
        group: Number of columns in a group.

    Returns:
        Maxima [b, w] in float32, w = n / group rounded up.
    """
    (b, dim), n = rows.shape, len(columns)
    width = -(-n // group)
    if interpreted:  # the interpreter computes with NumPy, which has no bfloat16
        rows, columns = rows.float(), columns.float()
    out = torch.empty(b, width, device=rows.device)
    whole, features = dim <= 128, 128 if 64 < dim <= 128 else 64
    grid = (-(-b // ROWS), -(-width // COLUMNS))
    tile = {"GROUP": group, "ROWS": ROWS, "COLUMNS": COLUMNS, "FEATURES": features, "WHOLE": whole}
    with torch.cuda.device(rows.device) if rows.is_cuda else torch.no_grad():
        _largest[grid](rows, columns, out, b, n, width, dim, **tile, num_warps=WARPS, num_stages=STAGES if whole else 3)
    return out


def can_run(device: torch.device) -> bool:
    """True if the kernel runs on the device: bfloat16 tensor cores, or the interpreter."""
    if device.type != "cuda":
        return interpreted
    return installed and torch.cuda.get_device_capability(device) >= (8, 0)
