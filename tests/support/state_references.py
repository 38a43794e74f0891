"""What the authors' code of the methods with state computes, accidents included; the product does not do this.

Short independent references, in plain loops where the original loops. Each reproduces the recorded numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def sogclr_mixed_first_visit(
    z1: Tensor, z2: Tensor, u: Tensor, ids: Tensor, temperature: float, gamma: float
) -> Tensor:
    """SogCLR's and LibAUC's rule for new items: u = 0 counts as an old value unless the whole batch is new.

    Changes u in place. Takes unit vectors.
    """
    rate = 1.0 if bool((u[ids] == 0).all()) else gamma
    total, new = z1.new_zeros(()), []
    for a, b in ((z1, z2), (z2, z1)):
        candidates = torch.cat([b, a])
        similarity = a @ candidates.T
        others = (torch.arange(len(candidates)) % len(a)) != torch.arange(len(a))[:, None]
        weight = (similarity / temperature).exp() * others
        count = others.sum(1)
        new.append((1.0 - rate) * u[ids] + rate * (weight.sum(1) / count).detach())
        share = (weight / new[-1][:, None]).detach()
        total = total + ((share * similarity).sum(1) / count - (a * b).sum(1)).mean()
    u[ids] = (new[0] + new[1]) / 2.0
    return total


def gcl_bimodal_mixed_first_visit(
    z1: Tensor, z2: Tensor, u: list[Tensor], ids: Tensor, temperature: float, gamma: float
) -> Tensor:
    """LibAUC's GCLoss_v2 with the same rule for new items; the loss is not divided by b - 1."""
    rate = 1.0 if bool((u[0][ids] == 0).all()) else gamma
    total, b = z1.new_zeros(()), len(z1)
    for side, (x, y) in enumerate(((z1, z2), (z2, z1))):
        gap = x @ y.T - (x * y).sum(1, keepdim=True)
        weight = (gap / temperature).exp() * (1 - torch.eye(b, dtype=gap.dtype))
        u[side][ids] = (1.0 - rate) * u[side][ids] + rate * (weight.sum(1) / (b - 1)).detach()
        total = total + ((weight / u[side][ids][:, None]).detach() * gap).sum(1).mean() / 2.0
    return total


@dataclass
class Emc2Step:
    """One step of the authors' EMC2 sampler on 2b rows."""

    pairs: list[tuple[int, int]]
    chain: list[list[int]]
    log_scores: Tensor
    states: Tensor


def emc2_sweep(
    similarity: Tensor, beta: float, ids: Tensor, states: Tensor, log_scores: Tensor, uniforms: Tensor, burn_in: int
) -> Emc2Step:
    """Columns in fixed order, stale scores, and the record of columns j > burn_in (not >=).

    similarity: [2b, 2b] of unit rows. uniforms: [4b, b], one row per column, view 1 then view 2.
    """
    b, similarity = len(ids), similarity.detach()
    column, score = [-1] * b, [float(log_scores[i]) for i in ids]
    pairs, ends = [], []
    for view in range(2):
        for j in range(2 * b):
            for i in range(b):
                if j % b == i:
                    continue
                row, new = view * b + i, beta * float(similarity[view * b + i, j])
                if float(uniforms[view * 2 * b + j, i].log()) < new - score[i]:
                    column[i], score[i] = j, new
                if j > burn_in:
                    pairs.append((row, column[i]))
        ends.append(list(column))
    states, log_scores = states.clone(), log_scores.clone()
    for i, item in enumerate(ids.tolist()):
        log_scores[item] = score[i]
        if column[i] >= 0:
            states[item] = ids[column[i] % b]
    return Emc2Step(pairs, ends, log_scores, states)


def emc2_in_batch_terms(o: Tensor, pairs: list[tuple[int, int]], beta: float, burn_in: int) -> tuple[Tensor, Tensor]:
    """The negative and the positive term of the authors' surrogate: pairs outside the batch are left out of the sum."""
    b = len(o) // 2
    inside = torch.tensor([pair for pair in pairs if pair[1] >= 0])
    negative = beta * (o[inside[:, 0]] * o[inside[:, 1]]).sum() / ((2 * (b - 1) - burn_in) * 2 * b)
    return negative, -beta * (o[:b] * o[b:]).sum() / b
