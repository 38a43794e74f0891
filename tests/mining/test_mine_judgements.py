"""Judged pairs and labels, as mining and audits read them: what counts, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hardneg.core.errors import ArgumentError
from hardneg.mining.judgements import numbered_both, read_grades
from support.errors import raises


def judged(path: Path, text: str, who: str = "mine") -> list[tuple[str, str]]:
    path.write_text(text, encoding="utf-8")
    return [(query, document) for grade, query, document in read_grades(str(path), who) if grade > 0]


@pytest.mark.parametrize("grade", ["score", "relevance", "rel", "grade", "judgement", "label"])
def test_pairs_judged_above_nothing_count_best_first(tmp_path: Path, grade: str) -> None:
    text = f"query-id,corpus-id,{grade}\n1,7,1\n1,8,0\n2,9,3\n2,5,-1\n1,6,2\n"
    assert judged(tmp_path / "j.csv", text) == [("2", "9"), ("1", "6"), ("1", "7")]


def test_two_columns_are_relevant_pairs(tmp_path: Path) -> None:
    assert judged(tmp_path / "j.csv", "qid,whatever\n1,7\n1,8\n") == [("1", "7"), ("1", "8")]
    assert judged(tmp_path / "k.csv", "anything,pid,rel\n1,7,1\n") == [("1", "7")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "query_id,doc_id,points\n1,7,0\n",
            r"audit needs a column of grades .* got columns \['query_id', 'doc_id', 'p",
        ),
        ("1,7,2\n1,8,0\n", "audit needs a first line that names the columns"),
        ("q7,0,d1,1\nq7,0,d2,0\n", "audit needs a first line that names the columns"),
        ("query_id,iteration,paragraph,rel\n1,0,7,1\n", "a column of document ids"),
        ("query_id,doc_id,score\n1,7,good\n", "numbers as 'score' in .*, got 'good' in row 0"),
        ("query_id,doc_id,score\n1,7,1\n1,7,nan\n", "got 'nan' in row 1"),
    ],
)
def test_unknown_columns_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        judged(tmp_path / "j.csv", text, "audit")


def test_ids_that_are_none_are_refused(tmp_path: Path) -> None:
    with raises(ArgumentError, who="mine", what="j.jsonl", got="None in 'doc_id', row 1"):
        judged(tmp_path / "j.jsonl", '{"qid": 1, "doc_id": 2}\n{"qid": 1}\n')


def test_labels_match_as_text_and_missing_ones_match_nothing() -> None:
    first, second = numbered_both("labels", [1, "b", None, "", -1], ["1", 1.0, None, "b", float("nan")], (5, 5))
    same = (first[:, None] == second[None]).nonzero().tolist()
    assert same == [[0, 0], [0, 1], [1, 3]]
    both = [*first.tolist(), *second.tolist()]
    missing = [both[row] for row in (2, 3, 4, 7, 9)]
    assert len(set(missing)) == 5
    assert max(missing) < -1


@pytest.mark.parametrize(
    ("first", "message"),
    [([["a"], "b"], r"numbers or texts, got \['a'\]"), (["a"], "each of 2 rows, got 1"), ("ab", "got labels='ab'")],
)
def test_labels_of_other_kinds_are_refused(first: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        numbered_both("labels", first, ["a"], (2, 1))
