"""The page of an audit: the figures in plain sentences, for people who have not read the papers.

``audit_page`` fills templates/audit.html; ``frontier_svg`` is the chart alone, for documents. Called by
``Audit.write_html`` and the command line.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from markupsafe import Markup

from hardneg.auditing.result import Audit, BatchFigures, Counted, Hub, RuleFigures
from hardneg.auditing.terminal import (
    ABSENT,
    BATCH_COLUMNS,
    COLUMNS,
    count,
    false_and_judged,
    false_share,
    findings,
    number,
    percent,
    sampled,
    short,
    times,
    with_error,
)
from hardneg.pages.charts.similarities import Shares, Spot, histogram_chart, scatter
from hardneg.pages.render import csv_link, render, style

FAMILIES = ("Tilt", "Ring", "Rank", "BelowPositive", "Threshold", "Uniform")


def audit_page(audit: Audit) -> str:
    """Return the whole page as HTML."""
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
        batches=_batches(audit),
        batch_columns=list(BATCH_COLUMNS),
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


def frontier_svg(audit: Audit) -> str:
    """Return the chart of the frontier as a separate SVG file, light and dark, for other documents."""
    drawn = scatter(_spots(audit), audit.random_similarity, width=1080, height=520, named=True, kind="")
    head, body = str(drawn).split(">", 1)
    paper = '<rect class="paper" width="100%" height="100%"/>'
    own = "svg{font-family:system-ui,sans-serif}svg .paper{fill:var(--card)}"
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{style()}{own}</style>{paper}{body}\n'


def lead(audit: Audit) -> Markup:
    """Return the main result in two or three sentences."""
    if not audit.rows:
        return Markup("Only the lists of this file were checked: without vectors it is unknown how hard they are.")
    known = [row for row in audit.rows if row.is_rate and not math.isnan(row.false_negatives)]
    random = f"A random candidate has similarity {number(audit.random_similarity)}"
    if not known and audit.judges:
        return Markup(f"{random}. How many negatives are false is unknown: too few pairs are judged.")
    if not known:
        return Markup(f"{random}. Which negatives are false is unknown; only their hardness was measured.")
    known = [row for row in known if row.bounds is None] or known  # estimates only where nothing is measured
    even = next((row for row in known if row.expression == "Uniform()"), None)
    first = (
        f"{random}; of uniformly chosen negatives {percent(even.false_negatives)} are false." if even else f"{random}."
    )
    hardest = max((row for row in known if not row.reads_judge), key=lambda row: row.similarity, default=known[0])
    text = Markup("The hardest rule here, <code>{}</code>, reaches similarity {}, and {} of its negatives are false.")
    named = text.format(hardest.expression, number(hardest.similarity), percent(hardest.false_negatives))
    if hardest.bounds is not None:
        named += Markup(" The bounds of this estimate are {} and {}.").format(*map(percent, hardest.bounds))
    return Markup("{} {}{}").format(first, named, _middle(known, even, hardest))


def sentence_of(row: RuleFigures, audit: Audit) -> Markup:
    """Return the figures of one rule as a sentence."""
    name = Markup("The mined file") if row.kind == "mined" else Markup("<code>{}</code>").format(row.expression)
    if math.isnan(row.similarity):
        return Markup("{}: no anchor has a negative.").format(name)
    parts = [f"mean similarity {number(row.similarity)} ({number(audit.random_similarity)} for random candidates)"]
    if not math.isnan(row.judged_share):
        share = false_and_judged(row)
        parts.append(f"{share} of the negatives known to be false" if row.is_rate else f"false negatives: {share}")
    parts.append(f"as concentrated as {count(row.effective_number)} equally weighted negatives")
    if row.near_duplicates > 0.001:
        parts.append(f"{percent(row.near_duplicates)} near-duplicates")
    if row.hubness > 2:
        parts.append(f"two anchors share a negative {times(row.hubness)} times as often as with a uniform choice")
    if row.without_negatives:
        parts.append(f"{percent(row.without_negatives, 1)} of the anchors have no negative")
    front = " No other rule here is both harder and less false." if row.on_frontier else ""
    if row.reads_judge:
        front = " It reads the data that define false negatives, so it is not part of the frontier."
    return Markup("{}: {}.{}").format(name, ", ".join(parts), front)


def _question(audit: Audit) -> tuple[str, str]:
    """Return the question in the title, and the name of the input."""
    name = audit.provenance.get("title") or Path(str(audit.provenance.get("input", ""))).name
    question = "How hard and how false" if audit.has_rates else "How hard"
    return f"{question} are the negatives of", name or "these embeddings"


def _columns(audit: Audit) -> dict[str, Any]:
    """Return the columns that have a value for some rule."""
    return {name: show for name, show in COLUMNS.items() if any(show(row) != ABSENT for row in audit.rows)}


def _colour(row: RuleFigures) -> int:
    """Return the number of the colour of a rule: one for each family, and one for rules of the user."""
    if row.kind in ("given", "mined"):
        return 7
    return next((i for i, name in enumerate(FAMILIES) if row.expression.startswith(name)), 6)


def _spots(audit: Audit) -> list[Spot]:
    """Return the dots of the chart: rules whose false-negative rate is known."""
    return [
        Spot(
            i,
            row.expression,
            f"{row.expression}: similarity {number(row.similarity)}, {false_share(row)} false",
            row.similarity,
            row.false_negatives,
            0.0 if math.isnan(row.false_negatives_error) else row.false_negatives_error,
            _colour(row),
            row.on_frontier,
            row.kind in ("given", "mined"),
            row.bounds,
        )
        for i, row in enumerate(audit.rows, 1)
        if row.is_rate and not math.isnan(row.similarity) and not math.isnan(row.false_negatives)
    ]


def _frontier(audit: Audit, spots: list[Spot]) -> tuple[Markup, Markup]:
    """Return the chart for wide screens and the one for phones."""
    return (
        scatter(spots, audit.random_similarity, width=1080, height=520, named=True, kind="wide-chart"),
        scatter(spots, audit.random_similarity, width=360, height=380, named=False, kind="narrow"),
    )


def _similarities(audit: Audit) -> tuple[str, Markup] | None:
    """Return the name and the histogram of positives, or else known false negatives, against other candidates.

    It shows how far hard and false negatives overlap; None if one of the kinds has no pairs.
    """
    found = audit.similarities
    if not found or not found.negatives:
        return None
    if found.positives:
        return "positives", _histogram("positives", found.positives, found.negatives, found.edges)
    return None if not found.false else (FALSE, _histogram(FALSE, found.false, found.negatives, found.edges))


FALSE = "false negatives (known)"


def _batches(audit: Audit) -> list[tuple[BatchFigures, list[Markup], list[str]]]:
    """Return each planner with its histograms (false negatives and positives against negatives) and its figures."""
    drawn = []
    for one in audit.batches:
        found = one.similarities
        kinds = (("false negatives", found.false), ("positives", found.positives))
        charts = [
            _histogram(name, near, found.negatives, found.edges) for name, near in kinds if near and found.negatives
        ]
        drawn.append((one, charts, [show(one) for show in BATCH_COLUMNS.values()]))
    return drawn


def _histogram(name: str, near: Counted, negatives: Counted, edges: tuple[float, ...]) -> Markup:
    """Draw the similarities of one kind of pairs against those of negatives, over the bins that have pairs."""
    shares = [[count / sum(one.counts) for count in one.counts] for one in (near, negatives)]
    used = [i for i in range(len(shares[0])) if max(one[i] for one in shares) > 2e-4]
    inside = slice(used[0], used[-1] + 1)
    kinds = (Shares(name, shares[0][inside], near.mean), Shares("negatives", shares[1][inside], negatives.mean))
    shown = edges[used[0] : used[-1] + 2]
    return histogram_chart("Similarities", shown, *kinds, max(max(one) for one in shares))


def _suggestions(audit: Audit) -> list[tuple[str, str]]:
    """Return the expression or family of each suggestion, with its description."""
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
    """Return the most frequent negatives of the mined lists and of the given rules, or else of the hardest rule."""
    chosen: list[tuple[str, tuple[Hub, ...]]] = []
    if audit.mined is not None:
        chosen.append(("mined", audit.mined.hubs))
    rows = [row for row in audit.rows if row.kind == "given"] or list(audit.frontier()[-1:])
    chosen += [(row.expression, row.hubs) for row in rows]
    return [(name, hubs[:5]) for name, hubs in chosen if hubs]


def _facts(audit: Audit) -> list[tuple[str, Any]]:
    """Return settings and versions as rows of a table."""
    facts: dict[str, Any] = {
        "input": audit.provenance.get("input"),
        "temperature": audit.temperature,
        "tau_plus": audit.tau_plus,
        "near-duplicate above cosine": audit.near_duplicate,
        "false negatives known by": ", ".join(audit.judges) or "nothing",
        "positives": audit.positives,
        "anchors measured": f"{audit.num_anchors:,} of {audit.num_anchors_in_all:,}",
        "candidates": f"{audit.num_candidates:,}",
        "attraction and temperature from": f"{audit.num_diagnosed:,} anchors",
        "seed": audit.seed,
    }
    facts |= {name: audit.provenance[name] for name in ("commit", "python", "machine") if audit.provenance.get(name)}
    facts |= audit.provenance.get("versions", {})
    return [(name, value) for name, value in facts.items() if value is not None]


def _middle(known: list[RuleFigures], even: RuleFigures | None, hardest: RuleFigures) -> str | Markup:
    """Return the hardest rule that has no more false negatives than a uniform choice, as a sentence."""
    if even is None:
        return ""
    known = [row for row in known if not row.reads_judge]
    fair = [row for row in known if row.false_negatives <= even.false_negatives and row.similarity > even.similarity]
    if not fair:
        return " No harder rule here has as few false negatives as a uniform choice."
    best = max(fair, key=lambda row: row.similarity)
    if best is hardest:
        return " That is no more than with a uniform choice."
    return Markup(
        " The hardest rule with no more false negatives than a uniform choice is <code>{}</code>: similarity {}, "
        "{} false."
    ).format(best.expression, number(best.similarity), percent(best.false_negatives))
