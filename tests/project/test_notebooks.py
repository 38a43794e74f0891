"""What notebooks show of results: tables in which every text of a user is escaped."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize

import hardneg as hn
from hardneg.comparing.comparing import ComparisonSummary
from hardneg.core.text import html_table

BAD = "<script>alert(1)</script>"


class Cells(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def shown(result: Any) -> list[str]:
    cells = Cells(result._repr_html_())
    assert cells.tags <= {"table", "caption", "tr", "th", "td", "p"}
    return cells.texts


def test_every_text_of_a_table_is_escaped() -> None:
    cells = Cells(html_table(BAD, [BAD], [[BAD], ["\x1b[2J"]], [BAD]))
    assert cells.tags == {"table", "caption", "tr", "th", "p"}
    assert cells.texts.count(BAD) == 4
    assert "\\x1b[2J" in cells.texts


def test_mined_shows_ids_and_scores() -> None:
    corpus = hn.Keys([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]], ids=["a", BAD, "c"])
    texts = shown(hn.mine([[1.0, 0.0]], corpus, ["a"], "Uniform()", k=2))
    assert f"{BAD} (0.600)" in texts
    assert "c (0.000)" in texts


def test_short_queries_have_empty_cells() -> None:
    with pytest.warns(hn.core.errors.HardnegWarning):
        found = hn.mine([[1.0, 0.0]], torch.eye(2), [0], "Uniform()", k=2)
    assert "1 (0.000)" in shown(found)
    assert not any("inf" in text for text in shown(found))


def test_a_diagnosis_shows_means() -> None:
    z1, z2 = torch.randn(2, 8, 4)
    found = hn.ContrastiveLoss("Tilt(1.0)", temperature=0.5).diagnose(z1, z2)
    texts = shown(found)
    assert "Diagnosis of 16 anchors" in texts
    assert texts[texts.index("effective temperature") + 1] == f"{found.summary()['effective_temperature']:.4g}"
    assert texts[texts.index("false negatives") + 1] == "n/a"


def test_an_audit_shows_rules_suggestions_and_findings() -> None:
    z, labels = normalize(torch.randn(60, 8), dim=-1), torch.arange(60) % 3
    mined = hn.mine(z, z, [[]] * 60, "Rank(0, 20)", k=3)
    texts = shown(hn.audit(z, "Tilt(1.0)", labels=labels, mined=mined, wanted_false_negatives=0.3))
    for text in ("Tilt(1.0)", "similarity", "At most 30 % false negatives", "Mined lists", "queries"):
        assert text in texts


def test_a_comparison_shows_arms_and_the_answer() -> None:
    rows = [
        {"arm": BAD, "mean": 0.5, "half_width": 0.01, "difference": None, "difference_half_width": None},
        {"arm": "hcl()", "mean": 0.6, "half_width": 0.01, "difference": 0.1, "difference_half_width": None},
    ]
    summary = ComparisonSummary(metric="knn", k=20, rows=rows, answer=["B is better."], sentences=[])
    texts = shown(summary)
    assert {BAD, "A", "50.00 ± 1.00", "10.00", "B is better."} <= set(texts)
