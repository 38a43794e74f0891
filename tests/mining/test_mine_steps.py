"""`hardneg mine`: other retrievers, the cache, pieces on disk, a dry run, and the verb itself."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hardneg.cli.mine import mine as verb
from hardneg.core.errors import ArgumentError
from hardneg.mining.estimate import estimate
from hardneg.mining.job import run
from hardneg.mining.options import MineOptions
from support.errors import raises
from support.mining_jobs import encode, expected, lines, make_rows, overlap, write_lines


def test_rescoring_and_words(job: MineOptions) -> None:
    pytest.importorskip("bm25s", reason="needs the extra 'lexical'")
    run(replace(job, bm25=True, candidates=10, negatives="Uniform()", rescore="support.mining_jobs:overlap", k=5))
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
    with raises(ArgumentError, who="mine", what="near_positive", got="search='bm25'"):
        run(replace(job, search="bm25", encoder=None, near_positive=0.9))
    with raises(ValueError, who="mine", got="Rank(start=50, stop=200)", fix="candidates=100"):
        run(replace(job, search="bm25", encoder=None, negatives="Rank(50, 200)", format="triplet"))


def test_the_cache_encodes_once(job: MineOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import support.mining_jobs as me

    calls: list[int] = []
    original = encode
    monkeypatch.setattr(me, "encode", lambda texts: calls.append(len(texts)) or original(texts))
    run(replace(job, cache=str(tmp_path / "cache")))
    assert calls == [1, 20, 1, 60]  # of each side one text, before the time is taken
    run(replace(job, cache=str(tmp_path / "cache"), k=2, seed=9))
    assert calls == [1, 20, 1, 60]
    queries, _ = make_rows()
    queries[0]["query"] = "something else"
    run(replace(job, cache=str(tmp_path / "cache"), queries=write_lines(tmp_path / "q.jsonl", queries)))
    assert calls == [1, 20, 1, 60, 1, 20]


def test_many_pieces_are_joined_on_disk(job: MineOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    from hardneg.mining import encode as module

    monkeypatch.setattr(module, "_piece", 7)
    monkeypatch.setattr(module, "_in_memory", 0)
    run(job)
    assert [row["negative_ids"] for row in lines(job.out)] == expected()


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
    for module in ("resource", "psutil"):  # filelock has a lock of its own for Windows
        monkeypatch.setitem(sys.modules, module, None)
    for name in ("fork", "sched_getaffinity", "sysconf"):
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
    assert "--draw to be one of top, gumbel, categorical, got 'best'" in wrong.output
