"""The page of an audit: what was found, in plain sentences, for people who have not read the papers."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path
from typing import Any

from hardneg.auditing.result import Audit, Hub, Row
from hardneg.auditing.sentences import ESTIMATES, WORDS, lead, said_of
from hardneg.auditing.terminal import ABSENT, COLUMNS, findings, number, percent, sampled, short, times, with_error
from hardneg.pages.page import page
from hardneg.pages.scatter import STYLE, Spot, scatter
from hardneg.pages.style import STYLE as PAGE_STYLE

FAMILIES = ("Tilt", "Ring", "Rank", "BelowPositive", "Threshold", "Uniform")


def audit_page(audit: Audit) -> str:
    """The whole page as text."""
    parts = [
        f"<style>{STYLE}</style>",
        _header(audit),
        _mined(audit),
        _frontier(audit),
        _suggested(audit),
        _table(audit),
        _hubs(audit),
        _words(audit),
        _provenance(audit),
    ]
    return page(_title(audit), "\n".join(part for part in parts if part))


def _title(audit: Audit) -> str:
    name = Path(str(audit.provenance.get("input", ""))).name
    return f"How hard and how false are the negatives of {name or 'these embeddings'}?"


def _header(audit: Audit) -> str:
    said = [said_of(row, audit) for row in audit.rows if row.kind in ("given", "mined")]
    asked = "".join(f"<li>{one}</li>" for one in said)
    box = f'<div class="box"><h2>The rules you asked about</h2><ul class="said">{asked}</ul></div>' if said else ""
    notes = "".join(f"<li>{escape(note)}</li>" for note in audit.notes)
    warn = f'<div class="box warn" role="note"><h2>Mind</h2><ul>{notes}</ul></div>' if notes else ""
    exact = f'<p class="small">{escape(sampled(audit))}</p>' if audit.rows else ""
    return f'<header><h1>{escape(_title(audit))}</h1><p class="lead">{lead(audit)}</p>{exact}{box}{warn}</header>'


def _colour(row: Row) -> int:
    if row.kind in ("given", "mined"):
        return 7
    return next((i for i, name in enumerate(FAMILIES) if row.expression.startswith(name)), 6)


def _spots(audit: Audit) -> list[Spot]:
    return [
        Spot(
            i,
            row.expression,
            f"{row.expression}: similarity {number(row.similarity)}, {percent(row.false_negatives)} false",
            row.similarity,
            row.false_negatives,
            0.0 if math.isnan(row.false_negatives_error) else row.false_negatives_error,
            _colour(row),
            row.on_frontier,
            row.kind in ("given", "mined"),
        )
        for i, row in enumerate(audit.rows, 1)
        if not math.isnan(row.similarity) and not math.isnan(row.false_negatives)
    ]


def _frontier(audit: Audit) -> str:
    spots = _spots(audit)
    if not audit.rows:
        return ""
    if len(spots) < 2:
        return (
            '<section><h2 class="h">The hardness-falseness frontier</h2><p>There is none: without labels, groups or '
            "judgements it is not known which negatives are false. The table below says how hard they "
            "are.</p></section>"
        )
    wide = scatter(spots, audit.random_similarity, width=1080, height=520, named=True, kind="wide-chart")
    narrow = scatter(spots, audit.random_similarity, width=360, height=380, named=False, kind="narrow")
    told = (
        "Each dot is a rule, with its number in the table below. To the right negatives are harder, upwards more of "
        "them are false. Filled dots on the dashed line are the frontier: no other rule has negatives as similar with "
        "fewer false ones. A rim: a rule you asked about. Vertical lines: one standard error. The scale is stretched "
        "towards 0."
    )
    return (
        '<section><h2 class="h">The hardness-falseness frontier</h2>'
        f'<figure class="card wide">{wide}{narrow}<figcaption>{told}</figcaption></figure></section>'
    )


def frontier_svg(audit: Audit) -> str:
    """The frontier as a file of its own, light and dark, for documents that are not this page."""
    drawn = scatter(_spots(audit), audit.random_similarity, width=1080, height=520, named=True, kind="")
    style = f"{PAGE_STYLE}{STYLE}svg{{font-family:system-ui,sans-serif}}svg .paper{{fill:var(--card)}}"
    head, body = drawn.split(">", 1)
    paper = '<rect class="paper" width="100%" height="100%"/>'
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{style}</style>{paper}{body}\n'


def _suggested(audit: Audit) -> str:
    if not audit.suggestions or audit.wanted_false_negatives is None:
        return ""
    rows = "".join(
        f"<li><code>{escape(one.expression or one.family)}</code>: "
        + (
            f"{escape(one.told)} Similarity {number(one.similarity)}, "
            f"{with_error(one.false_negatives, one.false_negatives_error)} false."
            if one.expression
            else escape(one.told)
        )
        + "</li>"
        for one in audit.suggestions
    )
    wanted = f"{100 * audit.wanted_false_negatives:.4g} %"
    return (
        f'<section><h2 class="h">Rules with at most {wanted} known false negatives</h2><div class="box"><ul '
        f'class="said">{rows}</ul><p class="small">Found on a grid, on the anchors looked at; the grid is in the '
        "documentation. The wished share is met by the estimate, whose standard error is given.</p></div></section>"
    )


def _table(audit: Audit) -> str:
    if not audit.rows:
        return ""
    shown = {name: show for name, show in COLUMNS.items() if any(show(row) != ABSENT for row in audit.rows)}
    head = "".join(f"<th scope=col>{escape(name)}</th>" for name in shown)
    rows = "".join(
        f"<tr><th scope=row>{_number(i, row)}<code>{escape(row.expression)}</code></th>"
        + "".join(f'<td data-label="{escape(name)}">{escape(show(row))}</td>' for name, show in shown.items())
        + "</tr>"
        for i, row in enumerate(audit.rows, 1)
    )
    return (
        f'<section><h2 class="h">Every rule</h2><div class="scroll"><table id="results"><thead><tr>'
        f"<th scope=col>rule</th>{head}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _number(i: int, row: Row) -> str:
    front = " front" if row.on_frontier else ""
    return f'<span class="num c{_colour(row)}{front}"><b>{i}</b></span>'


def _mined(audit: Audit) -> str:
    if audit.mined is None:
        return ""
    rows = "".join(
        f"<tr><th scope=row>{escape(name)}</th><td>{escape(value)}</td></tr>"
        for name, value in findings(audit.mined).items()
    )
    examples = "".join(
        f"<li>query <code>{escape(short(one.query, 90))}</code>: the negative "
        f"<code>{escape(short(one.negative, 90))}</code> "
        f"is its positive <code>{escape(short(one.equals, 90))}</code></li>"
        for one in audit.mined.examples
    )
    listed = f"<h3>Negatives that are positives</h3><ul>{examples}</ul>" if examples else ""
    by = escape(", ".join(audit.mined.compared_by))
    return (
        f'<section><h2 class="h">The mined file</h2><div class="box"><table class=plain '
        f'id="measures">{rows}</table>{listed}'
        f'<p class="small">Documents were compared by {by}. Case and spaces of texts do not count.</p></div></section>'
    )


def _hubs(audit: Audit) -> str:
    chosen: list[tuple[str, tuple[Hub, ...]]] = []
    if audit.mined is not None:
        chosen.append(("mined", audit.mined.hubs))
    asked = [row for row in audit.rows if row.kind == "given"] or list(audit.frontier()[-1:])
    chosen += [(row.expression, row.hubs) for row in asked]
    cards = "".join(_hub_card(name, hubs) for name, hubs in chosen if hubs)
    if not cards:
        return ""
    return (
        '<section><h2 class="h">Items that are everyone\'s negative</h2><p>A hub is chosen by many anchors, whatever '
        "they are. It may be a copy, a stub or a document on everything: worth a look.</p><div "
        f'class="grid">{cards}</div></section>'
    )


def _hub_card(name: str, hubs: tuple[Hub, ...]) -> str:
    rows = "".join(
        f"<tr><td>{escape(short(hub.id, 50))}</td><td>{percent(hub.share)}</td><td>{times(hub.times)}</td></tr>"
        for hub in hubs[:5]
    )
    head = "<th>item</th><th>share of all choices</th><th>times an even choice</th>"
    return (
        f'<figure class="card"><h3><code>{escape(name)}</code></h3><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></figure>"
    )


def _words(audit: Audit) -> str:
    shown = {name for name, show in COLUMNS.items() if any(show(row) != ABSENT for row in audit.rows)}
    rows = "".join(
        f"<div><dt>{escape(word)}</dt><dd>{meaning}</dd></div>"
        for word, (column, meaning) in WORDS.items()
        if column is None or column in shown
    )
    exact = "" if audit.exact else f"<p>{ESTIMATES}</p>"
    return f'<section><h2 class="h">The words on this page</h2><dl class="words">{rows}</dl>{exact}</section>'


def _provenance(audit: Audit) -> str:
    facts: dict[str, Any] = {
        "temperature": audit.temperature,
        "tau_plus": audit.tau_plus,
        "near-duplicate from": audit.near_duplicate,
        "false negatives known by": ", ".join(audit.judges) or "nothing",
        "positives": audit.positives,
        "anchors looked at": f"{audit.num_anchors:,} of {audit.num_anchors_in_all:,}",
        "candidates": f"{audit.num_candidates:,}",
        "attraction and temperature from": f"{audit.num_diagnosed:,} anchors",
        "seed": audit.seed,
    }
    facts |= {name: audit.provenance[name] for name in ("commit", "python", "machine") if audit.provenance.get(name)}
    facts |= audit.provenance.get("versions", {})
    rows = "".join(
        f"<tr><th scope=row>{escape(name)}</th><td>{escape(str(value))}</td></tr>"
        for name, value in facts.items()
        if value is not None
    )
    command = audit.provenance.get("command")
    told = f'<pre tabindex="0"><code id="command">{escape(str(command))}</code></pre>' if command else ""
    return f'<section><h2 class="h">How to get this again</h2>{told}<table class=plain>{rows}</table></section>'
