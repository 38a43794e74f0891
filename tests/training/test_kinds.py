"""A data kind of a user's own file goes through train, resume, compare and report, which know no kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hardneg.comparing import Comparison, compare
from hardneg.comparing import runs as comparison_runs
from hardneg.comparing.runs import in_a_process
from hardneg.core.errors import ArgumentError, DataChanged, NoFile, UnknownName
from hardneg.reporting import write_report
from hardneg.training.data.kinds import kind_of
from hardneg.training.loop.runs import Run
from support.comparisons import here
from support.errors import raises
from support.html_page import Page
from support.training_runs import assert_same, interrupted, run
from support.training_runs import everything as all_of

pytest.importorskip("accelerate", reason="training needs the extra train")

GUIDE = (Path(__file__).parents[2] / "docs" / "extend.md").read_text()
KIND = GUIDE[GUIDE.index('"""Points on two rings') :].partition("```")[0]
"""The file that the guide shows, untouched."""


@pytest.fixture
def rings(tmp_path: Path) -> str:
    (tmp_path / "kind.py").write_text(KIND)
    return f"{tmp_path / 'kind.py'}:rings:120"


def short(data: str, **options: Any) -> dict[str, Any]:
    return {"data": data, "epochs": 2, "batch_size": 16, "log_every": 1, "dim": 8, "device": "cpu", **options}


def test_the_kind_of_the_guide_is_about_40_lines() -> None:
    assert len(KIND.strip().splitlines()) <= 48  # with its imports
    assert "rings" not in (Path(__file__).parents[2] / "src" / "hardneg" / "training" / "loop" / "train.py").read_text()


def test_a_kind_trains_and_a_killed_run_resumes_to_the_same_bits(
    rings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = short(rings, batches="knn()", encode_chunk=5)
    result = run("simclr", tmp_path / "whole", options)
    assert result["headline"] == "knn"
    assert 0.0 < result["knn"] <= 1.0
    assert 0.0 < result["retrieval"] <= 1.0
    assert result["trained"]["data"]["train"]["noun"] == "point"
    with interrupted(8):
        run("simclr", tmp_path / "cut", options)
    run("simclr", tmp_path / "cut", options, resume=True)
    assert_same(all_of(tmp_path / "whole"), all_of(tmp_path / "cut"))


def test_other_data_under_the_same_name_is_noticed(rings: str, tmp_path: Path) -> None:
    run("simclr", tmp_path / "run", short(rings))
    (Run(tmp_path / "run").path / "result.json").unlink()
    kind = kind_of(rings)
    read = kind.read
    kind.read = classmethod(lambda cls, path, options: read("118", options))  # type: ignore[assignment, method-assign]
    try:
        with pytest.raises(DataChanged, match="94 train points"):
            run("simclr", tmp_path / "run", short(rings), resume=True)
    finally:
        kind.read = read  # type: ignore[method-assign]


@pytest.mark.parametrize(("mark", "metric"), [("", "knn"), ("?", "retrieval")], ids=["labels", "none"])
def test_a_kind_is_compared_and_reported_with_and_without_labels(
    rings: str, mark: str, metric: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run is in a process of its own, which reads the file of the kind; the others are trained here."""
    ways = iter([in_a_process] * (mark == "?"))
    monkeypatch.setattr(comparison_runs, "in_a_process", lambda *what, **how: next(ways, here)(*what, **how))
    arms = ("simclr()", "simclr(temperature=0.2)")
    comparison = Comparison(arms, 3, short(rings + mark, epochs=1))
    summary = compare(comparison, tmp_path / "out", jobs=1, show=lambda line: None)
    assert next(ways, None) is None
    assert summary["metric"] == metric
    assert summary["verdicts"][0]["half_width"] is not None
    page = Page(write_report(tmp_path / "out").read_text())
    assert "trains an encoder of points by" in page.words
    assert "For some test points, the nearest others" in page.words
    assert ("nearest of other classes" in page.words) == (not mark)


def test_bad_names_are_reported_before_anything_is_read(rings: str, tmp_path: Path) -> None:
    with raises(NoFile, who="data", what="that exists"):
        kind_of(f"{tmp_path}/none.py:rings:3")
    with pytest.raises(UnknownName, match="Known: digits"):
        kind_of("ring:3")
    with raises(ArgumentError, who="data", got="a file"):
        kind_of(rings, may_run=False)
    kind_of(rings)
    assert kind_of(rings, may_run=False).noun == "point"
    for wrong in ({"augment": "cifar"}, {"encoder": "tiny"}):
        with raises(ArgumentError, who="train", what="for points"):
            run("simclr", tmp_path / "run", short(rings, **wrong))
    with raises(ArgumentError, who="train", what="are fixed", got="views"):
        run("simclr", tmp_path / "run", short(rings), views=lambda *parts: parts)
    assert not (tmp_path / "run").exists()
