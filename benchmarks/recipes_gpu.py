"""Seconds an epoch of CIFAR-10 of each recipe on a GPU, and their ratio to SimCLR's: ResNet-18, batch 256, bf16.

    python benchmarks/recipes_gpu.py --root DATA --rounds 2 --out runs/recipes

The recipes take turns, since the speed of a shared machine drifts, and every second round goes backwards. The first two
epochs of a run compile and warm up, and are left out; so is the evaluation at the end.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from hardneg.io.files import write_json
from hardneg.io.provenance import environment
from hardneg.training.loop.train import Loop
from hardneg.training.options import RECIPES
from hardneg.training.recipes import run_recipe

WARM_UP = 2


def seconds_of(recipe: str, args: argparse.Namespace) -> list[float]:
    """Of each epoch."""
    options = RECIPES[recipe](
        data=args.data,
        data_root=args.root,
        epochs=args.epochs,
        batch_size=args.batch_size,
        precision=args.precision,
        compile=not args.no_compile,
        save_every=args.epochs,
    )
    result = run_recipe(recipe, options, args.out / f"{recipe}-{time.time_ns()}", quiet=True)
    seconds: list[float] = result["epoch_seconds"]
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=None, help="folder of CIFAR-10 as published")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--recipes", default="simclr,sogclr,emc2,moco")
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/recipes"))
    args = parser.parse_args()
    Loop.evaluate = lambda self, *splits: {}  # type: ignore[method-assign]
    names, found = args.recipes.split(","), {}
    for number in range(args.rounds):
        for name in names if number % 2 == 0 else names[::-1]:
            begun = time.perf_counter()
            seconds = seconds_of(name, args)
            found.setdefault(name, []).append(seconds)
            listed = " ".join(f"{one:.3f}" for one in seconds)
            print(f"{name}: {listed} s an epoch; {time.perf_counter() - begun:.0f} s in all", flush=True)
            figures = summary(found)
            write_json(args.out / "recipes_gpu.json", {"figures": figures, "epoch_seconds": found, **environment()})
    for name, figure in figures.items():
        ratio = f", {figure['ratio']:.2f} x SimCLR" if figure["ratio"] else ""
        print(f"{name}: {figure['median']:.3f} s an epoch{ratio}")


def summary(found: dict[str, list[list[float]]]) -> dict[str, Any]:
    medians = {
        name: statistics.median(second for run in runs for second in run[WARM_UP:] or run)
        for name, runs in found.items()
    }
    plain = medians.get("simclr")
    return {name: {"median": one, "ratio": plain and one / plain} for name, one in medians.items()}


if __name__ == "__main__":
    main()
