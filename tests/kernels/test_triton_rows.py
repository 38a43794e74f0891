"""Row statistics in Triton against the whole matrix of pairs in float64: value, number, and all gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import hardneg as hn
from hardneg.core.errors import ArgumentError
from hardneg.core.objectives import debiased
from hardneg.kernels.triton import function as triton_function
from hardneg.kernels.triton.statistics import row_statistics, two_view_losses, why_unsupported
from support import dense_pairs
from support.errors import raises
from support.grids import grid
from support.kernel_inputs import DEVICE, DTYPES, SORTED_FROM, TOLERANCE, assert_close_in_norm, numbers, twice, vectors

pytestmark = pytest.mark.usefixtures("triton_can_run")


def each(rows: int, scale: float) -> Tensor:
    return scale * torch.linspace(-1.0, 1.0, rows, device=DEVICE)


SELF = {
    "uniform": {"ids": True},
    "tilt": {"ids": True, "beta": 1.0},
    "any tilt": {"ids": True, "beta": 2.5},
    "detached": {"ids": True, "beta": 1.0, "detach": True},
    "any detached": {"ids": True, "beta": 0.5, "detach": True},
    "no ids": {"beta": 1.0},
    "labels": {"ids": True, "labels": 5, "beta": 1.0},
    "labels of ids": {"ids": True, "labels": -5, "beta": 1.0},
    "band": {"ids": True, "beta": 1.0, "low": each(100, 0.3), "high": 0.4},
    "running maximum": {"ids": True, "beta": 1.0, "temperature": 0.02},
    "running maximum, any tilt": {"ids": True, "beta": 2.5, "temperature": 0.02},
    "running maximum, detached": {"beta": 0.5, "detach": True, "temperature": 0.02},
    "running maximum, band": {"beta": 0.5, "temperature": 0.02, "low": -0.1, "high": each(100, 0.5)},
    "norms": {"ids": True, "beta": 1.0, "length": 3.0, "normalize": True},
    "norms, band": {"ids": True, "beta": 1.0, "length": 3.0, "normalize": True, "low": -0.1, "high": 0.3},
    "raw": {"beta": 1.0, "length": 4.0, "unit": False},
}


def arguments(case: dict[str, Any], rows: int) -> tuple[dict[str, Any], float]:
    case = dict(case)
    if case.pop("ids", False):
        case["anchor_ids"] = twice(rows)
    if classes := case.pop("labels", 0):
        same = case["anchor_ids"] if classes < 0 else torch.arange(rows, device=DEVICE) * 31
        case["anchor_labels"] = same % abs(classes)
    return case, case.pop("length", 1.0)


def run(
    function: Any, upstream: Tensor, anchors: Tensor, candidates: Tensor | None, temperature: float, **case: Any
) -> Any:
    """Statistics, and gradients of anchors, candidates and temperature under an upstream gradient that is not 1."""
    leaves = [side.detach().clone().requires_grad_() for side in (anchors, candidates) if side is not None]
    learned = torch.tensor(temperature, dtype=torch.float64, device=DEVICE, requires_grad=True)
    mean, mass, support = function(*leaves, temperature=learned, **case)
    some = support > 0
    objective = (mean[some] * upstream[0, some]).sum() + (mass[some] * upstream[1, some]).sum()
    return (mean, mass, support), torch.autograd.grad(objective, [*leaves, learned])


def assert_agrees(anchors: Tensor, candidates: Tensor | None, case: dict[str, Any]) -> None:
    case = {"temperature": 0.5} | case
    upstream = torch.randn(2, len(anchors), device=DEVICE)
    found, gradients = run(row_statistics, upstream, anchors, candidates, **case)
    wide = [None if side is None else side.double() for side in (anchors, candidates)]
    expected, expected_gradients = run(dense_pairs.row_statistics, upstream.double(), *wide, **case)
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-5, atol=2e-5)
    assert torch.equal(found[2].long(), expected[2])
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        assert_close_in_norm(ours, theirs, TOLERANCE[anchors.dtype])


@grid("name, dtype, sorted_from", [*SELF], DTYPES, [*SORTED_FROM], indirect=["sorted_from"])
@pytest.mark.usefixtures("sorted_from")
def test_self_similarity_agrees_with_the_whole_matrix(name: str, dtype: torch.dtype) -> None:
    case, length = arguments(SELF[name], 100)
    assert_agrees(vectors(100, 24, dtype, length), None, case)


@pytest.mark.parametrize("consistent", [True, False], ids=["label per id", "two labels per id"])
@pytest.mark.usefixtures("sorted_from")
def test_blocks_of_one_label_agree_with_the_whole_matrix(consistent: bool) -> None:
    ids = twice(300)
    labels = ids % 2 if consistent else torch.arange(300, device=DEVICE) // 150
    assert_agrees(vectors(300, 16), None, {"beta": 1.0, "anchor_ids": ids, "anchor_labels": labels})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 5, 3), (64, 128, 32), (70, 130, 40), (130, 33, 17)], ids=str)
@pytest.mark.usefixtures("sorted_from")
def test_cross_similarity_agrees_at_odd_shapes(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    b, n, d = shape
    ids = {"anchor_ids": torch.arange(b, device=DEVICE) - 2, "candidate_ids": torch.arange(n, device=DEVICE) - 3}
    assert_agrees(vectors(b, d, dtype), vectors(n, d, dtype, seed=1), dict(beta=1.0, **ids))


@pytest.mark.parametrize(
    "case",
    [
        {"beta": 1.5, "temperature": 0.02},
        {"beta": 1.0, "normalize": True},
        {"beta": 1.0, "low": -0.2, "high": 0.2},
        {"anchor_labels": torch.arange(70) % 4, "candidate_labels": torch.arange(90) % 5},
    ],
    ids=["running maximum", "norms", "band", "labels"],
)
@pytest.mark.usefixtures("sorted_from")
def test_a_pool_agrees_with_the_whole_matrix(case: dict[str, Any]) -> None:
    case = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in case.items()}
    assert_agrees(vectors(70, 32), vectors(90, 32, seed=1), case)


def test_two_runs_give_the_same_bits() -> None:
    anchors, case = vectors(100, 24), {"temperature": 0.1, "beta": 1.0, "anchor_ids": twice(100)}
    upstream = torch.randn(2, 100, device=DEVICE)
    first, second = (run(row_statistics, upstream, anchors, None, **case) for _ in range(2))
    assert all(
        torch.equal(a, b) for one, other in zip(first, second, strict=True) for a, b in zip(one, other, strict=True)
    )


def test_rows_without_a_negative_are_empty_and_have_no_gradient() -> None:
    z = vectors(6, 8).requires_grad_()
    mean, mass, support = row_statistics(z, temperature=0.5, beta=1.0, anchor_ids=numbers(0, 0, 0, 0, 0, 0))
    assert (mean == -math.inf).all()
    assert (mass == -math.inf).all()
    assert (support == 0).all()
    (gradient,) = torch.autograd.grad(mean.exp().sum(), z)
    assert (gradient == 0).all()


def test_no_rows_and_no_candidates() -> None:
    nobody = vectors(0, 8)
    assert row_statistics(nobody, vectors(3, 8), temperature=0.5).log_mean.shape == (0,)
    assert (row_statistics(vectors(3, 8), nobody, temperature=0.5).log_mean == -math.inf).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("low", [None, 0.9], ids=["all", "band"])
def test_a_broken_feature_is_never_a_finite_loss(bad: float, low: float | None) -> None:
    anchors, candidates = vectors(5, 8), vectors(7, 8, seed=1)
    broken = candidates.clone()
    broken[3, 2] = bad
    assert row_statistics(anchors, broken, temperature=0.5, low=low).log_mean.isnan().all()
    broken = anchors.clone()
    broken[3, 2] = bad
    assert row_statistics(broken, candidates, temperature=0.5, low=low).log_mean[3].isnan()
    assert row_statistics(broken, temperature=0.5, low=low).log_mean[3].isnan()


def test_a_queue_gets_no_gradient_and_no_sweep_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps = []
    gradient = triton_function._gradient
    monkeypatch.setattr(
        triton_function, "_gradient", lambda *args, **rest: sweeps.append(args) or gradient(*args, **rest)
    )
    anchors, queue = vectors(5, 8).requires_grad_(), vectors(9, 8, seed=1)
    row_statistics(anchors, queue, temperature=0.5).log_mean.sum().backward()
    assert anchors.grad is not None
    assert len(sweeps) == 1


class LargestTensor(TorchDispatchMode):
    """The bytes of the largest tensor that any operation gives; the interpreter copies its arguments as bytes."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                self.size = max(self.size, tensor.numel() * tensor.element_size())
        return out


@pytest.mark.usefixtures("sorted_from")
def test_nothing_of_the_size_of_all_pairs_is_allocated() -> None:
    n, d = 100, 8
    z = vectors(n, d).requires_grad_()
    with LargestTensor() as largest:
        statistics = row_statistics(z, temperature=0.5, beta=1.0, anchor_ids=twice(n), anchor_labels=twice(n) % 5)
        statistics.log_mean.sum().backward()
    assert largest.size == 4 * n * d < n * n


@pytest.mark.parametrize("tau_plus", [0.0, 0.1])
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_it_is_the_loss_of_the_papers(beta: float, tau_plus: float) -> None:
    z1, z2 = vectors(20, 16).requires_grad_(), vectors(20, 16, seed=1).requires_grad_()
    expected = hn.papers.hcl(0.5, tau_plus, beta)(z1, z2)
    z, ids = torch.cat([z1, z2]), torch.arange(20, device=DEVICE).repeat(2)
    mean, _, support = row_statistics(z, temperature=0.5, beta=beta, anchor_ids=ids)
    positive = (z1 * z2).sum(-1).repeat(2) / 0.5
    if tau_plus:
        mean = debiased(mean[:, None], positive[:, None], tau_plus, 0.5)[0][:, 0]
    loss = -torch.nn.functional.logsigmoid(positive - mean - support.log()).mean()
    torch.testing.assert_close(loss, expected)
    ours, theirs = torch.autograd.grad(2 * loss, [z1, z2]), torch.autograd.grad(2 * expected, [z1, z2])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@grid(
    "settings, normalize, dtype, sorted_from",
    [(0.0, 0.0, 0.5), (0.0, 0.3, 0.5), (1.0, 0.1, 0.5), (0.7, 0.3, 0.1)],
    [False, True],
    DTYPES,
    [*SORTED_FROM],
    indirect=["sorted_from"],
)
@pytest.mark.usefixtures("sorted_from")
def test_losses_of_two_views_agree_with_the_dense_path(
    settings: tuple[float, float, float], normalize: bool, dtype: torch.dtype
) -> None:
    beta, tau_plus, temperature = settings
    z, upstream = vectors(60, 16, dtype, length=2.0 if normalize else 1.0), torch.rand(60, device=DEVICE)
    z[40:] = z[10:30]  # equal views, whose debiased mean is at its floor if tau_plus is large
    ids = twice(60)[:30].repeat(2)
    ours, theirs = z.clone().requires_grad_(), z.double().requires_grad_()
    learned, expected_learned = (torch.tensor(temperature, dtype=torch.float64, requires_grad=True) for _ in range(2))
    found = two_view_losses(ours, temperature=learned, beta=beta, tau_plus=tau_plus, ids=ids, normalize=normalize)
    both = torch.nn.functional.normalize(theirs, dim=-1) if normalize else theirs
    scores = hn.two_views(*both.chunk(2), temperature=expected_learned, ids=ids[:30])
    expected = hn.info_nce(scores, hn.Tilt(beta).log_weights(scores), tau_plus=tau_plus)[:, 0]
    torch.testing.assert_close(found.losses.double(), expected, rtol=2e-5, atol=2e-5)
    gradients = torch.autograd.grad((found.losses * upstream).sum(), [ours, learned])
    expected_gradients = torch.autograd.grad((expected * upstream).sum(), [theirs, expected_learned])
    for mine, reference in zip(gradients, expected_gradients, strict=True):
        assert_close_in_norm(mine, reference, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-3, 1024.0])
def test_gradients_scale_with_the_upstream_gradient(scale: float, dtype: torch.dtype) -> None:
    z, ids = vectors(40, 16, dtype, seed=3).requires_grad_(), twice(40)
    log_mean = row_statistics(z, temperature=0.1, beta=1.0, anchor_ids=ids).log_mean
    (expected,) = torch.autograd.grad(log_mean.sum(), z, retain_graph=True)
    (scaled,) = torch.autograd.grad(scale * log_mean.sum(), z)
    assert_close_in_norm(scaled / scale, expected.double(), max(TOLERANCE[dtype], 1e-3))


def test_losses_of_two_views_in_corner_cases() -> None:
    z = vectors(4, 8).requires_grad_()
    alone = two_view_losses(z, temperature=0.5, tau_plus=0.1, ids=numbers(3, 3, 3, 3))
    assert alone.losses.tolist() == [0.0] * 4
    assert (torch.autograd.grad(alone.losses.sum(), z)[0] == 0).all()
    broken = z.detach().clone()
    broken[1, 2] = math.nan
    assert two_view_losses(broken, temperature=0.5, tau_plus=0.1).losses.isnan().all()
    with raises(ArgumentError, who="two_view_losses", got="rows=3, tau_plus=0.0"):
        two_view_losses(vectors(3, 8), temperature=0.5)


def test_what_cannot_be_served_is_named() -> None:
    z = vectors(4, 8)
    if DEVICE == "cpu":
        assert why_unsupported(z) == "the vectors are on cpu, and Triton needs a GPU"
    for bad, words in (
        ({"anchors": vectors(4, 300)}, "300 features"),
        ({"anchors": z.double()}, "float64"),
        ({"candidates": vectors(4, 9)}, "shapes"),
        ({"temperature": torch.ones(4, device=DEVICE)}, "4 temperatures"),
        ({"beta": -1.0}, "beta=-1.0"),
    ):
        with pytest.raises(ArgumentError) as error:
            row_statistics(**({"anchors": z, "temperature": 0.5} | bad))
        assert words in (error.value.got or "")
