"""The inner loop of Metropolis-Hastings chains, vectorised over the chains; ``triton_chain`` is its twin on a GPU."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor

PerChain = Annotated[Tensor, "c"]
PerStep = Annotated[Tensor, "c k"]


def walk(
    scores: Annotated[Tensor, "c n"],
    start: PerChain,
    start_score: PerChain,
    proposals: PerStep,
    log_uniforms: PerStep,
) -> tuple[PerStep, PerStep]:
    """The column in which each chain stands after each of k steps, and whether it moved.

    A chain moves to its proposal where log U < s_new - s_state. ``start`` may lie outside the columns, with the score
    ``start_score``; a start score of -inf takes the first proposal. A proposal of -1 is no proposal.

    >>> s = torch.tensor([[0.0, 2.0, -9.0]])
    >>> steps = torch.tensor([[1, 2, 0]]), torch.tensor([[0.9, 0.5, 0.1]]).log()
    >>> path, moved = walk(s, torch.tensor([0]), torch.tensor([0.0]), *steps)
    >>> path.tolist(), moved.tolist()
    ([[1, 1, 0]], [[True, False, True]])
    """
    if not scores.shape[1]:
        proposals = torch.full_like(proposals, -1)
        proposed = torch.full_like(log_uniforms, -math.inf)
    else:
        proposed = torch.where(proposals >= 0, scores.gather(1, proposals.clamp(min=0)), -math.inf)
    # s_new - log U is what the state's score must stay below: one comparison per step, and no exponential.
    bars = torch.where(proposed == -math.inf, -math.inf, proposed - log_uniforms)
    column, score = start, start_score
    path, moves = torch.empty_like(proposals), torch.empty_like(proposals, dtype=torch.bool)
    for step in range(proposals.shape[1]):
        move = score < bars[:, step]
        column = torch.where(move, proposals[:, step], column)
        score = torch.where(move, proposed[:, step], score)
        path[:, step], moves[:, step] = column, move
    return path, moves
