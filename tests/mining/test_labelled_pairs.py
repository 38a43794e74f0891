"""Pairs with labels: those of label 0 are no positives, and may be verified negatives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hardneg as hn
from hardneg.auditing.files import AuditOptions, audit_files
from hardneg.core.errors import ArgumentError
from hardneg.io.pair_labels import ignored_label
from hardneg.mining.job import run
from hardneg.mining.options import Columns, MineOptions
from hardneg.training.data.pairs import TextPairs
from hardneg.training.options import TrainOptions
from support.command import hardneg
from support.mining_jobs import as_csv, encode, lines, make_rows, write_lines

TEXTS = [row["text"] for row in make_rows()[1]]
"""Pair i is duplicate of i + 20, and was judged to be none of i + 40."""
PAIRS = [{"question": TEXTS[i], "answer": TEXTS[i + 20 * (2 - label)], "is_duplicate": label} for i in range(20)
         for label in (1, 0)]  # fmt: skip


@pytest.fixture
def job(tmp_path: Path) -> MineOptions:
    queries = write_lines(tmp_path / "pairs.jsonl", PAIRS)
    out = str(tmp_path / "mined.jsonl")
    return MineOptions(queries, out, encoder="support.mining_jobs:encode", negatives="Uniform()", k=3)


def mined(options: MineOptions, **changes: Any) -> list[dict[str, Any]]:
    changed = replace(options, **changes)
    run(changed)
    return lines(changed.out)


def dataset(rows: list[dict[str, Any]] = PAIRS) -> Any:
    return pytest.importorskip("datasets", reason="needs the extra 'text'").Dataset.from_list(rows)


def test_a_label_that_nothing_reads_is_refused(job: MineOptions, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError) as error:
        run(job)
    assert "is_duplicate" in str(error.value.got)
    assert "positive_label" in str(error.value.fix)
    done = hardneg("mine", job.queries, "--encoder", job.encoder or "", "-o", job.out)
    assert done.exit_code == 2
    assert "--positive-label" in done.stderr
    with pytest.raises(ArgumentError) as error:
        hn.mine(dataset(), model=encode, k=2, verbose=False)
    assert "positive_label" in str(error.value.fix)


@pytest.mark.parametrize("label", ["1", "True", "true", "1.0"])
def test_only_pairs_of_the_label_are_positives(label: str, job: MineOptions) -> None:
    rows = mined(job, positive_label="1" if label == "1.0" else label)
    positives = {row["question" if "question" in row else "anchor"]: row["positive"] for row in rows}
    assert positives == {TEXTS[i]: TEXTS[i + 20] for i in range(20)}
    assert any(row["negative"] in TEXTS[40:] for row in rows)  # documents of the others are in the corpus


def test_labels_of_a_csv_are_matched_as_text(job: MineOptions, tmp_path: Path) -> None:
    assert mined(job, queries=as_csv(tmp_path / "p.csv", PAIRS), positive_label="1") == mined(job, positive_label="1")
    rows = [{**row, "is_duplicate": "entailment" if row["is_duplicate"] else "neutral"} for row in PAIRS]
    other = write_lines(tmp_path / "nli.jsonl", rows)
    assert mined(job, queries=other, positive_label="entailment") == mined(job, positive_label="1")


def test_judged_negatives_come_first(job: MineOptions) -> None:
    plain = mined(job, positive_label="1", format="ids")
    rows = mined(job, positive_label="1", format="ids", judged_negatives=True, overwrite=True)
    number = {text: i for i, text in enumerate(dict.fromkeys(row["answer"] for row in PAIRS))}
    for i, (row, other) in enumerate(zip(rows, plain, strict=True)):
        verified = number[TEXTS[i + 40]]
        assert row["negative_ids"] == [verified, *[one for one in other["negative_ids"] if one != verified][:2]]
        assert "judged" in row["found_by"][0]
        assert "judged" not in row["found_by"][1]
    found = audit_files(AuditOptions(job.out))
    assert found.row("mined").similarity < 1  # the manifest names the label, by which the pairs are read again


def test_grades_of_0_are_judged_negatives(job: MineOptions, tmp_path: Path) -> None:
    queries, corpus = make_rows()
    for row in queries:
        row.pop("positive")
    grades = "".join(f"q{i},d{i},1\nq{i},d{i + 40},0\n" for i in range(20))
    (tmp_path / "qrels.csv").write_text(f"query_id,doc_id,score\n{grades}")
    rows = mined(
        job,
        queries=write_lines(tmp_path / "q.jsonl", queries),
        corpus=write_lines(tmp_path / "c.jsonl", corpus),
        judgements=str(tmp_path / "qrels.csv"),
        judged_negatives=True,
        format="ids",
    )
    assert [row["negative_ids"][0] for row in rows] == [f"d{i + 40}" for i in range(20)]


def test_judged_negatives_of_a_data_set(job: MineOptions) -> None:
    options: dict[str, Any] = {"model": encode, "negatives": "Uniform()", "k": 3, "verbose": False}
    found = hn.mine(dataset(), **options, positive_label=1, judged_negatives=True, output_format="n-tuple")
    assert found["answer"] == TEXTS[20:40]
    assert found["negative_1"] == TEXTS[40:]
    plain = hn.mine(dataset(), **options, positive_label=1, output_format="n-tuple")
    assert plain["answer"] == TEXTS[20:40]
    assert plain["negative_1"] != TEXTS[40:]


def test_what_is_missing_is_named(job: MineOptions, tmp_path: Path) -> None:
    for changes, word in (
        ({"positive_label": "yes"}, "0"),
        ({"positive_label": "1", "columns": Columns(label="x")}, "x"),
    ):
        with pytest.raises(ArgumentError) as error:
            run(replace(job, **changes))
        assert word in str(error.value)
    unlabelled = [{"question": row["question"], "answer": row["answer"]} for row in PAIRS if row["is_duplicate"]]
    plain = replace(job, queries=write_lines(tmp_path / "plain.jsonl", unlabelled))
    for changes in ({"positive_label": "1"}, {"judged_negatives": True}):
        with pytest.raises(ArgumentError) as error:
            run(replace(plain, **changes))
        assert error.value.fix


def test_a_column_of_labels_is_found_in_any_spelling(job: MineOptions, tmp_path: Path) -> None:
    rows = [{**{name: row[name] for name in ("question", "answer")}, "isDuplicate": row["is_duplicate"]}
            for row in PAIRS]  # fmt: skip
    other = replace(job, queries=write_lines(tmp_path / "spelt.jsonl", rows))
    with pytest.raises(ArgumentError) as error:
        run(other)
    assert "isDuplicate" in str(error.value.got)
    with pytest.raises(ArgumentError):
        hn.mine(dataset(rows), model=encode, k=2, verbose=False)
    assert [row["positive"] for row in mined(other, positive_label="1")] == [
        row["positive"] for row in mined(job, positive_label="1", overwrite=True)
    ]


def test_columns_of_texts_with_names_of_labels_are_pairs(tmp_path: Path) -> None:
    rows = [{"source": f"{TEXTS[i]}", "target": TEXTS[i + 20]} for i in range(20)]
    found = TextPairs.read(write_lines(tmp_path / "pairs.jsonl", rows), TrainOptions())
    assert (found.firsts, found.seconds) == (TEXTS[:20], TEXTS[20:40])


def test_labels_of_lists_are_those_of_their_documents(job: MineOptions, tmp_path: Path) -> None:
    rows = [{"anchor": TEXTS[i], "positive": [TEXTS[i + 20], TEXTS[i + 40]], "labels": [1, 0]} for i in range(20)]
    listed = replace(job, queries=write_lines(tmp_path / "lists.jsonl", rows), positive_label="1")
    assert [row["negative"] for row in mined(listed)] == [row["negative"] for row in mined(job, positive_label="1")]


@pytest.mark.parametrize(
    ("column", "values", "ignored"),
    [
        ("label", [1, 1, 1], False),
        ("label", [1, 0, 1], True),
        ("label", ["a", "b", "c"], True),
        ("is_duplicate", [True, False, True], True),
        ("score", [0.3, 0.9, 0.5], False),
        ("score", [0, 1, 1], True),
        ("labels", [[5, 1, 2], [5, 1, 3], [6, 0, 2]], False),  # ids of with_ids
        ("topic", [1, 0, 1], False),
        ("Label", ["1", "0", "1"], True),  # WikiQA
        ("isDuplicate", [1, 0, 1], True),
        ("is_paraphrase", [True, False, True], True),
        ("Quality", [1, 0, 1], True),  # MRPC
        ("similarity_score", [1.0, 0.0, 1.0], True),
        ("similarity_score", [0.3, 0.9, 0.5], False),
        ("paraphrase", ["a text", "b text", "c text"], False),
        ("target", [0, 1, 1], True),
    ],
)
def test_which_columns_may_say_what_is_positive(column: str, values: list[Any], ignored: bool) -> None:
    table = {"positive": ["a", "b", "c"], column: values}
    assert ignored_label(table, ("positive",), "positive") == (column if ignored else None)
    assert ignored_label(table, ("positive", column), "positive") is None


def test_pairs_to_train_on_have_the_label_that_is_named(tmp_path: Path) -> None:
    path, options = as_csv(tmp_path / "qqp.csv", PAIRS), TrainOptions()
    for name in (path, f"{path}[question,answer]"):
        with pytest.raises(ArgumentError) as error:
            TextPairs.read(name, options)
        assert "[question,answer,is_duplicate=1]" in str(error.value.fix)
    found = TextPairs.read(f"{path}[question,answer,is_duplicate=1]", options)
    assert (found.firsts, found.seconds) == (TEXTS[:20], TEXTS[20:40])
    for wrong in ("is_duplicate", "is_duplicate=7", "duplicate=1"):
        with pytest.raises(ArgumentError):
            TextPairs.read(f"{path}[question,answer,{wrong}]", options)
