"""Objectives, generators, distributions, views and temperatures of ContrastiveLoss, against plain loops."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

import hardneg as hn
from hardneg.core.errors import ArgumentError, UnknownName, forget_warnings
from hardneg.core.generators import MoCHi
from hardneg.core.objectives import RINCE, InfoNCE, Objective, registered_objectives
from hardneg.core.schedules import linear
from hardneg.core.statistics import Mean
from hardneg.kernels import engine
from support.errors import raises, warns

LABELS = torch.tensor([0, 0, 1, 1, 2, 2])


def views(number=2, b=6, d=4, seed=0):
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(b, d, generator=random, dtype=torch.float64).requires_grad_() for _ in range(number)]


def rows(vectors, number=2, b=6):
    """Of each anchor: the similarities of its positives and of its negatives."""
    z = normalize(torch.cat(vectors), dim=-1)
    s = z @ z.T
    same = [[j for j in range(number * b) if j % b == i % b and j != i] for i in range(number * b)]
    other = [[j for j in range(number * b) if j % b != i % b] for i in range(number * b)]
    return [(s[i, same[i]], s[i, other[i]]) for i in range(number * b)]


def assert_same(ours, expected, leaves):
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)
    gradients = [torch.autograd.grad(1.7 * each, leaves, retain_graph=True) for each in (ours, expected)]
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-13)


IMPLS = ["dense", "streamed"]


@pytest.mark.parametrize("impl", IMPLS)
def test_rince(impl):
    z = views()
    loss = hn.ContrastiveLoss(temperature=0.5, objective="rince(q=0.3, lam=0.02)", impl=impl)
    expected = sum(
        -((p / 0.5).exp() ** 0.3).sum() / 0.3 + (0.02 * ((p / 0.5).exp() + (n / 0.5).exp().sum())).sum() ** 0.3 / 0.3
        for p, n in rows(z)
    )
    assert_same(loss(*z), expected / 12, z)


@pytest.mark.parametrize("impl", IMPLS)
def test_adnce(impl):
    z = views()
    loss = hn.ContrastiveLoss("Gaussian(0.4, sigma=0.3)", temperature=0.5, impl=impl)
    total = 0.0
    for positive, negative in rows(z):
        w = torch.exp(-((negative - 0.4) ** 2) / (2 * 0.3**2))
        hard = len(negative) * (w / w.sum() * (negative / 0.5).exp()).sum()
        total = total - torch.log((positive / 0.5).exp() / ((positive / 0.5).exp() + hard)).sum()
    assert_same(loss(*z), total / 12, z)


@pytest.mark.parametrize("impl", IMPLS)
def test_isogclr_is_an_objective_with_a_temperature_per_instance(impl):
    """Qiu et al. 2023: tau_i log E[e^((s - s+) / tau_i)] + rho tau_i, tau_i being learnt."""
    z = views()
    tau = torch.linspace(0.2, 0.9, 6, dtype=torch.float64).requires_grad_()
    loss = hn.ContrastiveLoss(
        objective=lambda positive, row: row.temperature * (row.log_mean - positive + 0.3), impl=impl
    )
    total = 0.0
    for i, (positive, negative) in enumerate(rows(z)):
        t = tau[i % 6]
        total = total + t * torch.log(((negative - positive) / t).exp().mean()) + 0.3 * t
    assert_same(loss(*z, temperature=tau), total / 12, [*z, tau])


@pytest.mark.parametrize("impl", IMPLS)
def test_mochi(impl):
    z1, z2 = views()
    queue = normalize(torch.randn(20, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)), dim=-1)
    loss = hn.ContrastiveLoss(temperature=0.2, generate=MoCHi(8, 5, 3, seed=1), views="pool", impl=impl)
    pairing = loss.pairing(z1, z2, pool=queue)
    made = pairing.candidates[-1]
    assert (made.source, tuple(made.vectors.shape)) == ("synthetic", (6, 8, 4))
    torch.testing.assert_close(made.vectors.norm(dim=-1), torch.ones(6, 8, dtype=torch.float64))
    q, k = normalize(z1, dim=-1), normalize(z2, dim=-1)
    total = 0.0
    for i in range(6):
        hard = queue[(queue @ q[i]).topk(8).indices]
        anchors = [None] * 5 + [q[i].detach()] * 3
        for h, anchor in zip(made.vectors[i], anchors, strict=True):
            assert is_mixture(h, hard, anchor)
        scores = torch.cat([(q[i] @ k[i])[None], queue @ q[i], made.vectors[i] @ q[i]]) / 0.2
        total = total - torch.log_softmax(scores, 0)[0]
    assert_same(loss(z1, z2, pool=queue), total / 6, [z1, z2])
    assert loss(z1, z2, pool=queue) != loss(z1, z2, pool=queue)  # new draws at each call
    by_label = hn.ContrastiveLoss("OtherLabel()", positives="label", generate=MoCHi(4, 5, 3), impl=impl)
    assert by_label.pairing(z1, z2, labels=LABELS).candidates[-1].labels.shape == (12, 8)
    assert by_label(z1, z2, labels=LABELS) > hn.ContrastiveLoss("OtherLabel()", positives="label")(
        z1, z2, labels=LABELS
    )
    again = hn.ContrastiveLoss(temperature=0.2, generate="mochi(8, 5, 3, seed=1)", views="pool", impl=impl)
    again.load_state_dict(loss.state_dict())
    assert again(z1, z2, pool=queue) == loss(z1, z2, pool=queue)


def is_mixture(h, hard, anchor):
    """Whether h lies between two of the hard ones, or nearer to a hard one than to the anchor between those."""
    for i in range(len(hard)):
        for j in range(len(hard)) if anchor is None else [None]:
            pair = torch.stack([hard[i], hard[j] if j is not None else anchor], dim=1)
            share = torch.linalg.lstsq(pair, h[:, None]).solution[:, 0]
            inside = bool((share >= -1e-9).all()) and (j is not None or share[1] <= share[0] + 1e-9)
            if inside and torch.dist(pair @ share, h) < 1e-9:
                return True
    return False


@pytest.mark.parametrize("impl", IMPLS)
def test_three_views(impl):
    z = views(3)
    loss = hn.ContrastiveLoss("Tilt(1.0)", temperature=0.5, impl=impl)
    total = 0.0
    for positives, negatives in rows(z, 3):
        w = torch.softmax(negatives / 0.5, 0)
        hard = len(negatives) * (w * (negatives / 0.5).exp()).sum()
        a = (positives / 0.5).exp()
        total = total - torch.log(a / (a + hard)).mean()
    assert_same(loss(z), total / 18, z)
    assert hn.ContrastiveLoss()(z[:2]) == hn.ContrastiveLoss()(z[0], z[1])
    with pytest.raises(ArgumentError, match="two views"):
        hn.ContrastiveLoss(views="cross")(z)


@pytest.mark.parametrize("impl", IMPLS)
def test_guides(impl):
    z, g = views(), [view.detach() for view in views(seed=5)]
    loss = hn.ContrastiveLoss("BelowPositive(absolute=0.0, by='guide') * Tilt(1.0, by='guide')", impl=impl)
    total = 0.0
    for (a, n), (guide_a, guide_n) in zip(rows(z), rows(g), strict=True):
        kept = guide_n <= guide_a
        if kept.any():
            w = torch.softmax(guide_n[kept] / 0.5, 0)
            hard = kept.sum() * (w * (n[kept] / 0.5).exp()).sum()
            total = total - torch.log((a / 0.5).exp() / ((a / 0.5).exp() + hard)).sum()
    assert_same(loss(*z, guide=g), total / 12, z)
    with pytest.raises(ArgumentError, match="second model"):
        loss(*z)
    pool = torch.randn(7, 4, dtype=torch.float64)
    pooled = hn.ContrastiveLoss("Rank(0, 3, by='guide')", impl=impl)
    assert pooled(*z, pool=pool, guide=[*z, pool]) == hn.ContrastiveLoss("Rank(0, 3)", impl=impl)(*z, pool=pool)


def test_streamed_equals_dense_in_every_option():
    z = views()
    learnt = torch.nn.Parameter(torch.tensor(1.2, dtype=torch.float64))
    for options in (
        {"negatives": "OtherLabel() * Tilt(1.0)", "positives": "label", "num_negatives": "candidates", "tau_plus": 0.1},
        {"negatives": "Ring(0.1, 0.6)", "views": "cross", "positives_in_denominator": "all"},
        {"negatives": hn.Tilt(learnt), "objective": "jsd", "tau_plus": 0.2, "reduction": "pairs"},
        {
            "negatives": "Rank(0, 4)",
            "objective": "sigmoid(bias=-2.0)",
            "positives": "label",
            "same_label_negatives": True,
        },
    ):
        dense, streamed = (hn.ContrastiveLoss(impl=impl, **options) for impl in IMPLS)
        assert_same(streamed(*z, labels=LABELS), dense(*z, labels=LABELS), z)
    assert [learnt] == list(hn.ContrastiveLoss(hn.Tilt(learnt)).parameters())


def test_what_cannot_stream_says_so_at_construction():
    class WholeRows(hn.negatives.Negatives):
        textual = False

        def log_weights(self, scores):
            return hn.Uniform().log_weights(scores)

    assert hn.ContrastiveLoss(WholeRows())(*views()).isfinite()
    with raises(ArgumentError, who="WholeRows", what="impl='streamed')", fix="log_weight(tile)"):
        hn.ContrastiveLoss(hn.OtherLabel() * WholeRows(), impl="streamed")


def test_auto_streams_large_batches(monkeypatch):
    z = views()
    monkeypatch.setitem(engine.MAX_DENSE_SCORES, "cpu", 10)
    seen = []
    monkeypatch.setattr("hardneg.losses.contrastive.dense", lambda pairing: seen.append(pairing))
    assert hn.ContrastiveLoss()(*z) == hn.ContrastiveLoss(impl="streamed")(*z)
    assert not seen


def test_a_streamed_loss_warns_like_a_dense_one():
    z = views(b=8, d=16)[0].detach()
    for impl in IMPLS:
        forget_warnings()
        with warns("clamped", "100%", "tau_plus=0.3"):
            hn.ContrastiveLoss(temperature=0.05, tau_plus=0.3, impl=impl)(z, z)
        with warns("empty", "100%"):
            hn.ContrastiveLoss("Threshold(2.0)", impl=impl)(z, z)


def test_diagnose_of_blocks_is_that_of_all(monkeypatch):
    z = [view.detach() for view in views()]
    for text in ("Tilt(1.0)", "OtherLabel() * Ring(0.1, 0.8)"):
        loss = hn.ContrastiveLoss(text, tau_plus=0.1, impl="streamed")
        whole = loss.diagnose(*z, labels=LABELS)
        with monkeypatch.context() as patch:
            patch.setattr("hardneg.losses.contrastive.SCORES_PER_DIAGNOSIS", 12 * 5)
            blocks = loss.diagnose(*z, labels=LABELS)
        for name, value in vars(whole).items():
            torch.testing.assert_close(getattr(blocks, name), value, equal_nan=True)


def test_an_objective_of_ones_own():
    class Margin(Objective):
        """max(0, margin + E_q[s] - a)."""

        name = "margin_for_a_test"

        def __init__(self, margin=0.5):
            self.margin = margin

        def statistics(self):
            return {"mean": Mean()}

        def __call__(self, positive, row):
            return (self.margin + row.mean - positive).clamp(min=0.0)

    z = views()
    assert registered_objectives()["margin_for_a_test"] is Margin
    expected = sum((0.5 + n.mean() / 0.5 - a / 0.5).clamp(min=0).sum() for a, n in rows(z)) / 12
    for impl in IMPLS:
        assert_same(hn.ContrastiveLoss(objective=Margin(), impl=impl)(*z), expected, z)
        assert_same(hn.ContrastiveLoss(objective="margin_for_a_test()", impl=impl)(*z), expected, z)


def test_wrong_objectives_are_named():
    with raises(UnknownName, name="rinze", nearest="rince"):
        hn.ContrastiveLoss(objective="rinze")
    with raises(ArgumentError, who="ContrastiveLoss", what="tau_plus=0.1", got="objective=rince()"):
        hn.ContrastiveLoss(objective="rince", tau_plus=0.1)
    with pytest.raises(ArgumentError, match="impl in"):
        hn.ContrastiveLoss(impl="triton")
    assert repr(RINCE(0.1)) == "rince(q=0.1)"
    assert math.isclose(InfoNCE(tau_plus=0.1).tau_plus, 0.1)


@pytest.mark.parametrize(
    ("options", "who", "got"),
    [
        ({"tau_plus": torch.tensor(1.5)}, "info_nce", "tau_plus=1.5"),
        ({"tau_plus": torch.tensor([[0.5], [1.0]])}, "info_nce", "tau_plus=1.0"),
        ({"objective": "jsd", "tau_plus": nn.Parameter(torch.tensor(-0.5))}, "jsd", "tau_plus=-0.5"),
        ({"negatives": hn.Tilt(torch.tensor(-1.0))}, "Tilt", "beta=-1.0"),
        ({"negatives": hn.OtherLabel() * hn.Tilt(torch.tensor(torch.nan))}, "Tilt", "beta=nan"),
        ({"num_negatives": torch.tensor([3.0, -2.0])}, "info_nce", "num_negatives=-2.0"),
    ],
)
def test_tensors_out_of_range_raise_at_construction(options, who, got):
    with pytest.raises(ArgumentError) as caught:
        hn.ContrastiveLoss(**options)
    assert (caught.value.who, caught.value.got) == (who, got)


def test_tensors_are_checked_once():
    beta = nn.Parameter(torch.tensor(1.0))
    loss = hn.ContrastiveLoss(hn.Tilt(beta))
    beta.data.fill_(-1.0)  # as a step of an optimiser may
    for impl in ("dense", "streamed"):
        loss.impl = impl
        assert loss(torch.randn(4, 3), torch.randn(4, 3)).isfinite()


def test_numbers_per_instance_name_the_anchors():
    z1, z2 = torch.randn(2, 3, 4, dtype=torch.float64)
    share = torch.tensor([[0.05], [0.1], [0.2]], dtype=torch.float64)
    cross = hn.ContrastiveLoss(tau_plus=share, views="cross", reduction="none")(z1, z2)
    each = [hn.ContrastiveLoss(tau_plus=one.item(), views="cross", reduction="none")(z1, z2) for one in share]
    torch.testing.assert_close(cross, torch.stack(each).diagonal())
    for options, got in (
        ({"tau_plus": share}, "tau_plus=(3, 1)"),
        ({"negatives": hn.Tilt(share)}, "beta=(3, 1)"),
        ({"num_negatives": share[:, 0]}, "num_negatives=(3,)"),
    ):
        loss = hn.ContrastiveLoss(**options)
        for use in (loss, loss.diagnose):
            with pytest.raises(ArgumentError) as caught:
                use(z1, z2)
            assert caught.value.got == got
            assert caught.value.what.startswith("one number for each of the 6 anchors")
    repeated = hn.ContrastiveLoss(tau_plus=torch.cat([share] * 2), reduction="none")(z1, z2)
    each = [hn.ContrastiveLoss(tau_plus=one.item(), reduction="none")(z1, z2) for one in share]
    torch.testing.assert_close(repeated, torch.stack([*each, *each]).diagonal())


def test_the_loss_has_the_tau_plus_of_its_objective():
    assert hn.ContrastiveLoss(objective="info_nce(tau_plus=0.1)").tau_plus == 0.1
    assert hn.ContrastiveLoss(objective="info_nce", tau_plus=0.2).tau_plus == 0.2
    assert hn.ContrastiveLoss(objective="jsd(tau_plus=linear(0.0, 0.1))").tau_plus == linear(0.0, 0.1)
    assert hn.ContrastiveLoss(objective="rince").tau_plus == 0.0


def test_from_matrix_takes_ids_labels_sources_and_a_guide():
    z = [normalize(view.detach(), dim=-1) for view in views()]
    ids = torch.arange(6)
    full = hn.cross_views(*z, 0.5, ids=ids, labels=LABELS).guided(hn.cross_views(z[1], z[0], 1.0))
    positives = torch.eye(6, dtype=torch.bool)
    tags = hn.core.types.Tags(ids, LABELS)
    made = hn.from_matrix(
        z[0] @ z[1].T, positives, 0.5, anchors=tags, candidates=tags, sources=["batch"] * 6, guide=z[1] @ z[0].T
    )
    for text in ("OtherLabel()", "From('batch')", "Rank(0, 2, by='guide')", "BelowPositive(absolute=0.1, by='guide')"):
        assert torch.equal(hn.parse(text).log_weights(made), hn.parse(text).log_weights(full))
    same = hn.from_matrix(z[0] @ z[1].T, torch.zeros_like(positives), anchors=tags, candidates=tags)
    assert torch.equal(same.valid, ~positives)
