"""Seconds an epoch of CIFAR-10 through the recipe on a GPU: SimCLR, ResNet-18, batch 256, bf16, diagnostics on.

    python benchmarks/training_gpu.py --root ../shared/data --epochs 6 --out runs/gpu

Prints each epoch as it comes: uniform batches, proximity batches from harvested embeddings, and from fresh encodings.
The first epoch compiles and is left out of the medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from hardneg.options import SimCLROptions
from hardneg.recipes import run_recipe
from hardneg.runs import environment, write_json

BATCHES = {
    "uniform": "uniform()",
    "harvested": "proximity(num_candidates=500, num_neighbours=100, refresh=100, warmup=1)",
    "encoded": "proximity(num_candidates=500, num_neighbours=100, refresh=100, warmup=1, encode=True)",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", default=None, help="where the packs of CIFAR-10 lie")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--only", nargs="*", default=list(BATCHES), choices=list(BATCHES))
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    args = parser.parse_args()
    figures = {}
    for name in args.only:
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
        seconds = result["epoch_seconds"]
        figures[name] = {
            "median": statistics.median(seconds[2:] or seconds),
            "epoch_seconds": seconds,
            "knn": result.get("knn"),
            "linear": result.get("linear"),
            "wall": time.perf_counter() - begun,
        }
        print(name, json.dumps(figures[name]), flush=True)
    write_json(args.out / "training_gpu.json", {"figures": figures, **environment()})


if __name__ == "__main__":
    main()
