"""EMC2's chains as four kernels walk, count and remember what the operations of torch do, bit for bit."""

from __future__ import annotations

import copy
from dataclasses import fields

import pytest
import torch

import hardneg.state.chain
from hardneg.core.types import Scores, Tags
from hardneg.state import triton_chains
from hardneg.state.chain import Chain, Walk
from hardneg.state.metropolis import ChainBatch, ChainMemory
from support.kernel_inputs import DEVICE

pytestmark = pytest.mark.usefixtures("triton_can_run")
NUM = 12


def make_scores(rows: int, columns: int, dtype: torch.dtype, private: bool = False, seed: int = 0) -> Scores:
    """Random scores of candidates of which some have one id, some none, and some are not valid."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, NUM, (rows if private else 1, columns), generator=generator)
    candidates = 3.0 * torch.randn(rows, columns, generator=generator, dtype=dtype)
    valid = torch.rand(rows, columns, generator=generator) < 0.7
    none = torch.zeros(rows, 1, dtype=dtype, device=DEVICE)
    return Scores(
        none, candidates.to(DEVICE), none > 1, valid.to(DEVICE), 1.0, Tags(), Tags(ids.to(DEVICE)),
        torch.zeros(columns, dtype=torch.long, device=DEVICE), ("batch",),
    )  # fmt: skip


def begun(num_views: int, burn_in: float = 0.4) -> Chain:
    """Chains that stand somewhere: at a candidate, outside, with a score that is NaN, or nowhere yet."""
    chain = Chain(NUM, burn_in, num_views=num_views, seed=3)
    generator = torch.Generator().manual_seed(1)
    size = NUM * num_views
    chain.state.copy_(torch.randint(-1, NUM + 5, (size,), generator=generator))
    chain.view.copy_(torch.randint(0, num_views, (size,), generator=generator))
    chain.log_score.copy_(torch.randn(size, num_views, generator=generator, dtype=torch.float64))
    chain.log_score[::4, 0] = float("nan")
    chain.log_score[1::4] = -float("inf")
    chain.scored_at.copy_(torch.randint(-1, 3, (size,), generator=generator))
    chain.step.fill_(5)
    return chain.to(DEVICE)


def slots_of(rows: int, num_views: int) -> torch.Tensor:
    """Some chains twice, one row without a chain."""
    slots = torch.randint(0, NUM * num_views, (rows,), generator=torch.Generator().manual_seed(2))
    slots[rows // 2] = -1
    return slots.to(DEVICE)


def assert_same_walks(monkeypatch: pytest.MonkeyPatch, chain: Chain, scores: Scores, num_steps: int) -> Walk:
    slots, walks, chains = slots_of(len(scores.valid), chain.num_views), [], [chain, copy.deepcopy(chain)]
    for each, kernels in zip(chains, (triton_chains, None), strict=True):
        monkeypatch.setattr(hardneg.state.chain, "_kernels_for", lambda batch, kernels=kernels: kernels)
        for _ in range(2):  # the second from where the one before has ended
            walks.append(each.walk(scores, slots, num_steps=num_steps))
    for ours, theirs in zip(walks[:2], walks[2:], strict=True):
        for field in fields(Walk):
            mine, expected = getattr(ours, field.name), getattr(theirs, field.name)
            torch.testing.assert_close(mine, expected, rtol=2e-7, atol=0.0, equal_nan=True, msg=field.name)
    for (name, expected), mine in zip(chains[1].state_dict().items(), chains[0].state_dict().values(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0.0, atol=0.0, equal_nan=True, msg=name)
    return walks[1]


@pytest.mark.parametrize(
    ("rows", "columns", "steps", "num_views", "private", "dtype"),
    [
        (1, 1, 1, 1, False, torch.float32),
        (5, 9, 20, 2, False, torch.float64),
        (33, 66, 5, 2, True, torch.float32),
        (9, 64, 66, 3, True, torch.float32),
    ],
)
def test_the_kernels_walk_as_torch_does(
    monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, steps: int, num_views: int, private: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    assert_same_walks(monkeypatch, begun(num_views), make_scores(rows, columns, dtype, private), steps)


def test_broken_scores_and_rows_without_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = make_scores(9, 20, torch.float32)
    scores.candidates[0, ::2], scores.candidates[1] = float("nan"), float("nan")
    scores.candidates[2, :10] = -float("inf")
    scores.valid[3], scores.valid[4] = False, False
    walk = assert_same_walks(monkeypatch, begun(2), scores, 12)
    assert walk.log_visits[3].max() == -float("inf") or walk.outside[3] == 1.0


def test_an_id_that_is_too_large_makes_nan_and_writes_nowhere() -> None:
    chain, scores = begun(1), make_scores(3, 20, torch.float32)
    memory = ChainMemory(
        chain.state[:8], chain.view[:8], chain.log_score[:8], chain.scored_at[:8], chain.seed, chain.step
    )
    before, slots = copy.deepcopy(chain.state_dict()), torch.tensor([2, 9, 8], device=DEVICE)
    ids = scores.candidate_tags.ids
    batch = ChainBatch(scores.candidates, scores.valid, ids, torch.zeros_like(ids), slots)
    walked = triton_chains.walk(batch, memory, 12, 2, -1e30)
    triton_chains.remember(batch, memory, walked.end, NUM)
    assert walked.log_visits.isnan().all(1).tolist() == [False, True, True]
    for name in ("state", "view", "log_score", "scored_at"):
        torch.testing.assert_close(chain.state_dict()[name][8:], before[name][8:], rtol=0.0, atol=0.0, equal_nan=True)


def test_columns_that_are_not_side_by_side_and_eval_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = make_scores(9, 20, torch.float32)
    scores = scores.changed(candidates=scores.candidates.T.contiguous().T)
    chain = begun(2).eval()
    before = copy.deepcopy(chain.state_dict())
    assert_same_walks(monkeypatch, chain, scores, 12)
    for (name, expected), mine in zip(before.items(), chain.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0.0, atol=0.0, equal_nan=True, msg=name)
