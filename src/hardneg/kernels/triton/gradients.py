# ruff: noqa: N803, N806
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""The backward kernels of the row statistics; ``rows`` has the derivation and the names.

``coefficients`` prepares A, C and the shift of each row. ``backward`` computes the gradient in one kernel;
``backward_of_products`` and ``finished`` do the same for products that were computed beforehand.
"""

from __future__ import annotations

from hardneg.kernels.triton.blocks import (
    allowed_pairs,
    load_pairs,
    load_rows,
    load_vectors,
    masked_blocks,
    other_view,
    outside_window,
)
from hardneg.kernels.triton.language import jit, launched, tl


@launched
def coefficients(
    g_ptr, h_ptr, largest_ptr, order_ptr, sum0_ptr, sum1_ptr, shift_ptr, by_mean_ptr, by_positive_ptr,
    A_ptr, C_ptr, at_ptr, pull_ptr, unit_ptr, b, stride, beta, slope, power, headroom, temperature,
    BLOCK: tl.constexpr, SORTED: tl.constexpr, MEAN: tl.constexpr, MASS: tl.constexpr, SCALED: tl.constexpr,
    VIEWS: tl.constexpr,
):  # fmt: skip
    """Compute A, C and shift of each row for upstream gradients divided by ``unit``, and unit / temperature.

    VIEWS: the upstream gradient is that of the losses, and the pull of the positives is stored, too.
    SCALED: unit is the largest gradient times ``headroom``, where coefficients could overflow, or the products of their
    float16 gradients vanish: their largest entry is then about 2^14. Otherwise it is 1.
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = rows < b
    given = rows
    if SORTED:
        given = tl.load(order_ptr + rows, mask=real, other=0)
    g = tl.zeros([BLOCK], tl.float32)
    h = tl.zeros([BLOCK], tl.float32)
    if MEAN:
        g += tl.load(g_ptr + given * stride, mask=real, other=0.0)
    if MASS:
        h += tl.load(h_ptr + given, mask=real, other=0.0)
    if VIEWS:
        pull = g * tl.load(by_positive_ptr + given, mask=real, other=0.0) / temperature
        tl.store(pull_ptr + given, pull, mask=real)
        g = g * tl.load(by_mean_ptr + given, mask=real, other=0.0)
    unit = temperature * 0.0 + 1.0
    if SCALED:
        unit = tl.load(largest_ptr) * headroom
        unit = tl.where(unit == 0.0, 1.0, unit)
    sum0 = tl.load(sum0_ptr + rows, mask=real, other=1.0)
    sum1 = tl.load(sum1_ptr + rows, mask=real, other=1.0)
    tl.store(A_ptr + rows, tl.where(sum1 == 0.0, 0.0, slope * (g / unit) / sum1), mask=real)
    tl.store(C_ptr + rows, tl.where(sum1 == 0.0, 0.0, beta * ((h - g) / unit) / sum0), mask=real)
    tl.store(at_ptr + rows, tl.load(shift_ptr + rows, mask=real, other=0.0) * power, mask=real)
    if tl.program_id(0) == 0:
        tl.store(unit_ptr, unit / temperature)


@jit
def pair_gradient(x, beta, A, C, TILT: tl.constexpr):
    """Compute u (v A + C) of the derivation."""
    v = tl.exp2(x)
    if TILT == 0:
        return v * A
    elif TILT == 1:
        return v * (v * A + C)
    else:
        return tl.exp2(beta * x) * (v * A + C)


@jit
def role_gradient(
    x, similarity, beta, A_ptr, C_ptr, shift_ptr, low_ptr, high_ptr, at, count,
    AXIS: tl.constexpr, TILT: tl.constexpr, FIXED: tl.constexpr, BAND: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the pairs as scores of their rows (AXIS 1) or columns (AXIS 0), with band and shift."""
    A = tl.expand_dims(load_rows(A_ptr, at, count, CHECKED), AXIS)
    C = A
    if TILT != 0:
        C = tl.expand_dims(load_rows(C_ptr, at, count, CHECKED), AXIS)
    if not FIXED:
        x = x - tl.expand_dims(load_rows(shift_ptr, at, count, CHECKED), AXIS)
    if BAND:  # a pair above its band may be above the shift too: its exponential would be infinite
        low = tl.expand_dims(load_rows(low_ptr, at, count, CHECKED), AXIS)
        high = tl.expand_dims(load_rows(high_ptr, at, count, CHECKED), AXIS)
        x = tl.where((similarity < low) | (similarity > high), float("-inf"), x)
    return pair_gradient(x, beta, A, C, TILT)


@jit
def gradient_of_pairs(
    x, r_norm, rows, columns,
    c_norm_ptr, r_ids_ptr, c_ids_ptr, r_labels_ptr, c_labels_ptr, r_low_ptr, r_high_ptr, c_low_ptr, c_high_ptr,
    window_ptr, places_ptr, r_A_ptr, r_C_ptr, r_shift_ptr, c_A_ptr, c_C_ptr, c_shift_ptr, b, n, scale, beta, shift,
    TILT: tl.constexpr, FIXED: tl.constexpr, NORMS: tl.constexpr, SELF: tl.constexpr, IDS: tl.constexpr,
    LABELS: tl.constexpr, BAND: tl.constexpr, WINDOW: tl.constexpr, GIVEN: tl.constexpr, ROW: tl.constexpr,
    COLUMN: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """Compute E of the pairs of a block from the products x of their vectors; GIVEN: those have norm 1."""
    similarity = x
    if NORMS:
        c_norm = load_rows(c_norm_ptr, columns, n, CHECKED)[None, :]
    if GIVEN:
        x = x * scale - shift
    elif NORMS and BAND:
        similarity = x * (r_norm[:, None] * c_norm)
        x = similarity * scale - shift
    elif NORMS:
        x = x * c_norm * (r_norm * scale)[:, None] - shift
    else:
        x = x * scale - shift
    if CHECKED:
        allowed = allowed_pairs(
            r_ids_ptr, r_labels_ptr, c_ids_ptr, c_labels_ptr, rows, columns, b, n, SELF, IDS, LABELS
        )
        x = tl.where(allowed, x, float("-inf"))
    if WINDOW:
        x = tl.where(outside_window(similarity, window_ptr, places_ptr, rows, columns, b), float("-inf"), x)
    if FIXED and not BAND:
        if ROW:
            A = load_rows(r_A_ptr, rows, b, True)[:, None]
            C = A
            if TILT != 0:
                C = load_rows(r_C_ptr, rows, b, True)[:, None]
        if COLUMN:
            c_A = load_rows(c_A_ptr, columns, n, CHECKED)[None, :]
            c_C = c_A
            if TILT != 0:
                c_C = load_rows(c_C_ptr, columns, n, CHECKED)[None, :]
        if ROW and COLUMN:
            e = pair_gradient(x, beta, A + c_A, C + c_C, TILT)
        elif ROW:
            e = pair_gradient(x, beta, A, C, TILT)
        else:
            e = pair_gradient(x, beta, c_A, c_C, TILT)
    else:
        e = tl.zeros_like(x)
        if ROW:
            e += role_gradient(
                x, similarity, beta, r_A_ptr, r_C_ptr, r_shift_ptr, r_low_ptr, r_high_ptr, rows, b,
                1, TILT, FIXED, BAND, True,
            )  # fmt: skip
        if COLUMN:
            e += role_gradient(
                x, similarity, beta, c_A_ptr, c_C_ptr, c_shift_ptr, c_low_ptr, c_high_ptr, columns, n,
                0, TILT, FIXED, BAND, CHECKED,
            )  # fmt: skip
    if NORMS:
        e = e * c_norm
    return e


@jit
def pulled(
    total, start, r, r_norm, rows,
    c_ptr, c_norm_ptr, r_ids_ptr, c_ids_ptr, r_labels_ptr, c_labels_ptr,
    r_low_ptr, r_high_ptr, c_low_ptr, c_high_ptr, r_A_ptr, r_C_ptr, r_shift_ptr, c_A_ptr, c_C_ptr, c_shift_ptr,
    b, n, d, scale, beta, shift,
    BN: tl.constexpr, BD: tl.constexpr, FULL_D: tl.constexpr, TILT: tl.constexpr, FIXED: tl.constexpr,
    NORMS: tl.constexpr, SELF: tl.constexpr, IDS: tl.constexpr, LABELS: tl.constexpr, BAND: tl.constexpr,
    PRECISION: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """Add one more block of columns to the gradient of the rows."""
    columns = start + tl.arange(0, BN)
    c = load_vectors(c_ptr, columns, n, d, BD, CHECKED, FULL_D)
    e = gradient_of_pairs(
        tl.dot(r, tl.trans(c), input_precision=PRECISION), r_norm, rows, columns,
        c_norm_ptr, r_ids_ptr, c_ids_ptr, r_labels_ptr, c_labels_ptr, r_low_ptr, r_high_ptr, c_low_ptr, c_high_ptr,
        None, None, r_A_ptr, r_C_ptr, r_shift_ptr, c_A_ptr, c_C_ptr, c_shift_ptr, b, n, scale, beta, shift,
        TILT, FIXED, NORMS, SELF, IDS, LABELS, BAND, False, False, ROW, COLUMN, CHECKED,
    )  # fmt: skip
    return tl.dot(e.to(c.dtype), c, total, input_precision=PRECISION)


@launched
def backward_of_products(
    base, given_ptr, e_ptr, c_norm_ptr, r_ids_ptr, c_ids_ptr, r_labels_ptr, c_labels_ptr, window_ptr, places_ptr,
    r_A_ptr, r_C_ptr, r_shift_ptr, c_A_ptr, c_C_ptr, c_shift_ptr, begin_ptr, end_ptr, split_ptr,
    b, n, scale, beta, shift,
    BM: tl.constexpr, BN: tl.constexpr, TILT: tl.constexpr, FIXED: tl.constexpr, NORMS: tl.constexpr,
    SELF: tl.constexpr, IDS: tl.constexpr, LABELS: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
    SORTED: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr,
):  # fmt: skip
    """Compute E of one block from the products of the rows from ``base`` on; both [rows, n]. See ``backward``.

    The last rows come first: their products were written last, and are in the cache.
    """
    begin, k = base + (tl.num_programs(1) - 1 - tl.program_id(1)) * BM, tl.program_id(0)
    rows, columns = begin + tl.arange(0, BM), k * BN + tl.arange(0, BN)
    first, last, _, _, whole = masked_blocks(
        begin_ptr, end_ptr, split_ptr, begin, b, n, BM, BN, SELF, IDS, LABELS, MASKED, SORTED
    )
    at = e_ptr + (rows - base)[:, None] * n + columns[None, :]
    if ((k >= first) & (k < last)) | (k == whole):
        e = gradient_of_pairs(
            load_pairs(given_ptr, rows - base, columns, b - base, n, True), None, rows, columns,
            c_norm_ptr, r_ids_ptr, c_ids_ptr, r_labels_ptr, c_labels_ptr, None, None, None, None,
            window_ptr, places_ptr, r_A_ptr, r_C_ptr, r_shift_ptr, c_A_ptr, c_C_ptr, c_shift_ptr,
            b, n, scale, beta, shift,
            TILT, FIXED, NORMS, SELF, IDS, LABELS, False, WINDOW, True, ROW, COLUMN, True,
        )  # fmt: skip
        tl.store(at, e.to(e_ptr.dtype.element_ty), mask=(rows < b)[:, None] & (columns < n)[None, :])
    else:
        e = gradient_of_pairs(
            load_pairs(given_ptr, rows - base, columns, b - base, n, False), None, rows, columns,
            c_norm_ptr, r_ids_ptr, c_ids_ptr, r_labels_ptr, c_labels_ptr, None, None, None, None,
            window_ptr, places_ptr, r_A_ptr, r_C_ptr, r_shift_ptr, c_A_ptr, c_C_ptr, c_shift_ptr,
            b, n, scale, beta, shift,
            TILT, FIXED, NORMS, SELF, IDS, LABELS, False, WINDOW, True, ROW, COLUMN, False,
        )  # fmt: skip
        tl.store(at, e.to(e_ptr.dtype.element_ty), mask=(rows < b)[:, None])


@jit
def finish_gradient(
    total, rows, r_ptr, r_norm_ptr, slope_ptr, order_ptr, unit_ptr, gradient_ptr, product_ptr, z_ptr, by_positive_ptr,
    b, n, d, BD: tl.constexpr, FULL_D: tl.constexpr, NORMS: tl.constexpr, SORTED: tl.constexpr, PRODUCT: tl.constexpr,
    VIEWS: tl.constexpr,
):  # fmt: skip
    """Store the gradient of the rows in the given order, from sum_j e_ij c_j."""
    real = rows < b
    given = rows
    if SORTED:
        given = tl.load(order_ptr + rows, mask=real, other=0)
    total = total * tl.load(unit_ptr)
    if VIEWS:  # the positive of a row is that of its other view too
        half = n // 2
        there = tl.where(given < half, given + half, given - half)
        pull = tl.load(by_positive_ptr + given, mask=real, other=0.0)
        pull += tl.load(by_positive_ptr + there, mask=real, other=0.0)
        total += pull[:, None] * other_view(z_ptr, given, real, n, d, BD, NORMS)
    if NORMS or PRODUCT:
        z = load_vectors(r_ptr, rows, b, d, BD, True, FULL_D).to(tl.float32)
        if NORMS:
            z = z * load_rows(r_norm_ptr, rows, b, True)[:, None]
        product = tl.sum(total * z, 1)
        tl.store(product_ptr + rows, product, mask=real)
        if NORMS:  # z = r slope, r as it was given: grad r = slope (grad z - z (z . grad z))
            total = (total - z * product[:, None]) * load_rows(slope_ptr, rows, b, True)[:, None]
    features = tl.arange(0, BD)
    at = gradient_ptr + given[:, None] * d + features[None, :]
    tl.store(at, total.to(gradient_ptr.dtype.element_ty), mask=real[:, None] & (features < d)[None, :])


@launched
def finished(
    total_ptr, r_ptr, r_norm_ptr, slope_ptr, order_ptr, unit_ptr, gradient_ptr, product_ptr, z_ptr, by_positive_ptr,
    b, n, d, BM: tl.constexpr, BD: tl.constexpr, FULL_D: tl.constexpr, NORMS: tl.constexpr, SORTED: tl.constexpr,
    PRODUCT: tl.constexpr, VIEWS: tl.constexpr,
):  # fmt: skip
    """Finish ``backward`` for rows whose sums sum_j e_ij c_j are given."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    total = load_vectors(total_ptr, rows, b, d, BD, True, FULL_D)
    finish_gradient(
        total, rows, r_ptr, r_norm_ptr, slope_ptr, order_ptr, unit_ptr, gradient_ptr, product_ptr, z_ptr,
        by_positive_ptr, b, n, d, BD, FULL_D, NORMS, SORTED, PRODUCT, VIEWS,
    )  # fmt: skip


@launched
def backward(
    r_ptr, c_ptr, r_norm_ptr, c_norm_ptr, slope_ptr, r_ids_ptr, c_ids_ptr, r_labels_ptr, c_labels_ptr,
    r_low_ptr, r_high_ptr, c_low_ptr, c_high_ptr, r_A_ptr, r_C_ptr, r_shift_ptr, c_A_ptr, c_C_ptr, c_shift_ptr,
    begin_ptr, end_ptr, split_ptr, order_ptr, unit_ptr, gradient_ptr, product_ptr, z_ptr, by_positive_ptr,
    b, n, d, scale, beta, shift,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, FULL_D: tl.constexpr, TILT: tl.constexpr,
    FIXED: tl.constexpr, NORMS: tl.constexpr, SELF: tl.constexpr, IDS: tl.constexpr, LABELS: tl.constexpr,
    BAND: tl.constexpr, MASKED: tl.constexpr, SORTED: tl.constexpr, RAGGED: tl.constexpr, LATE: tl.constexpr,
    PRECISION: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr, PRODUCT: tl.constexpr, VIEWS: tl.constexpr,
):  # fmt: skip
    """Compute grad r_i = unit sum_j e_ij c_j; ROW: rows are anchors, COLUMN: columns are, both in self-similarity."""
    begin = tl.program_id(0) * BM
    rows = begin + tl.arange(0, BM)
    r = load_vectors(r_ptr, rows, b, d, BD, True, FULL_D)
    total = tl.zeros([BM, BD], tl.float32)
    r_norm = tl.full([BM], 1.0, tl.float32)
    if NORMS:
        r_norm = load_rows(r_norm_ptr, rows, b, True)
    first, last, skip, skipped, whole = masked_blocks(
        begin_ptr, end_ptr, split_ptr, begin, b, n, BM, BN, SELF, IDS, LABELS, MASKED, SORTED
    )
    if not MASKED:
        for k in tl.range(0, whole - (last - first)):
            start = tl.where(k < first, k, k + (last - first)) * BN
            total = pulled(
                total, start, r, r_norm, rows,
                c_ptr, c_norm_ptr, r_ids_ptr, c_ids_ptr, r_labels_ptr, c_labels_ptr,
                r_low_ptr, r_high_ptr, c_low_ptr, c_high_ptr,
                r_A_ptr, r_C_ptr, r_shift_ptr, c_A_ptr, c_C_ptr, c_shift_ptr, b, n, d, scale, beta, shift,
                BN, BD, FULL_D, TILT, FIXED, NORMS, SELF, IDS, LABELS, BAND, PRECISION, ROW, COLUMN, False,
            )  # fmt: skip
    if MASKED or SORTED or SELF or RAGGED:
        for k in tl.range(0, last - first - skipped + RAGGED, num_stages=LATE):
            start = tl.where(first + k < skip, first + k, first + k + skipped)
            start = tl.where(start < last, start, whole) * BN
            total = pulled(
                total, start, r, r_norm, rows,
                c_ptr, c_norm_ptr, r_ids_ptr, c_ids_ptr, r_labels_ptr, c_labels_ptr,
                r_low_ptr, r_high_ptr, c_low_ptr, c_high_ptr,
                r_A_ptr, r_C_ptr, r_shift_ptr, c_A_ptr, c_C_ptr, c_shift_ptr, b, n, d, scale, beta, shift,
                BN, BD, FULL_D, TILT, FIXED, NORMS, SELF, IDS, LABELS, BAND, PRECISION, ROW, COLUMN, True,
            )  # fmt: skip
    finish_gradient(
        total, rows, r_ptr, r_norm_ptr, slope_ptr, order_ptr, unit_ptr, gradient_ptr, product_ptr, z_ptr,
        by_positive_ptr, b, n, d, BD, FULL_D, NORMS, SORTED, PRODUCT, VIEWS,
    )  # fmt: skip
