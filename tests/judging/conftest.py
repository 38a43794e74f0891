"""A small job to judge: texts of a few words, where a document that shares four words with the query answers it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hardneg.judging.options import JudgeOptions
from hardneg.mining.options import MineOptions
from support.mining_jobs import make_rows, write_lines

RULES = ("BelowPositive(relative={0.5, 0.3})", "Rank(0, 8)")

MakeOptions = Callable[..., JudgeOptions]


def answers(query: str, document: str) -> bool:
    return len(set(query.split()) & set(document.split())) >= 3


def judge(pairs: list[tuple[str, str]]) -> list[bool]:
    return [answers(*pair) for pair in pairs]


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, str]:
    """The text of each id."""
    queries, corpus = make_rows(150, 60)
    write_lines(tmp_path / "queries.jsonl", queries)
    write_lines(tmp_path / "corpus.jsonl", corpus)
    return {row["id"]: row.get("text") or row["query"] for row in [*queries, *corpus]}


@pytest.fixture
def options(tmp_path: Path, texts: dict[str, str]) -> MakeOptions:
    """Make the options of a job; ``mining`` changes those of the mining."""

    def make(mining: dict[str, Any] | None = None, **more: Any) -> JudgeOptions:
        given: dict[str, Any] = {
            "queries": str(tmp_path / "queries.jsonl"),
            "corpus": str(tmp_path / "corpus.jsonl"),
            "out": str(tmp_path / "judged"),
            "encoder": "support.mining_jobs:encode",
            "cache_key": "1",
            "k": 3,
        }
        defaults: dict[str, Any] = {"rules": RULES, "budget": 150, "false_negatives": 0.2}
        return JudgeOptions(MineOptions(**{**given, **(mining or {})}), **{**defaults, **more})

    return make
