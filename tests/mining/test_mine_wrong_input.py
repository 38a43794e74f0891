"""`hardneg mine` never writes a wrong file: what would once have given one, and what is written or raised instead."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

import hardneg as hn
from hardneg.cli.mine import mine as verb
from hardneg.core.errors import ArgumentError, FileError, NotWritten
from hardneg.io.tables import read_table
from hardneg.mining.estimate import estimate
from hardneg.mining.job import run
from hardneg.mining.options import Columns, MineOptions
from support.errors import raises, warns
from support.mining_jobs import as_csv, as_parquet, encode, expected, lines, make_job, make_rows, write_lines

pyarrow = pytest.importorskip("pyarrow", reason="needs the extra 'mine'")


@pytest.fixture
def job(tmp_path: Path) -> MineOptions:
    return make_job(tmp_path)


@pytest.fixture
def vectors_only(tmp_path: Path) -> MineOptions:
    """Thirty vectors on themselves; the positive of each is the next."""
    z = np.random.default_rng(0).standard_normal((30, 8)).astype(np.float32)
    np.save(tmp_path / "z.npy", z)
    np.savez(tmp_path / "z.npz", vectors=z, ids=np.arange(100, 130))
    np.savez(tmp_path / "again.npz", vectors=z, ids=np.arange(100, 130))
    (tmp_path / "j.csv").write_text("query_id,doc_id\n" + "".join(f"{i},{(i + 1) % 30}\n" for i in range(30)))
    hundreds = "".join(f"{100 + i},{100 + (i + 1) % 30}\n" for i in range(30))
    (tmp_path / "j100.csv").write_text("query_id,doc_id\n" + hundreds)
    return MineOptions(
        queries=str(tmp_path / "z.npy"),
        judgements=str(tmp_path / "j.csv"),
        out=str(tmp_path / "mined.jsonl"),
        negatives="Uniform()",
        k=3,
        format="ids",
    )


@pytest.mark.parametrize(
    "change",
    [
        {"corpus_embeddings": "z.npy"},
        {"corpus": "./z.npy"},
        {"corpus_embeddings": "link.npy"},
        {"queries": "t.jsonl", "query_embeddings": "z.npy", "corpus_embeddings": "./z.npy"},
        {"queries": "t.jsonl", "query_embeddings": "z.npy", "corpus": "./t.jsonl", "corpus_embeddings": "other.npy"},
        {"queries": "z.npz", "corpus_embeddings": "again.npz", "judgements": "j100.csv"},
    ],
)
def test_a_vector_is_never_its_own_negative(
    vectors_only: MineOptions, tmp_path: Path, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.symlink("z.npy", "link.npy")
    np.save("other.npy", np.load("z.npy") + 0.01)
    write_lines(tmp_path / "t.jsonl", [{"id": i, "name": "a"} for i in range(30)])
    run(replace(vectors_only, **change))
    rows = lines(vectors_only.out)
    assert len(rows) == 30
    for row in rows:
        assert len(row["negative_ids"]) == 3
        assert row["query_id"] not in row["negative_ids"]


def test_positions_of_two_files_are_not_the_same_rows(vectors_only: MineOptions, tmp_path: Path) -> None:
    """Row 5 of one file has nothing to do with row 5 of another."""
    np.save(tmp_path / "d.npy", np.load(tmp_path / "z.npy"))
    run(replace(vectors_only, corpus_embeddings=str(tmp_path / "d.npy")))
    assert all(row["query_id"] in row["negative_ids"] for row in lines(vectors_only.out))


@pytest.mark.parametrize("change", [{"query_embeddings": "d.npy"}, {"corpus": "z.npy", "corpus_embeddings": "d.npy"}])
def test_a_file_that_would_not_be_read_is_an_error(
    vectors_only: MineOptions, tmp_path: Path, change: dict[str, str]
) -> None:
    np.save(tmp_path / "d.npy", np.ones((30, 8), dtype=np.float32))
    given = {name: str(tmp_path / value) for name, value in change.items()}
    with raises(ArgumentError, who="mine", what="only once"):
        run(replace(vectors_only, **given))  # type: ignore[arg-type]


def renamed(rows: list[dict[str, Any]], old: str, new: str) -> list[dict[str, Any]]:
    return [{new if name == old else name: value for name, value in row.items()} for row in rows]


def test_ids_that_match_nothing_do_not_become_documents(job: MineOptions, tmp_path: Path) -> None:
    _, corpus = make_rows()
    for other in (renamed(corpus, "id", "key"), [{**row, "id": f"doc-{row['id']}"} for row in corpus]):
        with pytest.raises(ArgumentError) as error:
            run(replace(job, corpus=write_lines(tmp_path / "c.jsonl", other)))
        assert error.value.got is not None
        assert "such as 'd0'" in error.value.got
        assert error.value.fix is not None
        assert "--corpus-id-column" in error.value.fix
        assert not Path(job.out).exists()
    run(replace(job, corpus=write_lines(tmp_path / "c.jsonl", renamed(corpus, "id", "pid"))))
    assert [row["negative_ids"] for row in lines(job.out)] == expected()


def test_texts_that_the_corpus_lacks_are_added(job: MineOptions, tmp_path: Path) -> None:
    queries, corpus = make_rows()
    text_of = {row["id"]: row["text"] for row in corpus}
    for number, row in enumerate(queries):
        row["positive"] = text_of[row["positive"][0]] if number else "a text that is nowhere else"
    numbered = [{**row, "id": int(row["id"][1:])} for row in corpus]
    for name in ("mined.jsonl", "mined.parquet"):  # numbers and texts as ids of one file
        summary = run(
            replace(
                job,
                queries=write_lines(tmp_path / "q.jsonl", queries),
                corpus=write_lines(tmp_path / "c.jsonl", numbered),
                out=str(tmp_path / name),
            )
        )
        assert summary is not None
        assert summary.counts["positives_added_to_corpus"] == 1
        table = read_table(tmp_path / name)
        assert table["positive_ids"][:2] == [["a text that is nowhere else"], ["1"]]
        assert all(isinstance(one, str) for each in table["negative_ids"] for one in each)


@pytest.mark.parametrize("ids", [[1, "b", *range(2, 60)], [2**70 + i for i in range(60)]])
def test_ids_of_several_kinds_are_written_as_text(job: MineOptions, tmp_path: Path, ids: list[Any]) -> None:
    queries, corpus = make_rows()
    new = {f"d{i}": one for i, one in enumerate(ids)}
    for row in queries:
        row["positive"] = [new[one] for one in row["positive"]]
    changed = [{**row, "id": new[row["id"]]} for row in corpus]
    out = str(tmp_path / "mined.parquet")
    run(
        replace(
            job,
            queries=write_lines(tmp_path / "q.jsonl", queries),
            corpus=write_lines(tmp_path / "c.jsonl", changed),
            out=out,
        )
    )
    assert read_table(out)["negative_ids"] == [[str(new[one]) for one in row] for row in expected()]


def test_the_mark_of_excel_is_not_part_of_a_name(job: MineOptions, tmp_path: Path) -> None:
    path = Path(as_csv(tmp_path / "c.csv", make_rows()[1]))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes() + b"\n")  # and an empty line at the end
    run(replace(job, corpus=str(path)))
    assert [row["negative_ids"] for row in lines(job.out)] == expected()


@pytest.mark.parametrize("cell", ["['d0', 'd1']", '["d0"]', "[]"])
def test_a_list_written_as_text_is_refused(job: MineOptions, tmp_path: Path, cell: str) -> None:
    queries, _ = make_rows()
    for row in queries:
        row["positive"] = row["positive"][0]
    queries[4]["positive"] = cell
    with raises(ArgumentError, who="mine", got="row 4"):
        run(replace(job, queries=as_csv(tmp_path / "q.csv", queries)))


def test_embeddings_are_matched_by_id(job: MineOptions, tmp_path: Path) -> None:
    queries, corpus = make_rows()
    order = np.random.default_rng(1).permutation(len(corpus))
    vectors, ids = encode([row["text"] for row in corpus]), np.array([row["id"] for row in corpus])
    np.savez(tmp_path / "c.npz", vectors=vectors[order], ids=ids[order])
    shuffled = [{"id": q["id"], "embedding": v.tolist()} for q, v in zip(queries, encode_queries(queries), strict=True)]
    given = replace(
        job,
        corpus_embeddings=str(tmp_path / "c.npz"),
        query_embeddings=as_parquet(tmp_path / "q.parquet", shuffled[::-1]),
        encoder=None,
    )
    run(given)
    assert [row["negative_ids"] for row in lines(job.out)] == expected()
    np.savez(tmp_path / "c.npz", vectors=vectors[1:], ids=ids[1:])
    with raises(ArgumentError, who="mine", got="'d0' (row 0)"):
        run(given)
    np.savez(tmp_path / "c.npz", vectors=vectors, ids=np.array(["d0", *ids[:-1]]))
    with raises(ArgumentError, who="mine", what="c.npz", got="1 repeated"):
        run(given)


def encode_queries(queries: list[dict[str, Any]]) -> Any:
    return encode([row["query"] for row in queries])


def test_a_query_id_has_one_embedding(vectors_only: MineOptions, tmp_path: Path) -> None:
    z = np.load(tmp_path / "z.npy")
    given = replace(vectors_only, queries=str(tmp_path / "q.npz"), corpus_embeddings=str(tmp_path / "z.npy"))
    np.savez(tmp_path / "q.npz", vectors=z[:3], ids=np.array([4, 4, 5]))
    with raises(ArgumentError, who="mine", got="id 4 with different ones"):
        run(given)
    np.savez(tmp_path / "q.npz", vectors=z[[0, 0, 1]], ids=np.array([4, 4, 5]))
    with warns("unknown queries", "28 of 30", "28"):
        run(given)
    assert [row["query_id"] for row in lines(vectors_only.out)] == [4, 5]


@pytest.mark.parametrize("ids", [np.arange(15), np.arange(40), np.arange(30.0), np.zeros((30, 1), dtype=int)])
def test_ids_and_embeddings_of_a_file_must_be_as_many(vectors_only: MineOptions, tmp_path: Path, ids: Any) -> None:
    np.savez(tmp_path / "d.npz", vectors=np.load(tmp_path / "z.npy"), ids=ids)
    with raises(ArgumentError, who="mine", what="30 embeddings"):
        run(replace(vectors_only, corpus_embeddings=str(tmp_path / "d.npz")))


def test_bfloat16_is_read(vectors_only: MineOptions, tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    z = torch.from_numpy(np.load(tmp_path / "z.npy")).bfloat16()
    save_file({"vectors": z}, str(tmp_path / "d.safetensors"))
    np.save(tmp_path / "d.npy", z.float().numpy())
    for name in ("d.safetensors", "d.npy"):
        run(replace(vectors_only, corpus_embeddings=str(tmp_path / name), out=str(tmp_path / f"{name}.jsonl")))
    assert lines(tmp_path / "d.safetensors.jsonl") == lines(tmp_path / "d.npy.jsonl")


def labelled(
    job: MineOptions, tmp_path: Path, of_query: Callable[[int], Any], of_document: Callable[[int], Any]
) -> Any:
    queries, corpus = make_rows()
    for rows, label in ((queries, of_query), (corpus, of_document)):
        for number, row in enumerate(rows):
            row["topic"] = label(number)
    return replace(
        job,
        queries=write_lines(tmp_path / "q.jsonl", queries),
        corpus=write_lines(tmp_path / "c.jsonl", corpus),
        columns=Columns(label="topic"),
        negatives="OtherLabel()",
    )


def test_missing_labels_are_like_no_other(job: MineOptions, tmp_path: Path) -> None:
    summary = run(labelled(job, tmp_path, lambda i: None, lambda i: None))
    assert summary is not None
    assert summary.explanation.removed == [0, 0, 0]
    assert [row["negative_ids"] for row in lines(job.out)] == expected(text="Uniform()")


def test_labels_are_matched_as_text(job: MineOptions, tmp_path: Path) -> None:
    run(labelled(job, tmp_path, lambda i: 1, lambda i: "1" if i % 2 else "2"))
    for row in lines(job.out):
        assert all(int(one[1:]) % 2 == 0 for one in row["negative_ids"])
    with raises(ArgumentError, who="mine", got="[1]"):
        run(labelled(job, tmp_path, lambda i: 1, lambda i: [1]))


def test_a_folder_of_others_is_not_thrown_away(job: MineOptions) -> None:
    work = Path(f"{job.out}.work")
    work.mkdir()
    (work / "precious.txt").write_text("mine")
    with raises(ArgumentError, who="mine", got="'precious.txt' in it, which it did not write"):
        run(job)
    assert (work / "precious.txt").read_text() == "mine"
    (work / "precious.txt").unlink()
    for name in ("0.0-lists.0.0-000000.npz", ".0.0-chosen.0.0-000001.npz.77.partial"):
        (work / name).write_bytes(b"of a run that was killed before it could say whose they are")
    run(job)
    assert [row["negative_ids"] for row in lines(job.out)] == expected()
    assert not work.exists()


@pytest.mark.parametrize("name", ["mined.jsonl.gz", "mined.csv", "mined.npz", "mined.JSONL.zip"])
def test_other_files_are_not_taken_for_folders(job: MineOptions, tmp_path: Path, name: str) -> None:
    with raises(FileError, who="mine", what="a folder"):
        run(replace(job, out=str(tmp_path / name)))
    assert not (tmp_path / name).exists()


def test_suffixes_in_any_case(job: MineOptions, tmp_path: Path) -> None:
    run(replace(job, out=str(tmp_path / "mined.JSONL")))
    assert [row["negative_ids"] for row in lines(tmp_path / "mined.JSONL")] == expected()


@pytest.mark.parametrize("name", ["folder.jsonl", "folder.parquet"])
def test_a_folder_is_not_a_file(job: MineOptions, tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with raises(FileError, who="mine", what="file as", got="which is a folder"):
        run(replace(job, out=str(tmp_path / name)))
    assert not list(tmp_path.glob("*.embeddings"))


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".csv.gz"])
def test_half_a_packed_file(job: MineOptions, tmp_path: Path, suffix: str) -> None:
    _, corpus = make_rows()
    plain = Path(as_csv(tmp_path / "c.csv", corpus) if "csv" in suffix else str(job.corpus)).read_bytes()
    packed = gzip.compress(plain)
    for number, content in enumerate((packed[: len(packed) // 2], plain, packed[:20] + b"\xff" * 40 + packed[60:])):
        path = tmp_path / f"{number}{suffix}"
        path.write_bytes(content)
        with raises(FileError, who="mine", what="gzip file"):
            run(replace(job, corpus=str(path)))


@pytest.mark.parametrize("name", ["e.npy", "e.npz", "e.safetensors"])
@pytest.mark.parametrize("content", [b"", b"\x93NUMPY\x01\x00", b"PK\x03\x04 no", b"something else altogether"])
def test_broken_files_of_embeddings(vectors_only: MineOptions, tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with raises(FileError, who="mine", what="an undamaged"):
        run(replace(vectors_only, corpus_embeddings=str(tmp_path / name)))


@pytest.mark.parametrize("place", ["query", "positive", "id", "text"])
def test_half_a_character_is_found_before_the_work(job: MineOptions, tmp_path: Path, place: str) -> None:
    queries, corpus = make_rows()
    (corpus if place == "text" else queries)[3][place] = "x \ud800"
    for name, rows in (("q", queries), ("c", corpus)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = replace(job, queries=str(tmp_path / "q.jsonl"), corpus=str(tmp_path / "c.jsonl"))
    with pytest.raises(ValueError, match=rf"half a surrogate pair, '\\ud800' in column '{place}', row 3"):
        run(given)
    assert not list(tmp_path.glob("*.embeddings"))


@pytest.mark.parametrize(
    ("positive", "empty", "message"),
    [
        (
            ["d999"],
            None,
            "got 1 that are not, first 'd999' of the query 'q2'; compare them with the ids of the corpus, such as 'd0'",
        ),
        (["d7"], 7, "first 'd7' of the query 'q2', which is an empty text"),
        (["d2", " "], None, "first ' ' of the query 'q2', which is an empty text"),
    ],
)
def test_missing_positives_are_named(
    job: MineOptions, tmp_path: Path, positive: list[str], empty: int | None, message: str
) -> None:
    queries, corpus = make_rows()
    for row in queries:
        row["positive"] = row["positive"][:1] if row["id"] != "q7" else ["d1"]
    queries[2]["positive"] = positive
    if empty is not None:
        corpus[empty]["text"] = " "
    with pytest.raises(ValueError, match=message):
        run(
            replace(
                job,
                queries=write_lines(tmp_path / "q.jsonl", queries),
                corpus=write_lines(tmp_path / "c.jsonl", corpus),
            )
        )


def test_queries_of_the_same_text_share_their_positives(job: MineOptions, tmp_path: Path) -> None:
    queries, _ = make_rows()
    queries[1]["query"] = queries[0]["query"]
    summary = run(replace(job, queries=write_lines(tmp_path / "q.jsonl", queries), negatives="Uniform()", k=58))
    assert summary is not None
    assert summary.counts["queries_of_the_same_text"] == 1
    first, second, *_ = lines(job.out)
    assert first["positive_ids"] == second["positive_ids"] == ["d0", "d1", "d21"]
    assert not set(first["positive_ids"]) & {*first["negative_ids"], *second["negative_ids"]}


def test_words_alone_can_be_estimated(job: MineOptions) -> None:
    pytest.importorskip("bm25s", reason="needs the extra 'lexical'")
    cost = estimate(replace(job, search="bm25", encoder=None))
    assert cost.encoding_seconds == 0
    assert cost.mining_seconds > 0


def test_partials_of_killed_runs_are_removed(job: MineOptions, tmp_path: Path) -> None:
    cache = Path(f"{job.out}.embeddings")
    cache.mkdir()
    ours, other = cache / ".0123abc.npy.77.partial", tmp_path / ".mined.jsonl2.123.partial"
    for path in (ours, other):
        path.write_bytes(b"half")
    run(job)
    assert not ours.exists()
    assert other.exists()


def test_the_exit_code_tells_the_disk_from_the_input(job: MineOptions, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(verb)
    command = [job.queries, "--corpus", str(job.corpus), "--encoder", str(job.encoder), "-k", "3"]
    (tmp_path / "file").write_text("")
    in_the_way = CliRunner().invoke(app, [*command, "-o", str(tmp_path / "file" / "mined.jsonl")])
    assert in_the_way.exit_code == 1, in_the_way.output
    assert "Not a directory" in in_the_way.output
    assert "free disk space" not in in_the_way.output
    assert CliRunner().invoke(app, [*command, "-o", str(tmp_path / "m.csv")]).exit_code == 2


def test_a_folder_without_permission_is_found_before_the_work(
    job: MineOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / "theirs")  # root may write anywhere
    (tmp_path / "theirs").mkdir()
    with raises(NotWritten, got="write to", fix="--out"):
        run(replace(job, out=str(tmp_path / "theirs" / "new" / "mined.jsonl")))
    assert not any((tmp_path / "theirs").iterdir())


def test_a_gpu_that_is_not_there_is_named(job: MineOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ArgumentError) as of_job:
        run(replace(job, device="cuda"))
    assert (of_job.value.who, of_job.value.got) == ("mine", "device='cuda'")
    keys = hn.Keys(torch.eye(3))
    with pytest.raises(ArgumentError) as of_search:
        hn.mine(keys, keys, [1, 2, 0], "Uniform()", 1, search=hn.mining.Search(device="cuda:1"))
    assert (of_search.value.who, of_search.value.got) == ("Search", "device='cuda:1'")


@pytest.mark.parametrize("function", ["bound", "borrowed"])
def test_a_changed_function_is_known_by_its_source(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hardneg.mining.encode import encoder_of_function

    (tmp_path / "where_it_is.py").write_text("def score(pairs, factor=1.0):\n    return [factor] * len(pairs)\n")
    imports = "from functools import partial\nfrom where_it_is import score as borrowed\n"
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("where_it_is", "where_it_is_named"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    names = []
    for factor in (2.0, 3.0):
        (tmp_path / "where_it_is_named.py").write_text(f"{imports}bound = partial(borrowed, factor={factor})\n")
        names.append(encoder_of_function(f"where_it_is_named:{function}", "1").key)
    with (tmp_path / "where_it_is.py").open("a") as file:
        file.write("# changed\n")
    names.append(encoder_of_function(f"where_it_is_named:{function}", "1").key)
    assert len(set(names)) == 3


def test_a_data_set_replaces_one_that_a_kill_left_behind(job: MineOptions, tmp_path: Path) -> None:
    """A run that was killed after it had put the new folder in place, and before it had removed the old one."""
    pytest.importorskip("datasets", reason="needs the extra 'text'")
    given = replace(job, out=str(tmp_path / "mined"))
    run(given)
    shutil.copytree(tmp_path / "mined", tmp_path / ".mined.old")
    run(replace(given, k=2))
    assert read_table(tmp_path / "mined")["negative_ids"] == expected(k=2)
    assert not (tmp_path / ".mined.old").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"search": "ivf", "negatives": "Ring(0.1, 0.2)"}, "depends only on the nearest candidates"),
        ({"rescore": "support.mining_jobs:nothing"}, "a function 'nothing'"),
        ({"shards": 2, "negatives": "Tilt(1.0)", "draw": "categorical"}, "draw 'top' or 'gumbel' to use shards"),
        ({"negatives": "OtherLabel()"}, "label"),
        ({"corpus": ""}, "a non-empty name"),
        ({"guide": ""}, "a non-empty name"),
        ({"negatives": 'From("bm25")'}, "a source among embedding"),
    ],
)
def test_what_cannot_be_mined_is_not_encoded(job: MineOptions, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        run(replace(job, **change))
    assert not Path(f"{job.out}.embeddings").exists()
