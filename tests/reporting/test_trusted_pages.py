"""Pages of damaged or hostile files: everything is escaped, or refused by name."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from hardneg.cli.tables import show_comparison
from hardneg.core.errors import ArgumentError, Damaged, FileError
from hardneg.reporting import write_report
from support.errors import raises
from support.html_page import Page
from support.reports import ARMS, make_comparison, make_data, make_run, places, read


def test_nothing_is_fetched_and_everything_has_a_text(comparison: tuple[Path, dict[str, Any]], compared: Page) -> None:
    text = re.sub(r"base64,[A-Za-z0-9+/=]+", "", (comparison[0] / "report.html").read_text())
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<link", text)
    assert "default-src 'none'" in text
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text, "no other script can run"
    assert text.count("<script") == 1
    for tag, attributes in compared.tags:
        assert not any(name in attributes for name in ("srcset", "onclick", "onload"))
        assert "href" not in attributes or (attributes["href"] or "").startswith(
            ("data:text/csv;", "data:application/json;", "#")
        )
        if tag == "img":
            assert (attributes["src"] or "").startswith("data:image/png;base64,")
            assert attributes["alt"]
        if tag == "svg":
            assert attributes["role"] == "img"
            assert attributes["aria-label"]
    assert compared.open == [], "every element is closed"


def test_text_is_escaped(tmp_path: Path) -> None:
    summary = make_comparison(tmp_path, ARMS[:2])
    evil = "<script>alert('x')</script> & \"quoted\""
    summary["rows"][0]["arm"] = evil
    summary |= {"sentences": [evil], "notes": [evil], "command": evil, "machine": evil, "versions": {evil: evil}}
    (tmp_path / "comparison.json").write_text(json.dumps(summary))
    written = write_report(tmp_path)
    page = read(written)
    assert written.read_text().count("<script") == 1, "that of the page"
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    assert page.words.count(evil) >= 5
    assert [evil, evil] in page.cells["versions"]


def test_what_is_neither_is_refused(tmp_path: Path) -> None:
    with raises(FileError, who="report", what="config.json"):
        write_report(tmp_path)
    with raises(FileError, who="report", what="config.json", got="which is not there"):
        write_report(tmp_path / "nowhere")
    (tmp_path / "comparison.json").write_text('{"rows": [')
    with raises(Damaged, who="report", path="comparison.json", what="JSON"):
        write_report(tmp_path)
    (tmp_path / "comparison.json").write_text('{"rows": []}')
    with raises(FileError, who="report", what="and values"):
        write_report(tmp_path)


def test_paths_that_are_no_runs_are_named(tmp_path: Path) -> None:
    make_run(tmp_path / "run", ARMS[0], 0, make_data(tmp_path))
    with raises(FileError, who="report", got="which is not there"):
        write_report([tmp_path / "run", tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="distinct paths"):
        write_report([tmp_path / "run", tmp_path / "." / "run"])
    with raises(ArgumentError, who="report", what="one run", got="none"):
        write_report([])


EVIL = "<script>alert('x')</script><img src=x onerror=y>"


def with_value(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[place[0]] = with_value(value[place[0]], place[1:], new)
    return copy


def without_pictures(path: Path) -> None:
    make_comparison(path, ARMS[:2], seeds=2)
    for file in path.glob("runs/*/embeddings.npz"):
        file.unlink()


FILES = ("comparison.json", "runs/arm0-seed0/config.json", "runs/arm0-seed0/result.json")


@pytest.mark.parametrize("name", FILES)
def test_every_field_is_escaped_or_refused(name: str, tmp_path: Path) -> None:
    without_pictures(tmp_path)
    whole, of, shown = json.loads((tmp_path / name).read_text()), (tmp_path / name).parent, 0
    for place in places(whole):
        (tmp_path / name).write_text(json.dumps(with_value(whole, place, EVIL)))
        try:
            text = write_report(of, tmp_path / "page.html").read_text()
        except FileError:
            continue
        assert text.count("<script") == 1, place
        assert "<img src=x" not in text, place
        shown += "alert(" in text
    assert shown > 5 or "result" in name, "of a result only numbers are shown"


@pytest.mark.parametrize("name", [*FILES, "runs/arm0-seed0/metrics.jsonl"])
def test_malformed_runs_are_refused_by_name(name: str, tmp_path: Path) -> None:
    """Whatever stands where something else should be, there is a page or an error that names the file."""
    without_pictures(tmp_path)
    text = (tmp_path / name).read_text()
    whole = json.loads(text.splitlines()[0] if name.endswith("l") else text)
    odd = (None, True, -1, 10**400, 1e300, "x", [], {}, [[1]], {"a": {"b": []}})
    every = places(whole)
    random = np.random.default_rng(0)
    for _ in range(60):
        place, new = every[random.integers(len(every))], odd[random.integers(len(odd))]
        (tmp_path / name).write_text(json.dumps(with_value(whole, place, new)) + "\n")
        try:
            write_report(tmp_path, tmp_path / "page.html")
        except FileError as error:
            named = error.path.name
        else:
            named = Path(name).name
        assert named == Path(name).name, place


def test_the_policy_allows_no_forms_and_no_base(compared: Page) -> None:
    (policy,) = [one["content"] or "" for tag, one in compared.tags if tag == "meta" and "http-equiv" in one]
    assert {"default-src 'none'", "form-action 'none'", "base-uri 'none'"} <= set(policy.split("; "))


def test_control_characters_are_shown_as_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = make_comparison(tmp_path, ARMS[:2])
    summary["rows"][1]["arm"] = "clear\x1b[2J\u202escreen"
    (tmp_path / "comparison.json").write_text(json.dumps(summary))
    text = write_report(tmp_path).read_text()
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "clear\\x1b[2J" in text
    show_comparison(summary, Console(width=200, no_color=True))
    assert "\x1b" not in capsys.readouterr().out


def test_a_file_that_is_no_page_is_not_overwritten(tmp_path: Path) -> None:
    make_run(tmp_path / "run", ARMS[0], 0, make_data(tmp_path))
    config = tmp_path / "run" / "config.json"
    before = config.read_text()
    with pytest.raises(FileError, match="--overwrite"):
        write_report(tmp_path / "run", config)
    assert config.read_text() == before
    write_report(tmp_path / "run")
    write_report(tmp_path / "run")  # its own page it replaces


def test_an_empty_path_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError) as found:
        write_report(tmp_path / "run", "")
    assert (found.value.who, found.value.got) == ("--out", "''")
    assert list(tmp_path.iterdir()) == []
