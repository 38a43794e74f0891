"""`hardneg mine`: every input and output format gives the same."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hardneg.core.errors import ArgumentError
from hardneg.io.tables import read_table
from hardneg.mining.encode import encoder_of_function
from hardneg.mining.job import run
from hardneg.mining.options import Columns, MineOptions
from support.errors import raises
from support.mining_jobs import as_csv, as_parquet, encode, expected, lines, make_rows, write_lines

pytest.importorskip("pyarrow", reason="needs the extra 'text'")


def test_an_encoder_of_a_file(job: MineOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in ``hardneg evaluate``; what it gives is kept until the file changes, also where it only imports it."""
    run(job)
    source = "from support.mining_jobs import encode\n"
    (tmp_path / "own.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    own = replace(job, encoder="own.py:encode", out=str(tmp_path / "own.jsonl"))
    run(own)
    assert lines(own.out) == lines(job.out)
    first = encoder_of_function("own.py:encode", "1").key
    (tmp_path / "own.py").write_text(source + "# changed\n")
    assert encoder_of_function("own.py:encode", "1").key != first
    assert "own" not in sys.modules, "a file has a name of its own"
    (tmp_path / "own.py").write_text("import beside\nencode = beside.encode\n")
    with raises(ArgumentError, who="mine", got="No module named 'beside'"):
        encoder_of_function("own.py:encode")
    (tmp_path / "beside.py").write_text("def encode(texts):\n    return 'of the changed file'\n")
    assert encoder_of_function("own.py:encode").encode([]) == "of the changed file"


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
def test_every_output_gives_the_same(
    job: MineOptions, tmp_path: Path, name: str, format: str, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert not capsys.readouterr().err


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
