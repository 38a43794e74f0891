"""Windows of ranks against a queue, Ring and Rank, in the Triton kernels: the same negatives as dense ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hardneg as hn
from hardneg.core.errors import ArgumentError
from hardneg.kernels.backends import triton as triton_backend
from hardneg.kernels.triton import edges as triton_edges
from hardneg.kernels.triton import sides as triton_sides
from hardneg.kernels.triton.edges import RowEdges, Sizes
from hardneg.kernels.triton.statistics import row_statistics
from support.kernel_inputs import DEVICE, vectors

pytestmark = pytest.mark.usefixtures("triton_can_run")

D, QUEUE = 24, 300
WINDOWS = [
    ("Ring(0.1, 0.5)", True, 4),
    ("Ring(0.2, 0.8) * Tilt(1.0)", False, 4),
    ("Tilt(0.7, detach=True) * Ring(0.1, 0.15, at_least=30)", True, 4),
    ("Rank(3, 20)", False, 4),
    ("Rank(5)", True, 4),
]


@pytest.fixture(autouse=True)
def served_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter counts as a GPU."""
    if DEVICE == "cpu":
        monkeypatch.setattr(triton_backend, "why_unsupported", lambda *args: triton_sides.why_unsupported_inputs(*args))
        monkeypatch.setattr(triton_edges, "BLOCK", 256)


def run(text: str, impl: str, dtype: torch.dtype, ids: bool, rows: int) -> tuple[hn.ContrastiveLoss, Tensor, Tensor]:
    """The loss module, the losses of the anchors, and the gradient of their vectors."""
    z1, z2 = (vectors(rows, D, torch.float64, 3.0, seed).half().to(dtype) for seed in (0, 1))
    loss = hn.ContrastiveLoss(text, temperature=0.3, views="pool", impl=impl, reduction="none")
    queue, numbers = vectors(QUEUE, D, torch.float64, seed=2).half().to(dtype), torch.arange(QUEUE, device=DEVICE)
    keys = hn.Keys(queue, numbers % 40 if ids else None)
    value = loss(z1.requires_grad_(), z2, ids=numbers[:rows] if ids else None, pool=keys)
    return loss, value.detach(), torch.autograd.grad(value.sum(), z1)[0]


@pytest.mark.parametrize(("text", "ids", "rows"), WINDOWS)
def test_windows_agree_with_dense(text: str, ids: bool, rows: int) -> None:
    """Ranks are those of float16 products: a few anchors have the neighbour of a candidate in its place."""
    loss, value, gradient = run(text, "streamed", torch.float16, ids, rows)
    assert loss.path is not None
    assert loss.path.name == "triton"
    _, expected, wanted = run(text, "dense", torch.float64, ids, rows)
    torch.testing.assert_close(value.double(), expected, rtol=1e-3, atol=0.0)
    assert float(value.double().mean()) == pytest.approx(float(expected.mean()), rel=5e-5)
    errors = (gradient - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert (errors > 2e-3).sum() <= 1
    assert errors.max() < 0.2


def test_of_equal_candidates_the_first_columns_are_closer() -> None:
    queue = vectors(3, D, torch.float16, seed=2).repeat(QUEUE // 3, 1)
    anchors = vectors(3, D, torch.float16, seed=0)
    start, stop, count = (torch.full((3, 1), number, device=DEVICE) for number in (40, 170, QUEUE))
    sizes = Sizes.of(start, stop, count, 0.0, QUEUE)
    found = row_statistics(anchors, queue, temperature=0.5, window=sizes, normalize=True)
    assert (found.support == 130).all()


def test_a_chunk_of_the_rows() -> None:
    """The edges of each row are where it stands, and those of other rows are left as they were."""
    values = vectors(6, 64, torch.float16, seed=3)
    start, stop, count = (torch.full((6, 1), number, device=DEVICE) for number in (10, 40, 64))
    sizes = Sizes.of(start, stop, count, 0.0, 64)
    hints = sizes.hints(values[:, ::4], 64)
    whole, part = (RowEdges.empty(6, values.device) for _ in range(2))
    whole.find(values, 0, sizes, hints)
    part.find(values[4:], 4, sizes, hints)
    assert torch.equal(part.value[4:], whole.value[4:])
    assert torch.equal(part.place[4:], whole.place[4:])
    assert part.value[:4].isinf().all()


def test_two_runs_give_the_same_bits() -> None:
    first, second = (run("Ring(0.1, 0.5)", "streamed", torch.float16, False, 3) for _ in range(2))
    assert torch.equal(first[1], second[1])
    assert torch.equal(first[2], second[2])


def test_windows_that_go_in_chunks() -> None:
    z1, z2, queue = (vectors(4, D, torch.float16, seed=seed) for seed in range(3))
    labels = torch.arange(4, device=DEVICE)
    ring = hn.ContrastiveLoss("Ring(0.1, 0.5)", impl="streamed", views="pool")
    assert ring.explain_path(z1, z2, pool=queue).startswith("triton")
    assert "16-bit" in hn.ContrastiveLoss("Ring(0.1, 0.5)", views="pool").explain_path(z1, z2, pool=queue)  # dense
    for path in (
        ring.explain_path(z1.float(), z2.float(), pool=queue.float()),
        ring.explain_path(z1, z2, pool=queue.clone().requires_grad_()),
        hn.ContrastiveLoss("Ring(0.1, 0.5)", impl="streamed").explain_path(z1, z2),
    ):
        assert path.startswith("chunked")
    labelled = hn.ContrastiveLoss("OtherLabel() * Ring(0.1, 0.5)", impl="streamed", views="pool")
    path = labelled.explain_path(z1, z2, labels=labels, pool=hn.Keys(queue, labels=labels))
    assert "is not of the closed family" in path
    one = torch.ones(4, 1, device=DEVICE)
    sizes = Sizes.of(one, one, one, 0.0, 4)
    with pytest.raises(ArgumentError, match="for a window"):
        row_statistics(z1, temperature=0.5, window=sizes, normalize=True)
