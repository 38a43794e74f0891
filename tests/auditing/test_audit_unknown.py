"""What no judge has looked at is unknown: it is not shown as 0 % false, and no rule is suggested on it."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hardneg as hn
from hardneg.auditing.files import audit_files
from hardneg.auditing.options import AuditOptions, Settings
from hardneg.auditing.result import Audit
from hardneg.core.errors import ArgumentError
from hardneg.mining.job import run
from hardneg.mining.options import MineOptions
from support.command import hardneg
from support.mining_jobs import make_rows, write_lines

WANTED = Settings(wanted_false_negatives=0.02)


def qrels(path: Path, pairs: list[tuple[str, str, int]]) -> str:
    path.write_text("query-id\tcorpus-id\tscore\n" + "".join(f"{q}\t{d}\t{grade}\n" for q, d, grade in pairs))
    return str(path)


@pytest.fixture
def mined(tmp_path: Path) -> MineOptions:
    """Mined with judgements, each of which is a positive."""
    queries, corpus = make_rows()
    pairs = [(row.pop("id"), row.pop("positive")) for row in queries]
    rows = [{"id": name, **row} for (name, _), row in zip(pairs, queries, strict=True)]
    options = MineOptions(
        queries=write_lines(tmp_path / "queries.jsonl", rows),
        corpus=write_lines(tmp_path / "corpus.jsonl", corpus),
        judgements=qrels(tmp_path / "qrels.tsv", [(q, d, 1) for q, own in pairs for d in own]),
        out=str(tmp_path / "mined.jsonl"),
        encoder="support.mining_jobs:encode",
        negatives="Rank(0, 40)",
        k=4,
        format="ids",
    )
    run(options)
    return options


def held_out(options: MineOptions, count: int = 10) -> list[tuple[str, str, int]]:
    """The first negative of some queries, as pairs that are relevant."""
    rows = [json.loads(line) for line in Path(options.out).read_text().splitlines()]
    return [(row["query_id"], row["negative_ids"][0], 1) for row in rows[:count]]


def texts_of(audit: Audit, tmp_path: Path) -> tuple[str, str]:
    return audit.table(), " ".join(audit.write_html(tmp_path / "audit.html").read_text().split())


def test_judged_positives_alone_leave_every_share_unknown(mined: MineOptions, tmp_path: Path) -> None:
    found = audit_files(AuditOptions(mined.out, settings=WANTED))
    assert found.judges == ("judgements",)
    assert all(row.judged_share == 0 and math.isnan(row.false_negatives) for row in found.rows)
    assert found.suggestions
    assert all(one.expression is None and one.flags is None for one in found.suggestions)
    assert not found.frontier()
    table, page = texts_of(found, tmp_path)
    assert "unknown" in table
    assert "unknown" in page
    for text in (table, page):
        assert "0.00 %" not in text.partition("near-duplicates")[0]
        assert "--draw gumbel" not in text
        assert "held_out_judgements" in text
    rows = json.loads(found.write_json(tmp_path / "audit.json").read_text())["rows"]
    assert {(row["false_negatives"], row["judged_share"]) for row in rows} == {(None, 0.0)}


def test_some_judged_negatives_give_a_lower_bound(mined: MineOptions, tmp_path: Path) -> None:
    irrelevant = [(query, document, 0) for query, document, _ in held_out(mined, 20)]
    kept = [tuple(line.split("\t")) for line in Path(mined.judgements or "").read_text().splitlines()[1:]]
    judged = qrels(tmp_path / "more.tsv", [*((q, d, int(grade)) for q, d, grade in kept), *irrelevant])
    found = audit_files(AuditOptions(mined.out, settings=WANTED, judgements=judged))
    row = found.row("mined")
    assert (row.false_negatives, row.is_rate) == (0.0, False)
    assert row.judged_share == pytest.approx(1 / 4)
    suggested = [found.row(one.expression) for one in found.suggestions if one.expression]
    assert all(one.most_false <= 0.02 for one in suggested)  # rules of which all negatives are judged
    assert len(suggested) < len(found.suggestions)
    table, page = texts_of(found, tmp_path)
    assert "at least 0 %" in table
    assert "at least 0 %, judged share 25 %" in page


def test_held_out_judgements_give_a_rate(mined: MineOptions, tmp_path: Path) -> None:
    file = qrels(tmp_path / "held_out.tsv", [*held_out(mined), ("q0", "d0", 1)])  # the last one is a positive
    found = audit_files(AuditOptions(mined.out, settings=WANTED, held_out_judgements=file))
    row = found.row("mined")
    assert row.is_rate
    assert row.false_negatives == pytest.approx(1 / 4)
    assert found.num_anchors == 10
    assert found.frontier()
    assert any(one.expression for one in found.suggestions)
    assert all(one.false_negatives <= 0.02 for one in found.suggestions if one.expression)
    table, page = texts_of(found, tmp_path)
    for text in (table, page):
        assert "25.00 %" in text
        assert "judged share" not in text


def test_held_out_judgements_on_the_command_line(mined: MineOptions, tmp_path: Path) -> None:
    file = qrels(tmp_path / "held_out.tsv", held_out(mined))
    out = tmp_path / "out"
    done = hardneg("audit", mined.out, "--held-out-judgements", file, "-o", str(out))
    assert done.exit_code == 0, done.output
    assert "25.00 %" in done.output
    assert "25.00 %" in (out / "audit.html").read_text()
    rows = {row["expression"]: row for row in json.loads((out / "audit.json").read_text())["rows"]}
    assert rows["mined"]["false_negatives"] == pytest.approx(1 / 4)
    assert rows["mined"]["judged_share"] == 1.0
    without = hardneg("audit", mined.out, "--overwrite", "-o", str(out))
    assert "--held-out-judgements" in " ".join(without.output.split())


def test_held_out_judgements_that_mining_has_seen_are_refused(mined: MineOptions) -> None:
    with pytest.raises(ArgumentError) as error:
        audit_files(AuditOptions(mined.out, held_out_judgements=mined.judgements))
    assert "positives" in str(error.value.got)
    assert error.value.fix


@pytest.mark.parametrize("given", ["judgements", "held_out_judgements"])
def test_without_vectors_the_lists_say_what_is_judged(given: str, mined: MineOptions, tmp_path: Path) -> None:
    shutil.rmtree(f"{mined.out}.embeddings")
    options = AuditOptions(mined.out, settings=Settings(frontier=False))
    notes = " ".join(audit_files(options).notes)
    assert "how many are false is not known" in notes
    assert "0.0%" not in notes
    file = qrels(tmp_path / "given.tsv", held_out(mined))
    notes = " ".join(audit_files(replace(options, **{given: file})).notes)
    assert ("At least 10 of 80" if given == "judgements" else "10 of 40") in notes


def test_a_partly_labelled_set_gives_lower_bounds(tmp_path: Path) -> None:
    z = torch.nn.functional.normalize(torch.randn(40, 8, generator=torch.Generator().manual_seed(0)), dim=-1)
    labels: list[Any] = [row % 4 if row % 2 else None for row in range(40)]
    found = hn.audit(z, "Uniform()", labels=labels, wanted_false_negatives=0.4)
    row = found.row("Uniform()")
    assert row.judged_share == pytest.approx(19 / 39)
    assert row.false_negatives == pytest.approx(9 / 39)
    assert not row.is_rate
    assert all(one.expression is None or found.row(one.expression).most_false <= 0.4 for one in found.suggestions)
    assert hn.audit(z, "Uniform()", labels=torch.arange(40) % 4).row("Uniform()").is_rate
