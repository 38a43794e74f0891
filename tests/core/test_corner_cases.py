"""The rules for corner cases: what costs nothing, what is counted, and what warns once."""

import math
import warnings
from itertools import cycle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import hardneg as hn
import support.brute_force as loops
from hardneg.core.errors import ArgumentError, HardnegWarning
from support.corner_cases import CLUSTERS, EXAMPLES, LABELS, OBJECTIVES, batch_and_queue
from support.errors import raises, warns
from support.vectors import make_unit_vectors as vectors


def assert_costs_nothing(objective, q, make_scores, leaves):
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    scores = make_scores(*leaves)
    losses = objective(scores, q.log_weights(scores))
    assert (losses == 0).all()
    gradients = torch.autograd.grad(losses.sum(), leaves, materialize_grads=True)
    assert all((gradient == 0).all() for gradient in gradients)
    diagnosis = hn.diagnose(scores, q.log_weights(scores), tau_plus=0.2)
    assert diagnosis.empty.all()
    assert not diagnosis.clamped.any()
    for name in ("hardness", "effective_number", "attracted", "effective_temperature"):
        assert getattr(diagnosis, name).isnan().all()


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_anchors_without_a_negative_cost_nothing(objective):
    z1, z2, one = vectors(4, 3), vectors(4, 3, seed=1), torch.zeros(4).long()
    two = [z1, z2]
    for text in (
        "Threshold(2.0)",
        "Ring(0.0, 0.1)",
        "Ring(0.5, 0.501)",
        "Rank(6)",
        "BelowPositive(absolute=9.0)",
    ):
        assert_costs_nothing(objective, hn.parse(text), lambda a, b: hn.two_views(a, b, 0.5), two)
    for text in ("OtherLabel()", "OtherLabel() * Tilt(2.0)", "OtherLabel() * Ring(0.1, 0.9)"):
        assert_costs_nothing(objective, hn.parse(text), lambda a, b: hn.two_views(a, b, 0.5, labels=one), two)


@pytest.mark.parametrize("text", EXAMPLES)
def test_a_batch_of_one_costs_nothing(text):
    tags = {"labels": torch.tensor([3]), "clusters": torch.tensor([1])}
    for objective, build in zip(OBJECTIVES.values(), cycle([hn.two_views, hn.cross_views])):  # one after the other
        views = [vectors(1, 3), vectors(1, 3, seed=1)]
        assert_costs_nothing(objective, hn.parse(text), lambda a, b, build=build: build(a, b, 0.5, **tags), views)


@pytest.mark.parametrize("text", EXAMPLES)
def test_an_empty_pool_costs_nothing(text):
    def scores(z1, z2):
        none = torch.zeros(0).long()
        pool = hn.Keys(torch.zeros(0, 3).double(), none, none, none, source="batch")
        return hn.score(hn.Keys(z1, None, LABELS, CLUSTERS), z2, pool, 0.5)

    for objective in OBJECTIVES.values():
        assert_costs_nothing(objective, hn.parse(text), scores, [vectors(5, 3), vectors(5, 3, seed=1)])


def test_draws_from_an_empty_pool_take_nothing():
    z = vectors(3, 4)
    scores = hn.score(z, z, torch.zeros(0, 4).double(), 0.5)
    for method in ("categorical", "gumbel"):
        index = hn.draw(hn.Uniform().log_weights(scores), 2, torch.Generator(), method)
        assert index.tolist() == [[-1, -1]] * 3
        taken = scores.take(index)
        assert (hn.info_nce(taken, hn.Uniform().log_weights(taken)) == 0).all()


def test_an_anchor_without_a_negative_stays_in_the_mean_and_leaves_the_others_alone():
    z1, z2 = vectors(4, 3).requires_grad_(), vectors(4, 3, seed=1).requires_grad_()
    scores = hn.cross_views(z1, z2, 0.5, labels=torch.tensor([0, 0, 0, 1]))
    mask = torch.tensor([True, True, True, False])[:, None]  # anchor 3 keeps nothing
    log_w = (hn.OtherLabel() * hn.Tilt(1.0)).log_weights(scores).masked_fill(~mask, hn.NEVER)
    losses = hn.info_nce(scores, log_w, tau_plus=0.1)
    assert losses[3] == 0
    assert (losses[:3] > 0).all()
    assert hn.reduce(losses, scores).item() == pytest.approx(losses[:3].sum().item() / 4)
    gradient = torch.autograd.grad(losses.sum(), z1, retain_graph=True)[0]
    assert (gradient[3] == 0).all()
    assert torch.isfinite(gradient).all()
    assert (gradient[:3] != 0).any(-1).all()
    assert hn.diagnose(scores, log_w).empty.tolist() == [False, False, False, True]


def test_without_a_negative_all_positives_are_still_contrasted_as_supcon_does():
    z1, z2 = vectors(3, 4), vectors(3, 4, seed=1)
    scores = hn.core.scoring.same_label_positives(hn.two_views(z1, z2, 0.5, labels=torch.zeros(3).long()))
    losses = hn.info_nce(scores, hn.OtherLabel().log_weights(scores), positives_in_denominator="all")
    rows = loops.same_label_positives(loops.two_views(z1, z2, 0.5, labels=torch.zeros(3).long()))
    table = loops.weights(hn.OtherLabel(), rows)
    torch.testing.assert_close(losses, loops.info_nce(rows, table, positives_in_denominator="all"))
    assert (losses[scores.positive_valid] > 0).all()


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_anchors_without_a_positive_cost_nothing_and_are_counted(objective):
    z1, own, pool = (vectors(*shape, seed=1).requires_grad_() for shape in ((3, 4), (3, 2, 4), (5, 4)))
    mask = torch.tensor([[True, True], [False, False], [False, True]])
    scores = hn.score(z1, own, pool, 0.5, positive_mask=mask)
    log_w = hn.Tilt(1.0).log_weights(scores)
    losses = objective(scores, log_w)
    assert (losses[~mask] == 0).all()
    assert (losses[mask] != 0).all()
    gradient_z1, gradient_own = torch.autograd.grad(losses.sum(), [z1, own], retain_graph=True)
    assert (gradient_z1[1] == 0).all()
    assert (gradient_own[~mask] == 0).all()
    assert (gradient_own[mask] != 0).any(-1).all()
    assert hn.diagnose(scores, log_w).no_positive.tolist() == [False, True, False]


@pytest.mark.parametrize(
    "text",
    [
        "Ring(0.0, 0.3)",
        "Ring(0.25, 0.8)",
        "Ring(0.5, 1.0)",
        "Ring(0.4, 0.9, dynamic_inner=True)",
        "Rank(0, 4)",
        "Rank(2, 9)",
    ],
)
def test_counts_are_exact_where_embeddings_collapse(text):
    for size in (1, 2, 3, 7, 8, 50):
        assert_counts(hn.parse(text), size)


def assert_counts(q, size):
    z = vectors(1, 3).expand(4, 3).clone().requires_grad_()
    scores = hn.score(z, z.detach(), vectors(1, 3).expand(size, 3), 0.5)
    log_w = q.log_weights(scores)
    if isinstance(q, hn.Rank):
        expected = len(range(size)[q.start : q.stop])
    else:
        stop = int(q.outer * size)
        expected = max(stop - int(q.inner * (stop if q.dynamic_inner else size)), 0)
    assert (log_w == 0).sum(-1).tolist() == [expected] * 4
    losses = hn.info_nce(scores, log_w)
    torch.testing.assert_close(losses, torch.full_like(losses, math.log(1 + expected)))
    assert torch.isfinite(torch.autograd.grad(losses.sum(), z)[0]).all()


@pytest.mark.parametrize("text", EXAMPLES)
def test_collapse_is_finite_for_every_distribution(text):
    z = vectors(1, 3).expand(5, 3).clone().requires_grad_()
    scores = batch_and_queue(z, z, z[:1].expand(6, 3))
    log_w = hn.parse(text).log_weights(scores)
    for objective in OBJECTIVES.values():
        losses = objective(scores, log_w)
        assert torch.isfinite(losses).all()
        assert torch.isfinite(torch.autograd.grad(losses.sum(), z, retain_graph=True)[0]).all()
    assert not any(x.isinf().any() for x in vars(hn.diagnose(scores, log_w, tau_plus=0.1)).values())


def test_single_class_batch():
    z1, z2, labels = torch.randn(4, 3), torch.randn(4, 3), torch.zeros(4).long()
    loss = hn.papers.hscl(beta=1.0)
    with warns("empty", "100%", "OtherLabel"):
        assert loss(z1, z2, labels=labels).item() == 0.0
    assert loss.diagnose(z1, z2, labels=labels).empty.all()


@pytest.mark.parametrize(
    ("text", "advice", "wrong"),
    [("Ring(0.5, 0.501)", "Lower inner, raise outer", "labels"), ("OtherLabel()", "more labels", "outer")],
)
def test_the_advice_fits_the_factor_that_left_no_negative(text, advice, wrong):
    z1, z2, labels = torch.randn(4, 3), torch.randn(4, 3), torch.zeros(4).long()
    with pytest.warns(HardnegWarning, match=advice) as found:
        hn.ContrastiveLoss(text)(z1, z2, labels=labels)
    assert wrong not in str(found[0].message).partition("a loss of 0.")[2]


def clamping_loss(**options):
    return hn.ContrastiveLoss(temperature=0.05, tau_plus=0.3, **options)


def test_clamped_debiasing_is_counted():
    z1, z2 = vectors(8, 4), vectors(8, 4, seed=1)
    z2[:5] = z1[:5]  # five positives at similarity 1, three anywhere
    loss = hn.ContrastiveLoss(temperature=0.3, tau_plus=0.3)
    clamped = loss.diagnose(z1, z2).clamped[:, 0]
    for i, row in enumerate(loops.two_views(z1, z2, 0.3)):
        mean = sum(math.exp(s) for s, valid in zip(row.scores, row.valid, strict=True) if valid) / 14
        assert clamped[i].item() == ((mean - 0.3 * math.exp(row.positives[0])) / 0.7 <= math.exp(-1 / 0.3))
    assert 0 < clamped.sum() < 16
    assert loss.diagnose(z1, z2).summary()["clamped"] == pytest.approx(clamped.double().mean().item())


def test_clamping_above_a_half_warns_once_with_its_fix():
    z = vectors(8, 16)
    loss = clamping_loss()
    with warns("clamped", "100%", "tau_plus=0.3") as caught:
        _ = [loss(z, z) for _ in range(5)], clamping_loss()(z, z)
    assert len(caught) == 1
    assert "Lower tau_plus or raise the temperature" in str(caught[0].message)


@pytest.mark.parametrize("same", [3, 4, 5])
def test_a_half_is_the_limit(same):
    """Of eight positives some are the anchor itself, at the floor, and the others are opposite to it."""
    z1, z2 = vectors(8, 16), -vectors(8, 16)
    z2[:same] = z1[:same]
    loss = clamping_loss()
    assert loss.diagnose(z1, z2).summary()["clamped"] == pytest.approx(same / 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss(z1, z2)
    assert ["62% of the debiased" in str(each.message) for each in caught] == [True] * (same > 4)


def test_clamping_is_a_share_of_the_real_pairs_also_with_several_positives():
    z, labels = vectors(8, 16), torch.arange(8) // 2
    z[1::2] = z[::2]
    loss = clamping_loss(negatives=hn.OtherLabel(), positives="label")
    diagnosis, scores = loss.diagnose(z, z, labels=labels), loss.scores(z, z, labels=labels)
    assert torch.equal(diagnosis.clamped, scores.positive_valid)  # every real pair is at the floor
    assert diagnosis.summary()["clamped"] == 1.0
    with warns("clamped", "100%"):
        loss(z, z, labels=labels)


def test_clusterings_of_different_number_are_refused_and_one_is_one():
    z = vectors(4, 3)
    anchors = hn.Keys(z, clusters=torch.tensor([[0], [0], [1], [1]]))
    flat = hn.Keys(z, clusters=torch.tensor([0, 0, 1, 1]))
    kept = hn.SameCluster().log_weights(hn.score(anchors, z, flat, 0.5)) == 0
    assert kept.tolist() == [[True, True, False, False]] * 2 + [[False, False, True, True]] * 2
    with raises(ArgumentError, who="SameCluster", got="1 of the anchors and 2 of the candidates"):
        hn.SameCluster().log_weights(hn.score(anchors, z, hn.Keys(z, clusters=torch.zeros(4, 2).long()), 0.5))


def test_moco_needs_a_pool_and_known_pairs_need_ids():
    z = vectors(4, 3)
    with pytest.raises(ValueError, match="needs a pool"):
        hn.papers.moco()(z, z)
    with pytest.raises(ValueError, match="needs ids"):
        hn.Known(hn.negatives.KnownPairs(torch.tensor([0]), torch.tensor([2]))).log_weights(hn.two_views(z, z, 0.5))


def test_an_empty_row_of_a_surrogate_has_no_gradient_also_with_an_empty_norm():
    z = vectors(3, 3).requires_grad_()
    scores = hn.two_views(z, z + 0.1, 0.5)
    log_w = hn.Tilt(1.0).log_weights(scores).masked_fill(torch.arange(6)[:, None] == 0, hn.NEVER)
    norm = torch.logsumexp(log_w.detach(), 1)
    hn.surrogate(scores, log_w, log_norm=norm).sum().backward()
    assert torch.isfinite(z.grad).all()


def test_constants_survive_writes_and_fake_tensors() -> None:
    """Tensors that all calls share, such as ``positive_valid``, are made anew where someone has changed them."""
    z1, z2 = vectors(5, 3), vectors(5, 3, seed=1)
    expected = hn.ContrastiveLoss("Uniform()", 0.1)(z1, z2)
    hn.two_views(z1, z2, 0.1).positive_valid[0] = False
    assert hn.two_views(z1, z2, 0.1).positive_valid.all()
    assert torch.equal(hn.ContrastiveLoss("Uniform()", 0.1)(z1, z2), expected)
    with FakeTensorMode():
        hn.two_views(*torch.randn(2, 11, 3), 0.1)
    assert type(hn.two_views(*torch.randn(2, 11, 3), 0.1).positive_valid) is torch.Tensor
