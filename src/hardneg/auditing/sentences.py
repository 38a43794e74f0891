"""The plain sentences of an audit's page."""

from __future__ import annotations

import math

from markupsafe import Markup

from hardneg.auditing.result import Audit, Row
from hardneg.auditing.terminal import count, number, percent, times, with_error

_words: dict[str, tuple[str | None, str]] = {
    "Negative": (None, "An item that another one, the <em>anchor</em>, is pushed away from in training."),
    "Rule": (
        None,
        "How negatives are chosen. <code>Uniform()</code>: all alike. <code>Tilt(beta)</code>: the more similar, the "
        "more weight. <code>Ring</code>, <code>Rank</code>, <code>Threshold</code>: a band of similarities. "
        "<code>BelowPositive</code>: clearly less similar than the positive.",
    ),
    "Similarity": (
        "similarity",
        "How alike an anchor and its negatives are, weighted as the rule weights them: hard negatives are similar "
        "ones. 1 is the same direction, 0 unrelated.",
    ),
    "False negative": (
        "false negatives",
        "A negative that belongs with the anchor: of its class or group, or judged relevant to it. Pushing it away "
        "teaches the wrong thing. Only known ones are counted.",
    ),
    "Effective number": (
        "effective number",
        "How many equally weighted negatives would be as concentrated. Small: a few decide.",
    ),
    "Near-duplicates": (
        "near-duplicates",
        "Share of the weight on items almost equal to the anchor or to its positive: likely copies, and false.",
    ),
    "Hubness": (
        "hubness",
        "How many times as often two anchors draw the same negative as they would by an even choice. 1: no hubs. 50: "
        "the same items are everyone's negatives.",
    ),
    "Coverage": (
        "coverage",
        "Share of the items that are anyone's negative at all: chosen by some anchor at least a tenth as often as by "
        "an even choice. Small: most of the data is never pushed away.",
    ),
    "Effective temperature": (
        "effective temperature",
        "Similarities are divided by a temperature; a tilt pushes much like a lower one. A plain rule at that "
        "temperature is the fair comparison.",
    ),
    "Attracted": (
        "attracted",
        "Share of the negatives that the loss pulls closer instead: a side effect of tilts whose weights are trained "
        "through.",
    ),
    "Clamped": (
        "clamped",
        "Share of the pairs where the correction for false negatives (tau_plus) would subtract more than there is, so "
        "that the negatives push no more.",
    ),
    "No negative": ("no negative", "Share of anchors for which the rule leaves no negative: they learn nothing."),
}

WORDS = {word: (column, Markup(meaning)) for word, (column, meaning) in _words.items()}

ESTIMATES = (
    "Not every anchor was looked at. Means over anchors are estimates, ± one standard error where it is given; "
    "hubness is an unbiased estimate; the coverage of all anchors is at least what is shown, and single hubs may owe "
    "their place to the draw of the anchors. Every anchor was compared with all candidates, so ranks and rings are "
    "exact."
)


def lead(audit: Audit) -> Markup:
    """The answer in two or three sentences."""
    if not audit.rows:
        return Markup("The lists of this file were looked at; without the vectors it is not known how hard they are.")
    known = [row for row in audit.rows if not math.isnan(row.false_negatives)]
    random = f"A random candidate has similarity {number(audit.random_similarity)}"
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


def _middle(known: list[Row], even: Row | None, hardest: Row) -> str | Markup:
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


def sentence_of(row: Row, audit: Audit) -> Markup:
    """One rule in words."""
    name = Markup("The mined file") if row.kind == "mined" else Markup("<code>{}</code>").format(row.expression)
    if math.isnan(row.similarity):
        return Markup("{}: no anchor has a negative.").format(name)
    parts = [
        f"negatives of similarity {number(row.similarity)} against {number(audit.random_similarity)} of random ones"
    ]
    if not math.isnan(row.false_negatives):
        parts.append(f"{with_error(row.false_negatives, row.false_negatives_error)} of them known to be false")
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
