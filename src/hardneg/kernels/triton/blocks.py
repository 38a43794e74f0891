# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Functions that all sweeps share: loads with and without bounds checks, masks, and norms.

``masked_blocks`` decides which blocks of columns need a mask, ``allowed_pairs`` and ``outside_window`` compute masks,
and ``normed`` is the kernel that prepares normalised vectors.
"""

from __future__ import annotations

from hardneg.kernels.triton.language import jit, launched, tl


@jit
def load_vectors(pointer, rows, count, d, BD: tl.constexpr, CHECKED: tl.constexpr, FULL_D: tl.constexpr):
    """Load a block of vectors, [rows, BD]; zeros outside. CHECKED: rows may exceed ``count``."""
    features = tl.arange(0, BD)
    at = pointer + rows[:, None] * d + features[None, :]
    if CHECKED:
        return tl.load(at, mask=(rows < count)[:, None] & (features < d)[None, :], other=0.0)
    elif FULL_D:
        return tl.load(at)
    else:
        return tl.load(at, mask=(features < d)[None, :], other=0.0)


@jit
def load_rows(pointer, rows, count, CHECKED: tl.constexpr):
    """Load one number per row; 0 outside if CHECKED."""
    if CHECKED:
        return tl.load(pointer + rows, mask=rows < count, other=0.0)
    else:
        return tl.load(pointer + rows)


@jit
def load_pairs(pointer, rows, columns, count, n, CHECKED: tl.constexpr):
    """Load a block of a matrix with ``count`` rows and n columns, as float32."""
    at = pointer + rows[:, None] * n + columns[None, :]
    real = (rows < count)[:, None]
    if CHECKED:
        real = real & (columns < n)[None, :]
    return tl.load(at, mask=real, other=0.0).to(tl.float32)


@jit
def masked_blocks(
    begin_ptr, end_ptr, split_ptr, row, b, n,
    BM: tl.constexpr, BN: tl.constexpr, SELF: tl.constexpr, IDS: tl.constexpr, LABELS: tl.constexpr,
    MASKED: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """Return which blocks of columns may need masks for the rows from this one on.

    Of the ``whole`` full blocks, [first, last) may need masks, except [skip, skip + skipped), which no row
    needs. Sorted by label, the columns with the label of every row are excluded without being read. Where one id has
    two labels, every other block needs masks.
    """
    whole = n // BN
    begin = row * 0
    end = begin
    inner = begin
    inner_end = begin
    if MASKED:
        end += n
    elif SORTED:
        last_row = tl.minimum(row + BM, b) - 1
        begin = tl.load(begin_ptr + row)
        end = tl.load(end_ptr + last_row)
        if LABELS:
            inner = tl.load(begin_ptr + last_row)
            inner_end = tl.load(end_ptr + row)
            if IDS:
                split = tl.load(split_ptr) != 0
                begin = tl.where(split, 0, begin)
                end = tl.where(split, n, end)
    elif SELF:
        begin = row
        end = row + BM
    first = tl.minimum(begin // BN, whole)
    last = tl.minimum((end + BN - 1) // BN, whole)
    skip = (inner + BN - 1) // BN
    return first, last, skip, tl.maximum(inner_end // BN - skip, 0), whole


@jit
def allowed_pairs(
    row_ids_ptr, row_labels_ptr, column_ids_ptr, column_labels_ptr, rows, columns, b, n,
    SELF: tl.constexpr, IDS: tl.constexpr, LABELS: tl.constexpr,
):  # fmt: skip
    """Return the mask of pairs that differ in row, id (a negative id equals no other) and label."""
    allowed = (columns < n)[None, :]
    if SELF:
        allowed = allowed & (rows[:, None] != columns[None, :])
    if IDS:
        row = tl.load(row_ids_ptr + rows, mask=rows < b, other=-1)[:, None]
        column = tl.load(column_ids_ptr + columns, mask=columns < n, other=-1)[None, :]
        allowed = allowed & ((row != column) | (row < 0))
    if LABELS:
        row = tl.load(row_labels_ptr + rows, mask=rows < b, other=0)[:, None]
        allowed = allowed & (row != tl.load(column_labels_ptr + columns, mask=columns < n, other=0)[None, :])
    return allowed


@jit
def outside_window(similarity, window_ptr, places_ptr, rows, columns, b):
    """Return the pairs outside the window of their row: closer than its first edge, or farther than the second.

    Pairs that tie with an edge are inside up to the column of the edge. A NaN is never outside, so that it stays
    visible.
    """
    real = rows < b
    high = tl.load(window_ptr + 2 * rows, mask=real, other=0.0)[:, None]
    low = tl.load(window_ptr + 2 * rows + 1, mask=real, other=0.0)[:, None]
    last_high = tl.load(places_ptr + 2 * rows, mask=real, other=0)[:, None]
    last_low = tl.load(places_ptr + 2 * rows + 1, mask=real, other=0)[:, None]
    within = (similarity > high) | ((similarity == high) & (columns[None, :] <= last_high))
    return within | (similarity < low) | ((similarity == low) & (columns[None, :] > last_low))


@jit
def unit_rows(v):
    """Scale float32 rows by a power of two; return them with the inverse norms after and before the scaling.

    The inverse norm of a row of zeros is 0. The power, which is exact, keeps squares in the range of float32 at any
    scale of the rows.
    """
    exponent = tl.max(tl.abs(v), 1).to(tl.int32, bitcast=True) & 0x7F800000
    power = tl.maximum(0x7F000000 - exponent, 0x00800000).to(tl.float32, bitcast=True)
    v = v * power[:, None]
    square = tl.sum(v * v, 1)
    inverse = tl.where(square == 0.0, 0.0, 1.0 / tl.sqrt(square))
    return v, inverse, inverse * power


@launched
def normed(
    v_ptr, order_ptr, out_ptr, unit_ptr, inverse_ptr, slope_ptr, n, d,
    BM: tl.constexpr, BD: tl.constexpr, SORTED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Store rows in their order, scaled as by ``unit_rows``, in their own precision; UNIT: also with norm 1."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    features = tl.arange(0, BD)
    real = (rows < n)[:, None] & (features < d)[None, :]
    given = rows
    if SORTED:
        given = tl.load(order_ptr + rows, mask=rows < n, other=0)
    v = tl.load(v_ptr + given[:, None] * d + features[None, :], mask=real, other=0.0)
    scaled, inverse, slope = unit_rows(v.to(tl.float32))
    at = rows[:, None] * d + features[None, :]
    tl.store(out_ptr + at, scaled.to(v.dtype), mask=real)
    if UNIT:
        tl.store(unit_ptr + at, (scaled * inverse[:, None]).to(unit_ptr.dtype.element_ty), mask=real)
    tl.store(inverse_ptr + rows, inverse, mask=rows < n)
    tl.store(slope_ptr + rows, slope, mask=rows < n)


@jit
def other_view(z_ptr, given, real, n, d, BD: tl.constexpr, NORMS: tl.constexpr):
    """Load the positive of each row: the same instance in the other half of the rows."""
    half = n // 2
    there = tl.where(given < half, given + half, given - half)
    features = tl.arange(0, BD)
    at = z_ptr + there[:, None] * d + features[None, :]
    p = tl.load(at, mask=real[:, None] & (features < d)[None, :], other=0.0).to(tl.float32)
    if NORMS:
        p, inverse, _ = unit_rows(p)
        p = p * inverse[:, None]
    return p
