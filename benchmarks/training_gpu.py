"""Seconds an epoch of CIFAR-10 through the recipe on a GPU: SimCLR, ResNet-18, batch 256, bf16, diagnostics on.

    python benchmarks/training_gpu.py --root DATA --pairs 6 --out runs/gpu

A pair is a run with uniform batches and one with proximity batches from harvested embeddings (or, with --against
encoded, from fresh encodings), one after the other, since the speed of a shared machine drifts; every second pair
begins with the other one. The first two epochs of each run compile and warm up, and are left out. Beside the ratio of
each pair stand the parts of the proximity run on the host, in milliseconds an epoch: planning, waiting for the graph,
starting its building, harvesting; and the building itself, which goes on in a thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from hardneg.training.loop.refreshing import PlanRefresher

from hardneg.batching import refresh
from hardneg.batching.refresh import Refresh
from hardneg.batching.sampler import PlannedBatchSampler
from hardneg.io.files import write_json
from hardneg.io.provenance import environment
from hardneg.training.loop.train import Loop
from hardneg.training.options import SimCLROptions
from hardneg.training.recipes import run_recipe

BATCHES = {
    "uniform": "uniform()",
    "harvested": "proximity(num_candidates=500, num_neighbours=100, refresh=100, warmup=1)",
    "encoded": "proximity(num_candidates=500, num_neighbours=100, refresh=100, warmup=1, encode=True)",
}
WARM_UP = 2
PARTS: dict[str, tuple[Any, str]] = {
    "planning": (PlannedBatchSampler, "_continued"),
    "waiting for the graph": (PlannedBatchSampler, "_source"),
    "waiting for the graph and its plan": (PlannedBatchSampler, "_from_process"),
    "planning, in the graph's thread": (Refresh, "_plan_next"),
    "starting the graph": (Refresh, "now"),
    "harvest and refresh": (PlanRefresher, "after_step"),
    "building the graph, in its thread": (refresh, "build_graph"),
}


@contextmanager
def timed_parts(spent: dict[str, float]) -> Iterator[None]:
    """Adds up the seconds that each part takes; forgets those of the first epochs."""
    before = {name: getattr(owner, method) for name, (owner, method) in PARTS.items()}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **how: Any) -> Any:
            begun = time.perf_counter()
            try:
                return call(*args, **how)
            finally:
                spent[name] += time.perf_counter() - begun

        return wrapped

    batches = Loop._batches

    def from_the_third_epoch(self: Loop, epoch: int) -> Any:
        if epoch == WARM_UP:
            spent.clear()
        return batches(self, epoch)

    try:
        Loop._batches = from_the_third_epoch  # type: ignore[method-assign]
        for name, (owner, method) in PARTS.items():
            setattr(owner, method, timed(name, before[name]))
        yield
    finally:
        Loop._batches = batches  # type: ignore[method-assign]
        for name, (owner, method) in PARTS.items():
            setattr(owner, method, before[name])


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
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
    spent: dict[str, float] = defaultdict(float)
    begun = time.perf_counter()
    with timed_parts(spent):
        result = run_recipe("simclr", options, args.out / f"{name}-{time.time_ns()}", quiet=True)
    seconds = result["epoch_seconds"][WARM_UP:] or result["epoch_seconds"]
    parts = {part: 1000.0 * spent[part] / len(seconds) for part in PARTS}
    return {
        "mean": statistics.mean(seconds),
        "epoch_seconds": result["epoch_seconds"],
        "parts_ms": parts,
        "knn": result.get("knn"),
        "wall": time.perf_counter() - begun,
        "gpu_reserved_GiB": torch.cuda.memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=None, help="folder of CIFAR-10 as published")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--against", default="harvested", choices=["harvested", "encoded"])
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    args = parser.parse_args()
    pairs: list[dict[str, Any]] = []
    for number in range(args.pairs):
        names = ["uniform", args.against]
        found = {name: run(name, args) for name in (names if number % 2 == 0 else names[::-1])}
        ratio = found[args.against]["mean"] / found["uniform"]["mean"]
        pairs.append({"ratio": ratio, **found})
        parts = ", ".join(f"{part} {ms:.0f} ms" for part, ms in found[args.against]["parts_ms"].items())
        seconds = " / ".join(f"{name} {found[name]['mean']:.3f} s" for name in names)
        print(f"pair {number + 1}: {100 * (ratio - 1):+.1f} % an epoch ({seconds}); {parts}", flush=True)
        figures = {"worst": max(pair["ratio"] for pair in pairs), "pairs": pairs}
        write_json(args.out / "training_gpu.json", {"figures": figures, **environment()})
    ratios = ", ".join(f"{100 * (pair['ratio'] - 1):+.1f}" for pair in pairs)
    worst = 100 * (max(pair["ratio"] for pair in pairs) - 1)
    print(f"all pairs: {ratios} %; worst {worst:+.1f} %. Wrote {args.out}/training_gpu.json.")


if __name__ == "__main__":
    main()
