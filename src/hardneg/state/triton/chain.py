# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Metropolis-Hastings chains as one kernel: the visits of ``metropolis.metropolis_hastings``, to the bit.

A program walks CHAINS chains. The scores of the proposals, and the bars that the score of the state must stay below for
a move, do not depend on the state. They are gathered first, step by step next to each other for all chains of the
program, so that the walk itself, a comparison and two selections per step, can load them ahead. Counts are added
atomically and are the same in any order, because they are whole numbers.
"""

from __future__ import annotations

import torch

from hardneg.core.errors import ArgumentError
from hardneg.core.tensors import outside_graphs
from hardneg.kernels.triton.language import installed, interpreted, launched, tl
from hardneg.state.metropolis import PerChain, PerColumn, PerStep, Visits

CHAINS, STEPS = 32, 32


@launched
def _walk(
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
def walk(log_scores: PerColumn, start: PerChain, proposals: PerStep, log_uniforms: PerStep, burn_in: int = 0) -> Visits:
    """Walk the chains; arguments and result are those of ``metropolis.metropolis_hastings``.

    Raises:
        ArgumentError: If the kernel does not support the scores.
    """
    if not interpreted and (reason := why_unsupported(log_scores)):
        fix = "use hardneg.state.metropolis.metropolis_hastings"
        raise ArgumentError("walk", "scores that the Triton kernel supports", reason, fix)
    b, n = log_scores.shape
    k = proposals.shape[1]
    scores = log_scores.detach() if log_scores.stride(1) == 1 else log_scores.detach().contiguous()
    programs = -(-b // CHAINS)
    ahead = scores.new_empty(programs, 3, k, CHAINS)
    counts, end = scores.new_zeros(b, n), torch.empty_like(start)
    accepted = torch.empty(k, b, dtype=torch.int8, device=scores.device)
    if b:
        _walk[(programs,)](
            scores, start.contiguous(), proposals.contiguous(), log_uniforms.to(scores.dtype).contiguous(),
            ahead, counts, end, accepted, b, n, k, scores.stride(0), burn_in,
            CHAINS=CHAINS, STEPS=STEPS, AHEAD=8, num_warps=4,
        )  # fmt: skip
    return Visits(counts, end, accepted.view(torch.bool).T)
