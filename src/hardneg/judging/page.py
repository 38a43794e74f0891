"""The page of a judgement: rates with bounds on the hardness-falseness plane, examples, and what would decide more."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from markupsafe import Markup

from hardneg.judging.asking import RowPair
from hardneg.judging.design import Population
from hardneg.judging.result import Judged, percent
from hardneg.judging.statistics import upper_bound_at
from hardneg.pages.charts.axes import (
    BOTTOM,
    HEIGHT,
    LEFT,
    TOP,
    WIDTH,
    Axis,
    grid,
    padded,
    plain_number,
    shown,
    svg,
)
from hardneg.pages.charts.similarities import RootAxis
from hardneg.pages.render import csv_link, render

_examples = 4
_steps = 24  # of the curve of bounds
COLUMNS = ("similarity", "pairs", "judged", "false negatives", "rate", "bounds", "certified", "more judgements needed")


class FalseNegative(NamedTuple):
    """A false negative that was found.

    Attributes:
        query: Text of the query.
        document: Text of the document.
    """

    query: str
    document: str


def examples_of(
    result: Judged, populations: Sequence[Population], texts: Callable[[RowPair], tuple[str, str]]
) -> dict[str, list[FalseNegative]]:
    """Return some false negatives of each rule, by its expression."""
    false = [(pair.query, pair.document) for pair in result.pairs if pair.false_negative]
    found = {}
    for one in populations:
        held = set(zip(one.query.tolist(), one.document.tolist(), strict=True))
        found[one.name] = [FalseNegative(*texts(pair)) for pair in false if pair in held][:_examples]
    return found


def judge_page(result: Judged, examples: dict[str, list[FalseNegative]]) -> str:
    """Return the page as HTML.

    Args:
        result: The rates so far.
        examples: False negatives of each rule, by its expression.
    """
    rows = [(number, result.names[rule], _cells(result, rule)) for number, rule in enumerate(result.rates, 1)]
    lead, *rest = result.sentences()
    return render(
        "judge.html",
        title="How false are the negatives?",
        result=result,
        lead=lead,
        sentences=rest,
        chart=_chart(result),
        columns=COLUMNS,
        rows=rows,
        csv=csv_link(["rule", *COLUMNS], ([name, *cells] for _, name, cells in rows)),
        outlook=outlook(result),
        examples=[(name, pairs) for name, pairs in examples.items() if pairs],
        percent=percent,
    )


def _cells(result: Judged, rule: object) -> list[str]:
    """Return the figures of a rule as text."""
    state, (rate, low, high) = result.states[rule], result.rates[rule]
    return [
        f"{result.similarity[rule]:.3f}",
        f"{state.size:,}",
        f"{state.judged:,}",
        f"{state.false:,}",
        percent(rate),
        "exact" if state.exact else f"{percent(low)} to {percent(high)}",
        "yes" if state.certified else "no",
        "0" if state.certified else "not expected" if state.needed is None else f"about {state.needed:,}",
    ]


def _chart(result: Judged) -> tuple[Markup, Markup]:
    """Return the chart for wide screens and the one for phones."""
    return tuple(  # type: ignore[return-value]
        _plane(result, width, height, kind) for width, height, kind in ((1080, 460, "wide-chart"), (360, 340, "narrow"))
    )


def _plane(result: Judged, width: int, height: int, kind: str) -> Markup:
    """Draw each rule by its similarity and its rate, with its bounds, and the level as a line."""
    x = Axis(
        *padded(list(result.similarity.values()) if len(result.rates) > 1 else [0.0, *result.similarity.values()]),
        52.0,
        width - 22.0,
    )
    y = RootAxis(0.0, 1.05 * max(result.level, *(high for _, _, high in result.rates.values())), height - 38.0, 26.0)
    units = "false negatives (lower is better)", "similarity of the negatives (harder to the right)"
    most = (7 if width > 500 else 4, 6)
    body = [grid(x, y, *units, lambda v: f"{v:.4g}", lambda v: f"{100 * v:.4g} %", most=most)]
    at = y(result.level)
    body.append(
        f'<line class="random" x1="{x.start}" x2="{x.end}" y1="{at:.1f}" y2="{at:.1f}"/>'
        f'<text x="{x.end}" y="{at - 5:.1f}" text-anchor="end">level {100 * result.level:g} %</text>'
    )
    for number, (rule, (rate, low, high)) in enumerate(result.rates.items(), 1):
        place, colour = x(result.similarity[rule]), 7 if rule == result.chosen else 0
        middle = y(high if math.isnan(rate) else rate)
        words = f"{result.names[rule]}: {percent(rate)}, {percent(low)} to {percent(high)}"
        front = " front" if result.states[rule].certified else ""
        body.append(
            f'<g class="c{colour}{front}"><title>{shown(words)}</title>'
            f'<line class="interval" x1="{place:.1f}" x2="{place:.1f}" y1="{y(low):.1f}" y2="{y(high):.1f}"/>'
            f'<circle class="spot" cx="{place:.1f}" cy="{middle:.1f}" r="8"/>'
            f'<text class="number" x="{place:.1f}" y="{middle + 3.7:.1f}" text-anchor="middle">{number}</text></g>'
        )
    label = "Similarity of the negatives against the share that is false, with bounds."
    return svg(label, "".join(body), width=width, height=height, kind=f"chart {kind}")


class Outlook(NamedTuple):
    """What further judgements would do to the upper bound of the next rule to decide.

    Attributes:
        name: Expression of the rule.
        bounds: (further judgements, upper bound), beginning with no further ones.
        level: The level that is to be certified.
    """

    name: str
    bounds: list[tuple[int, float]]
    level: float

    @property
    def chart(self) -> Markup:
        """The bounds as a line, with the level."""
        x = Axis(0.0, float(self.bounds[-1][0]), LEFT, WIDTH - 12)
        y = Axis(0.0, 1.08 * max(self.level, *(bound for _, bound in self.bounds)), HEIGHT - BOTTOM, TOP)
        at, points = y(self.level), " ".join(f"{x(more):.1f},{y(bound):.1f}" for more, bound in self.bounds)
        hits = "".join(
            f'<circle class="hit" cx="{x(more):.1f}" cy="{y(bound):.1f}" r="6">'
            f"<title>{more:,} more judgements: at most {percent(bound)}</title></circle>"
            for more, bound in self.bounds
        )
        body = (
            grid(x, y, "upper bound", "further judgements", plain_number, lambda v: f"{100 * v:.4g} %")
            + f'<line class="random" x1="{x.start}" x2="{x.end}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text x="{x.start + 4}" y="{at - 4:.1f}">level {100 * self.level:g} %</text>'
            f'<g class="c0"><polyline class="mean" points="{points}"/>{hits}</g>'
        )
        (_, first), (most, last) = self.bounds[0], self.bounds[-1]
        ends = f"from {percent(first)} now to {percent(last)} after {most:,} further judgements"
        return svg(f"Upper bound of the rate of {self.name}: {ends}; the level is {percent(self.level)}.", body)


def outlook(result: Judged) -> Outlook | None:
    """Return the bounds of the first rule that is not decided, if false negatives keep appearing as they did so far.

    They reach as far as the certificate if one is expected, else as far as twice the judgements so far.
    """
    rule = next((rule for rule, state in result.states.items() if not state.certified and not state.exact), None)
    if rule is None or not result.states[rule].judged:
        return None
    state, error = result.states[rule], 1 - result.confidence
    rate, low = (state.false + state.unknown) / state.judged, 1.0
    if result.sensitivity is not None:
        error, low = 0.75 * error, result.sensitivity[2]
    most = min(state.size - state.judged, 2 * state.judged if state.needed is None else -(-state.needed * 5 // 4))
    if most <= 0 or low <= 0:
        return None
    high = result.rates[rule][2]
    bounds, bound = [(0, high)], state.size if high >= 1 else round(high * low * state.size)
    for more in sorted({-(-most * step // _steps) for step in range(1, _steps + 1)}):
        false = state.false + state.unknown + math.ceil(rate * more - 1e-9)
        bound = max(upper_bound_at(state.size, state.judged + more, false, error, bound), false)
        bounds.append((more, min(bound / state.size / low, 1.0)))
    return Outlook(result.names[rule], bounds, result.level)
