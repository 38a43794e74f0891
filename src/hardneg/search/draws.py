"""Draws from log-weights: which candidates become the negatives when not all of them are used.

Categorical draws with replacement and Gumbel-max draws without (the negative cache), with an explicit generator.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, argument_error, check_count, check_kind
from hardneg.core.types import NEVER, LogWeights, with_support
from hardneg.search.topk import top_of_rows


def draw(
    log_w: LogWeights, k: int, generator: torch.Generator, method: str = "categorical"
) -> Annotated[Tensor, "b k"]:
    """Draw k candidates of each row.

    Args:
        log_w: Log-weights [b, n]; a candidate with ``NEVER`` is never drawn.
        k: Number of draws per row.
        generator: Random generator.
        method: ``"categorical"`` draws with replacement. ``"gumbel"`` draws without, by the top k of log-weight plus
            Gumbel noise; the largest come first.

    Returns:
        Columns [b, k]; -1 where the row has no more candidates.

    Example:
        >>> import torch
        >>> log_w = torch.tensor([[0.0, NEVER, NEVER]])
        >>> draw(log_w, 3, torch.Generator().manual_seed(0), method="gumbel").tolist()
        [[0, -1, -1]]
    """
    k = check_count("draw", "k", k)
    check_generator("draw", generator)
    if log_w.ndim != 2:
        raise ArgumentError("draw", "log-weights [b, n]", f"log_w={tuple(log_w.shape)}")
    b, n = log_w.shape
    if method == "categorical":
        return draw_at(log_w.detach(), _uniform((b, k), generator).to(log_w.device))
    if method == "gumbel":
        index = gumbel_order(log_w.detach(), _uniform((b, n), generator).to(log_w.device), min(k, n))
        return torch.nn.functional.pad(index, (0, k - index.shape[1]), value=-1)
    raise argument_error("draw", "method 'categorical' or 'gumbel'", "method", method)


def draw_at(log_w: Tensor, uniforms: Annotated[Tensor, "b k"]) -> Annotated[Tensor, "b k"]:
    """Draw columns with replacement, one for each uniform number, by inverting the distribution function.

    The cost is [b, n + k] and not [b, n, k].

    Args:
        log_w: Log-weights [b, n].
        uniforms: Uniform numbers in [0, 1), [b, k].

    Returns:
        Columns [b, k]; -1 in rows without candidates.
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


def uniform_columns(allowed: Annotated[Tensor, "b n"], uniforms: Annotated[Tensor, "b k"]) -> Annotated[Tensor, "b k"]:
    """Draw allowed columns with replacement and equal probability.

    Computes ``draw_at`` for equal weights in whole numbers, so the result is the same on every device.

    Args:
        allowed: True for columns that may be drawn, [b, n].
        uniforms: Uniform numbers in [0, 1), [b, k].

    Returns:
        Columns [b, k]; -1 in rows without an allowed column.

    Example:
        >>> import torch
        >>> uniform_columns(torch.tensor([[False, True, False, True]]), torch.tensor([[0.0, 0.4, 0.5, 0.9]])).tolist()
        [[1, 1, 3, 3]]
    """
    upto = allowed.cumsum(-1)
    number = upto[:, -1:]
    rank = torch.minimum((uniforms * number).long(), number - 1)  # a product just below the number may be rounded up
    return torch.where(number > 0, torch.searchsorted(upto, rank, right=True), -1)


def gumbel_order(log_w: Tensor, uniforms: Annotated[Tensor, "b n"], k: int) -> Annotated[Tensor, "b k"]:
    """Return the columns of k draws without replacement in the order of drawing; -1 after the last.

    Args:
        log_w: Log-weights [b, n].
        uniforms: Uniform numbers in [0, 1), [b, n].
        k: Number of draws per row.
    """
    values, index = top_of_rows(gumbel_keys(log_w, uniforms), k)
    return torch.where(values == NEVER, -1, index)


def gumbel_keys(log_w: Tensor, uniforms: Annotated[Tensor, "b n"]) -> Annotated[Tensor, "b n"]:
    """Add Gumbel noise to the log-weights.

    The largest key is a draw from the weights, and the k largest are k draws without replacement.
    """
    return log_w.double() - torch.log(-torch.log(uniforms.clamp(min=1e-300)))


def check_generator(who: str, generator: torch.Generator) -> None:
    """Raise unless the argument is a torch.Generator."""
    what = "a torch.Generator, such as torch.Generator().manual_seed(0)"
    check_kind(who, "generator", generator, torch.Generator, what)


def drawn_seed(who: str, generator: torch.Generator | None, most: int) -> int:
    """Draw a seed below ``most`` from the generator, or from torch's global one."""
    if generator is None:
        return int(torch.randint(most, ()))
    check_generator(who, generator)
    return int(torch.randint(most, (), generator=generator, device=generator.device))


def _uniform(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device)
