"""torch.compile(fullgraph=True): the same value and gradient as eager, and no new graph for each step of a schedule.

``aot_eager`` traces forward and backward as any backend would and needs no C++ compiler; ``inductor`` does.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import hardneg as hn

LABELS = torch.arange(8) % 3
CLUSTERS = torch.tensor([[0, 1], [1, 1], [0, 0], [1, 0], [2, 1], [2, 0], [0, 1], [1, 2]])

Loss = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def no_graph_of_another_test() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def examples() -> dict[str, list[str]]:
    """Calls of every distribution of the package that the grammar knows, so that a new one is compiled here too."""
    ours = {name: cls for name, cls in hn.registered_negatives().items() if cls.__module__.startswith("hardneg.")}
    return {name: list(cls.examples) or [f"{name}()"] for name, cls in ours.items()}


def assert_same(compiled: Loss, eager: Loss, z1: Tensor, z2: Tensor) -> None:
    results = []
    for loss in (compiled, eager):
        leaves = z1.clone().requires_grad_(), z2.clone().requires_grad_()
        value = loss(*leaves)
        upstream = torch.linspace(0.5, 2.0, value.numel(), dtype=value.dtype).view(value.shape)
        results.append((value.detach(), *torch.autograd.grad(value, leaves, upstream)))
    assert results[1][1].abs().max() > 0
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


NEED_CLUSTERS = {"SameCluster", "OtherCluster"}
# The tests of the whole loss compile an example of each class but these: here, those of other classes are long.
EVERY_EXAMPLE = [
    pytest.param(text, marks=() if name in NEED_CLUSTERS else pytest.mark.long)
    for name, texts in examples().items()
    for text in texts
]


@pytest.mark.parametrize("text", EVERY_EXAMPLE)
def test_every_distribution(text: str, two_unit_views: tuple[Tensor, Tensor]) -> None:
    negatives = hn.parse(text)

    def losses(z1: Tensor, z2: Tensor) -> Tensor:
        scores = hn.two_views(z1, z2, 0.2, labels=LABELS, clusters=CLUSTERS)
        return hn.info_nce(scores, negatives.log_weights(scores))

    assert_same(torch.compile(losses, fullgraph=True, backend="aot_eager"), losses, *two_unit_views)


@pytest.mark.parametrize("name", [name for name in examples() if name not in NEED_CLUSTERS])
def test_contrastive_loss(name: str, two_unit_views: tuple[Tensor, Tensor]) -> None:
    loss = hn.ContrastiveLoss(examples()[name][-1], temperature=0.2)
    assert_compiled(loss, "aot_eager", two_unit_views)


def assert_compiled(loss: hn.ContrastiveLoss, backend: str, two_unit_views: tuple[Tensor, Tensor]) -> None:
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    assert_same(
        lambda z1, z2: compiled(z1, z2, labels=LABELS), lambda z1, z2: loss(z1, z2, labels=LABELS), *two_unit_views
    )


@pytest.mark.parametrize("name", sorted(NEED_CLUSTERS))
def test_contrastive_loss_says_that_clusters_are_missing(name: str, two_unit_views: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(ValueError, match=f"{name} needs clusters"):
        hn.ContrastiveLoss(f"{name}()")(*two_unit_views)


def graphs_met(text: str, views: tuple[Tensor, Tensor], num_steps: int = 10, backend: str = "aot_eager") -> int:
    """How often a schedule makes the loss compile, the first time included; each step is compared with eager."""
    loss = hn.ContrastiveLoss(text)
    torch._dynamo.utils.clear_compilation_metrics()
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    for step in range(num_steps):
        loss.set_progress(step, num_steps)
        assert_same(compiled, loss, *views)
    return len({metrics.compile_id for metrics in torch._dynamo.utils.get_compilation_metrics()})


def test_scheduled_beta_recompiles_at_most_twice(two_unit_views: tuple[Tensor, Tensor]) -> None:
    assert graphs_met("Tilt(linear(1.0, 0.0))", two_unit_views) - 1 <= 2


def test_count_of_graphs_can_be_too_large(two_unit_views: tuple[Tensor, Tensor]) -> None:
    """With floats burnt into the graph every step compiles, and the count says so."""
    with torch._dynamo.config.patch(specialize_float=True):
        assert graphs_met("Tilt(linear(1.0, 0.0))", two_unit_views, num_steps=4, backend="eager") == 4


@pytest.mark.skipif(torch.__version__.startswith("2.6"), reason="torch 2.6 compiles another graph for each number")
def test_scheduled_ring_compiles_once_for_each_size_of_its_selection(two_unit_views: tuple[Tensor, Tensor]) -> None:
    """The edges are tensors; what a graph knows is only how many candidates are selected at most, in few steps."""
    recompilations = graphs_met("Ring(0.1, outer=linear(1.0, 0.1), dynamic_inner=True)", two_unit_views) - 1
    assert recompilations <= 4


def needs_inductor() -> None:
    compilers = [os.environ.get("CXX", "g++"), "clang++", "c++"]
    if not any(shutil.which(compiler) for compiler in compilers):
        pytest.skip("inductor needs a C++ compiler, and there is none on this machine")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("inductor needs the headers of Python (python3-dev), and they are not on this machine")


def test_inductor(two_unit_views: tuple[Tensor, Tensor]) -> None:
    """Labels, a selection and a weight in one product, since a C++ compiler takes seconds for each."""
    needs_inductor()
    loss = hn.ContrastiveLoss("OtherLabel() * Ring(0.1, 0.5) * Tilt(1.0)", temperature=0.2)
    assert_compiled(loss, "inductor", two_unit_views)


@pytest.mark.parametrize("name", ["sogclr", "emc2", "emc2 with bank"])
def test_losses_with_state(name: str) -> None:
    """Steps that follow each other, since a compiled backward pass must not read a state that has changed by then."""
    made: dict[str, Callable[[], torch.nn.Module]] = {
        "sogclr": lambda: hn.SogCLR(30),
        "emc2": lambda: hn.EMC2(30, num_steps=6),
        "emc2 with bank": lambda: hn.EMC2(30, num_steps=6, remember=hn.Bank(30, 4, dtype=torch.float64)),
    }
    eager, compiled = made[name](), made[name]()
    compiled.compile(fullgraph=name == "sogclr", backend="aot_eager")
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randperm(30, generator=generator)[:8]
        z1, z2 = torch.nn.functional.normalize(torch.randn(2, 8, 4, generator=generator, dtype=torch.float64), dim=-1)
        assert_same(lambda *z, ids=ids: compiled(*z, ids=ids), lambda *z, ids=ids: eager(*z, ids=ids), z1, z2)
        torch.testing.assert_close(compiled.last, eager.last, rtol=1e-12, atol=1e-14, equal_nan=True)
    torch.testing.assert_close(compiled.state_dict(), eager.state_dict(), rtol=1e-12, atol=1e-14)


def test_a_queue_that_is_still_empty(two_unit_views: tuple[Tensor, Tensor]) -> None:
    z1, z2 = two_unit_views
    loss, queue = hn.ContrastiveLoss(temperature=0.1), hn.Queue(12, z1.shape[1])
    compiled = torch.compile(loss, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(z1, z2, pool=queue), loss(z1, z2, pool=queue))
        queue.push(hn.Keys(z2))


STREAMED = pytest.mark.skipif(torch.__version__.startswith("2.6"), reason="torch 2.6 does not trace it whole")


@pytest.mark.parametrize("impl", ["dense", pytest.param("streamed", marks=STREAMED)])
def test_calls_do_not_recompile(impl: str, two_unit_views: tuple[Tensor, Tensor]) -> None:
    counter = CompileCounter()
    compiled = torch.compile(hn.ContrastiveLoss("Tilt(1.0)", impl=impl), backend=counter, fullgraph=True)
    for _ in range(4):
        compiled(*two_unit_views)
    assert counter.frame_count == 1
