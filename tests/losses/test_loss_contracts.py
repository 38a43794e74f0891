"""What every loss promises: values, gradients and corner cases that users once found broken."""

import math

import pytest
import torch
from torch.nn.functional import normalize

import hardneg as hn
from hardneg.core.errors import ArgumentError
from hardneg.core.schedules import adaptive, linear
from hardneg.core.views import pair_pool
from support.errors import raises


def views(b=6, d=4, seed=0, dtype=torch.float64):
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(b, d, generator=random, dtype=dtype) for _ in range(2))


def kept(ring, count):
    scores = hn.score(torch.ones(1, 1), torch.ones(1, 1), torch.linspace(-1, 1, count)[:, None], 1.0)
    return [j for j, w in enumerate(ring.log_weights(scores)[0].tolist()) if w == 0]


def test_ring_edges_do_not_lose_a_rank_to_rounding():
    assert len(kept(hn.Ring(0.0, 0.29), 100)) == 29
    for percent in range(1, 101):
        for count in (50, 100, 200):
            closest = percent * count // 100
            assert len(kept(hn.Ring(0.0, percent / 100), count)) == closest
            assert len(kept(hn.Ring(1 - percent / 100), count)) == count - (100 - percent) * count // 100


@pytest.mark.parametrize("count", [1, 2, 9, 40])
def test_a_ring_keeps_at_least_so_many(count):
    for inner, outer in ((0.1, 0.1), (0.95, 1.0), (0.0, 0.1), (0.5, 0.52), (0.9, 0.3)):
        for at_least in (1, 3):
            found = kept(hn.Ring(inner, outer, at_least=at_least), count)
            plain = kept(hn.Ring(inner, outer), count) if inner < outer else []
            assert len(found) == max(min(at_least, count), len(plain))
            assert found == list(range(min(found), max(found) + 1))
            assert set(plain) <= set(found)
    assert hn.parse("Ring(0.1, at_least=2)") == hn.Ring(0.1, at_least=2)


def test_schedules_of_temperature_and_tau_plus():
    z1, z2 = views()
    loss = hn.ContrastiveLoss(temperature=linear(1.0, 0.5), tau_plus=linear(0.0, 0.1))
    with raises(ArgumentError, who="linear(1.0, 0.5)", what="a number", got="a schedule"):
        loss(z1, z2)
    for step, temperature, tau_plus in ((0, 1.0, 0.0), (5, 0.75, 0.05), (10, 0.5, 0.1)):
        loss.set_progress(step, 10)
        assert loss(z1, z2) == hn.ContrastiveLoss(temperature=temperature, tau_plus=tau_plus)(z1, z2)
        assert loss.diagnose(z1, z2).effective_temperature[0] == temperature
    again = hn.ContrastiveLoss(temperature=linear(1.0, 0.5), tau_plus=linear(0.0, 0.1))
    again.load_state_dict(loss.state_dict())
    assert again(z1, z2) == loss(z1, z2)
    loss = hn.ContrastiveLoss(temperature=linear(1.0, 0.0))
    loss.set_progress(10, 10)
    with pytest.raises(ArgumentError, match="temperature above 0"):
        loss(z1, z2)


def test_schedules_do_not_recompile_at_each_step():
    torch.compiler.reset()
    z1, z2 = views()
    loss = hn.ContrastiveLoss(temperature=linear(1.0, 0.5), tau_plus=linear(0.01, 0.1))
    torch._dynamo.utils.clear_compilation_metrics()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for step in range(6):
        loss.set_progress(step, 6)
        torch.testing.assert_close(compiled(z1, z2), loss(z1, z2), rtol=1e-12, atol=0)
    assert len({each.compile_id for each in torch._dynamo.utils.get_compilation_metrics()}) <= 3
    torch.compiler.reset()


def test_true_positives_with_unlabelled_negatives():
    z1, z2 = views()
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    loss = hn.ContrastiveLoss("Tilt(1.0)", positives="label", same_label_negatives=True, normalize=False)
    z, y = torch.cat([z1, z2]), torch.cat([labels, labels])
    ids = torch.arange(6).repeat(2)
    s = z @ z.T / 0.5
    total = 0.0
    for i in range(12):
        negatives = [j for j in range(12) if ids[j] != ids[i]]  # also those of the anchor's label
        weights = torch.softmax(s[i, negatives], 0)
        mean = (weights * s[i, negatives].exp()).sum()
        positives = [(i + 6) % 12] + [j for j in negatives if y[j] == y[i]]
        total += sum(-torch.log(s[i, j].exp() / (s[i, j].exp() + 10 * mean)) for j in positives) / len(positives) / 12
    torch.testing.assert_close(loss(z1, z2, labels=labels), total)
    with pytest.raises(ArgumentError, match="positives='label'"):
        hn.ContrastiveLoss(same_label_negatives=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-12, 1e-25, 1e15, 1e19, 1e25])
def test_cosine_is_right_for_any_norm(size, dtype):
    z1, z2 = (normalize(z, dim=-1).to(dtype) for z in views())
    loss = hn.ContrastiveLoss(temperature=0.2)
    torch.testing.assert_close(loss(z1 * size, z2 * size), loss(z1, z2), rtol=1e-5, atol=0)
    leaf = (z1 * size).requires_grad_()
    loss(leaf, z2).backward()
    plain = z1.clone().requires_grad_()
    loss(plain, z2).backward()
    torch.testing.assert_close(leaf.grad.double() * size, plain.grad.double(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_zero_vectors_get_no_gradient_and_are_counted(dtype):
    z1, z2 = (z.to(dtype) for z in views())
    z1[2] = 0.0
    leaf = z1.clone().requires_grad_()
    loss = hn.ContrastiveLoss()
    loss(leaf, z2).backward()
    assert (leaf.grad[2] == 0).all()
    assert leaf.grad.isfinite().all()
    assert leaf.grad[0].abs().max() > 0
    assert loss.diagnose(z1, z2).no_direction.tolist() == [i == 2 for i in range(12)]


def test_wrong_arguments_are_errors():
    z1, z2 = views()
    for temperature in (torch.tensor(0.0), torch.tensor(-0.5), torch.tensor(math.nan)):
        with pytest.raises(ArgumentError, match="temperature above 0"):
            hn.ContrastiveLoss(temperature=temperature)
        with pytest.raises(ArgumentError, match="temperature above 0"):
            hn.two_views(z1, z2, temperature)
    learnt = torch.nn.Parameter(torch.tensor(0.5))
    loss = hn.ContrastiveLoss(temperature=learnt)
    learnt.data.fill_(-0.1)
    with pytest.raises(ArgumentError, match="temperature above 0"):
        loss(z1, z2)
    scores = hn.two_views(z1, z2, 0.5)
    for log_w in (torch.zeros(12, 1), torch.zeros(12), torch.zeros(1, 12), torch.zeros(12, 11)):
        for objective in (hn.info_nce, hn.jsd, hn.sigmoid, hn.surrogate):
            with raises(ArgumentError, what="each candidate"):
                objective(scores, log_w)
    for who, call in (
        ("ContrastiveLoss", hn.ContrastiveLoss()),
        ("score", lambda a, b: hn.two_views(a, b, 0.5)),
        ("score", lambda a, b: hn.cross_views(a, b, 0.5)),
    ):
        with raises(ArgumentError, who=who, got="vectors=(0, 4)"):
            call(z1[:0], z2[:0])


def test_state_dict_holds_tensors_only():
    schedule = adaptive(1.0, 0.1)
    loss = hn.ContrastiveLoss(hn.Ring(0.0, schedule), tau_plus=linear(0.0, 0.1))
    schedule.observe(0.5)
    schedule.observe(0.6)
    loss.set_progress(3, 10)
    state = loss.state_dict()
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    other = hn.ContrastiveLoss(hn.Ring(0.0, adaptive(1.0, 0.1)), tau_plus=linear(0.0, 0.1))
    other.load_state_dict(state)
    assert (other.step, other.total, other.negatives.outer(0)) == (3, 10, schedule(0))


@pytest.mark.parametrize("impl", ["dense", "streamed"])
def test_a_guide_judges_pairings_with_positives_by_label(impl):
    """The guide's pairing may say that labels are positives too: its candidates are the same pairs."""

    def made(seed):
        random = torch.Generator().manual_seed(seed)
        anchors, positives, pool = (torch.randn(n, 8, generator=random) for n in (4, 4, 6))
        labels = torch.arange(6) % 2
        keys = hn.Keys(anchors, labels=labels[:4]), positives, [hn.Keys(pool, labels=labels)]
        return pair_pool(*keys, 0.5, label_positives=True, normalize=True)

    loss = hn.ContrastiveLoss("BelowPositive(0.05, by='guide')", impl=impl, reduction="none")
    found = loss.of(made(0).guided(made(1)))
    wanted = hn.ContrastiveLoss("BelowPositive(0.05, by='guide')", impl="streamed", reduction="none")
    torch.testing.assert_close(found, wanted.of(made(0).guided(made(1))))


@pytest.mark.parametrize("labels", [None, torch.arange(16) % 3])
def test_the_mean_is_another_name_of_the_mean_over_anchors(labels: torch.Tensor | None) -> None:
    z1, z2 = torch.randn(2, 16, 8)
    more = {} if labels is None else {"positives": "label"}
    one, same = (hn.ContrastiveLoss("Tilt(1.0)", reduction=name, **more) for name in ("mean", "anchors"))
    assert torch.equal(one(z1, z2, labels=labels), same(z1, z2, labels=labels))
    scores = hn.two_views(z1, z2, 0.5, labels=labels)
    pairs = hn.info_nce(scores, hn.Tilt(1.0).log_weights(scores))
    weights = torch.rand(32)
    assert torch.equal(hn.reduce(pairs, scores, "mean"), hn.reduce(pairs, scores))
    assert torch.equal(hn.reduce(pairs, scores, "mean", weights), hn.reduce(pairs, scores, "anchors", weights))


@pytest.mark.parametrize("impl", ["auto", "dense", "streamed"])
def test_the_choice_of_a_backend_prints_no_tensor(impl, monkeypatch):
    def printed(*_, **__):
        raise AssertionError("a tensor is printed, which takes milliseconds and waits for a GPU")

    monkeypatch.setattr(torch.Tensor, "__repr__", printed)
    z1, z2 = torch.randn(2, 8, 4)
    negatives = hn.Tilt(torch.rand(16, 1)) * hn.BelowPositive(0.05)
    assert hn.ContrastiveLoss(negatives, impl=impl)(z1, z2).isfinite()
    assert hn.ContrastiveLoss(negatives, impl=impl, objective="jsd")(z1, z2).isfinite()
