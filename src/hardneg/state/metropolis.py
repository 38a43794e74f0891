"""Metropolis-Hastings chains: their inputs, and their steps vectorised over the chains.

``state.chain.Chain`` calls ``metropolis_hastings`` on a CPU. On a GPU ``state/triton_chains.py`` computes the same
steps in one kernel, and everything that EMC2 does with them in four.
"""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from hardneg.core.tensors import outside_graphs

PerChain = Annotated[Tensor, "b"]
PerStep = Annotated[Tensor, "b k"]
PerColumn = Annotated[Tensor, "b n"]


class ChainMemory(NamedTuple):
    """The buffers of all chains.

    Attributes:
        state: Id of the negative at which each chain is, -1 before the first visit.
        view: View of that negative.
        log_score: Scores of the views of that negative at the last visit.
        scored_at: Step of the last visit.
        seed: Seed of the draws.
        step: Current step.
    """

    state: Annotated[Tensor, "c"]
    view: Annotated[Tensor, "c"]
    log_score: Annotated[Tensor, "c v"]
    scored_at: Annotated[Tensor, "c"]
    seed: Tensor
    step: Tensor


class ChainBatch(NamedTuple):
    """The candidates of each chain of a batch, and the position of its memory.

    Attributes:
        candidates: Scores of the candidates.
        valid: True for candidates that may be visited.
        ids: Ids of the candidates.
        views: Views of the candidates.
        slots: Index of each chain's memory; negative for rows that are not an instance.
    """

    candidates: PerColumn
    valid: PerColumn
    ids: Annotated[Tensor, "b|1 n"]
    views: Annotated[Tensor, "b|1 n"]
    slots: PerChain


class Visits(NamedTuple):
    """The result of k steps of each chain."""

    counts: PerColumn
    """How often each column was the state after a counted step."""
    end: PerChain
    """The last column; -1 if the chain never had one."""
    accepted: PerStep


@outside_graphs  # a loop over the steps would be unrolled into a huge graph
def metropolis_hastings(
    log_scores: PerColumn, start: PerChain, proposals: PerStep, log_uniforms: PerStep, burn_in: int = 0
) -> Visits:
    """Walk k steps of each chain over its columns; a pure function.

    The state becomes the proposal if log U < s_new - s_state.

    Args:
        log_scores: Scores of b chains over n columns, [b, n].
        start: First column of each chain, [b]; a chain with -1, or with a NaN score, moves to the first proposal.
        proposals: Proposed columns, [b, k]; -1 means no proposal, and a score of -inf or NaN is never accepted.
        log_uniforms: Logarithms of uniform numbers, [b, k].
        burn_in: Number of first steps that are not counted.

    Example:
        >>> s = torch.tensor([[0.0, 2.0, -9.0]])
        >>> steps = torch.tensor([[1, 2, 0]]), torch.tensor([[0.9, 0.5, 0.1]]).log()
        >>> visits = metropolis_hastings(s, torch.tensor([0]), *steps)
        >>> visits.counts.tolist(), visits.end.tolist(), visits.accepted.tolist()
        ([[1.0, 2.0, 0.0]], [0], [[True, False, True]])
    """
    b, k = proposals.shape
    padded = torch.nn.functional.pad(log_scores, (0, 1), value=-math.inf)  # column -1
    score = padded.gather(1, start[:, None] % padded.shape[1]).squeeze(1)
    score = torch.where(score.isnan(), -math.inf, score)  # a chain must not be stuck where a broken batch left it
    proposed = padded.gather(1, proposals % padded.shape[1]).T.contiguous()
    # A move needs s_state < s_new - log U: one comparison per step, and no exponential.
    bars = torch.where(proposed == -math.inf, -math.inf, proposed - log_uniforms.T)
    accepted = torch.empty(k, b, dtype=torch.bool, device=log_scores.device)
    for move, new, bar in zip(accepted, proposed, bars, strict=True):
        torch.lt(score, bar, out=move)
        score = torch.where(move, new, score)
    steps = torch.arange(1, k + 1, device=log_scores.device)
    last = (accepted.T * steps).cummax(1).values if k else proposals  # the last step that moved, from 1; 0: none
    path = torch.cat([start[:, None], proposals], dim=1).gather(1, last)
    counted = path[:, burn_in:]
    counts = torch.zeros_like(padded).scatter_add(1, counted % padded.shape[1], torch.ones_like(counted).to(padded))
    return Visits(counts[:, :-1], path[:, -1] if k else start, accepted.T)
