"""ContrastiveLoss: the objectives with their options bound, its schedules and its state."""

import copy
import io
import itertools

import pytest
import torch
from torch.nn.functional import normalize

import hardneg as hn
from hardneg.core.errors import ArgumentError
from hardneg.core.schedules import adaptive
from support.errors import raises


def views(b=6, d=4, seed=0):
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(b, d, generator=random, dtype=torch.float64).requires_grad_() for _ in range(2))


LABELS = torch.tensor([0, 0, 1, 1, 2, 2])
IDS = torch.tensor([5, 3, 5, 8, 9, 4])


def assert_same(ours, expected, leaves):
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)
    weights = torch.rand_like(ours)
    gradients = [torch.autograd.grad((weights * each).sum(), leaves, retain_graph=True) for each in (ours, expected)]
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-13)


OPTIONS = [
    {"views": v, "positives": p, "num_negatives": m, "positives_in_denominator": d, "reduction": r, "tau_plus": t}
    for (v, p, m, d, r), t in zip(
        itertools.product(
            ("two", "cross"),
            ("view", "label"),
            ("support", "candidates", "mass", 11),
            ("own", "all", "none"),
            ("anchors", "pairs", "none"),
        ),
        itertools.cycle((0.0, 0.05)),
        strict=False,
    )
]


@pytest.mark.parametrize("views_option", ["two", "cross"])
@pytest.mark.parametrize("positives", ["view", "label"])
def test_options_are_those_of_the_objectives(views_option, positives):
    z1, z2 = views()
    n1, n2 = normalize(z1, dim=-1), normalize(z2, dim=-1)
    build = {"two": hn.two_views, "cross": hn.cross_views}[views_option]
    scores = build(n1, n2, 0.4, ids=IDS, labels=LABELS)
    if positives == "label":
        scores = hn.core.scoring.same_label_positives(scores)
    q = hn.OtherLabel() * hn.Tilt(1.2)
    tried = [o for o in OPTIONS if (o["views"], o["positives"]) == (views_option, positives)]
    assert len(tried) == 36
    for options in tried:
        bound = {key: options[key] for key in ("num_negatives", "positives_in_denominator", "tau_plus")}
        expected = hn.reduce(hn.info_nce(scores, q.log_weights(scores), **bound), scores, options["reduction"])
        ours = hn.ContrastiveLoss(q, 0.4, **options)(z1, z2, ids=IDS, labels=LABELS)
        assert ours.shape == ((len(scores.positives),) if options["reduction"] == "none" else ())
        assert_same(ours, expected, [z1, z2])


def test_defaults_are_simclr_of_normalised_vectors():
    z1, z2 = views()
    scores = hn.two_views(normalize(z1, dim=-1), normalize(z2, dim=-1), 0.5)
    expected = hn.info_nce(scores, hn.Uniform().log_weights(scores)).mean()
    assert_same(hn.ContrastiveLoss()(z1, z2), expected, [z1, z2])
    assert_same(hn.ContrastiveLoss()(3.0 * z1, 0.1 * z2), expected, [z1, z2])
    as_given = hn.two_views(z1, z2, 0.5)
    raw = hn.info_nce(as_given, hn.Uniform().log_weights(as_given)).mean()
    assert_same(hn.ContrastiveLoss(normalize=False)(z1, z2), raw, [z1, z2])
    assert abs(raw - expected) > 0.01


def test_negatives_as_text():
    z1, z2 = views()
    text = hn.ContrastiveLoss("OtherLabel() * Tilt(1.0)", tau_plus=0.1)
    assert text.negatives == hn.OtherLabel() * hn.Tilt(1.0)
    made = hn.ContrastiveLoss(hn.OtherLabel() * hn.Tilt(1.0), tau_plus=0.1)
    assert torch.equal(text(z1, z2, labels=LABELS), made(z1, z2, labels=LABELS))
    assert "OtherLabel() * Tilt(1.0)" in repr(text)


class Remembered:
    def __init__(self, keys):
        self._keys = keys

    def keys(self):
        return self._keys


def unit_pool(seed=3):
    vectors = normalize(torch.randn(7, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), dim=-1)
    return hn.Keys(vectors, torch.tensor([5, 20, 21, 3, 3, 22, 9]), torch.arange(7) % 3, source="queue")


@pytest.mark.parametrize("views_option", ["two", "cross"])
def test_a_pool_stands_instead_of_the_batch(views_option):
    z1, z2 = views()
    n1, n2 = normalize(z1, dim=-1), normalize(z2, dim=-1)
    pool = unit_pool()
    loss = hn.ContrastiveLoss("Tilt(0.5)", 0.3, views=views_option)
    with_ids = hn.score(hn.Keys(n1, IDS), n2, pool, 0.3)
    without = hn.score(n1, n2, pool.vectors, 0.3)
    q = hn.Tilt(0.5)
    expected, unmatched = (hn.reduce(hn.info_nce(s, q.log_weights(s)), s) for s in (with_ids, without))
    assert abs(expected - unmatched) > 1e-3
    for given in (pool, Remembered(pool), [pool], (Remembered(pool),)):
        assert_same(loss(z1, z2, ids=IDS, pool=given), expected, [z1, z2])
        assert_same(loss(z1, z2, pool=given), unmatched, [z1, z2])
    assert_same(loss(z1, z2, ids=IDS, pool=pool.vectors), unmatched, [z1, z2])
    assert_same(loss(z1, z2, ids=IDS, pool=pool.vectors.numpy()), unmatched, [z1, z2])
    two = loss(z1, z2, ids=IDS, pool=[pool, Remembered(unit_pool(4))])
    both = hn.score(hn.Keys(n1, IDS), n2, [pool, unit_pool(4)], 0.3)
    assert_same(two, hn.reduce(hn.info_nce(both, q.log_weights(both)), both), [z1, z2])


def test_a_pool_with_labels():
    z1, z2 = views()
    scores = hn.score(hn.Keys(normalize(z1, dim=-1), None, LABELS), normalize(z2, dim=-1), unit_pool(), 0.5)
    masked = hn.info_nce(scores, hn.OtherLabel().log_weights(scores)).mean()
    assert_same(hn.ContrastiveLoss("OtherLabel()")(z1, z2, labels=LABELS, pool=unit_pool()), masked, [z1, z2])
    more = hn.core.scoring.same_label_positives(scores)
    expected = hn.reduce(hn.info_nce(more, hn.Uniform().log_weights(more)), more)
    ours = hn.ContrastiveLoss(positives="label")(z1, z2, labels=LABELS, pool=unit_pool())
    assert_same(ours, expected, [z1, z2])


def test_the_pool_is_normalised_too():
    z1, z2 = views()
    pool = unit_pool()
    long = hn.Keys(3.0 * pool.vectors, pool.ids)
    loss = hn.ContrastiveLoss()
    for given, short in ((long, pool), (Remembered(long), pool), (long.vectors, pool.vectors)):
        torch.testing.assert_close(loss(z1, z2, ids=IDS, pool=given), loss(z1, z2, ids=IDS, pool=short))


def test_labels_are_read_by_factors_only_unless_they_make_positives():
    z1, z2 = views()
    loss = hn.ContrastiveLoss("Tilt(1.0)")
    assert torch.equal(loss(z1, z2, labels=LABELS), loss(z1, z2))
    assert not torch.equal(hn.ContrastiveLoss("Tilt(1.0)", positives="label")(z1, z2, labels=LABELS), loss(z1, z2))


@pytest.mark.parametrize("tau_plus", [0.0, 0.05])
def test_a_learnable_temperature_has_the_gradient_of_differences(tau_plus):
    z1, z2 = views()
    temperature = torch.nn.Parameter(torch.tensor(0.4, dtype=torch.float64))
    loss = hn.ContrastiveLoss("Threshold(-0.2) * Tilt(1.0)", temperature, tau_plus)
    assert [name for name, _ in loss.named_parameters()] == ["temperature"]
    loss(z1, z2).backward()
    step = 1e-6
    higher, lower = (hn.ContrastiveLoss(loss.negatives, 0.4 + sign * step, tau_plus)(z1, z2).item() for sign in (1, -1))
    assert temperature.grad.item() == pytest.approx((higher - lower) / (2 * step), rel=1e-6)
    torch.optim.SGD(loss.parameters(), lr=0.1).step()
    assert temperature.item() != 0.4
    assert loss.state_dict()["temperature"] == temperature


def test_a_temperature_made_of_another_parameter():
    z1, z2 = views()
    log_scale = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    loss = hn.ContrastiveLoss(temperature=torch.exp(-log_scale))(z1, z2)
    (gradient,) = torch.autograd.grad(loss, log_scale)
    assert gradient != 0
    torch.testing.assert_close(loss, hn.ContrastiveLoss(temperature=torch.exp(-log_scale).item())(z1, z2))


def test_schedules_follow_set_progress():
    z1, z2 = views()
    loss = hn.ContrastiveLoss("Tilt(linear(2.0, 0.0)) * Ring(0.0, linear(1.0, 0.5))")
    with raises(
        ArgumentError, who="linear(2.0, 0.0)", what="a number", got="a schedule", fix="set_progress(step, total)"
    ):
        loss(z1, z2)
    for step in (0, 5, 10, 12):
        loss.set_progress(step, 10)
        now = min(step, 10) / 10
        fixed = hn.ContrastiveLoss(hn.Tilt(2.0 - 2.0 * now) * hn.Ring(0.0, 1.0 - 0.5 * now))
        assert torch.equal(loss(z1, z2), fixed(z1, z2))
        hardness = loss.diagnose(z1, z2).hardness
        assert torch.equal(hardness, fixed.diagnose(z1, z2).hardness)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_state_goes_through_a_file():
    z1, z2 = views()
    text = "Tilt(linear(2.0, 0.0)) * Ring(adaptive(0.0, 0.3, rate=0.1), adaptive(1.0, 0.5, rate=0.1))"

    def made():
        temperature = torch.nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
        return hn.ContrastiveLoss(text, temperature)

    first = made()
    inner, outer = (s for s in first.negatives.schedules() if isinstance(s, adaptive))
    for metric in (0.1, 0.2, 0.3, 0.4):
        outer.observe(metric)
    for metric in (0.1, 0.2, 0.0):
        inner.observe(metric)
    first.set_progress(3, 10)
    with torch.no_grad():
        first.temperature.fill_(0.7)
    second = made()
    second.load_state_dict(through_a_file(first.state_dict()))
    assert (second.step, second.total) == (3, 10)
    assert second.temperature.item() == 0.7
    assert second.negatives.at(3, 10) == first.negatives.at(3, 10) == hn.Tilt(1.4) * hn.Ring(0.0, outer(0))
    assert outer(0) == pytest.approx(0.7)
    assert torch.equal(first(z1, z2), second(z1, z2))  # evaluated without another set_progress
    for loss in (first, second):
        for schedule in loss.negatives.schedules():
            if isinstance(schedule, adaptive):
                schedule.observe(0.35)  # between the remembered metrics: one goes on, the other back
        loss.set_progress(4, 10)
    assert torch.equal(first(z1, z2), second(z1, z2))
    assert second.negatives.at(4, 10) == first.negatives.at(4, 10)


def test_state_without_schedules_goes_through_a_file():
    z1, z2 = views()
    first, second = hn.ContrastiveLoss("Tilt(1.0)"), hn.ContrastiveLoss("Tilt(1.0)")
    second.load_state_dict(through_a_file(first.state_dict()))
    assert torch.equal(first(z1, z2), second(z1, z2))


def test_state_saved_before_the_first_step_can_be_loaded():
    text = "Tilt(linear(1.0, 0.0))"
    loss = hn.ContrastiveLoss(text)
    loss.load_state_dict(through_a_file(hn.ContrastiveLoss(text).state_dict()))
    assert (loss.step, loss.total) == (None, None)


def test_a_copy_has_its_own_schedules():
    first = hn.ContrastiveLoss("Ring(0.0, adaptive(1.0, 0.1, rate=0.2))")
    second = copy.deepcopy(first)
    for metric in (0.1, 0.2):
        first.negatives.outer.observe(metric)
    assert first.negatives.outer(0) == pytest.approx(0.8)
    assert second.negatives.outer(0) == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"views": "three"}, r"ContrastiveLoss needs views in \('two', 'cross', 'pool'\), got views='three'"),
        ({"positives": "labels"}, r"ContrastiveLoss needs positives in .* got positives='labels'"),
        ({"positives_in_denominator": True}, r"ContrastiveLoss needs positives_in_denominator in .*=True"),
        ({"reduction": "sum"}, r"ContrastiveLoss needs reduction in .* got reduction='sum'"),
        ({"temperature": 0.0}, r"ContrastiveLoss needs a temperature above 0, got temperature=0.0"),
        ({"temperature": -1.0}, r"ContrastiveLoss needs a temperature above 0"),
        ({"temperature": None}, r"ContrastiveLoss needs a temperature that is a number, tensor or schedule"),
        ({"temperature": float("nan")}, r"ContrastiveLoss needs a temperature above 0"),
        ({"tau_plus": 1.0}, r"needs tau_plus in \[0.0, 1.0\), got tau_plus=1.0"),
        ({"tau_plus": -0.1}, r"needs tau_plus"),
        ({"negatives": "Tlit(1.0)"}, r"Did you mean Tilt\?"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        hn.ContrastiveLoss(**options)


@pytest.mark.parametrize("wrong", ["all", 0, -3.0, float("nan")])
def test_wrong_num_negatives_is_named_at_the_door(wrong):
    with pytest.raises(ValueError, match="num_negatives"):
        hn.ContrastiveLoss(num_negatives=wrong)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda z: hn.ContrastiveLoss()(z, z[:3]), r"two_views needs two views of the same shape .*z2=\(3, 4\)"),
        (lambda z: hn.ContrastiveLoss(views="cross")(z, z[:, :3]), "cross_views needs two views of the same shape"),
        (
            lambda z: hn.ContrastiveLoss()(z, z, ids=torch.arange(5)),
            r"ids for each vector, shape \(6,\), got ids=\(5,\)",
        ),
        (lambda z: hn.two_views(z, z, 0.5, labels=torch.arange(5)), r"shape \(6,\), got labels=\(5,\)"),
        (lambda z: hn.ContrastiveLoss()(z, z, labels=torch.rand(6)), "Keys needs whole numbers as labels"),
        (lambda z: hn.ContrastiveLoss()(z, z, pool=torch.randn(3, 5)), "ContrastiveLoss needs vectors of 4 features"),
        (lambda z: hn.ContrastiveLoss()(z, z, pool=()), "ContrastiveLoss needs at least one pool of candidates"),
        (lambda z: hn.ContrastiveLoss("OtherLabel()")(z, z), "OtherLabel needs labels of the anchors"),
        (lambda z: hn.ContrastiveLoss(positives="label")(z, z), "same_label_positives needs labels of the anchors"),
        (lambda z: hn.two_views(z, z, 0.0), "score needs a temperature above 0, got temperature=0.0"),
        (lambda z: hn.score(hn.Keys(z[None]), z, z, 0.5), r"score needs anchors \[b, d\]"),
        (lambda z: hn.score(z, z[:2], z, 0.5), "score needs positives of 6 anchors"),
        (lambda z: hn.score(z, z, hn.Keys(z[None]), 0.5), "score needs private candidates of 6 anchors"),
        (lambda z: hn.Keys(z.long()), "Keys needs floating point vectors"),
    ],
)
def test_wrong_inputs_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.randn(6, 4))


@pytest.mark.parametrize(
    "call",
    [
        lambda: hn.from_matrix(torch.randn(2, 3), torch.zeros(2, 3).bool(), 0.0),
        lambda: hn.score(
            torch.randn(2, 4), torch.randn(2, 4), torch.randn(3, 4), 0.5, positive_mask=torch.ones(2, 3).bool()
        ),
    ],
)
def test_wrong_temperature_of_a_matrix_and_wrong_mask_are_refused(call):
    with pytest.raises(ValueError, match=r"temperature|positive_mask"):
        call()


def test_keys_without_a_gradient():
    z1, z2 = views()
    for options in ({"views": "cross"}, {"views": "two"}):
        loss = hn.ContrastiveLoss("Tilt(1.0)", detach_keys=True, **options)
        plain = hn.ContrastiveLoss("Tilt(1.0)", **options)
        assert_same(loss(z1, z2), plain(z1, z2.detach()), [z1])
        assert torch.autograd.grad(loss(z1, z2), z2, allow_unused=True)[0] is None
    pool = unit_pool()
    ours, plain = hn.ContrastiveLoss(detach_keys=True)(z1, z2, pool=pool), hn.ContrastiveLoss()(z1, z2, pool=pool)
    assert_same(ours, plain, [z1])
    assert torch.autograd.grad(ours, z2, allow_unused=True)[0] is None


def test_clusters_are_read_by_factors():
    z1, z2 = views()
    clusters = torch.tensor([[0, 1], [0, 2], [1, 1], [2, 0], [1, 2], [2, 2]])
    n1, n2 = normalize(z1, dim=-1), normalize(z2, dim=-1)
    for views_option, build in (("two", hn.two_views), ("cross", hn.cross_views)):
        scores = build(n1, n2, 0.5, clusters=clusters)
        expected = hn.info_nce(scores, hn.SameCluster().log_weights(scores)).mean()
        ours = hn.ContrastiveLoss("SameCluster()", views=views_option)(z1, z2, clusters=clusters)
        assert_same(ours, expected, [z1, z2])
    pool = hn.Keys(unit_pool().vectors, clusters=torch.arange(14).view(7, 2) % 3)
    scores = hn.score(hn.Keys(n1, clusters=clusters), n2, pool, 0.5)
    expected = hn.info_nce(scores, hn.OtherCluster().log_weights(scores)).mean()
    assert_same(hn.ContrastiveLoss("OtherCluster()")(z1, z2, pool=pool, clusters=clusters), expected, [z1, z2])


@pytest.mark.parametrize("text", ["Tilt(2.0)", "Tilt(2.0, detach=True)", "Ring(0.0, 0.5)"])
def test_its_diagnosis_is_exact_without_a_graph(text):
    z1, z2 = views()
    loss = hn.ContrastiveLoss(text, tau_plus=0.1)
    scores = loss.scores(z1, z2, labels=LABELS)
    expected = hn.diagnose(scores, loss.negatives.log_weights(scores), tau_plus=0.1)
    with torch.no_grad():
        ours = loss.diagnose(z1, z2, labels=LABELS)
    for field, value in vars(expected).items():
        torch.testing.assert_close(getattr(ours, field), value, equal_nan=True)
    assert (ours.attracted.sum() > 0) == (text == "Tilt(2.0)")


def test_views_that_are_arrays_are_named():
    views = torch.randn(2, 8, 4).numpy()
    for given in (views, (views[0], views[1])):
        with raises(ArgumentError, who="ContrastiveLoss", what="are tensors", got="ndarray", fix="as_tensor"):
            hn.ContrastiveLoss("Tilt(1.0)")(*given)
