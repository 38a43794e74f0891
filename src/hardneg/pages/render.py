"""Render templates into pages: one self-contained HTML file, light and dark, desktop and phone, that loads nothing.

Everything that a template prints is escaped, except for Markup, which only the charts and templates of this package
create. ``render`` is called by ``auditing.page`` and by the reports; ``write_page`` writes the result.
"""

from __future__ import annotations

import base64
import csv
import json
from collections.abc import Iterable, Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from io import StringIO
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hardneg.core.errors import FileError
from hardneg.core.text import printable
from hardneg.io.files import run_again, without_nan, write_atomically
from hardneg.io.outputs import is_sealed_page, sealed_page

POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {scripts}; form-action 'none'; "
    "base-uri 'none'"
)
"""Content security policy: only scripts of this package, no requests, no forms, and no base that redirects links."""


def render(template: str, *, own_script: str = "", **values: Any) -> str:
    """Return the page of a template, with the security policy and the style sheet.

    Args:
        template: File in ``pages/templates``.
        own_script: A script of the page beside page.js, which the template prints as ``own_script``.
        **values: Variables of the template; a missing one is an error.
    """
    found = _environment().get_template(template)
    digests = [base64.b64encode(sha256(each.encode()).digest()).decode() for each in (script(), own_script) if each]
    policy = Markup(POLICY.format(scripts=" ".join(f"'sha256-{each}'" for each in digests)))
    return found.render(policy=policy, style=style(), script=script(), own_script=Markup(own_script), **values)


@cache
def style() -> Markup:
    """Return the style sheet."""
    return Markup((files("hardneg.pages") / "style.css").read_text("utf-8"))


@cache
def script() -> Markup:
    """Return the script, which sorts tables."""
    return Markup((files("hardneg.pages") / "page.js").read_text("utf-8"))


@cache
def _environment() -> Environment:
    """Return the Jinja environment with autoescape and strict variables."""
    return Environment(
        loader=PackageLoader("hardneg.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible,
    )


def _visible(value: Any) -> Any:
    """Show invisible characters, and those that change the direction of text, as escapes."""
    return value if isinstance(value, Markup) else printable(value)


def write_page(path: Path, text: str, who: str, *, overwrite: bool = False) -> None:
    """Write a page atomically.

    Args:
        path: The file.
        text: The HTML.
        who: Caller, for errors.
        overwrite: Whether a file that hardneg has not written may be replaced.

    Raises:
        FileError: If there is such a file.
    """
    if path.is_file() and not overwrite and not is_sealed_page(path):
        fix = "use another --out, or --overwrite"
        raise FileError(who, "a new file or a page that it wrote earlier", path, "which is neither", fix)
    write_atomically(path, lambda stream: stream.write(sealed_page(text).encode()), run_again)


def csv_link(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table as a data URI of CSV; text that a spreadsheet would run as a formula is quoted."""
    text = StringIO()
    writer = csv.writer(text)
    writer.writerow(head)
    writer.writerows([_cell(cell) for cell in row] for row in rows)
    return "data:text/csv;charset=utf-8;base64," + base64.b64encode(text.getvalue().encode("utf-8", "replace")).decode()


def json_link(value: Any) -> str:
    """Return a value as a data URI of JSON; numbers that are not finite are null."""
    text = json.dumps(without_nan(value), indent=1)
    return "data:application/json;base64," + base64.b64encode(text.encode()).decode()


def _cell(value: Any) -> Any:
    """Quote text that starts like a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
