# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""What a batch of EMC2's chains needs before it walks: where each chain starts, and the proposals of each step.

It is one kernel, because each part needs what the one before has found for a chain. ``walks`` launches it.
"""

from __future__ import annotations

from hardneg.kernels.triton.language import jit, launched, tl


@jit
def _splitmix(x):
    """Mix bits as ``core.keyed.splitmix``; signed shifts keep the sign, which the masks remove."""
    x = x + -7046029254386353131
    x = (x ^ ((x >> 30) & 17179869183)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 137438953471)) * -7723592293110705685
    return x ^ ((x >> 31) & 8589934591)


@jit
def _uniform(counter, key):
    bits = _splitmix(counter * -7046029254386353131 + key)
    return ((bits >> 11) & 9007199254740991).to(tl.float64) * 1.1102230246251565e-16


@jit
def _list_columns(
    valid_ptr, ids_ptr, views_ptr, counts_ptr, table, chains, real, state, own_view,
    num_columns, ids_stride, views_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """List the columns that may be proposed.

    Returns their number, and the column of the state, preferably in its own view.
    """
    number = tl.zeros([ROWS], tl.int32)
    same_at = tl.zeros([ROWS], tl.int32) + num_columns
    best_at = same_at
    for begin in tl.range(0, num_columns, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)[None, :]
        there = real[:, None] & (columns < num_columns)
        place = chains[:, None] * num_columns + columns
        tl.store(counts_ptr + place, tl.zeros([ROWS, COLUMNS], tl.float32), mask=there)
        valid = tl.load(valid_ptr + place, mask=there, other=0) != 0
        ids = tl.load(ids_ptr + chains[:, None] * ids_stride + columns, mask=there, other=-1)
        views = tl.load(views_ptr + chains[:, None] * views_stride + columns, mask=there, other=0)
        same = valid & (ids == state[:, None]) & (state >= 0)[:, None]
        best = same & (views == own_view[:, None])
        same_at = tl.minimum(same_at, tl.min(tl.where(same, columns, num_columns), 1))
        best_at = tl.minimum(best_at, tl.min(tl.where(best, columns, num_columns), 1))
        rank = number[:, None] + tl.cumsum(valid.to(tl.int32), 1) - 1
        tl.store(table[:, None] + rank, columns + tl.zeros_like(rank), mask=valid)
        number += tl.sum(valid.to(tl.int32), 1)
    return number, tl.where(best_at < num_columns, best_at, same_at)


@jit
def _list_stored(
    log_score_ptr, stored_ptr, table, number, chains, real, at, elsewhere, num_columns, NUM_VIEWS: tl.constexpr
):  # fmt: skip
    """The views of a state that is not among the columns, behind them in the list if their scores are known."""
    for each in tl.static_range(NUM_VIEWS):
        stored = tl.load(log_score_ptr + at * NUM_VIEWS + each, mask=elsewhere, other=float("-inf"))
        stored = tl.where(stored != stored, float("-inf"), stored)
        tl.store(stored_ptr + chains * NUM_VIEWS + each, stored, mask=real)
        known = real & (stored != float("-inf"))
        tl.store(table + number, tl.zeros_like(number) + (num_columns + each), mask=known)
        number += known.to(tl.int32)
    return number


@jit
def _begin(
    scores_ptr, stored_ptr, start_ptr, start_score_ptr, chains, real, start, num_columns, stride,
    NUM_VIEWS: tl.constexpr,
):  # fmt: skip
    """Where the chains begin, and the score there."""
    never = float("-inf")
    score = tl.load(
        scores_ptr + chains * stride + start, mask=real & (start >= 0) & (start < num_columns), other=never
    ).to(tl.float64)
    outside = tl.load(
        stored_ptr + chains * NUM_VIEWS + (start - num_columns), mask=real & (start >= num_columns), other=never
    )
    score = tl.where(start >= num_columns, outside, score)
    # A chain must not be stuck where a broken batch left it.
    tl.store(start_score_ptr + chains, tl.where(score != score, never, score), mask=real)
    tl.store(start_ptr + chains, start, mask=real)


@jit
def _propose(
    scores_ptr, stored_ptr, ahead_ptr, table, number, chains, real, key, num_columns, num_steps, stride,
    NUM_VIEWS: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Of each step the proposed column, its score, and the bar for that of the state."""
    never = float("-inf")
    # The walk reads the chains of a group side by side: [groups, 3, steps, GROUP].
    plane = num_steps * GROUP
    to_chain = ahead_ptr + (chains // GROUP) * 3 * plane + chains % GROUP
    for begin in tl.range(0, num_steps, STEPS):
        steps = begin + tl.arange(0, STEPS)[None, :]
        there = real[:, None] & (steps < num_steps)
        counter = chains[:, None] * num_steps + steps
        drawn = (_uniform(counter, _splitmix(key)) * number[:, None].to(tl.float64)).to(tl.int32)
        drawn = tl.minimum(drawn, number[:, None] - 1)
        proposals = tl.load(table[:, None] + drawn, mask=there & (drawn >= 0), other=-1)
        proposed = tl.load(
            scores_ptr + chains[:, None] * stride + proposals,
            mask=there & (proposals >= 0) & (proposals < num_columns), other=never,
        ).to(tl.float64)  # fmt: skip
        of_state = tl.load(
            stored_ptr + chains[:, None] * NUM_VIEWS + (proposals - num_columns),
            mask=there & (proposals >= num_columns), other=never,
        )  # fmt: skip
        proposed = tl.where(proposals >= num_columns, of_state, proposed)
        bars = proposed - tl.log(_uniform(counter, _splitmix(key ^ 1)))
        bars = tl.where(proposed == never, never, bars)
        to = to_chain[:, None] + steps.to(tl.int64) * GROUP
        tl.store(to, proposed, mask=there)
        tl.store(to + plane, bars, mask=there)
        tl.store(to + 2 * plane, proposals.to(tl.float64), mask=there)


@launched
def prepare(
    scores_ptr, valid_ptr, ids_ptr, views_ptr, slots_ptr,
    state_ptr, view_ptr, log_score_ptr, scored_at_ptr, seed_ptr, step_ptr,
    table_ptr, stored_ptr, ahead_ptr, counts_ptr, start_ptr, start_score_ptr, age_ptr,
    num_chains, num_columns, num_steps, num_slots, stride, ids_stride, views_stride,
    NUM_VIEWS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Where the chains begin, and of each step the proposed column, its score, and the bar for that of the state."""
    chains = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = chains < num_chains
    slots = tl.load(slots_ptr + chains, mask=real, other=-1)
    slots = tl.where(slots < num_slots, slots, -1)
    at = tl.maximum(slots, 0)
    state = tl.load(state_ptr + at, mask=slots >= 0, other=-1)
    own_view = tl.load(view_ptr + at, mask=slots >= 0, other=0).to(tl.int64)
    scored_at = tl.load(scored_at_ptr + at, mask=slots >= 0, other=-1)
    age = tl.where(scored_at >= 0, (tl.load(step_ptr) - scored_at).to(tl.float64), float("nan"))
    tl.store(age_ptr + chains, age, mask=real)
    table = table_ptr + chains * (num_columns + NUM_VIEWS)
    number, begins = _list_columns(
        valid_ptr, ids_ptr, views_ptr, counts_ptr, table, chains, real, state, own_view,
        num_columns, ids_stride, views_stride, ROWS, COLUMNS,
    )  # fmt: skip
    elsewhere = (slots >= 0) & (begins == num_columns)
    number = _list_stored(log_score_ptr, stored_ptr, table, number, chains, real, at, elsewhere, num_columns, NUM_VIEWS)
    start = tl.where(begins < num_columns, begins.to(tl.int64), -1)
    start = tl.where(elsewhere & (state >= 0), num_columns + own_view, start)
    tl.debug_barrier()  # table and stored scores are read by other threads than wrote them
    _begin(scores_ptr, stored_ptr, start_ptr, start_score_ptr, chains, real, start, num_columns, stride, NUM_VIEWS)
    key = _splitmix(_splitmix(tl.load(seed_ptr)) ^ tl.load(step_ptr))
    _propose(
        scores_ptr, stored_ptr, ahead_ptr, table, number, chains, real, key, num_columns, num_steps, stride,
        NUM_VIEWS, GROUP, STEPS,
    )  # fmt: skip
