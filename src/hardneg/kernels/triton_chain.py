# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Metropolis-Hastings chains as one kernel: the visits of ``chain.walk`` from the same numbers, bit for bit.

A program walks CHAINS chains. Proposals, their scores and the bars that the state's score must stay below do not depend
on the state, so that a block of STEPS is loaded at once; only a comparison and two selections per step are in sequence.
Counts are added atomically, and are the same in any order: they are whole numbers.
"""

from __future__ import annotations

import torch

from hardneg.core.errors import ArgumentError
from hardneg.kernels.chain import PerChain, PerColumn, PerStep, Visits
from hardneg.kernels.triton_language import installed, interpreted, jit, tl

CHAINS, STEPS = 8, 16


@jit
def _walk(
    scores_ptr, start_ptr, proposals_ptr, log_uniforms_ptr, counts_ptr, end_ptr, accepted_ptr,
    num_chains, num_columns, num_steps, stride, burn_in, CHAINS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    chains = tl.program_id(0) * CHAINS + tl.arange(0, CHAINS)
    real = chains < num_chains
    row = chains.to(tl.int64)
    within = tl.arange(0, STEPS)
    column = tl.load(start_ptr + chains, mask=real, other=-1).to(tl.int32)
    score = tl.load(scores_ptr + row * stride + column, mask=real & (column >= 0), other=float("-inf"))
    score = tl.where(score != score, float("-inf"), score)
    for begin in tl.range(0, num_steps, STEPS):
        steps = (begin + within)[None, :]
        at = row[:, None] * num_steps + steps
        there = real[:, None] & (steps < num_steps)
        proposals = tl.load(proposals_ptr + at, mask=there, other=-1).to(tl.int32)
        from_row = scores_ptr + row[:, None] * stride + proposals
        proposed = tl.load(from_row, mask=there & (proposals >= 0), other=float("-inf"))
        bars = proposed - tl.load(log_uniforms_ptr + at, mask=there, other=0.0)
        bars = tl.where(proposed == float("-inf"), float("-inf"), bars)
        path = tl.zeros([CHAINS, STEPS], tl.int32)
        accepted = tl.zeros([CHAINS, STEPS], tl.int8)
        # Not unrolled: its code would not fit into the cache of instructions.
        for step in tl.range(0, tl.minimum(STEPS, num_steps - begin), num_stages=1):
            here = (within == step)[None, :]
            move = score < tl.sum(tl.where(here, bars, 0.0), 1)
            column = tl.where(move, tl.sum(tl.where(here, proposals, 0), 1), column)
            score = tl.where(move, tl.sum(tl.where(here, proposed, 0.0), 1), score)
            path = tl.where(here, column[:, None], path)
            accepted = tl.where(here, move[:, None].to(tl.int8), accepted)
        tl.store(accepted_ptr + at, accepted, mask=there)
        one = tl.zeros([CHAINS, STEPS], score.dtype) + 1.0
        visited = there & (steps >= burn_in) & (path >= 0)
        tl.atomic_add(counts_ptr + row[:, None] * num_columns + path, one, mask=visited, sem="relaxed")
    tl.store(end_ptr + chains, column, mask=real)


def supports(log_scores: PerColumn) -> str | None:
    """Why the kernel cannot serve these scores; None if it can."""
    if not installed:
        return "triton is not installed"
    if not log_scores.is_cuda:
        return f"the scores are on {log_scores.device.type}, and Triton needs a GPU"
    if log_scores.dtype not in (torch.float32, torch.float64):
        return f"the scores are {log_scores.dtype}, and not float32 or float64"
    return None


def walk(log_scores: PerColumn, start: PerChain, proposals: PerStep, log_uniforms: PerStep, burn_in: int = 0) -> Visits:
    """As ``chain.walk``."""
    if not interpreted and (reason := supports(log_scores)):
        raise ArgumentError("walk", "what the Triton kernel can serve", reason, "use hardneg.kernels.chain.walk")
    b, n = log_scores.shape
    k = proposals.shape[1]
    scores = log_scores.detach() if log_scores.stride(1) == 1 else log_scores.detach().contiguous()
    counts, end = scores.new_zeros(b, n), torch.empty_like(start)
    accepted = torch.empty(b, k, dtype=torch.int8, device=scores.device)
    if b:
        _walk[(-(-b // CHAINS),)](
            scores, start.contiguous(), proposals.contiguous(), log_uniforms.to(scores.dtype).contiguous(),
            counts, end, accepted, b, n, k, scores.stride(0), burn_in, CHAINS=CHAINS, STEPS=STEPS, num_warps=1,
        )  # fmt: skip
    return Visits(counts, end, accepted.view(torch.bool))
