"""The command line: arguments and nothing else. torch is imported by the verbs, never by the help."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

from hardneg.cli.audit import audit
from hardneg.cli.compare import compare
from hardneg.cli.errors import errors_for_people, warning_for_people
from hardneg.cli.mine import mine
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
def explain(
    expression: Annotated[str | None, typer.Argument(help="Negatives in the grammar; none lists all of them.")] = None,
    temperature: Annotated[float, typer.Option(help="Temperature of the scores.")] = 0.5,
) -> None:
    """Say what an expression of the grammar does, factor by factor.

    Without an expression, list every distribution and schedule with an example.

    Examples:

      hardneg explain

      hardneg explain "Ring(0.1, outer=linear(1.0, 0.1), dynamic_inner=True)"

      hardneg explain "OtherLabel() * Tilt(1.0)" --temperature 0.5
    """
    with errors_for_people():
        from hardneg.cli.explain import explain_expression, list_grammar

        list_grammar() if expression is None else explain_expression(expression, temperature)


@app.command()
def evaluate(
    path: Annotated[Path, typer.Argument(help="A run directory, or a file of saved embeddings (npz).")],
) -> None:
    """Evaluate saved embeddings: linear probe, kNN (k = 200, or the size of a class), 1-NN, uniformity.

    Example:

      hardneg evaluate runs/simclr
    """
    with errors_for_people():
        from hardneg.cli.tables import show_evaluation
        from hardneg.training.evaluation.embeddings import evaluate_file

        file = path / "embeddings.npz" if path.is_dir() else path
        if not file.exists():
            raise NoFile("evaluate", "embeddings", file, "which is not there", _why_not(path))
        show_evaluation(evaluate_file(file))


def _why_not(path: Path) -> str:
    """Why there are no embeddings, and what to do."""
    from hardneg.training.runs import Run

    result = Run(path).result()
    if (path / "comparison.json").exists():
        return f"this is a comparison: give one of its runs, {path / 'runs'}/..."
    if result is None:
        return "train first"
    if "knn" in result:
        return "it was removed; delete result.json and train again with --resume, which only evaluates"
    return "the run is finished, but its data has no labels, or one class only, and nothing to evaluate"


@app.command()
def report(
    paths: Annotated[list[Path], typer.Argument(help="Run directories and comparisons, one or several.")],
    out: Annotated[Path | None, typer.Option(help="The HTML file; by default report.html in the directory.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Also over a file that is no page of hardneg.")
    ] = False,
) -> None:
    """Write one self-contained HTML page about runs and comparisons.

    Several paths become arms of one page, side by side; without --out it lies beside the first of them.

    Examples:

      hardneg report runs/compare

      hardneg report runs/simclr runs/moco --out both.html
    """
    with errors_for_people():
        from hardneg.core.text import printable
        from hardneg.reporting import write_report

        typer.echo(f"report: {printable(write_report(paths, out, overwrite=overwrite))}")


def main() -> None:
    app()
