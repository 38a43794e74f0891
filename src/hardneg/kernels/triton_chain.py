# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Metropolis-Hastings chains as one kernel: the visits of ``chain.walk`` from the same numbers, bit for bit.

A program walks CHAINS chains. Proposals, their scores and the bars that the state's score must stay below do not depend
on the state, so that a block of STEPS is loaded at once; only a comparison and two selections per step are in sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError
from hardneg.kernels.chain import PerChain, PerStep
from hardneg.kernels.triton_language import installed, interpreted, jit, tl


@jit
def _walk(
    scores_ptr, start_ptr, start_score_ptr, proposals_ptr, log_uniforms_ptr, path_ptr, moved_ptr,
    num_chains, stride, num_steps, CHAINS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    chains = tl.program_id(0) * CHAINS + tl.arange(0, CHAINS)
    real = chains < num_chains
    within = tl.arange(0, STEPS)
    column = tl.load(start_ptr + chains, mask=real, other=-1)
    score = tl.load(start_score_ptr + chains, mask=real, other=0.0)
    for begin in tl.range(0, num_steps, STEPS):
        at = chains[:, None].to(tl.int64) * num_steps + (begin + within)[None, :]
        there = real[:, None] & (begin + within < num_steps)[None, :]
        proposals = tl.load(proposals_ptr + at, mask=there, other=-1)
        from_row = scores_ptr + chains[:, None].to(tl.int64) * stride + proposals
        proposed = tl.load(from_row, mask=there & (proposals >= 0), other=float("-inf"))
        bars = proposed - tl.load(log_uniforms_ptr + at, mask=there, other=0.0)
        bars = tl.where(proposed == float("-inf"), float("-inf"), bars)
        path = tl.zeros([CHAINS, STEPS], proposals.dtype)
        moved = tl.zeros([CHAINS, STEPS], tl.int8)
        for step in tl.static_range(STEPS):
            here = (within == step)[None, :]
            move = score < tl.sum(tl.where(here, bars, 0.0), 1)
            column = tl.where(move, tl.sum(tl.where(here, proposals, 0), 1), column)
            score = tl.where(move, tl.sum(tl.where(here, proposed, 0.0), 1), score)
            path = tl.where(here, column[:, None], path)
            moved = tl.where(here, move[:, None].to(tl.int8), moved)
        tl.store(path_ptr + at, path, mask=there)
        tl.store(moved_ptr + at, moved, mask=there)


def supports(scores: Tensor) -> str | None:
    """Why the kernel cannot serve these scores; None if it can."""
    if not installed:
        return "triton is not installed"
    if not scores.is_cuda:
        return f"the scores are on {scores.device.type}, and Triton needs a GPU"
    if scores.dtype not in (torch.float32, torch.float64):
        return f"the scores are {scores.dtype}, and not float32 or float64"
    return None


def walk(
    scores: Tensor, start: PerChain, start_score: PerChain, proposals: PerStep, log_uniforms: PerStep
) -> tuple[PerStep, PerStep]:
    """As ``chain.walk``: the column in which each chain stands after each step, and whether it moved."""
    if not interpreted and (reason := supports(scores)):
        raise ArgumentError("walk", "what the Triton kernel can serve", reason, "use hardneg.kernels.chain.walk")
    num_chains, num_steps = proposals.shape
    path, moved = torch.empty_like(proposals), torch.empty_like(proposals, dtype=torch.int8)
    if not scores.shape[1]:
        proposals = torch.full_like(proposals, -1)
    scores = scores.detach() if scores.stride(1) == 1 else scores.detach().contiguous()
    if path.numel():
        _walk[(-(-num_chains // 16),)](
            scores, start.contiguous(), start_score.to(scores.dtype).contiguous(), proposals.contiguous(),
            log_uniforms.to(scores.dtype).contiguous(), path, moved,
            num_chains, scores.stride(0), num_steps, CHAINS=16, STEPS=32, num_warps=1,
        )  # fmt: skip
    return path, moved.bool()
