"""`hardneg mine`: arguments and printed summaries of the verb; the work is in ``hardneg.mining``.

`mine` reads the options and either prints an estimate (--dry-run) or runs the job (`_mine`) and prints its summary. The
functions below `_mine` only format results.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hardneg.cli.errors import errors_for_people
from hardneg.cli.flags import (
    CONFIG,
    CONTEXT,
    build,
    flags_of,
    parameter,
    parameters_of,
    with_config_file,
    with_parameters,
)
from hardneg.cli.output import Output
from hardneg.core.text import counted
from hardneg.mining.options import INPUT, OUTPUT, RULE, RUN, SEARCH, MineOptions

if TYPE_CHECKING:
    from hardneg.mining.estimate import JobEstimate
    from hardneg.mining.explain import Explanation
    from hardneg.mining.job import Summary

COMMON = (
    "queries",
    "out",
    "corpus",
    "judgements",
    "query_embeddings",
    "corpus_embeddings",
    "model",
    "negatives",
    "k",
    "draw",
    "temperature",
    "similarity",
    "format",
    "device",
    "jobs",
    "dry_run",
    "explain",
    "config",
)
"""Parameters that the short help shows."""


@with_parameters(
    [
        CONTEXT,
        *parameters_of(MineOptions, (INPUT, RULE, SEARCH, OUTPUT, RUN)),
        parameter(
            "dry_run",
            bool,
            False,
            "--dry-run",
            help="Only estimate time, memory and disk space.",
            rich_help_panel=OUTPUT,
        ),
        parameter(
            "explain",
            bool,
            False,
            "--explain",
            help="Print how many candidates each factor removed.",
            rich_help_panel=OUTPUT,
        ),
        CONFIG,
    ],
    COMMON,
)
def mine(ctx: typer.Context, config: Path | None, dry_run: bool, explain: bool, output: Output, **values: Any) -> None:
    """Turn a data set and its embeddings into training data with hard negatives.

    Examples:
      hardneg mine pairs.jsonl --model all-MiniLM-L6-v2 -o mined.parquet

      hardneg mine queries.jsonl --corpus corpus.jsonl --corpus-column title+text --judgements qrels.tsv
      --model all-MiniLM-L6-v2 -n "BelowPositive(relative=0.05) * Rank(5, 200) * Tilt(2.0)" --draw gumbel -o mined

      hardneg mine q.npy --corpus-embeddings d.npy --judgements pairs.csv --format ids -o mined.parquet

      torchrun --nproc-per-node 8 -m hardneg mine ...   (the same output)

      hardneg mine ... --engine ray   or   --part 0/8, --part 1/8 ... and then --merge   (the same output)
    """
    with errors_for_people("Run the same command again to resume.", {"mine": flags_of(MineOptions)}):
        options = build(MineOptions, with_config_file(ctx, "mine", config, values, MineOptions), "mine")
        if dry_run:
            from hardneg.mining.estimate import estimate

            cost = estimate(options)
            output.result(asdict(cost), lambda: _print_estimate(cost))
            return
        _mine(options, explain, output)


def _mine(options: MineOptions, explain: bool, output: Output) -> None:
    """Run the job with progress bars and print its summary.

    Args:
        options: Options of the job. A run with ``--part`` has no summary until ``--merge``.
        explain: Also print the counts of each factor, even if no negative is left.
        output: Where to print: as text or as JSON.

    Raises:
        NoNegatives: The expression leaves no negative for any query.
    """
    from hardneg.mining.explain import NoNegatives
    from hardneg.mining.job import run

    try:
        with output.bars() as bars:
            summary = run(options, bars)
    except NoNegatives as error:
        if explain and output.shows_text:
            _print_steps(error.explanation)
        raise
    if summary is not None:
        found = {**vars(summary), "out": options.out, "explanation": summary.explanation.as_dict()}
        output.result(found, lambda: _print_summary(summary, options, explain))
    elif options.part is not None:
        message = f"Part {options.part} is finished. Once all parts are, --merge writes the output."
        output.result({"part": options.part}, lambda: typer.echo(message))


def _print_steps(explanation: Explanation) -> None:
    """Print the table of --explain: candidates removed by each step, and queries it left with too few."""
    from rich.table import Table
    from rich.text import Text

    from hardneg.io.terminal import Terminal

    steps = Table(title=f"{explanation.looked_at:,} candidates considered", title_justify="left")
    for name in ("step", "removed", "queries left short"):
        steps.add_column(name, justify="left" if name == "step" else "right")
    for step, gone, short in explanation.rows():
        steps.add_row(Text(step), f"{gone:,}", f"{short:,}")
    Terminal().print(steps)


def _print_summary(summary: Summary, options: MineOptions, explain: bool) -> None:
    """Print similarities, counts, the recall of an approximate search, and the output file."""
    from rich.table import Table
    from rich.text import Text

    from hardneg.io.terminal import Terminal

    console = Terminal()
    if explain:
        _print_steps(summary.explanation)
    similarities = Table(title="similarity", title_justify="left")
    for name in ("", "mean", "5%", "median", "95%"):
        similarities.add_column(name, justify="right")
    for group, row in summary.statistics.items():
        similarities.add_row(group, *(f"{row[name]:.3f}" for name in ("mean", "5%", "median", "95%")))
    console.print(similarities)
    for line in _input_lines(summary.counts):
        console.print(Text(line))
    if summary.recall is not None:
        console.print(Text(f"Recall of the approximate search: {summary.recall:.1%}, on a sample of queries."))
    short, queries = summary.explanation.short, summary.explanation.queries
    if short:
        console.print(Text(f"{short:,} of {queries:,} queries have fewer than {options.k} negatives."))
    console.print(
        Text(f"Wrote {counted(summary.rows_written, 'row')} to {options.out}; details in {summary.manifest}.")
    )


def _input_lines(counts: dict[str, int]) -> list[str]:
    """Describe the input: one line of counts, and a second line about irregular input if there was any.

    Args:
        counts: Counts by name, as in the manifest; names outside the usual ones mean irregular input.
    """
    rows, queries = counts["rows_of_queries"], counts["queries"]
    of_rows = f" in {counted(rows, 'row')}" if rows != queries else ""
    lines = [f"{counted(queries, 'query', 'queries')}{of_rows}, {counted(counts['corpus'], 'document')}"]
    usual = ("queries", "corpus", "rows_of_queries", "negatives", "rows_written")
    odd = [f"{name.replace('_', ' ')} {number:,}" for name, number in counts.items() if number and name not in usual]
    return [*lines, f"irregular: {', '.join(odd)}"] if odd else lines


def _print_estimate(cost: JobEstimate) -> None:
    """Print the estimates of --dry-run."""
    for line in _input_lines(cost.counts):
        typer.echo(line)
    typer.echo(f"encoding about {_duration(cost.encoding_seconds)}, mining about {_duration(cost.mining_seconds)}")
    memory = "" if cost.peak_bytes is None else f"memory about {cost.peak_bytes / 2**30:.1f} GiB, "
    typer.echo(f"{memory}disk about {cost.disk_bytes / 2**30:.2f} GiB in addition to the output; nothing was written")


def _duration(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
