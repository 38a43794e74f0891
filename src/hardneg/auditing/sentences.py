"""The plain sentences of an audit's page."""

from __future__ import annotations

import math

from markupsafe import Markup

from hardneg.auditing.result import Audit, RuleFigures
from hardneg.auditing.terminal import count, false_and_judged, number, percent, times


def lead(audit: Audit) -> Markup:
    """The answer in two or three sentences."""
    if not audit.rows:
        return Markup("The lists of this file were looked at; without the vectors it is not known how hard they are.")
    known = [row for row in audit.rows if row.is_rate and not math.isnan(row.false_negatives)]
    random = f"A random candidate has similarity {number(audit.random_similarity)}"
    if not known and audit.judges:
        return Markup(f"{random}. How many negatives are false is not known: too few pairs are judged.")
    if not known:
        return Markup(f"{random}. Which negatives are false is not known, only how hard they are.")
    even = next((row for row in known if row.expression == "Uniform()"), None)
    first = (
        f"{random}; choosing evenly, {percent(even.false_negatives)} of the negatives are false."
        if even
        else f"{random}."
    )
    hardest = max((row for row in known if not row.reads_judge), key=lambda row: row.similarity, default=known[0])
    text = Markup("The hardest rule here, <code>{}</code>, reaches similarity {}, and {} of its negatives are false.")
    named = text.format(hardest.expression, number(hardest.similarity), percent(hardest.false_negatives))
    return Markup("{} {}{}").format(first, named, _middle(known, even, hardest))


def _middle(known: list[RuleFigures], even: RuleFigures | None, hardest: RuleFigures) -> str | Markup:
    """What the frontier offers without more false negatives than an even choice has."""
    if even is None:
        return ""
    known = [row for row in known if not row.reads_judge]
    fair = [row for row in known if row.false_negatives <= even.false_negatives and row.similarity > even.similarity]
    if not fair:
        return " No harder rule here has as few as an even choice."
    best = max(fair, key=lambda row: row.similarity)
    if best is hardest:
        return " That is no more than an even choice has."
    return Markup(
        " The hardest with no more false ones than an even choice is <code>{}</code>: similarity {}, {} false."
    ).format(best.expression, number(best.similarity), percent(best.false_negatives))


def sentence_of(row: RuleFigures, audit: Audit) -> Markup:
    """One rule in words."""
    name = Markup("The mined file") if row.kind == "mined" else Markup("<code>{}</code>").format(row.expression)
    if math.isnan(row.similarity):
        return Markup("{}: no anchor has a negative.").format(name)
    parts = [
        f"negatives of similarity {number(row.similarity)} against {number(audit.random_similarity)} of random ones"
    ]
    if not math.isnan(row.judged_share):
        share = false_and_judged(row)
        parts.append(f"{share} of them known to be false" if row.is_rate else f"false ones: {share}")
    parts.append(f"as concentrated as {count(row.effective_number)} equal negatives")
    if row.near_duplicates > 0.001:
        parts.append(f"{percent(row.near_duplicates)} near-duplicates")
    if row.hubness > 2:
        parts.append(f"two anchors share a negative {times(row.hubness)} times as often as by an even choice")
    if row.without_negatives:
        parts.append(f"{percent(row.without_negatives, 1)} of the anchors have none")
    front = " No other rule here beats it in both." if row.on_frontier else ""
    if row.reads_judge:
        front = " It reads the data that defines false negatives, so it is not part of the frontier."
    return Markup("{}: {}.{}").format(name, ", ".join(parts), front)
