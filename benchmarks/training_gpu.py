"""Seconds an epoch of CIFAR-10 through the recipe on a GPU: SimCLR, ResNet-18, batch 256, bf16, diagnostics on.

    python benchmarks/training_gpu.py --root DATA --epochs 9 --rounds 3 --out runs/gpu

Uniform batches, proximity batches from harvested embeddings, and from fresh encodings take turns, since the speed of a
shared machine drifts. The first two epochs of each run compile and warm up, and are left out of the means and medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from hardneg.io.files import write_json
from hardneg.io.provenance import environment
from hardneg.training.options import SimCLROptions
from hardneg.training.recipes import run_recipe

BATCHES = {
    "uniform": "uniform()",
    "harvested": "proximity(num_candidates=500, num_neighbours=100, refresh=100, warmup=1)",
    "encoded": "proximity(num_candidates=500, num_neighbours=100, refresh=100, warmup=1, encode=True)",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", default=None, help="where the packs of CIFAR-10 lie")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--only", nargs="*", default=list(BATCHES), choices=list(BATCHES))
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    args = parser.parse_args()
    rounds: dict[str, list[list[float]]] = {name: [] for name in args.only}
    figures = {}
    for name in args.only * args.rounds:
        options = SimCLROptions(
            data=args.data,
            data_root=args.root,
            epochs=args.epochs,
            batch_size=args.batch_size,
            batches=BATCHES[name],
            precision=args.precision,
            compile=not args.no_compile,
            save_every=args.epochs,
        )
        begun = time.perf_counter()
        result = run_recipe("simclr", options, args.out / f"{name}-{int(begun)}", quiet=True)
        rounds[name].append(result["epoch_seconds"])
        seconds = [one for run in rounds[name] for one in run[2:] or run]
        figures[name] = {
            "median": statistics.median(seconds),
            "mean": statistics.mean(seconds),
            "epoch_seconds": rounds[name],
            "knn": result.get("knn"),
            "linear": result.get("linear"),
            "wall": time.perf_counter() - begun,
        }
        print(name, json.dumps(figures[name]), flush=True)
    write_json(args.out / "training_gpu.json", {"figures": figures, **environment()})


if __name__ == "__main__":
    main()
