"""`hardneg mine`: errors name what is wrong with tables, options, encoders and files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hardneg.core.errors import ArgumentError, FileError
from hardneg.mining.explain import TOO_FEW, Explanation, no_negatives
from hardneg.mining.job import run
from hardneg.mining.options import Columns, MineOptions
from support.errors import raises
from support.mining_jobs import make_rows, write_lines

FUZZ: list[tuple[str, Callable[[list[Any], list[Any]], Any], str]] = [
    (
        "missing column",
        lambda q, c: [row.pop("positive") for row in q],
        "column of positives .*; name it with positive_c",
    ),
    (
        "other columns",
        lambda q, c: [row.update(x=row.pop("query")) for row in q],
        "name the column of texts with query_c",
    ),
    ("number as text", lambda q, c: q[3].update(query=5), "needs text in the queries, got 5 in column 'query', row 3"),
    ("no text", lambda q, c: c[7].update(text=None), "needs text in the corpus, got None in column 'text', row 7"),
    ("list as text", lambda q, c: c[0].update(text=["a"]), "needs text in the corpus"),
    ("float id", lambda q, c: c[0].update(id=1.5), "numbers or texts in the corpus, got 1.5"),
    ("object as positive", lambda q, c: q[2].update(positive=[{"a": 1}]), "positives that are ids or texts"),
    ("number as positives", lambda q, c: q[2].update(positive=2.5), "positives that are ids or texts"),
    ("unknown positive", lambda q, c: q[2].update(positive=["d999"]), "positives that are in the corpus, got 1"),
    ("same id", lambda q, c: c[5].update(id="d4"), "distinct ids in the corpus, got id 'd4'"),
    ("same query id", lambda q, c: q[5].update(id="q4"), "one text for each query id"),
    ("no positives", lambda q, c: [row.update(positive=[]) for row in q], "at least one query with a positive"),
    ("only empty", lambda q, c: [row.update(text=" ") for row in c], "at least one document"),
    ("empty corpus", lambda q, c: c.clear(), "table with at least one row"),
    ("empty queries", lambda q, c: q.clear(), "table with at least one row"),
]


@pytest.mark.parametrize(("what", "spoil", "message"), FUZZ, ids=[what for what, _, _ in FUZZ])
def test_bad_tables_say_what_is_wrong(
    job: MineOptions, tmp_path: Path, what: str, spoil: Callable[..., Any], message: str
) -> None:
    queries, corpus = make_rows()
    spoil(queries, corpus)
    bad = replace(
        job, queries=write_lines(tmp_path / "q.jsonl", queries), corpus=write_lines(tmp_path / "c.jsonl", corpus)
    )
    with pytest.raises(ValueError, match=message):
        run(bad)
    assert not Path(job.out).exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": "nowhere.jsonl"}, "exists"),
        ({"out": "mined.csv"}, "that is .parquet, .jsonl or a folder"),
        ({"format": "pairs"}, "format to be one of"),
        ({"negatives": "Tilt("}, "needs an expression"),
        ({"negatives": "OtherLabel()"}, "needs labels"),
        ({"k": 0}, "k of 1 or more"),
        ({"similarity": "l2"}, "similarity to be one of cosine, dot"),
        ({"encoder": None}, "a --model or an --encoder"),
        ({"encoder": "nowhere:encode"}, "a module that exists"),
        ({"encoder": "nowhere.py:encode"}, "a Python file that exists"),
        ({"encoder": "test_mine_bad_files:nothing"}, "a function 'nothing'"),
        ({"encoder": "test_mine_bad_files"}, "'module:function'"),
        ({"encoder": "test_mine_bad_files:bad_shape"}, r"floats \[20, d\]"),
        ({"encoder": "test_mine_bad_files:not_finite"}, "NaN or inf in queries"),
        ({"encoder": "test_mine_bad_files:zeros"}, "zero vectors in queries, first in row 0"),
        ({"rescore": "test_mine_bad_files:too_few"}, "one finite score for each"),
        ({"corpus_embeddings": "C.npy"}, "one embedding for each row of the corpus, got 3 for 60"),
        ({"columns": Columns(query="nothing")}, "the column 'nothing' in the queries"),
        ({"queries": "C.npy"}, "judgements .* with embeddings only, got none; give judgements"),
        ({"corpus_embeddings": "two.npz"}, r"got \['a', 'b'\]; name it with embedding_column"),
        (
            {"queries": "ids.jsonl", "corpus": "texts.jsonl", "judgements": "j.csv"},
            "the corpus without a column of ids; name it with corpus_id_c",
        ),
        ({"device": "gpu"}, "a torch device, such as cpu or cuda:0, got device='gpu'"),
    ],
)
def test_bad_options_say_what_is_wrong(
    job: MineOptions, tmp_path: Path, change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("C.npy", np.ones((3, 64), dtype=np.float32))
    np.savez("two.npz", a=np.ones((60, 64), dtype=np.float32), b=np.ones((60, 64), dtype=np.float32))
    write_lines(tmp_path / "texts.jsonl", [{"text": "a"}, {"text": "b"}])
    write_lines(tmp_path / "ids.jsonl", [{"id": "q0", "query": "a"}])
    (tmp_path / "j.csv").write_text("query_id,doc_id\nq0,d0\n")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run(replace(job, **change))
    assert not Path(job.out).exists()


def bad_shape(texts: list[str]) -> Any:
    return np.zeros(3)


def not_finite(texts: list[str]) -> Any:
    return np.full((len(texts), 4), np.nan)


def zeros(texts: list[str]) -> Any:
    return np.zeros((len(texts), 4))


def too_few(pairs: list[tuple[str, str]]) -> Any:
    return [1.0] * (len(pairs) - 1)


@pytest.mark.parametrize("text", ['{"id": 1', "[1, 2]", "\ufffe\x00"])
def test_broken_lines(job: MineOptions, tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"id": "d0", "text": "a"}\n' + text, encoding="utf-8")
    with raises(FileError, who="mine", path="broken.jsonl", got="line 2"):
        run(replace(job, corpus=str(path)))


def test_other_broken_files(job: MineOptions, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="needs the extra 'text'")
    (tmp_path / "c.csv").write_text("id,text\nd0,a,b\n")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 not really")
    (tmp_path / "latin.jsonl").write_bytes('{"id": "d0", "text": "é"}'.encode("latin-1"))
    (tmp_path / "c.npy").write_bytes(b"")
    for name, message in (("c.csv", "2 fields"), ("c.parquet", "undamaged Parquet"), ("latin.jsonl", "UTF-8")):
        with pytest.raises(ValueError, match=message):
            run(replace(job, corpus=str(tmp_path / name)))


@pytest.mark.parametrize(("looked_at", "said"), [(24_690_000, "12,345,000 candidates"), (5, "2.5 candidates")])
def test_the_number_of_candidates_is_written_out(job: MineOptions, looked_at: int, said: str) -> None:
    explanation = Explanation((), (), queries=2, looked_at=looked_at, why={"1. Uniform()": 2})
    assert f"a query has {said}, of which Uniform() leaves too few" in str(no_negatives(explanation, job.format))


def test_a_corpus_without_candidates_has_a_fix_of_its_own(job: MineOptions) -> None:
    error = no_negatives(Explanation((), (), queries=1, why={TOO_FEW: 1}), job.format)
    assert error.fix == "give more documents with corpus"


def test_ranks_beyond_the_lists_raise_before_anything_is_encoded(job: MineOptions) -> None:
    asked = replace(job, negatives="Rank(30, 40)", rescore="support.mining_jobs:overlap", candidates=32)
    with raises(ArgumentError, who="mine", what="Rank(start=30, stop=40)", got="candidates=32", fix="candidates=33"):
        run(asked)
    assert not Path(f"{job.out}.embeddings").exists()
    assert run(replace(asked, candidates=33)) is not None
