"""The page about a run or a comparison.

Everything on it is read from the run directories and comparison.json; nothing is trained, and nothing is fetched: the
charts are inline SVG, the images data URIs.
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
from hardneg.reporting.side_by_side import provenance_of, read_stories
from hardneg.reporting.table import cells_of, dots_of, heads_of, measures_of, table_csv, table_note


def write_report(
    paths: str | Path | Sequence[str | Path], out: str | Path | None = None, *, overwrite: bool = False
) -> Path:
    """Writes one HTML page about run directories and comparisons, and returns where it is.

    The file is ``report.html`` in the directory, and beside the first one where there are several. A file there that is
    no page of ours is only replaced with ``overwrite``. An ``audit.html`` that lies beside it is linked.
    """
    if out is not None and not str(out).strip():
        raise ArgumentError("--out", "the path of a file", repr(out))
    places = [Path(paths)] if isinstance(paths, (str, Path)) else [Path(path) for path in paths]
    story = read_stories(places)
    file = Path(out) if out is not None else places[0] if len(places) == 1 else places[0].resolve().parent
    if file.is_dir():
        file = file / "report.html"
    audit = file.with_name("audit.html")
    page = report_page(story, audited=audit.is_file() and is_sealed_page(audit))
    write_page(file, page, "report", overwrite=overwrite)
    return file


def report_page(story: PageContents, *, audited: bool = False) -> str:
    heads = heads_of(story)
    return render(
        "report.html",
        title=title_of(story),
        story=story,
        split=evaluated_in(story),
        answer=answer_of(story),
        audited=audited,
        dots=dots_of(story),
        differences=differences(story),
        notes=notes_of(story),
        asides={arm.number: aside_of(arm, story) for arm in story.arms},
        setting=setting_of(story),
        heads=heads,
        rows=[(arm, cells_of(arm, heads, story.arms[0])) for arm in story.arms],
        csv=table_csv(story),
        table_note=table_note(story),
        measures=measures_of(story),
        curves=curves_of(story),
        histograms=histograms_of(story),
        pictures=pictures_of(story),
        provenance=provenance_of(story),
    )
