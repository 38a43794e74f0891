"""The page about a run or a comparison, section by section.

Everything on it is read from the run directories (runs.py) and comparison.json; nothing is trained, and nothing is
fetched: the charts are inline SVG, the images data URIs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hardneg.io.files import go_on, write_atomically
from hardneg.pages.page import page
from hardneg.reporting.answer import answer_section, title_of
from hardneg.reporting.curves import curves_section
from hardneg.reporting.histograms import histograms_section
from hardneg.reporting.pictures import pictures_section
from hardneg.reporting.provenance import provenance_section
from hardneg.reporting.side_by_side import read_stories
from hardneg.reporting.table import results_section
from hardneg.reporting.words import words_section

SECTIONS = (
    answer_section,
    results_section,
    words_section,
    curves_section,
    histograms_section,
    pictures_section,
    provenance_section,
)


def write_report(paths: str | Path | Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Writes one HTML page about run directories and comparisons, and returns where it is.

    The file is ``report.html`` in the directory, and beside the first one where there are several.
    """
    places = [Path(paths)] if isinstance(paths, (str, Path)) else [Path(path) for path in paths]
    story = read_stories(places)
    file = Path(out) if out is not None else places[0] if len(places) == 1 else places[0].resolve().parent
    if file.is_dir():
        file = file / "report.html"
    text = page(title_of(story), "\n".join(section(story) for section in SECTIONS))
    write_atomically(file, lambda stream: stream.write(text.encode()), go_on)
    return file
