"""Audits of mined files: planted faults are found in every format, with the manifest, with other tables, and alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hardneg.auditing.files import AuditOptions, audit_files
from hardneg.auditing.inputs import Lists, read_lists
from hardneg.auditing.options import Settings
from hardneg.core.errors import ArgumentError, Damaged, DataChanged
from hardneg.io.sealed import CHECKSUM, with_checksum
from hardneg.mining.job import run
from hardneg.mining.options import MineOptions
from support.errors import raises
from support.mining_jobs import encode, make_rows, write_lines

pytest.importorskip("pyarrow", reason="needs the extra 'mine'")
FORMATS = ("triplet", "n-tuple", "labeled-pair", "labeled-list", "ids")
QUIET = Settings(frontier=False)


@pytest.fixture
def tables(tmp_path: Path) -> dict[str, str]:
    queries, corpus = make_rows()
    np.save(tmp_path / "q.npy", encode([row["query"] for row in queries]))
    np.save(tmp_path / "d.npy", encode([row["text"] for row in corpus]))
    return {
        "queries": write_lines(tmp_path / "queries.jsonl", queries),
        "corpus": write_lines(tmp_path / "corpus.jsonl", corpus),
        "query_embeddings": str(tmp_path / "q.npy"),
        "corpus_embeddings": str(tmp_path / "d.npy"),
    }


def mine_into(tables: dict[str, str], out: Path, **changes: Any) -> str:
    options = {"negatives": "Rank(1, 40)", "k": 4, **changes}
    run(MineOptions(out=str(out), **tables, **options))
    return str(out)


def rewrite(manifest: Path, **changes: Any) -> None:
    """Other values in a manifest, with the checksum of what is now in it: what someone else could have made."""
    record = {**json.loads(manifest.read_text()), **changes}
    record.pop(CHECKSUM, None)
    manifest.write_text(json.dumps(with_checksum(record)))


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ""])
@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_says_the_same(kind: str, suffix: str, tables: dict[str, str], tmp_path: Path) -> None:
    if suffix == "":
        pytest.importorskip("datasets", reason="needs the extra 'text'")
    mined = mine_into(tables, tmp_path / f"mined{suffix}", format=kind)
    found = audit_files(AuditOptions(mined, settings=QUIET))
    findings = found.mined
    assert findings is not None
    assert (findings.queries, findings.negatives, findings.wanted, findings.short) == (20, 80, 4, 0)
    assert (findings.equal_to_positive, findings.positive_under_another_id, findings.repeated) == (0, 0, 0)
    assert findings.queries_without == 0
    assert findings.documents_in_corpus == 60
    row = found.row("mined")
    lists = read_lists(mined)
    vectors = {row["text"]: v for row, v in zip(*_texts(tables, "corpus"), strict=True)}
    vectors |= {row["id"]: v for row, v in zip(*_texts(tables, "corpus"), strict=True)}
    wanted = {row["query"]: v for row, v in zip(*_texts(tables, "queries"), strict=True)}
    wanted |= {row["id"]: v for row, v in zip(*_texts(tables, "queries"), strict=True)}
    similar = [
        float(np.mean([wanted[query] @ vectors[name] for name in names]))
        for query, names in zip(lists.queries, lists.negatives, strict=True)
    ]
    assert row.similarity == pytest.approx(np.mean(similar), abs=1e-5)
    assert row.effective_number == pytest.approx(4)


def _texts(tables: dict[str, str], side: str) -> tuple[list[dict[str, Any]], np.ndarray]:
    rows = [json.loads(line) for line in Path(tables[side]).read_text().splitlines()]
    vectors = np.load(tables["query_embeddings" if side == "queries" else "corpus_embeddings"]).astype(np.float64)
    return rows, vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_planted_faults_are_found(tables: dict[str, str], tmp_path: Path) -> None:
    """A copy of the positive under another id, by text; one by its vector; the positive itself; one twice."""
    rows, vectors = _texts(tables, "corpus")
    rows += [{"id": "copy", "text": "  " + rows[0]["text"].upper()}, {"id": "twin", "text": "other words"}]
    write_lines(Path(tables["corpus"]), rows)
    np.save(tables["corpus_embeddings"], np.concatenate([vectors, -vectors[:1], 3 * vectors[2:3]]))
    theirs = [
        {"query_id": "q0", "positive_ids": ["d0"], "negative_ids": ["d5", "copy", "d7"]},
        {"query_id": "q1", "positive_ids": ["d1", "d21"], "negative_ids": ["d21", "d8", "d8"]},
        {"query_id": "q2", "positive_ids": ["d2"], "negative_ids": ["twin", "d30"]},
    ]
    mined = write_lines(tmp_path / "theirs.jsonl", theirs)
    found = audit_files(AuditOptions(mined, settings=QUIET, **tables))
    findings = found.mined
    assert findings is not None
    assert findings.positive_under_another_id == 2
    assert findings.equal_to_positive == 1
    assert findings.repeated == 1
    assert findings.short == 1  # the longest list has three
    assert [(one.query, one.negative, one.equals) for one in findings.examples] == [
        ("q0", "copy", "d0"),
        ("q1", "d21", "d21"),
        ("q2", "twin", "d2"),
    ]
    assert findings.compared_by == ("ids", "texts", "vectors")
    # By text alone the twin is not seen; by names alone neither is the copy.
    words = audit_files(AuditOptions(mined, settings=QUIET, corpus=tables["corpus"], queries=tables["queries"])).mined
    assert words is not None
    assert (words.positive_under_another_id, words.compared_by) == (1, ("ids", "texts"))
    alone = audit_files(AuditOptions(mined, settings=QUIET))
    assert alone.mined is not None
    assert (alone.mined.positive_under_another_id, alone.mined.equal_to_positive) == (0, 1)
    assert alone.rows == ()
    assert "no manifest" in " ".join(alone.notes)
    assert found.row("mined").near_duplicates == pytest.approx((0 + 1 / 3 + 1 / 2) / 3)  # the positive and the twin


def test_repeated_by_vector_and_short_lists_are_each_counted_once(tables: dict[str, str], tmp_path: Path) -> None:
    rows, vectors = _texts(tables, "corpus")
    write_lines(Path(tables["corpus"]), [*rows, {"id": "twin", "text": "other words"}])
    np.save(tables["corpus_embeddings"], np.concatenate([vectors, 2 * vectors[5:6]]))
    theirs = [
        {"query_id": "q0", "positive_ids": ["d0"], "negative_ids": ["d5", "d6", "twin"]},  # d5's vector again
        {"query_id": "q1", "positive_ids": ["d1"], "negative_ids": ["d7", "d7", "d8"]},
        {"query_id": "q2", "positive_ids": ["d2"], "negative_ids": ["d9"]},
        {"query_id": "q3", "positive_ids": ["d3"], "negative_ids": []},
    ]
    mined = write_lines(tmp_path / "theirs.jsonl", theirs)
    findings = audit_files(AuditOptions(mined, settings=QUIET, **tables)).mined
    assert findings is not None
    assert (findings.repeated, findings.positive_under_another_id) == (2, 0)
    assert (findings.short, findings.queries_without) == (2, None)
    # The manifest says that five were wanted for: one is not in the file at all, one has an empty list.
    Path(f"{mined}.manifest.json").write_text(json.dumps({"counts": {"queries": 5}, "options": {"k": 3}}))
    findings = audit_files(AuditOptions(mined, settings=QUIET, **tables)).mined
    assert findings is not None
    assert (findings.short, findings.queries_without) == (3, 2)
    by_text = audit_files(AuditOptions(mined, settings=QUIET, corpus=tables["corpus"], queries=tables["queries"])).mined
    assert by_text is not None
    assert by_text.repeated == 1  # without vectors the twin is not seen


def test_ids_are_compared_as_they_are_and_texts_whatever_their_case(tmp_path: Path) -> None:
    by_id = [{"query_id": "q", "positive_ids": ["Ab1"], "negative_ids": ["ab1", "AB1"]}]
    findings = audit_files(AuditOptions(write_lines(tmp_path / "ids.jsonl", by_id), settings=QUIET)).mined
    assert findings is not None
    assert (findings.positive_under_another_id, findings.repeated, findings.compared_by) == (0, 0, ("ids",))
    texts = [{"anchor": "q", "positive": "Some text", "negative_1": "some  TEXT", "negative_2": "Some Text"}]
    findings = audit_files(AuditOptions(write_lines(tmp_path / "texts.jsonl", texts), settings=QUIET)).mined
    assert findings is not None
    assert (findings.positive_under_another_id, findings.repeated) == (2, 1)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_the_similarity_is_that_of_the_manifest(similarity: str, tables: dict[str, str], tmp_path: Path) -> None:
    vectors = np.load(tables["corpus_embeddings"])
    np.save(tables["corpus_embeddings"], vectors * np.linspace(0.5, 3, len(vectors), dtype=np.float32)[:, None])
    mined = mine_into(tables, tmp_path / "mined.parquet", format="ids", similarity=similarity, negatives="Rank(0, 40)")
    lists = read_lists(mined)
    documents, wanted = np.load(tables["corpus_embeddings"]), np.load(tables["query_embeddings"])
    if similarity == "cosine":
        documents, wanted = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (documents, wanted))
    rows = [[int(name[1:]) for name in names] for names in lists.negatives]
    wanted = np.mean(
        [wanted[int(query[1:])] @ documents[own].mean(0) for query, own in zip(lists.queries, rows, strict=True)]
    )
    found = audit_files(AuditOptions(mined, settings=QUIET))
    assert found.row("mined").similarity == pytest.approx(float(wanted), abs=1e-4)
    other = {"cosine": "dot", "dot": "cosine"}[similarity]
    forced = audit_files(AuditOptions(mined, settings=QUIET, similarity=other))
    assert abs(forced.row("mined").similarity - float(wanted)) > 0.01  # the option wins


def test_manifests_of_other_versions(tables: dict[str, str], tmp_path: Path) -> None:
    mined = mine_into(tables, tmp_path / "mined.jsonl", format="ids")
    manifest = Path(f"{mined}.manifest.json")
    whole = json.loads(manifest.read_text())
    usual = audit_files(AuditOptions(mined, settings=QUIET)).row("mined")

    def audited(options: Any) -> Any:
        rewrite(manifest, options=options)
        return audit_files(AuditOptions(mined, settings=QUIET))

    newer = audited({**whole["options"], "sharpness": 3, "columns": {**whole["options"]["columns"], "title": None}})
    assert newer.row("mined") == usual
    assert "options that this version does not know: sharpness, title." in " ".join(newer.notes)
    older = audited({name: value for name, value in whole["options"].items() if name not in ("columns", "draw")})
    assert older.row("mined") == usual
    for odd in ({"k": 4}, {**whole["options"], "queries": 3}, {**whole["options"], "columns": [1], "corpus": None}):
        assert audited(odd).row("mined") == usual  # what is read is what the digests say
    assert "has no options" in " ".join(audited([]).notes)
    for inputs in (None, [], {}, {"queries": 3}, {"queries": {"path": "queries.jsonl"}}):
        rewrite(manifest, options=whole["options"], inputs=inputs)
        found = audit_files(AuditOptions(mined, settings=QUIET))
        assert found.mined is not None
        assert found.mined.negatives == 80
        assert found.rows == ()
        assert "could not be read" in " ".join(found.notes)
    manifest.write_text("[]")
    with raises(Damaged, who="audit", path="mined.jsonl.manifest.json", got="it is not a JSON object"):
        audit_files(AuditOptions(mined, settings=QUIET))


def mine_texts(tables: dict[str, str], out: Path) -> str:
    paths = {name: tables[name] for name in ("queries", "corpus")}
    rule = {"negatives": "Rank(1, 40)", "k": 4, "format": "ids"}
    run(MineOptions(out=str(out), **paths, encoder="support.mining_jobs:encode", **rule))
    return str(out)


def test_embeddings_come_from_the_cache_or_an_encoder_that_is_named(tables: dict[str, str], tmp_path: Path) -> None:
    mined = mine_texts(tables, tmp_path / "mined.jsonl")
    kept = audit_files(AuditOptions(mined, settings=QUIET)).row("mined")
    assert kept.effective_number == pytest.approx(4)
    Path(f"{mined}.embeddings").rename(tmp_path / "elsewhere")
    gone = audit_files(AuditOptions(mined, settings=QUIET))
    assert gone.rows == ()
    assert "not in" in " ".join(gone.notes)
    assert "--encoder" in " ".join(gone.notes)
    assert audit_files(AuditOptions(mined, settings=QUIET, cache=str(tmp_path / "elsewhere"))).row("mined") == kept
    done: dict[str, list[int]] = {}

    def encoding(what: str, steps: int) -> Any:
        done[what] = [steps, 0]

        def more(number: int) -> None:
            done[what][1] += number

        return more

    named = AuditOptions(mined, settings=QUIET, encoder="support.mining_jobs:encode")
    assert audit_files(named, encoding=encoding).row("mined") == kept
    assert done == {"encoding queries": [20, 20], "encoding corpus": [60, 60]}


@pytest.mark.parametrize("cache", ["kept", "gone"])
def test_no_code_of_a_manifest_runs(
    cache: str, tables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder, model or rescorer that a manifest names is not imported, and not called on the texts."""
    import subprocess

    import hardneg as hn

    called: list[Any] = []
    monkeypatch.setattr(subprocess, "getoutput", called.append)
    mined = mine_texts(tables, tmp_path / "mined.jsonl")
    if cache == "gone":
        shutil.rmtree(f"{mined}.embeddings")
    manifest = Path(f"{mined}.manifest.json")
    findings = json.loads(manifest.read_text())
    before = sorted(path for path in tmp_path.rglob("*"))
    for name in ("encoder", "model", "rescore"):
        for code in ("subprocess:getoutput", "os:system", str(tmp_path / "model")):
            rewrite(manifest, options={**findings["options"], name: code, "cache": str(tmp_path / "written")})
            audit_files(AuditOptions(mined, settings=QUIET))
            hn.audit(mined=mined, frontier=False)
            rewrite(manifest, encoder={"queries": code, "corpus": code})
            audit_files(AuditOptions(mined, settings=QUIET))
    assert called == []
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_paths_are_found_from_the_manifest(
    tables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another folder, with other files of the same names in it, the audit is the same."""
    home, away = tmp_path / "home", tmp_path / "away"
    for folder in (home, away):
        folder.mkdir()
        for path in tables.values():
            shutil.copy(path, folder)
    for name in ("q.npy", "d.npy"):
        np.save(away / name, np.random.default_rng(1).standard_normal(np.load(home / name).shape).astype(np.float32))
    monkeypatch.chdir(home)
    (home / "out").mkdir()
    near = {name: Path(path).name for name, path in tables.items()}
    mined = [mine_into(near, Path("mined.jsonl"), format="ids"), mine_into(near, Path("out/mined.jsonl"), format="ids")]
    usual = audit_files(AuditOptions(mined[0], settings=QUIET)).row("mined")
    monkeypatch.chdir(away)
    for path in mined:
        found = audit_files(AuditOptions(str(Path("..") / "home" / path), settings=QUIET))
        assert found.row("mined") == usual


def test_files_of_other_content_are_refused(tables: dict[str, str], tmp_path: Path) -> None:
    mined = mine_into(tables, tmp_path / "mined.jsonl", format="ids")
    manifest = Path(f"{mined}.manifest.json")
    inputs = json.loads(manifest.read_text())["inputs"]
    secret = tmp_path.parent / f"secret-{tmp_path.name}.jsonl"
    shutil.copy(tables["corpus"], secret)
    secret.write_text(secret.read_text().replace("cat", "cow"))
    for path, size in ((str(secret), secret.stat().st_size), (f"../{secret.name}", None), ("/etc/passwd", 0)):
        rewrite(manifest, inputs={**inputs, "corpus": {**inputs["corpus"], "path": path, "bytes": size}})
        with raises(DataChanged, who="audit", what="were mined", fix="--queries"):
            audit_files(AuditOptions(mined, settings=QUIET))
    rewrite(manifest, inputs={**inputs, "corpus": {"path": "/", "sha256": "0" * 64}})
    assert "a folder outside" in " ".join(audit_files(AuditOptions(mined, settings=QUIET)).notes)
    rewrite(manifest, inputs=inputs)
    np.save(tables["corpus_embeddings"], -np.load(tables["corpus_embeddings"]))
    with raises(DataChanged, who="audit", what="corpus_embeddings", got="whose content"):
        audit_files(AuditOptions(mined, settings=QUIET))


def test_columns_go_by_name_and_lists_are_lists(tmp_path: Path) -> None:
    shuffled = [{"id": 7, "negative": "n", "positive": "p", "label": 1, "anchor": "a"}]
    assert read_lists(write_lines(tmp_path / "named.jsonl", shuffled)) == Lists(["a"], [["p"]], [["n"]])
    flag = [{"query": "a", "pos": ["p", "r"], "neg": ["x", "y", "x"]}, {"query": "b", "pos": ["p"], "neg": []}]
    wanted = Lists(["a", "b"], [["p", "r"], ["p"]], [["x", "x", "y"], []])
    assert read_lists(write_lines(tmp_path / "flag.jsonl", flag)) == wanted
    found = audit_files(AuditOptions(str(tmp_path / "flag.jsonl"), settings=QUIET)).mined
    assert found is not None
    assert (found.negatives, found.repeated, found.short) == (3, 1, 1)
    placed = [{"id": 7, "sentence": "a", "match": ["p"], "negative_2": "y", "negative_1": "x"}]
    assert read_lists(write_lines(tmp_path / "placed.jsonl", placed)) == Lists(["a"], [["p"]], [["x", "y"]])
    pairs = tmp_path / "pairs.csv"
    pairs.write_text("anchor,positive,label\na,p,1\na,x,0\n")
    assert read_lists(pairs) == Lists(["a"], [["p"]], [["x"]])


def test_judgements_tell_false_negatives_of_a_file(tables: dict[str, str], tmp_path: Path) -> None:
    mined = mine_into(tables, tmp_path / "mined.parquet", format="ids")
    lists = read_lists(mined)
    judged = [(f"q{i}", lists.negatives[i][0], 1) for i in range(10)] + [("q3", "d3", 0), ("nobody", "d1", 1)]
    file = tmp_path / "qrels.tsv"
    file.write_text("query-id\tcorpus-id\tscore\n" + "".join(f"{q}\t{d}\t{s}\n" for q, d, s in judged))
    found = audit_files(AuditOptions(mined, settings=QUIET, judgements=str(file)))
    assert found.num_anchors == 10  # the queries that were judged
    assert found.row("mined").false_negatives == pytest.approx(1 / 4)
    assert found.judges == ("judgements",)


def test_judgements_need_no_vectors(tables: dict[str, str], tmp_path: Path) -> None:
    mined = mine_texts(tables, tmp_path / "mined.jsonl")
    shutil.rmtree(f"{mined}.embeddings")
    lists = read_lists(mined)
    judged = [(lists.queries[i], lists.negatives[i][0]) for i in range(5)]
    file = tmp_path / "qrels.tsv"
    file.write_text("query-id\tcorpus-id\tscore\n" + "".join(f"{query}\t{row}\t1\n" for query, row in judged))
    notes = " ".join(audit_files(AuditOptions(mined, settings=QUIET, judgements=str(file))).notes)
    number = sum(map(len, lists.negatives))
    assert f"5 of {number} negatives ({5 / number:.1%}) are judged relevant" in notes


def test_a_moved_corpus_leaves_what_the_file_says(tables: dict[str, str], tmp_path: Path) -> None:
    mined = mine_into(tables, tmp_path / "mined.jsonl")
    Path(tables["corpus"]).unlink()
    found = audit_files(AuditOptions(mined, settings=QUIET))
    assert found.rows == ()
    assert found.mined is not None
    assert found.mined.negatives == 80
    assert "could not be read" in " ".join(found.notes)
    assert "wished" not in found.table()
    assert found.write_html(tmp_path / "audit.html").stat().st_size > 5000


def test_texts_are_compared_where_the_embeddings_are_gone(tables: dict[str, str], tmp_path: Path) -> None:
    mined = mine_texts(tables, tmp_path / "mined.jsonl")
    shutil.rmtree(f"{mined}.embeddings")
    found = audit_files(AuditOptions(mined, settings=QUIET))
    assert found.mined is not None
    assert found.mined.compared_by == ("ids", "texts")
    assert found.mined.documents_in_corpus == 60
    assert found.rows == ()


def test_lists_count_what_is_repeated_for_each_positive_once(tmp_path: Path) -> None:
    rows = [
        {"anchor": "a", "positive": p, "negative": n} for p in ("p", "r") for n in ("x", "y", "y" if p == "p" else "z")
    ]
    lists = read_lists(write_lines(tmp_path / "t.jsonl", rows))
    assert lists == Lists(["a"], [["p", "r"]], [["x", "y", "y", "z"]])
    scored = [{"anchor": "a", "positive": ["p", "x", "y"], "scores": [0.9, 0.5, 0.4]}]
    assert read_lists(write_lines(tmp_path / "s.jsonl", scored)) == Lists(["a"], [["p"]], [["x", "y"]])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"anchor": "a", "positive": "p", "score": 0.5}], "none of which marks negatives"),
        ([{"anchor": "a", "negative": "p"}], "audit needs a mined file"),
        ([{"negative_ids": ["d1"]}], "query_id with negative_ids"),
        ([{"anchor": ["a"], "positive": "p", "negative": "n"}], r"ids or texts in a mined file, got \['a'\] in row 0"),
        ([{"anchor": "a", "positive": [["p"]], "negative": "n"}], "ids or texts in a mined file"),
        ([{"query_id": {"x": 1}, "negative_ids": ["d1"]}], "ids or texts in a mined file"),
        ([{"anchor": "a", "positive": ["p", "n"], "labels": [1]}], "numbers as labels of 2 documents"),
        ([{"anchor": "a", "positive": "p", "label": "yes"}], "numbers as labels of 1 documents"),
    ],
)
def test_files_that_hold_no_lists(rows: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_lists(write_lines(tmp_path / "wrong.jsonl", rows))


def test_foreign_documents_are_counted(tables: dict[str, str], tmp_path: Path) -> None:
    theirs = [{"query_id": f"q{i}", "positive_ids": [f"d{i}"], "negative_ids": [f"d{i + 1}", "gone"]} for i in range(3)]
    mined = write_lines(tmp_path / "theirs.jsonl", theirs)
    found = audit_files(AuditOptions(mined, settings=QUIET, **tables))
    assert "1 documents of the mined file are not among those given." in found.notes
    assert found.row("mined").effective_number == pytest.approx(1)
    lost = [{"query_id": "q0", "positive_ids": ["x"], "negative_ids": ["y"]}]
    with raises(ArgumentError, who="audit", got="none of 2"):
        audit_files(AuditOptions(write_lines(tmp_path / "lost.jsonl", lost), settings=QUIET, **tables))
