"""The streamed loss as a GPU runs it, on a CPU: functions of tiles traced by torch.compile, products in 16 bits."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch.nn.functional import normalize

import hardneg as hn
from hardneg.core import bounds
from hardneg.core.errors import forget_warnings
from hardneg.core.objectives import InfoNCE
from hardneg.core.pairing import num_rows
from hardneg.kernels import cuda_graphs, plan
from hardneg.negatives import Negatives, parse
from hardneg.testing.examples import make_pairing
from support.errors import warns
from support.operations import Largest
from support.streamed import streamed


@pytest.fixture
def traced(monkeypatch):
    """Compiled without code generation, in blocks that do not divide the columns."""
    cuda_graphs._compiled.cache_clear()
    monkeypatch.setattr(cuda_graphs, "DEVICES", ("cpu",))
    monkeypatch.setattr(cuda_graphs, "BACKEND", "eager")
    monkeypatch.setattr(cuda_graphs, "BLOCK", 16)
    yield
    cuda_graphs._compiled.cache_clear()
    torch.compiler.reset()


def loss_and_gradients(text, dtype, tile, **options):
    random = torch.Generator().manual_seed(0)
    made = (normalize(torch.randn(20, 8, generator=random, dtype=torch.float64), dim=-1) for _ in range(2))
    z1, z2 = (z.to(dtype).requires_grad_() for z in made)
    loss = hn.ContrastiveLoss(text, 0.2, **options)
    pairing = loss.pairing(z1, z2, labels=torch.arange(20) % 4)
    found = streamed(pairing, loss.negatives, InfoNCE(tau_plus=0.1), "anchors", tile)
    return found.row.support, found.loss.double(), *(g.double() for g in torch.autograd.grad(found.loss, (z1, z2)))


@pytest.mark.parametrize("text", ["OtherLabel() * Tilt(1.0)", "Ring(0.1, outer=0.6)", "ClippedTilt(1.0)"])
def test_traced_functions_give_what_eager_ones_do(traced, monkeypatch, text):
    found = loss_and_gradients(text, torch.float64, (20, 40))
    assert cuda_graphs._compiled.cache_info().currsize
    monkeypatch.setattr(cuda_graphs, "DEVICES", ())
    for mine, theirs in zip(found, loss_and_gradients(text, torch.float64, (20, 40)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


class Graph:
    """Stands for a CUDA graph: capturing runs nothing, and replays take no arguments."""

    made: ClassVar[list["Graph"]] = []

    def __init__(self, work, device):
        self.replay = work
        self.made.append(self)


@pytest.mark.parametrize("text", ["OtherLabel() * Tilt(1.0)", "Ring(0.1, outer=0.6) * Tilt(1.0)"])
def test_replayed_tiles_give_what_eager_ones_do(traced, monkeypatch, text):
    """Blocks of 6 of 40 rows: of six in each sweep most are replays of one graph, the last, of 4 rows, is none."""
    Graph.made.clear()
    monkeypatch.setattr(cuda_graphs, "capture", Graph)
    found = loss_and_gradients(text, torch.float64, (6, 40), positives="label")
    assert len(Graph.made) == (5 if "Ring" in text else 4)  # bounds; forward and backward, of rows and of pairs
    monkeypatch.setattr(cuda_graphs, "DEVICES", ())
    for mine, theirs in zip(found, loss_and_gradients(text, torch.float64, (6, 40), positives="label"), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_traced_positives_by_label(traced, monkeypatch):
    options = {"positives": "label"}
    found = loss_and_gradients("Tilt(1.0)", torch.float64, (40, 40), **options)
    monkeypatch.setattr(cuda_graphs, "DEVICES", ())
    for mine, theirs in zip(found, loss_and_gradients("Tilt(1.0)", torch.float64, (40, 40), **options), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("text", ["Tilt(1.0)", "Ring(0.1, outer=0.6)"])
def test_products_in_16_bits(monkeypatch, dtype, text):
    support, *wanted = loss_and_gradients(text, dtype, (13, 40))
    monkeypatch.setattr(plan, "TENSOR_CORES", ("cpu",))
    kept, *found = loss_and_gradients(text, dtype, (13, 40))
    assert torch.equal(kept, support)
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine - theirs).norm() <= 4e-3 * theirs.norm()


def test_16_bits_of_vectors_of_any_norm(monkeypatch):
    """Products of norms of 1000 and more leave the range of float16, unless they are scaled."""
    z = (2000.0 * torch.randn(12, 8, generator=torch.Generator().manual_seed(1))).bfloat16()
    loss = hn.ContrastiveLoss("Uniform()", 1e6, normalize=False)
    wanted = streamed(loss.pairing(z, z.roll(1, 0)), loss.negatives, InfoNCE()).loss
    monkeypatch.setattr(plan, "TENSOR_CORES", ("cpu",))
    found = streamed(loss.pairing(z, z.roll(1, 0)), loss.negatives, InfoNCE()).loss
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=0.0)


@dataclass(frozen=True, repr=False)
class Untraceable(Negatives):
    """A tilt by a number that is read from the scores."""

    textual: ClassVar = False

    def log_weight(self, tile):
        return tile.s if float(tile.s.detach().sum()) == 123.0 else 2.0 * tile.s


def test_a_distribution_that_does_not_compile_runs_as_it_is_after_a_warning(traced):
    forget_warnings()
    with warns("not compiled"):
        found = loss_and_gradients(Untraceable(), torch.float64, (20, 40))
    wanted = loss_and_gradients("Tilt(2.0)", torch.float64, (20, 40))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "text", ["Tilt(1.0)", "OtherLabel() * Tilt(1.0)", "Ring(0.1, outer=0.5)", "BelowPositive(0.1)"]
)
def test_no_tensor_of_all_pairs_is_made(text):
    z1, z2 = (torch.randn(200, 8, requires_grad=True) for _ in range(2))
    loss = hn.ContrastiveLoss(text, positives="label")
    pairing = loss.pairing(z1, z2, labels=torch.arange(200) % 7)
    with Largest() as largest:
        streamed(pairing, loss.negatives, InfoNCE(), "anchors", (40, 64)).loss.backward()
    whole_rows = 40 * 400  # of a block of rows: what a ring ranks
    assert largest.most <= whole_rows < 400 * 400


@dataclass(frozen=True, repr=False)
class HardestCountsMore(Negatives):
    """It removes nothing, and yet a pair is compared with a bound that it reaches by equal bits alone."""

    textual: ClassVar = False
    removes: ClassVar = False

    def bounds(self):
        return {"largest": bounds.Largest(lambda tile: tile.s)}

    def log_weight(self, tile):
        return torch.where(tile.s >= tile.bound["largest"], 5.0, 0.0)


def test_a_score_reaches_its_bound_in_every_pass(monkeypatch):
    """In float32, where products of 3 and of 6 rows differ in their last bits; in tiles of a GPU, not traced."""
    monkeypatch.setattr(cuda_graphs, "DEVICES", ("cpu",))
    monkeypatch.setattr(cuda_graphs, "_compiled", lambda function, *kinds: function)
    monkeypatch.setattr(plan, "CPU_TILE", (3, 40))
    found = loss_and_gradients(HardestCountsMore(), torch.float32, None)
    monkeypatch.setattr(cuda_graphs, "DEVICES", ())
    for mine, theirs in zip(found, loss_and_gradients(HardestCountsMore(), torch.float32, None), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("text", "rows"), [("Tilt(1.0)", 10), ("Ring(0.1, outer=0.6) * Tilt(1.0)", 6)])
def test_tiles_of_other_sizes_forward_and_backward(traced, monkeypatch, text, rows):
    """Of 40 rows: sums in blocks of 10, gradients in blocks of 6; all in the same where there are edges."""
    sizes = []

    def each(step, blocks, allowed):
        sizes.append(num_rows(blocks[0]))
        for block in blocks:
            step(block)

    monkeypatch.setattr(plan, "CPU_TILE", (6, 40))
    monkeypatch.setattr(plan, "over_blocks", each)
    found = loss_and_gradients(text, torch.float64, None)
    assert sizes[-2:] == [rows, 6]
    monkeypatch.setattr(cuda_graphs, "DEVICES", ())
    for mine, theirs in zip(found, loss_and_gradients(text, torch.float64, None), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_tiles_with_a_guide_are_no_larger_forward(traced, monkeypatch):
    """Similarities of the guide are held beside the scores."""
    monkeypatch.setattr(plan, "CPU_TILE", (2, 40))
    guided = make_pairing().prepared()
    number = []
    for pairing in (guided, guided.changed(guide=None)):
        made = plan.SweepPlan(pairing, parse("Tilt(1.0)").factors, InfoNCE(), pairing.positive_scores())
        number.append((len(made.rows), len(made.rows_alone)))
    assert number == [(3, 3), (3, 2)]
