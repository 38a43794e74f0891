"""Templates to pages: one self-contained HTML file, light and dark, desktop and phone, nothing fetched.

Whatever a template prints is escaped, unless it is Markup, which only the charts and templates of this package make.
"""

from __future__ import annotations

import base64
import csv
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from io import StringIO
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hardneg.core.errors import FileError
from hardneg.core.text import printable
from hardneg.io.files import run_again, write_atomically
from hardneg.io.outputs import is_sealed_page, sealed_page

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; form-action 'none'; base-uri 'none'"
"""No script runs, nothing is loaded, no form is sent, and no base changes where links lead."""


def render(template: str, **values: Any) -> str:
    """The page of a template, with the policy and the style sheet."""
    found = _environment().get_template(template)
    return found.render(policy=Markup(POLICY), style=style(), **values)


@cache
def style() -> Markup:
    return Markup((files("hardneg.pages") / "style.css").read_text("utf-8"))


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("hardneg.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible,
    )


def _visible(value: Any) -> Any:
    """Invisible characters, and those that turn the direction of writing, are shown as escapes."""
    return value if isinstance(value, Markup) else printable(value)


def write_page(path: Path, text: str, who: str, *, overwrite: bool = False) -> None:
    """Writes the page whole or not at all; never over a file that hardneg has not written, unless ``overwrite``."""
    if path.is_file() and not overwrite and not is_sealed_page(path):
        fix = "use another --out, or --overwrite"
        raise FileError(who, "a new file or an earlier page of its own", path, "which is neither", fix)
    write_atomically(path, lambda stream: stream.write(sealed_page(text).encode()), run_again)


def csv_link(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table as a data URI of CSV; text that a spreadsheet would take for a formula is quoted."""
    text = StringIO()
    writer = csv.writer(text)
    writer.writerow(head)
    writer.writerows([_cell(cell) for cell in row] for row in rows)
    return "data:text/csv;charset=utf-8;base64," + base64.b64encode(text.getvalue().encode("utf-8", "replace")).decode()


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
