"""Rates of a judgement in an audit: rows with bounds, error bars on the frontier, and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_audit import make_data
from typer.testing import CliRunner

import hardneg as hn
from hardneg.auditing.page import audit_page
from hardneg.cli.app import app
from hardneg.core.errors import ArgumentError, Damaged, NoFile
from support.html_page import Page

RULES = ["Rank(stop=6)", "Rank(start=20, stop=40)"]


@pytest.fixture(scope="module")
def data() -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Vectors, labels, and a judgement of two rules by the labels."""
    z, _, labels = make_data(60)
    z = z.float()
    positives = [[int(row) for row in (labels == own).nonzero()[:2, 0] if row != place][:1] for place, own in
                 enumerate(labels)]  # fmt: skip
    judge = lambda pairs: [bool(labels[query] == labels[document]) for query, document in pairs]  # noqa: E731
    return z, labels, hn.judge(z, z, positives, RULES, 3, judge, budget=60, level=0.2)


def test_judged_rules_are_rows_with_bounds_and_the_only_frontier(data: Any) -> None:
    z, _, judged = data
    plain = hn.audit(z, frontier=False, negatives=RULES)
    assert not plain.frontier()
    found = hn.audit(z, frontier=False, negatives=RULES, judged=judged)
    assert [row.expression for row in found.rows] == [*RULES, *(f"{rule} (judged)" for rule in judged.rates)]
    for rule, (rate, low, high) in judged.rates.items():
        row = found.row(f"{rule} (judged)")
        assert (row.false_negatives, *row.bounds) == (rate, low, high)
        assert row.similarity == judged.similarity[rule]
        assert row.is_rate
    assert {row.kind for row in found.frontier()} == {"judged"}
    kept = {row["expression"]: row for row in found.to_dict()["rows"]}
    assert kept[f"{RULES[0]} (judged)"]["bounds"] == list(judged.rates[RULES[0]][1:])
    assert kept[RULES[0]]["bounds"] is None
    assert "60 judgements" in found.notes[-1]


def test_error_bars_of_the_chart_end_at_the_bounds(data: Any) -> None:
    z, _, judged = data
    found = hn.audit(z, RULES[0], frontier=False, judged=judged)
    page = audit_page(found)
    hardest = max(judged.rates, key=lambda rule: judged.similarity[rule])
    assert f"{100 * judged.rates[hardest][2]:.2f} %." in Page(page).words, "the lead has the bounds of an estimate"
    wide = page[page.index('class="chart wide-chart"') :]
    bars = re.findall(r'class="interval" x1="[\d.]+" x2="[\d.]+" y1="([\d.]+)" y2="([\d.]+)"', wide)[:2]
    assert len(bars) == 2
    top, bottom, highest = 26.0, 520.0 - 38.0, 1.08 * max(high for _, _, high in judged.rates.values())
    drawn = sorted(tuple(highest * ((bottom - float(y)) / (bottom - top)) ** 2 for y in bar) for bar in bars)
    expected = sorted(tuple(bounds) for _, *bounds in judged.rates.values())
    assert np.allclose(drawn, expected, atol=2e-3)


def test_the_command_reads_the_folder_of_a_judgement(data: Any, tmp_path: Path) -> None:
    z, _, judged = data
    np.save(tmp_path / "z.npy", z.numpy())
    folder = tmp_path / "judged"
    folder.mkdir()
    (folder / "judge.json").write_text(json.dumps(judged.to_dict() | {"documents": 60, "k": 3}))
    arguments = ["audit", str(tmp_path / "z.npy"), "--no-frontier", "-n", RULES[0], "--judged", str(folder)]
    done = CliRunner().invoke(app, [*arguments, "-o", str(tmp_path / "audit")], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert f"{RULES[1]} (judged)" in done.output
    assert "3 negatives per query" in done.output
    rows = json.loads((tmp_path / "audit" / "audit.json").read_text())["rows"]
    assert [row["kind"] for row in rows] == ["given", "judged", "judged"]


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, NoFile),
        ("{", Damaged),
        ("{}", Damaged),
        ('{"rules": [{"rule": "a"}], "judgements": 1, "confidence": 0.9}', Damaged),
        ('{"rules": [], "judgements": 1, "confidence": 0.9, "documents": 7}', ArgumentError),
    ],
)
def test_what_is_no_judgement_of_this_data_is_refused(
    content: str | None, error: type[Exception], data: Any, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "judge.json").write_text(content)
    with pytest.raises(error):
        hn.audit(data[0], judged=tmp_path)
    with pytest.raises(ArgumentError):
        hn.audit(data[0], judged=3)
