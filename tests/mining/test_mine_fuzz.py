"""Random small tables with odd cells: `hardneg mine` says in a sentence what is wrong, or writes what a checker finds
right that knows nothing of its code, only the rules of docs/guides/mining.md."""

from __future__ import annotations

import csv
import json
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import event, example, given, note, settings
from hypothesis import strategies as st

from hardneg.io.tables import read_table
from hardneg.mining import job as module
from hardneg.mining.job import run
from hardneg.mining.options import MineOptions

pytest.importorskip("pyarrow", reason="needs the extra 'mine'")
TEXTS = ["cat", "dog", "cat dog", "a b", "Größe 猫", "x" * 5000, 'quo"te, comma', "1", "d2", "line\nbreak"]
ODD: list[Any] = [None, "", " ", 3, 2.5, float("nan"), True, ["cat"], [], {"a": 1}, "['d1', 'd2']", "x \ud800"]


def encode(texts: list[str]) -> Any:
    return np.stack([np.random.default_rng(zlib.crc32(text.encode())).standard_normal(6) for text in texts])


@dataclass(frozen=True)
class Case:
    """Two tables as they are written, and the options."""

    queries: list[dict[str, Any]]
    corpus: list[dict[str, Any]] | None
    kind: str
    format: str
    out: str
    missing: str
    k: int


def make_case(seed: int) -> Case:
    """A case by plain chance: strategies of single cells come out too small and too alike."""
    random = Random(seed)
    odd = random.choice([0.0, 0.0, 0.01, 0.05])
    by_id = random.random() < 0.5
    names: list[Any] = random.choice([list(range(1, 11)), [f"d{i}" for i in range(1, 11)], [1, 2, "3", *range(4, 11)]])
    pool = names if by_id else TEXTS

    def cell(usual: Any) -> Any:
        return random.choice(ODD) if random.random() < odd else usual

    def positives() -> Any:
        one = [random.choice(pool) for _ in range(random.randint(1, 3))]
        return one if random.random() < 0.5 else one[0]

    queries = [
        {"query": cell(random.choice(TEXTS)), "positive": cell(positives())} for _ in range(random.randint(1, 6))
    ]
    corpus = [{"text": cell(random.choice(TEXTS))} for _ in range(random.randint(1, 10))]
    if random.random() < 0.6:
        same = random.random() < 0.2  # several rows of a query
        queries = [{**row, "id": cell(f"q{random.randint(0, 2) if same else i}")} for i, row in enumerate(queries)]
        queries = [{**row, "query": row["id"]} for row in queries] if same else queries
    if by_id or random.random() < 0.5:
        order = random.sample(names, len(corpus)) if random.random() < 0.9 else random.choices(names, k=len(corpus))
        corpus = [{**row, "id": cell(one)} for row, one in zip(corpus, order, strict=True)]
    if by_id and random.random() < 0.7:  # positives that are there
        there = [row["id"] for row in corpus]
        queries = [{**row, "positive": cell(random.sample(there, min(2, len(there))))} for row in queries]
    kind = random.choice(["jsonl", "jsonl", "csv"])
    if kind == "csv" and odd == 0.0:
        queries = [{**row, "positive": listed(row["positive"])[0]} for row in queries]
    return Case(
        queries,
        corpus if by_id or random.random() < 0.6 else None,
        kind,
        random.choice(["ids", "triplet", "labeled-pair", "labeled-list", "n-tuple"]),
        random.choice(["mined.jsonl", "mined.parquet"]),
        random.choice(["error", "drop"]),
        random.randint(1, 4),
    )


def write(folder: Path, name: str, rows: list[dict[str, Any]], kind: str) -> str:
    path = folder / f"{name}.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with path.open("w", encoding="utf-8", errors="surrogatepass", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return str(path)


def as_read(rows: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """A CSV holds texts only."""
    if kind == "jsonl":
        return rows
    return [{name: "" if cell is None else str(cell) for name, cell in row.items()} for row in rows]


class Truth:
    """What the tables say, by plain loops: each query's text, its positives and its possible negatives, by text."""

    def __init__(self, case: Case) -> None:
        queries = as_read(case.queries, case.kind)
        corpus = None if case.corpus is None else as_read(case.corpus, case.kind)
        self.text_of_id: dict[str, str] = {}
        for number, row in enumerate(corpus or ()):
            self.text_of_id[str(row.get("id", number))] = row["text"]
        flat = [one for row in queries for one in listed(row["positive"])]
        by_id = corpus is not None and "id" in corpus[0] and any(str(one) in self.text_of_id for one in flat)
        self.documents = {text for text in self.text_of_id.values() if text.strip()}
        if not by_id:
            self.documents |= {one for one in flat if one.strip()}
        self.text: dict[str, str] = {}
        self.positives: dict[str, set[str]] = {}
        self.unknown = 0
        for row in queries:
            if not row["query"].strip():
                continue
            name = str(row["id"]) if "id" in row else row["query"]
            self.text[name] = row["query"]
            own = self.positives.setdefault(name, set())
            for one in listed(row["positive"]):
                text = self.text_of_id.get(str(one)) if by_id else one
                if text is not None and text.strip():
                    own.add(text)
                else:
                    self.unknown += 1
        together: dict[str, set[str]] = {}
        for name, own in self.positives.items():
            together.setdefault(self.text[name], set()).update(own)
        self.positives = {name: together[self.text[name]] for name in self.positives if together[self.text[name]]}

    def possible(self, name: str) -> set[str]:
        return self.documents - self.positives[name] - {self.text[name]}


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def found_in(case: Case, truth: Truth, table: dict[str, list[Any]]) -> Iterator[tuple[str, set[str], list[str]]]:
    """(query, positives, negatives) of the file, documents by text; a query may come several times."""
    rows = [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]
    if case.format == "ids":
        numbered = "id" not in case.queries[0]
        texts = list(dict.fromkeys(row["query"] for row in as_read(case.queries, case.kind) if row["query"].strip()))
        text_of = truth.text_of_id if case.corpus is not None and "id" in case.corpus[0] else None
        for row in rows:
            name = first_of(case, row["query_id"]) if numbered else str(row["query_id"])
            assert not numbered or name in texts
            known = [[of_id(one, text_of, truth) for one in row[each]] for each in ("positive_ids", "negative_ids")]
            assert len(row["scores"]) == len(row["negative_ids"])
            yield name, set(known[0]), known[1]
        return
    for anchor in dict.fromkeys(row["anchor"] for row in rows):
        own = [row for row in rows if row["anchor"] == anchor]
        yield anchor, *told_apart(case.format, own)


def first_of(case: Case, place: int) -> str:
    text = as_read(case.queries, case.kind)[place]["query"]
    assert isinstance(text, str)
    return text


def of_id(one: Any, text_of: dict[str, str] | None, truth: Truth) -> str:
    if text_of is None:
        return f"row {one}"  # documents without ids are numbered; their texts are checked in the other formats
    found = text_of.get(str(one), str(one))  # a text that was added is its own id
    assert found in truth.documents
    return found


def told_apart(format: str, rows: list[dict[str, Any]]) -> tuple[set[str], list[str]]:
    """Positives and negatives of one anchor; the negatives in the order of the first row that has them."""
    if format == "labeled-pair":
        kinds = [[row["positive"] for row in rows if row["label"] == label] for label in (1, 0)]
    elif format == "labeled-list":
        assert all(row["labels"] == [1, *[0] * (len(row["positive"]) - 1)] for row in rows)
        kinds = [[row["positive"][0] for row in rows], [one for row in rows for one in row["positive"][1:]]]
    else:
        names = [name for name in rows[0] if name.startswith("negative")]
        kinds = [[row["positive"] for row in rows], [row[name] for row in rows for name in names]]
    return set(kinds[0]), list(dict.fromkeys(kinds[1]))


def check(case: Case, truth: Truth, counts: dict[str, int], table: dict[str, list[Any]]) -> None:
    assert counts["rows_written"] == len(next(iter(table.values())))
    assert counts["queries"] == len(truth.positives)
    assert counts["positives_not_in_corpus"] == truth.unknown
    assert truth.unknown == 0 or case.missing == "drop"
    seen, total = set(), 0
    for name, positives, negatives in found_in(case, truth, table):
        named = [name] if case.format == "ids" or name in truth.positives else []
        owners = named or [one for one in truth.positives if truth.text[one] == name]
        seen.update([name] if named else [one for one in truth.positives if truth.text[one] == name])
        possible = truth.possible(owners[0])
        total += len(negatives)
        assert len(set(negatives)) == len(negatives) == min(case.k, len(possible))
        assert len(positives) == len(truth.positives[owners[0]])
        if not any(one.startswith("row ") for one in (*positives, *negatives)):
            assert positives == truth.positives[owners[0]]
            assert set(negatives) <= possible
        else:
            assert not positives & set(negatives)
    enough = case.k if case.format == "n-tuple" else 0 if case.format in ("ids", "labeled-pair") else 1
    assert seen == {one for one in truth.positives if len(truth.possible(one)) >= enough}
    if case.format == "ids":
        assert total == counts["negatives"]


@pytest.mark.filterwarnings("ignore::hardneg.core.errors.HardnegWarning")  # of a k above the corpus
@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
@example(4637)  # an empty query with a positive that is nowhere
def test_a_sentence_or_a_right_file(seed: int) -> None:
    case = make_case(seed)
    note(case)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "environment", dict)  # which asks git, for every run
        folder = Path(name)
        options = MineOptions(
            queries=write(folder, "q", case.queries, case.kind),
            corpus=None if case.corpus is None else write(folder, "c", case.corpus, case.kind),
            out=str(folder / case.out),
            encoder="test_mine_fuzz:encode",
            negatives="Uniform()",
            missing_positives=case.missing,
            format=case.format,
            k=case.k,
        )
        message, summary = None, None
        try:
            summary = run(options)
        except ValueError as error:
            message = str(error)
        if message is not None:
            event("a sentence")
            assert " needs " in message
            assert "got" in message
            assert message.endswith(".")
            assert not Path(options.out).exists()
            assert not Path(f"{options.out}.work").exists()
            return
        event("a file")
        assert summary is not None
        check(case, Truth(case), summary.counts, read_table(options.out) if summary.rows_written else {"": []})
