"""The table of an audit in the terminal, and the format of its numbers there and on the page.

``show`` prints an audit, for `hardneg audit`; ``as_text`` is ``Audit.table``. ``page`` uses the same ``COLUMNS``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hardneg.auditing.result import Audit, BatchFigures, MinedFindings, RuleFigures
from hardneg.core.text import html_table
from hardneg.io.terminal import Terminal

ABSENT = "n/a"


def number(value: float, digits: int = 3) -> str:
    """Format a number with a fixed number of digits, or n/a."""
    return ABSENT if math.isnan(value) else f"{value:.{digits}f}"


def count(value: float) -> str:
    """Format a count, with a decimal below 100, or n/a.

    >>> count(12.34), count(1234.0), count(math.nan)
    ('12.3', '1,234', 'n/a')
    """
    return ABSENT if math.isnan(value) else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def percent(value: float, digits: int = 2) -> str:
    """Format a share as a percentage, or n/a; small shares keep two significant digits.

    >>> percent(0.1234), percent(0.0000012)
    ('12.34 %', '0.00012 %')
    """
    if math.isnan(value):
        return ABSENT
    if 0 < abs(value) < 0.5 * 10.0 ** -(digits + 2):  # would be rounded to 0
        return f"{100 * value:.2g} %"
    return f"{100 * value:.{digits}f} %"


def false_share(row: RuleFigures) -> str:
    """Format the share of false negatives: a rate, a lower bound, or unknown."""
    if row.judged_share == 0.0:
        return "unknown"
    share = with_error(row.false_negatives, row.false_negatives_error)
    if row.bounds is not None:
        return f"{share}, {percent(row.bounds[0])} to {percent(row.bounds[1])}"
    if row.is_rate or math.isnan(row.false_negatives):
        return share
    return f"at least {share}" if row.false_negatives else "at least 0 %"


def judged_share(row: RuleFigures) -> str:
    """Format the share of negatives that are judged, or n/a if all are."""
    return ABSENT if row.is_rate else percent(row.judged_share, 0)


def false_and_judged(row: RuleFigures) -> str:
    """Return both shares in words, such as "at least 0 %, judged share 3 %"."""
    judged = judged_share(row)
    return false_share(row) if judged == ABSENT else f"{false_share(row)}, judged share {judged}"


def with_error(share: float, error: float) -> str:
    """Format a share and, for a sample, its standard error.

    >>> with_error(0.25, 0.01), with_error(0.25, 0.0)
    ('25.00 % ± 1.00 %', '25.00 %')
    """
    if math.isnan(share) or math.isnan(error) or error == 0:
        return percent(share)
    return f"{percent(share)} ± {percent(error)}"


def times(value: float) -> str:
    """Format a ratio, or n/a."""
    return ABSENT if math.isnan(value) else f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


COLUMNS: dict[str, Callable[[RuleFigures], str]] = {
    "similarity": lambda row: number(row.similarity),
    "false negatives": false_share,
    "judged share": judged_share,
    "effective number": lambda row: count(row.effective_number),
    "near-duplicates": lambda row: percent(row.near_duplicates),
    "hubness": lambda row: times(row.hubness),
    "coverage": lambda row: percent(row.coverage, 1),
    "effective temperature": lambda row: number(row.effective_temperature),
    "attracted": lambda row: percent(row.attracted, 1),
    "clamped": lambda row: percent(row.clamped, 1),
    "no negative": lambda row: percent(row.without_negatives, 1),
}
"""The columns of the table and of the page, with the format of each; the most important first."""


def as_text(audit: Audit, width: int = 200) -> str:
    """Return what ``show`` prints, as plain text of at most ``width`` columns."""
    console = Terminal(width=width, no_color=True, highlight=False)
    with console.capture() as capture:
        show(audit, console)
    return capture.get()


def as_html(audit: Audit) -> str:
    """Return the tables of ``show`` for notebooks; every text is escaped."""
    parts = []
    if audit.rows:
        columns = {name: [cell(row) for row in audit.rows] for name, cell in COLUMNS.items()}
        columns = {name: cells for name, cells in columns.items() if any(each != ABSENT for each in cells)}
        rows = zip((row.expression for row in audit.rows), *columns.values(), strict=True)
        title = "Hardness and false negatives" if audit.has_rates else "Hardness"
        parts.append(html_table(title, ("expression", *columns), list(rows), [sampled(audit)]))
    if audit.suggestions:
        suggested = [
            (one.family, one.expression or "none", number(one.similarity), one.flags or one.sentence)
            for one in audit.suggestions
        ]
        title = f"At most {100 * (audit.wanted_false_negatives or 0.0):.4g} % false negatives"
        parts.append(html_table(title, ("family", "expression", "similarity", "hardneg mine ..."), suggested))
    if audit.mined is not None:
        parts.append(html_table("Mined lists", ("", "number"), list(findings(audit.mined).items())))
    return "".join(parts) + html_table("Notes", ("",), [(note,) for note in audit.notes]) * bool(audit.notes)


def show(audit: Audit, console: Console | None = None) -> None:
    """Print the table of rules, the suggestions, the problems of mined lists and the notes."""
    console = console or Terminal()
    if audit.rows:
        table, left_out = _rows(audit, console.width)
        console.print(table)
        if left_out:
            console.print(Text(f"Columns that do not fit: {', '.join(left_out)}.", style="dim"))
        console.print(Text(sampled(audit), style="dim"))
    if audit.batches:
        console.print(_planned(audit))
    if audit.suggestions:
        console.print(_suggested(audit))
        for one in audit.suggestions:
            if one.expression is None:
                console.print(Text(f"{one.family}: {one.sentence}", style="dim"))
            else:
                console.print(Text(f"hardneg mine ... {one.flags}", style="dim"))
    if audit.mined is not None:
        console.print(_mined(audit.mined))
    for note in audit.notes:
        console.print(Text(note, style="dim"))


def sampled(audit: Audit) -> str:
    """Return one or two sentences on which figures are exact and which are estimates."""
    random = f"Tilts are at temperature {audit.temperature:g}. "
    random += f"Random candidates have similarity {number(audit.random_similarity)}"
    own = "" if math.isnan(audit.positive_similarity) else f", positives {number(audit.positive_similarity)}"
    few = f" Attraction and effective temperature are from {audit.num_diagnosed:,} anchors."
    few = few if audit.num_diagnosed < audit.num_anchors else ""
    if audit.exact:
        return f"{random}{own}. All {audit.num_anchors:,} anchors were measured: exact for this data.{few}"
    return (
        f"{random}{own}. {audit.num_anchors:,} of {audit.num_anchors_in_all:,} anchors were measured, each against "
        f"all {audit.num_candidates:,} candidates: ± is one standard error, coverage is a lower bound.{few}"
    )


def _rows(audit: Audit, width: int) -> tuple[Table, list[str]]:
    """Return the table with the columns that fit, in order of importance, and the names of the others."""
    names = [("* " if row.on_frontier else "  ") + row.expression for row in audit.rows]
    first = min(max(len(name) for name in names), max(30, width - 48))
    title = "Hardness and false negatives; * no other rule is better in both" if audit.has_rates else "Hardness"
    table = Table(title=title, title_justify="left", padding=(0, 1))
    table.add_column("expression", width=first)
    room = width - first - 4
    shown: list[Callable[[RuleFigures], str]] = []
    left_out = []
    for name, cell in COLUMNS.items():
        cells = [cell(row) for row in audit.rows]
        needed = max(*(len(each) for each in cells), *(len(word) for word in name.split()), 1) + 3
        if all(each == ABSENT for each in cells):
            continue
        if needed > room:
            left_out.append(name)
        else:
            table.add_column(name, justify="right", width=needed - 3)
            shown.append(cell)
            room -= needed
    for row, name in zip(audit.rows, names, strict=True):
        style = "bold" if row.kind in ("given", "mined") else ""
        table.add_row(Text(name, style=style), *(cell(row) for cell in shown))
    return table, left_out


BATCH_COLUMNS: dict[str, Callable[[BatchFigures], str]] = {
    "similarity": lambda one: number(one.similarity),
    "of all pairs": lambda one: number(one.uniform_similarity),
    "false negatives": lambda one: percent(one.false_negatives),
    "false of all pairs": lambda one: percent(one.uniform_false_negatives),
    "coverage": lambda one: percent(one.coverage, 1),
    "filled uniformly": lambda one: percent(one.filled, 1),
}
"""The columns of the table of planners."""


def _planned(audit: Audit) -> Table:
    """Return the table of planners."""
    table = Table(title=f"Pairs that share a batch of {audit.batches[0].batch_size}", title_justify="left")
    table.add_column("batches")
    for name in BATCH_COLUMNS:
        table.add_column(name, justify="right")
    for one in audit.batches:
        table.add_row(Text(one.batches), *(show(one) for show in BATCH_COLUMNS.values()))
    return table


def _suggested(audit: Audit) -> Table:
    """Return the table of suggestions."""
    wanted = audit.wanted_false_negatives
    assert wanted is not None
    table = Table(title=f"At most {100 * wanted:.4g} % false negatives", title_justify="left")
    for name in ("family", "expression", "similarity", "false negatives"):
        table.add_column(name, justify="right" if name in ("similarity", "false negatives") else "left")
    for one in audit.suggestions:
        share = with_error(one.false_negatives, one.false_negatives_error)
        table.add_row(Text(one.family), Text(one.expression or "none"), number(one.similarity), share)
    return table


def findings(mined: MinedFindings) -> dict[str, str]:
    """Return the problems of mined lists as rows of a table: description and number."""

    def count(value: Any) -> str:
        return "unknown" if value is None else f"{value:,}"

    wanted = "" if mined.wanted is None else f" than {mined.wanted}"
    return {
        "queries": count(mined.queries),
        "negatives": count(mined.negatives),
        f"queries with fewer negatives{wanted}": count(mined.short),
        "queries without any negative": count(mined.queries_without),
        "negatives that are a positive of their query": count(mined.equal_to_positive),
        "negatives that are a positive under another id": count(mined.positive_under_another_id),
        "negatives that are twice in a list": count(mined.repeated),
        "different documents among the negatives": count(mined.documents)
        + ("" if mined.documents_in_corpus is None else f" of {mined.documents_in_corpus:,}"),
    }


def _mined(mined: MinedFindings) -> Table:
    """Return the table of problems of mined lists and their most frequent negatives."""
    table = Table(title="The mined file", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in findings(mined).items():
        table.add_row(name, value)
    for hub in mined.hubs[:3]:
        table.add_row(
            Text(f"most frequent: {short(hub.id)}"), f"{percent(hub.share)} of negatives, {times(hub.times)} x uniform"
        )
    return table


def short(name: Any, most: int = 60) -> str:
    """Shorten text to one line of at most ``most`` characters."""
    text = " ".join(str(name).split())
    return text if len(text) <= most else text[: most - 1] + "…"
