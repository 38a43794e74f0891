"""The streamed loss equals the dense one, value and gradient, in any split into tiles."""

import itertools

import pytest
import torch
from torch.nn.functional import normalize

import hardneg as hn
from hardneg.core.bounds import Largest
from hardneg.core.errors import ArgumentError
from hardneg.core.objectives import JSD, RINCE, Function, InfoNCE, Sigmoid, Surrogate, reduce
from hardneg.core.pairing import Pairing
from hardneg.core.scoring import dense
from hardneg.negatives import Negatives, Product, parse
from support.errors import raises
from support.grids import grid
from support.streamed import streamed

TILES = [(5, 3), (4, 100), (100, 7), (100, 100)]


def pairing(seed=0, exact=False, private=True, empty=False, **options):
    """Two pools, one private, ids in common, labels, two clusterings, several positives, a guide."""
    random = torch.Generator().manual_seed(seed)

    def vectors(*shape):
        if exact:  # products are whole numbers: many ties, and the same bits in any split
            return torch.randint(-2, 3, (*shape, 4), generator=random).double().requires_grad_()
        return normalize(torch.randn(*shape, 4, generator=random, dtype=torch.float64), dim=-1).requires_grad_()

    def whole(*shape, high=3):
        return torch.randint(0, high, shape, generator=random)

    b, n, k = 9, (0 if empty else 13), (0 if empty else 4)
    anchors = hn.Keys(vectors(b), torch.arange(b), whole(b), whole(b, 2))
    pools = [hn.Keys(vectors(n), whole(n, high=20), whole(n), whole(n, 2), source="batch")]
    if private:
        pools.append(hn.Keys(vectors(b, k), whole(b, k, high=20), whole(b, k), whole(b, k, 2), source="mined"))
    positives = hn.Keys(vectors(b, 2), whole(b, 2, high=20))
    mask = torch.rand(b, 2, generator=random) < 0.8
    made = Pairing(anchors, positives, tuple(pools), 0.5, mask, **options)
    other = [hn.Keys(vectors(*keys.vectors.shape[:-1])) for keys in (anchors, positives, *pools)]
    return made.guided(Pairing(other[0], other[1], tuple(other[2:]), 1.0))


def leaves(made):
    return [made.anchors.vectors, made.positives.vectors, *(keys.vectors for keys in made.candidates)]


def gradients(loss, inputs):
    upstream = torch.linspace(0.5, 2.0, loss.numel(), dtype=loss.dtype).view(loss.shape)
    return torch.autograd.grad(loss, inputs, upstream, materialize_grads=True)


def assert_dense(made, negatives, objective=InfoNCE(), reduction="none", tiles=TILES, extra=(), tolerance=1e-12):
    inputs = [*leaves(made), *extra]
    scores = dense(made)
    expected = reduce(objective.losses(scores, negatives.log_weights(scores)), scores, reduction)
    wanted = gradients(expected, inputs) if expected.requires_grad else None
    for tile in tiles:
        found = streamed(made, negatives, objective, reduction, tile).loss
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        if wanted is not None:
            for mine, theirs in zip(gradients(found, inputs), wanted, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def examples():
    ours = [cls for cls in hn.registered_negatives().values() if cls.__module__.startswith("hardneg.")]
    texts = [text for cls in ours for text in (cls.examples or (f"{cls.__name__}()",))]
    return [*texts, *GUIDED]


GUIDED = [
    "Tilt(1.0, by='guide')",
    "ClippedTilt(2.0, by='guide')",
    "Threshold(0.1, by='guide')",
    "Ring(0.2, 0.7, by='guide')",
    "Rank(1, 5, by='guide')",
    "Hardening('sigmoid', 2.0, by='guide')",
    "BelowPositive(absolute=0.0, by='guide')",
    "Tilt(2.0, source='mined')",
]


@grid("text, label_positives", examples(), [False, True], strength=1)
def test_every_distribution(text, label_positives):
    assert_dense(pairing(label_positives=label_positives), parse(text))
    if "mined" not in text:
        assert_dense(pairing(label_positives=label_positives, private=False, seed=3), parse(text), reduction="pairs")


@pytest.mark.filterwarnings("ignore::hardneg.core.errors.HardnegWarning")
def test_every_product_of_two():
    shortest = [cls.examples[-1] if cls.examples else f"{name}()" for name, cls in hn.registered_negatives().items()
                if cls.__module__.startswith("hardneg.")]  # fmt: skip
    made = pairing()
    for first, second in itertools.product(shortest, repeat=2):
        assert_dense(made, parse(f"{first} * {second}"), tiles=[(5, 3)])


TRIPLES = [
    "OtherLabel() * Ring(0.1, 0.8) * Tilt(1.0)",
    "Ring(0.0, 0.8) * ClippedTilt(2.0) * Rank(1, 6)",
    "ClippedTilt(2.0) * OtherLabel() * Rank(0, 4)",
    "BelowPositive(0.05) * Rank(1, 8) * Tilt(2.0)",
    "Threshold(-0.5) * Ring(0.2, 0.9) * OtherCluster()",
    "From('batch') * Rank(0, 6) * Hardening('sigmoid', 2.0)",
    "SameCluster() * Tilt(0.5) * Ring(0.0, 0.6, by='guide')",
    "Rank(0, 12) * Rank(1, 9) * Rank(1, 4)",
    "Tilt(1.0) * ClippedTilt(1.0) * Tilt(0.5, detach=True)",
    "Ring(0.1, 0.9) * BelowPositive(absolute=-0.1, by='guide') * Ring(0.1, 0.9, at_least=2)",
]


@pytest.mark.parametrize("text", TRIPLES)
@pytest.mark.filterwarnings("ignore::hardneg.core.errors.HardnegWarning")
def test_products_of_three(text):
    for seed in range(3):
        assert_dense(pairing(seed=seed), parse(text), tiles=[(5, 3), (3, 5)])


@grid("text, seed", [*examples(), *TRIPLES], range(3), strength=1)
@pytest.mark.filterwarnings("ignore::hardneg.core.errors.HardnegWarning")
def test_ties_are_exact_in_any_split(text, seed):
    assert_dense(pairing(seed=seed, exact=True), parse(text), tiles=[(5, 3), (2, 1), (100, 100)])


OBJECTIVES = [
    InfoNCE(tau_plus=0.1),
    InfoNCE("candidates", 0.05),
    InfoNCE("mass"),
    InfoNCE(17, 0.1, "none"),
    InfoNCE("support", 0.0, "none"),
    InfoNCE("support", 0.1, "all"),
    InfoNCE(torch.arange(1, 10).double()),
    JSD(),
    JSD(0.3),
    Sigmoid(-1.0),
    Sigmoid(0.5, "mass"),
    Surrogate(),
    Surrogate(torch.linspace(-1, 2, 9).double()),
    RINCE(),
    Function(lambda positive, row: row.log_mean - positive + 0.1 * row.support),
]


@grid("number, label_positives, reduction", range(len(OBJECTIVES)), [False, True], ["none", "anchors", "pairs"])
def test_every_objective(number, label_positives, reduction):
    objective = OBJECTIVES[number]
    for text in ("Tilt(1.5)", "OtherLabel() * Rank(0, 5)", "Uniform()"):
        assert_dense(
            pairing(label_positives=label_positives), parse(text), objective, reduction, tiles=[(5, 3), (100, 4)]
        )


def test_label_positives_that_stay_negatives():
    assert_dense(pairing(label_positives=True, same_label_negatives=True), parse("Tilt(1.0)"), InfoNCE(tau_plus=0.1))


@pytest.mark.parametrize("text", ["Uniform()", "Tilt(1.0)", "Ring(0.1, 0.5)", "Rank(0, 3)", "ClippedTilt(1.0)"])
def test_empty_pools(text):
    assert_dense(pairing(empty=True), parse(text))
    assert_dense(pairing(empty=True, label_positives=True), parse(text), InfoNCE("support", 0.0, "all"))


def test_tensors_with_a_gradient():
    beta = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    per_anchor_beta = torch.linspace(0.5, 2.0, 9, dtype=torch.float64)[:, None].requires_grad_()
    temperature = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    temperatures = torch.linspace(0.2, 1.0, 9, dtype=torch.float64)[:, None].requires_grad_()
    bias = torch.tensor(-0.7, dtype=torch.float64, requires_grad=True)
    tau_plus = torch.linspace(0.01, 0.2, 9, dtype=torch.float64)[:, None].requires_grad_()
    for label_positives in (False, True):
        made = pairing(label_positives=label_positives)
        for each in (temperature, temperatures):
            other = Pairing(*(getattr(made, name) for name in ("anchors", "positives", "candidates")), each,
                            made.positive_mask, label_positives=label_positives)  # fmt: skip
            assert_dense(other, hn.Tilt(beta), InfoNCE(tau_plus=0.1), extra=[each, beta])
            assert_dense(
                other, hn.Tilt(per_anchor_beta), InfoNCE(tau_plus=tau_plus), extra=[each, per_anchor_beta, tau_plus]
            )
            assert_dense(other, parse("Rank(0, 9) * ClippedTilt(2.0)"), Sigmoid(bias), extra=[each, bias])


def test_temperature_close_to_zero_loses_no_digits():
    """Two plain log-sum-exps would: the weights reach 5000."""
    made = pairing()

    def plain(dtype):
        parts = (made.anchors, made.positives, made.candidates[0])
        anchors, positives, pool = (hn.Keys(keys.vectors.detach().float().to(dtype), keys.ids) for keys in parts)
        return Pairing(anchors, positives, (pool,), 0.01)

    narrow, wide = plain(torch.float32), plain(torch.float64)
    for tile in TILES:
        found = streamed(narrow, hn.Tilt(50.0), InfoNCE(), "none", tile).loss
        exact = streamed(wide, hn.Tilt(50.0), InfoNCE(), "none", tile)[0]
        torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=1e-4)


class DenseOnly(Negatives):
    """At least 0.1 below the closest, written for whole rows."""

    textual = False

    def log_weights(self, scores):
        closest = scores.candidates.masked_fill(~scores.valid, hn.NEVER).amax(-1, keepdim=True)
        return hn.negatives.keep(scores, scores.candidates <= closest - scores.tempered(0.1))


class BelowClosest(Negatives):
    """The same with a declared reduction."""

    textual = False

    def bounds(self):
        return {"closest": Largest(lambda tile: tile.s)}

    def log_weight(self, tile):
        return tile.keep(~(tile.s > tile.bound["closest"] - tile.tempered(0.1)))


def test_a_declared_reduction_streams_and_a_dense_only_class_is_refused_by_name():
    made = pairing()
    for product in (
        BelowClosest(),
        Product((BelowClosest(), hn.BelowPositive(0.05))),
        hn.OtherLabel() * BelowClosest(),
    ):
        assert_dense(made, product)
    scores = dense(made)
    both = [
        Product((hn.OtherLabel(), each, hn.Tilt(1.0))).log_weights(scores) for each in (DenseOnly(), BelowClosest())
    ]
    torch.testing.assert_close(*both)
    with raises(ArgumentError, who="DenseOnly", what="impl='streamed')", fix="log_weight(tile)"):
        streamed(made, hn.OtherLabel() * DenseOnly(), InfoNCE())


@pytest.mark.parametrize("text", ["Tilt(1.0)", "Ring(0.1, 0.7) * Tilt(1.0)"])
def test_gradcheck(text):
    made = pairing(label_positives=True)
    made = made.changed(guide=None)

    def loss(anchors, pool):
        keys = made.anchors.changed(vectors=anchors), made.candidates[0].changed(vectors=pool)
        changed = made.changed(anchors=keys[0], candidates=(keys[1],))
        return streamed(changed, parse(text), InfoNCE(tau_plus=0.1), "none", (5, 4)).loss

    assert torch.autograd.gradcheck(loss, (made.anchors.vectors, made.candidates[0].vectors))


def test_nan_is_shown():
    made = pairing()
    made.candidates[0].vectors.data[3, 1] = torch.nan
    for text in ("Uniform()", "Ring(0.2, 0.5)", "Threshold(0.9)", "OtherLabel() * Tilt(1.0)"):
        found = streamed(made, parse(text), InfoNCE(), "none", (5, 3))[0]
        scores = dense(made)
        expected = reduce(InfoNCE().losses(scores, parse(text).log_weights(scores)), scores, "none")
        assert torch.equal(found.isnan(), expected.isnan())
        assert found.isnan().any()


@pytest.mark.parametrize(("anchors", "queue"), [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_anchors_and_a_queue_of_two_precisions(anchors, queue):
    random = torch.Generator().manual_seed(0)
    views = [torch.randn(8, 4, generator=random).to(anchors) for _ in range(2)]
    pool = normalize(torch.randn(20, 4, generator=random), dim=1).to(queue)
    found = {}
    for impl in ("dense", "streamed"):
        z1, z2 = (each.clone().requires_grad_() for each in views)
        value = hn.ContrastiveLoss("Tilt(1.0)", impl=impl, views="pool")(z1, z2, pool=pool)
        value.backward()
        found[impl] = value.detach(), z1.grad, z2.grad
    torch.testing.assert_close(found["streamed"], found["dense"])
