"""Properties of every distribution, on random small scores."""

import itertools
import warnings
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hardneg as hn
from hardneg.core.errors import HardnegWarning
from hardneg.core.schedules import Schedule
from hardneg.core.types import Tags

small = settings(max_examples=40, deadline=None, derandomize=True)

seeds = st.integers(0, 10_000)
fractions = st.floats(0.0, 1.0)
reals = st.floats(-1e3, 1e3, allow_subnormal=False)
whole = st.integers(1, 1000)
maybe_whole = st.none() | whole
names = st.sampled_from(["batch", "queue", "mined", "it's", 'a "b"'])


def schedules(values):
    return st.one_of(
        st.builds(hn.schedules.constant, values),
        st.builds(hn.schedules.linear, values, values, maybe_whole, st.booleans()),
        st.builds(hn.schedules.cosine, values, values, maybe_whole),
        st.builds(hn.schedules.steps, values, values, whole, maybe_whole, st.sampled_from(["paper", "code"])),
        st.builds(hn.schedules.exponential, values, values, st.floats(0, 9), maybe_whole),
        st.builds(hn.schedules.adaptive, values, values, fractions),
    )


def numbers(values):
    return values | schedules(values)


positive = st.floats(0.0, 50.0)
BUILT = {
    "Tilt": st.builds(hn.Tilt, numbers(positive), st.booleans(), st.none() | names),
    "ClippedTilt": st.builds(hn.negatives.ClippedTilt, numbers(positive), st.floats(0.1, 9.0), st.booleans()),
    "Threshold": st.builds(hn.Threshold, numbers(reals)),
    "Ring": st.builds(hn.Ring, numbers(st.floats(0.0, 0.4)), numbers(st.floats(0.5, 1.0)), st.booleans()),
    "Rank": whole.flatmap(lambda start: st.builds(hn.Rank, st.just(start), st.none() | st.integers(start + 1, 2000))),
    "BelowPositive": st.builds(hn.BelowPositive, numbers(st.floats(-1e3, 1.0)), st.none() | numbers(reals)),
    "From": st.builds(hn.From, names),
    "Hardening": st.builds(
        hn.Hardening, st.sampled_from(["exponential", "threshold", "sigmoid"]), numbers(st.floats(0.0, 20.0))
    ),
}


def example_of(name):
    cls = hn.registered_negatives()[name]
    return st.sampled_from([hn.parse(text) for text in cls.examples or (f"{name}()",)])


distributions = st.one_of(
    [
        BUILT[name] if name in BUILT else example_of(name)
        for name, cls in sorted(hn.registered_negatives().items())
        if cls.__module__.startswith("hardneg.")
    ]
)


@st.composite
def products(draw):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HardnegWarning)
        factors = draw(st.lists(distributions, min_size=1, max_size=4))
        product = factors[0]
        for factor in factors[1:]:
            product = product * factor
    return product


def random_scores(seed, b=4, n=9):
    """Everything that a distribution may read: labels, two clusterings, two sources, two positives."""
    random = torch.Generator().manual_seed(seed)
    vectors = torch.nn.functional.normalize(torch.randn(b * 3 + n, 4, generator=random, dtype=torch.float64), dim=-1)
    anchors, own, pool = vectors[:b], vectors[b : 3 * b].view(b, 2, 4), vectors[3 * b :]

    def tags(count):
        return (
            torch.randint(12, (count,), generator=random),
            torch.randint(3, (count,), generator=random),
            torch.randint(3, (count, 2), generator=random),
        )

    half = n // 2
    ids, labels, clusters = tags(n)
    parts = [
        hn.Keys(pool[part], ids[part], labels[part], clusters[part], source=name)
        for part, name in ((slice(half), "batch"), (slice(half, n), "queue"))
    ]
    return hn.score(hn.Keys(anchors, *tags(b)), own, parts, 0.4)


def with_columns(scores, index):
    tags = scores.candidate_tags
    return replace(
        scores,
        candidates=scores.candidates[:, index],
        valid=scores.valid[:, index],
        candidate_tags=Tags(tags.ids[:, index], tags.labels[:, index], tags.clusters[:, index]),
        source=scores.source[index],
    )


EXAMPLES = [
    text
    for name, cls in sorted(hn.registered_negatives().items())
    if cls.__module__.startswith("hardneg.negatives")
    for text in cls.examples or (f"{name}()",)
]
EXAMPLES += ["OtherLabel() * Tilt(1.0) * Ring(0.1, 0.7)", "Threshold(-0.5) * Rank(1, 4) * Tilt(2.0, detach=True)"]
some_negatives = st.sampled_from([hn.parse(text) for text in EXAMPLES])


@small
@given(seeds, some_negatives, st.integers(1, 5))
def test_invalid_candidates_change_nothing(seed, q, extra):
    scores = random_scores(seed)
    random = torch.Generator().manual_seed(seed)
    index = torch.cat([torch.arange(9), torch.randint(9, (extra,), generator=random)])
    order = index[torch.randperm(9 + extra, generator=random)]
    junk = torch.tensor([(order[:j] == order[j]).any().item() for j in range(9 + extra)])  # a candidate's second copy
    more = with_columns(scores, order)
    strange = 100 * torch.randn(4, 9 + extra, generator=random, dtype=torch.float64)
    more = replace(more, candidates=torch.where(junk, strange, more.candidates), valid=more.valid & ~junk)
    log_w, other = q.log_weights(scores), q.log_weights(more)
    assert (other[:, junk] == hn.NEVER).all()
    assert torch.equal(other[:, ~junk], log_w[:, order[~junk]])
    for options in ({}, {"tau_plus": 0.1}, {"num_negatives": "mass"}):
        torch.testing.assert_close(hn.info_nce(more, other, **options), hn.info_nce(scores, log_w, **options))


@small
@given(seeds, some_negatives)
def test_the_order_of_candidates_is_irrelevant(seed, q):
    scores = random_scores(seed)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    log_w, other = q.log_weights(scores), q.log_weights(with_columns(scores, order))
    assert torch.equal(other, log_w[:, order])
    torch.testing.assert_close(hn.info_nce(with_columns(scores, order), other), hn.info_nce(scores, log_w))


@small
@given(seeds, st.lists(st.floats(0.0, 30.0), min_size=2, max_size=5), st.sampled_from(["", "Threshold(0.0) * "]))
def test_hardness_and_loss_grow_with_beta(seed, betas, before):
    scores = random_scores(seed)
    found = []
    for beta in sorted(betas):
        log_w = hn.parse(f"{before}Tilt({beta!r})").log_weights(scores)
        found.append((hn.diagnose(scores, log_w).hardness.nan_to_num(), hn.info_nce(scores, log_w)))
    for (softer, less), (harder, more) in itertools.pairwise(found):
        assert (harder >= softer - 1e-12).all()
        assert (more >= less - 1e-12).all()


@small
@given(seeds, st.floats(0.0, 0.99), st.lists(st.floats(0.01, 1.0), min_size=2, max_size=5), st.integers(0, 30))
def test_rings_are_nested_as_the_outer_edge_grows(seed, share, outers, n):
    scores = random_scores(seed, n=n)
    kept = [hn.Ring(share * min(outers), outer).log_weights(scores) == 0 for outer in sorted(outers)]
    for smaller, larger in itertools.pairwise(kept):
        assert (larger | ~smaller).all()


@small
@given(seeds, st.floats(0.0, 1.0, exclude_min=True, exclude_max=True), st.integers(1, 30))
def test_a_ring_and_its_complement_are_everything(seed, edge, n):
    scores = random_scores(seed, n=n)
    near, far = hn.Ring(0.0, edge).log_weights(scores) == 0, hn.Ring(edge, 1.0).log_weights(scores) == 0
    assert torch.equal(near ^ far, scores.valid)
    for i in range(4):
        if near[i].any() and far[i].any():
            assert scores.candidates[i][near[i]].min() >= scores.candidates[i][far[i]].max()


@settings(small, max_examples=200)
@given(products())
def test_what_is_written_is_read_back(q):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HardnegWarning)
        assert hn.parse(repr(q)) == q
        assert hn.negatives.to_text(q) == repr(q)


@small
@given(products(), st.integers(0, 100), st.integers(1, 100))
def test_at_leaves_no_schedule(q, step, total):
    now = q.at(step, total)
    assert now.schedules() == []
    assert len(now.factors) == len(q.factors)
    for before, after in zip(q.factors, now.factors, strict=True):
        for field, value in vars(before).items():
            if isinstance(value, Schedule):
                assert getattr(after, field) == value(step, total)
            elif not field.startswith("_"):
                assert getattr(after, field) == value
    assert now.at(step, total) == now


@small
@given(seeds, some_negatives, st.floats(-50.0, 50.0))
def test_a_constant_per_row_changes_nothing_but_the_mass(seed, q, size):
    scores = random_scores(seed)
    shift = size * torch.rand(4, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    log_w = q.log_weights(scores)
    for objective in (
        hn.info_nce,
        hn.jsd,
        hn.surrogate,
        hn.sigmoid,
        lambda s, w: hn.info_nce(s, w, tau_plus=0.1, num_negatives=5),
        lambda s, w: hn.info_nce(s, w, num_negatives="candidates", positives_in_denominator="all"),
    ):
        torch.testing.assert_close(objective(scores, log_w + shift), objective(scores, log_w), rtol=1e-9, atol=1e-9)
    mass = hn.info_nce(scores, log_w, num_negatives="mass", positives_in_denominator="none")
    shifted = hn.info_nce(scores, log_w + shift, num_negatives="mass", positives_in_denominator="none")
    some = (log_w != hn.NEVER).any(-1, keepdim=True)
    torch.testing.assert_close(shifted, torch.where(some, mass + shift, mass), rtol=1e-9, atol=1e-9)


@small
@given(seeds, some_negatives, st.integers(1, 12), st.sampled_from(["categorical", "gumbel"]))
def test_draws_stay_in_the_support(seed, q, k, method):
    log_w = q.log_weights(random_scores(seed))
    drawn = hn.draw(log_w, k, torch.Generator().manual_seed(seed), method)
    assert drawn.shape == (4, k)
    for row, weights in zip(drawn.tolist(), log_w, strict=True):
        support = (weights != hn.NEVER).nonzero().flatten().tolist()
        taken = [j for j in row if j >= 0]
        assert set(taken) <= set(support)
        if method == "gumbel":
            assert len(set(taken)) == len(taken) == min(k, len(support))
            assert row == taken + [-1] * (k - len(taken))
        else:
            assert len(taken) == (k if support else 0)
