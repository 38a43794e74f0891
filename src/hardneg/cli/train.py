"""`hardneg train RECIPE`: one command per recipe, generated from the recipe's dataclass of options.

`RECIPES` of ``hardneg.training.options`` lists the recipes; `EXAMPLES` holds the example flags of each help text.
"""

from __future__ import annotations

import os
from collections import UserDict
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from hardneg.cli.errors import errors_for_people
from hardneg.cli.flags import (
    CONTEXT,
    Command,
    VersionFlag,
    build,
    parameter,
    parameters_of,
    with_config_file,
    with_parameters,
)
from hardneg.cli.options import RunOptions
from hardneg.cli.output import Output
from hardneg.core.text import printable
from hardneg.training.options import RECIPES, TrainOptions
from hardneg.training.options.base import RUN

# Example flags of each recipe's help, without "hardneg train RECIPE"; recipes without an entry get a default.
EXAMPLES: dict[str, list[str]] = {
    "simclr": [
        "--data cifar10 --precision bf16 --compile",
        '--negatives "Tilt(1.0)" --tau-plus 0.1   (HCL)',
        "--tau-plus 0.1   (DCL)",
        '--batches "proximity(num_candidates=500)"   (ProSampler)',
        '--temperature "linear(0.5, 0.1)"   (a schedule)',
        "--config run.yaml --seed 1   (flags win over the file)",
        "--data cifar10 --resume   (resumes where it stopped)",
    ],
    "supervised": [
        "--positives-in-denominator all   (SupCon)",
        "--num-negatives candidates --reduction pairs   (SCL)",
        '--negatives "OtherLabel() * Tilt(1.0)"   (a tilt)',
        '--same-label-negatives --negatives "Tilt(1.0)"',
    ],
    "moco": [
        "--data cifar10 --version v2 --epochs 200",
        '--negatives "Ring(0.1, linear(1.0, 0.1), True)"   (Ring)',
        "--version v3 --batch-size 1024",
    ],
    "byol": ["--data cifar10 --batch-size 256 --epochs 200", "--data digits --hidden-dim 256 --epochs 50"],
    "swav": [
        "--data cifar10 --num-prototypes 300 --queue 3840",
        "--data folder:photos@96 --num-crops 6   (multi-crop)",
    ],
    "fnc": ["--data cifar10 --num-support 2 --epochs 200", "--found remove   (instead of attracting them)"],
    "nnclr": ["--data cifar10 --queue 20000 --epochs 200", '--negatives "Tilt(1.0)"   (a tilt)'],
    "simcse": [
        "--data text:sentences.txt --evaluate-with sts:sts.tsv",
        '--data "text:reviews.csv[review,stars]" --epochs 3',
        '--data text:a.txt --negatives "Tilt(1.0)"   (a tilt)',
        "--data text:a.txt --encoder st:MODEL --head mlp",
    ],
    "pairs": [
        '--data "pairs:faq.jsonl[question,answer]"',
        "--data pairs:mined.parquet --encoder st:MODEL",
        "--data pairs:m.csv --negatives \"Tilt(5, source='mined')\"",
    ],
    "clip": [
        '--data "imagetext:photos.jsonl[image,caption]@64"',
        "--data imagetext:FOLDER --encoder resnet18 --epochs 30",
        "--data embeddings:pairs.npz --dim 256 --epochs 20",
        "--data embeddings:pairs.npz --denominator sogclr",
    ],
    "quick-thoughts": ["--data text:story.txt --batch-size 400"],
    "sogclr": ["--data cifar10 --batch-size 128 --gamma 0.9 --epochs 100"],
    "isogclr": ["--data cifar10 --rho 0.3 --epochs 100"],
    "emc2": [
        "--data cifar10 --batch-size 128 --burn-in 0.5 --epochs 100",
        '--proposals "data set" --num-steps 64   (Algorithm 1)',
    ],
    "instance": [
        "--data cifar10 --epochs 200",
        '--data digits --negatives "Ring(0.1, 0.5)"   (IRing)',
        '--negatives "SameCluster()" --clusters 20 --warmup 5',
        "--loss softmax --clusters 20 --cluster-positives",
    ],
    "cmc": [
        "--data cifar10 --num-draws 4096",
        '--data cifar10 --negatives "Ring(0.1, 0.5)"   (CMCRing)',
    ],
    "local-aggregation": [
        "--data cifar10 --warmup 10 --epochs 100",
        '--negatives "Rank(0, 200)" --cluster-runs 10',
    ],
    "negative-cache": [
        "--data cifar10 --cache 50000 --epochs 100",
        "--data text:sentences.txt --num-draws 4",
    ],
    "graphcl": [
        "--data graphs:MUTAG --batch-size 94",
        '--data graphs:PROTEINS --negatives "Tilt(1.0)"   (HCL)',
        "--augment \"graphcl(first='none', ratio=0.1)\"",
    ],
    "infograph": [
        "--data graphs:MUTAG --batch-size 94",
        '--negatives "ClippedTilt(1.0)"   (HCL)',
    ],
}

COMMON = (
    "data",
    "encoder",
    "negatives",
    "temperature",
    "tau_plus",
    "batches",
    "epochs",
    "batch_size",
    "learning_rate",
    "seed",
    "precision",
    "device",
    "out",
    "resume",
    "config",
)
"""Parameters that the short help of each recipe shows, besides the options that only the recipe has."""


class _Commands(UserDict[str, Any]):
    """The command of each recipe, built when it is first read: all of them take as long as a short command."""

    def __getitem__(self, recipe: str) -> Any:
        if self.data[recipe] is None:
            one = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
            one.command(recipe, cls=Command)(command_of(recipe, RECIPES[recipe]))
            self.data[recipe] = get_command(one)
        return self.data[recipe]


class _Recipes(TyperGroup):
    """``hardneg train``, whose commands are those of the recipes."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = _Commands(dict.fromkeys(RECIPES))


train_app = typer.Typer(no_args_is_help=True, cls=_Recipes)


@train_app.callback(invoke_without_command=True)
def train(version: VersionFlag = False) -> None:
    """Train an encoder and evaluate it; see hardneg train RECIPE --help."""


def command_of(recipe: str, options: type[TrainOptions]) -> Callable[..., None]:
    """Return the command of a recipe.

    Args:
        recipe: Name of the recipe, which is also the name of the command.
        options: Dataclass of its options. Its docstring and the examples become the help text.
    """

    def command(ctx: typer.Context, config: Path | None, output: Output, **values: Any) -> None:
        with errors_for_people("Nothing is lost: run the same command with --resume to continue."):
            values = with_config_file(ctx, "train", config, values, options, RunOptions)
            where, wanted = build(RunOptions, values, "train"), build(options, values, "train")
            from hardneg.cli.tables import show_evaluation
            from hardneg.training.recipes import run_recipe

            if where.resume and not output.quiet and not (Path(where.out) / "config.json").exists():
                typer.echo(f"There is no run in {printable(where.out)} to resume; starting a new one.", err=True)
            how = {"resume": where.resume, "allow_other_data": where.allow_other_data, "quiet": output.quiet}
            result = run_recipe(recipe, wanted, where.out, **how)

            def show() -> None:
                show_evaluation(result)
                typer.echo(f"run: {where.out}")

            if int(os.environ.get("RANK", 0)) == 0:  # only the first rank prints
                output.result({**result, "run": where.out}, show)

    parameters = [
        CONTEXT,
        *parameters_of(options),
        *parameters_of(RunOptions, out=f"runs/{recipe}"),
        parameter(
            "config",
            Path | None,
            None,
            help="YAML file with any of these options; flags take precedence.",
            rich_help_panel=RUN,
        ),
    ]
    examples = (f"  hardneg train {recipe} {flags}\n" for flags in EXAMPLES.get(recipe, ["--data digits --epochs 20"]))
    command.__doc__ = "\n".join([f"{options.__doc__}\n", "Examples:\n", *examples])
    shared = {one.name for one in fields(RECIPES["simclr"])}
    own = [one.name for one in fields(options) if one.name in vars(options) and one.name not in shared]
    return with_parameters(parameters, (*COMMON, *own))(command)
