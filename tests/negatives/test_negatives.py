"""Scores and the weights of every distribution against loops, value and gradient."""

import math
import warnings
from dataclasses import replace

import pytest
import torch

import hardneg as hn
import support.brute_force as loops
from hardneg.core.errors import ArgumentError, forget_warnings
from hardneg.core.schedules import linear
from hardneg.negatives import ClippedTilt, Product
from support.errors import raises, warns

EVERYWHERE = [
    "Uniform()",
    "Tilt(0.0)",
    "Tilt(1.7)",
    "Tilt(3.0, detach=True)",
    "ClippedTilt(1.5)",
    "ClippedTilt(4.0, bound=0.5, detach=True)",
    "Threshold(-0.2)",
    "Threshold(0.3)",
    "Threshold('mean')",
    "Ring()",
    "Ring(0.2, 0.7)",
    "Ring(0.34, 0.5)",
    "Ring(0.0, 0.3)",
    "Ring(0.5, 1.0)",
    "Ring(0.4, 0.8, dynamic_inner=True)",
    "Rank()",
    "Rank(0, 3)",
    "Rank(2, 5)",
    "Rank(4)",
    "Rank(20)",
    "BelowPositive(0.3)",
    "BelowPositive(-0.4)",
    "BelowPositive(absolute=0.1)",
    "BelowPositive(absolute=-0.2)",
    "BelowPositive(0.2, absolute=0.15)",
    'Hardening("exponential", 2.0)',
    'Hardening("threshold", 0.9)',
    'Hardening("threshold", 0.0)',
    'Hardening("sigmoid", 3.0)',
    "Threshold(-0.1) * Tilt(2.0)",
    "Threshold(-0.3) * Ring(0.25, 0.75)",
    "Ring(0.0, 0.8) * Threshold('mean') * Tilt(1.0)",
    "Threshold('mean') * Threshold('mean')",
    "Ring(0.0, 0.6) * Tilt(1.0)",
    "Ring(0.0, 0.8) * Rank(1, 4)",
    "Tilt(1.0) * Tilt(0.5, detach=True) * BelowPositive(0.1)",
]
ORDER_MATTERS = ["Ring(0.2, 0.7) * Threshold(0.1)", "Rank(1, 6) * BelowPositive(absolute=0.05) * Tilt(1.0)"]
LABELLED = [
    "OtherLabel()",
    "OtherLabel() * Threshold('mean')",
    "OtherLabel() * Tilt(1.0)",
    "OtherLabel() * Ring(0.1, 0.7)",
]
CLUSTERED = ["SameCluster()", "OtherCluster()", "SameCluster() * Rank(0, 2)", "OtherCluster() * ClippedTilt(1.0)"]
SOURCES = [
    'From("mined")',
    'Tilt(2.0, source="mined")',
    'Tilt(1.0, detach=True, source="queue") * Ring(0.0, 0.5)',
    'From("queue") * Ring(0.2, 0.9)',
]


@pytest.mark.parametrize("name", loops.CASES)
def test_who_is_compared_with_whom(name):
    case = loops.CASES[name]()
    scores, rows = case.scores, case.rows
    assert scores.valid.tolist() == [row.valid for row in rows]
    assert scores.positive_valid.tolist() == [[a is not None for a in row.positives] for row in rows]
    names = [scores.source_names[code] for code in scores.source.tolist()]
    assert all(names == [item.source for item in row.candidates] for row in rows)
    loops.assert_agree(scores.candidates, torch.stack([torch.stack(row.scores) for row in rows]), case.leaves)
    real = scores.positives[scores.positive_valid]
    loops.assert_agree(real, torch.stack([a for row in rows for a in row.positives if a is not None]), case.leaves)


def assert_same_weights(q, case):
    table = loops.weights(q, case.rows)
    log_w = q.log_weights(case.scores)
    assert (log_w != hn.NEVER).tolist() == [[w is not None for w in line] for line in table]
    ours = log_w[log_w != hn.NEVER]
    loop = torch.stack([torch.as_tensor(w, dtype=torch.float64).log() for line in table for w in line if w is not None])
    if not loop.requires_grad:  # a mask, or detached: no gradient may be there at all
        assert not ours.requires_grad or not any(g.any() for g in gradients_of(ours.sum(), case.leaves))
        torch.testing.assert_close(ours, loop, rtol=1e-9, atol=1e-12)
    else:
        loops.assert_agree(ours, loop, case.leaves)


def gradients_of(value, leaves):
    return torch.autograd.grad(value, leaves, retain_graph=True, materialize_grads=True)


@pytest.mark.parametrize("text", EVERYWHERE)
@pytest.mark.parametrize("name", ["two views, ids and labels", "several pools", "several positives"])
def test_weights(text, name):
    q, case = hn.parse(text), loops.CASES[name]()
    if any(w is not None for line in loops.weights(q, case.rows) for w in line):
        assert_same_weights(q, case)
    else:
        assert (q.log_weights(case.scores) == hn.NEVER).all()


@pytest.mark.parametrize("text", ORDER_MATTERS)
@pytest.mark.filterwarnings("ignore::hardneg.core.errors.HardnegWarning")
def test_weights_of_a_mask_after_a_rank(text):
    q = hn.parse(text)
    for name in ("two views", "several positives"):
        assert_same_weights(q, loops.CASES[name]())


@pytest.mark.parametrize("text", LABELLED)
def test_weights_by_label(text):
    for name in ("two views, ids and labels", "positives of the label", "several positives"):
        assert_same_weights(hn.parse(text), loops.CASES[name]())


@pytest.mark.parametrize("text", CLUSTERED)
@pytest.mark.parametrize("name", ["two views, ids and labels", "several positives"], ids=["one", "two clusterings"])
def test_weights_by_cluster(text, name):
    assert_same_weights(hn.parse(text), loops.CASES[name]())


@pytest.mark.parametrize("text", SOURCES)
def test_weights_by_source(text):
    for name in ("several pools", "several positives"):
        assert_same_weights(hn.parse(text), loops.CASES[name]())


@pytest.mark.parametrize(
    "log_eta",
    [lambda s: 2.0 * s, lambda s: s.clamp(min=0.0), lambda s: torch.where(s < -0.5, hn.NEVER, torch.sinh(s / 3))],
)
def test_weights_of_a_function(log_eta):
    for name in ("two views", "several positives"):
        assert_same_weights(hn.Hardening(log_eta), loops.CASES[name]())


def test_ring_edges_are_computed_in_float64():
    """int(0.29 * 100 + 1e-9) is 29; also with inner as a fraction of the outer set."""
    q = hn.Ring(0.29, 0.57)
    z = torch.randn(3, 4, dtype=torch.float64)
    for size in (100, 200, 300):
        scores = hn.score(z, z, torch.randn(size, 4, dtype=torch.float64), 0.5)
        kept = (q.log_weights(scores) == 0).sum(-1)
        assert kept.tolist() == [int(0.57 * size + 1e-9) - int(0.29 * size + 1e-9)] * 3


@pytest.mark.parametrize(("inner", "outer", "size"), [(0.29, 1.0, 100), (0.57, 0.5, 200), (0.58, 1.0, 50)])
def test_dynamic_ring_edges_are_computed_in_float64(inner, outer, size):
    z = torch.randn(3, 4, dtype=torch.float64)
    scores = hn.score(z, z, torch.randn(size, 4, dtype=torch.float64), 0.5)
    kept = (hn.Ring(inner, outer, dynamic_inner=True).log_weights(scores) == 0).sum(-1)
    stop = int(outer * size)
    assert kept.tolist() == [stop - int(inner * stop + 1e-9)] * 3


@pytest.mark.parametrize(
    "text", ["Ring(0.2, 0.7)", "Ring(0.0, 0.3)", "Ring(0.1, 0.9, dynamic_inner=True)", "Rank(1, 9)"]
)
def test_rows_with_different_valid_counts(text):
    """Forty candidates of which every row may use another number, down to none."""
    generator = torch.Generator().manual_seed(5)
    similarity = torch.randn(12, 40, generator=generator, dtype=torch.float64)
    share = torch.linspace(0, 1, 12, dtype=torch.float64)[:, None]
    valid = torch.rand(12, 40, generator=generator, dtype=torch.float64) < share
    scores = hn.from_matrix(similarity, torch.zeros(12, 40, dtype=torch.bool), valid=valid)
    log_w = hn.parse(text).log_weights(scores)
    for i in range(12):
        row = loops.Row(loops.Item(similarity[i]), [], [], list(similarity[i]), [], 1.0)
        expected = loops.ranked(hn.parse(text), row, valid[i].tolist())
        assert (log_w[i] == 0).tolist() == [w is not None for w in expected]


def test_threshold_is_inclusive_and_in_plain_similarity():
    z = torch.tensor([[1.0, 0.0]])
    pool = torch.tensor([[0.3, 0.0], [0.29999, 0.0], [0.30001, 0.0]])
    for temperature in (0.07, 0.1, 0.5, 1.0, 3.0):
        scores = hn.score(z, z, pool, temperature)
        assert hn.Threshold(pool[0, 0].item()).log_weights(scores).tolist() == [[0.0, hn.NEVER, 0.0]]


def test_threshold_of_the_mean_keeps_negatives_at_least_as_hard_as_the_mean():
    """E[e^g] over H-UCL(tau(x, f)) >= E[e^g] over all (Jiang et al. 2024), and equal candidates all stay."""
    scores = hn.score(torch.eye(3, dtype=torch.float64), torch.eye(3), torch.randn(50, 3, dtype=torch.float64), 0.2)
    harder, plain = (
        hn.core.statistics.log_expect_exp(scores.candidates, q.log_weights(scores))
        for q in (hn.Threshold("mean"), hn.Uniform())
    )
    assert (harder >= plain).all()
    equal = hn.score(torch.ones(2, 1), torch.ones(2, 1), torch.full((997, 1), 0.1), 0.03)
    assert (hn.Threshold("mean").log_weights(equal) == 0.0).all()


def test_threshold_of_the_mean_reads_back_and_refuses_other_words():
    q = hn.Threshold("mean", by="guide")
    assert hn.parse(repr(q)) == q
    assert hn.parse("Threshold('mean')") != hn.Threshold(0.0)
    with pytest.raises(ArgumentError) as error:
        hn.Threshold("median")
    assert error.value.got == "similarity='median'"


def test_mask_after_rank_says_once_that_order_matters():
    forget_warnings()
    with warns("order", "OtherLabel") as caught:
        _ = [hn.Ring(0.0, 0.5) * hn.OtherLabel() for _ in range(3)]
    assert len(caught) == 1
    with warns("order"):
        hn.parse("Tilt(1.0) * Rank(0, 5) * Tilt(2.0) * Threshold(0.0)")


def test_no_warning_where_order_does_not_matter():
    with warnings.catch_warnings(record=True) as caught:
        for text in ("OtherLabel() * Ring(0.0, 0.5)", "Ring(0.0, 0.5) * Tilt(1.0)", "OtherLabel() * Threshold(0.1)"):
            hn.parse(text)
    assert not caught


def test_bracketed_products_warn_of_their_order_too():
    forget_warnings()
    with warns("order", "OtherLabel"):
        hn.Ring(0.0, 0.5) * (hn.OtherLabel() * hn.Tilt(1.0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hn.Tilt(-1.0), r"Tilt needs beta in \[0.0, inf\), got beta=-1.0"),
        (lambda: hn.Tilt(math.nan), "Tilt needs beta"),
        (lambda: hn.Tilt(math.inf), "Tilt needs beta"),
        (lambda: hn.Tilt(True), "Tilt needs a number, got beta=True"),
        (lambda: hn.Tilt(None), "Tilt needs a number, got beta=None"),
        (lambda: hn.negatives.ClippedTilt(1.0, bound=-1.0), "ClippedTilt needs bound"),
        (lambda: hn.Ring(-0.1), "Ring needs inner"),
        (lambda: hn.Ring(0.0, 1.1), "Ring needs outer"),
        (lambda: hn.Ring(0.5, 0.1), "Ring needs an inner below its outer"),
        (lambda: hn.Ring(0.5, 0.5), "Ring needs an inner below its outer"),
        (lambda: hn.parse("Ring(0.5, 0.1)"), "Ring needs an inner below its outer"),
        (lambda: hn.Ring(0.0, 0.0, dynamic_inner=True), "Ring needs an outer above 0"),
        (lambda: hn.Ring(1.0, 0.5, dynamic_inner=True), "Ring needs an outer above 0 and an inner below 1"),
        (lambda: hn.Rank(-1), "Rank needs start of 0 or more, got start=-1"),
        (lambda: hn.Rank(3, 3), "Rank needs a stop above start=3, got stop=3"),
        (lambda: hn.BelowPositive(), "BelowPositive needs relative or absolute"),
        (lambda: hn.Threshold(math.nan), "Threshold needs similarity"),
        (lambda: hn.Hardening("cubic"), r"Hardening needs a function or one of .*'exponential', .*got log_eta='cubic'"),
        (lambda: hn.Hardening(lambda s: -s), "Hardening needs a non-decreasing eta"),
        (lambda: hn.Hardening(lambda s: torch.where(s > 0, hn.NEVER, 0.0)), "Hardening needs a non-decreasing eta"),
        (lambda: hn.Hardening(lambda s: s.sqrt()), "Hardening needs a log eta that is defined"),
    ],
)
def test_wrong_numbers_are_refused_at_the_door(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("wrong", ["1.0", [1.0], (1.0,), 1j, hn.Uniform()], ids=repr)
def test_what_is_not_a_number_is_refused_at_the_door(wrong):
    with raises(ArgumentError, who="Tilt", what="a number"):
        hn.Tilt(wrong)


@pytest.mark.parametrize(
    ("q", "message"),
    [
        (hn.OtherLabel(), "OtherLabel needs labels of the anchors, got None"),
        (hn.SameCluster(), "SameCluster needs clusters of the anchors, got None"),
        (hn.OtherCluster(), "OtherCluster needs clusters of the anchors, got None"),
        (hn.From("queue"), r"From needs a source among \('batch',\), got source='queue'"),
        (hn.Tilt(1.0, source="queue"), r"Tilt needs a source among \('batch',\), got source='queue'"),
    ],
)
def test_missing_tags_are_named(q, message):
    z = torch.randn(4, 3)
    with pytest.raises(ValueError, match=message):
        q.log_weights(hn.two_views(z, z, 0.5))


def test_labels_of_every_candidate_are_needed():
    z = torch.randn(4, 3)
    scores = hn.two_views(z, z, 0.5, labels=torch.arange(4), extra=torch.randn(2, 3))
    with raises(ArgumentError, who="OtherLabel", what="every candidate", got="None"):
        hn.OtherLabel().log_weights(scores)


@pytest.mark.parametrize(
    "text", ["BelowPositive(absolute=0.0, by='guide')", "BelowPositive(0.3, absolute=-0.1, by='guide')"]
)
@pytest.mark.parametrize("name", ["two views", "several positives", "positives of the label"])
def test_a_guide_judges_by_another_model(text, name):
    """The same pairs under other vectors, at another temperature; the candidates' own scores do not matter."""
    case, q = loops.CASES[name](), hn.parse(text)
    generator = torch.Generator().manual_seed(11)
    guide = [
        torch.randn(x.shape, generator=generator, dtype=torch.float64)
        for x in (case.scores.positives, case.scores.candidates)
    ]
    other = replace(case.scores, positives=guide[0] / 0.2, candidates=guide[1] / 0.2, temperature=0.2)
    log_w = q.log_weights(case.scores.guided(other))
    for i, row in enumerate(case.rows):
        judged = [x for x, a in zip(guide[0][i].tolist(), row.positives, strict=True) if a is not None]
        lowest = min(judged, default=math.inf)
        limit = lowest - (q.absolute or 0.0)
        if q.relative and judged:
            limit = min(limit, lowest - q.relative * abs(lowest))
        expected = [valid and s <= limit for s, valid in zip(guide[1][i].tolist(), row.valid, strict=True)]
        assert (log_w[i] == 0).tolist() == expected
    with raises(ArgumentError, who="BelowPositive", got="by='guide' without a guide"):
        q.log_weights(case.scores)


def test_judged_pairs():
    case = loops.CASES["several pools"]()
    anchors, candidates = torch.tensor([0, 3, 3, 1, 7, 2]), torch.tensor([14, 21, 99, 2, 11, 22])
    values = torch.tensor([hn.NEVER, 0.7, 1.0, -2.0, 3.0, 0.5])
    log_w = (hn.Known(hn.negatives.KnownPairs(anchors, candidates, values)) * hn.Tilt(1.0)).log_weights(case.scores)
    judged = dict(zip(zip(anchors.tolist(), candidates.tolist(), strict=True), values.tolist(), strict=True))
    met = set()
    for i, row in enumerate(case.rows):
        for j, item in enumerate(row.candidates):
            value = judged.get((row.anchor.id, item.id), 0.0) if row.valid[j] else hn.NEVER
            met |= {(row.anchor.id, item.id)} & set(judged)
            assert log_w[i, j].item() == pytest.approx(value + row.scores[j].item() if value != hn.NEVER else hn.NEVER)
    assert len(met) == 4


def test_more_positives_and_blocks_beside_each_other():
    case = loops.CASES["several pools"]()
    mask = torch.rand(case.scores.valid.shape) < 0.3
    more = hn.core.scoring.more_positives(case.scores, mask)
    assert torch.equal(more.valid, case.scores.valid & ~mask)
    assert torch.equal(more.positive_valid[:, 1:], case.scores.valid & mask)
    assert torch.equal(more.positives[:, 1:], case.scores.candidates)

    anchors = hn.Keys(loops.random_keys(1, 5, 3), torch.arange(5), torch.tensor([0, 1, 2, 0, 1]))
    parts = [loops.queue(), loops.mined()]
    one = hn.score(anchors, loops.random_keys(2, 5, 3), parts, 0.4)
    blocks = [hn.score(anchors, loops.random_keys(2, 5, 3), part, 0.4) for part in parts]
    two = hn.core.scoring.concatenate_scores(*blocks)
    for q in ("OtherLabel() * Tilt(1.0)", "From('mined')", "Ring(0.1, 0.6)"):
        log_w = hn.parse(q).log_weights(one)
        assert torch.equal(log_w, hn.parse(q).log_weights(two))
        assert torch.equal(hn.info_nce(one, log_w), hn.info_nce(two, log_w))


def test_a_parameter_beside_a_function_is_refused() -> None:
    with raises(ArgumentError, who="Hardening", got="parameter=2.0"):
        hn.Hardening(lambda score: 2.0 * score, 2.0)


@pytest.mark.filterwarnings("ignore::hardneg.core.errors.HardnegWarning")
def test_a_product_declares_what_its_factors_do():
    bare, ranked = hn.Tilt(1.0) * hn.Uniform(), hn.OtherLabel() * hn.Rank(0, 4)
    assert (bare.looks_around, bare.removes, bare.masks, bare.slope) == (False, False, False, 1.0)
    assert (ranked.looks_around, ranked.removes, ranked.masks, ranked.slope) == (True, True, True, 0.0)
    assert (hn.Tilt(1.0) * hn.Tilt(0.5, detach=True)).slope == 1.5
    assert not (hn.Tilt(1.0) * hn.Tilt(0.5, detach=True)).slope_detached
    assert (hn.OtherLabel() * ClippedTilt(1.0)).batch_scope
    assert (hn.Tilt(1.0) * hn.Threshold(0.2)).monotone
    assert not (hn.OtherLabel() * hn.Threshold(0.2)).monotone
    assert ranked.shown(None) is None
    assert (hn.Tilt(1.0) * hn.Rank(0, 4)).shown(None) == 4
    nested = Product((ranked, hn.Tilt(1.0)))
    assert nested.factors == (*ranked.factors, hn.Tilt(1.0))
    with raises(ArgumentError, who="Product", got="log_weight(tile)"):
        ranked.log_weight(None)


def test_an_annealed_ring_may_become_empty_and_a_grown_one_never_is():
    """Only a ring of plain numbers is refused: a schedule may pass through an empty ring, and at_least fills it."""
    annealed = hn.Ring(0.2, linear(1.0, 0.1))
    assert annealed.at(0, 10) == hn.Ring(0.2, 1.0)
    assert (annealed.at(10, 10).inner, annealed.at(10, 10).outer) == (0.2, 0.1)
    scores = hn.score(torch.eye(4), torch.eye(4), torch.eye(4), 0.5)
    assert (annealed.at(10, 10).log_weights(scores) == hn.NEVER).all()
    assert ((hn.Ring(0.5, 0.1, at_least=2).log_weights(scores) == 0).sum(-1) == 2).all()
