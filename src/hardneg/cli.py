"""The command line: arguments and nothing else. torch is imported by the verbs, never by the help."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from hardneg.cli_audit import audit
from hardneg.cli_mine import mine
from hardneg.options import RECIPES, TrainOptions

app = typer.Typer(
    help="hardneg chooses the negatives in contrastive learning.\n\n"
    'Try: hardneg explain "OtherLabel() * Tilt(1.0)" --temperature 0.5',
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
)
train_app = typer.Typer(
    no_args_is_help=True, help="Train an encoder of images and evaluate it; see: train simclr --help"
)
app.add_typer(train_app, name="train")
app.command()(mine)
app.command()(audit)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from hardneg import __version__

        typer.echo(__version__)
        raise typer.Exit


@contextmanager
def errors_for_people() -> Iterator[None]:
    """Wrong input is one sentence and exit code 2; Ctrl-C says how to go on and is 130."""
    try:
        yield
    except (ValueError, ImportError, FileNotFoundError) as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.secho("Stopped. Nothing is lost: run the same command with --resume to go on.", err=True)
        raise typer.Exit(130) from None


@app.command()
def explain(
    expression: Annotated[str | None, typer.Argument(help="Negatives in the grammar; none lists all of them.")] = None,
    temperature: Annotated[float, typer.Option(help="Temperature of the scores.", min=1e-6)] = 0.5,
) -> None:
    """Say what an expression of the grammar does, factor by factor.

    Without an expression, list every distribution and schedule with an example.

    Examples:

      hardneg explain

      hardneg explain "Ring(0.1, outer=linear(1.0, 0.1), dynamic_inner=True)"

      hardneg explain "OtherLabel() * Tilt(1.0)" --temperature 0.5
    """
    with errors_for_people():
        from hardneg.explain import explain_expression, list_grammar

        list_grammar() if expression is None else explain_expression(expression, temperature)


@app.command()
def compare(
    arm: Annotated[list[str], typer.Option(help="A paper or recipe, and after @ who shares the batch; repeat it.")],
    data: Annotated[str, typer.Option(help="As in train.")] = "digits",
    out: Annotated[Path, typer.Option(help="Directory of the comparison; the same one goes on.")] = Path(
        "runs/compare"
    ),
    seeds: Annotated[int, typer.Option(help="Runs of each arm; the same seeds for all.", min=2)] = 3,
    epochs: Annotated[int, typer.Option(help="Of every run.", min=1)] = 50,
    batch_size: Annotated[int, typer.Option(help="Of every run.", min=2)] = 256,
    metric: Annotated[str, typer.Option(help="knn, 1nn or linear.")] = "knn",
    tune: Annotated[
        str | None, typer.Option(help="Such as temperature=0.1,0.2,0.5: the same tries for every arm.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Runs side by side.", min=1)] = 1,
    option: Annotated[list[str] | None, typer.Option(help="Any other option of train, as name=value.")] = None,
) -> None:
    """Compare negatives on your data: same budget, seeds and initial weights; a table, sentences and a report.

    A killed comparison goes on when the same command is given again; finished runs are kept.

    Examples:

      hardneg compare --arm "simclr(temperature=0.5)" --arm "simclr(temperature=0.25)" --arm "hcl(beta=1)" --seeds 5

      hardneg compare --data cifar10 --arm "simclr()" --arm "simclr() @ proximity(num_candidates=500)"

      hardneg compare --arm "simclr()" --arm "hcl()" --tune temperature=0.1,0.2,0.3,0.5
    """
    with errors_for_people():
        from hardneg.comparison import Comparison, read_options, read_tune
        from hardneg.comparison_table import compare_and_show

        common = {"data": data, "epochs": epochs, "batch_size": batch_size, **read_options(option or [])}
        wanted = Comparison(tuple(arm), seeds, common, read_tune(tune) if tune else None, metric)
        compare_and_show(wanted, out, jobs)


@app.command()
def evaluate(
    path: Annotated[Path, typer.Argument(help="A run directory, or a file of saved embeddings (npz).")],
) -> None:
    """Evaluate saved embeddings: linear probe, kNN (k = 200, or the size of a class), 1-NN, uniformity.

    Example:

      hardneg evaluate runs/simclr
    """
    with errors_for_people():
        from hardneg.comparison_table import show_evaluation
        from hardneg.evaluate import evaluate_file

        file = path / "embeddings.npz" if path.is_dir() else path
        if not file.exists():
            raise ValueError(f"evaluate needs embeddings, got {file}, which is not there; train first.")
        show_evaluation(evaluate_file(file))


@app.command()
def report(
    paths: Annotated[list[Path], typer.Argument(help="Run directories and comparisons, one or several.")],
    out: Annotated[Path | None, typer.Option(help="The HTML file; by default report.html in the directory.")] = None,
) -> None:
    """Write one self-contained HTML page about runs and comparisons.

    Several paths become arms of one page, side by side; without --out it lies beside the first of them.

    Examples:

      hardneg report runs/compare

      hardneg report runs/simclr runs/moco --out both.html
    """
    with errors_for_people():
        from hardneg.report import write_report

        typer.echo(f"report: {write_report(paths, out)}")


def _train_command(recipe: str, options: type[TrainOptions]) -> Callable[..., None]:
    """The verb of a recipe: one flag for each of its options, a YAML file for any of them, and where to write."""

    def command(ctx: typer.Context, out: Path, resume: bool, config: Path | None, **values: Any) -> None:
        with errors_for_people():
            if config is not None:
                given = {name for name in values if ctx.get_parameter_source(name).name == "COMMANDLINE"}  # type: ignore[union-attr]
                values |= {name: value for name, value in _read_config(config, values).items() if name not in given}
            wanted = options(**values)
            from hardneg.comparison_table import show_evaluation
            from hardneg.recipes import run_recipe

            show_evaluation(run_recipe(recipe, wanted, out, resume=resume))

    hints = get_type_hints(options)
    parameters = [
        _parameter("ctx", typer.Context),
        _parameter("out", Path, Path("runs") / recipe, "Directory of the run."),
        _parameter("resume", bool, False, "Go on with the run in --out."),
        _parameter("config", Path | None, None, "A YAML file with any of these options; flags win."),
        *(_parameter(f.name, hints[f.name], f.default, f.metadata["help"]) for f in fields(options)),
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    example = f'hardneg train {recipe} --data digits --negatives "{options.negatives}" --epochs 20'
    command.__doc__ = f"{options.__doc__}\n\nExample:\n\n  {example}\n"
    return command


def _parameter(name: str, kind: Any, default: Any = MISSING, help: str = "") -> inspect.Parameter:
    if default is MISSING:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind)
    annotation = Annotated[kind, typer.Option(help=help)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _read_config(path: Path, known: dict[str, Any]) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise ImportError("--config needs pyyaml; pip install 'hardneg[train]'.") from error
    values = yaml.safe_load(path.read_text()) or {}
    if not isinstance(values, dict):
        raise ValueError(f"{path} needs lines like 'temperature: 0.5', got {type(values).__name__}.")
    unknown = [name for name in values if name not in known]
    if unknown:
        raise ValueError(f"{path} needs options among {', '.join(known)}, got {', '.join(map(str, unknown))}.")
    return values


for _recipe, _options in RECIPES.items():
    train_app.command(_recipe)(_train_command(_recipe, _options))


def main() -> None:
    app()


if __name__ == "__main__":
    main()
