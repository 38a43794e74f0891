"""A corpus that is read block by block gives the audit of one in memory, in as many passes as the memory allows."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hardneg as hn
from hardneg.auditing import prepare
from hardneg.auditing.inputs import rows_by_name
from hardneg.search.nearest import Corpus

EXPRESSIONS = ["Uniform()", "Tilt(2.0)", "Rank(0, 20)", "Ring(0.1, 0.5)", "Threshold(0.1)"]


def vectors(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))


CASES: dict[str, dict[str, Any]] = {
    "itself": {"labels": torch.arange(300) % 5},
    "views": {"positives": vectors(300, 2), "labels": torch.arange(300) % 5},
    "a corpus": {"corpus": hn.Keys(vectors(500, 1), labels=torch.arange(500) % 5), "labels": torch.arange(300) % 5},
    "judged": {"corpus": vectors(500, 1), "judgements": [[i, i + 100] for i in range(300)]},
    "dot": {"corpus": vectors(500, 1), "judgements": [[i] for i in range(300)], "similarity": "dot"},
}


def on_disk(monkeypatch: pytest.MonkeyPatch, block: int = 33) -> list[int]:
    """Counts the rows that are read."""
    read: list[int] = []
    original = Corpus.part

    def part(self: Corpus, low: int, high: int) -> Tensor:
        read.append(high - low)
        return original(self, low, high)

    monkeypatch.setattr(Corpus, "part", part)
    monkeypatch.setattr(prepare, "_in_memory", 0)
    monkeypatch.setattr(prepare, "_block", block)
    return read


def close(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(close(first[name], second[name]) for name in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(close, first, second))
    if isinstance(first, float):
        return (math.isnan(first) and math.isnan(second)) or first == pytest.approx(second, rel=1e-4, abs=1e-5)
    return bool(first == second)


@pytest.mark.parametrize("case", CASES)
def test_blocks_give_the_audit_of_memory(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**CASES[case], "num_anchors": 40, "frontier": False}
    whole = hn.audit(vectors(300, 0), EXPRESSIONS, **options)
    on_disk(monkeypatch)
    found = hn.audit(vectors(300, 0), EXPRESSIONS, **options)
    for first, second in zip(whole.rows, found.rows, strict=True):
        left, right = asdict(first), asdict(second)
        left.pop("hubs"), right.pop("hubs")  # equal shares come in any order
        assert close(left, right), (left, right)


@pytest.mark.parametrize(("anchors", "passes", "block"), [(40, 1, 33), (10, 4, 33), (10, 4, 250), (10, 4, 1000)])
def test_memory_decides_how_often_the_corpus_is_read(
    anchors: int, passes: int, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "corpus.npy", vectors(500, 1).numpy())
    corpus = torch.from_numpy(np.load(tmp_path / "corpus.npy", mmap_mode="r+"))
    read = on_disk(monkeypatch, block)
    monkeypatch.setattr("hardneg.auditing.sampling._chunk", 500 * 3)
    memory = (
        (5 * 500 + 12 * min(block, 250)) * anchors / 2**30
    )  # a similarity and a copy of each, and products of a block
    judged = [[i] for i in range(300)]
    hn.audit(
        vectors(300, 0), ["Uniform()"], corpus=corpus, judgements=judged, num_anchors=40, frontier=False, memory=memory
    )
    assert sum(read) == passes * 500


def test_rows_without_ids_go_by_their_numbers() -> None:
    rows = rows_by_name(range(1200))
    assert [name in rows for name in ("0", "1199", "1200", "01", "-1", "x", "", "²")] == [True, True, *[False] * 6]
    assert rows["17"] == 17
    assert len(rows) == len(list(rows)) == 1200


def test_the_effective_number_of_many_candidates() -> None:
    found = hn.audit(vectors(4, 0), ["Uniform()"], corpus=vectors(400_000, 1), judgements=[[0]] * 4, frontier=False)
    assert found.row("Uniform()").effective_number == pytest.approx(399_999, rel=1e-5)
