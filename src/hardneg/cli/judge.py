"""`hardneg judge`: arguments and printed summary of the verb; the work is in ``hardneg.judging``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hardneg.cli.errors import errors_for_people
from hardneg.cli.flags import CONFIG, CONTEXT, build, flags_of, parameters_of, with_config_file, with_parameters
from hardneg.cli.output import Output
from hardneg.core.text import counted
from hardneg.judging.options import PANELS, JudgeOptions

if TYPE_CHECKING:
    from hardneg.judging.job import Outcome


COMMON = (
    "queries",
    "out",
    "corpus",
    "judgements",
    "query_embeddings",
    "corpus_embeddings",
    "model",
    "rules",
    "k",
    "judge",
    "budget",
    "false_negatives",
    "confidence",
    "answers",
    "confirm",
    "url",
    "llm",
    "config",
)
"""Parameters that the short help shows."""


@with_parameters([CONTEXT, *parameters_of(JudgeOptions, PANELS), CONFIG], COMMON)
def judge(ctx: typer.Context, config: Path | None, output: Output, **values: Any) -> None:
    """Judge a few hundred mined pairs, and bound the false-negative rate of every rule with a guarantee.

    The hardest rule that is certified to stay below --false-negatives is named. People judge on a sheet (--judge
    file): run the same command again to continue with their answers.

    Examples:
      hardneg judge queries.jsonl --corpus corpus.jsonl --judgements qrels.tsv --model all-MiniLM-L6-v2 -o judged

      hardneg judge ... -n "BelowPositive(relative={0.2, 0.1, 0.05})" -n "Rank(10, 50)" --budget 500 -o judged

      hardneg judge ... --judge llm --url http://localhost:8000/v1 --llm my-model --max-tokens 500000 -o judged

      hardneg judge ... --judge model.py:function --confirm -o judged   (people confirm what the function flags)

      hardneg mine queries.jsonl ... --judgements judged/judgements.tsv   (mines with the answers)
    """
    flags = flags_of(JudgeOptions)
    advice = "Answers so far are stored: run the same command again to continue."
    with errors_for_people(advice, {"judge": flags, "mine": flags}):
        options = build(JudgeOptions, with_config_file(ctx, "judge", config, values, JudgeOptions), "judge")
        outcome = _run(options, output)
        figures = {**outcome.result.to_dict(), "out": str(outcome.folder), "waiting": outcome.waiting}
        output.result(figures, lambda: _show(outcome))


def _run(options: JudgeOptions, output: Output) -> Outcome:
    """Run the judgement with progress bars; what it has to report goes to standard error beside JSON."""
    from hardneg.judging.job import run

    def report(line: str) -> None:
        if not output.quiet:
            typer.echo(line, err=output.json)

    with output.bars() as bars:
        return run(options, bars, report)


def _show(outcome: Outcome) -> None:
    """Print the rates, the main sentences, and what to do next."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from hardneg.io.terminal import Terminal
    from hardneg.judging.result import percent

    console, result = Terminal(), outcome.result
    title = f"false-negative rates, {counted(result.spent, 'judgement')}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("rule", overflow="fold")
    for name in ("similarity", "judged", "rate", "bounds", "certified"):
        table.add_column(name, justify="right", no_wrap=True)
    for rule, (rate, low, high) in result.rates.items():
        state = result.states[rule]
        bounds = "exact" if state.exact else f"{percent(low)} to {percent(high)}"
        cells = (f"{result.similarity[rule]:.3f}", f"{state.judged:,} of {state.size:,}", percent(rate), bounds)
        table.add_row(Text(result.names[rule]), *cells, "yes" if state.certified else "no")
    console.print(table)
    for line in result.sentences():
        console.print(Text(line))
    if outcome.ignored:
        console.print(Text(f"{counted(outcome.ignored, 'answer')} for pairs that are not on a sheet: ignored."))
    if len(outcome.people) > 1 and not math.isnan(outcome.kappa):
        console.print(Text(f"Agreement of {len(outcome.people)} people: Fleiss' kappa {outcome.kappa:.2f}."))
    if outcome.waiting:
        pairs, sheet = counted(outcome.waiting, "pair"), outcome.folder / "sheet.html"
        console.print(
            Text(
                f"{pairs} {'waits' if outcome.waiting == 1 else 'wait'} for the answer of a person: open {sheet} (or "
                "fill in sheet.csv), then run the same command again with --answers FILE."
            )
        )
    console.print(Text(f"{outcome.folder / 'judgements.tsv'} and {outcome.folder / 'judge.html'}"))
