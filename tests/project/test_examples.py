"""Every script of examples/ runs from any directory, and prints something."""

from __future__ import annotations

import errno
import runpy
import sys
from pathlib import Path

import pytest

from hardneg.core.errors import DiskFull

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("script", EXAMPLES, ids=[script.stem for script in EXAMPLES])
def test_example_runs(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.count("\n") >= 2


def test_docstrings_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "new" / "docstrings.jsonl"
    script = next(script for script in EXAMPLES if script.stem == "docstrings")
    monkeypatch.setattr(sys, "argv", [str(script), str(out)])
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(DiskFull):
        runpy.run_path(str(script), run_name="__main__")
    assert not list(out.parent.iterdir())


def test_there_are_four() -> None:
    assert {script.stem for script in EXAMPLES} >= {"two_views", "mine_embeddings", "global_batches", "docstrings"}
