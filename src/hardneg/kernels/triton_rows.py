# ruff: noqa: N803, N806, SIM108
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""The kernels of the row statistics: one sweep forward, one (self-similarity) or two (cross) backward.

With x_ij = log2(e) s_ij, s = similarity / temperature, and the tilt beta, the sums of a row are

    S0_i = sum_j 2^(beta (x_ij - m_i))          S1_i = sum_j 2^((1 + beta) (x_ij - m_i))

over the pairs that masks and bands allow, and log E_q[e^s] = ln 2 (m_i + log2 S1_i - log2 S0_i). The shift m_i is the
row's largest x (a running maximum), or one number for all rows: unit vectors have x <= log2(e) / temperature, and no
maximum is needed while the smallest term, (1 + beta) 2 log2(e) / temperature bits below 1, is a normal float32.

Backward. With upstream gradients g of log E_q[e^s] and h of the log-mass LSE(beta s), u = 2^(beta (x - m_i)) and
v = 2^(x - m_i), the gradient of s_ij in its role as a score of row i is

    u (v A_i + C_i),   A_i = (1 + beta) g_i / S1_i,   C_i = beta (h_i - g_i) / S0_i

(detached weights: A_i = g_i / S1_i, C_i = 0). With one shift for all rows u and v belong to the pair, so that in
self-similarity both roles share them: e_ij = u (v (A_i + A_j) + (C_i + C_j)), and
grad z_i = sum_j e_ij z_j / temperature
is the whole gradient after two products. beta = 1 needs one exponential, u = v. Without a tilt, and with a detached
one, e_ij = w (A_i + A_j), w = 2^(k (x - m)), where k = 1 or 1 + beta is a part of the scale that the host passes.

Pairs that may be masked are few: with rows and columns sorted by id (or label) those of a block of rows are in few
blocks of columns, which have a loop of their own, after the one over the blocks that need no mask and no bounds check.
Nothing is added atomically, so that two runs give the same bits. A masked pair has x = -inf. A NaN is outside no band.
"""

from __future__ import annotations

from hardneg.kernels.triton_language import jit, tl

UNIFORM, SQUARE, GENERAL = 0, 1, 2
"""Weights of a pair: one exponential; one and its square (beta = 1); two."""


@jit
def load_vectors(pointer, rows, count, d, BD: tl.constexpr, CHECKED: tl.constexpr, FULL_D: tl.constexpr):
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
    if CHECKED:
        return tl.load(pointer + rows, mask=rows < count, other=0.0)
    else:
        return tl.load(pointer + rows)


@jit
def masked_blocks(
    begin_ptr, end_ptr, split_ptr, b, n,
    BM: tl.constexpr, BN: tl.constexpr, SELF: tl.constexpr, IDS: tl.constexpr, LABELS: tl.constexpr,
    MASKED: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """Blocks of columns, of the whole ones: [first, last) may need masks, of which no row needs [skip, skip + skipped).

    Sorted by label, the columns with the label of every row are excluded without a look, unless one id has two labels.
    """
    whole = n // BN
    row = tl.program_id(0) * BM
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
                inner_end = tl.where(split, inner, inner_end)
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
    """Other columns than the row itself, of another id (a negative one is nobody's) and of another label."""
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
def fold(values, BM: tl.constexpr, BN: tl.constexpr):
    """[BM, BN] -> [BM, 8]: sums that a thread of the tensor cores' layout takes alone; the rest is for the end."""
    return tl.sum(tl.reshape(values, [BM, BN // 8, 8]), 1)


@jit
def nothing_yet(BM: tl.constexpr):
    sums = tl.zeros([BM, 8], tl.float32)
    return sums, sums, tl.full([BM], float("-inf"), tl.float32)


@jit
def added(
    sum0, sum1, top, outside, start, a, rows,
    c_ptr, a_norm_ptr, c_norm_ptr, a_ids_ptr, c_ids_ptr, a_labels_ptr, c_labels_ptr, low_ptr, high_ptr,
    b, n, d, scale, beta, shift,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, FULL_D: tl.constexpr, TILT: tl.constexpr,
    FIXED: tl.constexpr, NORMS: tl.constexpr, SELF: tl.constexpr, IDS: tl.constexpr, LABELS: tl.constexpr,
    BAND: tl.constexpr, PRECISION: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """The sums with one more block of columns."""
    columns = start + tl.arange(0, BN)
    c = load_vectors(c_ptr, columns, n, d, BD, CHECKED, FULL_D)
    x = tl.dot(a, tl.trans(c), input_precision=PRECISION)
    if NORMS:
        a_norm = load_rows(a_norm_ptr, rows, b, True)[:, None]
        c_norm = load_rows(c_norm_ptr, columns, n, CHECKED)[None, :]
    if BAND:
        if NORMS:
            x = x * (a_norm * c_norm)  # in this order the bits are those of the backward pass, from either side
        low = load_rows(low_ptr, rows, b, True)[:, None]
        high = load_rows(high_ptr, rows, b, True)[:, None]
        beyond = (x < low) | (x > high)
        x = x * scale - shift
    elif NORMS:
        x = x * c_norm * (a_norm * scale) - shift
    else:
        x = x * scale - shift
    if CHECKED:
        allowed = allowed_pairs(
            a_ids_ptr, a_labels_ptr, c_ids_ptr, c_labels_ptr, rows, columns, b, n, SELF, IDS, LABELS
        )
        if BAND:
            allowed = allowed & ~beyond
        x = tl.where(allowed, x, float("-inf"))
        outside += tl.sum(tl.where(allowed | (columns >= n)[None, :], 0, 1), 1)
    elif BAND:
        x = tl.where(beyond, float("-inf"), x)
        outside += tl.sum(beyond.to(tl.int32), 1)
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
        sum1 += fold(v, BM, BN)
    elif TILT == 1:
        if not FIXED:
            sum0 = sum0 * tl.exp2(fall)
            sum1 = sum1 * tl.exp2(fall + fall)
        sum0 += fold(v, BM, BN)
        sum1 += fold(v * v, BM, BN)
    else:
        u = tl.exp2(beta * x)
        if not FIXED:
            sum0 = sum0 * tl.exp2(beta * fall)
            sum1 = sum1 * tl.exp2(beta * fall + fall)
        sum0 += fold(u, BM, BN)
        sum1 += fold(u * v, BM, BN)
    return sum0, sum1, top, outside


@jit
def other_view(z_ptr, given, real, n, d, BD: tl.constexpr, NORMS: tl.constexpr):
    """The positives: the rows half of all rows away."""
    half = n // 2
    there = tl.where(given < half, given + half, given - half)
    features = tl.arange(0, BD)
    at = z_ptr + there[:, None] * d + features[None, :]
    p = tl.load(at, mask=real[:, None] & (features < d)[None, :], other=0.0).to(tl.float32)
    if NORMS:
        p = p / tl.maximum(tl.sqrt(tl.sum(p * p, 1)), 1e-12)[:, None]
    return p


@jit
def pair_loss(log_mean, support, positive, temperature, tau_plus, DEBIASED: tl.constexpr):
    """softplus(log M + log E - positive) of each row, M the support, and its slopes by log_mean and by the positive.

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
def forward(
    a_ptr, c_ptr, a_norm_ptr, c_norm_ptr, a_ids_ptr, c_ids_ptr, a_labels_ptr, c_labels_ptr, low_ptr, high_ptr,
    begin_ptr, end_ptr, split_ptr, order_ptr, largest_ptr, log_mean_ptr, log_mass_ptr, support_ptr,
    sum0_ptr, sum1_ptr, shift_ptr, z_ptr, loss_ptr, by_mean_ptr, by_positive_ptr,
    b, n, d, scale, beta, shift, temperature, tau_plus,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, FULL_D: tl.constexpr, TILT: tl.constexpr,
    FIXED: tl.constexpr, NORMS: tl.constexpr, SELF: tl.constexpr, IDS: tl.constexpr, LABELS: tl.constexpr,
    BAND: tl.constexpr, MASKED: tl.constexpr, SORTED: tl.constexpr, RAGGED: tl.constexpr, LATE: tl.constexpr,
    PRECISION: tl.constexpr, VIEWS: tl.constexpr, DEBIASED: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    a = load_vectors(a_ptr, rows, b, d, BD, True, FULL_D)
    outside = tl.zeros([BM], tl.int32)
    sum0, sum1, top = nothing_yet(BM)
    first, last, skip, skipped, whole = masked_blocks(
        begin_ptr, end_ptr, split_ptr, b, n, BM, BN, SELF, IDS, LABELS, MASKED, SORTED
    )
    if not MASKED:
        for k in tl.range(0, whole - (last - first)):
            start = tl.where(k < first, k, k + (last - first)) * BN
            sum0, sum1, top, outside = added(
                sum0, sum1, top, outside, start, a, rows,
                c_ptr, a_norm_ptr, c_norm_ptr, a_ids_ptr, c_ids_ptr, a_labels_ptr, c_labels_ptr, low_ptr, high_ptr,
                b, n, d, scale, beta, shift,
                BM, BN, BD, FULL_D, TILT, FIXED, NORMS, SELF, IDS, LABELS, BAND, PRECISION, False,
            )  # fmt: skip
    sum0, sum1 = tl.sum(sum0, 1), tl.sum(sum1, 1)
    if MASKED or SORTED or SELF or RAGGED:
        # Sums of their own, which hold no registers in the loop above.
        late0, late1, late_top = nothing_yet(BM)
        outside += skipped * BN
        for k in tl.range(0, last - first - skipped + RAGGED, num_stages=LATE):
            start = tl.where(first + k < skip, first + k, first + k + skipped)
            start = tl.where(start < last, start, whole) * BN
            late0, late1, late_top, outside = added(
                late0, late1, late_top, outside, start, a, rows,
                c_ptr, a_norm_ptr, c_norm_ptr, a_ids_ptr, c_ids_ptr, a_labels_ptr, c_labels_ptr, low_ptr, high_ptr,
                b, n, d, scale, beta, shift,
                BM, BN, BD, FULL_D, TILT, FIXED, NORMS, SELF, IDS, LABELS, BAND, PRECISION, True,
            )  # fmt: skip
        late0, late1 = tl.sum(late0, 1), tl.sum(late1, 1)
        if not FIXED:
            largest = tl.maximum(top, late_top)
            safe = tl.where(largest == float("-inf"), 0.0, largest)
            sum0 = sum0 * tl.exp2(beta * (top - safe))
            sum1 = sum1 * tl.exp2((1.0 + beta) * (top - safe))
            late0 = late0 * tl.exp2(beta * (late_top - safe))
            late1 = late1 * tl.exp2((1.0 + beta) * (late_top - safe))
            top = largest
        sum0 += late0
        sum1 += late1

    real = rows < b
    support = n - outside
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
    if not SELF:
        broken += tl.load(largest_ptr).to(tl.float32) * 0.0
    given = rows
    if SORTED:
        given = tl.load(order_ptr + rows, mask=real, other=0)
    log_mean = tl.where(support == 0, float("-inf"), mean * ln2) + broken
    if VIEWS:
        p = other_view(z_ptr, given, real, n, d, BD, NORMS)
        z = load_vectors(a_ptr, rows, b, d, BD, True, FULL_D).to(tl.float32)
        if NORMS:
            z = z * load_rows(a_norm_ptr, rows, b, True)[:, None]
        positive = tl.sum(z * p, 1) / temperature
        loss, by_mean, by_positive = pair_loss(log_mean, support, positive, temperature, tau_plus, DEBIASED)
        tl.store(loss_ptr + given, loss, mask=real)
        tl.store(by_mean_ptr + given, by_mean, mask=real)
        tl.store(by_positive_ptr + given, by_positive, mask=real)
    tl.store(log_mean_ptr + given, log_mean, mask=real)
    tl.store(log_mass_ptr + given, tl.where(support == 0, float("-inf"), mass * ln2), mask=real)
    tl.store(support_ptr + given, support, mask=real)
    tl.store(sum0_ptr + rows, sum0, mask=real)
    tl.store(sum1_ptr + rows, sum1, mask=real)
    tl.store(shift_ptr + rows, at, mask=real)


@jit
def coefficients(
    g_ptr, h_ptr, largest_ptr, order_ptr, sum0_ptr, sum1_ptr, shift_ptr, by_mean_ptr, by_positive_ptr,
    A_ptr, C_ptr, at_ptr, pull_ptr, unit_ptr, b, stride, beta, slope, power, headroom, temperature,
    BLOCK: tl.constexpr, SORTED: tl.constexpr, MEAN: tl.constexpr, MASS: tl.constexpr, SCALED: tl.constexpr,
    VIEWS: tl.constexpr,
):  # fmt: skip
    """A, C and shift of each row for upstream gradients divided by ``unit``, and unit / temperature.

    VIEWS: the upstream gradient is that of the losses; what pulls at the positives is stored too.
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
    """The gradient of the pairs as scores of their rows (AXIS 1) or columns (AXIS 0), each with its band and shift."""
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
def pulled(
    total, start, r, rows,
    c_ptr, r_norm_ptr, c_norm_ptr, r_ids_ptr, c_ids_ptr, r_labels_ptr, c_labels_ptr,
    r_low_ptr, r_high_ptr, c_low_ptr, c_high_ptr, r_A_ptr, r_C_ptr, r_shift_ptr, c_A_ptr, c_C_ptr, c_shift_ptr,
    b, n, d, scale, beta, shift,
    BN: tl.constexpr, BD: tl.constexpr, FULL_D: tl.constexpr, TILT: tl.constexpr, FIXED: tl.constexpr,
    NORMS: tl.constexpr, SELF: tl.constexpr, IDS: tl.constexpr, LABELS: tl.constexpr, BAND: tl.constexpr,
    PRECISION: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """The gradient of the rows with one more block of columns."""
    columns = start + tl.arange(0, BN)
    c = load_vectors(c_ptr, columns, n, d, BD, CHECKED, FULL_D)
    x = tl.dot(r, tl.trans(c), input_precision=PRECISION)
    similarity = x
    if NORMS:
        r_norm = load_rows(r_norm_ptr, rows, b, True)[:, None]
        c_norm = load_rows(c_norm_ptr, columns, n, CHECKED)[None, :]
    if NORMS and BAND:
        similarity = x * (r_norm * c_norm)
        x = similarity * scale - shift
    elif NORMS:
        x = x * c_norm * (r_norm * scale) - shift
    else:
        x = x * scale - shift
    if CHECKED:
        allowed = allowed_pairs(
            r_ids_ptr, r_labels_ptr, c_ids_ptr, c_labels_ptr, rows, columns, b, n, SELF, IDS, LABELS
        )
        x = tl.where(allowed, x, float("-inf"))
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
    return tl.dot(e.to(c.dtype), c, total, input_precision=PRECISION)


@jit
def backward(
    r_ptr, c_ptr, r_norm_ptr, c_norm_ptr, r_ids_ptr, c_ids_ptr, r_labels_ptr, c_labels_ptr,
    r_low_ptr, r_high_ptr, c_low_ptr, c_high_ptr, r_A_ptr, r_C_ptr, r_shift_ptr, c_A_ptr, c_C_ptr, c_shift_ptr,
    begin_ptr, end_ptr, split_ptr, order_ptr, unit_ptr, gradient_ptr, product_ptr, z_ptr, by_positive_ptr,
    b, n, d, scale, beta, shift,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, FULL_D: tl.constexpr, TILT: tl.constexpr,
    FIXED: tl.constexpr, NORMS: tl.constexpr, SELF: tl.constexpr, IDS: tl.constexpr, LABELS: tl.constexpr,
    BAND: tl.constexpr, MASKED: tl.constexpr, SORTED: tl.constexpr, RAGGED: tl.constexpr, LATE: tl.constexpr,
    PRECISION: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr, PRODUCT: tl.constexpr, VIEWS: tl.constexpr,
):  # fmt: skip
    """grad r_i = unit sum_j e_ij c_j. ROW: rows are anchors; COLUMN: columns are; both in self-similarity."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    r = load_vectors(r_ptr, rows, b, d, BD, True, FULL_D)
    total = tl.zeros([BM, BD], tl.float32)
    first, last, skip, skipped, whole = masked_blocks(
        begin_ptr, end_ptr, split_ptr, b, n, BM, BN, SELF, IDS, LABELS, MASKED, SORTED
    )
    if not MASKED:
        for k in tl.range(0, whole - (last - first)):
            start = tl.where(k < first, k, k + (last - first)) * BN
            total = pulled(
                total, start, r, rows,
                c_ptr, r_norm_ptr, c_norm_ptr, r_ids_ptr, c_ids_ptr, r_labels_ptr, c_labels_ptr,
                r_low_ptr, r_high_ptr, c_low_ptr, c_high_ptr,
                r_A_ptr, r_C_ptr, r_shift_ptr, c_A_ptr, c_C_ptr, c_shift_ptr, b, n, d, scale, beta, shift,
                BN, BD, FULL_D, TILT, FIXED, NORMS, SELF, IDS, LABELS, BAND, PRECISION, ROW, COLUMN, False,
            )  # fmt: skip
    if MASKED or SORTED or SELF or RAGGED:
        for k in tl.range(0, last - first - skipped + RAGGED, num_stages=LATE):
            start = tl.where(first + k < skip, first + k, first + k + skipped)
            start = tl.where(start < last, start, whole) * BN
            total = pulled(
                total, start, r, rows,
                c_ptr, r_norm_ptr, c_norm_ptr, r_ids_ptr, c_ids_ptr, r_labels_ptr, c_labels_ptr,
                r_low_ptr, r_high_ptr, c_low_ptr, c_high_ptr,
                r_A_ptr, r_C_ptr, r_shift_ptr, c_A_ptr, c_C_ptr, c_shift_ptr, b, n, d, scale, beta, shift,
                BN, BD, FULL_D, TILT, FIXED, NORMS, SELF, IDS, LABELS, BAND, PRECISION, ROW, COLUMN, True,
            )  # fmt: skip

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
            norm = load_rows(r_norm_ptr, rows, b, True)[:, None]
            z = z * norm
        product = tl.sum(total * z, 1)
        tl.store(product_ptr + rows, product, mask=real)
        if NORMS:  # z = r norm: grad r = norm (grad z - z (z . grad z))
            total = (total - z * product[:, None]) * norm
    features = tl.arange(0, BD)
    at = gradient_ptr + given[:, None] * d + features[None, :]
    tl.store(at, total.to(r.dtype), mask=real[:, None] & (features < d)[None, :])
