"""Keys and hn.mine of arrays, lists and text ids: the same as of tensors."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hardneg as hn
from hardneg.core.errors import ArgumentError
from hardneg.core.types import hash_text
from hardneg.io.tables import read_vectors
from support.errors import raises

VECTORS = np.random.default_rng(0).standard_normal((40, 6)).astype(np.float32)


@pytest.mark.parametrize("kind", [lambda x: x, lambda x: x.tolist(), list, lambda x: [torch.tensor(r) for r in x]])
def test_vectors_and_numbers_of_any_kind(kind: Any) -> None:
    keys = hn.Keys(kind(VECTORS), ids=list(range(40)), labels=np.arange(40) % 3, clusters=[[i, 1] for i in range(40)])
    assert torch.equal(keys.vectors, torch.from_numpy(VECTORS))
    assert torch.equal(keys.ids, torch.arange(40))
    assert torch.equal(keys.labels, torch.arange(40) % 3)
    assert keys.clusters is not None
    assert keys.clusters.shape == (40, 2)
    assert keys.names is None


def test_text_ids_match_wherever_they_are() -> None:
    names = np.array([f"d{i}" for i in range(40)])
    first, second = hn.Keys(VECTORS, ids=names), hn.Keys(VECTORS[:3], ids=["d2", "d1", "x"])
    assert first.ids is not None
    assert second.ids is not None
    assert (first.ids[:, None] == second.ids).nonzero().tolist() == [[1, 1], [2, 0]]
    assert int(first.ids.min()) >= 0, "an id below 0 would match nothing"
    assert first.names is not None
    assert first.names.tolist() == names.tolist()
    assert hash_text("d1") == hash_text("d1") != hash_text("d2")
    assert first.changed(labels=torch.arange(40)).ids is first.ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ids": [0.5] * 40}, "whole numbers or texts as ids, got ids of float"),
        ({"ids": ["a", 1] * 20}, "ids of int, str"),
        ({"ids": [True] * 40}, "ids of bool"),
        ({"ids": ["a"]}, r"shape \(40,\)"),
        ({"vectors": [[1.0], [1.0, 2.0]]}, "lists of unequal length"),
        ({"vectors": "text"}, "got str"),
        ({"vectors": np.array([["a"]])}, "an array of <U1"),
        ({"vectors": np.zeros((3, 2), dtype=int)}, "floating point vectors"),
    ],
)
def test_other_kinds_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        hn.Keys(**{"vectors": VECTORS, **options})


def test_a_path_is_no_data() -> None:
    with raises(ArgumentError, who="mine", got="'pairs.jsonl'"):
        hn.mine("pairs.jsonl", model="any")
    with raises(ArgumentError, who="Keys", got="str"):
        hn.audit("vectors.npy")


def test_mine_takes_arrays_lists_and_texts() -> None:
    queries, names = VECTORS[:8] + 0.1, [f"d{i}" for i in range(40)]
    plain = hn.mine(
        hn.Keys(torch.from_numpy(queries)), hn.Keys(torch.from_numpy(VECTORS)), torch.arange(8), "Rank(2, 9)", 3
    )
    for first, second, positives in (
        (queries, VECTORS, np.arange(8)),
        (queries.tolist(), VECTORS.tolist(), list(range(8))),
        (queries, VECTORS, [[i] for i in range(8)]),
    ):
        assert torch.equal(hn.mine(first, second, positives, "Rank(2, 9)", 3).ids, plain.ids)
    for positives in (names[:8], np.array(names[:8]), [[one] for one in names[:8]]):
        found = hn.mine(queries, hn.Keys(VECTORS, ids=names), positives, "Rank(2, 9)", k=3)
        assert found.ids.tolist() == [[names[row] for row in rows] for rows in plain.rows.tolist()]
    own = hn.mine(hn.Keys(queries, ids=["d5"] * 8), hn.Keys(VECTORS, ids=names), names[:8], "Uniform()", 39)
    assert "d5" not in own.ids
    assert own.ids[0, -1] is None, "one is the positive, one the query itself"


@pytest.mark.parametrize("kind", [lambda x: x, lambda x: x.copy(), hn.Keys, lambda x: x.tolist()])
def test_a_row_is_not_its_own_negative_where_queries_are_the_corpus(kind: Any) -> None:
    some, positives, names = VECTORS[:20], [(row + 1) % 20 for row in range(20)], [f"d{row}" for row in range(20)]
    found = hn.mine(kind(some), kind(some), positives, "Uniform()", 18)
    expected = [sorted(set(range(20)) - {row, positives[row]}) for row in range(20)]
    assert [sorted(row) for row in found.ids.tolist()] == expected
    named = hn.mine(kind(some), hn.Keys(some, ids=names), [names[row] for row in positives], "Uniform()", 18)
    assert named.ids.tolist() == [[names[row] for row in rows] for rows in found.rows.tolist()]


def test_mine_takes_vectors_with_gradients_and_what_cross_encoders_give() -> None:
    queries, corpus = (torch.tensor(each, requires_grad=True) for each in (VECTORS[:8] + 0.1, VECTORS))
    text, positives = 'BelowPositive(absolute=0.0, by="guide")', list(range(8))
    dot = partial(hn.mine, similarity="dot")
    plain = dot(queries.detach(), corpus.detach(), positives, text, 3, guide=(queries.detach(), corpus.detach()))
    of_arrays = dot(queries, corpus, positives, text, 3, guide=[VECTORS[:8] + 0.1, VECTORS])
    assert torch.equal(of_arrays.ids, plain.ids)

    def score(query: torch.Tensor, row: torch.Tensor) -> Any:  # CrossEncoder.predict gives an array
        return ((VECTORS[query] + 0.1) * VECTORS[row]).sum(-1)

    for kind in (score, lambda query, row: score(query, row).tolist()):
        assert torch.equal(dot(queries, corpus, positives, text, 3, guide=kind).ids, plain.ids)


def test_ids_that_cannot_be_found_are_named() -> None:
    documents = hn.Keys(VECTORS, ids=[f"d{i}" for i in range(40)])
    with raises(ArgumentError, who="mine", got="id 'd99' of query 1"):
        hn.mine(VECTORS[:2], documents, ["d1", "d99"], "Uniform()", 1)
    with raises(ArgumentError, who="mine", got="id 1 of query 0"):
        hn.mine(VECTORS[:2], documents, [1, 0], "Uniform()", 1)
    with raises(ArgumentError, who="mine", got="id 'd0' more than once (1 repeated in all)"):
        hn.mine(VECTORS[:2], hn.Keys(VECTORS, ids=["d0", "d0", *map(str, range(38))]), ["d0", "1"], "Uniform()", 1)
    with raises(ArgumentError, who="mine", what="as positives", got="Tensor"):
        hn.mine(VECTORS[:2], documents, torch.tensor([0, 1]), "Uniform()", 1)
    with raises(ArgumentError, who="mine", what="data set", got="no positives"):
        hn.mine(VECTORS[:2], documents)


def test_an_array_on_disk_stays_there(tmp_path: Path) -> None:
    np.save(tmp_path / "vectors.npy", VECTORS)
    mapped = np.load(tmp_path / "vectors.npy", mmap_mode="r")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vectors = hn.Keys(mapped).vectors
    assert vectors.data_ptr() == mapped.ctypes.data, "it was copied into memory"


@pytest.mark.parametrize("change", [lambda x: x[::-1], lambda x: x[:, ::-1], lambda x: x.astype(">f4")])
def test_arrays_of_any_layout(change: Any, tmp_path: Path) -> None:
    assert torch.equal(hn.Keys(change(VECTORS)).vectors, torch.from_numpy(change(VECTORS).astype("=f4").copy()))
    np.save(tmp_path / "vectors.npy", change(VECTORS))
    vectors, _ = read_vectors(tmp_path / "vectors.npy")
    assert torch.equal(vectors, hn.Keys(change(VECTORS)).vectors)
