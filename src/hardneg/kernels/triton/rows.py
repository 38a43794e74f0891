# ruff: noqa: N803, SIM108
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""The kernels of the row statistics: one sweep forward, one (self-similarity) or two (cross) backward.

With x_ij = log2(e) s_ij, s = similarity / temperature, and the tilt beta, the sums of a row are

    S0_i = sum_j 2^(beta (x_ij - m_i))          S1_i = sum_j 2^((1 + beta) (x_ij - m_i))

over the pairs that masks and bands allow, and log E_q[e^s] = ln 2 (m_i + log2 S1_i - log2 S0_i). The shift m_i is the
row's largest x (a running maximum), or one number for all rows: unit vectors have x <= log2(e) / temperature, and no
maximum is needed while the smallest term, (1 + beta) 2 log2(e) / temperature bits below 1, is a normal float32.

Backward (``gradients``). With upstream gradients g of log E_q[e^s] and h of the log-mass LSE(beta s),
u = 2^(beta (x - m_i)) and v = 2^(x - m_i), the gradient of s_ij in its role as a score of row i is

    u (v A_i + C_i),   A_i = (1 + beta) g_i / S1_i,   C_i = beta (h_i - g_i) / S0_i

(detached weights: A_i = g_i / S1_i, C_i = 0). With one shift for all rows u and v belong to the pair, so that in
self-similarity both roles share them: with e_ij = u (v (A_i + A_j) + (C_i + C_j)), sum_j e_ij z_j / temperature is the
whole gradient of z_i after two products. beta = 1 needs one exponential, u = v. Without a tilt, and with a detached
one, e_ij = w (A_i + A_j), w = 2^(k (x - m)), where k = 1 or 1 + beta is a part of the scale that the host passes.

Pairs that may be masked are few: with rows and columns sorted by id (or label) those of a block of rows are in few
blocks of columns, which have a loop of their own, after the one over the blocks that need no mask and no bounds check.
Nothing is added atomically, so that two runs give the same bits. A masked pair has x = -inf. A NaN is outside no band.
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

UNIFORM, SQUARE, GENERAL = 0, 1, 2
"""Kinds of tilt: one exponential per pair; one and its square (beta = 1); two."""


@jit
def fold(values, BM: tl.constexpr, BN: tl.constexpr, GIVEN: tl.constexpr):
    """Sum [BM, BN] to [BM, 8], which a thread of the tensor cores' layout sums alone; the rest is summed at the end.

    With GIVEN, return the values unchanged: loaded values have another layout, in which no thread can sum alone.
    """
    if GIVEN:
        return values
    else:
        return tl.sum(tl.reshape(values, [BM, BN // 8, 8]), 1)


@jit
def number_of(pairs, GIVEN: tl.constexpr):
    """Count the pairs of each row; with GIVEN, return them to be counted at the end."""
    if GIVEN:
        return pairs
    else:
        return tl.sum(pairs, 1)


@jit
def nothing_yet(BM: tl.constexpr, BN: tl.constexpr, GIVEN: tl.constexpr):
    """Return the initial sums, largest x and number of excluded pairs."""
    sums = tl.zeros([BM, BN if GIVEN else 8], tl.float32)
    if GIVEN:
        outside = tl.zeros([BM, BN], tl.int32)
    else:
        outside = tl.zeros([BM], tl.int32)
    return sums, sums, tl.full([BM], float("-inf"), tl.float32), outside


@jit
def joined(sum0, sum1, top, late0, late1, late_top, beta, FIXED: tl.constexpr):
    """Merge the sums of two parts of the columns, each relative to its own largest x."""
    if FIXED:
        return sum0 + late0, sum1 + late1, top
    else:
        largest = tl.maximum(top, late_top)
        safe = tl.where(largest == float("-inf"), 0.0, largest)
        fall, late_fall = top - safe, late_top - safe
        sum0 = sum0 * tl.exp2(beta * fall) + late0 * tl.exp2(beta * late_fall)
        sum1 = sum1 * tl.exp2((1.0 + beta) * fall) + late1 * tl.exp2((1.0 + beta) * late_fall)
        return sum0, sum1, largest


@jit
def added(
    sum0, sum1, top, outside, x, a_norm, rows, columns,
    c_norm_ptr, a_ids_ptr, c_ids_ptr, a_labels_ptr, c_labels_ptr, low_ptr, high_ptr, window_ptr, places_ptr,
    b, n, scale, beta, shift,
    BM: tl.constexpr, BN: tl.constexpr, TILT: tl.constexpr, FIXED: tl.constexpr, NORMS: tl.constexpr,
    SELF: tl.constexpr, IDS: tl.constexpr, LABELS: tl.constexpr, BAND: tl.constexpr, WINDOW: tl.constexpr,
    GIVEN: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """Add one more block of columns to the sums, whose products with the rows are x.

    GIVEN: the products were computed beforehand, of rows and columns of norm 1.
    """
    if NORMS and not GIVEN:
        c_norm = load_rows(c_norm_ptr, columns, n, CHECKED)[None, :]
    if GIVEN:
        if WINDOW:
            beyond = outside_window(x, window_ptr, places_ptr, rows, columns, b)
        x = x * scale - shift
    elif BAND:
        if NORMS:  # in this order the bits are those of the backward pass, from either side
            x = x * (a_norm[:, None] * c_norm)
        low = load_rows(low_ptr, rows, b, True)[:, None]
        high = load_rows(high_ptr, rows, b, True)[:, None]
        beyond = (x < low) | (x > high)
        x = x * scale - shift
    elif NORMS:
        x = x * c_norm * (a_norm * scale)[:, None] - shift
    else:
        x = x * scale - shift
    if CHECKED:
        allowed = allowed_pairs(
            a_ids_ptr, a_labels_ptr, c_ids_ptr, c_labels_ptr, rows, columns, b, n, SELF, IDS, LABELS
        )
        if BAND or WINDOW:
            allowed = allowed & ~beyond
        x = tl.where(allowed, x, float("-inf"))
        outside += number_of(tl.where(allowed | (columns >= n)[None, :], 0, 1), GIVEN)
    elif BAND or WINDOW:
        x = tl.where(beyond, float("-inf"), x)
        outside += number_of(beyond.to(tl.int32), GIVEN)
    if not FIXED:
        largest = tl.maximum(top, tl.max(x, 1))
        safe = tl.where(largest == float("-inf"), 0.0, largest)
        x = x - safe[:, None]
        fall = (top - safe)[:, None]
        top = largest
    v = tl.exp2(x)
    if TILT == 0:
        if not FIXED:
            sum1 = sum1 * tl.exp2(fall)
        sum1 += fold(v, BM, BN, GIVEN)
    elif TILT == 1:
        if not FIXED:
            sum0 = sum0 * tl.exp2(fall)
            sum1 = sum1 * tl.exp2(fall + fall)
        sum0 += fold(v, BM, BN, GIVEN)
        sum1 += fold(v * v, BM, BN, GIVEN)
    else:
        u = tl.exp2(beta * x)
        if not FIXED:
            sum0 = sum0 * tl.exp2(beta * fall)
            sum1 = sum1 * tl.exp2(beta * fall + fall)
        sum0 += fold(u, BM, BN, GIVEN)
        sum1 += fold(u * v, BM, BN, GIVEN)
    return sum0, sum1, top, outside


@jit
def pair_loss(log_mean, support, positive, temperature, tau_plus, DEBIASED: tl.constexpr):
    """Compute softplus(log M + log E - positive) of each row, with support M, and its slopes by log_mean and positive.

    DEBIASED: E becomes (E - tau_plus e^positive) / (1 - tau_plus), at least e^(-1 / temperature), as in ``debiased``.
    """
    some = support > 0
    log_e = tl.where(some, log_mean, 0.0)
    kept = log_mean * 0.0 + 1.0
    share = kept * 0.0
    if DEBIASED:
        share = tau_plus * tl.exp(positive - log_e)
        rest = log_e + tl.log(tl.where(share < 1.0, 1.0 - share, 1.0)) - tl.log(1.0 - tau_plus)
        floor = -1.0 / temperature
        floored = (share >= 1.0) | (rest <= floor)
        kept = tl.where(floored, 0.0, 1.0)
        log_e = tl.where(floored, floor, rest)
        share = tl.where(floored, 0.0, share)
    y = log_e + tl.log(tl.where(some, support, 1).to(tl.float32)) - positive
    t = tl.exp(-tl.abs(y))
    loss = tl.maximum(y, 0.0) + tl.where(t < 1e-4, t - 0.5 * t * t, tl.log(1.0 + t)) + y * 0.0
    slope = tl.where(y > 0, 1.0, t) / (1.0 + t)
    by_mean = tl.where(some, kept * slope / (1.0 - share), 0.0)
    by_positive = tl.where(some, -slope - kept * slope * share / (1.0 - share), 0.0)
    return tl.where(some, loss, positive * 0.0), by_mean, by_positive


@jit
def finish_rows(
    sum0, sum1, top, support, rows, a_norm, a_ptr, order_ptr, largest_ptr, log_mean_ptr, log_mass_ptr,
    support_ptr, sum0_ptr, sum1_ptr, shift_ptr, z_ptr, loss_ptr, positive_ptr, by_mean_ptr, by_positive_ptr,
    b, n, d, beta, shift, temperature, tau_plus,
    BM: tl.constexpr, BD: tl.constexpr, FULL_D: tl.constexpr, TILT: tl.constexpr, FIXED: tl.constexpr,
    NORMS: tl.constexpr, SORTED: tl.constexpr, VIEWS: tl.constexpr, DEBIASED: tl.constexpr,
):  # fmt: skip
    """Store the statistics of the rows, and their losses, in the given order."""
    real = rows < b
    if FIXED:
        at = tl.full([BM], 0.0, tl.float32) + shift
    else:
        at = tl.where(top == float("-inf"), 0.0, top)
    if TILT == 0:
        sum0 = support.to(tl.float32)
    mass = tl.log2(sum0) + beta * at
    mean = at + tl.log2(sum1) - tl.log2(sum0)
    ln2: tl.constexpr = 0.6931471805599453
    # An infinite feature is treated as NaN: it must not hide in a finite loss.
    broken = tl.sum(load_vectors(a_ptr, rows, b, d, BD, True, FULL_D).to(tl.float32) * 0.0, 1)
    if not NORMS:
        broken += tl.load(largest_ptr).to(tl.float32) * 0.0
    given = rows
    if SORTED:
        given = tl.load(order_ptr + rows, mask=real, other=0)
    log_mean = tl.where(support == 0, float("-inf"), mean * ln2) + broken
    if VIEWS:
        p = other_view(z_ptr, given, real, n, d, BD, NORMS)
        z = load_vectors(a_ptr, rows, b, d, BD, True, FULL_D).to(tl.float32)
        if NORMS:
            z = z * a_norm[:, None]
        positive = tl.sum(z * p, 1) / temperature
        loss, by_mean, by_positive = pair_loss(log_mean, support, positive, temperature, tau_plus, DEBIASED)
        tl.store(loss_ptr + given, loss, mask=real)
        tl.store(positive_ptr + given, positive, mask=real)
        tl.store(by_mean_ptr + given, by_mean, mask=real)
        tl.store(by_positive_ptr + given, by_positive, mask=real)
    tl.store(log_mean_ptr + given, log_mean, mask=real)
    tl.store(log_mass_ptr + given, tl.where(support == 0, float("-inf"), mass * ln2), mask=real)
    tl.store(support_ptr + given, support, mask=real)
    tl.store(sum0_ptr + rows, sum0, mask=real)
    tl.store(sum1_ptr + rows, sum1, mask=real)
    tl.store(shift_ptr + rows, at, mask=real)


@launched
def forward(
    a_ptr, c_ptr, a_norm_ptr, c_norm_ptr, a_ids_ptr, c_ids_ptr, a_labels_ptr, c_labels_ptr, low_ptr, high_ptr,
    begin_ptr, end_ptr, split_ptr, order_ptr, largest_ptr, log_mean_ptr, log_mass_ptr, support_ptr,
    sum0_ptr, sum1_ptr, shift_ptr, z_ptr, loss_ptr, positive_ptr, by_mean_ptr, by_positive_ptr,
    b, n, d, scale, beta, shift, temperature, tau_plus,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, FULL_D: tl.constexpr, TILT: tl.constexpr,
    FIXED: tl.constexpr, NORMS: tl.constexpr, SELF: tl.constexpr, IDS: tl.constexpr, LABELS: tl.constexpr,
    BAND: tl.constexpr, MASKED: tl.constexpr, SORTED: tl.constexpr, RAGGED: tl.constexpr, LATE: tl.constexpr,
    PRECISION: tl.constexpr, VIEWS: tl.constexpr, DEBIASED: tl.constexpr,
):  # fmt: skip
    """Compute the statistics of a block of rows against all columns."""
    begin = tl.program_id(0) * BM
    rows = begin + tl.arange(0, BM)
    a = load_vectors(a_ptr, rows, b, d, BD, True, FULL_D)
    a_norm = tl.full([BM], 1.0, tl.float32)
    if NORMS:  # once, and not in every block of columns
        a_norm = load_rows(a_norm_ptr, rows, b, True)
    sum0, sum1, top, outside = nothing_yet(BM, BN, False)
    first, last, skip, skipped, whole = masked_blocks(
        begin_ptr, end_ptr, split_ptr, begin, b, n, BM, BN, SELF, IDS, LABELS, MASKED, SORTED
    )
    if not MASKED:
        for k in tl.range(0, whole - (last - first)):
            columns = tl.where(k < first, k, k + (last - first)) * BN + tl.arange(0, BN)
            c = load_vectors(c_ptr, columns, n, d, BD, False, FULL_D)
            sum0, sum1, top, outside = added(
                sum0, sum1, top, outside, tl.dot(a, tl.trans(c), input_precision=PRECISION), a_norm, rows, columns,
                c_norm_ptr, a_ids_ptr, c_ids_ptr, a_labels_ptr, c_labels_ptr, low_ptr, high_ptr, None, None,
                b, n, scale, beta, shift,
                BM, BN, TILT, FIXED, NORMS, SELF, IDS, LABELS, BAND, False, False, False,
            )  # fmt: skip
    sum0, sum1 = tl.sum(sum0, 1), tl.sum(sum1, 1)
    if MASKED or SORTED or SELF or RAGGED:
        # Sums of their own, which hold no registers in the loop above.
        late0, late1, late_top, late_outside = nothing_yet(BM, BN, False)
        for k in tl.range(0, last - first - skipped + RAGGED, num_stages=LATE):
            start = tl.where(first + k < skip, first + k, first + k + skipped)
            columns = tl.where(start < last, start, whole) * BN + tl.arange(0, BN)
            c = load_vectors(c_ptr, columns, n, d, BD, True, FULL_D)
            late0, late1, late_top, late_outside = added(
                late0, late1, late_top, late_outside,
                tl.dot(a, tl.trans(c), input_precision=PRECISION), a_norm, rows, columns,
                c_norm_ptr, a_ids_ptr, c_ids_ptr, a_labels_ptr, c_labels_ptr, low_ptr, high_ptr, None, None,
                b, n, scale, beta, shift,
                BM, BN, TILT, FIXED, NORMS, SELF, IDS, LABELS, BAND, False, False, True,
            )  # fmt: skip
        outside += late_outside + skipped * BN
        sum0, sum1, top = joined(sum0, sum1, top, tl.sum(late0, 1), tl.sum(late1, 1), late_top, beta, FIXED)
    finish_rows(
        sum0, sum1, top, n - outside, rows, a_norm, a_ptr, order_ptr, largest_ptr, log_mean_ptr, log_mass_ptr,
        support_ptr, sum0_ptr, sum1_ptr, shift_ptr, z_ptr, loss_ptr, positive_ptr, by_mean_ptr, by_positive_ptr,
        b, n, d, beta, shift, temperature, tau_plus, BM, BD, FULL_D, TILT, FIXED, NORMS, SORTED, VIEWS, DEBIASED,
    )  # fmt: skip


@launched
def forward_of_products(
    base, given_ptr, a_ptr, a_norm_ptr, a_ids_ptr, c_ids_ptr, a_labels_ptr, c_labels_ptr, window_ptr, places_ptr,
    begin_ptr, end_ptr, split_ptr, order_ptr, largest_ptr, log_mean_ptr, log_mass_ptr, support_ptr,
    sum0_ptr, sum1_ptr, shift_ptr, z_ptr, loss_ptr, positive_ptr, by_mean_ptr, by_positive_ptr,
    b, n, d, scale, beta, shift, temperature, tau_plus,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, FULL_D: tl.constexpr, TILT: tl.constexpr,
    FIXED: tl.constexpr, NORMS: tl.constexpr, SELF: tl.constexpr, IDS: tl.constexpr, LABELS: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, SORTED: tl.constexpr, RAGGED: tl.constexpr,
    VIEWS: tl.constexpr, DEBIASED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Compute ``forward`` for the rows from ``base`` on, whose products with all columns are given, [rows, n].

    The last rows come first: their products were written last, and are in the cache.
    """
    begin = base + (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    rows = begin + tl.arange(0, BM)
    a_norm = tl.full([BM], 1.0, tl.float32)
    if NORMS:
        a_norm = load_rows(a_norm_ptr, rows, b, True)
    sum0, sum1, top, outside = nothing_yet(BM, BN, True)
    first, last, _, _, whole = masked_blocks(
        begin_ptr, end_ptr, split_ptr, begin, b, n, BM, BN, SELF, IDS, LABELS, MASKED, SORTED
    )
    if not MASKED:
        for k in tl.range(0, whole - (last - first), num_stages=AHEAD):
            columns = tl.where(k < first, k, k + (last - first)) * BN + tl.arange(0, BN)
            sum0, sum1, top, outside = added(
                sum0, sum1, top, outside,
                load_pairs(given_ptr, rows - base, columns, b - base, n, False), a_norm, rows, columns,
                None, a_ids_ptr, c_ids_ptr, a_labels_ptr, c_labels_ptr, None, None, window_ptr, places_ptr,
                b, n, scale, beta, shift,
                BM, BN, TILT, FIXED, NORMS, SELF, IDS, LABELS, False, WINDOW, True, False,
            )  # fmt: skip
    if MASKED or SORTED or SELF or RAGGED:
        for k in tl.range(0, last - first + RAGGED):
            columns = tl.where(first + k < last, first + k, whole) * BN + tl.arange(0, BN)
            sum0, sum1, top, outside = added(
                sum0, sum1, top, outside,
                load_pairs(given_ptr, rows - base, columns, b - base, n, True), a_norm, rows, columns,
                None, a_ids_ptr, c_ids_ptr, a_labels_ptr, c_labels_ptr, None, None, window_ptr, places_ptr,
                b, n, scale, beta, shift,
                BM, BN, TILT, FIXED, NORMS, SELF, IDS, LABELS, False, WINDOW, True, True,
            )  # fmt: skip
    finish_rows(
        tl.sum(sum0, 1), tl.sum(sum1, 1), top, n - tl.sum(outside, 1), rows, a_norm, a_ptr, order_ptr, largest_ptr,
        log_mean_ptr, log_mass_ptr, support_ptr, sum0_ptr, sum1_ptr, shift_ptr, z_ptr, loss_ptr, positive_ptr,
        by_mean_ptr, by_positive_ptr, b, n, d, beta, shift, temperature, tau_plus,
        BM, BD, FULL_D, TILT, FIXED, NORMS, SORTED, VIEWS, DEBIASED,
    )  # fmt: skip
