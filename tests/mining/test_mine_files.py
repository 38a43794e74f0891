"""`hardneg mine`: every input and output format, the rules for odd input, and the errors that name what is wrong."""

from __future__ import annotations

import csv
import gzip
import json
import os
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from hardneg.cli.mine import mine as verb
from hardneg.core.errors import ArgumentError, HardnegWarning
from hardneg.core.types import Keys
from hardneg.io.tables import read_table
from hardneg.mining import mine
from hardneg.mining.encode import encoder_of_function
from hardneg.mining.estimate import estimate
from hardneg.mining.explain import Explanation
from hardneg.mining.job import _no_negatives, run
from hardneg.mining.options import Columns, MineOptions

pyarrow = pytest.importorskip("pyarrow", reason="needs the extra 'mine'")
WORDS = tuple("cat dog fish bird tree rock river cloud sun moon star wind rain snow fire sand salt iron".split())  # noqa: SIM905


def encode(texts: list[str]) -> np.ndarray:
    """Pairs of letters, counted, and a little of each text's own, so that no two scores are equal."""
    own = [np.random.default_rng(zlib.crc32(text.encode("utf-8", "surrogatepass"))) for text in texts]
    out = np.stack([0.1 * each.standard_normal(64, dtype=np.float32) for each in own])
    for row, text in enumerate(texts):
        for first, second in zip(text, text[1:] + " ", strict=True):
            out[row, (ord(first) * 31 + ord(second)) % 64] += 1
    return out


def overlap(pairs: list[tuple[str, str]]) -> list[float]:
    return [len(set(a.split()) & set(b.split())) + len(b) / 1000 for a, b in pairs]


def make_rows(n: int = 60, q: int = 20) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(WORDS, 6)) + f" {i}" for i in range(n)]
    corpus = [{"id": f"d{i}", "text": text} for i, text in enumerate(texts)]
    queries = [
        {"id": f"q{i}", "query": " ".join(texts[i].split()[:4]), "positive": [f"d{i}", f"d{i + 20}"][: 1 + i % 2]}
        for i in range(q)
    ]
    return queries, corpus


def write_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def make_job(folder: Path) -> MineOptions:
    queries, corpus = make_rows()
    return MineOptions(
        queries=write_lines(folder / "queries.jsonl", queries),
        corpus=write_lines(folder / "corpus.jsonl", corpus),
        out=str(folder / "mined.jsonl"),
        encoder="test_mine_files:encode",
        negatives="BelowPositive(relative=0.02)",
        k=3,
        format="ids",
    )


@pytest.fixture
def job(tmp_path: Path) -> MineOptions:
    return make_job(tmp_path)


def lines(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def test_an_encoder_of_a_file(job: MineOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in ``hardneg evaluate``; what it gives is kept until the file changes, also where it only imports it."""
    run(job)
    source = "from test_mine_files import encode\n"
    (tmp_path / "own.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    own = replace(job, encoder="own.py:encode", out=str(tmp_path / "own.jsonl"))
    run(own)
    assert lines(own.out) == lines(job.out)
    first = encoder_of_function("own.py:encode").key
    (tmp_path / "own.py").write_text(source + "# changed\n")
    assert encoder_of_function("own.py:encode").key != first
    assert "own" not in sys.modules, "a file has a name of its own"
    (tmp_path / "own.py").write_text("import beside\nencode = beside.encode\n")
    with pytest.raises(ArgumentError, match=r"own\.py to be importable.*beside"):
        encoder_of_function("own.py:encode")
    (tmp_path / "beside.py").write_text("def encode(texts):\n    return 'of the changed file'\n")
    assert encoder_of_function("own.py:encode").encode([]) == "of the changed file"


def expected(k: int = 3, text: str = "BelowPositive(relative=0.02)", **options: Any) -> list[list[str]]:
    queries, corpus = make_rows()
    unit = torch.nn.functional.normalize
    q = unit(torch.from_numpy(encode([row["query"] for row in queries])), dim=-1)
    c = unit(torch.from_numpy(encode([row["text"] for row in corpus])), dim=-1)
    positives = [[int(one[1:]) for one in row["positive"]] for row in queries]
    mined = mine(Keys(q), Keys(c), positives, text, k, **options)
    return [[f"d{row}" for row in rows.tolist() if row >= 0] for rows in mined.rows]


def test_ids_and_scores_and_the_manifest(job: MineOptions) -> None:
    summary = run(job)
    assert summary is not None
    rows = lines(job.out)
    assert [row["negative_ids"] for row in rows] == expected()
    assert [row["query_id"] for row in rows] == [f"q{i}" for i in range(20)]
    assert rows[1]["positive_ids"] == ["d1", "d21"]
    manifest = json.loads(Path(f"{job.out}.manifest.json").read_text())
    assert manifest["seed"] == 0
    assert manifest["counts"]["queries"] == 20
    assert manifest["counts"]["negatives"] == sum(len(row["negative_ids"]) for row in rows)
    assert manifest["explain"]["queries"] == 20
    assert manifest["versions"]["torch"]
    assert manifest["command"]
    assert manifest["negatives"] == "BelowPositive(relative=0.02)"
    assert manifest["options"]["k"] == 3
    assert not Path(f"{job.out}.work").exists()
    assert summary.statistics["positives"]["mean"] > summary.statistics["random"]["mean"]


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("format", ["triplet", "n-tuple", "labeled-pair", "labeled-list"])
def test_formats_agree_with_sentence_transformers(job: MineOptions, format: str, scores: bool) -> None:
    """The same columns and rows as mine_hard_negatives with the same options, on a one-positive data set."""
    util = pytest.importorskip("sentence_transformers.util", reason="needs the extra 'text'")
    datasets = pytest.importorskip("datasets")
    queries, corpus = make_rows()
    text_of = {row["id"]: row["text"] for row in corpus}
    pairs = [{"anchor": row["query"], "positive": text_of[row["positive"][0]]} for row in queries]
    theirs = util.mine_hard_negatives(
        datasets.Dataset.from_list(pairs),
        EncoderOnly(),
        corpus=list(text_of.values()),
        num_negatives=3,
        range_max=50,
        relative_margin=0.02,
        output_format=format,
        output_scores=scores,
        verbose=False,
    )
    path = Path(job.out).parent / "pairs.jsonl"
    ours = replace(
        job, queries=write_lines(path, pairs), format=format, scores=scores, negatives="BelowPositive(relative=0.02)"
    )
    run(ours)
    rows = lines(job.out)
    assert list(rows[0]) == theirs.column_names
    for name in theirs.column_names:
        mine_, other = [row[name] for row in rows], list(theirs[name])
        if name in ("score", "scores"):
            assert len(mine_) == len(other)
            for a, b in zip(mine_, other, strict=True):
                assert a == pytest.approx(b, abs=1e-5)
        else:
            assert mine_ == other


class EncoderOnly:
    """As much of a SentenceTransformer as its miner uses."""

    device = torch.device("cpu")

    def encode_query(self, texts: list[str], **_: Any) -> np.ndarray:
        vectors = encode(texts)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    encode_document = encode_query

    def get_embedding_dimension(self) -> int:
        return 64

    def similarity(self, a: Any, b: Any) -> torch.Tensor:
        return torch.as_tensor(a) @ torch.as_tensor(b).T

    def similarity_pairwise(self, a: Any, b: Any) -> torch.Tensor:
        return (torch.as_tensor(a) * torch.as_tensor(b)).sum(-1)


def as_csv(path: Path, rows: list[dict[str, Any]], delimiter: str = ",") -> str:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(list(rows[0]))
        writer.writerows(list(row.values()) for row in rows)
    return str(path)


def as_parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def as_dataset(path: Path, rows: list[dict[str, Any]]) -> str:
    datasets = pytest.importorskip("datasets", reason="needs the extra 'text'")
    datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return str(path)


def as_gzip(path: Path, rows: list[dict[str, Any]]) -> str:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return str(path)


@pytest.mark.parametrize(
    ("name", "write"),
    [("c.csv", as_csv), ("c.parquet", as_parquet), ("c", as_dataset), ("c.jsonl.gz", as_gzip)],
)
def test_every_table_gives_the_same(job: MineOptions, tmp_path: Path, name: str, write: Callable[..., str]) -> None:
    run(replace(job, corpus=write(tmp_path / name, make_rows()[1])))
    assert [row["negative_ids"] for row in lines(job.out)] == expected()


@pytest.mark.parametrize("name", ["mined.jsonl", "mined.parquet", "mined"])
@pytest.mark.parametrize("format", ["triplet", "labeled-list", "ids"])
def test_every_output_gives_the_same(job: MineOptions, tmp_path: Path, name: str, format: str) -> None:
    if name == "mined":
        pytest.importorskip("datasets", reason="needs the extra 'text'")
    run(replace(job, out=str(tmp_path / "plain.jsonl"), format=format, scores=True))
    for _ in range(2):  # the second run replaces the first
        run(replace(job, out=str(tmp_path / name), format=format, scores=True))
    table = read_table(tmp_path / name)
    plain = read_table(tmp_path / "plain.jsonl")
    assert list(table) == list(plain)
    for column in plain:
        if column == "scores":
            assert [pytest.approx(row, abs=1e-6) for row in plain[column]] == table[column]
        else:
            assert table[column] == plain[column]


@pytest.mark.parametrize("kind", ["npy", "npz", "safetensors", "parquet"])
def test_embeddings_only(job: MineOptions, tmp_path: Path, kind: str) -> None:
    queries, corpus = make_rows()
    paths = []
    for name, rows, text in (("q", queries, "query"), ("c", corpus, "text")):
        vectors, path = encode([row[text] for row in rows]), tmp_path / f"{name}.{kind}"
        if kind == "npy":
            np.save(path, vectors)
        elif kind == "npz":
            np.savez(path, vectors=vectors, ids=np.array([row["id"] for row in rows]))
        elif kind == "safetensors":
            pytest.importorskip("safetensors.torch").save_file({"vectors": torch.from_numpy(vectors)}, str(path))
        else:
            as_parquet(path, [{"id": r["id"], "embedding": v.tolist()} for r, v in zip(rows, vectors, strict=True)])
        paths.append(str(path))
    number = (lambda one: one) if kind in ("npz", "parquet") else (lambda one: one[1:])
    judged = [
        {"query-id": number(row["id"]), "corpus-id": number(one), "score": 1}
        for row in queries
        for one in row["positive"]
    ]
    judged.append({"query-id": number("q0"), "corpus-id": number("d5"), "score": 0})  # judged not relevant
    options = replace(
        job,
        queries=paths[0],
        corpus=None if kind != "parquet" else write_lines(tmp_path / "c.jsonl", corpus),
        query_embeddings=None,
        corpus_embeddings=paths[1],
        encoder=None,
        judgements=as_csv(tmp_path / "judged.tsv", judged, "\t"),
    )
    if kind == "parquet":
        options = replace(options, queries=write_lines(tmp_path / "q.jsonl", queries), query_embeddings=paths[0])
    run(options)
    found = [[str(one) for one in row["negative_ids"]] for row in lines(job.out)]
    assert found == [[number(one) for one in row] for row in expected()]


def test_positives_as_the_corpus(job: MineOptions, tmp_path: Path) -> None:
    queries, corpus = make_rows()
    text_of = {row["id"]: row["text"] for row in corpus}
    pairs = [{"anchor": r["query"], "positive": text_of[p]} for r in queries for p in r["positive"]]
    run(
        replace(
            job, queries=write_lines(tmp_path / "p.jsonl", pairs), corpus=None, format="triplet", negatives="Uniform()"
        )
    )
    rows = lines(job.out)
    positives = {r["query"]: {text_of[p] for p in r["positive"]} for r in queries}
    documents = {pair["positive"] for pair in pairs}
    assert len(rows) == 3 * len(pairs)
    for row in rows:
        assert row["negative"] in documents - positives[row["anchor"]]


def test_a_positive_is_never_a_negative_under_another_id(job: MineOptions, tmp_path: Path) -> None:
    _, corpus = make_rows()
    copies = [{"id": f"copy{i}", "text": row["text"]} for i, row in enumerate(corpus)]
    summary = run(replace(job, corpus=write_lines(tmp_path / "c.jsonl", [*corpus, *copies])))
    assert summary is not None
    assert summary.counts["copies_of_documents"] == len(copies)
    assert [row["negative_ids"] for row in lines(job.out)] == expected()


def test_a_query_is_never_its_own_negative(job: MineOptions, tmp_path: Path) -> None:
    queries, corpus = make_rows()
    corpus.append({"id": "self", "text": queries[0]["query"]})
    run(replace(job, corpus=write_lines(tmp_path / "c.jsonl", corpus), negatives="Uniform()"))
    assert "self" not in lines(job.out)[0]["negative_ids"]
    run(replace(job, queries=job.corpus or "", columns=Columns(query="text", positive="id")))  # a corpus on itself
    for row in lines(job.out):
        assert row["query_id"] not in row["negative_ids"]


def test_a_string_is_one_positive(job: MineOptions, tmp_path: Path) -> None:
    queries, _ = make_rows()
    for row in queries:
        row["positive"] = row["positive"][0]
    run(replace(job, queries=write_lines(tmp_path / "q.jsonl", queries)))
    assert lines(job.out)[3]["positive_ids"] == ["d3"]


def test_labels(job: MineOptions, tmp_path: Path) -> None:
    queries, corpus = make_rows()
    for number, row in enumerate([*queries, *corpus]):
        row["topic"] = ["a", "b", None][number % 3]
    run(
        replace(
            job,
            queries=write_lines(tmp_path / "q.jsonl", queries),
            corpus=write_lines(tmp_path / "c.jsonl", corpus),
            columns=Columns(label="topic"),
            negatives="OtherLabel()",
        )
    )
    topic = {row["id"]: row["topic"] for row in [*queries, *corpus]}
    same = 0
    for row in lines(job.out):
        own = topic[row["query_id"]]
        assert len(row["negative_ids"]) == 3
        assert own is None or all(topic[one] != own for one in row["negative_ids"])
        same += sum(topic[one] is own is None for one in row["negative_ids"])
    assert same > 0  # nothing is known of two missing labels, so that they are not the same


def test_rescoring_and_words(job: MineOptions) -> None:
    pytest.importorskip("bm25s", reason="needs the extra 'lexical'")
    run(replace(job, bm25=True, candidates=10, negatives="Uniform()", rescore="test_mine_files:overlap", k=5))
    queries, corpus = make_rows()
    text_of = {row["id"]: row["text"] for row in corpus}
    rows = lines(job.out)
    assert {name for row in rows for name in row["found_by"]} == {"embedding", "bm25", "embedding+bm25"}
    for query, row in zip(queries, rows, strict=True):
        scores = overlap([(query["query"], text_of[one]) for one in row["negative_ids"]])
        assert row["scores"] == pytest.approx(scores)
        assert scores == sorted(scores, reverse=True)


def test_words_alone_need_no_embeddings(job: MineOptions) -> None:
    pytest.importorskip("bm25s", reason="needs the extra 'lexical'")
    run(replace(job, search="bm25", encoder=None, negatives="Rank(1, 20)", k=3))
    queries, corpus = make_rows()
    text_of = {row["id"]: row["text"] for row in corpus}
    rows = lines(job.out)
    assert sum(len(row["negative_ids"]) for row in rows) > 40
    for query, row in zip(queries, rows, strict=True):
        assert row["scores"] == sorted(row["scores"], reverse=True)
        for one in row["negative_ids"]:
            assert set(query["query"].split()) & set(text_of[one].split())
    with pytest.raises(ValueError, match="needs embeddings for near_positive"):
        run(replace(job, search="bm25", encoder=None, near_positive=0.9))
    with pytest.raises(
        ValueError, match=r"candidates, of which Rank\(start=50, stop=200\) .* raise candidates=100, the best"
    ):
        run(replace(job, search="bm25", encoder=None, negatives="Rank(50, 200)", format="triplet"))


def test_the_cache_encodes_once(job: MineOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import test_mine_files as me

    calls: list[int] = []
    original = encode
    monkeypatch.setattr(me, "encode", lambda texts: calls.append(len(texts)) or original(texts))
    run(replace(job, cache=str(tmp_path / "cache")))
    assert calls == [1, 20, 60]  # one text, before the time is taken
    run(replace(job, cache=str(tmp_path / "cache"), k=2, seed=9))
    assert calls == [1, 20, 60]
    queries, _ = make_rows()
    queries[0]["query"] = "something else"
    run(replace(job, cache=str(tmp_path / "cache"), queries=write_lines(tmp_path / "q.jsonl", queries)))
    assert calls == [1, 20, 60, 20]


def test_many_pieces_are_joined_on_disk(job: MineOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    from hardneg.mining import encode as module

    monkeypatch.setattr(module, "_piece", 7)
    monkeypatch.setattr(module, "_in_memory", 0)
    run(job)
    assert [row["negative_ids"] for row in lines(job.out)] == expected()


def test_unicode_and_long_text(job: MineOptions, tmp_path: Path) -> None:
    queries, corpus = make_rows()
    odd = ["Größe 猫 🐈 \u202e \x00 a", "x" * 300_000, 'quote " comma, \t tab', "line\nbreak \r\n \u2028 end"]
    for place, text in enumerate(odd):
        corpus[place]["text"] = text
        queries[place + 4]["query"] = text[:200] + " ?"
    for name in ("m.jsonl", "m.parquet"):
        run(
            replace(
                job,
                queries=write_lines(tmp_path / "q.jsonl", queries),
                corpus=write_lines(tmp_path / "c.jsonl", corpus),
                out=str(tmp_path / name),
                format="triplet",
                k=40,
            )
        )
        found = set(read_table(tmp_path / name)["negative"])
        assert set(odd) <= found


FUZZ: list[tuple[str, Callable[[list[Any], list[Any]], Any], str]] = [
    ("missing column", lambda q, c: [row.pop("positive") for row in q], "column of positives"),
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
        ({"encoder": "test_mine_files:nothing"}, "a function 'nothing'"),
        ({"encoder": "test_mine_files"}, "'module:function'"),
        ({"encoder": "test_mine_files:bad_shape"}, r"floats \[20, d\]"),
        ({"encoder": "test_mine_files:not_finite"}, "NaN or inf in queries"),
        ({"encoder": "test_mine_files:zeros"}, "zero vectors in queries, first in row 0"),
        ({"rescore": "test_mine_files:too_few"}, "one finite score for each"),
        ({"corpus_embeddings": "C.npy"}, "one embedding for each row of the corpus, got 3 for 60"),
        ({"columns": Columns(query="nothing")}, "the column 'nothing' in the queries"),
    ],
)
def test_bad_options_say_what_is_wrong(
    job: MineOptions, tmp_path: Path, change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("C.npy", np.ones((3, 64), dtype=np.float32))
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
    with pytest.raises(ValueError, match=r"one JSON object in each line, got .* line 2"):
        run(replace(job, corpus=str(path)))


def test_other_broken_files(job: MineOptions, tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text("id,text\nd0,a,b\n")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 not really")
    (tmp_path / "latin.jsonl").write_bytes('{"id": "d0", "text": "é"}'.encode("latin-1"))
    (tmp_path / "c.npy").write_bytes(b"")
    for name, message in (("c.csv", "2 fields"), ("c.parquet", "whole Parquet"), ("latin.jsonl", "UTF-8")):
        with pytest.raises(ValueError, match=message):
            run(replace(job, corpus=str(tmp_path / name)))


@pytest.mark.parametrize(("looked_at", "said"), [(24_690_000, "12,345,000 candidates"), (5, "2.5 candidates")])
def test_the_number_of_candidates_is_written_out(job: MineOptions, looked_at: int, said: str) -> None:
    explanation = Explanation((), (), queries=2, looked_at=looked_at, why={"1. Uniform()": 2})
    assert f"a query has {said}, of which Uniform() leaves too few" in str(_no_negatives(job, explanation))


def test_one_document(job: MineOptions, tmp_path: Path) -> None:
    one = write_lines(tmp_path / "c.jsonl", [{"id": "d0", "text": "alone"}])
    query = write_lines(tmp_path / "q.jsonl", [{"id": "q0", "query": "who", "positive": "d0"}])
    with pytest.warns(HardnegWarning, match="k=3 is more than a query has candidates, 0 at most"):
        summary = run(replace(job, queries=query, corpus=one))
    assert summary is not None
    assert lines(job.out) == [{"query_id": "q0", "positive_ids": ["d0"], "negative_ids": [], "scores": []}]
    assert summary.explanation.why == {"too few candidates": 1}


def test_missing_positives_may_be_dropped(job: MineOptions, tmp_path: Path) -> None:
    queries, _ = make_rows()
    queries[2]["positive"] = ["d999"]
    queries[3]["positive"] = ["d3", "d998"]
    summary = run(replace(job, queries=write_lines(tmp_path / "q.jsonl", queries), missing_positives="drop"))
    assert summary is not None
    assert summary.counts["positives_not_in_corpus"] == 2
    assert summary.counts["queries_without_positive"] == 1
    assert [row["query_id"] for row in lines(job.out)] == [f"q{i}" for i in range(20) if i != 2]


def test_ranks_beyond_the_lists_raise_before_anything_is_encoded(job: MineOptions) -> None:
    asked = replace(job, negatives="Rank(30, 40)", rescore="test_mine_files:overlap", candidates=32)
    with pytest.raises(ArgumentError, match=r"33 candidates of a query for Rank.*; use candidates=33, or a window"):
        run(asked)
    assert not Path(f"{job.out}.embeddings").exists()
    assert run(replace(asked, candidates=33)) is not None


def test_dry_run_writes_nothing(job: MineOptions, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    cost = estimate(job)
    assert cost.queries == 20
    assert cost.corpus == 60
    assert cost.mining_seconds > 0
    assert cost.encoding_seconds > 0
    assert cost.peak_bytes > 2**20
    assert sorted(tmp_path.rglob("*")) == before


def test_no_call_is_needed_that_windows_lacks(job: MineOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("fcntl", "resource", "psutil"):
        monkeypatch.setitem(sys.modules, module, None)
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "fork", "sched_getaffinity", "sysconf"):
        monkeypatch.delattr(os, name, raising=False)
    app = typer.Typer()
    app.command()(verb)
    command = [job.queries, "--corpus", str(job.corpus), "--encoder", str(job.encoder), "-n", job.negatives]
    dry = CliRunner().invoke(app, [*command, "-o", job.out, "--dry-run"])
    assert "\ndisk about " in dry.output, dry.output
    assert CliRunner().invoke(app, [*command, "-o", job.out]).exit_code == 0
    assert Path(job.out).exists()


def test_the_verb(job: MineOptions) -> None:
    app = typer.Typer()
    app.command()(verb)
    command = [job.queries, "--corpus", str(job.corpus), "--encoder", str(job.encoder), "-k", "3", "--format", "ids"]
    command += ["-n", job.negatives, "-o", job.out]
    done = CliRunner().invoke(app, [*command, "--explain"])
    assert done.exit_code == 0, done.output
    assert "BelowPositive(relative=0.02)" in done.output
    assert "similarity" in done.output
    assert [row["negative_ids"] for row in lines(job.out)] == expected()
    assert CliRunner().invoke(app, [*command, "--dry-run"]).output.count("about") == 4
    wrong = CliRunner().invoke(app, [*command, "--draw", "best"])
    assert wrong.exit_code == 2
    assert "--draw to be one of top, gumbel, categorical, got --draw best" in wrong.output


def test_images(job: MineOptions, tmp_path: Path) -> None:
    """A folder of images on itself, by label: the encoder gets the paths."""
    for name in ("cats/a.png", "cats/b.png", "dogs/c.png", "dogs/d.png"):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "images" / name).write_bytes(b"")
    folder = str(tmp_path / "images")
    columns = Columns(positive="id", label="label")
    run(replace(job, queries=folder, corpus=folder, columns=columns, negatives="OtherLabel()", k=2))
    rows = lines(job.out)
    assert [row["query_id"] for row in rows] == ["cats/a.png", "cats/b.png", "dogs/c.png", "dogs/d.png"]
    assert set(rows[0]["negative_ids"]) == {"dogs/c.png", "dogs/d.png"}
