"""Notebooks: those of docs/notebooks run, and results are tables in which every text of a user is escaped."""

from __future__ import annotations

import io
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.nn.functional import normalize

import hardneg as hn
from hardneg.comparing.comparing import ComparisonSummary
from hardneg.core.text import html_table
from hardneg.io.terminal import progress_bars

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

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


def kinds_of(cell: Any) -> set[str]:
    """What a cell shows, such as text/html; progress bars and warnings are not results."""
    shown = {kind for output in cell.get("outputs", ()) for kind in output.get("data", ()) if kind != "text/plain"}
    printed = any(output.get("name") == "stdout" for output in cell.get("outputs", ()))
    return shown | ({"printed"} if printed else set())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_runs(path: Path, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """With ``--write-outputs`` the results are stored in the notebook."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    before = [kinds_of(cell) for cell in cells]
    install, cells[0].source = cells[0].source, "pass"
    nbclient.NotebookClient(
        notebook, timeout=600, coalesce_streams=True, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    cells[0].source = install
    if pytestconfig.getoption("--write-outputs"):
        for cell in cells:
            cell.metadata = {}
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr" and not is_bar(one)]
        nbformat.write(notebook, path)
    else:
        assert before == [kinds_of(cell) for cell in cells]


def is_bar(output: Any) -> bool:
    """Whether an output is the place of progress bars that have been removed."""
    return output.output_type == "display_data" and output.data.get("text/html") == ""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_opens_elsewhere(path: Path) -> None:
    """It has a link to Colab, installs hardneg first, shows results, and mentions no path of a machine."""
    content = path.read_text(encoding="utf-8")
    first, install, *others = json.loads(content)["cells"]
    assert f"/blob/main/docs/notebooks/{path.name}" in "".join(first["source"])
    assert "".join(install["source"]).startswith("%pip install -q 'hardneg[")
    assert sum(bool(cell.get("outputs")) for cell in others) >= 3
    assert not any(folder in content for folder in ("/tmp", "/root", "/home", "/work"))


def test_bars_in_a_notebook_are_replaced_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    display = pytest.importorskip("IPython.display")
    shown: list[str] = []

    class Place:
        def update(self, page: Any) -> None:
            shown.append(page.data)

    monkeypatch.setattr(display, "display", lambda *_, **__: Place())
    console = Console(file=io.StringIO(), force_jupyter=True)
    with progress_bars(console=console) as bars:
        advance = bars("train", 4)
        advance(4, BAD)
        bars("evaluate", None)
    assert 'value="4" max="4"' in shown[1]
    assert "train 4/4" in shown[1]
    assert "&lt;script&gt;" in shown[1]
    assert "<progress></progress> evaluate" in shown[2]
    assert shown[-1] == ""
