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
self-similarity both roles share them: e_ij = u (v (A_i + A_j) + (C_i + C_j)), and grad z_i = sum_j e_ij z_j / temperature
is the whole gradient after two products. beta = 1 needs one exponential, u = v. Without a tilt, and with a detached
one, e_ij = w (A_i + A_j), w = 2^(k (x - m)), where k = 1 or 1 + beta is a part of the scale that the host passes.

Nothing is added atomically, so that two runs give the same bits. A masked pair has x = -inf. A NaN is outside no band.
"""

from __future__ import annotations

from hardneg.kernels.triton_language import jit, tl

UNIFORM, SQUARE, GENERAL = 0, 1, 2
"""Weights of a pair: one exponential; one and its square (beta = 1); two."""


@jit
def load_vectors(pointer, rows, count, d, BD: tl.constexpr, EVEN: tl.constexpr):
    features = tl.arange(0, BD)
    at = pointer + rows[:, None] * d + features[None, :]
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=(rows < count)[:, None] & (features < d)[None, :], other=0.0)


@jit
def ids_may_meet(ids_ptr, first, last, start, n, BN: tl.constexpr):
    """Whether a block of columns can hold an id of a block of rows; both sorted by id."""
    return (tl.load(ids_ptr + start) <= last) & (tl.load(ids_ptr + tl.minimum(start + BN, n) - 1) >= first)


@jit
def allowed_pairs(row_ids, row_labels, column_ids_ptr, column_labels_ptr, columns, n, IDS: tl.constexpr, LABELS: tl.constexpr):
    real = columns < n
    allowed = real[None, :]
    if IDS:
        allowed = allowed & (row_ids[:, None] != tl.load(column_ids_ptr + columns, mask=real, other=-2)[None, :])
    if LABELS:
        allowed = allowed & (row_labels[:, None] != tl.load(column_labels_ptr + columns, mask=real, other=0)[None, :])
    return allowed


@jit
def count_outside(allowed, columns, n):
    return tl.sum(tl.where(allowed | (columns >= n)[None, :], 0, 1), 1)


@jit
def forward(
    a_ptr, c_ptr, a_norm_ptr, c_norm_ptr, a_ids_ptr, c_ids_ptr, a_labels_ptr, c_labels_ptr, low_ptr, high_ptr,
    log_mean_ptr, log_mass_ptr, support_ptr, sum0_ptr, sum1_ptr, shift_ptr,
    b, n, d, scale, beta, shift,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr, TILT: tl.constexpr, FIXED: tl.constexpr,
    NORMS: tl.constexpr, IDS: tl.constexpr, LABELS: tl.constexpr, BAND: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    real = rows < b
    a = load_vectors(a_ptr, rows, b, d, BD, EVEN)
    a_ids, a_labels = rows, rows
    if NORMS:
        a_norm = tl.load(a_norm_ptr + rows, mask=real, other=0.0)
    if IDS:
        a_ids = tl.load(a_ids_ptr + rows, mask=real, other=-1)
    if IDS and not MASKED:
        first_id = tl.load(a_ids_ptr + tl.program_id(0) * BM)
        last_id = tl.load(a_ids_ptr + tl.minimum(tl.program_id(0) * BM + BM, b) - 1)
    if LABELS:
        a_labels = tl.load(a_labels_ptr + rows, mask=real, other=0)
    if BAND:
        low = tl.load(low_ptr + rows, mask=real, other=0.0)
        high = tl.load(high_ptr + rows, mask=real, other=0.0)
    sum0 = tl.zeros([BM], tl.float32)
    sum1 = tl.zeros([BM], tl.float32)
    outside = tl.zeros([BM], tl.int32)
    top = tl.full([BM], float("-inf"), tl.float32)

    for start in tl.range(0, n, BN):
        columns = start + tl.arange(0, BN)
        c = load_vectors(c_ptr, columns, n, d, BD, EVEN)
        x = tl.dot(a, tl.trans(c), input_precision=PRECISION)
        if NORMS:
            x = x * a_norm[:, None] * tl.load(c_norm_ptr + columns, mask=columns < n, other=0.0)[None, :]
        if BAND:
            beyond = (x < low[:, None]) | (x > high[:, None])
        x = x * scale - shift
        if MASKED:
            allowed = allowed_pairs(a_ids, a_labels, c_ids_ptr, c_labels_ptr, columns, n, IDS, LABELS)
            if BAND:
                allowed = allowed & ~beyond
            x = tl.where(allowed, x, float("-inf"))
            outside += count_outside(allowed, columns, n)
        elif IDS or not EVEN:
            meet = start + BN > n
            if IDS:
                meet = meet | ids_may_meet(c_ids_ptr, first_id, last_id, start, n, BN)
            if meet:
                allowed = allowed_pairs(a_ids, a_labels, c_ids_ptr, c_labels_ptr, columns, n, IDS, LABELS)
                x = tl.where(allowed, x, float("-inf"))
                outside += count_outside(allowed, columns, n)
        if FIXED:
            base = x
        else:
            largest = tl.maximum(top, tl.max(x, 1))
            safe = tl.where(largest == float("-inf"), 0.0, largest)
            base = x - safe[:, None]
            fall = top - safe
            top = largest
        v = tl.exp2(base)
        if TILT == 0:
            if not FIXED:
                sum1 = sum1 * tl.exp2(fall)
            sum1 += tl.sum(v, 1)
        elif TILT == 1:
            if not FIXED:
                sum0 = sum0 * tl.exp2(fall)
                sum1 = sum1 * tl.exp2(fall + fall)
            sum0 += tl.sum(v, 1)
            sum1 += tl.sum(v * v, 1)
        else:
            u = tl.exp2(beta * base)
            if not FIXED:
                sum0 = sum0 * tl.exp2(beta * fall)
                sum1 = sum1 * tl.exp2(beta * fall + fall)
            sum0 += tl.sum(u, 1)
            sum1 += tl.sum(u * v, 1)

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
    tl.store(log_mean_ptr + rows, tl.where(support == 0, float("-inf"), mean * ln2), mask=real)
    tl.store(log_mass_ptr + rows, tl.where(support == 0, float("-inf"), mass * ln2), mask=real)
    tl.store(support_ptr + rows, support, mask=real)
    tl.store(sum0_ptr + rows, sum0, mask=real)
    tl.store(sum1_ptr + rows, sum1, mask=real)
    tl.store(shift_ptr + rows, at, mask=real)


@jit
def pair_gradient(base, beta, A, C, TILT: tl.constexpr):
    v = tl.exp2(base)
    if TILT == 0:
        return v * A
    elif TILT == 1:
        return v * (v * A + C)
    else:
        return tl.exp2(beta * base) * (v * A + C)


@jit
def backward(
    r_ptr, c_ptr, r_norm_ptr, c_norm_ptr, r_ids_ptr, c_ids_ptr, r_labels_ptr, c_labels_ptr,
    r_low_ptr, r_high_ptr, c_low_ptr, c_high_ptr, r_A_ptr, r_C_ptr, r_shift_ptr, c_A_ptr, c_C_ptr, c_shift_ptr,
    unit_ptr, gradient_ptr, product_ptr,
    b, n, d, scale, beta, shift,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr, TILT: tl.constexpr, FIXED: tl.constexpr,
    NORMS: tl.constexpr, IDS: tl.constexpr, LABELS: tl.constexpr, BAND: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr,
):  # fmt: skip
    """grad r_i = unit sum_j e_ij c_j. ROW: rows are anchors; COLUMN: columns are; both in self-similarity."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    real = rows < b
    r = load_vectors(r_ptr, rows, b, d, BD, EVEN)
    r_ids, r_labels = rows, rows
    if NORMS:
        r_norm = tl.load(r_norm_ptr + rows, mask=real, other=0.0)
    if IDS:
        r_ids = tl.load(r_ids_ptr + rows, mask=real, other=-1)
    if IDS and not MASKED:
        first_id = tl.load(r_ids_ptr + tl.program_id(0) * BM)
        last_id = tl.load(r_ids_ptr + tl.minimum(tl.program_id(0) * BM + BM, b) - 1)
    if LABELS:
        r_labels = tl.load(r_labels_ptr + rows, mask=real, other=0)
    if ROW:
        r_A = tl.load(r_A_ptr + rows, mask=real, other=0.0)[:, None]
        r_C = r_A
        if TILT != 0:
            r_C = tl.load(r_C_ptr + rows, mask=real, other=0.0)[:, None]
        if not FIXED:
            r_shift = tl.load(r_shift_ptr + rows, mask=real, other=0.0)[:, None]
        if BAND:
            r_low = tl.load(r_low_ptr + rows, mask=real, other=0.0)[:, None]
            r_high = tl.load(r_high_ptr + rows, mask=real, other=0.0)[:, None]
    total = tl.zeros([BM, BD], tl.float32)

    for start in tl.range(0, n, BN):
        columns = start + tl.arange(0, BN)
        c = load_vectors(c_ptr, columns, n, d, BD, EVEN)
        x = tl.dot(r, tl.trans(c), input_precision=PRECISION)
        if NORMS:
            c_norm = tl.load(c_norm_ptr + columns, mask=columns < n, other=0.0)[None, :]
            x = x * r_norm[:, None] * c_norm
        if BAND:
            similarity = x
        x = x * scale - shift
        if MASKED:
            allowed = allowed_pairs(r_ids, r_labels, c_ids_ptr, c_labels_ptr, columns, n, IDS, LABELS)
            x = tl.where(allowed, x, float("-inf"))
        elif IDS or not EVEN:
            meet = start + BN > n
            if IDS:
                meet = meet | ids_may_meet(c_ids_ptr, first_id, last_id, start, n, BN)
            if meet:
                allowed = allowed_pairs(r_ids, r_labels, c_ids_ptr, c_labels_ptr, columns, n, IDS, LABELS)
                x = tl.where(allowed, x, float("-inf"))
        if ROW:
            A, C = r_A, r_C
            if BAND:
                beyond = (similarity < r_low) | (similarity > r_high)
                A = tl.where(beyond, 0.0, r_A)
                C = tl.where(beyond, 0.0, r_C)
        if COLUMN:
            c_A = tl.load(c_A_ptr + columns, mask=columns < n, other=0.0)[None, :]
            c_C = c_A
            if TILT != 0:
                c_C = tl.load(c_C_ptr + columns, mask=columns < n, other=0.0)[None, :]
            if BAND:
                c_low = tl.load(c_low_ptr + columns, mask=columns < n, other=0.0)[None, :]
                c_high = tl.load(c_high_ptr + columns, mask=columns < n, other=0.0)[None, :]
                beyond = (similarity < c_low) | (similarity > c_high)
                c_A = tl.where(beyond, 0.0, c_A)
                c_C = tl.where(beyond, 0.0, c_C)
        if FIXED:
            if ROW and COLUMN:
                e = pair_gradient(x, beta, A + c_A, C + c_C, TILT)
            elif ROW:
                e = pair_gradient(x, beta, A, C, TILT)
            else:
                e = pair_gradient(x, beta, c_A, c_C, TILT)
        else:
            # A pair above the band of its row may be above the row's shift: its exponential is infinite, and not used.
            if ROW:
                base = x - r_shift
                if BAND:
                    base = tl.where(A == 0.0, float("-inf"), base)
                e = pair_gradient(base, beta, A, C, TILT)
            if COLUMN:
                base = x - tl.load(c_shift_ptr + columns, mask=columns < n, other=0.0)[None, :]
                if BAND:
                    base = tl.where(c_A == 0.0, float("-inf"), base)
                other = pair_gradient(base, beta, c_A, c_C, TILT)
                if ROW:
                    e += other
                else:
                    e = other
        if NORMS:
            e = e * c_norm
        total = tl.dot(e.to(c.dtype), c, total, input_precision=PRECISION)

    total = total * tl.load(unit_ptr)
    if NORMS:
        # z = r r_norm: grad r = r_norm (grad z - z (z . grad z))
        z = r.to(tl.float32) * r_norm[:, None]
        product = tl.sum(total * z, 1)
        total = (total - z * product[:, None]) * r_norm[:, None]
    else:
        product = tl.sum(total * r.to(tl.float32), 1)
    tl.store(product_ptr + rows, product, mask=real)
    features = tl.arange(0, BD)
    at = gradient_ptr + rows[:, None] * d + features[None, :]
    tl.store(at, total.to(r.dtype), mask=real[:, None] & (features < d)[None, :])
