"""`hardneg train RECIPE`: one flag for each option of a recipe, a YAML file for any of them, and where to write."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from hardneg.cli.errors import errors_for_people, given, read_yaml
from hardneg.training.options import RECIPES, RUN, TrainOptions, from_text, shown

EXAMPLES = {
    "simclr": """
  hardneg train simclr --data cifar10 --temperature 0.2 --epochs 100 --precision bf16 --compile

  hardneg train simclr --negatives "Tilt(1.0)" --tau-plus 0.1 --out runs/hcl   (HCL)

  hardneg train simclr --tau-plus 0.1 --out runs/dcl   (DCL)

  hardneg train simclr --batches "proximity(num_candidates=500)" --out runs/prosampler   (ProSampler)

  hardneg train simclr --config run.yaml --seed 1 --out runs/seed1   (flags win over the file)

  hardneg train simclr --data cifar10 --epochs 100 --resume   (goes on where it stopped)
""",
    "supervised": """
  hardneg train supervised --temperature 0.07 --positives-in-denominator all   (SupCon)

  hardneg train supervised --num-negatives candidates --reduction pairs   (SCL)

  hardneg train supervised --negatives "OtherLabel() * Tilt(1.0)" --num-negatives candidates --reduction pairs   (H-SCL)
""",
    "moco": """
  hardneg train moco --data cifar10 --queue 65536 --momentum 0.999 --epochs 200

  hardneg train moco --temperature 0.07 --negatives "Ring(0.1, outer=linear(1.0, 0.1), dynamic_inner=True)"   (Ring)

  hardneg train moco --version v3 --batch-size 1024 --momentum 0.99
""",
    "sogclr": """
  hardneg train sogclr --data cifar10 --batch-size 128 --gamma 0.9 --epochs 100
""",
    "emc2": """
  hardneg train emc2 --data cifar10 --batch-size 128 --burn-in 0.5 --epochs 100
""",
}

train_app = typer.Typer(
    no_args_is_help=True, help="Train an encoder of images and evaluate it; see: train simclr --help"
)


def _command(recipe: str, options: type[TrainOptions]) -> Callable[..., None]:
    def command(ctx: typer.Context, out: Path, resume: bool, config: Path | None, **values: Any) -> None:
        with errors_for_people("Nothing is lost: run the same command with --resume to go on."):
            values |= {"out": out, "resume": resume}
            if config is not None:
                values |= {name: v for name, v in _configured(config, options).items() if name not in given(ctx)}
            out, resume = Path(values.pop("out")), values.pop("resume")
            wanted = options(**values)
            from hardneg.cli.tables import show_evaluation
            from hardneg.training.recipes import run_recipe

            result = run_recipe(recipe, wanted, out, resume=resume)
            if int(os.environ.get("RANK", 0)) == 0:  # of several ranks, the first speaks for all
                show_evaluation(result)
                typer.echo(f"run: {out}")

    hints = get_type_hints(options)
    parameters = [
        inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
        *(_of_option(one, hints[one.name]) for one in fields(options)),
        _parameter("out", Path, Path("runs") / recipe, help="Directory of the run.", rich_help_panel=RUN),
        _parameter("resume", bool, False, help="Go on with the run in --out.", rich_help_panel=RUN),
        _parameter("config", Path | None, None, help="A YAML file with any of these options.", rich_help_panel=RUN),
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    plain = f"\n  hardneg train {recipe} --data digits --epochs 20\n"
    command.__doc__ = f"{options.__doc__}\n\nExamples:\n{EXAMPLES.get(recipe, plain)}"
    return command


def _of_option(one: Field[Any], kind: Any) -> inspect.Parameter:
    rules = one.metadata
    told: dict[str, Any] = {"help": rules["help"] + _allowed(rules["low"], rules["high"])}
    told["rich_help_panel"] = rules["panel"]
    if rules["among"]:
        told["metavar"] = f"[{'|'.join(rules['among'])}]"
    return _parameter(one.name, kind, one.default, **told)


def _allowed(low: float | None, high: float | None) -> str:
    """Said in the help; checked by the options themselves, so that a file is held to the same."""
    if low is None:
        return ""
    return f" At least {shown(low)}." if high is None else f" From {shown(low)} to {shown(high)}."


def _parameter(name: str, kind: Any, default: Any, **told: Any) -> inspect.Parameter:
    annotation = Annotated[kind, typer.Option(**told)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _configured(path: Path, options: type[TrainOptions]) -> dict[str, Any]:
    values, kinds = read_yaml(path), get_type_hints(options) | {"out": str, "resume": bool}
    unknown = [name for name in values if name not in kinds]
    if unknown:
        raise ValueError(f"--config needs options among {', '.join(kinds)}, got {', '.join(unknown)} in {path}.")
    for name in ("out", "resume"):
        if name in values and not isinstance(values[name], kinds[name]):
            raise ValueError(
                f"--config needs {name} to be a {kinds[name].__name__}, got {name}={values[name]!r} in {path}."
            )
    return {name: from_text(kinds[name], value) for name, value in values.items()}


for _recipe, _options in RECIPES.items():
    train_app.command(_recipe)(_command(_recipe, _options))
