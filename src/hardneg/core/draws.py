"""Draws: which candidates become the negatives, when not all of them do.

Gumbel-max (the negative cache) and categorical draws from any log-weights, with an explicit generator.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from hardneg.core.errors import argument_error
from hardneg.core.types import NEVER, LogWeights, with_support


def draw(
    log_w: LogWeights, k: int, generator: torch.Generator, method: str = "categorical"
) -> Annotated[Tensor, "b k"]:
    """Indices of k candidates of each row; -1 where the row has no more.

    ``"categorical"`` draws with replacement; ``"gumbel"`` draws without, by the top k of log-weight plus Gumbel noise,
    hardest draws first. A candidate at NEVER is never drawn.

    >>> import torch
    >>> log_w = torch.tensor([[0.0, NEVER, NEVER]])
    >>> draw(log_w, 3, torch.Generator().manual_seed(0), method="gumbel").tolist()
    [[0, -1, -1]]
    """
    if k < 1:
        raise argument_error("draw", "k of 1 or more", "k", k)
    if method == "categorical":
        return draw_at(log_w.detach(), _uniform((len(log_w), k), generator).to(log_w.device))
    if method == "gumbel":
        return _gumbel_top_k(log_w.detach(), k, generator)
    raise argument_error("draw", "method 'categorical' or 'gumbel'", "method", method)


def draw_at(log_w: LogWeights, uniforms: Annotated[Tensor, "b k"]) -> Annotated[Tensor, "b k"]:
    """The categorical draws that belong to these numbers in [0, 1).

    By the inverse of the distribution function, so that the cost is [b, n + k] and not [b, n, k].
    """
    n = log_w.shape[1]
    if n == 0:
        return torch.full(uniforms.shape, -1, device=log_w.device)
    some, safe = with_support(log_w)
    q = torch.softmax(safe.double(), dim=-1)
    cumulative = q.cumsum(-1)
    # right=True steps over candidates of weight 0; the product stays below the total because uniforms are below 1.
    index = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    last = n - 1 - (q > 0).flip(-1).int().argmax(-1, keepdim=True)
    index = torch.where(some, torch.minimum(index, last), -1)
    unknown = torch.isnan(log_w)  # drawn, so that it stays visible in the loss
    return torch.where(unknown.any(-1, keepdim=True), unknown.int().argmax(-1, keepdim=True), index)


def _gumbel_top_k(log_w: Tensor, k: int, generator: torch.Generator) -> Tensor:
    b, n = log_w.shape
    noise = -torch.log(-torch.log(_uniform((b, n), generator).clamp(min=1e-300))).to(log_w.device)
    best = (log_w.double() + noise).topk(min(k, n), dim=-1)
    index = torch.where(best.values == NEVER, -1, best.indices)
    return torch.nn.functional.pad(index, (0, k - index.shape[1]), value=-1)


def _uniform(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device)
