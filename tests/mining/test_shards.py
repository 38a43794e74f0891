"""A corpus in shards, and distributions that look at whole rows, mined by tiles: what brute force would mine."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import numpy as np
import pytest
import torch
from torch import Tensor

import hardneg as hn
from hardneg.core.bounds import Bound, Largest
from hardneg.core.errors import ArgumentError
from hardneg.core.tiles import Tile
from hardneg.core.types import LogWeights, Scores
from hardneg.mining import Mined, Search
from hardneg.mining.candidates import Finder
from hardneg.mining.stages import _packed, _unpacked
from hardneg.negatives import Negatives, keep
from hardneg.search.exact import DocumentBlock
from support.errors import raises

Q, N, K = 23, 150, 7
FACTORS = sorted(name for name, cls in hn.registered_negatives().items() if cls.__module__.startswith("hardneg."))


class Hidden(Negatives):
    """Not registered under the names of other tests: dataclasses of this module are removed from the grammar."""

    textual: ClassVar = False


@dataclass(frozen=True, repr=False)
class BelowClosest(Hidden):
    """Keeps candidates at least 0.1 below the closest one, with a declared reduction."""

    textual: ClassVar = False
    margin: float = 0.125

    def bounds(self) -> Mapping[str, Bound]:
        return {"closest": Largest(lambda tile: tile.similarity)}

    def log_weight(self, tile: Tile) -> Tensor:
        return tile.keep(tile.similarity <= tile.bound["closest"] - self.margin)


@dataclass(frozen=True, repr=False)
class BelowClosestDense(Hidden):
    """The same by whole rows only."""

    textual: ClassVar = False
    margin: float = 0.125
    ranks: ClassVar = True

    def log_weights(self, scores: Scores) -> LogWeights:
        similarity = (scores.candidates * scores.temperature).masked_fill(~scores.valid, -torch.inf)
        return keep(scores, similarity <= similarity.amax(1, keepdim=True) - self.margin)


def exact_vectors(rows: int, seed: int) -> Tensor:
    """Products of these are exact in float32, and many are equal."""
    whole = torch.randint(-2, 3, (rows, 6), generator=torch.Generator().manual_seed(seed))
    return whole.float() / 4.0


def keys(rows: int, seed: int) -> hn.Keys:
    vectors = exact_vectors(rows, seed)
    if rows > 40:
        vectors[20:40] = vectors[:20]  # duplicates
    return hn.Keys(vectors, torch.arange(rows), torch.arange(rows) % 5, torch.arange(rows) % 3, "corpus")


def mined(negatives: Negatives, draw: str = "top", **how: Any) -> Mined:
    queries, corpus = keys(Q, 1), keys(N, 2)
    positives = torch.stack([torch.arange(Q) + 100, torch.arange(Q) + 30], 1)  # some of them in other shards
    queries = hn.Keys(queries.vectors, torch.arange(Q) + 60, queries.labels, queries.clusters)
    return hn.mine(
        queries, corpus, positives, negatives, K, draw=draw, seed=3,
        search=Search(query_block=8, similarity="dot", **how),
        guide=(exact_vectors(Q, 5), exact_vectors(N, 6)),
    )  # fmt: skip


def brute_force(negatives: Negatives) -> Tensor:
    """Rows of the k most similar of the support of whole rows, of equal ones the first."""
    queries, corpus = keys(Q, 1), keys(N, 2)
    similarity = queries.vectors @ corpus.vectors.T
    positives = torch.stack([torch.arange(Q) + 100, torch.arange(Q) + 30], 1)
    guide = exact_vectors(Q, 5) @ exact_vectors(N, 6).T
    mask = torch.zeros(Q, N, dtype=torch.bool).scatter(1, positives, True)
    own = torch.zeros(Q, N, dtype=torch.bool).scatter(1, torch.arange(Q)[:, None] + 60, True)
    scores = hn.from_matrix(similarity, mask, temperature=1.0)
    scores = scores.changed(
        valid=~mask & ~own,
        anchor_tags=hn.core.types.Tags(torch.arange(Q) + 60, queries.labels, queries.clusters),
        candidate_tags=hn.core.types.Tags(
            corpus.ids[None],
            corpus.labels[None],
            corpus.clusters[None],  # type: ignore[index]
        ),
        source=torch.zeros(N, dtype=torch.long),
        source_names=("corpus",),
        guide=hn.core.types.Guide(guide.masked_fill(~mask, torch.inf), guide),
        positives=similarity.masked_fill(~mask, torch.inf),
        positive_valid=mask,
    )
    log_w = negatives.log_weights(scores)
    key = similarity.masked_fill(log_w == hn.NEVER, hn.NEVER)
    values, rows = key.sort(dim=1, descending=True, stable=True)
    return rows.masked_fill(values == hn.NEVER, -1)[:, :K]


def examples() -> list[str]:
    found = []
    for name in FACTORS:
        cls = hn.registered_negatives()[name]
        found += [text for text in (cls.examples or (f"{name}()",)) if not hn.parse(text).schedules()]
    return [text for text in found if "source" not in text and "From(" not in text and not hn.parse(text).batch_scope]


@pytest.mark.parametrize("text", examples())
def test_shards_mine_what_the_whole_corpus_gives(text: str) -> None:
    negatives = hn.parse(text)
    if any(not factor.pointwise for factor in negatives.factors):
        pytest.skip(f"{text} needs whole rows")
    expected = brute_force(negatives)
    for how in ({}, {"corpus_block": 16, "shards": 8}, {"corpus_block": 7, "shards": 3}):
        assert mined(negatives, **how).rows.tolist() == expected.tolist(), how


PRODUCTS = [
    "OtherLabel() * Ring(0.1, 0.5)",
    "BelowPositive(relative=0.05) * Rank(2, 20)",
    "Rank(0, 60) * OtherCluster()",
    "OtherCluster() * Rank(3, 30) * Ring(0.0, 0.5)",
    "Ring(0.0, 0.5) * Rank(5, 9)",
]


@pytest.mark.filterwarnings("ignore:.*the order matters")
@pytest.mark.parametrize("text", PRODUCTS)
def test_products_in_shards(text: str) -> None:
    expected = brute_force(hn.parse(text))
    for how in ({}, {"corpus_block": 16, "shards": 8}):
        assert mined(hn.parse(text), **how).rows.tolist() == expected.tolist(), how


@pytest.mark.filterwarnings("ignore:.*the order matters")
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("cls", [BelowClosest, BelowClosestDense])
def test_a_distribution_of_ones_own_is_mined_exactly_in_both_orders(cls: type[Negatives], first: bool) -> None:
    own, other = cls(), hn.BelowPositive(relative=0.05)
    negatives = own * other if first else other * own
    expected = brute_force(negatives)
    assert (expected[:, 0] >= 0).any()
    for block in (16, 7, 150):
        assert mined(negatives, corpus_block=block).rows.tolist() == expected.tolist()


@pytest.mark.filterwarnings("ignore:.*the order matters")
def test_queries_left_short_are_those_of_brute_force() -> None:
    negatives = BelowClosest(1.0) * hn.OtherLabel()
    expected = brute_force(negatives)
    assert (expected == -1).any()
    assert mined(negatives, corpus_block=16, shards=4).rows.tolist() == expected.tolist()


@pytest.mark.parametrize(("text", "rows"), [("Ring(0.5, 1.0)", range(256, 512)), ("Ring(0.0, 0.5)", range(256))])
def test_an_edge_between_equal_scores_may_lie_between_any_two_rows(text: str, rows: range) -> None:
    corpus = hn.Keys(torch.ones(513, 1))  # 512 candidates: half of them are the rows whose number fits into a byte
    found = hn.mine(hn.Keys(torch.ones(1, 1)), corpus, [512], text, 512, search=Search(shards=3)).rows
    assert found[found >= 0].tolist() == [*rows]


def test_whole_rows_in_shards_are_refused_by_name() -> None:
    with raises(ArgumentError, who="BelowClosestDense", what="log_weight(tile)") as caught:
        mined(BelowClosestDense(), corpus_block=16, shards=2)
    assert caught.value.who == "BelowClosestDense"


@pytest.mark.parametrize("text", ["Tilt(2.0)", "Ring(0.0, 0.5)", "OtherLabel() * Tilt(1.0)"])
def test_draws_do_not_depend_on_blocks_or_shards(text: str) -> None:
    one = mined(hn.parse(text), draw="gumbel")
    for how in ({"corpus_block": 16}, {"corpus_block": 16, "shards": 8}):
        assert mined(hn.parse(text), draw="gumbel", **how).rows.tolist() == one.rows.tolist()


@dataclass(frozen=True, repr=False)
class BelowClosestOfBatch(Hidden):
    """Depends on which other queries are mined with it."""

    textual: ClassVar = False

    def bounds(self) -> Mapping[str, Bound]:
        return {"closest": Largest(lambda tile: tile.similarity, scope="batch")}

    def log_weight(self, tile: Tile) -> Tensor:
        return tile.keep(tile.similarity <= tile.bound["closest"] - 0.25)


def test_what_a_batch_decides_is_refused_by_name() -> None:
    with raises(ArgumentError, who="mine", got="BelowClosestOfBatch()") as caught:
        mined(BelowClosestOfBatch())
    assert "BelowClosestOfBatch" in str(caught.value.got)


def test_no_queries_have_no_negatives() -> None:
    none = hn.Keys(torch.zeros(0, 6))
    assert hn.mine(none, keys(N, 2), torch.zeros(0, dtype=torch.long), "Uniform()", K).rows.shape == (0, K)


@pytest.mark.parametrize(
    "text", ["BelowPositive(0.3)", "BelowPositive(absolute=0.2) * Tilt(2.0) * BelowPositive(0.1) * Rank(2, 9)"]
)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_margin_cuts_off_while_searching(
    text: str, precision: Literal["float32", "bfloat16"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most queries have more documents above the margin than a list is long: the corpus is read once all the same."""
    random = torch.Generator().manual_seed(0)
    corpus = torch.randn(900, 6, generator=random)
    corpus[450:] = corpus[:450]  # ties, in other shards
    queries, positives = corpus[:40] + 2.0 * torch.randn(40, 6, generator=random), torch.arange(40)
    read, original = [], DocumentBlock.of.__func__  # type: ignore[attr-defined]

    def of(cls: type[DocumentBlock], *args: Any, **more: Any) -> DocumentBlock:
        read.append(args[2] - args[1])
        return cast(DocumentBlock, original(cls, *args, **more))

    def mined() -> Mined:
        keys = hn.Keys(queries), hn.Keys(corpus)
        search = Search(shards=4, query_block=7, precision=precision)
        return hn.mine(*keys, positives, text, k=3, search=search)

    monkeypatch.setattr(DocumentBlock, "of", classmethod(of))
    fast = mined()
    assert sum(read) == len(corpus)
    monkeypatch.setattr(Finder, "leading_forms", lambda self: None)
    slow = mined()
    assert sum(read) > 2 * len(corpus)
    assert fast.rows.tolist() == slow.rows.tolist()
    assert fast.scores.tolist() == slow.scores.tolist()
    assert fast.explanation == slow.explanation


@pytest.mark.parametrize("temperature", [1.0, 0.07, 3.3])
def test_what_equals_the_positive_does_not_count_as_removed(temperature: float) -> None:
    random = torch.Generator().manual_seed(0)
    corpus = torch.randint(-3, 4, (300, 4), generator=random).double()
    queries, positives = corpus[:20] + 1.0, torch.arange(20)
    similarity = queries @ corpus.T
    above = int((similarity > similarity[positives, positives][:, None]).sum())
    mined = hn.mine(
        hn.Keys(queries),
        hn.Keys(corpus),
        positives,
        "BelowPositive(absolute=0.0)",
        k=2,
        temperature=temperature,
        similarity="dot",
    )
    assert mined.explanation.removed[1] == above


@pytest.mark.parametrize("cosine", [False, True])
def test_queries_and_corpus_of_two_precisions(cosine: bool) -> None:
    queries, corpus = keys(Q, 1).vectors, keys(N, 2).vectors.double()
    search = Search(similarity="cosine" if cosine else "dot")
    first, second = (
        hn.mine(hn.Keys(each), hn.Keys(corpus), torch.arange(Q), "BelowPositive(0.1)", K, search=search).rows
        for each in (queries.float(), queries.float().double())
    )
    assert torch.equal(first, second)


def test_the_edges_of_a_window_are_kept_in_one_layout_so_that_older_jobs_resume() -> None:
    """((rank, missing, bin, value, row), level) for each window, after the bounds."""
    tensors = tuple(torch.full((3, 2), number) for number in range(5))
    file = io.BytesIO()
    torch.save(([{"count": tensors[0]}], {"window": (tensors, 2)}), file)
    older = {"bounds": np.frombuffer(file.getvalue(), dtype=np.uint8), "open": np.array(True)}

    bounds, edges = _unpacked(older, torch.device("cpu"))
    _, layout = torch.load(io.BytesIO(_packed(bounds, edges)["bounds"].tobytes()), weights_only=True)

    assert edges["window"].level == 2
    assert all(torch.equal(one, other) for one, other in zip(edges["window"][:-1], tensors, strict=True))
    assert layout["window"][1] == 2
    assert len(layout["window"][0]) == 5
