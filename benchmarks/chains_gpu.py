"""Milliseconds of EMC2's chains on a GPU, 512 rows x 510 proposals, and of the losses around them, beside SimCLR's.

    python benchmarks/chains_gpu.py --out runs/chains.json

"chains" are the kernels of a batch (draws, steps, counts, state), "Chain.walk" is the call; "on the GPU" is the same
replayed as a CUDA graph, without what the host takes for the launches. Losses are forward and backward, float32.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hardneg as hn
from hardneg.core.scoring import two_views
from hardneg.io.files import write_json
from hardneg.io.provenance import environment
from hardneg.kernels.cuda_graphs import capture
from hardneg.losses.global_softmax import Replayed
from hardneg.state.chain import Chain

DEVICE = torch.device("cuda")


def milliseconds(work: Callable[[], object], repeats: int = 50) -> float:
    """The median of one call, the host waiting for each."""
    for _ in range(10):
        work()
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found)


def on_gpu(work: Callable[[], object]) -> float:
    def once() -> None:
        work()

    once()
    graph = capture(once, DEVICE)
    return float("nan") if graph is None else milliseconds(graph.replay)


def chains(rows: int, dim: int, steps: int) -> dict[str, float]:
    ids = torch.arange(rows, device=DEVICE)
    z1, z2 = torch.nn.functional.normalize(torch.randn(2, rows, dim, device=DEVICE), dim=-1)
    scores, chain = two_views(z1, z2, 0.07, ids), Chain(rows, num_views=2).to(DEVICE)
    slots = torch.cat([chain.slots(ids, view) for view in (0, 1)])
    views = torch.arange(2, device=DEVICE).repeat_interleave(rows)[None]

    def walk() -> object:
        return chain.walk(scores, slots, views=views, num_steps=steps)

    return {"Chain.walk": milliseconds(walk), "chains, on the GPU": on_gpu(walk)}


def losses(rows: int, dim: int, instances: int) -> dict[str, float]:
    vectors = torch.randn(2, rows, dim, device=DEVICE)
    ids = torch.randperm(instances, device=DEVICE)[:rows]
    z1, z2 = (each.requires_grad_() for each in torch.nn.functional.normalize(vectors, dim=-1))
    sogclr = hn.SogCLR(instances).to(DEVICE)
    emc2 = hn.EMC2(instances, remember=hn.Bank(instances, dim), num_steps=2 * rows - 2).to(DEVICE)
    calls: dict[str, Callable[..., Tensor]] = {
        "simclr": hn.ContrastiveLoss("Uniform()", normalize=False),
        "sogclr": sogclr,
        "sogclr, replayed": Replayed(sogclr),
        "emc2": emc2,
        "emc2, replayed": Replayed(emc2),
    }
    return {name: milliseconds(lambda call=call: call(z1, z2, ids).backward()) for name, call in calls.items()}  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/chains.json"))
    args = parser.parse_args()
    torch.manual_seed(0)
    figures: dict[str, Any] = {}
    for part in (lambda: chains(256, 128, 510), lambda: losses(256, 128, 50_000)):
        figures |= part()
        for name, value in figures.items():
            print(f"{name}: {value:.3f} ms", flush=True)
    write_json(args.out, {"milliseconds": figures, **environment()})


if __name__ == "__main__":
    main()
