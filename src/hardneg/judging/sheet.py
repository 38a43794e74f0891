"""Sheets for people: the pairs as CSV and as an HTML page that works from the disk, and the answers read back.

A page has the pairs side by side, keys to answer them, the progress, and a button that saves the answers as a CSV file.
Any table with the two ids and a grade is read; several people answer in several files, or with their names in a column
``by``. Where they disagree the majority decides, and a tie counts as unknown.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from hardneg.core.errors import ArgumentError, optional
from hardneg.io.files import run_again, write_atomically
from hardneg.io.tables import image_suffixes, read_table
from hardneg.judging.statistics import agreement
from hardneg.mining.table_values import key_of
from hardneg.pages.graph_drawing import graph_drawing, graph_of_file
from hardneg.pages.render import render, write_page

COLUMNS = ("query-id", "corpus-id", "grade", "by", "query", "document", "positive")
"""Columns of a sheet; people fill in ``grade`` and, if they like, ``by``."""

PairIds = tuple[str, str]
"""(query id, document id) as texts."""

_words = {
    "1": 1.0, "0": 0.0, "yes": 1.0, "no": 0.0, "y": 1.0, "n": 0.0, "true": 1.0, "false": 0.0, "relevant": 1.0,
    "irrelevant": 0.0,
}  # fmt: skip
_skipped = ("", "?", "skip", "unknown", "none", "nan")
_thumbnail = 240  # pixels


@dataclass(frozen=True)
class SheetRow:
    """One pair on a sheet.

    Attributes:
        ids: Ids of query and document.
        query: Text of the query, or the path of an image.
        document: Text of the document, or the path of an image.
        positive: A known positive of the query, as an example.
    """

    ids: PairIds
    query: str
    document: str
    positive: str = ""


@dataclass
class Votes:
    """Answers of people by pair.

    Attributes:
        of: For each pair, the grade of each person; None where a person skipped it.
        above: A grade above this means yes.
    """

    above: float
    of: dict[PairIds, dict[str, float | None]] = field(default_factory=dict)

    def add(self, ids: PairIds, person: str, grade: float | None) -> None:
        """Store an answer; the last one of a person counts."""
        self.of.setdefault(ids, {})[person] = grade

    def grade(self, ids: PairIds) -> float | None:
        """Return the mean grade of the majority; None for a tie or without a usable answer."""
        grades = [grade for grade in self.of.get(ids, {}).values() if grade is not None]
        yes = [grade for grade in grades if grade > self.above]
        no = [grade for grade in grades if grade <= self.above]
        if len(yes) == len(no):
            return None
        majority = yes if len(yes) > len(no) else no
        return sum(majority) / len(majority)

    def people(self) -> list[str]:
        """Return the names of the people."""
        return sorted({person for each in self.of.values() for person in each})

    def kappa(self) -> float:
        """Return Fleiss' kappa over pairs that several people answered; NaN if there are none."""
        votes = [[int(g > self.above) for g in each.values() if g is not None] for each in self.of.values()]
        return agreement(votes)


def write_sheet(folder: Path, rows: Sequence[SheetRow], title: str) -> tuple[Path, Path]:
    """Write sheet.csv and sheet.html.

    Args:
        folder: The folder of the judgement.
        rows: Pairs to answer.
        title: Title of the page.

    Returns:
        Both paths.
    """
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    writer.writerows([*row.ids, "", "", _cell(row.query), _cell(row.document), _cell(row.positive)] for row in rows)
    table, page = folder / "sheet.csv", folder / "sheet.html"
    write_atomically(table, lambda file: file.write(text.getvalue().encode("utf-8", "replace")), run_again)
    write_page(page, sheet_page(rows, title), "judge", overwrite=True)
    return table, page


def sheet_page(rows: Sequence[SheetRow], title: str) -> str:
    """Return the HTML page of a sheet."""
    pairs = [
        {
            "ids": row.ids,
            **{name: _shown(getattr(row, name)) for name in ("query", "document", "positive")},
        }
        for row in rows
    ]
    data = json.dumps(pairs, ensure_ascii=True).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    sheet = hashlib.sha256(data.encode()).hexdigest()[:12]
    return render(
        "sheet.html",
        own_script=render_script(),
        title=title,
        data=Markup(data),
        sheet=sheet,
        count=len(rows),
    )


def render_script() -> str:
    """Return the script of the page."""
    from importlib.resources import files

    return (files("hardneg.pages") / "templates" / "sheet.js").read_text("utf-8")


def read_answers(path: str | Path, votes: Votes) -> int:
    """Read a table of answers into the votes, and return how many rows have an answer.

    Args:
        path: Table with ids of query and document and a grade: a number, yes or no; empty and ? are skipped.
        votes: Where answers are added; without a column ``by`` the name of the file is that of the person.

    Raises:
        ArgumentError: If a column is missing or a grade cannot be read.
    """
    table = read_table(path, "judge", may_be_empty=True)
    if not any(map(len, table.values())):
        return 0
    names = {name: _column(table, name, path) for name in ("query-id", "corpus-id", "grade")}
    people = table.get("by") or [None] * len(table[names["grade"]])
    rows = zip(*(table[names[name]] for name in names), people, strict=True)
    answered = 0
    for number, (query, document, grade, by) in enumerate(rows, 2):
        person = str(by).strip() if by not in (None, "") else Path(path).stem
        if str(grade if grade is not None else "").strip().lower() in _skipped[:1]:
            continue
        votes.add((str(key_of(query)), str(key_of(document))), person, _grade(grade, path, number))
        answered += 1
    return answered


def _column(table: dict[str, list[Any]], name: str, path: str | Path) -> str:
    known = {"query-id": ("query-id", "query_id", "qid"), "corpus-id": ("corpus-id", "corpus_id", "doc_id", "docid")}
    found = next((one for one in known.get(name, ("grade", "score", "answer", "label")) if one in table), None)
    if found is None:
        what = f"columns query-id, corpus-id and grade in {path}"
        raise ArgumentError("judge", what, f"columns {sorted(table)}", "keep the first line of the sheet")
    return found


def _grade(value: Any, path: str | Path, number: int) -> float | None:
    """Return a grade as a number; None if the person could not tell."""
    text = str(value).strip().lower()
    if text in _skipped:
        return None
    if text in _words:
        return _words[text]
    try:
        grade = float(text)
    except ValueError:
        grade = float("nan")
    if not -1e9 < grade < 1e9:
        fix = "write 1 or yes for an answer to the query, 0 or no for others, and leave open what is not judged"
        raise ArgumentError(
            "judge", f"grades that are numbers, yes or no in {path}", f"{str(value)[:40]!r} in line {number}", fix
        )
    return grade


def _cell(text: str) -> str:
    """Quote text that a spreadsheet would run as a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _shown(text: str) -> dict[str, str]:
    """Return a text, or the picture of an image or of a graph if the text is the path of one."""
    suffix = Path(text).suffix.lower() if len(text) < 1024 else ""
    if suffix not in (*image_suffixes, ".svg", ".json") or not Path(text).is_file():
        return {"text": text}
    path = Path(text)
    if suffix == ".svg":
        return {"image": "data:image/svg+xml;base64," + base64.b64encode(path.read_bytes()).decode(), "text": path.name}
    if suffix in image_suffixes:
        return {"image": _thumbnail_of(path), "text": path.name}
    graph = graph_of_file(path)
    if graph is None:
        return {"text": text}
    edges, kinds = graph
    picture = graph_drawing(edges, kinds)
    return {"text": f"{path.name}: {len(kinds)} nodes, {edges.shape[1]} edges"} | (
        {"image": picture} if picture else {}
    )


def _thumbnail_of(path: Path) -> str:
    """Return a small copy of an image as a data URI."""
    image = optional("PIL.Image", "images on a sheet", extra="report")
    with image.open(path) as picture:
        small = picture.convert("RGB")
        small.thumbnail((_thumbnail, _thumbnail))
        written = io.BytesIO()
        small.save(written, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(written.getvalue()).decode()


def votes_of(records: Iterable[dict[str, Any]], above: float) -> Votes:
    """Return the votes in the log of a judgement."""
    votes = Votes(above)
    for one in records:
        votes.add((one["query"], one["document"]), one["by"], one["grade"])
    return votes
