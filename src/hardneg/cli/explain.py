"""`hardneg explain`: print the grammar, or the effect of one expression.

Texts come from the docstrings and ``describe()`` of distributions and schedules; nothing is listed here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from hardneg.cli.output import Output
from hardneg.core.errors import check_range
from hardneg.core.schedules import Schedule, registered_schedules
from hardneg.core.text import printable, summary
from hardneg.io.terminal import Terminal
from hardneg.negatives import Negatives, parse, registered_negatives


def list_grammar(output: Output) -> None:
    """Print every registered distribution and schedule with an example."""
    negatives, schedules = _listed(registered_negatives()), _listed(registered_schedules())

    def show() -> None:
        console = Terminal()
        console.print(_table("Distributions, joined by *", negatives))
        console.print(_table("Schedules, wherever a number stands", schedules))

    output.result({"distributions": negatives, "schedules": schedules}, show)


def explain_expression(text: str, temperature: float, output: Output) -> None:
    """Print what each factor of an expression does, and remarks on the expression as a whole.

    Args:
        text: Expression of the grammar. Factors with schedules are described at the start and end of training.
        temperature: Temperature of the loss, for the effective temperature of a tilt.
        output: Where to print: as text or as JSON.

    Raises:
        GrammarError: The text is not an expression of the grammar.
        ArgumentError: ``temperature`` is not a finite number of at least 1e-6.
    """
    check_range("explain", "--temperature", temperature, 1e-6, math.inf, open_high=True)
    negatives = parse(text)
    total = max([getattr(schedule, "steps", None) or 100 for schedule in negatives.schedules()], default=100)
    begin, end = negatives.at(0, total), negatives.at(total, total)
    effects = [
        {"factor": repr(factor), "effect": _what_it_does(*ends)}
        for factor, *ends in zip(negatives.factors, begin.factors, end.factors, strict=True)
    ]
    remarks = _remarks(negatives, begin, end, temperature)

    def show() -> None:
        console = Terminal()
        table = Table("factor", "what it does", title=Text(printable(repr(negatives))), title_justify="left")
        for one in effects:
            table.add_row(Text(printable(one["factor"])), Text(printable(one["effect"])))
        console.print(table)
        for sentence in remarks:
            console.print(Text(printable(sentence)))

    found = {"expression": repr(negatives), "temperature": temperature, "factors": effects, "remarks": remarks}
    output.result(found, show)


def _what_it_does(begin: Negatives, end: Negatives) -> str:
    """Describe one factor; if a schedule changes it, at the start and at the end of training."""
    first, last = begin.describe(), end.describe()
    judge = " Judged by the guide model." if getattr(begin, "by", "score") == "guide" else ""
    return (first if first == last else f"At the start: {first} At the end: {last}") + judge


def _remarks(negatives: Negatives, begin: Negatives, end: Negatives, temperature: float) -> list[str]:
    """Return remarks on an expression: the effective temperature of its tilts, and its schedules.

    With weights e^(beta s) the gradient over the negatives is a softmax at temperature / (1 + beta), up to a factor, as
    long as the weights themselves are not differentiated.
    """
    remarks = []
    betas = [_tilt(at) for at in (begin, end)]
    if any(betas):
        effective = [f"{temperature / (1.0 + beta):.4g}" for beta in betas]
        shown = effective[0] if betas[0] == betas[1] else " to ".join(effective)
        detached = all(factor.slope_detached for factor in negatives.factors)
        remarks.append(
            f"At temperature {temperature:g} this tilt distributes its repulsion like temperature {shown}"
            + ("." if detached else ", not counting the gradient through the weights.")
            + f" The results may differ: compare it with an untilted run at {shown}."
        )
    if negatives.schedules():
        remarks.append(f"At the start of training: {begin!r}. At the end: {end!r}.")
    return remarks


def _tilt(negatives: Negatives) -> float:
    """Return the total beta: the betas of several tilts add up."""
    return sum(float(factor.slope) for factor in negatives.factors)  # type: ignore[arg-type]


def _listed(classes: Mapping[str, type[Negatives] | type[Schedule]]) -> list[dict[str, str]]:
    """Return the name, the summary and the first example of each registered class."""
    return [
        {"name": name, "summary": summary(cls), "example": cls.examples[0] if cls.examples else f"{name}()"}
        for name, cls in sorted(classes.items())
    ]


def _table(title: str, entries: list[dict[str, str]]) -> Table:
    """Return a table of registered classes."""
    table = Table("name", "what it is", "example", title=title, title_justify="left")
    for one in entries:
        table.add_row(one["name"], Text(one["summary"]), Text(one["example"]))
    return table
