"""The page of an audit: texts of a mined file and the similarities that its figures rest on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import hardneg as hn
from hardneg.auditing.files import audit_mined
from hardneg.auditing.options import AuditOptions
from hardneg.auditing.page import audit_page
from support.html_page import Page


def keys(labels: torch.Tensor) -> hn.Keys:
    x = torch.eye(4)[labels] + 0.3 * torch.randn(len(labels), 4, generator=torch.Generator().manual_seed(0))
    return hn.Keys(torch.nn.functional.normalize(x, dim=1), torch.arange(len(labels)), labels=labels)


def test_similarities_are_those_of_all_pairs() -> None:
    labels = torch.arange(24) % 4
    found = hn.audit(keys(labels)).similarities
    assert found is not None
    cosines = keys(labels).vectors.double() @ keys(labels).vectors.double().T
    same = (labels[:, None] == labels) & ~torch.eye(24, dtype=torch.bool)
    other = labels[:, None] != labels
    assert found.false is not None
    assert found.negatives is not None
    assert found.positives is None
    for counted, pairs in ((found.false, same), (found.negatives, other)):
        assert sum(counted.counts) == int(pairs.sum())
        assert counted.mean == pytest.approx(float(cosines[pairs].mean()), abs=1e-6)


def test_the_page_shows_the_histogram_and_the_texts(tmp_path: Path) -> None:
    page = Page(audit_page(hn.audit(keys(torch.arange(24) % 4))))
    assert "Similarity of false negatives (known) and other candidates" in page.words
    rows = [{"anchor": f"query {i} <b>", "positive": f"good {i}", "negative": f"bad {i}"} for i in range(9)]
    (tmp_path / "mined.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    text = audit_page(audit_mined(AuditOptions(str(tmp_path / "mined.jsonl"))))
    page = Page(text)
    assert "query 0 <b>" in page.words
    assert "good 0" in page.words
    assert "bad 0" in page.words
    assert "query 0 &lt;b&gt;" in text
    assert "form-action 'none'" in text
