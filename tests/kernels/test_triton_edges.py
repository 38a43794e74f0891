"""Edges of windows by counting are those of a sorted row, ties by column."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hardneg.kernels.triton.edges import edges
from support.grids import grid
from support.kernel_inputs import DEVICE

pytestmark = pytest.mark.usefixtures("triton_can_run")

KINDS = {
    "normal": lambda x: x,
    "ties": lambda x: (2 * x).round() / 2,
    "equal": lambda x: torch.zeros_like(x),
    "heavy": lambda x: x**5,
}


def rows(kind: str, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Values, -inf where masked, their number, and their columns."""
    random = torch.Generator().manual_seed(n)
    value = KINDS[kind](torch.randn(5, n, generator=random)).to(dtype)
    mask = torch.rand(5, n, generator=random) < 0.9
    mask[0] = False
    parts = torch.where(mask, value, -torch.inf), mask.sum(1, keepdim=True), torch.arange(7, 7 + n)[None]
    return tuple(part.to(DEVICE) for part in parts)  # type: ignore[return-value]


def taken(value: Tensor, column: Tensor, edge: tuple[Tensor, Tensor]) -> Tensor:
    inside = (value > edge[0]) | ((value == edge[0]) & (column <= edge[1]))
    return inside & (value > -torch.inf)


@grid("kind, n, dtype", [*KINDS], [1, 9, 2500], [torch.float32, torch.float16])
def test_the_closest_so_many_are_within_the_edge(kind: str, n: int, dtype: torch.dtype) -> None:
    value, count, column = rows(kind, n, dtype)
    sizes = (count * 0.1).long(), (count * 0.7).long()
    order = value.float().sort(dim=1, descending=True, stable=True).indices
    for edge, size in zip(edges(value, column, sizes, count), sizes, strict=True):
        wanted = torch.zeros_like(value, dtype=torch.bool)
        wanted.scatter_(1, order, torch.arange(n, device=DEVICE) < size)
        assert torch.equal(taken(value, column, edge), wanted)


def test_approximate_edges_are_off_by_a_share_of_the_ranks() -> None:
    value, count, column = rows("normal", 2500, torch.float32)
    sizes = (count * 0.1).long(), (count * 0.7).long()
    for edge, size in zip(edges(value, column, sizes, count, slack=0.002), sizes, strict=True):
        assert (taken(value, column, edge).sum(1, keepdim=True) - size).abs().max() <= 5
