"""ContrastiveLoss through the Triton kernels is the dense loss: value, gradients, corner cases, warnings."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import hardneg as hn
from hardneg.core.errors import ArgumentError, forget_warnings
from hardneg.kernels.backends import triton as triton_backend
from hardneg.kernels.triton import sides as triton_sides
from hardneg.kernels.triton import wide as triton_wide
from support.errors import warns
from support.grids import grid
from support.kernel_inputs import DEVICE, DTYPES, SORTED_FROM, TOLERANCE, assert_close_in_norm, numbers, vectors

pytestmark = [pytest.mark.usefixtures("triton_can_run", "served_here")]


@pytest.fixture
def served_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the interpreter as a GPU, and let the kernels compute float32 at any cost."""
    if DEVICE == "cpu":
        monkeypatch.setattr(triton_backend, "why_unsupported", lambda *args: triton_sides.why_unsupported_inputs(*args))
    monkeypatch.setattr(triton_backend, "is_slow", lambda pairing: False)


B, D = 22, 24
LABELS = torch.arange(B, device=DEVICE) * 7 % 4
IDS = torch.arange(B, device=DEVICE) * 7 % 20  # two instances are there twice

LOSSES: dict[str, dict[str, Any]] = {
    "simclr": {},
    "tilt": {"negatives": "Tilt(1.0)", "tau_plus": 0.1},
    "any tilt": {"negatives": "Tilt(0.7)"},
    "detached": {"negatives": "Tilt(2.0, detach=True)", "tau_plus": 0.05},
    "two tilts": {"negatives": "Tilt(0.5) * Tilt(0.25)"},
    "low temperature": {"negatives": "Tilt(1.0)", "temperature": 0.03},
    "labels": {"negatives": "OtherLabel() * Tilt(1.0)"},
    "threshold": {"negatives": "Threshold(-0.1) * Tilt(1.0)"},
    "below positive": {"negatives": "BelowPositive(0.05, absolute=-0.1)"},
    "empty rows": {"negatives": "Threshold(0.35)", "tau_plus": 0.1},
    "cross": {"negatives": "Tilt(1.0)", "views": "cross", "tau_plus": 0.1},
    "cross, labels": {"negatives": "OtherLabel()", "views": "cross"},
    "no positive in the denominator": {"negatives": "Tilt(1.0)", "positives_in_denominator": "none"},
    "mass": {"negatives": "Tilt(1.0)", "num_negatives": "mass"},
    "candidates": {"negatives": "OtherLabel()", "num_negatives": "candidates"},
    "a number": {"negatives": "Tilt(1.0)", "num_negatives": 7},
    "rince": {"objective": "rince(q=0.2)"},
    "supcon": {
        "negatives": "OtherLabel()",
        "positives": "label",
        "positives_in_denominator": "all",
        "temperature": 0.1,
    },
    "supcon, tilted": {"negatives": "Tilt(1.0)", "positives": "label", "positives_in_denominator": "all"},
    "hscl": {
        "negatives": "OtherLabel() * Tilt(1.0)",
        "positives": "label",
        "num_negatives": "candidates",
        "reduction": "pairs",
    },
    "true positives": {"negatives": "Tilt(1.0)", "positives": "label", "same_label_negatives": True},
    "graphcl": {"positives": "label", "positives_in_denominator": "none", "views": "cross"},
    "each anchor": {"negatives": "Tilt(1.0)", "tau_plus": 0.1, "reduction": "none"},
    "as given": {"negatives": "Tilt(1.0)", "normalize": False},
    "keys without gradient": {"negatives": "Tilt(1.0)", "detach_keys": True},
    "learnt temperature": {"negatives": "Tilt(1.0)", "tau_plus": 0.1, "temperature": "learnt"},
    "learnt temperature, supcon": {"positives": "label", "positives_in_denominator": "all", "temperature": "learnt"},
}


def build(impl: str, **options: Any) -> hn.ContrastiveLoss:
    if options.get("temperature") == "learnt":
        options["temperature"] = torch.nn.Parameter(torch.tensor(0.3, device=DEVICE))
    return hn.ContrastiveLoss(**options, impl=impl)


def run(loss: hn.ContrastiveLoss, parts: list[Tensor], call: Any, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """The value, and the gradients of vectors and temperature under an upstream gradient that is not 1."""
    leaves = [part.detach().clone().to(dtype).requires_grad_() for part in parts]
    value = call(loss, *leaves)
    upstream = torch.linspace(0.5, 2.0, value.numel(), device=DEVICE).to(value).view(value.shape)
    wanted = [*leaves, *loss.parameters()]
    return value.detach(), list(torch.autograd.grad(value, wanted, upstream, materialize_grads=True))


def assert_same(
    options: dict[str, Any],
    parts: list[Tensor],
    call: Any,
    dtype: torch.dtype = torch.float32,
    path: str = "triton",
    rounding: float = 5e-5,
) -> None:
    streamed = build("streamed", **options)
    value, gradients = run(streamed, parts, call, dtype)
    assert streamed.path is not None
    assert streamed.path.name == path, streamed.path.reason
    exact = [part.to(dtype).double() for part in parts]  # what the kernels are given
    expected, wanted = run(build("dense", **options), exact, call, torch.float64)
    torch.testing.assert_close(value.double(), expected.double(), rtol=rounding, atol=rounding)
    for mine, theirs in zip(gradients, wanted, strict=True):
        assert mine.isfinite().all()
        assert_close_in_norm(mine, theirs, 2 * TOLERANCE[dtype])


def views(length: float = 3.0, rows: int = B) -> list[Tensor]:
    noise = [vectors(rows, D, torch.float64, seed=seed) for seed in (0, 1)]
    return [length * noise[0], length * (0.8 * noise[0] + 0.6 * noise[1])]


def batch(loss: hn.ContrastiveLoss, z1: Tensor, z2: Tensor) -> Tensor:
    value: Tensor = loss(z1, z2, ids=IDS, labels=LABELS)
    return value


@grid("name, dtype, sorted_from", [*LOSSES], DTYPES, [*SORTED_FROM], indirect=["sorted_from"])
@pytest.mark.usefixtures("sorted_from")
def test_every_option_agrees_with_dense(name: str, dtype: torch.dtype) -> None:
    options = LOSSES[name]
    assert_same(options, views(1.0 if name == "as given" else 3.0), batch, dtype)


WIDE = {
    "simclr": {},
    "tilt": {"negatives": "Tilt(1.0)", "tau_plus": 0.1},
    "any tilt, detached": {"negatives": "Tilt(0.7, detach=True)"},
    "low temperature": {"negatives": "Tilt(1.0)", "temperature": 0.03},
    "labels": {"negatives": "OtherLabel() * Tilt(1.0)"},
    "cross": {"negatives": "OtherLabel() * Tilt(1.0)", "views": "cross", "tau_plus": 0.1},
    "learnt temperature": {"negatives": "Tilt(1.0)", "temperature": "learnt"},
}


@grid("name, dtype, sorted_from", [*WIDE], DTYPES[1:], [*SORTED_FROM], strength=1, indirect=["sorted_from"])
@pytest.mark.usefixtures("sorted_from")
def test_more_features_than_a_block_holds(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The products are formed before the sweep, here in chunks of 32 of 44 rows.

    They have 11 bits: a score is off by about 2^-12 / temperature, and the mean of the 44 losses by less.
    """
    monkeypatch.setattr(triton_wide, "CHUNK_BYTES", 2 * 2 * B * 20)
    noise = [vectors(B, 300, torch.float64, seed=seed) for seed in (0, 1)]
    low = name == "low temperature"
    parts = [3 * noise[0], 0.01 * (0.2 * noise[0] + 0.98 * noise[1])]
    assert_same(WIDE[name], parts, batch, dtype, rounding=2**-12 / 0.03 / (2 * B) ** 0.5 if low else 5e-5)


@pytest.mark.parametrize(
    "options", [{"normalize": False}, {"negatives": "Threshold(0.1)"}, {"positives": "label"}], ids=str
)
def test_what_many_features_cannot_have(options: dict[str, Any]) -> None:
    z = torch.randn(4, 300, device=DEVICE, dtype=torch.float16)
    loss = hn.ContrastiveLoss(**options, impl="streamed")
    assert "more than 256 features need" in loss.explain_path(z, z, labels=torch.arange(4, device=DEVICE))


POOLS: dict[str, dict[str, Any]] = {
    "queue": {"negatives": "Tilt(1.0)", "views": "pool"},
    "labels": {"negatives": "OtherLabel() * Tilt(1.0)"},
    "below positive": {"negatives": "BelowPositive(absolute=0.1)", "tau_plus": 0.1},
    "label positives": {"positives": "label", "positives_in_denominator": "all"},
}


@pytest.mark.parametrize("name", POOLS)
def test_pools_agree_with_dense(name: str) -> None:
    queue, labels = vectors(37, D, torch.float64, 2.0, seed=3), torch.arange(37, device=DEVICE) % 5

    def call(loss: hn.ContrastiveLoss, z1: Tensor, z2: Tensor, bank: Tensor) -> Tensor:
        parts = [
            hn.Keys(queue.to(z1.dtype), labels=labels, source="queue"),
            hn.Keys(bank, numbers(*range(9)), labels[:9]),
        ]
        value: Tensor = loss(z1, z2, ids=IDS, labels=LABELS, pool=parts)
        return value

    assert_same(POOLS[name], [*views(), vectors(9, D, torch.float64, seed=4)], call)


def test_vectors_of_two_precisions() -> None:
    queue = vectors(30, D, torch.float64, seed=3)
    assert_same(
        {"negatives": "Tilt(1.0)"}, views(), lambda loss, a, b: loss(a, b, pool=queue.to(loss_dtype(a))), torch.float16
    )


def loss_dtype(z: Tensor) -> torch.dtype:
    return torch.float32 if z.dtype == torch.float16 else z.dtype


def test_three_views_agree_with_dense() -> None:
    assert_same({"negatives": "Tilt(1.0)"}, [*views(), vectors(B, D, torch.float64, seed=5)], lambda loss, *z: loss(z))


@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.filterwarnings("ignore::hardneg.core.errors.HardnegWarning")
def test_few_and_odd_rows(rows: int) -> None:
    for options in ({"negatives": "Tilt(1.0)", "tau_plus": 0.1}, {"views": "cross"}):
        assert_same(options, views(rows=rows), lambda loss, a, b: loss(a, b))


@pytest.mark.parametrize("scale", [1e-30, 1e30])
@pytest.mark.parametrize("kind", ["two", "cross"])
def test_zero_vectors_and_any_scale(kind: str, scale: float) -> None:
    z1, z2 = views()
    z1[3], z2[3], z2[5] = 0.0, 0.0, 0.0
    loss, dense = (hn.ContrastiveLoss("Tilt(1.0)", views=kind, impl=impl) for impl in ("streamed", "dense"))
    parts = [(z * scale).float() for z in (z1, z2)]
    value, gradients = run(loss, parts, batch, torch.float32)
    expected, wanted = run(dense, parts, batch, torch.float32)
    torch.testing.assert_close(value, expected)
    for mine, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(mine * scale, theirs * scale, rtol=1e-4, atol=1e-6)
        assert torch.equal(mine == 0, theirs == 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_broken_feature_breaks_the_same_rows(bad: float, normalize: bool) -> None:
    z1, z2 = (z.float() for z in views(1.0))
    z1[4, 2] = bad
    for options in ({}, {"views": "cross"}, {"positives": "label", "views": "cross"}):
        both = [
            hn.ContrastiveLoss(**options, normalize=normalize, reduction="none", impl=impl)(z1, z2, labels=LABELS)
            for impl in ("streamed", "dense")
        ]
        assert torch.equal(*(each.isnan() for each in both))
        assert both[0].isnan().any()


def test_no_candidate_yet() -> None:
    z1, z2 = (z.float().requires_grad_() for z in views())
    nobody = torch.zeros(0, D, device=DEVICE)
    for impl in ("streamed", "dense"):
        loss = hn.ContrastiveLoss("Tilt(1.0)", impl=impl)(z1, z2, pool=nobody)
        assert loss == 0.0
        assert (torch.autograd.grad(loss, z1)[0] == 0).all()


def test_it_warns_like_dense() -> None:
    z = views(rows=8)[0].float()
    for impl in ("streamed", "dense"):
        forget_warnings()
        with warns("clamped", "100%", "tau_plus=0.3"):
            hn.ContrastiveLoss(temperature=0.05, tau_plus=0.3, impl=impl)(z, z)
        with warns("empty", "100%"):
            hn.ContrastiveLoss("Threshold(2.0)", impl=impl)(z, z)


def test_autocast_changes_nothing() -> None:
    z1, z2 = (z.float().requires_grad_() for z in views())
    loss = hn.ContrastiveLoss("Tilt(1.0)", positives="label", impl="streamed")
    wanted = torch.autograd.grad(batch(loss, z1, z2), z1)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert torch.equal(torch.autograd.grad(batch(loss, z1, z2), z1)[0], wanted[0])


@pytest.mark.parametrize("name", ["tilt", "hscl", "supcon", "cross"])
def test_two_runs_give_the_same_bits(name: str) -> None:
    first, second = (run(build("streamed", **LOSSES[name]), views(), batch, torch.float16) for _ in range(2))
    assert torch.equal(first[0], second[0])
    for one, other in zip(first[1], second[1], strict=True):
        assert torch.equal(one, other)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "a rank": ({"negatives": "Rank(0, 5)"}, "needs normalised anchors of 16 bits"),
    "one source": ({"negatives": "Tilt(1.0, source='batch')"}, "closed family"),
    "mixed tilts": ({"negatives": "Tilt(1.0) * Tilt(1.0, detach=True)"}, "closed family"),
    "another statistic": ({"objective": "jsd"}, "needs the row statistic 'mean'"),
    "debiased positives by label": ({"positives": "label", "tau_plus": 0.1}, "needs every pair"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_everything_else_goes_in_chunks_and_says_why(name: str) -> None:
    options, reason = OTHERS[name]
    assert_same(options, views(), batch, path="chunked")
    z1, z2 = (z.float() for z in views())
    loss = hn.ContrastiveLoss(**options, impl="streamed")
    assert re.search(reason, loss.explain_path(z1, z2, IDS, LABELS))


def test_a_temperature_per_anchor_and_many_features_go_in_chunks() -> None:
    z1, z2 = (z.float() for z in views())
    loss = hn.ContrastiveLoss("Tilt(1.0)", impl="streamed")
    loss(z1, z2, temperature=torch.full((B,), 0.5, device=DEVICE))
    assert str(loss.path) == f"chunked: there are {2 * B} temperatures instead of one for all anchors"
    assert "300 features" in loss.explain_path(torch.randn(4, 300, device=DEVICE), torch.randn(4, 300, device=DEVICE))
    assert "path='chunked: there are" in repr(loss)


def test_auto_takes_the_kernels_wherever_they_serve() -> None:
    z1, z2 = (z.float() for z in views())
    tilt, rank = (hn.ContrastiveLoss(text) for text in ("Tilt(1.0)", "Rank(0, 5)"))
    assert tilt.explain_path(z1, z2) == "triton: the distribution is of the closed family"
    assert rank.explain_path(z1, z2).startswith(f"dense: {4 * B * B:,} scores are few; no Triton: the window needs")
    assert hn.ContrastiveLoss("Tilt(1.0)", impl="dense").explain_path(z1, z2).startswith("dense: impl='dense'; ")


def test_a_temperature_of_zero_raises() -> None:
    loss = hn.ContrastiveLoss(impl="streamed")
    with pytest.raises(ArgumentError, match="a temperature above 0"):
        loss(*(z.float() for z in views()), temperature=torch.tensor(-1.0, device=DEVICE))


class LargestTensor(TorchDispatchMode):
    """The elements of the largest tensor that any operation gives."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor) and tensor.dtype != torch.uint8:  # the interpreter copies arguments as bytes
                self.size = max(self.size, tensor.numel())
        return out


@pytest.mark.parametrize("name", ["tilt", "cross", "below positive", "supcon", "hscl", "candidates"])
@pytest.mark.usefixtures("sorted_from")
def test_nothing_of_the_size_of_all_pairs_is_allocated(name: str) -> None:
    rows = 60
    z1, z2 = (z.float().requires_grad_() for z in views(rows=rows))
    loss = build("streamed", **LOSSES[name])
    loss._calls = 2  # no look at the negatives
    with LargestTensor() as largest:
        loss(z1, z2, labels=torch.arange(rows, device=DEVICE) % 5).backward()
    assert largest.size <= 2 * rows * D < rows * rows
