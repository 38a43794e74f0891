"""Write the page about a run, a comparison, or several of them side by side.

Everything is read from the run folders and comparison.json. Nothing is trained and nothing is fetched: charts are
inline SVG, and images are data URIs. ``report_page`` passes the parts made by the other modules to
templates/report.html.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hardneg.core.errors import ArgumentError
from hardneg.io.outputs import is_sealed_page
from hardneg.pages.render import render, write_page
from hardneg.reporting.answer import answer_of, aside_of, differences, notes_of, setting_of, title_of
from hardneg.reporting.contents import PageContents, evaluated_in
from hardneg.reporting.curves import curves_of
from hardneg.reporting.histograms import histograms_of
from hardneg.reporting.pictures import pictures_of
from hardneg.reporting.side_by_side import provenance_of, read_all_contents
from hardneg.reporting.table import cells_of, dots_of, heads_of, measures_of, table_csv, table_note


def write_report(
    paths: str | Path | Sequence[str | Path], out: str | Path | None = None, *, overwrite: bool = False
) -> Path:
    """Write one HTML page about runs and comparisons.

    An ``audit.html`` in the same folder is linked from the page.

    Args:
        paths: Run folder or comparison folder, or several of them.
        out: File or folder to write; by default ``report.html`` in the folder, or next to the first one of several.
        overwrite: Replace a file that was not written by hardneg.

    Returns:
        Path of the page.

    Raises:
        FileError: If a path has no run and no comparison, if a file in it has unexpected contents, or if ``out`` exists
            and was not written by hardneg.
        ArgumentError: If ``out`` is empty, or a path is given twice.
    """
    if out is not None and not str(out).strip():
        raise ArgumentError("--out", "the path of a file", repr(out))
    places = [Path(paths)] if isinstance(paths, (str, Path)) else [Path(path) for path in paths]
    page = read_all_contents(places)
    file = Path(out) if out is not None else places[0] if len(places) == 1 else places[0].resolve().parent
    if file.is_dir():
        file = file / "report.html"
    audit = file.with_name("audit.html")
    html = report_page(page, audited=audit.is_file() and is_sealed_page(audit))
    write_page(file, html, "report", overwrite=overwrite)
    return file


def report_page(page: PageContents, *, audited: bool = False) -> str:
    """Render the page as HTML.

    Args:
        page: Contents of the page.
        audited: Link the page of an audit, audit.html.
    """
    heads = heads_of(page)
    return render(
        "report.html",
        title=title_of(page),
        page=page,
        split=evaluated_in(page),
        answer=answer_of(page),
        audited=audited,
        dots=dots_of(page),
        differences=differences(page),
        notes=notes_of(page),
        asides={arm.number: aside_of(arm, page) for arm in page.arms},
        setting=setting_of(page),
        heads=heads,
        rows=[(arm, cells_of(arm, heads, page.arms[0])) for arm in page.arms],
        csv=table_csv(page),
        table_note=table_note(page),
        measures=measures_of(page),
        curves=curves_of(page),
        histograms=histograms_of(page),
        pictures=pictures_of(page),
        provenance=provenance_of(page),
    )
