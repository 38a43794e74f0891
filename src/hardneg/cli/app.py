"""The ``hardneg`` command: registers the verbs and defines the small ones (all but train, mine, audit and judge).

Verbs only read arguments here; the work is imported inside each function, so that ``hardneg --help`` never imports
torch. Docstrings of verbs are their help texts.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import typer

from hardneg.cli.audit import audit
from hardneg.cli.errors import errors_for_people, given, read_yaml, warning_for_people
from hardneg.cli.flags import (
    CONTEXT,
    Command,
    VersionFlag,
    build,
    checked_values,
    parameter,
    parameters_of,
    verb,
    with_parameters,
)
from hardneg.cli.judge import judge
from hardneg.cli.mine import mine
from hardneg.cli.options import (
    ALWAYS,
    AdviseOptions,
    CompareOptions,
    EvaluateOptions,
    ExplainOptions,
    ExportOptions,
    ReportOptions,
)
from hardneg.cli.output import Output
from hardneg.cli.train import train_app
from hardneg.cli.without_torch import without_torch
from hardneg.core.errors import ArgumentError, FileError, located
from hardneg.io.processes import make_children_safe
from hardneg.training.options import RECIPES

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


@app.callback(invoke_without_command=True)
def root(version: VersionFlag = False) -> None:
    """Shorten the warnings of hardneg for every verb; ``--version`` prints the version."""
    warnings.formatwarning = warning_for_people


@app.command(cls=Command)
@with_parameters(
    [
        CONTEXT,
        *parameters_of(CompareOptions),
        parameter(
            "config", Path | None, None, help="YAML file with a list of arms and any option of compare or train."
        ),
    ]
)
def compare(ctx: typer.Context, config: Path | None, output: Output, **values: Any) -> None:
    """Compare negatives on your data with equal budget, seeds and initial weights; print a table and write a report.

    An interrupted comparison resumes when you run the same command again; finished runs are kept.

    Examples:
      hardneg compare --arm "simclr(temperature=0.25)" --arm "hcl(beta=1)"

      hardneg compare --arm "simclr()" --arm "simclr() @ proximity()" --seeds 5

      hardneg compare --arm "simclr()" --arm "hcl()" --tune temperature=0.2,0.5

      hardneg compare --arm "supcon()" --arm "hscl()" --option encoder=resnet18

      hardneg compare --config comparison.yaml --jobs 2
    """
    with errors_for_people("Nothing is lost: run the same command again to resume."):
        from hardneg.cli.tables import compare_and_show
        from hardneg.comparing.request import Comparison, read_options, read_tune

        values |= {name: value for name, value in _from_file(config).items() if name not in given(ctx)}
        options = build(CompareOptions, values, "compare")  # leaves the options of train that the file sets in `values`
        others = read_options(options.options)
        if duplicates := sorted(others.keys() & given(ctx)):
            flag = "--" + duplicates[0].replace("_", "-")
            raise ArgumentError("compare", f"either {flag} or --option {duplicates[0]}=...", "both")
        common = {name: getattr(options.shared, name) for name in ALWAYS} | values | others
        if options.shared.evaluate_with is not None:
            common["evaluate_with"] = options.shared.evaluate_with
        if not options.resume and (Path(options.out) / "request.json").exists():
            fix = "leave --no-resume out to continue it, or use another --out"
            raise FileError("compare", "a directory without a comparison", options.out, "which has one", fix)
        tune = read_tune(options.tune), options.metric, options.tries, options.tune_seeds
        wanted = Comparison(options.arms, options.seeds, common, *tune)
        compare_and_show(wanted, options.out, options.jobs, options.allow_other_data, output)


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

    def work() -> None:
        from hardneg.cli.explain import explain_expression, list_grammar

        if options.expression is None:
            list_grammar(output)
        else:
            explain_expression(options.expression, options.temperature, output)

    without_torch(work)


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

      hardneg evaluate runs/simclr --protocol probe   (SGD with augmentation)

      hardneg evaluate runs/simclr --protocol finetune --labels 0.01 --labels 0.1

      hardneg evaluate st:models/mine --sts sts.tsv --beir scifact --classification textcls.tsv
    """
    from hardneg.cli.evaluate import evaluate_and_show

    evaluate_and_show(options, output)


@app.command(cls=Command)
@verb(ExportOptions)
def export(options: ExportOptions, output: Output) -> None:
    """Export the trained encoder of a run to another library's format, and print the code that loads it.

    The preprocessing of images (mean, std, size, order of channels) is in the metadata of the file or in a JSON file
    beside it. Programs of torch-export and onnx take images in [0, 1] and normalise them.

    Examples:
      hardneg export runs/simclr --format torchvision

      hardneg export runs/simclr --format onnx

      hardneg export runs/moco --format detectron2   (COCO, VOC)

      hardneg export runs/simclr --format hub --out my-encoder

      hardneg export runs/simcse --format sentence-transformers --out models/mine
    """
    from hardneg.core.text import printable
    from hardneg.training.export import export as write
    from hardneg.training.export import how_to_load

    more = {"run_code": options.run_code, "normalise": options.normalise}
    path = write(options.run, options.format, options.out, options.weights, **more)
    code = how_to_load(options.run, options.format, path, normalise=options.normalise)
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
@verb(AdviseOptions)
def advise(options: AdviseOptions, output: Output) -> None:
    """Suggest negatives for your data, by what happened to similar data in studies, and print the command that decides.

    Examples:
      hardneg advise digits

      hardneg advise "pairs:faq.jsonl[question,answer]"
    """
    from hardneg.cli.advise import advise_and_show

    advise_and_show(options.data, options.data_root, output)


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


def _from_file(path: Path | None) -> dict[str, Any]:
    """Read options of compare and train from a YAML file.

    Args:
        path: The file, or None for no options. ``tune`` may be a mapping from an option to a list of values, besides
            the form of the flag, ``name=value,value``.

    Raises:
        FileError: The file cannot be read as lines of ``name: value``.
        UnknownName: A name belongs neither to compare nor to any recipe.
    """
    if path is None:
        return {}
    values = read_yaml(path)
    match values.get("tune"):
        case dict() as tune if all(isinstance(tries, list) for tries in tune.values()):
            values["tune"] = [f"{name}={','.join(map(str, tries))}" for name, tries in tune.items()]
    with located(str(path)):
        return checked_values("compare", values, CompareOptions, *RECIPES.values())


def main() -> None:
    """Run the command line (entry point of ``hardneg`` and ``python -m hardneg``).

    Child Python processes are started so that they do not import modules from the current folder.
    """
    make_children_safe()
    app(prog_name="hardneg")
