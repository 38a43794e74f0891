"""One kernel for all steps of all chains gives the visits of the loop in torch, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError
from hardneg.state import metropolis as chain
from hardneg.state import triton_chains
from support.kernel_inputs import DEVICE

pytestmark = pytest.mark.usefixtures("triton_can_run")


def numbers(chains: int, columns: int, steps: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Scores, starts, proposals and logarithms of uniform numbers; a start or proposal of -1 is none."""
    draw = [torch.randint(-1, columns, shape) for shape in ((chains,), (chains, steps))]
    parts = 3 * torch.randn(chains, columns, dtype=dtype), *draw, torch.rand(chains, steps, dtype=dtype).log()
    return tuple(part.to(DEVICE) for part in parts)


def assert_same_visits(parts: tuple[Tensor, ...], burn_in: int = 0) -> chain.Visits:
    ours, theirs = triton_chains.metropolis_hastings(*parts, burn_in), chain.metropolis_hastings(*parts, burn_in)  # type: ignore[call-arg]
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.dtype == expected.dtype
        assert torch.equal(mine, expected)
    return ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 7, 3), (33, 20, 70), (16, 50, 64), (3, 0, 4), (3, 5, 0)], ids=str)
def test_the_kernel_visits_what_the_loop_visits(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    assert_same_visits(numbers(*shape, dtype), burn_in=shape[2] // 3)


def test_scores_that_are_missing_or_broken() -> None:
    scores, start, proposals, log_uniforms = numbers(4, 6, 40, torch.float64)
    scores[0, :3], scores[1, 2] = -math.inf, math.nan
    start[0], start[1] = -1, 2
    visits = assert_same_visits((scores, start, proposals, log_uniforms))
    assert visits.counts[0, :3].sum() == 0
    assert visits.counts[1, 2] < 40, "a chain is not stuck where its score is NaN"


def test_scores_shared_by_all_chains() -> None:
    scores, *rest = numbers(8, 6, 20, torch.float32)
    assert_same_visits((scores[:1].expand(8, -1), *rest))


def test_what_cannot_be_served_is_named() -> None:
    half = numbers(2, 3, 4, torch.float32)[0].half()
    assert triton_chains.why_unsupported(half) is not None
    if torch.cuda.is_available():
        with pytest.raises(ArgumentError):
            triton_chains.metropolis_hastings(half, *numbers(2, 3, 4, torch.float32)[1:])
