"""Sheets: the CSV, the page in a browser, and answers read back."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import tempfile
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardneg.core.errors import ArgumentError, HardnegError
from hardneg.io.outputs import is_sealed_page
from hardneg.judging import job
from hardneg.judging.sheet import Row, Votes, read_answers, sheet_page, write_sheet
from judging.conftest import MakeOptions, answers
from judging.test_judge_files import FUNCTION, table

ROWS = [
    Row(("q1", "d,1"), "What is <b>this</b>?", '=HYPERLINK("x") </script><script>alert(1)</script>', "known"),
    Row(("q 2", 'd"2'), "zwei \u2028 & ümlaut", "-1", ""),
    Row(("3", "4"), "three", "four\nlines", "five"),
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
    assert page.count("<script") == 2
    assert "alert(1)</script>" not in page
    assert "http" not in re.sub(r"http-equiv", "", page)
    data = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)[1]
    assert [tuple(one["ids"]) for one in json.loads(data)] == [row.ids for row in ROWS]


def test_images_are_shown_as_thumbnails(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (900, 600), (200, 30, 30)).save(tmp_path / "red.png")
    page = sheet_page([Row(("a", "b"), str(tmp_path / "red.png"), "text", str(tmp_path / "missing.png"))], "Pairs")
    data = json.loads(re.search(r'application/json"[^>]*>(.*?)</script>', page, re.DOTALL)[1])
    assert data[0]["query"]["image"].startswith("data:image/jpeg;base64,")
    assert data[0]["query"]["text"] == "red.png"
    assert len(page) < 60_000
    assert "image" not in data[0]["positive"]


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


ANSWER = """
const page = document.querySelector("iframe").contentWindow, inside = page.document;
const press = (key) => inside.dispatchEvent(new page.KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
inside.getElementById("by").value = "browser";
press("1"); press("ArrowLeft");  // an answer that is changed
const truth = JSON.parse(document.getElementById("truth").textContent);
for (const yes of truth) press(yes === null ? "?" : yes ? "y" : "0");
const seen = {table: page.table(), state: inside.getElementById("state").textContent,
              shown: inside.getElementById("query").textContent, bar: inside.getElementById("bar").value};
document.body.textContent = JSON.stringify(seen);
"""


def answered_in_browser(page: Path, truth: list[bool | None]) -> dict[str, Any]:
    """Answer a sheet with its keys, in a browser, and return the file that it would save."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    inside = escape(page.read_text(encoding="utf-8"), quote=True)
    frame = f'<iframe style="width:900px;height:900px" srcdoc="{inside}"></iframe>'
    data = f'<script type="application/json" id="truth">{json.dumps(truth)}</script>'
    driver = page.with_suffix(".driver.html")
    driver.write_text(
        f"<!doctype html><meta charset=utf-8><body>{frame}{data}<script>onload = () => {{{ANSWER}}}</script></body>"
    )
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--virtual-time-budget=5000"]
    profile = f"--user-data-dir={page.parent / 'profile'}"
    dumped = subprocess.run([*command, profile, driver.as_uri()], capture_output=True, text=True, timeout=120).stdout
    (found,) = re.findall(r"<body>(\{.*\})</body>", dumped, re.DOTALL)
    seen: dict[str, Any] = json.loads(unescape(found))
    return seen


needs_browser = pytest.mark.skipif(
    not (shutil.which("chromium") or shutil.which("google-chrome")), reason="no browser to answer in"
)


@needs_browser
def test_a_sheet_answered_in_a_browser(tmp_path: Path) -> None:
    _, page = write_sheet(tmp_path, ROWS, "Pairs")
    seen = answered_in_browser(page, [True, False, None])
    assert seen["state"] == "Pair 3 of 3; 3 answered."
    assert seen["bar"] == 3
    assert seen["shown"] == "three"
    (tmp_path / "answers.csv").write_text(seen["table"], encoding="utf-8", newline="")
    votes = Votes(0.0)
    assert read_answers(tmp_path / "answers.csv", votes) == 3
    assert votes.people() == ["browser"]
    assert [votes.grade(row.ids) for row in ROWS] == [1.0, 0.0, None]


@needs_browser
def test_rounds_in_a_browser_give_the_file_of_a_function(options: MakeOptions, tmp_path: Path) -> None:
    job.run(options({"out": str(tmp_path / "direct")}, judge=FUNCTION, budget=60))
    outcome = job.run(options(budget=60))
    for _ in range(20):
        if not outcome.waiting:
            break
        rows = list(csv.DictReader((tmp_path / "judged" / "sheet.csv").open(encoding="utf-8")))
        truth: list[bool | None] = [answers(row["query"], row["document"]) for row in rows]
        saved = answered_in_browser(tmp_path / "judged" / "sheet.html", truth)["table"]
        (tmp_path / "answers.csv").write_text(saved, encoding="utf-8", newline="")
        outcome = job.run(options(budget=60, answers=(str(tmp_path / "answers.csv"),)))
    assert outcome.waiting == 0
    assert table(tmp_path / "judged") == table(tmp_path / "direct")
