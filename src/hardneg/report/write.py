"""The page about a run or a comparison, section by section.

Everything on it is read from the run directories (runs.py) and comparison.json; nothing is trained, and nothing is
fetched: the charts are inline SVG, the images data URIs.
"""

from __future__ import annotations

from pathlib import Path

from hardneg.report.answer import answer_section, title_of
from hardneg.report.curves import curves_section
from hardneg.report.histograms import histograms_section
from hardneg.report.page import page
from hardneg.report.pictures import pictures_section
from hardneg.report.provenance import provenance_section
from hardneg.report.reading import read_story
from hardneg.report.table import results_section
from hardneg.report.words import words_section
from hardneg.runs import write_atomically

SECTIONS = (
    answer_section,
    results_section,
    words_section,
    curves_section,
    histograms_section,
    pictures_section,
    provenance_section,
)


def write_report(path: str | Path, out: str | Path | None = None) -> Path:
    """Writes one HTML page about a run directory or a comparison directory, and returns where it is."""
    path = Path(path)
    story = read_story(path)
    file = path / "report.html" if out is None else Path(out)
    if file.is_dir():
        file = file / "report.html"
    text = page(title_of(story), "\n".join(section(story) for section in SECTIONS))
    write_atomically(file, lambda stream: stream.write(text.encode()))
    return file
