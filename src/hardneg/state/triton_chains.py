# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""The Metropolis-Hastings chains of EMC2 in Triton; ``state.chain`` decides whether they run.

``walk`` and ``remember`` are four kernels for a batch of chains: what ``state.chain.Chain.walk`` computes, with the
same draws. ``metropolis_hastings`` is the bare walk with given draws, the visits of ``metropolis.metropolis_hastings``
to the bit.

The first kernel (``prepare``) computes, for all chains and steps at once, everything that does not depend on the state:
where each chain starts, the proposed columns, their scores, and the bars that the score of the state must stay below
for a move. So the walk itself has a comparison and two selections per step, and can load these ahead. Counts are added
atomically and are the same in any order, because they are whole numbers.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError
from hardneg.core.tensors import outside_graphs
from hardneg.kernels.triton.language import installed, interpreted, jit, launched, tl
from hardneg.state.metropolis import ChainBatch, ChainMemory, PerChain, PerColumn, PerStep, Visits


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
    """Store where chains begin, and for each step the proposed column, its score, and the bar for the state's score."""
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


GROUP = 32
"""Number of chains that one warp walks."""
AHEAD = 12
"""Number of steps that are loaded ahead of the walk."""
ROWS, STEPS, COLUMNS = 8, 64, 64


class Walked(NamedTuple):
    """The result of ``walk``; the figures are those of ``chain.Walk``."""

    log_visits: PerColumn
    """Log of the visits of each column; ``silent`` at the valid columns of a chain whose visits were all outside."""
    end: PerChain
    figures: Annotated[Tensor, "3 b"]
    """Share of the steps that moved, share of the visits outside the columns, and age of the state's score."""


@launched
def _walk(
    ahead_ptr, start_ptr, start_score_ptr, counts_ptr, end_ptr, moved_ptr, outside_ptr,
    num_chains, num_columns, num_steps, burn_in, GROUP: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """A group of chains in one warp: a comparison and two selections per step, of numbers that are read ahead."""
    program = tl.program_id(0).to(tl.int64)
    within = tl.arange(0, GROUP)
    chains = program * GROUP + within
    real = chains < num_chains
    plane = num_steps * GROUP
    ahead_ptr += program * 3 * plane
    column = tl.load(start_ptr + chains, mask=real, other=-1).to(tl.float64)
    score = tl.load(start_score_ptr + chains, mask=real, other=0.0)
    last = (num_columns + tl.zeros([GROUP], tl.int32)).to(tl.float64)
    inside = tl.zeros([GROUP], tl.int32)
    moved = tl.zeros([GROUP], tl.int32)
    one = tl.zeros([GROUP], tl.float32) + 1.0
    for step in tl.range(0, num_steps, num_stages=AHEAD):
        from_step = ahead_ptr + step * GROUP + within
        move = score < tl.load(from_step + plane)
        score = tl.where(move, tl.load(from_step), score)
        column = tl.where(move, tl.load(from_step + 2 * plane), column)
        moved += move.to(tl.int32)
        visited = real & (column >= 0) & (column < last) & (within * 0 + step >= burn_in)
        inside += visited.to(tl.int32)
        tl.atomic_add(counts_ptr + chains * num_columns + column.to(tl.int64), one, mask=visited, sem="relaxed")
    tl.store(end_ptr + chains, column.to(tl.int64), mask=real)
    tl.store(moved_ptr + chains, moved.to(tl.float64) / num_steps, mask=real)
    tl.store(outside_ptr + chains, 1.0 - inside.to(tl.float64) / (num_steps - burn_in), mask=real)


@launched
def _count(
    counts_ptr, valid_ptr, slots_ptr, outside_ptr, log_visits_ptr, num_chains, num_columns, num_slots, silent,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The logarithm of the visits of each column; NaN for a slot that is not there, as of an id that is too large."""
    chains = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    real = chains < num_chains
    there = real[:, None] & (columns < num_columns)
    place = chains[:, None] * num_columns + columns
    count = tl.load(counts_ptr + place, mask=there, other=0.0).to(tl.float64)
    valid = tl.load(valid_ptr + place, mask=there, other=0) != 0
    log_visits = tl.where(count > 0, tl.log(tl.maximum(count, 1.0)), float("-inf"))
    # All visits outside: the anchor has negatives, none of which is here. Its positive still pulls.
    outside = tl.load(outside_ptr + chains, mask=real, other=0.0) == 1.0
    slots = tl.load(slots_ptr + chains, mask=real, other=-1)
    log_visits = tl.where((outside & (slots >= 0))[:, None] & valid, silent, log_visits)
    tl.store(log_visits_ptr + place, tl.where((slots < num_slots)[:, None], log_visits, float("nan")), mask=there)


@launched
def _remember(
    scores_ptr, ids_ptr, views_ptr, slots_ptr, end_ptr, state_ptr, view_ptr, log_score_ptr, scored_at_ptr, step_ptr,
    num_chains, num_columns, num_instances, num_slots, stride, ids_stride, views_stride,
    NUM_VIEWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    chains = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slots = tl.load(slots_ptr + chains, mask=chains < num_chains, other=-1)
    end = tl.load(end_ptr + chains, mask=chains < num_chains, other=-1)
    # Of several chains with one slot the last one is remembered.
    last = (slots >= 0) & (slots < num_slots)
    for begin in tl.range(0, num_chains, COLUMNS):
        others = begin + tl.arange(0, COLUMNS)[None, :]
        theirs = tl.load(slots_ptr + others, mask=others < num_chains, other=-1)
        later = (theirs == slots[:, None]) & (others > chains[:, None])
        last = last & (tl.max(later.to(tl.int32), 1) == 0)
    tl.store(view_ptr + slots, (end - num_columns).to(tl.int8), mask=last & (end >= num_columns))
    inside = last & (end >= 0) & (end < num_columns)
    found = tl.load(ids_ptr + chains * ids_stride + end, mask=inside, other=-1)
    view = tl.minimum(tl.load(views_ptr + chains * views_stride + end, mask=inside, other=0), NUM_VIEWS - 1)
    own = tl.load(scores_ptr + chains * stride + end, mask=inside, other=float("-inf")).to(tl.float64)
    for each in tl.static_range(NUM_VIEWS):
        best = tl.zeros([ROWS], tl.float64) + float("-inf")
        broken = tl.zeros([ROWS], tl.int32)
        for begin in tl.range(0, num_columns, COLUMNS):
            columns = begin + tl.arange(0, COLUMNS)[None, :]
            there = inside[:, None] & (columns < num_columns)
            ids = tl.load(ids_ptr + chains[:, None] * ids_stride + columns, mask=there, other=-1)
            views = tl.load(views_ptr + chains[:, None] * views_stride + columns, mask=there, other=-1)
            same = there & (ids == found[:, None]) & (views == each)
            score = tl.load(scores_ptr + chains[:, None] * stride + columns, mask=same, other=float("-inf"))
            score = score.to(tl.float64)
            broken = tl.maximum(broken, tl.max((score != score).to(tl.int32), 1))
            best = tl.maximum(best, tl.max(tl.where(score != score, float("-inf"), score), 1))
        best = tl.where(broken > 0, float("nan"), best)
        tl.store(log_score_ptr + slots * NUM_VIEWS + each, tl.where(view == each, own, best), mask=inside)
    # A negative id stands for no instance: nothing could be looked up by it.
    tl.store(state_ptr + slots, tl.where(found < num_instances, found, -1), mask=inside)
    tl.store(view_ptr + slots, view.to(tl.int8), mask=inside)
    tl.store(scored_at_ptr + slots, tl.load(step_ptr) + tl.zeros_like(slots), mask=inside)


def supports(batch: ChainBatch) -> bool:
    """True if the kernels support the chains of this batch."""
    rows, columns = batch.candidates.shape
    floats = batch.candidates.dtype in (torch.float32, torch.float64)
    return installed and batch.candidates.is_cuda and floats and rows * columns > 0 and columns < 2**24


@outside_graphs
def walk(batch: ChainBatch, memory: ChainMemory, num_steps: int, burn_in: int, silent: float) -> Walked:
    """Walk the chains of a batch.

    Args:
        batch: Candidates and slots of the chains.
        memory: The buffers of all chains.
        num_steps: Number of steps.
        burn_in: Number of first steps that are not counted.
        silent: Log-weight for the columns of a chain whose visits were all outside.
    """
    candidates, valid, ids, views, slots = _in_rows(batch)
    (b, n), v = candidates.shape, memory.log_score.shape[1]
    groups, valid = -(-b // GROUP), valid.view(torch.int8)
    table = torch.empty(b, n + v, dtype=torch.int32, device=slots.device)
    wide = torch.empty(groups * 3 * num_steps * GROUP + b * (v + 4), dtype=torch.float64, device=slots.device)
    figures, start_score, stored = wide[: 3 * b].view(3, b), wide[3 * b : 4 * b], wide[4 * b : (4 + v) * b]
    ahead, counts = wide[(4 + v) * b :], torch.empty(b, n, dtype=torch.float32, device=slots.device)
    log_visits, (start, end) = torch.empty_like(candidates), slots.new_empty(2, b).unbind()
    moved, outside, age = figures.unbind()
    prepare[(-(-b // ROWS),)](
        candidates, valid, ids, views, slots,
        memory.state, memory.view, memory.log_score, memory.scored_at, memory.seed, memory.step,
        table, stored, ahead, counts, start, start_score, age,
        b, n, num_steps, len(memory.state), candidates.stride(0), _stride(ids), _stride(views),
        NUM_VIEWS=v, GROUP=GROUP, ROWS=ROWS, STEPS=STEPS, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    _walk[(groups,)](
        ahead, start, start_score, counts, end, moved, outside, b, n, num_steps, burn_in,
        GROUP=GROUP, AHEAD=AHEAD, num_warps=1,
    )  # fmt: skip
    _count[(-(-b // ROWS), -(-n // COLUMNS))](
        counts, valid, slots, outside, log_visits, b, n, len(memory.state), silent,
        ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    return Walked(log_visits, end, figures)


@outside_graphs
def remember(batch: ChainBatch, memory: ChainMemory, end: PerChain, num_instances: int) -> None:
    """Store where the chains ended; one that ended outside the candidates keeps its id and scores."""
    candidates, _, ids, views, slots = _in_rows(batch)
    b, n = candidates.shape
    _remember[(-(-b // ROWS),)](
        candidates, ids, views, slots, end, memory.state, memory.view, memory.log_score, memory.scored_at, memory.step,
        b, n, num_instances, len(memory.state), candidates.stride(0), _stride(ids), _stride(views),
        NUM_VIEWS=memory.log_score.shape[1], ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    torch.autograd.graph.increment_version([memory.state, memory.view, memory.log_score, memory.scored_at])


def _in_rows(batch: ChainBatch) -> ChainBatch:
    """Make neighbouring columns adjacent in memory."""
    candidates, valid, ids, views, slots = batch
    candidates, ids, views = (
        each if each.stride(1) == 1 else each.contiguous() for each in (candidates.detach(), ids, views)
    )
    return ChainBatch(candidates, valid.contiguous(), ids, views, slots.contiguous())


def _stride(tag: Annotated[Tensor, "b|1 n"]) -> int:
    return 0 if len(tag) == 1 else tag.stride(0)


CHAINS = 32
"""Number of chains that one program of ``metropolis_hastings`` walks."""


@launched
def _walk_given(
    scores_ptr, start_ptr, proposals_ptr, log_uniforms_ptr, ahead_ptr, counts_ptr, end_ptr, accepted_ptr,
    num_chains, num_columns, num_steps, stride, burn_in, CHAINS: tl.constexpr, STEPS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    within = tl.arange(0, CHAINS)
    chains = program * CHAINS + within
    real = chains < num_chains
    # Of this program: proposed scores, bars and columns of each step, [3, steps, CHAINS].
    ahead_ptr += program * 3 * num_steps * CHAINS
    plane = num_steps * CHAINS
    for begin in tl.range(0, num_steps, STEPS):
        steps = begin + tl.arange(0, STEPS)[None, :]
        there = real[:, None] & (steps < num_steps)
        at = chains[:, None] * num_steps + steps
        columns = tl.load(proposals_ptr + at, mask=there, other=-1)
        proposed = tl.load(
            scores_ptr + chains[:, None] * stride + columns, mask=there & (columns >= 0), other=float("-inf")
        )
        bars = proposed - tl.load(log_uniforms_ptr + at, mask=there, other=0.0)
        bars = tl.where(proposed == float("-inf"), float("-inf"), bars)
        to = ahead_ptr + steps * CHAINS + within[:, None]
        tl.store(to, proposed, mask=steps < num_steps)
        tl.store(to + plane, bars, mask=steps < num_steps)
        tl.store(to + 2 * plane, columns.to(proposed.dtype), mask=steps < num_steps)
    tl.debug_barrier()
    column = tl.load(start_ptr + chains, mask=real, other=-1)
    score = tl.load(scores_ptr + chains * stride + column, mask=real & (column >= 0), other=float("-inf"))
    score = tl.where(score != score, float("-inf"), score)
    column = column.to(score.dtype)
    one = tl.zeros([CHAINS], score.dtype) + 1.0
    for step in tl.range(0, num_steps, num_stages=AHEAD):
        from_step = ahead_ptr + step * CHAINS + within
        move = score < tl.load(from_step + plane)
        score = tl.where(move, tl.load(from_step), score)
        column = tl.where(move, tl.load(from_step + 2 * plane), column)
        tl.store(accepted_ptr + step * num_chains + chains, move.to(tl.int8), mask=real)
        visited = real & (column >= 0) & (within * 0 + step >= burn_in)
        tl.atomic_add(counts_ptr + chains * num_columns + column.to(tl.int64), one, mask=visited, sem="relaxed")
    tl.store(end_ptr + chains, column.to(tl.int64), mask=real)


def why_unsupported(log_scores: PerColumn) -> str | None:
    """Return the reason why the kernel does not support these scores; None if it does."""
    if not installed:
        return "triton 3.4 or newer is not installed"
    if not log_scores.is_cuda:
        return f"the scores are on {log_scores.device.type}, and Triton needs a GPU"
    if log_scores.dtype not in (torch.float32, torch.float64):
        return f"the scores are {log_scores.dtype}, not float32 or float64"
    if log_scores.dtype == torch.float32 and log_scores.shape[1] >= 2**24:
        return "there are 2**24 columns or more, which float32 cannot number"
    return None


@outside_graphs
def metropolis_hastings(
    log_scores: PerColumn, start: PerChain, proposals: PerStep, log_uniforms: PerStep, burn_in: int = 0
) -> Visits:
    """Walk the chains; arguments and result are those of ``metropolis.metropolis_hastings``.

    Raises:
        ArgumentError: If the kernel does not support the scores.
    """
    if not interpreted and (reason := why_unsupported(log_scores)):
        fix = "use hardneg.state.metropolis.metropolis_hastings"
        raise ArgumentError("metropolis_hastings", "scores that the Triton kernel supports", reason, fix)
    b, n = log_scores.shape
    k = proposals.shape[1]
    scores = log_scores.detach() if log_scores.stride(1) == 1 else log_scores.detach().contiguous()
    programs = -(-b // CHAINS)
    ahead = scores.new_empty(programs, 3, k, CHAINS)
    counts, end = scores.new_zeros(b, n), torch.empty_like(start)
    accepted = torch.empty(k, b, dtype=torch.int8, device=scores.device)
    if b:
        _walk_given[(programs,)](
            scores, start.contiguous(), proposals.contiguous(), log_uniforms.to(scores.dtype).contiguous(),
            ahead, counts, end, accepted, b, n, k, scores.stride(0), burn_in,
            CHAINS=CHAINS, STEPS=32, AHEAD=8, num_warps=4,
        )  # fmt: skip
    return Visits(counts, end, accepted.view(torch.bool).T)
