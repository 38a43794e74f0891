"""`hardneg mine`: what is never a negative, and what positives may look like."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hardneg.core.errors import HardnegWarning
from hardneg.mining.job import run
from hardneg.mining.options import Columns, MineOptions
from support.mining_jobs import expected, lines, make_rows, write_lines


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


def test_one_document(job: MineOptions, tmp_path: Path) -> None:
    one = write_lines(tmp_path / "c.jsonl", [{"id": "d0", "text": "alone"}])
    query = write_lines(tmp_path / "q.jsonl", [{"id": "q0", "query": "who", "positive": "d0"}])
    with pytest.warns(HardnegWarning, match="k=3"):
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
