"""Pages in a browser, from a phone to a wide screen."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape
from pathlib import Path
from typing import Any

import pytest

from hardneg.reporting import write_report
from support.reports import ARMS, make_comparison

WIDTHS = (390, 860, 900, 1280, 1600)


MEASURE = """
const found = [];
for (const frame of document.querySelectorAll("iframe")) {
  const page = frame.contentDocument, boxes = [...page.querySelectorAll(".scroll, .sideways")], cells = [];
  for (const cell of page.querySelectorAll("#measures td, #results td.mean, #results td.seconds")) {
    const words = page.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    while (words.nextNode()) {
      const text = page.createRange();
      text.selectNodeContents(words.currentNode);
      cells.push(text.getClientRects().length);
    }
  }
  const table = Math.max(...boxes.map((box) => box.scrollWidth - box.clientWidth));
  found.push({table, page: page.documentElement.scrollWidth - frame.clientWidth,
              lines: Math.max(...cells)});
}
document.body.textContent = JSON.stringify(found);
"""


SORT = """
const page = document.querySelector("iframe").contentDocument, found = {};
const arms = () => [...page.querySelectorAll("#results tbody .badge")].map((badge) => badge.textContent);
found.before = arms();
const click = (column) => page.querySelectorAll("#results thead button")[column].click();
click(2), found.mean = arms();
click(2), found.reversed = arms();
click(3), found.against = arms();
click(0), found.arm = arms();
document.body.textContent = JSON.stringify([found]);
"""


def seen_at(path: Path, widths: tuple[int, ...]) -> list[dict[str, int]]:
    """By how many pixels the table and the page are too wide at these widths, and over how many lines a number goes."""
    return shown(path, widths, MEASURE)


def shown(path: Path, widths: tuple[int, ...], script: str) -> list[Any]:
    """What a script finds that a frame page runs, which has the page at each width."""
    page = escape(path.read_text(), quote=True)
    frames = "".join(
        f'<iframe style="border:0;width:{width}px;height:900px" srcdoc="{page}"></iframe>' for width in widths
    )
    seen = path.with_suffix(".seen.html")
    seen.write_text(f"<!doctype html><body>{frames}<script>onload = () => {{{script}}}</script></body>")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser is not None
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--virtual-time-budget=5000"]
    profile = f"--user-data-dir={path.parent / 'profile'}"
    answer = subprocess.run([*command, profile, seen.as_uri()], capture_output=True, text=True, timeout=120)
    (found,) = re.findall(r"<body>(\[.*\])</body>", answer.stdout, re.DOTALL)
    return list(json.loads(found))


@pytest.mark.skipif(not (shutil.which("chromium") or shutil.which("google-chrome")), reason="no browser to look with")
@pytest.mark.parametrize("seeds", [2, 3])
def test_nothing_is_cut_and_no_number_is_broken(seeds: int, tmp_path: Path) -> None:
    """With what makes a table widest: intervals of two seeds, a long arm, and thousands of steps and seconds."""
    summary = make_comparison(tmp_path, ARMS, seeds)
    for row in summary["rows"]:
        row |= {"half_width": 0.1412, "seconds": 1234.0, "steps": 19500}
        if row["difference"] is not None:
            row["difference_half_width"] = 0.1059
    (tmp_path / "comparison.json").write_text(json.dumps(summary))
    for width, found in zip(WIDTHS, seen_at(write_report(tmp_path), WIDTHS), strict=True):
        assert found["table"] <= 0, f"the table is cut at {width} px"
        assert found["page"] <= 0, f"the page is wider than {width} px"
        assert found["lines"] == 1, f"a number is broken at {width} px"


@pytest.mark.skipif(not (shutil.which("chromium") or shutil.which("google-chrome")), reason="no browser to look with")
def test_a_click_on_a_heading_sorts_the_table(tmp_path: Path) -> None:
    """Figures begin with the largest and names with A; a second click reverses, and what has no value stays last."""
    summary = make_comparison(tmp_path, ARMS)
    by_mean = sorted(range(4), key=lambda i: -summary["rows"][i]["mean"])
    by_difference = sorted(range(1, 4), key=lambda i: -summary["rows"][i]["difference"])
    (found,) = shown(write_report(tmp_path), (1280,), SORT)
    assert found["before"] == ["A", "B", "C", "D"]
    assert found["mean"] == ["ABCD"[i] for i in by_mean]
    assert found["reversed"] == found["mean"][::-1]
    assert found["against"] == [*("ABCD"[i] for i in by_difference), "A"]
    assert found["arm"] == ["A", "B", "C", "D"]
