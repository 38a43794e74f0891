"""Time and memory of the chunked streamed loss, forward and backward: any distribution, any dimension.

    python benchmarks/chunked.py                                              # the sizes of the targets, on a GPU
    python benchmarks/chunked.py --scale 64 --device cpu --dtype float32      # a small try anywhere

Two views of unit vectors in the batch, or anchors against a queue. "products" is the work that no method avoids: three
products of rows x columns x dim at the rate of a large product measured in the same run. Extra memory is the peak of a
step above what was held before it. ``--check`` compares losses and gradients with dense ones in float64.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

import hardneg as hn
from hardneg.core.objectives import InfoNCE, reduce
from hardneg.core.pairing import Pairing
from hardneg.core.scoring import dense
from hardneg.core.tiles import Tile
from hardneg.io.provenance import environment
from hardneg.kernels.engine import Tiles
from losses import ROOT, make_vectors, milliseconds, product_rate

TEMPERATURE = 0.5


@dataclass(frozen=True, repr=False)
class StudentT(hn.negatives.Negatives):
    """The distribution of docs/extend.md."""

    scale: float = 1.0
    power: float = 1.0
    removes: ClassVar = False

    def log_weight(self, tile: Tile) -> Tensor:
        squared_distance = (2.0 - 2.0 * tile.similarity).clamp(min=0.0)
        return -self.power * torch.log1p(squared_distance / self.scale)


@dataclass(frozen=True)
class Case:
    negatives: str
    rows: int
    dim: int
    queue: int = 0
    tau_plus: float = 0.0

    def __str__(self) -> str:
        return f"{self.negatives}, {self.rows} x {self.dim}" + (f" against {self.queue}" if self.queue else "")


CASES = (
    Case("Tilt(1.0)", 32768, 512, tau_plus=0.1),
    Case("Tilt(1.0)", 65536, 128),
    Case("StudentT()", 65536, 128),
    Case("Tilt(1.0)", 8192, 128, 65536),
    Case("Ring(0.1, outer=0.5)", 8192, 128, 65536),
    Case("Ring(0.1, outer=0.5, approximate=True)", 8192, 128, 65536),
)


parsed = lru_cache(hn.parse)
meeting = lru_cache(lambda negatives: hn.ContrastiveLoss(negatives, TEMPERATURE))


def pairing_of(case: Case, z: Tensor, queue: Tensor | None) -> Pairing:
    if queue is None:
        return meeting(case.negatives).pairing(*z.chunk(2))
    return meeting(case.negatives).pairing(z, z.detach().roll(1, 0), pool=queue)


def loss_of(case: Case, z: Tensor, queue: Tensor | None) -> Tensor:
    objective = InfoNCE(tau_plus=case.tau_plus)
    return Tiles().rows(pairing_of(case, z, queue), parsed(case.negatives), objective).loss(objective, "anchors")


def inputs(case: Case, options: argparse.Namespace) -> tuple[Tensor, Tensor | None]:
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    z = make_vectors(max(2, case.rows // options.scale), case.dim, dtype, device).requires_grad_()
    queue = make_vectors(case.queue // options.scale, case.dim, dtype, device) if case.queue else None
    return z, queue


def measure(case: Case, options: argparse.Namespace, rate: float) -> dict[str, Any]:
    z, queue = inputs(case, options)

    def step() -> Tensor:
        return torch.autograd.grad(loss_of(case, z, queue), z)[0]

    columns = len(z) if queue is None else len(queue)
    found: dict[str, Any] = {"case": str(case), "milliseconds": milliseconds(step, z.device)}
    found["products_milliseconds"] = 3 * 2.0 * len(z) * columns * case.dim / rate
    found["ratio"] = found["milliseconds"] / found["products_milliseconds"]
    with torch.no_grad():
        found["forward_milliseconds"] = milliseconds(lambda: loss_of(case, z, queue), z.device)
    if z.is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        found["extra_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    found["same_bits"] = torch.equal(step(), step())
    if options.kernels and z.is_cuda:
        found["kernels"] = kernels(step)
    return found


def kernels(step: Any) -> list[str]:
    """The kernels that took most of a step: milliseconds, calls, name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)[:12]
    return [f"{event.self_device_time_total / 1e3:8.3f} {event.count:5} {event.key[:110]}" for event in events]


def compare(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Relative errors of the loss and of the gradient, and the largest difference of a row's support."""
    z, queue = inputs(case, options)
    negatives, objective = hn.parse(case.negatives), InfoNCE(tau_plus=case.tau_plus)
    found = Tiles().rows(pairing_of(case, z, queue), negatives, objective)
    streamed = found.loss(objective, "anchors")
    wide, wide_queue = z.detach().double().requires_grad_(), None if queue is None else queue.double()
    scores = dense(pairing_of(case, wide, wide_queue))
    log_w = negatives.log_weights(scores)
    loss = reduce(objective.losses(scores, log_w), scores)
    mine, theirs = torch.autograd.grad(streamed, z)[0].double(), torch.autograd.grad(loss, wide)[0]
    support = (log_w != hn.NEVER).sum(-1)
    return {
        "case": str(case),
        "loss": abs(float(streamed.detach() / loss.detach()) - 1.0),
        "gradient": float((mine - theirs).norm() / theirs.norm()),
        "support": int((found.row.support[:, 0] - support).abs().max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--scale", type=int, default=1, help="divides the rows and the queue")
    parser.add_argument("--only", nargs="+", type=int, help="numbers of the cases")
    parser.add_argument("--check", action="store_true", help="compare with dense losses; use a scale of 16 or more")
    parser.add_argument("--kernels", action="store_true", help="print the kernels that take most of the time")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/chunked.json")
    options = parser.parse_args()
    cases = [case for i, case in enumerate(CASES) if not options.only or i in options.only]
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    rate = math.inf if options.check else product_rate(device, dtype)
    results = []
    for case in cases:
        found = compare(case, options) if options.check else measure(case, options, rate)
        for line in found.get("kernels", ()):
            print(line)
        print(json.dumps({name: value for name, value in found.items() if name != "kernels"}), flush=True)
        results.append(found)
    if not options.check:
        found = {"product_teraflops": rate / 1e9, "cases": results, "environment": environment()}
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
