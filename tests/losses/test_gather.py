"""``gather=True``: two ranks with different numbers of rows give the value and the gradient of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hardneg as hn
from hardneg.core.types import Keys
from hardneg.losses import GradCache
from support.two_ranks import on_two_ranks

ROWS, CHUNK = 12, 2
SPLIT = [slice(0, 7), slice(7, 12)]  # 7 rows on the first rank, 5 on the second
CASES: dict[str, dict[str, Any]] = {
    "tilt": {"negatives": "Tilt(1.0)", "tau_plus": 0.05},
    "no ids": {"negatives": "Tilt(1.0)", "call": {"ids": None}},
    "rows without an id": {"call": {"ids": torch.where(torch.arange(ROWS) % 3 > 0, torch.arange(ROWS), -1)}},
    "one id on both ranks": {"call": {"ids": torch.arange(ROWS) % 9}},
    "cross": {"negatives": "Tilt(0.5)", "views": "cross"},
    "cross without ids": {"views": "cross", "call": {"ids": None}},
    "ring": {"negatives": "OtherLabel() * Ring(0.1, 0.7)"},
    "labels": {"negatives": "OtherLabel() * Tilt(1.0)", "positives": "label"},
    "pairs": {"negatives": "OtherLabel()", "positives": "label", "reduction": "pairs"},
    "batch scope": {"negatives": "ClippedTilt(1.0)"},
    "made candidates": {"generate": "mochi(num_hardest=4, num_mixed=4, num_with_anchor=2)", "impls": ["dense"]},
    "pool": {"negatives": "Tilt(1.0)", "pool": True},
    "guide": {"negatives": "BelowPositive(absolute=0.1, by='guide')", "guide": True},
    "temperature of each row": {"objective": "isogclr", "temperatures": True},
    "three views": {"negatives": "Tilt(1.0)", "num_views": 3},
}


def impls(name: str) -> list[str]:
    return CASES[name].get("impls", ["dense", "streamed"])


def loss_of(name: str, impl: str, z: Tensor, rows: slice) -> tuple[hn.ContrastiveLoss, list[Any], dict[str, Any]]:
    """The loss, and what it is called with for these rows."""
    case = dict(CASES[name])
    call = {"ids": 3 * torch.arange(ROWS), "labels": torch.arange(ROWS) % 4, **case.pop("call", {})}
    views = list(z.chunk(case.pop("num_views", 2)))
    if case.pop("pool", False):
        call["pool"] = Keys(torch.randn(6, 4, generator=torch.Generator().manual_seed(5)).double(), torch.arange(6))
    call = {key: each[rows] if isinstance(each, Tensor) else each for key, each in call.items()}
    if case.pop("guide", False):
        other = torch.randn(2, ROWS, 3, generator=torch.Generator().manual_seed(6)).double()
        call["guide"] = [each[rows] for each in other]
    if case.pop("temperatures", False):
        call["temperature"] = torch.linspace(0.2, 0.6, ROWS).double()[rows]
    case.pop("impls", None)
    return hn.ContrastiveLoss(temperature=0.3, impl=impl, gather=True, **case), [views], call


def inputs(number: int) -> Tensor:
    return torch.randn(number, ROWS, 3, generator=torch.Generator().manual_seed(1)).double()


def encoder_of(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), *layers).double()


def one_step(name: str, impl: str, rows: slice, encode: Callable[[Tensor], Tensor], encoder: nn.Module) -> list[Tensor]:
    """Value and gradients; with several ranks as DistributedDataParallel leaves them, averaged."""
    x = inputs(CASES[name].get("num_views", 2))[:, rows]
    encoder.zero_grad()
    loss, args, call = loss_of(name, impl, encode(x.flatten(0, 1)), rows)
    value = loss(*args, **call)
    (3.0 * value).backward()
    if dist.is_initialized() and not isinstance(encoder, DistributedDataParallel):
        for parameter in encoder.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    return [value.detach(), *(parameter.grad for parameter in encoder.parameters())]


def on_rank(rank: int) -> dict[str, Any]:
    encoder = encoder_of()
    found: dict[str, Any] = {
        f"{name} {impl}": one_step(name, impl, SPLIT[rank], encoder, encoder) for name in CASES for impl in impls(name)
    }
    wrapped, rows = DistributedDataParallel(encoder_of(nn.Tanh())), slice(6 * rank, 6 * rank + 6)
    found["chunks"] = one_step("tilt", "dense", rows, GradCache(wrapped, CHUNK), wrapped)
    found["errors"] = [refused(wrong) for wrong in wrong_calls(rank)]
    loss, args, call = loss_of("tilt", "dense", encoder(inputs(2)[:, SPLIT[rank]].flatten(0, 1)), SPLIT[rank])
    pairing = loss.pairing(*args, **call)
    found["compared"] = [len(pairing), pairing.num_candidates]
    found["hardness"] = loss.diagnose(*args, **call).hardness.sort().values
    loss.reduction = "none"
    found["none"] = loss(*args, **call).detach()
    return found


def wrong_calls(rank: int) -> Iterator[Callable[[], Tensor]]:
    loss, z, ids = hn.ContrastiveLoss(gather=True), torch.randn(2, 4, 3), torch.arange(4)
    yield lambda: loss(*z[:, : 4 * rank], ids[: 4 * rank])
    yield lambda: loss(*z, ids if rank else None, labels=None if rank else ids)
    yield lambda: loss(*z[:, :, : 2 + rank], ids)


def refused(call: Callable[[], Tensor]) -> str:
    with pytest.raises(ValueError, match="gather needs") as error:
        call()
    return str(error.value)


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return on_two_ranks(on_rank)


@pytest.mark.parametrize(("name", "impl"), [(name, impl) for name in CASES for impl in impls(name)])
def test_two_ranks_give_value_and_gradient_of_one_process(
    two_ranks: list[dict[str, Any]], name: str, impl: str
) -> None:
    encoder = encoder_of()
    expected = one_step(name, impl, slice(None), encoder, encoder)
    assert expected[1].abs().max() > 1e-3
    for found in two_ranks:
        torch.testing.assert_close(found[f"{name} {impl}"], expected, rtol=1e-12, atol=1e-12)


def test_chunks_on_two_ranks_give_the_gradient_of_one_process(two_ranks: list[dict[str, Any]]) -> None:
    encoder = encoder_of(nn.Tanh())
    expected = one_step("tilt", "dense", slice(None), encoder, encoder)
    for found in two_ranks:
        torch.testing.assert_close(found["chunks"], expected, rtol=1e-12, atol=1e-12)


def test_ranks_that_differ_raise_on_all_of_them(two_ranks: list[dict[str, Any]]) -> None:
    rows, ids, features = two_ranks[0]["errors"]
    assert two_ranks[1]["errors"] == [rows, ids, features]
    assert "at least one row on every rank, got rows=[0, 8]" in rows
    assert "the same labels on every rank, got labels=[True, False]" in ids
    assert "the same features on every rank, got features=(2, 3)" in features


def test_diagnosis_is_of_all_anchors_and_unreduced_losses_of_the_own(two_ranks: list[dict[str, Any]]) -> None:
    loss, args, call = loss_of("tilt", "dense", encoder_of()(inputs(2).flatten(0, 1)), slice(None))
    hardness = loss.diagnose(*args, **call).hardness.sort().values
    loss.reduction = "none"
    whole = loss(*args, **call).detach().view(2, ROWS)
    for found, rows in zip(two_ranks, SPLIT, strict=True):
        torch.testing.assert_close(found["hardness"], hardness, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found["none"], whole[:, rows].flatten(), rtol=1e-12, atol=1e-12)


def test_no_rank_compares_more_than_its_own_anchors(two_ranks: list[dict[str, Any]]) -> None:
    assert [found["compared"] for found in two_ranks] == [[2 * 7, 2 * ROWS], [2 * 5, 2 * ROWS]]
