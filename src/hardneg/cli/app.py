"""The ``hardneg`` command: registers the verbs and defines the small ones (explain, evaluate, export, report, doctor).

Verbs only read arguments here; the work is imported inside each function, so that ``hardneg --help`` never imports
torch. Docstrings of verbs are their help texts.
"""

from __future__ import annotations

import warnings
from typing import Annotated

import typer

from hardneg.cli.audit import audit
from hardneg.cli.compare import compare
from hardneg.cli.errors import warning_for_people
from hardneg.cli.flags import Command, print_version, verb, with_parameters
from hardneg.cli.judge import judge
from hardneg.cli.mine import mine
from hardneg.cli.options import EvaluateOptions, ExplainOptions, ExportOptions, ReportOptions
from hardneg.cli.output import Output
from hardneg.cli.train import train_app
from hardneg.io.processes import make_children_safe

app = typer.Typer(
    help="hardneg chooses the negatives in contrastive learning.\n\n"
    'Try: hardneg explain "OtherLabel() * Tilt(1.0)" --temperature 0.5',
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
)
app.add_typer(train_app, name="train")
app.command(cls=Command)(mine)
app.command(cls=Command)(audit)
app.command(cls=Command)(judge)
app.command(cls=Command)(compare)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", help="Print the version.", is_eager=True, callback=print_version, metavar=""),
    ] = False,
) -> None:
    """Shorten the warnings of hardneg for every verb; ``--version`` prints the version."""
    warnings.formatwarning = warning_for_people


@app.command(cls=Command)
@verb(ExplainOptions)
def explain(options: ExplainOptions, output: Output) -> None:
    """Explain an expression of the grammar, factor by factor.

    Without an expression, list every distribution and schedule with an example.

    Examples:
      hardneg explain

      hardneg explain "Ring(0.1, outer=linear(1.0, 0.1), dynamic_inner=True)"

      hardneg explain "OtherLabel() * Tilt(1.0)" --temperature 0.5
    """
    from hardneg.cli.explain import explain_expression, list_grammar

    if options.expression is None:
        list_grammar(output)
    else:
        explain_expression(options.expression, options.temperature, output)


@app.command(cls=Command)
@verb(EvaluateOptions)
def evaluate(options: EvaluateOptions, output: Output) -> None:
    """Evaluate a run, saved embeddings, or a text encoder.

    Embeddings are evaluated by a linear probe, kNN (k = 200, or the size of a class), 1-NN and uniformity. Text
    encoders (st:PATH, hf:PATH, file.py:function, or a table with the columns text and embedding) are evaluated on the
    benchmarks given by --sts, --beir and --classification.

    Examples:
      hardneg evaluate runs/simclr

      hardneg evaluate embeddings.npz --json

      hardneg evaluate runs/simclr --on cifar100   (transfer)

      hardneg evaluate st:models/mine --sts sts.tsv --beir scifact --classification textcls.tsv
    """
    from hardneg.cli.evaluate import evaluate_and_show

    evaluate_and_show(options, output)


@app.command(cls=Command)
@verb(ExportOptions)
def export(options: ExportOptions, output: Output) -> None:
    """Export the trained encoder of a run to another library's format, and print the code that loads it.

    Examples:
      hardneg export runs/simclr --format torchvision

      hardneg export runs/simcse --format sentence-transformers --out models/mine
    """
    from hardneg.core.text import printable
    from hardneg.training.export import export as write
    from hardneg.training.export import how_to_load

    more = {"run_code": options.run_code, "normalise": options.normalise}
    path = write(options.run, options.format, options.out, options.weights, **more)
    code = how_to_load(options.run, options.format, path)
    output.result({"path": str(path), "code": code}, lambda: typer.echo(f"{printable(path)}\n{code}"))


@app.command(cls=Command)
@verb(ReportOptions)
def report(options: ReportOptions, output: Output) -> None:
    """Write one self-contained HTML page about runs and comparisons.

    Several paths are shown side by side as arms of one page. Without --out, the page is written to the first path.

    Examples:
      hardneg report runs/compare

      hardneg report runs/simclr runs/moco --out both.html
    """
    from hardneg.core.text import printable
    from hardneg.reporting import write_report

    path = write_report(options.paths, options.out, overwrite=options.overwrite)
    output.result({"report": str(path)}, lambda: typer.echo(f"report: {printable(path)}"))


@app.command(cls=Command)
@with_parameters([])
def doctor(output: Output) -> None:
    """Show versions, device and extras, and what is missing for which verb.

    Examples:
      hardneg doctor

      hardneg doctor --json
    """
    from hardneg.cli.doctor import examine_and_show

    examine_and_show(output)


def main() -> None:
    """Run the command line (entry point of ``hardneg`` and ``python -m hardneg``).

    Child Python processes are started so that they do not import modules from the current folder.
    """
    make_children_safe()
    app(prog_name="hardneg")
