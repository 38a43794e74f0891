"""Augmentation of one batch of CIFAR, two views: ours, eager and compiled, beside kornia's, on CPU and on a GPU if any.

    python benchmarks/augment.py [--skip-cpu] [--batch 256]

First checks that the compiled views are the eager ones. Then all variants take turns for several rounds, and the median
is shown, with what it makes of an epoch of 50,000 images. On CPU the time is the processor's, so that other work on the
machine does not count; on a GPU it is the clock's, the device being waited for once per round. kornia is left out where
it is not installed. "random" and "fixed" are orders of the four colour operations: random per image, as torchvision
draws it (kornia draws one order per batch), or the same for all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hardneg.training.augmentation.augment import CIFAR, Augment, MakeImageViews
from hardneg.training.augmentation.views import AnyViews, OfBatches, kornia_transform

ROOT = Path(__file__).resolve().parent.parent
AGREEMENT = 2e-4  # of normalised pixels, whose unit is a quarter of the range


def main() -> None:
    options = read_options()
    torch.set_num_threads(options.threads)
    devices = [] if options.skip_cpu else ["cpu"]
    devices += ["cuda"] if torch.cuda.is_available() else []
    results = provenance() | {"options": {k: v for k, v in vars(options).items() if k != "out"}, "devices": {}}
    for device in devices:
        name = torch.cuda.get_device_name() if device == "cuda" else f"cpu, {options.threads} thread(s)"
        print(f"\n{name}: milliseconds per batch of {options.batch} x 2 views; seconds per epoch of 50,000 images")
        results["devices"][name] = on_device(device, options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n")


def on_device(device: str, options: argparse.Namespace) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (options.batch, 3, 32, 32), dtype=torch.uint8, generator=generator).to(device)
    ids = torch.arange(options.batch, device=device)
    variants, found = build(device, options, images, ids)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(options.rounds + 1):
        for name, views in variants.items():
            taken = seconds_per_batch(views, images, ids, device, options.batches)
            if number > 0:  # the first round warms up
                times[name].append(1000.0 * taken)
    for name, each in times.items():
        found[name] |= {"milliseconds": median(each), "rounds": each}
        note = ", ".join(
            f"{key} {value:.3g}" for key, value in found[name].items() if key not in ("milliseconds", "rounds")
        )
        print(f"  {name:28} {median(each):9.3f} ms {median(each) * 50 / options.batch:9.3f} s   {note}", flush=True)
    return found


def build(
    device: str, options: argparse.Namespace, images: torch.Tensor, ids: torch.Tensor
) -> tuple[dict[str, MakeImageViews], dict[str, dict[str, Any]]]:
    """The variants by name, and what is known of each besides its time."""
    variants: dict[str, MakeImageViews] = {}
    found: dict[str, dict[str, Any]] = {}
    for order in ("random", "fixed"):
        exact = replace(CIFAR, order=order)
        fast = replace(exact, dtype=torch.bfloat16, channels_last=True) if device == "cuda" else exact
        variants[f"ours, {order}, eager"], found[f"ours, {order}, eager"] = fast.views, {}
        if not options.skip_compile:
            name = f"ours, {order}, compiled"
            variants[name] = fast.compiled()
            found[name] = compile_cost(variants[name], images, ids) | {"difference": check(exact, images, ids)}
    try:
        variants["kornia"] = AnyViews(OfBatches(kornia_transform(CIFAR, (32, 32))))
        found["kornia"] = {}
        if device == "cuda":
            variants["kornia"] = AnyViews(OfBatches(kornia_transform(CIFAR, (32, 32)).to(device)))
    except ImportError:
        print("  (kornia is not installed and left out)")
    return variants, found


def check(augment: Augment, images: torch.Tensor, ids: torch.Tensor) -> float:
    """The largest difference of compiled and eager views, in normalised pixels; ends the program if it is large."""
    pairs = zip(augment.compiled()(images, ids, 3, 1), augment.views(images, ids, 3, 1), strict=True)
    difference = max((compiled - eager).abs().max().item() for compiled, eager in pairs)
    if not difference < AGREEMENT:
        sys.exit(f"The compiled views differ from the eager ones by {difference:g}, more than {AGREEMENT:g}.")
    return difference


def compile_cost(views: MakeImageViews, images: torch.Tensor, ids: torch.Tensor) -> dict[str, Any]:
    """Seconds to compile, and the number of kernels that the compiler made."""
    from torch._inductor import metrics

    metrics.reset()
    start = time.perf_counter()
    views(images, ids, 0, 0)
    return {"compile_seconds": time.perf_counter() - start, "kernels": metrics.generated_kernel_count}


def seconds_per_batch(
    views: Callable[..., Any], images: torch.Tensor, ids: torch.Tensor, device: str, batches: int
) -> float:
    clock = time.perf_counter if device == "cuda" else time.process_time
    if device == "cuda":
        torch.cuda.synchronize()
    start = clock()
    for epoch in range(batches):
        views(images, ids, epoch, 0)
    if device == "cuda":
        torch.cuda.synchronize()
    return (clock() - start) / batches


def provenance() -> dict[str, Any]:
    return {
        "command": " ".join(["python", "benchmarks/augment.py", *sys.argv[1:]]),
        "commit": git("rev-parse", "HEAD"),
        "uncommitted": bool(git("status", "--porcelain", "--", "src", "benchmarks/augment.py")),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "machine": {"system": platform.system(), "cores": os.cpu_count(), "load": os.getloadavg()[0]},
    }


def git(*arguments: str) -> str | None:
    if not shutil.which("git"):
        return None
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256, help="images (default 256)")
    parser.add_argument(
        "--batches", type=int, default=5, help="timed in each round (default 5; 100 on a GPU is better)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of torch on CPU (default 1)")
    parser.add_argument("--skip-cpu", action="store_true")
    parser.add_argument("--skip-compile", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "augment.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
