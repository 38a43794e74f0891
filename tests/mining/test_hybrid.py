"""Several retrievers against plain loops: fused order, the order of one source, quotas; runs of other retrievers."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

import hardneg as hn
from hardneg.core.errors import ArgumentError, FileError
from hardneg.mining import Search
from hardneg.mining.fusion import Lexical, RankedRun, read_run, split_name
from hardneg.mining.problem import Side
from support.errors import raises, warns

Q, N = 12, 60


class Listed:
    """A retriever with fixed lists."""

    def __init__(self, name: str, lists: list[list[int]]) -> None:
        self.name, self.lists = name, lists

    def __call__(self, queries: Tensor, size: int) -> Tensor:
        rows = [self.lists[query][:size] for query in queries.tolist()]
        return torch.tensor([[*each, *[-1] * (size - len(each))] for each in rows])


def make(seed: int) -> tuple[Tensor, Tensor, list[list[int]], dict[str, list[list[int]]]]:
    random = torch.Generator().manual_seed(seed)
    corpus = normalize(torch.randn(N, 8, generator=random), dim=-1)
    corpus[20:25] = corpus[3]  # exact copies: equal similarities
    queries = normalize(torch.randn(Q, 8, generator=random), dim=-1)
    positives = [torch.randperm(N, generator=random)[: 1 + i % 3].tolist() for i in range(Q)]
    other = {
        name: [torch.randperm(N, generator=random)[: 15 if i % 4 else 2].tolist() for i in range(Q)]
        for name in ("words", "run")
    }
    return queries, corpus, positives, other


def best(
    queries: Tensor, corpus: Tensor, positives: list[list[int]], other: Any, size: int
) -> list[dict[str, list[int]]]:
    """The list of each retriever for each query, without positives, by loops."""
    found = []
    for i in range(Q):
        score = [(-float(queries[i] @ corpus[j]), j) for j in range(N) if j not in positives[i]]
        lists = {"dense": [j for _, j in sorted(score)][:size]}
        for name, each in other.items():
            lists[name] = [j for j in each[i] if j not in positives[i]][:size]
        found.append(lists)
    return found


def fused(lists: dict[str, list[int]]) -> list[int]:
    total: dict[int, float] = {}
    for each in lists.values():
        for rank, j in enumerate(each, 1):
            total[j] = total.get(j, 0.0) + 1 / (60 + rank)
    return sorted(total, key=lambda j: (-total[j], j))


def mined(case: Any, text: str, k: int, size: int = 10, **search: Any) -> list[list[int]]:
    queries, corpus, positives, other = case
    also = tuple(Listed(name, lists) for name, lists in other.items())
    keys = hn.Keys(corpus, source="dense")
    rows = hn.mine(hn.Keys(queries), keys, positives, text, k, search=Search(also=also, candidates=size, **search)).rows
    return [[row for row in each if row >= 0] for each in rows.tolist()]


@pytest.mark.parametrize("seed", range(4))
def test_the_fused_order_is_that_of_a_loop(seed: int) -> None:
    case = make(seed)
    expected = [fused(lists)[:6] for lists in best(*case, 10)]
    assert mined(case, "Uniform()", 6) == expected


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("source", ["dense", "words", "run"])
def test_a_source_gives_its_best_in_its_own_order(seed: int, source: str) -> None:
    case = make(seed)
    expected = [lists[source][:4] for lists in best(*case, 10)]
    assert mined(case, f'From("{source}")', 4) == expected


def by_quota(lists: dict[str, list[int]], keep: Any, quotas: list[tuple[str, int]], k: int) -> list[int]:
    taken: list[int] = []
    for name, number in quotas:
        taken += [j for j in lists[name] if keep(j) and j not in taken][:number]
    for name, _ in quotas:
        taken += [j for j in lists[name] if keep(j) and j not in taken]
    return taken[:k]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    a=st.integers(1, 3),
    b=st.integers(1, 3),
    more=st.integers(0, 3),
    limit=st.floats(-0.5, 0.5),
)
def test_quotas_are_those_of_a_loop(seed: int, a: int, b: int, more: int, limit: float) -> None:
    case = make(seed)
    quotas = [("words", a), ("dense", b)]
    expected = []
    for i, lists in enumerate(best(*case, 10)):
        similar = case[0][i] @ case[1].T
        expected.append(by_quota(lists, lambda j, s=similar: bool(s[j] >= limit), quotas, a + b + more))
    assert mined(case, f"Threshold({limit!r})", a + b + more, quotas=tuple(quotas)) == expected


def test_the_expression_reads_similarities_and_fusion_orders_what_it_leaves() -> None:
    case = make(7)
    expected = []
    for i, lists in enumerate(best(*case, 10)):
        lowest = min(float(case[0][i] @ case[1][j]) for j in case[2][i])
        expected.append([j for j in fused(lists) if float(case[0][i] @ case[1][j]) <= lowest - 0.1][:5])
    assert mined(case, "BelowPositive(absolute=0.1)", 5) == expected


def test_fusion_by_similarity_is_the_order_of_the_dense_scores() -> None:
    case = make(3)
    for i, rows in enumerate(mined(case, "Uniform()", 8, fusion="similarity")):
        values = [float(case[0][i] @ case[1][j]) for j in rows]
        assert values == sorted(values, reverse=True)
    assert mined(case, "Uniform()", 8, fusion="similarity") != mined(case, "Uniform()", 8)


def test_found_by_names_every_retriever() -> None:
    queries, corpus, positives, other = case = make(5)
    also = tuple(Listed(name, lists) for name, lists in other.items())
    found = hn.mine(
        hn.Keys(queries),
        hn.Keys(corpus, source="dense"),
        positives,
        'From("run")',
        5,
        search=Search(also=also, candidates=10),
    )
    assert found.retrievers == ("dense", "words", "run")
    for i, lists in enumerate(best(*case, 10)):
        for row, bits in zip(found.rows[i].tolist(), found.found_by[i].tolist(), strict=True):
            if row >= 0:
                assert bits == sum(1 << n for n, name in enumerate(found.retrievers) if row in lists[name])


def test_near_copies_are_passed_over_in_the_fused_order() -> None:
    queries, corpus, positives, other = case = make(2)
    also = tuple(Listed(name, lists) for name, lists in other.items())
    rows = hn.mine(
        hn.Keys(queries), hn.Keys(corpus, source="dense"), positives, "Uniform()", 6, near_negative=0.999,
        search=Search(also=also, candidates=10),
    ).rows.tolist()  # fmt: skip
    for found, lists in zip(rows, best(*case, 10), strict=True):
        taken: list[int] = []
        for j in fused(lists):
            if all(float(corpus[j] @ corpus[i]) < 0.999 for i in taken) and len(taken) < 6:
                taken.append(j)
        assert [row for row in found if row >= 0] == taken


@pytest.mark.parametrize(
    ("text", "k", "options", "message"),
    [
        ("Uniform()", 3, {"quotas": (("bm25", 2),)}, "a source among dense, words, run, got 'bm25'"),
        ("Uniform()", 3, {"quotas": (("words", 4),)}, "quotas of at most k=3 in all, got 4"),
        ('From("dense") * From("run")', 3, {}, "one source in the expression"),
        ("Uniform()", 3, {"fusion": "sum"}, "rrf, similarity"),
        ("Uniform()", 3, {"quotas": (("words", 0),)}, "quotas"),
    ],
)
def test_what_cannot_be_meant_raises(text: str, k: int, options: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        mined(make(0), text, k, **options)


@pytest.mark.parametrize(
    ("text", "draw", "needed"),
    [
        ("Rank(28, 40)", "top", 33),
        ("Rank(0, 31)", "gumbel", 31),
        ("Rank(30)", "gumbel", 31),
        ("Rank(0, 99)", "gumbel", 60),
    ],
)
def test_a_window_beyond_all_lists_raises_before_the_search(text: str, draw: str, needed: int) -> None:
    """Three lists of ten hold at most thirty candidates; sixty documents are all there are."""
    queries, corpus, positives, other = make(0)
    asked: list[int] = []

    class Watched(Listed):
        def __call__(self, queries: Tensor, size: int) -> Tensor:
            asked.append(size)
            return super().__call__(queries, size)

    also = tuple(Watched(name, lists) for name, lists in other.items())
    call = {"search": Search(also=also, candidates=10), "draw": draw}
    with pytest.raises(ArgumentError, match=rf"10; use search=Search\(candidates={-(-needed // 3)}\), or a"):
        hn.mine(hn.Keys(queries), hn.Keys(corpus), positives, text, 5, **call)
    assert not asked
    call["search"] = Search(also=also, candidates=-(-needed // 3))
    hn.mine(hn.Keys(queries), hn.Keys(corpus), positives, text, 5, **call)
    assert asked


@pytest.mark.parametrize("text", ["Rank(25, 90)", "Rank(0, 30)", "Ring(0.1, 0.9)", "Uniform()"])
def test_a_window_inside_the_lists_is_mined(text: str) -> None:
    assert any(mined(make(0), text, 5))


def test_quotas_need_the_top() -> None:
    queries, corpus, positives, other = make(0)
    search = Search(also=(Listed("words", other["words"]),), quotas=(("words", 1),))
    with raises(ArgumentError, who="mine", what="'top'", got="draw='gumbel'"):
        hn.mine(hn.Keys(queries), hn.Keys(corpus), positives, "Uniform()", 2, "gumbel", search=search)


def test_a_run_is_ordered_by_score_and_by_rank_among_equals(tmp_path: Path) -> None:
    path = tmp_path / "bm25.trec"
    path.write_text(
        "q1 Q0 d3 1 0.5 x\nq1 Q0 d1 2 2.5 x\nq2 Q0 d9 2 1 x\nq2 Q0 d2 1 1 x\n\nq1 Q0 d3 4 0.1 x\nq1\tQ0\td7\t3\t-1\tx\n"
    )
    run = read_run(str(path))
    assert run == {"q1": ["d1", "d3", "d3", "d7"], "q2": ["d2", "d9"]}
    queries, corpus = Side(["q1", "q2", "q3"]), Side([f"d{i}" for i in range(8)])
    with warns("run", "1 of 3"):
        found = RankedRun("other", run, queries, corpus)
    assert found(torch.arange(3), 3).tolist() == [[1, 3, 7], [2, -1, -1], [-1, -1, -1]]
    assert found(torch.tensor([1]), 1).tolist() == [[2]]
    with raises(ArgumentError, who="mine", what="'other'", got="none"):
        RankedRun("other", run, Side(["a"]), corpus)
    assert split_name("splade=x/y.trec") == ("splade", "x/y.trec")
    assert split_name("x/y.bm25.trec") == ("y", "x/y.bm25.trec")


def test_a_packed_run_is_read(tmp_path: Path) -> None:
    path = tmp_path / "bm25.trec.gz"
    path.write_bytes(gzip.compress(b"q1 Q0 d3 1 0.5 x\nq1 Q0 d1 2 2.5 x\n"))
    assert read_run(str(path)) == {"q1": ["d1", "d3"]}


@pytest.mark.parametrize("line", ["q1 Q0 d3 1 0.5", "q1 Q0 d3 one 0.5 x", "q1 Q0 d3 1 nan x", '{"q": 1}'])
def test_other_files_are_no_runs(tmp_path: Path, line: str) -> None:
    (tmp_path / "r").write_text(f"q1 Q0 d1 1 1.0 x\n{line}\n")
    with pytest.raises(FileError, match="line 2"):
        read_run(str(tmp_path / "r"))
    (tmp_path / "r").write_text("\n")
    with pytest.raises(FileError, match="empty"):
        read_run(str(tmp_path / "r"))
    (tmp_path / "r").write_bytes(b"\xff\xfe")
    with pytest.raises(FileError, match="UTF-8"):
        read_run(str(tmp_path / "r"))


def test_a_guide_of_pairs_vetoes() -> None:
    queries, corpus, positives, _ = make(4)
    random = np.random.default_rng(0)
    table = random.standard_normal((Q, N)).astype(np.float32)

    def judge(query: Tensor, rows: Tensor) -> Tensor:
        return torch.from_numpy(table[query.numpy(), rows.numpy()])

    text = 'BelowPositive(absolute=0.2, by="guide")'
    found = hn.mine(
        hn.Keys(queries), hn.Keys(corpus), positives, text, 5, guide=judge, search=Search(candidates=30)
    )  # fmt: skip
    for i, lists in enumerate(best(queries, corpus, positives, {}, 30)):
        limit = min(table[i, j] for j in positives[i]) - np.float32(0.2)
        assert [row for row in found.rows[i].tolist() if row >= 0] == [
            j for j in lists["dense"] if table[i, j] <= limit
        ][:5]


def test_bm25_leaves_jax_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where JAX is installed, bm25s would choose by it: other ties, and most of the memory of a GPU."""
    selection = pytest.importorskip("bm25s.selection", reason="needs the extra 'lexical'")

    def fail(*args: object) -> None:
        raise AssertionError("JAX was used")

    monkeypatch.setattr(selection, "JAX_IS_AVAILABLE", True)
    monkeypatch.setattr(selection, "_topk_jax", fail)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    words = Lexical(["red fox"], ["a red fox", "blue sky", "the fox"])
    assert words(torch.tensor([0]), 3).tolist() == [[0, 2, -1]]
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


def test_equal_scores_are_taken_by_row_whoever_found_them() -> None:
    corpus, query = torch.ones(9, 2), torch.ones(1, 2)
    search = Search(also=(Listed("words", [[8, 1, 6, 5]]),), candidates=4, fusion="similarity")
    assert hn.mine(query, corpus, [0], "Uniform()", 6, search=search).rows.tolist() == [[1, 2, 3, 4, 5, 6]]
    assert hn.mine(query, corpus, [0], "Rank(4, 6)", 2, search=search).rows.tolist() == [[5, 6]]


def test_a_retriever_may_find_nothing() -> None:
    class Nothing(Listed):
        def __call__(self, queries: Tensor, size: int) -> Tensor:
            return torch.zeros(len(queries), 0, dtype=torch.long)

    alone = Search("also", also=(Nothing("words", []),))
    with warns("short", "1 of 1", "k=2"):
        found = hn.mine(torch.ones(1, 2), torch.ones(3, 2), [0], "Threshold(0.0)", 2, search=alone)
    assert found.rows.tolist() == [[-1, -1]]


def test_bm25_gives_equal_scores_by_row_for_any_size() -> None:
    words = Lexical(["apple", "pear plum"], ["apple fig", "pear kiwi", "apple pear"] * 40)
    every = words(torch.arange(2), 120).tolist()
    assert every[0][:80] == [row for row in range(120) if row % 3 != 1]
    for size in (1, 5, 33):
        assert words(torch.arange(2), size).tolist() == [each[:size] for each in every]
