"""The page of an audit: what was found, in plain sentences, for people who have not read the papers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from markupsafe import Markup

from hardneg.auditing.result import Audit, Hub, RuleFigures
from hardneg.auditing.sentences import lead, sentence_of
from hardneg.auditing.terminal import ABSENT, COLUMNS, findings, number, percent, sampled, short, times, with_error
from hardneg.pages.charts.histogram import Shares, histogram_chart
from hardneg.pages.charts.scatter import Spot, scatter
from hardneg.pages.render import csv_link, render, style

FAMILIES = ("Tilt", "Ring", "Rank", "BelowPositive", "Threshold", "Uniform")


def audit_page(audit: Audit) -> str:
    """The whole page as text."""
    columns = _columns(audit)
    spots = _spots(audit)
    question, name = _question(audit)
    return render(
        "audit.html",
        title=f"{question} {name}?",
        question=question,
        name=name,
        audit=audit,
        lead=lead(audit),
        sampled=sampled(audit) if audit.rows else "",
        given=[sentence_of(row, audit) for row in audit.rows if row.kind in ("given", "mined")],
        findings=[] if audit.mined is None else list(findings(audit.mined).items()),
        frontier=_frontier(audit, spots) if len(spots) > 1 else None,
        similarities=_similarities(audit),
        suggestions=_suggestions(audit),
        columns=list(columns),
        rows=[(i, row, _colour(row), [show(row) for show in columns.values()]) for i, row in enumerate(audit.rows, 1)],
        csv=csv_link(
            ["rule", *columns], ([row.expression, *(show(row) for show in columns.values())] for row in audit.rows)
        ),
        hubs=_hubs(audit),
        facts=_facts(audit),
        short=short,
        percent=percent,
        times=times,
    )


def _question(audit: Audit) -> tuple[str, str]:
    """What the page answers, and of what."""
    name = Path(str(audit.provenance.get("input", ""))).name
    question = "How hard and how false" if audit.has_rates else "How hard"
    return f"{question} are the negatives of", name or "these embeddings"


def _columns(audit: Audit) -> dict[str, Any]:
    """Those in which any rule has an answer."""
    return {name: show for name, show in COLUMNS.items() if any(show(row) != ABSENT for row in audit.rows)}


def _colour(row: RuleFigures) -> int:
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
        if row.is_rate and not math.isnan(row.similarity) and not math.isnan(row.false_negatives)
    ]


def _frontier(audit: Audit, spots: list[Spot]) -> tuple[Markup, Markup]:
    """The chart for wide screens, and the one for phones."""
    return (
        scatter(spots, audit.random_similarity, width=1080, height=520, named=True, kind="wide-chart"),
        scatter(spots, audit.random_similarity, width=360, height=380, named=False, kind="narrow"),
    )


def frontier_svg(audit: Audit) -> str:
    """The frontier as a file of its own, light and dark, for documents that are not this page."""
    drawn = scatter(_spots(audit), audit.random_similarity, width=1080, height=520, named=True, kind="")
    head, body = str(drawn).split(">", 1)
    paper = '<rect class="paper" width="100%" height="100%"/>'
    own = "svg{font-family:system-ui,sans-serif}svg .paper{fill:var(--card)}"
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{style()}{own}</style>{paper}{body}\n'


def _similarities(audit: Audit) -> tuple[str, Markup] | None:
    """Positives, or without them known false candidates, against the others: hard and false negatives overlap."""
    found = audit.similarities
    near = found and (found.positives or found.false)
    if not found or not near or not found.negatives:
        return None
    name = "positives" if found.positives else "false candidates (known)"
    shares = [[count / sum(one.counts) for count in one.counts] for one in (near, found.negatives)]
    used = [i for i in range(len(shares[0])) if max(one[i] for one in shares) > 2e-4]
    inside = slice(used[0], used[-1] + 1)
    kinds = (Shares(name, shares[0][inside], near.mean), Shares("negatives", shares[1][inside], found.negatives.mean))
    edges = found.edges[used[0] : used[-1] + 2]
    return name, histogram_chart("Similarities", edges, *kinds, max(max(one) for one in shares))


def _suggestions(audit: Audit) -> list[tuple[str, str]]:
    """Each expression or family with its description."""
    if audit.wanted_false_negatives is None:
        return []
    return [
        (
            one.expression or one.family,
            f"{one.sentence} Similarity {number(one.similarity)}, "
            f"{with_error(one.false_negatives, one.false_negatives_error)} false. To mine with it: {one.flags}"
            if one.expression
            else one.sentence,
        )
        for one in audit.suggestions
    ]


def _hubs(audit: Audit) -> list[tuple[str, tuple[Hub, ...]]]:
    chosen: list[tuple[str, tuple[Hub, ...]]] = []
    if audit.mined is not None:
        chosen.append(("mined", audit.mined.hubs))
    rows = [row for row in audit.rows if row.kind == "given"] or list(audit.frontier()[-1:])
    chosen += [(row.expression, row.hubs) for row in rows]
    return [(name, hubs[:5]) for name, hubs in chosen if hubs]


def _facts(audit: Audit) -> list[tuple[str, Any]]:
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
    return [(name, value) for name, value in facts.items() if value is not None]
