"""Faults that a review found, each with the smallest batch that shows it."""

import copy

import pytest
import torch
from torch.nn.functional import normalize

import hardneg as hn


def vectors(*shape, seed=0):
    z = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return normalize(z, dim=-1)


Z1, Z2 = vectors(6, 8), vectors(6, 8, seed=1)


@pytest.mark.parametrize("impl", ["dense", "streamed"])
@pytest.mark.parametrize("objective", ["isogclr", "info_nce(num_negatives=3)", "rince(q=1.0)"])
def test_anchor_without_negative_has_no_gradient(impl, objective):
    temperature = torch.full((1, 1), 1e-3, dtype=torch.float64, requires_grad=True)
    loss = hn.ContrastiveLoss(views="cross", temperature=temperature, objective=objective, impl=impl)
    with pytest.warns(hn.core.errors.HardnegWarning):
        loss(Z1[:1], Z1[:1]).backward()
    assert temperature.grad.tolist() == [[0.0]]


def test_known_pairs_do_not_match_a_row_without_id():
    pairs = hn.negatives.KnownPairs(torch.tensor([1]), torch.tensor([3]))
    scores = hn.cross_views(Z1, Z2, 0.5, ids=torch.tensor([0, -1, 2, 3, 4, 5]))
    assert not pairs.look_up(scores)[0].any()


def test_known_pairs_of_large_ids():
    large = 2**61
    pairs = hn.negatives.KnownPairs(torch.tensor([large, 0]), torch.tensor([large + 1, 7]), torch.tensor([1.0, 2.0]))
    ids = torch.tensor([large, large + 1, 0, 7, 4, 8])
    found = torch.zeros(6, 6, dtype=torch.float64)
    found[0, 1], found[2, 3] = 1.0, 2.0
    assert torch.equal(pairs.look_up(hn.cross_views(Z1, Z2, 0.5, ids=ids))[1], found)


def test_sigmoid_takes_a_number_of_negatives_per_anchor():
    scores = hn.cross_views(Z1, Z2, 0.5)
    log_w = hn.Uniform().log_weights(scores)
    losses = hn.sigmoid(scores, log_w, num_negatives=torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
    for row in range(6):
        assert torch.equal(losses[row], hn.sigmoid(scores, log_w, num_negatives=row + 1.0)[row])


@pytest.mark.filterwarnings("ignore::hardneg.core.errors.HardnegWarning")
@pytest.mark.parametrize("impl", ["dense", "streamed"])
@pytest.mark.parametrize("ids", [None, torch.tensor([-1]), torch.tensor([3])])
def test_nothing_is_mixed_for_an_anchor_without_negatives(impl, ids):
    mixing = hn.ContrastiveLoss(generate="mochi(num_hardest=4, num_mixed=3, num_with_anchor=2)", impl=impl)
    assert mixing(Z1[:1], Z2[:1], ids=ids) == 0.0


@pytest.mark.filterwarnings("ignore::hardneg.core.errors.HardnegWarning")
@pytest.mark.parametrize("impl", ["dense", "streamed"])
def test_mixing_of_one_anchor_does_not_depend_on_another_without_negatives(impl):
    mixing = hn.ContrastiveLoss(
        generate="mochi(num_hardest=4, num_mixed=3, num_with_anchor=2)", impl=impl, reduction="none"
    )
    pool = hn.Keys(Z2[3:5], torch.tensor([7, 7]))
    loss = mixing(Z1[:2], Z2[:2], ids=torch.tensor([5, 7]), pool=pool)
    mixing._calls = 0
    assert loss[1] == 0.0
    assert loss[0] == mixing(Z1[:1], Z2[:1], ids=torch.tensor([5]), pool=pool)[0] > 0.0


@pytest.mark.filterwarnings("ignore::hardneg.core.errors.HardnegWarning")
@pytest.mark.parametrize("impl", ["dense", "streamed"])
@pytest.mark.parametrize("number", ["support", "candidates", 7])
def test_debiased_anchor_without_negatives_pays_for_none(impl, number):
    z1, z2 = (z[:2].clone().requires_grad_() for z in (Z1, Z2))
    plain, debiased = (
        hn.ContrastiveLoss(
            "OtherLabel()", tau_plus=tau_plus, num_negatives=number, positives_in_denominator="all", impl=impl
        )
        for tau_plus in (0.0, torch.tensor(0.1, dtype=torch.float64))
    )
    loss = debiased(z1, z2, labels=torch.tensor([0, 0]))
    assert loss == plain(z1, z2, labels=torch.tensor([0, 0]))
    assert all(torch.isfinite(each).all() for each in torch.autograd.grad(loss, (z1, z2)))


def test_gradient_of_a_share_of_zero():
    scores = hn.cross_views(Z1, Z2, 0.5)
    log_w = hn.Uniform().log_weights(scores)
    grads = []
    for start in (0.0, 1e-9):
        tau_plus = torch.tensor(start, dtype=torch.float64, requires_grad=True)
        (grad,) = torch.autograd.grad(hn.info_nce(scores, log_w, tau_plus=tau_plus).sum(), tau_plus)
        grads.append(grad)
    torch.testing.assert_close(*grads, rtol=1e-6, atol=0.0)
    assert torch.equal(hn.info_nce(scores, log_w, tau_plus=torch.tensor(0.0)), hn.info_nce(scores, log_w))


def test_two_views_of_one_instance_with_its_temperature():
    own = hn.two_views(Z1[:1], Z2[:1], temperature=torch.full((1, 1), 0.5, dtype=torch.float64))
    assert torch.equal(own.positives, hn.two_views(Z1[:1], Z2[:1], temperature=0.5).positives)


def test_repr_with_a_number_per_anchor():
    assert repr(hn.core.objectives.InfoNCE(tau_plus=torch.zeros(2, 1))).startswith("info_nce(tau_plus=tensor(")


def test_a_row_can_be_copied():
    row = hn.core.objectives.Row({"support": torch.ones(2, 1)}, 0.5)
    assert torch.equal(copy.copy(row).support, row.support)


def test_beside_refuses_another_temperature():
    with pytest.raises(hn.core.errors.ArgumentError, match="one temperature"):
        hn.core.scoring.concatenate_scores(hn.cross_views(Z1, Z2, 0.5), hn.cross_views(Z2, Z1, 0.25))


@pytest.mark.parametrize(("which", "size"), [("anchors", 2), ("candidates", 3)])
def test_from_matrix_refuses_tags_of_another_length(which, size):
    mask = torch.zeros(2, 3, dtype=torch.bool)
    with pytest.raises(hn.core.errors.ArgumentError, match=f"labels of {size} {which}"):
        hn.from_matrix(torch.zeros(2, 3), mask, **{which: hn.core.types.Tags(labels=torch.zeros(4))})
