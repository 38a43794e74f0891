"""Sheets: the CSV, the page in a browser, and answers read back."""

from __future__ import annotations

import base64
import csv
import json
import re
import tempfile
from html import unescape
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardneg.core.errors import ArgumentError, HardnegError
from hardneg.io.outputs import is_sealed_page
from hardneg.judging import job
from hardneg.judging.sheet import SheetRow, Votes, read_answers, sheet_page, write_sheet
from judging.browser import Browser, needs_browser
from judging.conftest import MakeOptions, answers
from judging.test_judge_files import FUNCTION, table

ROWS = [
    SheetRow(("q1", "d,1"), "What is <b>this</b>?", '=HYPERLINK("x") </script><script>alert(1)</script>', "known"),
    SheetRow(("q 2", 'd"2'), "zwei \u2028 & ümlaut", "-1", ""),
    SheetRow(("3", "4"), "three", "four\nlines", "five"),
]


def test_a_sheet_is_read_back_as_it_was_filled_in(tmp_path: Path) -> None:
    path, page = write_sheet(tmp_path, ROWS, "Pairs")
    votes = Votes(0.0)
    assert read_answers(path, votes) == 0, "an empty sheet has no answers"
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["document"].startswith("'="), "no spreadsheet runs it"
    assert rows[2]["document"] == "four\nlines"
    for row, grade in zip(rows, ("yes", "0", "?"), strict=True):
        row["grade"] = grade
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    assert read_answers(path, votes) == 3
    assert [votes.grade(row.ids) for row in ROWS] == [1.0, 0.0, None]
    assert votes.people() == ["sheet"]
    assert is_sealed_page(page)


@pytest.mark.parametrize(
    ("grades", "expected"),
    [
        ([1.0, 0.0, 1.0], 1.0),
        ([1.0, 0.0], None),
        ([2.0, 3.0, 0.0], 2.5),
        ([None], None),
        ([None, 0.0], 0.0),
        ([], None),
    ],
)
def test_the_majority_decides(grades: list[float | None], expected: float | None) -> None:
    votes = Votes(0.0)
    for person, grade in enumerate(grades):
        votes.add(("q", "d"), f"p{person}", grade)
    assert votes.grade(("q", "d")) == expected


def test_the_page_runs_only_its_own_script() -> None:
    page = sheet_page(ROWS, "Pairs <1>")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in unescape(policy) or "script-src &#39;sha256-" in policy
    assert "unsafe-inline" not in unescape(policy).split("script-src")[1]
    assert page.count("<script") == 3  # the pairs, its own, and that of all pages
    assert "alert(1)</script>" not in page
    assert "http" not in re.sub(r"http-equiv", "", page)
    data = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)[1]
    assert [tuple(one["ids"]) for one in json.loads(data)] == [row.ids for row in ROWS]


def test_images_are_shown_as_thumbnails(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (900, 600), (200, 30, 30)).save(tmp_path / "red.png")
    page = sheet_page([SheetRow(("a", "b"), str(tmp_path / "red.png"), "text", str(tmp_path / "missing.png"))], "Pairs")
    data = json.loads(re.search(r'application/json"[^>]*>(.*?)</script>', page, re.DOTALL)[1])
    assert data[0]["query"]["image"].startswith("data:image/jpeg;base64,")
    assert data[0]["query"]["text"] == "red.png"
    assert len(page) < 60_000
    assert "image" not in data[0]["positive"]


def test_graphs_are_drawn(tmp_path: Path) -> None:
    """Node-link JSON of networkx, with its old and new name of the links; large graphs are shown by their size."""
    nodes = [{"id": i, "label": kind} for i, kind in enumerate("CCO")]
    links = [{"source": 0, "target": 1}, {"source": 1, "target": 2}]
    (tmp_path / "small.json").write_text(json.dumps({"nodes": nodes, "links": links}))
    large = {"nodes": [{"id": i} for i in range(100)], "edges": links}
    (tmp_path / "large.json").write_text(json.dumps(large))
    (tmp_path / "other.json").write_text('{"nodes": 3}')
    (tmp_path / "drawn.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    paths = [str(tmp_path / name) for name in ("small.json", "large.json", "other.json", "drawn.svg")]
    page = sheet_page([SheetRow(("a", "b"), *paths[:2]), SheetRow(("c", "d"), *paths[2:])], "Pairs")
    first, second = json.loads(re.search(r'application/json"[^>]*>(.*?)</script>', page, re.DOTALL)[1])
    drawing = base64.b64decode(first["query"]["image"].removeprefix("data:image/svg+xml;base64,")).decode()
    assert drawing.count("<circle") == 3
    assert first["query"]["text"] == "small.json: 3 nodes, 2 edges"
    assert first["document"] == {"text": "large.json: 100 nodes, 2 edges"}
    assert second["query"] == {"text": paths[2]}
    assert second["document"]["image"].startswith("data:image/svg+xml;base64,")


@settings(deadline=None)
@given(st.binary(max_size=60), st.integers(0, 200), st.booleans())
def test_fuzzed_answers_are_read_or_refused(noise: bytes, place: int, replaces: bool) -> None:
    """Whatever a file of answers contains, it gives votes or an error for people."""
    good = b'query-id,corpus-id,grade,by\r\nq1,"d,1",1,ada\r\n"q 2","d""2",?,ada\r\n3,4,0,\r\n'
    end = place + len(noise) * replaces
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answers.csv"
        path.write_bytes(good[:place] + noise + good[end:])
        votes = Votes(0.0)
        try:
            read_answers(path, votes)
        except HardnegError:
            return
        assert all(isinstance(part, str) for ids in votes.of for part in ids)
        assert all(grade is None or abs(grade) < 1e9 for each in votes.of.values() for grade in each.values())


def test_answers_need_their_columns(tmp_path: Path) -> None:
    for text in ("query-id,grade\na,1\n", "query-id,corpus-id\na,b\n", "corpus-id,grade\na,1\n"):
        (tmp_path / "bad.csv").write_text(text)
        with pytest.raises(ArgumentError):
            read_answers(tmp_path / "bad.csv", Votes(0.0))


def answer(browser: Browser, truth: list[bool | None]) -> None:
    for yes in truth:
        browser.press("?" if yes is None else "y" if yes else "0")


@needs_browser
def test_a_sheet_answered_in_a_browser(tmp_path: Path) -> None:
    """With its keys and buttons; answers survive a reload, and the saved file is the download."""
    _, page = write_sheet(tmp_path, ROWS, "Pairs")
    with Browser(page, tmp_path) as browser:
        browser.click("by")
        for letter in "Ada 1":  # no key of a name answers a pair
            browser.press(letter)
        assert browser.value("document.getElementById('bar').value") == 0
        browser.value("document.activeElement.blur()")
        browser.press("1")
        browser.press("ArrowLeft")  # an answer that is changed
        answer(browser, [False, True])
        shown = "document.getElementById('document').textContent"
        assert browser.value(shown) == "four\nlines"
        browser.reload()
        browser.wait(lambda: browser.value("document.getElementById('by').value") == "Ada 1")
        assert browser.value("document.getElementById('state').textContent") == "Pair 1 of 3; 2 answered."
        assert "<script>alert(1)</script>" in browser.value(shown)
        browser.press("u")
        answer(browser, [None])
        assert browser.value("document.getElementById('bar').value") == 3
        saved = browser.save()
    assert re.fullmatch(r"answers-Ada_1-[0-9a-f]{12}\.csv", saved.name)
    votes = Votes(0.0)
    assert read_answers(saved, votes) == 3
    assert votes.people() == ["Ada 1"]
    assert [votes.grade(row.ids) for row in ROWS] == [0.0, 1.0, None]


@needs_browser
def test_rounds_in_a_browser_give_the_file_of_a_function(options: MakeOptions, tmp_path: Path) -> None:
    job.run(options({"out": str(tmp_path / "direct")}, judge=FUNCTION, budget=60))
    outcome = job.run(options(budget=60))
    saved: list[str] = []
    for _ in range(20):
        if not outcome.waiting:
            break
        rows = list(csv.DictReader((tmp_path / "judged" / "sheet.csv").open(encoding="utf-8")))
        with Browser(tmp_path / "judged" / "sheet.html", tmp_path) as browser:
            answer(browser, [answers(row["query"], row["document"]) for row in rows])
            saved.append(str(browser.save()))
        outcome = job.run(options(budget=60, answers=(saved[-1],)))
    assert outcome.waiting == 0
    assert len(saved) > 1
    assert table(tmp_path / "judged") == table(tmp_path / "direct")
