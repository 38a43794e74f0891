"""The proximity graph and the walks beside the authors' way of making them, in one run on the CPU.

    python benchmarks/global_batches.py            # two minutes on two idle cores; --quick for a small one

The graph: 50,000 x 128, M = 1000, K = 100, against independent gathers (each node its own random candidates, vectors
gathered, scored and sorted), with the best of three chunk sizes. The walks: a whole epoch's plan at restart 0.1, with
batches of 256 and of 2048, against as many walks the authors' way (row to a list, ``torch.rand(1)`` per step): walks
that ignore each other ("free", as theirs) and walks that take each instance once. The scale: 100,000 to 1,000,000
vectors of 64, M = 200, K = 32, each in a fresh process, for time and peak memory. Ours and theirs take turns; the best
of the rounds counts, on the clock and in processor time (other work on the machine disturbs the first more).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before torch comes in: threads that wait sleep, and spend no processor time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import normalize

from hardneg.batching.graph import ProximityGraph, build_graph
from hardneg.batching.planners import Proximity
from hardneg.batching.walks import Walker

ROOT = Path(__file__).resolve().parent.parent


def vectors_of(n: int, d: int) -> Tensor:
    """Unit vectors around n / 100 centres, the kind of data the graph is for."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(n // 100, d, generator=generator)
    own = torch.randint(len(centres), (n,), generator=generator)
    return normalize(centres[own] + torch.randn(n, d, generator=generator), dim=1)


def independent_gathers(vectors: Tensor, k: int, m: int, rows: int, nodes: int | None = None) -> Tensor:
    """Each node its own candidates, with replacement and itself allowed: one gather of [rows, m, d] per chunk."""
    found = []
    for own in torch.split(vectors[:nodes], rows):
        candidates = torch.randint(len(vectors), (len(own), m))
        scores = torch.bmm(vectors[candidates], own[:, :, None]).squeeze(2)
        found.append(candidates.gather(1, scores.topk(k).indices))
    return torch.cat(found)


def authors_walk(neighbours: Tensor, start: int, size: int, restart: float) -> set[int]:
    """One step: draw a tensor of one number, or turn the row into a list and choose from it."""
    batch, node = {start}, start
    while len(batch) < size:
        if torch.rand(1).item() < restart:
            node = start
        else:
            node = random.choice(neighbours[node].tolist())
            batch.add(node)
    return batch


def timed(work: Callable[[], Any]) -> dict[str, float]:
    clock, processor = time.perf_counter(), time.process_time()
    work()
    return {"clock_s": time.perf_counter() - clock, "processor_s": time.process_time() - processor}


def in_turns(works: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, float]]:
    """The best time of each, all of them in turn; what is quick is done again for a second, ten times at most."""
    best: dict[str, dict[str, float]] = {}
    for _ in range(rounds):
        for name, work in works.items():
            begun = time.perf_counter()
            for _ in range(10):
                spent = timed(work)
                best[name] = {unit: min(spent[unit], best.get(name, spent)[unit]) for unit in spent}
                if time.perf_counter() - begun > 1.0:
                    break
    return best


def ratios(times: dict[str, dict[str, float]], ours: str, theirs: str) -> dict[str, float]:
    return {unit.removesuffix("_s"): times[theirs][unit] / times[ours][unit] for unit in times[ours]}


def bench_graph(n: int, rounds: int) -> tuple[dict[str, Any], ProximityGraph]:
    vectors, k, m = vectors_of(n, 128), 100, 1000
    build_graph(vectors[:2000], k, m)

    def tried(rows: int) -> float:
        return timed(lambda: independent_gathers(vectors, k, m, rows, nodes=2048))["processor_s"]

    chunk = min((64, 256, 1024), key=tried)
    times = in_turns(
        {
            "hardneg": lambda: build_graph(vectors, k, m, torch.Generator().manual_seed(0)),
            "independent gathers": lambda: independent_gathers(vectors, k, m, chunk),
        },
        rounds,
    )
    result = {"n": n, "d": 128, "M": m, "K": k, "chunk_of_gathers": chunk, "times": times}
    result["faster"] = ratios(times, "hardneg", "independent gathers")
    return result, build_graph(vectors, k, m, torch.Generator().manual_seed(0))


class AuthorsWalker(Walker):
    """The authors' steps under our covering rule: through taken nodes, the same patience, the same filling."""

    def more(self, want: int, taken: Any, rng: Any, patience: int | None = None) -> Any:
        found, stale, node, neighbours = [], 0, self._start, self.table
        while len(found) < want and stale < (patience or 10_000):
            if torch.rand(1).item() < self.restart:
                node = self._start
                continue
            node = random.choice(neighbours[node].tolist())
            stale += 1
            if self._seen[node] != self._number:
                self._seen[node] = self._number
                if not taken[node]:
                    found.append(node)
                    stale = 0
        return np.array(found, dtype=np.int64)

    def excursions(self, starts: Any, moves: int, restart: float, rng: Any) -> Any:
        return super().excursions(starts, 0, restart, rng)  # nothing in advance


class AuthorsWalks(Proximity):
    def prepare(self, data: Any, batch_size: int, rng: Any) -> Walker:
        walker = AuthorsWalker(data)
        walker.table = data.neighbours
        return walker


def bench_walks(graph: ProximityGraph, size: int, rounds: int) -> dict[str, Any]:
    restart, starts = 0.1, torch.randperm(len(graph))[: len(graph) // size].tolist()

    def plan(planner: Proximity, coverage: str) -> Callable[[], Any]:
        return lambda: planner.plan(graph, size, torch.Generator().manual_seed(0), coverage=coverage, drop_last=True)

    works = {
        "hardneg, free": plan(Proximity(restart), "free"),
        "hardneg, once": plan(Proximity(restart), "once"),
        "authors' way, free": lambda: [authors_walk(graph.neighbours, start, size, restart) for start in starts],
        "authors' way, once": plan(AuthorsWalks(restart), "once"),
    }
    times = in_turns(works, rounds)
    return {
        "batch_size": size,
        "restart": restart,
        "batches": len(starts),
        "times": times,
        "faster": {
            name: ratios(times, name, f"authors' way, {name.split()[-1]}") for name in times if "authors" not in name
        },
    }


def bench_scale(sizes: list[int], rounds: int) -> dict[str, Any]:
    """Each size in a process of its own, since one keeps the peak of all it did; the best time, the worst peak."""
    found: dict[int, list[dict[str, float]]] = {n: [] for n in sizes}
    for n in sizes * rounds:
        command = [sys.executable, __file__, "--scale", str(n)]
        found[n].append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    runs = [
        {unit: (max if unit == "peak_GiB" else min)(run[unit] for run in found[n]) for unit in found[n][0]}
        for n in sizes
    ]
    growth = runs[-1]["processor_s"] / runs[0]["processor_s"]
    return {"M": 200, "K": 32, "d": 64, "runs": runs, "times_as_many": sizes[-1] / sizes[0], "times_as_long": growth}


def peak_gib() -> float:
    """The peak of this process. (On Linux ru_maxrss counts what the parent held, too.)"""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30


def one_scale(n: int) -> None:
    vectors = vectors_of(n, 64)
    spent = timed(lambda: build_graph(vectors, 32, 200, torch.Generator().manual_seed(0)))
    print(json.dumps({"n": n, **spent, "peak_GiB": peak_gib()}))


def show(results: dict[str, Any]) -> None:
    table = Table("what", "clock s", "processor s", "faster (clock)", "faster (processor)")
    theirs_of = {"graph": "independent gathers"}
    for title, part in [("graph", results["graph"]), *((f"walks of {w['batch_size']}", w) for w in results["walks"])]:
        for name, spent in part["times"].items():
            faster = part["faster"] if title == "graph" and name == "hardneg" else part["faster"].get(name)
            known = faster is not None and name != theirs_of.get(title)
            numbers = [f"{faster[unit]:.1f}x" if known else "" for unit in ("clock", "processor")]
            table.add_row(f"{title}: {name}", f"{spent['clock_s']:.3f}", f"{spent['processor_s']:.3f}", *numbers)
    for run in results["scale"]["runs"]:
        label = f"graph of {run['n']:,} x 64: peak {run['peak_GiB']:.2f} GiB"
        table.add_row(label, f"{run['clock_s']:.2f}", f"{run['processor_s']:.2f}", "", "")
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the size")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/global_batches.json")
    parser.add_argument("--scale", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(2)
    if options.scale:
        one_scale(options.scale)
        return
    random.seed(0)
    torch.manual_seed(0)
    n = 5_000 if options.quick else 50_000
    graph_result, graph = bench_graph(n, options.rounds)
    results = {
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip(),
        "machine": {"threads": 2, "processor": platform.processor() or platform.machine(), "torch": torch.__version__},
        "graph": graph_result,
        "walks": [bench_walks(graph, size, options.rounds) for size in (256, 2048)],
        "scale": bench_scale([10_000, 100_000] if options.quick else [100_000, 300_000, 1_000_000], options.rounds),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=2) + "\n")
    show(results)


if __name__ == "__main__":
    main()
