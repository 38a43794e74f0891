"""Where a streamed loss once differed from the dense one, or a loss from what it promises."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch.nn.functional import normalize

import hardneg as hn
from hardneg.core import bounds
from hardneg.core.bounds import Bound, Largest, left_by, reduce_rows
from hardneg.core.errors import ArgumentError, NotFinite
from hardneg.core.objectives import InfoNCE, reduce
from hardneg.core.pairing import Pairing
from hardneg.core.scoring import dense
from hardneg.core.views import checks
from hardneg.kernels.plan import SweepPlan
from hardneg.losses import contrastive
from hardneg.negatives import Negatives
from support.errors import raises
from support.streamed import streamed

TILES = [(4, 3), (100, 100)]


def unit(seed, *shape):
    made = torch.randn(*shape, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return normalize(made, dim=-1).requires_grad_()


def pairing(b=7, n=11, p=2, **options):
    labels = torch.arange(max(b, n)) % 3
    anchors, pool = hn.Keys(unit(0, b), labels=labels[:b]), hn.Keys(unit(1, n), labels=labels[:n])
    return Pairing(anchors, hn.Keys(unit(2, b, p)), (pool,), 0.5, **options)


def assert_dense(made, negatives, objective=InfoNCE(), extra=()):
    """The streamed loss and its gradients are the dense ones."""
    inputs = [made.anchors.vectors, made.positives.vectors, *(keys.vectors for keys in made.candidates), *extra]
    scores = dense(made)
    expected = reduce(objective.losses(scores, negatives.log_weights(scores)), scores, "anchors")
    wanted = torch.autograd.grad(expected, inputs, materialize_grads=True)
    for tile in TILES:
        found = streamed(made, negatives, objective, "anchors", tile).loss
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, inputs, materialize_grads=True), wanted)


@dataclass(frozen=True, repr=False)
class FromHardestPositive(Negatives):
    """A tilt by the distance to the closest positive, with gradient."""

    textual: ClassVar = False

    def bounds(self) -> dict[str, Bound]:
        return {"top": Largest(lambda tile: tile.s, over="positives", grad=True)}

    def log_weight(self, tile):
        return -((tile.s - tile.bound["top"]) ** 2)


@pytest.mark.parametrize("label_positives", [False, True])
def test_gradient_of_a_largest_value_over_positives(label_positives):
    assert_dense(pairing(label_positives=label_positives), FromHardestPositive())


class RowSum(Bound):
    """The sum of the scores of a row."""

    def __init__(self, grad=False):
        self.grad = grad

    def of(self, tile, mask):
        return (torch.where(mask, tile.s, 0.0).sum(-1, keepdim=True),)

    def merge(self, first, second):
        return (first[0] + second[0],)

    def finish(self, state, earlier):
        return state[0]


@dataclass(frozen=True, repr=False)
class BySum(Negatives):
    grad: bool = False
    textual: ClassVar = False

    def bounds(self) -> dict[str, Bound]:
        return {"sum": RowSum(self.grad)}

    def log_weight(self, tile):
        return -((tile.s - tile.bound["sum"]) ** 2)


def test_a_bound_carries_a_gradient_only_where_it_declares_one():
    made = pairing()
    assert_dense(made, BySum())
    with pytest.raises(ArgumentError) as caught:
        streamed(made, BySum(grad=True), InfoNCE())
    assert (caught.value.who, caught.value.got) == ("BySum", "RowSum")
    z1, z2 = unit(3, 300), unit(4, 300)
    auto, wanted = (hn.ContrastiveLoss(BySum(grad=True), impl=impl)(z1, z2) for impl in ("auto", "dense"))
    assert auto == wanted


@dataclass(frozen=True, repr=False, eq=False)
class ByClass(Negatives):
    """A log-weight for each class, from a table."""

    table: torch.Tensor
    textual: ClassVar = False

    def log_weight(self, tile):
        return self.table[tile.anchor_tags.labels[:, None] + tile.candidate_tags.labels].expand(tile.s.shape)


def test_a_table_as_long_as_the_batch_is_not_cut_by_anchors():
    made = pairing(b=7)
    table = torch.linspace(-1, 1, 7, dtype=torch.float64).requires_grad_()
    assert_dense(made, ByClass(table), extra=[table])
    beta = torch.linspace(0, 1, 7, dtype=torch.float64)[:, None].requires_grad_()
    numbers = torch.linspace(2, 5, 7, dtype=torch.float64).requires_grad_()
    assert_dense(made, hn.Tilt(beta), InfoNCE(numbers), extra=[beta, numbers])


@pytest.mark.parametrize("impl", ["dense", "streamed"])
def test_checks_look_at_the_vectors_of_every_impl(impl):
    loss, z = hn.ContrastiveLoss(normalize=False, impl=impl), unit(0, 6).detach()
    with checks():
        loss(z, z)
        with pytest.raises(ArgumentError, match="unit vectors"):
            loss(3 * z, z)
        with pytest.raises(ArgumentError, match="unit vectors"):
            loss(z, z, guide=(3 * z, z))
        with pytest.raises(NotFinite):
            loss(z, torch.full_like(z, torch.nan))


def test_masked_positives_remove_no_candidates():
    made, pool = pairing(p=2), hn.Keys(unit(1, 11), torch.arange(11))
    own = hn.Keys(unit(2, 7, 2), torch.stack([torch.arange(7), torch.zeros(7).long()], dim=1))
    made = made.changed(candidates=(pool,), positives=own, positive_mask=torch.tensor([[True, False]] * 7))
    assert dense(made).valid.sum(-1).tolist() == [10] * 7
    assert streamed(made, hn.Uniform(), InfoNCE()).row.support[:, 0].tolist() == [10] * 7
    assert_dense(made, hn.Tilt(1.0))


@pytest.mark.parametrize("mask", [torch.ones(7, 3).bool(), torch.ones(7, 2)])
def test_a_positive_mask_is_checked_dense_and_streamed(mask):
    made = pairing(p=2).changed(positive_mask=mask)
    for compute in (dense, lambda made: streamed(made, hn.Uniform(), InfoNCE())):
        with pytest.raises(ArgumentError, match="a bool positive_mask"):
            compute(made)


def planned(made, factor):
    ready = made.prepared()
    return SweepPlan(ready, (factor,), InfoNCE(), ready.positive_scores(), (4, 6))


def test_a_window_holds_the_columns_of_a_block_once():
    made = pairing(b=12, n=20)
    ring = hn.Ring(0.1, 0.5)
    rows = planned(made, ring).blocks()[0]
    value, column = reduce_rows(ring.bounds(), rows, left_by((), ()))["window"]
    assert (value.shape, column.shape) == ((4, 20), (1, 20))
    assert_dense(made, ring)
    assert_dense(made, hn.Rank(1, 3))


def test_the_states_of_one_block_are_finished_before_the_next(monkeypatch):
    """Otherwise a ring holds the scores of all pairs."""
    calls = []
    for name in ("reduce_rows", "finish"):
        plain = getattr(bounds, name)
        monkeypatch.setattr(bounds, name, lambda *args, name=name, plain=plain: (calls.append(name), plain(*args))[1])
    plan = planned(pairing(b=12), hn.Ring(0.1, 0.5))
    bounds.find_bounds(plan.factors, plan.blocks())
    assert calls == ["reduce_rows", "finish"] * 3


@pytest.mark.parametrize("negatives", ["ClippedTilt(2.0)", "Tilt(1.0)"])
def test_backward_inside_autocast_is_as_precise_as_outside(negatives):
    loss = hn.ContrastiveLoss(negatives, temperature=0.1, positives="label", impl="streamed")
    z1, z2, labels = unit(0, 8).detach().float().requires_grad_(), unit(1, 8).detach().float(), torch.arange(8) % 3
    wanted = torch.autograd.grad(loss(z1, z2, labels=labels), z1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(torch.autograd.grad(loss(z1, z2, labels=labels), z1), wanted)


@pytest.mark.parametrize("impl", ["dense", "streamed"])
def test_a_guide_of_generated_candidates_is_refused_by_name(impl):
    z1, z2 = unit(0, 8), unit(1, 8)
    loss = hn.ContrastiveLoss("Tilt(1.0, by='guide')", generate="mochi(num_hardest=4)", impl=impl)
    with raises(ArgumentError, who="ContrastiveLoss", what="guide=None", got="generate=mochi(num_hardest=4)"):
        loss(z1, z2, guide=(z1, z2))


def test_the_positive_tile_has_the_tags_of_the_anchors_dense_and_streamed():
    made = pairing()
    found, _ = made.prepared().positive_tile(slice(2, 5), torch.zeros(3, 2), 0.5)
    wanted = dense(made).positive_tile().anchor_tags
    assert found.anchor_tags.labels.tolist() == wanted.labels[2:5].tolist()


def test_diagnose_by_blocks_cuts_numbers_per_anchor(monkeypatch):
    beta, tau_plus = (torch.linspace(0, top, 12, dtype=torch.float64)[:, None] for top in (2.0, 0.2))
    z1, z2 = unit(0, 12), unit(1, 12)
    loss = hn.ContrastiveLoss(hn.Tilt(beta), tau_plus=tau_plus, views="cross", impl="streamed")
    wanted = loss.diagnose(z1, z2)
    monkeypatch.setattr(contrastive, "SCORES_PER_DIAGNOSIS", 60)
    found = loss.diagnose(z1, z2)
    torch.testing.assert_close(found.effective_number, wanted.effective_number)
    assert found.clamped_share() == wanted.clamped_share()


@pytest.mark.parametrize("impl", ["dense", "streamed"])
def test_tensor_fields_follow_the_module(impl):
    z1, z2 = unit(0, 8), unit(1, 8)

    def made(beta, tau_plus):
        beta = torch.nn.Parameter(torch.tensor(beta, dtype=torch.float64))
        return hn.ContrastiveLoss(hn.OtherLabel() * hn.Tilt(beta), tau_plus=torch.tensor(tau_plus), impl=impl)

    saved, loss, labels = made(2.0, 0.05), made(0.5, 0.1), torch.arange(8)
    loss.load_state_dict(saved.state_dict(), assign=True)
    found = loss(z1, z2, labels=labels)
    assert found == saved(z1, z2, labels=labels)
    found.backward()
    (beta,) = loss.parameters()
    assert beta.grad is not None
    loss.double()
    loss(z1, z2, labels=labels)
    assert loss.objective.tau_plus.dtype == torch.float64
