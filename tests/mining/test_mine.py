"""hn.mine against a brute-force oracle: whole rows in float64, the distribution applied to one query at a time."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from hardneg.core.errors import ArgumentError, MiningWarning
from hardneg.core.keyed import uniform_of_pairs
from hardneg.core.types import NEVER, Keys, Scores, Tags
from hardneg.mining import Mined, Search, mine
from hardneg.mining.options import MineOptions
from hardneg.negatives import Negatives, parse
from support.errors import raises
from support.grids import grid

EXPRESSIONS = [
    "Uniform()",
    "Rank(3, 40)",
    "BelowPositive(0.05)",
    "BelowPositive(absolute=0.1) * Rank(2)",
    "Rank(0, 30) * BelowPositive(0.2)",
    "Threshold(0.1) * BelowPositive(absolute=-0.1)",
    "Ring(0.1, 0.4)",
    "Threshold('mean') * Rank(1, 20)",
    "OtherLabel() * Rank(1, 20)",
    "SameCluster() * Tilt(3.0)",
    "OtherLabel() * BelowPositive(0.05, absolute=0.02) * Rank(5, 60) * Tilt(2.0)",
    'Hardening("threshold", 1.2) * Rank(0, 50)',
    "Rank(4) * OtherCluster()",
    "OtherLabel() * Ring(0.0, 0.2) * Rank(2, 9)",
]
QUIET = pytest.mark.filterwarnings("ignore::hardneg.core.errors.HardnegWarning")


def make_data(q: int = 40, n: int = 200, dtype: torch.dtype = torch.float64) -> tuple[Keys, Keys, list[list[int]]]:
    """Clustered unit vectors with labels, ids unlike positions, up to four positives; some queries are documents."""
    random = torch.Generator().manual_seed(3)
    centres = torch.randn(8, 12, generator=random, dtype=torch.float64)
    labels = torch.randint(0, 8, (n,), generator=random)
    vectors = centres[labels] + 0.8 * torch.randn(n, 12, generator=random, dtype=torch.float64)
    ids = 1000 + 7 * torch.randperm(n, generator=random)
    clusters = torch.stack([labels % 3, labels % 2], 1)
    corpus = Keys(normalize(vectors, dim=-1).to(dtype), ids, labels, clusters)
    own = torch.randint(0, n, (q,), generator=random)
    noise = 0.7 * torch.randn(q, 12, generator=random, dtype=torch.float64)
    queries = Keys(
        normalize(vectors[own] + noise, dim=-1).to(dtype),
        torch.where(torch.arange(q) % 3 == 0, ids[own], -1 - torch.arange(q)),
        labels[own],
        clusters[own],
    )
    positives = [[int(ids[(int(own[i]) + j) % n]) for j in range(i % 5)] for i in range(q)]
    return queries, corpus, positives


def oracle(
    queries: Keys,
    corpus: Keys,
    positives: list[list[int]],
    text: str,
    k: int,
    temperature: float = 1.0,
    **guards: float,
) -> list[tuple[list[int], Tensor]]:
    """For each query its support, closest first, and the log-weights of all rows."""
    negatives, out = parse(text), []
    for i in range(len(queries)):
        log_w = _row_weights(negatives, queries, corpus, positives[i], i, temperature, guards.get("near_positive"))
        similarity = corpus.vectors @ queries.vectors[i]
        inside = (log_w != NEVER).tolist()
        order = [row for row in similarity.argsort(descending=True).tolist() if inside[row]]
        if "near_negative" in guards:
            order = _greedy(order, corpus.vectors, guards["near_negative"], k)
        out.append((order, log_w))
    return out


def _row_weights(
    negatives: Negatives, queries: Keys, corpus: Keys, own: list[int], i: int, temperature: float, near: float | None
) -> Tensor:
    n = len(corpus)
    assert corpus.ids is not None
    assert queries.ids is not None
    rows = [corpus.ids.tolist().index(one) for one in own]
    similarity = corpus.vectors @ queries.vectors[i]
    valid = (corpus.ids != queries.ids[i])[None]
    valid[0, rows] = False
    for p in rows if near is not None else []:
        valid &= (corpus.vectors @ corpus.vectors[p]) < near
    positive = similarity[rows][None] if rows else similarity.new_zeros(1, 1)

    def one(tag: Tensor | None) -> Tensor | None:
        return None if tag is None else tag[i : i + 1]

    def all_(tag: Tensor | None) -> Tensor | None:
        return None if tag is None else tag[None]

    scores = Scores(
        positive / temperature,
        similarity[None] / temperature,
        torch.full(positive.shape, bool(rows)),
        valid,
        temperature,
        Tags(one(queries.ids), one(queries.labels), one(queries.clusters)),
        Tags(all_(corpus.ids), all_(corpus.labels), all_(corpus.clusters)),
        torch.zeros(n, dtype=torch.long),
        ("corpus",),
    )
    return negatives.log_weights(scores)[0]


def _greedy(order: list[int], vectors: Tensor, limit: float, k: int) -> list[int]:
    taken: list[int] = []
    for row in order:
        if len(taken) < k and all(float(vectors[row] @ vectors[t]) < limit for t in taken):
            taken.append(row)
    return taken


def rows_of(mined: Mined, i: int) -> list[int]:
    return [int(r) for r in mined.rows[i] if r >= 0]


@QUIET
@pytest.mark.parametrize("text", EXPRESSIONS)
@pytest.mark.parametrize("search", [Search(query_block=16, corpus_block=37), Search(query_block=1000)])
def test_top_equals_the_oracle(text: str, search: Search) -> None:
    queries, corpus, positives = make_data()
    mined = mine(queries, corpus, positives, text, 6, search=search)
    for i, (order, _) in enumerate(oracle(queries, corpus, positives, text, 6)):
        assert rows_of(mined, i) == order[:6], (text, i)
        expected = (corpus.vectors @ queries.vectors[i])[order[:6]]
        torch.testing.assert_close(mined.scores[i, : len(expected)], expected)
        assert (mined.scores[i, len(expected) :] == NEVER).all()
    assert torch.equal(mined.ids >= 0, mined.rows >= 0)
    assert corpus.ids is not None
    assert torch.equal(mined.ids[mined.rows >= 0], corpus.ids[mined.rows[mined.rows >= 0]])


@QUIET
@pytest.mark.parametrize("text", EXPRESSIONS)
def test_gumbel_equals_the_oracle_with_the_same_noise(text: str) -> None:
    queries, corpus, positives = make_data()
    mined = mine(queries, corpus, positives, text, 4, "gumbel", 5, temperature=0.2, search=Search(query_block=32))
    uniforms = uniform_of_pairs(5, torch.arange(len(queries)), torch.arange(len(corpus)).expand(len(queries), -1))
    noise = -torch.log(-torch.log(uniforms))
    for i, (_, log_w) in enumerate(oracle(queries, corpus, positives, text, 4, temperature=0.2)):
        key = log_w.double() + noise[i]
        order = [int(r) for r in key.argsort(descending=True) if key[r] != NEVER]
        assert rows_of(mined, i) == order[:4], (text, i)


@pytest.mark.parametrize("text", ["Tilt(4.0)", "Rank(2, 30) * Tilt(3.0)", "OtherLabel() * Ring(0.1, 0.5) * Tilt(1.0)"])
def test_categorical_draws_have_the_right_shares(text: str) -> None:
    queries, corpus, positives = make_data(q=6, n=60)
    mined = mine(queries, corpus, positives, text, 4000, "categorical", temperature=0.5)
    for i, (_, log_w) in enumerate(oracle(queries, corpus, positives, text, 1, temperature=0.5)):
        share = torch.bincount(mined.rows[i], minlength=len(corpus)).double() / 4000
        q = torch.softmax(log_w, 0)
        assert bool(((share - q).abs() <= 5 * (q * (1 - q) / 4000).sqrt() + 1e-9).all())


@QUIET
@pytest.mark.parametrize("text", ["Uniform()", "Rank(0, 80)", "BelowPositive(0.05)", "Ring(0.0, 0.3)"])
@pytest.mark.parametrize(
    "guards", [{"near_positive": 0.7}, {"near_negative": 0.6}, {"near_positive": 0.8, "near_negative": 0.8}]
)
def test_guards_equal_the_oracle(text: str, guards: dict[str, float]) -> None:
    queries, corpus, positives = make_data()
    mined = mine(queries, corpus, positives, text, 5, search=Search(query_block=25, corpus_block=64), **guards)  # type: ignore[arg-type]
    for i, (order, _) in enumerate(oracle(queries, corpus, positives, text, 5, **guards)):
        assert rows_of(mined, i) == order[:5], (text, i)


RINGS_AFTER_WINDOWS: list[tuple[str, dict[str, float]]] = [
    ("AtMost(0.6) * Rank(0, 15) * Ring(0.5, 1.0)", {}),
    ("OtherLabel() * Rank(0, 18) * Ring(0.5, 1.0)", {}),
    ("Rank(0, 40) * Ring(0.5, 1.0)", {"near_positive": 0.5}),
    ("AtMost(0.6) * Rank(0, 15) * Ring(0.5, 1.0)", {"near_negative": 0.6}),
    ("BelowPositive(0.1) * Rank(0, 15) * Ring(0.2, 0.8) * Rank(1, 5)", {}),
    ("AtMost(0.6) * Rank(5, 15) * Tilt(2.0) * Ring(0.5, 1.0) * OtherCluster()", {}),
]


@QUIET
@grid(
    "case, k, how",
    RINGS_AFTER_WINDOWS,
    [1, 3, 8],
    [{}, {"query_block": 16, "corpus_block": 37}, {"shards": 3, "corpus_block": 32}],
)
def test_a_ring_after_a_window_counts_the_whole_window(
    case: tuple[str, dict[str, float]], k: int, how: dict[str, int]
) -> None:
    text, guards = case
    queries, corpus, positives = make_data(q=60)
    mined = mine(queries, corpus, positives, text, k, search=Search(**how), **guards)  # type: ignore[arg-type]
    expected = [order[:k] for order, _ in oracle(queries, corpus, positives, text, k, **guards)]
    assert [rows_of(mined, i) for i in range(len(queries))] == expected


def test_positives_and_own_ids_are_never_negatives() -> None:
    queries, corpus, positives = make_data()
    mined = mine(queries, corpus, positives, "Uniform()", len(corpus))
    assert queries.ids is not None
    for i, own in enumerate(positives):
        banned = {*own, int(queries.ids[i])}
        assert not banned & set(mined.ids[i].tolist())
        assert len(rows_of(mined, i)) == len(corpus) - len(banned & set(corpus.ids.tolist()))  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:The positives are no closer")  # any rows will do here
def test_shapes_of_positives_agree() -> None:
    queries, corpus, _ = make_data()
    assert corpus.ids is not None
    one = corpus.ids[: len(queries)]
    padded = torch.stack([one, torch.full_like(one, -1)], 1)
    forms = [one, padded, one[:, None].tolist(), one.tolist(), padded.tolist()]
    first, *others = [mine(queries, corpus, form, "BelowPositive(0.1)", 5).ids for form in forms]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.filterwarnings("ignore:The positives are no closer")  # any rows will do here
def test_without_ids_positives_are_rows() -> None:
    queries, corpus, _ = make_data()
    mined = mine(Keys(queries.vectors), Keys(corpus.vectors), torch.arange(len(queries)), "Uniform()", 199)
    assert torch.equal(mined.ids, mined.rows)
    assert not (mined.ids == torch.arange(len(queries))[:, None]).any()


def test_seeds() -> None:
    queries, corpus, positives = make_data()
    for draw in ("gumbel", "categorical"):
        first, again, other = (mine(queries, corpus, positives, "Tilt(1.0)", 5, draw, seed) for seed in (1, 1, 2))
        assert torch.equal(first.ids, again.ids)
        assert not torch.equal(first.ids, other.ids)


@QUIET
@pytest.mark.parametrize("draw", ["top", "gumbel", "categorical"])
def test_blocks_change_nothing(draw: str) -> None:
    queries, corpus, positives = make_data()
    text = "BelowPositive(0.1) * Rank(0, 50) * Tilt(1.0)"
    sizes = [Search(query_block=q, corpus_block=c) for q, c in ((1, 300), (7, 11), (1000, 1000))]
    first, *others = [mine(queries, corpus, positives, text, 4, draw, search=search).ids for search in sizes]
    assert all(torch.equal(first, other) for other in others)


def test_short_queries_are_searched_deeper() -> None:
    """All near documents are above the margin: the list of the nearest alone would come out empty."""
    n = 2000
    angle = torch.linspace(0.0, math.pi, n, dtype=torch.float64)
    corpus = Keys(torch.stack([angle.cos(), angle.sin()], 1))
    mined = mine(Keys(corpus.vectors[:3]), corpus, torch.tensor([1500, 1600, 1990]), "BelowPositive(absolute=0.0)", 5)
    assert mined.rows[0].tolist() == [1501, 1502, 1503, 1504, 1505]
    assert mined.explanation.short == 0
    short = mine(Keys(corpus.vectors[:1]), corpus, torch.tensor([1997]), "BelowPositive(absolute=0.0)", 5)
    assert short.rows[0].tolist() == [1998, 1999, -1, -1, -1]
    assert short.explanation.why == {"1. BelowPositive(absolute=0.0)": 1}


def test_explanation_counts() -> None:
    queries, corpus, positives = make_data()
    text = "OtherLabel() * Ring(0.0, 0.5) * Rank(0, 3)"
    mined = mine(queries, corpus, positives, text, 5)
    explained = mined.explanation
    assert explained.queries == explained.short == len(queries)
    assert explained.why == {"3. Rank(stop=3)": len(queries)}
    left = [0, 0, 0, 0]
    for i in range(len(queries)):
        for place, part in enumerate(("Uniform()", "OtherLabel()", "OtherLabel() * Ring(0.0, 0.5)", text)):
            weights = _row_weights(parse(part), queries, corpus, positives[i], i, 1.0, None)
            left[place] += int((weights != NEVER).sum())
    assert explained.looked_at == left[0]
    assert explained.removed == [0, left[0] - left[1], left[1] - left[2], left[2] - left[3], 0]


def test_rescoring_replaces_the_similarities() -> None:
    queries, corpus, positives = make_data()
    calls = []

    def rescore(query: Tensor, rows: Tensor) -> Tensor:
        calls.append(len(rows))
        return ((query * 31 + rows * 17) % 101).double() / 101

    search = Search(candidates=40)
    mined = mine(queries, corpus, positives, "BelowPositive(absolute=0.1)", 5, search=search, rescore=rescore)
    plain = mine(queries, corpus, positives, "Uniform()", 40)
    row_of = {int(identity): r for r, identity in enumerate(corpus.ids)}  # type: ignore[arg-type]
    for i in range(len(queries)):
        score = {r: ((i * 31 + r * 17) % 101) / 101 for r in range(len(corpus))}
        lowest = min((score[row_of[p]] for p in positives[i]), default=math.inf)
        kept = [r for r in rows_of(plain, i) if score[r] <= lowest - 0.1]
        expected = sorted((score[r] for r in kept), reverse=True)[:5]
        assert mined.scores[i][mined.rows[i] >= 0].tolist() == pytest.approx(expected)
        assert set(rows_of(mined, i)) <= set(kept)
    assert max(calls) > 1000  # all pairs of a block in one call


def test_union_of_retrievers_keeps_the_source() -> None:
    queries, corpus, positives = make_data()

    class Last:
        name = "last"

        def __call__(self, query: Tensor, size: int) -> Tensor:
            return torch.arange(199, 199 - size, -1).expand(len(query), -1)

    search = Search(candidates=20, also=(Last(),))
    mined = mine(queries, corpus, positives, "Uniform()", 40, search=search)
    plain = mine(queries, corpus, positives, "Uniform()", 20)
    only = mine(queries, corpus, positives, 'From("last") * Rank(0, 5)', 5, search=search)
    assert mined.retrievers == ("corpus", "last")
    row_of = {int(identity): r for r, identity in enumerate(corpus.ids)}  # type: ignore[arg-type]
    for i in range(len(queries)):
        never = {row_of.get(identity) for identity in (*positives[i], int(queries.ids[i]))}  # type: ignore[index]
        near, last = set(rows_of(plain, i)), set([r for r in range(199, -1, -1) if r not in never][:20])
        for row, by in zip(mined.rows[i].tolist(), mined.found_by[i].tolist(), strict=True):
            if row >= 0:
                assert by == (row in near) + 2 * (row in last)
        assert len(set(rows_of(mined, i))) == len(rows_of(mined, i))
        assert set(rows_of(only, i)) <= last
        assert only.rows[i].tolist() == sorted(only.rows[i].tolist(), reverse=True), "in the order of the source"


@pytest.mark.parametrize("kind", ["flat", "ivf", "hnsw"])
def test_faiss(kind: str) -> None:
    pytest.importorskip("faiss", reason="needs the extra 'ann'")
    queries, corpus, positives = make_data(n=2000, dtype=torch.float32)
    text = "BelowPositive(0.05) * Rank(1, 40)" if kind == "flat" else "OtherLabel() * Rank(1, 40)"
    exact = mine(queries, corpus, positives, text, 5)
    found = mine(queries, corpus, positives, text, 5, search=Search(kind, num_probes=32))
    agree = float((exact.ids == found.ids).float().mean())
    assert agree == 1.0 if kind == "flat" else agree > 0.8, agree
    assert found.recall is None if kind == "flat" else 0.8 < found.recall <= 1.0
    if kind == "ivf":
        poor = mine(queries, corpus, positives, text, 5, search=Search(kind, num_probes=1))
        assert poor.recall < found.recall
    with raises(ArgumentError, got="Ring(inner=0.1, outer=0.2) with draw='top'"):
        mine(queries, corpus, positives, "Ring(0.1, 0.2)", 5, search=kind)


def test_faiss_flat_breaks_ties_by_row() -> None:
    """Copies of every document: FAISS takes any of those that are equal at the end of a list."""
    pytest.importorskip("faiss", reason="needs the extra 'ann'")
    whole = torch.randint(-2, 3, (300, 6), generator=torch.Generator().manual_seed(0)) / 4.0
    queries, corpus = Keys(whole[:40], torch.arange(40)), Keys(whole.repeat(4, 1), torch.arange(1200))
    positives = torch.arange(40) + 300
    for text in ("Uniform()", "Rank(2, 9)", "BelowPositive(absolute=0.1)"):
        exact, found = (mine(queries, corpus, positives, text, 5, search=kind) for kind in ("exact", "flat"))
        assert torch.equal(exact.ids, found.ids)
        assert torch.equal(exact.scores, found.scores)


@pytest.mark.parametrize(
    "text", ['BelowPositive(absolute=0.0, by="guide")', 'BelowPositive(0.1, by="guide") * Ring(0.0, 0.5)']
)
def test_a_guide_judges_the_false_negatives(text: str) -> None:
    queries, corpus, positives = make_data()
    turn = torch.randn(12, 5, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    guide = (queries.vectors @ turn, corpus.vectors @ turn)
    mined = mine(
        queries,
        corpus,
        positives,
        text,
        5,
        guide=guide,
        search=Search(query_block=16, corpus_block=33),
        similarity="dot",
    )
    row_of = {int(identity): r for r, identity in enumerate(corpus.ids)}  # type: ignore[arg-type]
    orders = [order for order, _ in oracle(queries, corpus, positives, "Uniform()", 5)]
    for i, order in enumerate(orders):
        judged = guide[1] @ guide[0][i]
        lowest = min((float(judged[row_of[p]]) for p in positives[i]), default=math.inf)
        limit = lowest - 0.1 * abs(lowest) if "0.1" in text and lowest < math.inf else lowest
        kept = [r for r in order if float(judged[r]) <= limit]
        if "Ring" in text:
            kept = kept[: int(0.5 * len(kept))]
        assert rows_of(mined, i) == kept[:5]


def test_half_precision_and_memory_mapped_corpus(tmp_path) -> None:  # type: ignore[no-untyped-def]
    import numpy as np

    queries, corpus, positives = make_data(dtype=torch.float16)
    np.save(tmp_path / "corpus.npy", corpus.vectors.numpy())
    on_disk = torch.from_numpy(np.load(tmp_path / "corpus.npy", mmap_mode="c"))
    mapped = Keys(on_disk, corpus.ids, corpus.labels, corpus.clusters)
    wide = Keys(corpus.vectors.float(), corpus.ids, corpus.labels, corpus.clusters)
    found = mine(queries, mapped, positives, "BelowPositive(0.1)", 5, search=Search(corpus_block=50))
    expected = mine(Keys(queries.vectors.float(), queries.ids), wide, positives, "BelowPositive(0.1)", 5)
    assert torch.equal(found.ids, expected.ids)
    assert found.scores.dtype == torch.float32


@pytest.mark.parametrize("dim", [3, 48, 384])
@pytest.mark.parametrize("text", ["Uniform()", "Ring(0.0, 0.9)", "BelowPositive(absolute=-0.5)"])
def test_exact_copies_are_copies_at_one(dim: int, text: str) -> None:
    """The cosine of a float32 vector with its copy is often a little below 1."""
    v = normalize(torch.randn(150, dim, generator=torch.Generator().manual_seed(0)), dim=-1)
    twice = Keys(torch.cat([v, v]))
    mined = mine(Keys(v), twice, torch.arange(150), text, 5, near_positive=1.0, near_negative=1.0)
    original = torch.where(mined.rows < 0, -1 - torch.arange(5), mined.rows % 150)
    assert not (original == torch.arange(150)[:, None]).any()
    assert all(len(set(row)) == 5 for row in original.tolist())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 0}, "k of 1 or more"),
        ({"draw": "best"}, "draw to be one of top, gumbel, categorical, got draw='best'"),
        ({"temperature": 0.0}, "temperature above 0"),
        ({"near_positive": 2.0}, "near_positive in"),
        ({"negatives": "Tilt(linear(1.0, 0.0))"}, "got a schedule"),
        ({"negatives": "ClippedTilt(1.0)", "draw": "gumbel"}, "do not depend on a batch"),
        ({"negatives": "OtherLabel()", "queries": Keys(torch.eye(4))}, "OtherLabel needs labels"),
        ({"positives": torch.tensor([0, 1, 2, 99])}, "positives that are in the corpus, got id 99 of query 3"),
        ({"positives": ["0", "1", "2", "3"]}, "whole numbers, got '0' of query 0"),
        ({"positives": "0123"}, "a tensor or one list per query"),
        ({"positives": torch.full((4,), 0.5)}, "mine needs corpus ids"),
        ({"positives": [[0]]}, "positives of 4 queries"),
        ({"corpus": Keys(torch.zeros(0, 4))}, "at least one row"),
        ({"corpus": Keys(torch.eye(3))}, "same dimension"),
        ({"corpus": Keys(torch.eye(4) / 0)}, "finite vectors, got NaN or inf in corpus: first in row 0"),
        ({"corpus": Keys(torch.eye(4), ids=torch.tensor([1, 2, 2, 3]))}, "distinct corpus ids, got id 2"),
        ({"search": "magic"}, "kind to be one of exact, flat, ivf, hnsw, also"),
        ({"near_negative": 0.9, "draw": "categorical"}, "categorical ones repeat"),
        ({"negatives": 5}, r"a distribution such as Tilt\(1.0\), got negatives=5"),
        ({"search": 3}, "a Search, or the kind of one, got search=3"),
        ({"rescore": 3}, "a function of queries and rows, got rescore of type int"),
        ({"guide": torch.eye(4)}, r"or \(queries, documents\) of a second model, got guide of type Tensor"),
    ],
)
def test_clear_errors(change: dict[str, object], message: str) -> None:
    labelled = Keys(torch.eye(4), labels=torch.arange(4))
    given = {"queries": labelled, "corpus": labelled, "positives": torch.arange(4), "negatives": "Uniform()", "k": 1}
    with pytest.raises(ValueError, match=message):
        mine(**{**given, **change})  # type: ignore[arg-type]


def test_one_document_and_no_queries() -> None:
    one, query = Keys(torch.ones(1, 4)), Keys(torch.full((1, 4), 0.5))
    assert mine(query, one, [[]], "Uniform()", 3).ids.tolist() == [[0, -1, -1]]
    assert mine(query, one, [[0]], "Tilt(1.0)", 3, "categorical").ids.tolist() == [[-1, -1, -1]]
    assert mine(Keys(torch.ones(0, 4)), one, [], "Uniform()", 3).ids.shape == (0, 3)


@pytest.mark.parametrize(
    ("negatives", "positives", "k", "said"),
    [
        ("BelowPositive(absolute=-1.0)", [[0], [1], [2]], 2, []),
        ("Uniform()", [[0], [], [2]], 2, []),
        (
            "Uniform()",
            [[0], [1, 2], [2]],
            3,
            ["1 of 3 queries have fewer than k=3 negatives, 0 of them none", "documents"],
        ),
        (
            "AtMost(-2.0)",
            [[0], [1], [2]],
            1,
            ["3 of 3 queries", "3 of them none", "candidates than AtMost(-2.0) does."],
        ),
        (
            "BelowPositive(absolute=-1.0)",
            [[0], [], []],
            2,
            ["2 of 3 queries have no positive, so BelowPositive(absolute"],
        ),
    ],
)
def test_what_is_missing_is_reported_once_in_a_call(
    negatives: str, positives: list[list[int]], k: int, said: list[str]
) -> None:
    vectors = torch.eye(4)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            mine(Keys(vectors[:3]), Keys(vectors), positives, negatives, k)
    assert [warning.category for warning in found] == [MiningWarning] * (2 if said else 0)
    assert all(part in str(warning.message) for warning in found for part in said)
    assert all(warning.filename == __file__ for warning in found), "where the user called"


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        ({}, [1, 2]),
        ({"search": Search()}, [1, 2]),
        ({"similarity": "dot"}, [2, 1]),
        ({"similarity": "dot", "search": Search()}, [2, 1]),
        ({"search": Search(similarity="dot")}, [2, 1]),
        ({"similarity": "cosine", "search": Search(similarity="dot")}, [1, 2]),
    ],
)
def test_the_cosine_is_the_default_similarity(options: dict[str, Any], ids: list[int]) -> None:
    corpus = torch.tensor([[1.0, 0.0], [0.8, 0.6], [3.0, 4.0]])
    found = mine(torch.tensor([[1.0, 0.0]]), corpus, [0], "Uniform()", 2, **options)
    assert found.ids.tolist() == [ids]


def test_the_defaults_are_those_of_the_command_line() -> None:
    corpus = torch.nn.functional.normalize(torch.randn(40, 8), dim=-1)
    found = mine(corpus[:3], corpus, torch.tensor([1, 2, 3]))
    same = mine(corpus[:3], corpus, torch.tensor([1, 2, 3]), MineOptions.negatives, MineOptions.k)
    assert torch.equal(found.rows, same.rows)
    assert found.rows.shape == (3, 5)


def test_what_was_mined_is_shown_by_counts() -> None:
    found = mine(Keys(torch.eye(4)[:2]), Keys(torch.eye(4)), [[0, 1, 2], [1]], "Uniform()", 3)
    assert repr(found) == str(found) == "Mined(2 queries, k=3: 4 negatives, 1 short, mean score 0.000)"
    none = mine(Keys(torch.eye(2)[:1]), Keys(torch.eye(2)), [[0, 1]], "Uniform()", 3)
    assert repr(none) == "Mined(1 query, k=3: 0 negatives, 1 short, mean score none)"
