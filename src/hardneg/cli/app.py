"""The command line: arguments and nothing else. torch is imported by the verbs, never by the help."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

from hardneg.cli.audit import audit
from hardneg.cli.compare import compare
from hardneg.cli.errors import warning_for_people
from hardneg.cli.flags import verb
from hardneg.cli.mine import mine
from hardneg.cli.options import EvaluateOptions, ExplainOptions, ReportOptions
from hardneg.cli.train import train_app
from hardneg.core.errors import NoFile

app = typer.Typer(
    help="hardneg chooses the negatives in contrastive learning.\n\n"
    'Try: hardneg explain "OtherLabel() * Tilt(1.0)" --temperature 0.5',
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(train_app, name="train")
app.command()(mine)
app.command()(audit)
app.command()(compare)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    warnings.formatwarning = warning_for_people
    if version:
        from hardneg import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.command()
@verb(ExplainOptions)
def explain(options: ExplainOptions) -> None:
    """Explain what an expression of the grammar does, factor by factor.

    Without an expression, list every distribution and schedule with an example.

    Examples:

      hardneg explain

      hardneg explain "Ring(0.1, outer=linear(1.0, 0.1), dynamic_inner=True)"

      hardneg explain "OtherLabel() * Tilt(1.0)" --temperature 0.5
    """
    from hardneg.cli.explain import explain_expression, list_grammar

    list_grammar() if options.expression is None else explain_expression(options.expression, options.temperature)


@app.command()
@verb(EvaluateOptions)
def evaluate(options: EvaluateOptions) -> None:
    """Evaluate saved embeddings: linear probe, kNN (k = 200, or the size of a class), 1-NN, uniformity.

    Example:

      hardneg evaluate runs/simclr
    """
    from hardneg.cli.tables import show_evaluation
    from hardneg.training.evaluation.embeddings import evaluate_file

    path = Path(options.path)
    file = path / "embeddings.npz" if path.is_dir() else path
    if not file.exists():
        raise NoFile("evaluate", "embeddings", file, "which is not there", _why_not(path))
    show_evaluation(evaluate_file(file))


def _why_not(path: Path) -> str:
    """Why there are no embeddings, and what to do."""
    from hardneg.training.runs import Run

    run = Run(path)
    result = run.result()
    if (path / "comparison.json").exists():
        return f"this is a comparison: give one of its runs, {path / 'runs'}/..."
    if result is None and run.config_path.exists():
        return "the run is not finished: give its command again with --resume, which evaluates at the end"
    if result is None:
        return "train first"
    if "knn" in result:
        return "it was removed; delete result.json and train again with --resume, which only evaluates"
    return "the run is finished, but its data has no labels, or one class only, and nothing to evaluate"


@app.command()
@verb(ReportOptions)
def report(options: ReportOptions) -> None:
    """Write one self-contained HTML page about runs and comparisons.

    Several paths become arms of one page, side by side; without --out it lies beside the first of them.

    Examples:

      hardneg report runs/compare

      hardneg report runs/simclr runs/moco --out both.html
    """
    from hardneg.core.text import printable
    from hardneg.reporting import write_report

    typer.echo(f"report: {printable(write_report(options.paths, options.out, overwrite=options.overwrite))}")


def main() -> None:
    app()
