"""`hardneg train RECIPE`: one flag for each option of a recipe, a YAML file for any of them, and where to write."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, get_type_hints

import typer

from hardneg.cli.errors import errors_for_people, given, read_yaml
from hardneg.cli.flags import CONTEXT, parameter, with_parameters
from hardneg.core.errors import ArgumentError, UnknownName
from hardneg.core.text import printable
from hardneg.training.options import RECIPES, RUN, Scheduled, TrainOptions, allowed, called, from_text

ALLOW_OTHER_DATA = "Go on although the images or labels are not those that the run was begun with."

EXAMPLES = {
    "simclr": """
  hardneg train simclr --data cifar10 --temperature 0.2 --epochs 100 --precision bf16 --compile

  hardneg train simclr --negatives "Tilt(1.0)" --tau-plus 0.1 --out runs/hcl   (HCL)

  hardneg train simclr --tau-plus 0.1 --out runs/dcl   (DCL)

  hardneg train simclr --batches "proximity(num_candidates=500)" --out runs/prosampler   (ProSampler)

  hardneg train simclr --temperature "linear(0.5, 0.1)" --tau-plus "linear(0, 0.1)" --out runs/annealed   (schedules)

  hardneg train simclr --config run.yaml --seed 1 --out runs/seed1   (flags win over the file)

  hardneg train simclr --data cifar10 --epochs 100 --resume   (resumes where it stopped)
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
    "isogclr": """
  hardneg train isogclr --data cifar10 --rho 0.3 --epochs 100
""",
    "emc2": """
  hardneg train emc2 --data cifar10 --batch-size 128 --burn-in 0.5 --epochs 100
""",
}

train_app = typer.Typer(
    no_args_is_help=True, help="Train an encoder of images and evaluate it; see: train simclr --help"
)


def _command(recipe: str, options: type[TrainOptions]) -> Callable[..., None]:
    hints = get_type_hints(options)

    def command(ctx: typer.Context, config: Path | None, **values: Any) -> None:
        with errors_for_people("Nothing is lost: run the same command with --resume to continue."):
            if config is not None:
                values |= {name: v for name, v in _configured(config, options).items() if name not in given(ctx)}
            out, how = Path(values.pop("out")), {name: values.pop(name) for name in ("resume", "allow_other_data")}
            wanted = options(**{name: from_text(hints[name], value) for name, value in values.items()})
            from hardneg.cli.tables import show_evaluation
            from hardneg.training.recipes import run_recipe

            if how["resume"] and not (out / "config.json").exists():
                typer.echo(f"There is no run in {printable(str(out))} to resume: training starts anew.", err=True)
            result = run_recipe(recipe, wanted, out, **how)
            if int(os.environ.get("RANK", 0)) == 0:  # of several ranks, the first speaks for all
                show_evaluation(result)
                typer.echo(f"run: {out}")

    parameters = [
        CONTEXT,
        *(_of_option(one, hints[one.name]) for one in fields(options)),
        parameter("out", Path, Path("runs") / recipe, help="Directory of the run.", rich_help_panel=RUN),
        parameter("resume", bool, False, help="Resume the run in --out, if there is one.", rich_help_panel=RUN),
        parameter("allow_other_data", bool, False, "--allow-other-data", help=ALLOW_OTHER_DATA, rich_help_panel=RUN),
        parameter("config", Path | None, None, help="A YAML file with any of these options.", rich_help_panel=RUN),
    ]
    plain = f"\n  hardneg train {recipe} --data digits --epochs 20\n"
    command.__doc__ = f"{options.__doc__}\n\nExamples:\n{EXAMPLES.get(recipe, plain)}"
    return with_parameters(command, parameters)


def _of_option(one: Field[Any], kind: Any) -> inspect.Parameter:
    default = str(one.default) if kind == Scheduled else one.default
    help = " ".join([one.metadata["help"], *_allowed(one.metadata)])
    return parameter(
        one.name, str if kind == Scheduled else kind, default, help=help, rich_help_panel=one.metadata["panel"]
    )


def _allowed(rules: Any) -> list[str]:
    """For the help; checked by the options themselves, so that a file is held to the same.

    Choices stand in the help and not in the place of the kind, which would leave no room for the rest.
    """
    if rules["among"]:
        return [f"One of {', '.join(rules['among'])}."]
    if rules["low"] is None:
        return []
    words = allowed(rules["low"], rules["high"]).removeprefix("of ")
    return [f"{words[0].upper()}{words[1:]}."]


def _configured(path: Path, options: type[TrainOptions]) -> dict[str, Any]:
    values = read_yaml(path)
    kinds = get_type_hints(options) | {"out": str, "resume": bool, "allow_other_data": bool}
    for name in values:
        if name not in kinds:
            raise UnknownName(name, kinds, f"in {path}", {one: _taken(one, kinds, options) for one in kinds})
    for name in ("out", "resume", "allow_other_data"):
        if name in values and not isinstance(values[name], kinds[name]):
            raise ArgumentError("--config", f"{name} to be {called(kinds[name])}", f"{name}={values[name]!r} in {path}")
    return {name: from_text(kinds[name], value) for name, value in values.items()}


def _taken(name: str, kinds: dict[str, Any], options: type[TrainOptions]) -> str:
    """What an option takes: "It is a whole number of at least 1, by default 50"."""
    one = {field.name: field for field in fields(options)}.get(name)
    if one is None:
        return f"It is {called(kinds[name])}"
    rules = one.metadata
    kind = f"one of {', '.join(rules['among'])}" if rules["among"] else called(kinds[name])
    bounds = f" {allowed(rules['low'], rules['high'])}" if rules["low"] is not None else ""
    return f"It is {kind}{bounds}, by default {one.default}"


for _recipe, _options in RECIPES.items():
    train_app.command(_recipe)(_command(_recipe, _options))
