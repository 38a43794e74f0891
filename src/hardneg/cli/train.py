"""`hardneg train RECIPE`: one flag for each option of a recipe, a YAML file for any of them, and where to write."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from hardneg.cli.errors import errors_for_people
from hardneg.cli.flags import CONTEXT, build, parameter, parameters_of, with_file, with_parameters
from hardneg.cli.options import RunOptions
from hardneg.core.text import printable
from hardneg.training.options import RECIPES, TrainOptions
from hardneg.training.options.base import RUN

EXAMPLES = {
    "simclr": """
  hardneg train simclr --data cifar10 --precision bf16 --compile

  hardneg train simclr --negatives "Tilt(1.0)" --tau-plus 0.1   (HCL)

  hardneg train simclr --tau-plus 0.1   (DCL)

  hardneg train simclr --batches "proximity(num_candidates=500)"   (ProSampler)

  hardneg train simclr --temperature "linear(0.5, 0.1)"   (a schedule)

  hardneg train simclr --config run.yaml --seed 1   (flags win over the file)

  hardneg train simclr --data cifar10 --resume   (resumes where it stopped)
""",
    "supervised": """
  hardneg train supervised --positives-in-denominator all   (SupCon)

  hardneg train supervised --num-negatives candidates --reduction pairs   (SCL)

  hardneg train supervised --negatives "OtherLabel() * Tilt(1.0)"   (a tilt)
""",
    "moco": """
  hardneg train moco --data cifar10 --queue 65536 --momentum 0.999 --epochs 200

  hardneg train moco --negatives "Ring(0.1, linear(1.0, 0.1), True)"   (Ring)

  hardneg train moco --version v3 --batch-size 1024 --momentum 0.99
""",
    "simcse": """
  hardneg train simcse --data text:sentences.txt --evaluate-with sts:sts.tsv

  hardneg train simcse --data "text:reviews.csv[review,stars]" --epochs 3

  hardneg train simcse --data text:a.txt --negatives "Tilt(1.0)"   (a tilt)

  hardneg train simcse --data text:a.txt --encoder st:MODEL --head mlp
""",
    "pairs": """
  hardneg train pairs --data "pairs:faq.jsonl[question,answer]"

  hardneg train pairs --data pairs:mined.parquet --encoder st:MODEL

  hardneg train pairs --data pairs:m.csv --negatives "Tilt(5, source='mined')"
""",
    "clip": """
  hardneg train clip --data "imagetext:photos.jsonl[image,caption]@64"

  hardneg train clip --data imagetext:FOLDER --encoder resnet18 --epochs 30

  hardneg train clip --data embeddings:pairs.npz --dim 256 --epochs 20
""",
    "quick-thoughts": """
  hardneg train quick-thoughts --data text:story.txt --batch-size 400
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
    "instance": """
  hardneg train instance --data cifar10 --num-draws 4096 --temperature 0.07

  hardneg train instance --data digits --negatives "Ring(0.1, 0.5)"   (IRing)

  hardneg train instance --negatives "SameCluster()" --clusters 20 --warmup 5
""",
    "cmc": """
  hardneg train cmc --data cifar10 --num-draws 4096 --temperature 0.07

  hardneg train cmc --data cifar10 --negatives "Ring(0.1, 0.5)"   (CMCRing)
""",
    "local-aggregation": """
  hardneg train local-aggregation --data cifar10 --warmup 10 --epochs 100

  hardneg train local-aggregation --negatives "Rank(0, 200)" --cluster-runs 10
""",
    "negative-cache": """
  hardneg train negative-cache --data cifar10 --cache 50000 --epochs 100

  hardneg train negative-cache --data text:sentences.txt --num-draws 4
""",
    "graphcl": """
  hardneg train graphcl --data graphs:MUTAG --batch-size 94

  hardneg train graphcl --data graphs:PROTEINS --negatives "Tilt(1.0)"   (HCL)

  hardneg train graphcl --augment "graphcl(first='none', ratio=0.1)"
""",
    "infograph": """
  hardneg train infograph --data graphs:MUTAG --batch-size 94

  hardneg train infograph --negatives "ClippedTilt(1.0)"   (HCL)
""",
}

train_app = typer.Typer(no_args_is_help=True, help="Train an encoder and evaluate it; see: train simclr --help")


def _command(recipe: str, options: type[TrainOptions]) -> Callable[..., None]:
    def command(ctx: typer.Context, config: Path | None, **values: Any) -> None:
        with errors_for_people("Nothing is lost: run the same command with --resume to continue."):
            values = with_file(ctx, "train", config, values, options, RunOptions)
            where, wanted = build(RunOptions, values, "train"), build(options, values, "train")
            from hardneg.cli.tables import show_evaluation
            from hardneg.training.recipes import run_recipe

            if where.resume and not (Path(where.out) / "config.json").exists():
                typer.echo(f"There is no run in {printable(where.out)} to resume: training starts anew.", err=True)
            how = {"resume": where.resume, "allow_other_data": where.allow_other_data}
            result = run_recipe(recipe, wanted, where.out, **how)
            if int(os.environ.get("RANK", 0)) == 0:  # of several ranks, the first speaks for all
                show_evaluation(result)
                typer.echo(f"run: {where.out}")

    parameters = [
        CONTEXT,
        *parameters_of(options),
        *parameters_of(RunOptions, out=f"runs/{recipe}"),
        parameter("config", Path | None, None, help="A YAML file with any of these options.", rich_help_panel=RUN),
    ]
    plain = f"\n  hardneg train {recipe} --data digits --epochs 20\n"
    command.__doc__ = f"{options.__doc__}\n\nExamples:\n{EXAMPLES.get(recipe, plain)}"
    return with_parameters(command, parameters)


for _recipe, _options in RECIPES.items():
    train_app.command(_recipe)(_command(_recipe, _options))
